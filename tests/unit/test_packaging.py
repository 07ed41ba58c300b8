"""What the packages look like from outside: versions, types, imports."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hvdlite
import hvdlite_tf

ROOT = Path(__file__).parents[2]


def test_the_version_is_the_same_everywhere() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert found
    assert found[1] == hvdlite.__version__


@pytest.mark.parametrize("package", ["hvdlite", "hvdlite_torch", "hvdlite_tf"])
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_importing_brings_no_framework_and_starts_no_mpi() -> None:
    code = """
import sys, hvdlite, hvdlite_tf
loaded = sorted({"torch", "tensorflow", "keras", "mpi4py.MPI"} & set(sys.modules))
sys.exit(f"imported {loaded}" if loaded else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_without_tensorflow_the_adapter_says_what_to_install() -> None:
    code = """
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None  # as if they were not installed
import hvdlite_tf
assert hvdlite_tf.Average.name == "AVERAGE"
try:
    from hvdlite_tf import DistributedGradientTape
except ImportError as error:
    sys.exit(0 if "pip install 'hvdlite[tensorflow]'" in str(error) else str(error))
sys.exit("no error")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_lazy_adapter_is_an_ordinary_module_to_tools() -> None:
    assert not hasattr(hvdlite_tf, "__wrapped__")
    assert {"DistributedOptimizer", "DistributedGradientTape"} <= set(dir(hvdlite_tf))


@pytest.mark.parametrize(
    ("package", "other"), [("hvdlite_tf.ops", "torch"), ("hvdlite_torch", "tensorflow")]
)
def test_an_adapter_does_not_import_the_other_framework(package: str, other: str) -> None:
    if importlib.util.find_spec("tensorflow" if other == "torch" else "torch") is None:
        pytest.skip("the adapter's own framework is not installed")
    code = f"import sys, {package}; sys.exit({other!r} in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
