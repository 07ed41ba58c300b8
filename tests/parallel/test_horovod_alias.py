"""Scripts for Horovod run unchanged, and what they import is hvdlite or a clear error."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from .jobs import Job, run_python

pytest.importorskip("torch")

pytestmark = pytest.mark.whole_job

SCRIPTS = Path(__file__).parent / "horovod_scripts"
INSTALLED = """
    import hvdlite
    hvdlite.install_horovod_alias()
"""


def _alias(np, *arguments, files=None, seconds=60):
    """Run `python -m hvdlite.horovod arguments...`; return status, stdout and stderr."""
    job = Job(np, ["-m", "hvdlite.horovod", *map(str, arguments)], seconds, files=files)
    try:
        assert job.wait(seconds), job.output()
        return job.returncode, *job.output()
    finally:
        job.close()


@pytest.mark.parametrize("np", [2])
@pytest.mark.parametrize(
    "options",
    [[], ["--fp16-allreduce", "--gradient-predivide-factor=2"], ["--use-adasum", "--lr=0.1"]],
    ids=["plain", "fp16", "adasum"],
)
def test_a_training_script(np, options):
    status, out, err = _alias(np, SCRIPTS / "torch_digits.py", *options)
    assert status == 0, err
    assert "Warning" not in err
    found = re.findall(r"accuracy ([0-9.]+) %", out)
    assert len(found) == 4, out
    assert float(found[-1]) > 90, out


needs_tensorflow = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("tensorflow", "keras"))), reason="needs TensorFlow"
)


# Importing TensorFlow takes half a minute on a busy machine.
@needs_tensorflow
def test_a_loop_of_tensorflow():
    status, out, err = _alias(2, SCRIPTS / "tensorflow2_digits.py", seconds=180)
    assert status == 0, err
    accuracy = re.search(r"^accuracy ([0-9.]+) % on 2 rank\(s\)$", out, re.MULTILINE)
    assert accuracy is not None, out
    assert float(accuracy[1]) > 90, out
    assert "same weights: True\n" in out
    assert "saved model-1\n" in out


@needs_tensorflow
def test_a_fit_of_keras():
    status, out, err = _alias(2, SCRIPTS / "keras_digits.py", seconds=180)
    assert status == 0, err
    accuracy = re.search(r"^accuracy ([0-9.]+) % on 2 rank\(s\)$", out, re.MULTILINE)
    assert accuracy is not None, out
    assert float(accuracy[1]) > 90, out
    assert "same losses: True\n" in out
    assert "saved " + str([f"checkpoint-{n}.keras" for n in range(1, 5)]) + " Adam\n" in out


def test_a_synthetic_benchmark():
    status, out, err = _alias(2, SCRIPTS / "torch_synthetic_benchmark.py", "--num-iters=2")
    assert status == 0, err
    assert "Number of ranks: 2" in out
    assert re.search(r"Total img/sec on 2 rank\(s\): [0-9.]+", out)


def test_arguments_modules_and_failures():
    files = {
        "script.py": "import sys, horovod, beside; print(sys.argv, horovod.__version__, __name__)",
        "beside.py": "",
    }
    status, out, err = _alias(None, "script.py", "a", "--force", files=files)
    assert (status, out) == (0, "['script.py', 'a', '--force'] 0.28.1 __main__\n"), err
    status, out, err = _alias(None, "-m", "script", "b", files=files)
    assert status == 0, err
    assert re.fullmatch(r"\['.*script.py', 'b'\] 0.28.1 __main__\n", out)
    status, _, err = _alias(None, "nowhere.py")
    assert status == 1
    assert "there is no script 'nowhere.py'" in err
    status, out, _ = _alias(None, "--help")
    assert status == 0
    assert "usage: python -m hvdlite.horovod" in out
    status, _, err = _alias(None)
    assert status == 2
    assert "usage:" in err
    status, _, err = _alias(None, "--nonsense", "x.py")
    assert status == 1
    assert "unknown option --nonsense" in err
    status, _, err = _alias(None, "script.py", files={"script.py": "raise KeyError('gone')"})
    assert status == 1
    assert "KeyError: 'gone'" in err


def test_names_are_hvdlites_own():
    result = run_python(
        INSTALLED
        + """
    import sys
    import horovod
    assert horovod.__version__ == "0.28.1"
    assert "torch" not in sys.modules
    import horovod.torch as hvd
    assert horovod.torch is hvd
    import hvdlite_torch
    for name in hvdlite_torch.__all__:
        assert getattr(hvd, name) is getattr(hvdlite_torch, name), name
        assert name in dir(hvd)
    from horovod.torch.mpi_ops import allreduce, HorovodInternalError, rank, Average
    from horovod.torch.compression import Compression, FP16Compressor
    from horovod.torch.functions import broadcast_object, allgather_object
    from horovod.torch.optimizer import DistributedOptimizer
    from horovod.torch.sync_batch_norm import SyncBatchNorm
    from horovod.common.exceptions import HorovodInternalError as error, HostsUpdatedInterrupt
    from horovod.common.process_sets import ProcessSet, global_process_set, add_process_set
    from horovod.common.basics import HorovodBasics
    from horovod.common.util import env, gpu_available, split_list
    import horovod.common.elastic, horovod.runner.common.util
    assert allreduce is hvdlite_torch.allreduce
    assert error is HorovodInternalError is hvdlite.HvdliteInternalError
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    basics = HorovodBasics(__file__, "mpi_lib")
    basics.init()
    assert (basics.rank(), basics.size(), basics.mpi_built()) == (0, 1, True)
    basics.shutdown()
    assert not {"tensorflow", "keras"} & set(sys.modules)
    hvdlite.install_horovod_alias()  # again: nothing
    assert sum(type(f).__module__ == "hvdlite.horovod_alias" for f in sys.meta_path) == 1
    scope = {}
    exec("from horovod.torch import *", scope)
    assert scope["DistributedOptimizer"] is DistributedOptimizer
    """
    )
    assert result.returncode == 0, result


def test_missing_names_say_so():
    result = run_python(
        INSTALLED
        + """
    import horovod.torch as hvd
    for kind, text in [
        (ImportError, "from horovod.torch import nonsense"),
        (ImportError, "from horovod.torch.mpi_ops import nonsense"),
        (ImportError, "import horovod.spark"),
        (ImportError, "import horovod.torch.nonsense"),
        (ImportError, "from horovod import ray"),
        (ImportError, "from horovod.common.util import nonsense"),
        (AttributeError, "hvd.nonsense"),
        (NotImplementedError, "hvd.elastic.TorchState(model=None)"),
        (NotImplementedError, "hvd.elastic.ElasticSampler([])"),
        (NotImplementedError, "hvd.elastic.run(print)"),
        (NotImplementedError, "class S(hvd.elastic.TorchState): pass\\nS()"),
    ]:
        try:
            exec(text)
        except kind as error:
            assert "docs/migrating.md" in str(error), (text, error)
        else:
            raise AssertionError(text)
    assert not hasattr(hvd, "nonsense")
    assert not hasattr(hvd, "__wrapped__")
    """
    )
    assert result.returncode == 0, result


def test_a_real_horovod_is_not_hidden(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("real = True\n")
    result = run_python(
        f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import hvdlite
    for _ in range(2):
        try:
            hvdlite.install_horovod_alias()
        except ImportError as error:
            assert "is installed" in str(error) and "force=True" in str(error), error
        else:
            raise AssertionError
        import horovod
        assert horovod.real
    hvdlite.install_horovod_alias(force=True)
    import horovod
    assert horovod.__version__ == "0.28.1" and not hasattr(horovod, "real")
    """
    )
    assert result.returncode == 0, result


def test_a_folder_of_that_name_is_in_nobodys_way(tmp_path):
    (tmp_path / "horovod").mkdir()
    result = run_python(
        f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})
    import hvdlite
    hvdlite.install_horovod_alias()
    import horovod.common.util
    """
    )
    assert result.returncode == 0, result
