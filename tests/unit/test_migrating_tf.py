"""What docs/migrating.md says of TensorFlow and Keras is what is there."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for _name in ("tensorflow", "keras"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"needs {_name}", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")

_BASIC = """
    init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank
    local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built
    nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet global_process_set
    add_process_set remove_process_set Average Sum Compression elastic
"""
# What the modules of Horovod 0.28.1 provide, without what begins with an underscore and what
# two helpers for variables of TensorFlow 1 are called.
HOROVOD = {
    "hvdlite_tf": _BASIC
    + """
    allgather_object broadcast_object broadcast_object_fn broadcast_variables allgather
    grouped_allgather broadcast broadcast_ alltoall join is_homogeneous rank_op local_rank_op
    size_op local_size_op process_set_included_op Adasum Min Max Product
    handle_average_backwards_compatibility check_num_rank_power_of_2 SyncBatchNormalization
    LocalGradientAggregationHelper allreduce reducescatter grouped_allreduce
    grouped_reducescatter broadcast_global_variables BroadcastGlobalVariablesHook
    DistributedOptimizer DistributedGradientTape PartialDistributedGradientTape
    """,
    "hvdlite_tf.keras": _BASIC
    + """
    callbacks DistributedOptimizer PartialDistributedOptimizer broadcast_global_variables
    allreduce allgather broadcast reducescatter load_model
    """,
    "hvdlite_tf.keras.callbacks": """
    BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback
    LearningRateWarmupCallback BestModelCheckpoint
    """,
}
SECTIONS = {
    "hvdlite_tf": "## horovod.tensorflow",
    "hvdlite_tf.keras": "## horovod.tensorflow.keras and horovod.keras",
    "hvdlite_tf.keras.callbacks": "### Callbacks",
}


def _section(title: str) -> str:
    match = re.search(rf"^{re.escape(title)}$(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None, title
    return match[1]


ROWS = {
    module: {
        match[1]: (match[2] or "", match[3])
        for match in re.finditer(
            r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| (same|better|absent) \|",
            _section(title),
            re.MULTILINE,
        )
    }
    for module, title in SECTIONS.items()
}

# TensorFlow takes long to import and stays out of this process. Defaults are told as they are
# written in the page.
_LOOK = f"""
import importlib, inspect, json
import hvdlite, hvdlite_tf, hvdlite_tf.keras
NAMED = [
    (hvdlite.Average, "Average"),
    (hvdlite.global_process_set, "global_process_set"),
    (hvdlite_tf.Compression.none, "Compression.none"),
]
def default(value):
    if value is inspect.Parameter.empty:
        return None
    return next((name for thing, name in NAMED if value is thing), repr(value))
found = {{}}
for module in {list(SECTIONS)!r}:
    there = importlib.import_module(module)
    found[module] = names = {{}}
    for name in there.__all__:
        thing = getattr(there, name)
        names[name] = None
        if callable(thing):
            try:
                parameters = inspect.signature(thing).parameters.values()
            except ValueError:
                continue
            names[name] = [
                [p.name, default(p.default), p.kind.name.startswith("VAR_")] for p in parameters
            ]
print(json.dumps(found))
"""


def _run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def _there() -> dict[str, dict[str, list[tuple[str, str | None, bool]] | None]]:
    found: dict[str, dict[str, list[tuple[str, str | None, bool]] | None]]
    found = json.loads(_run(_LOOK).splitlines()[-1])
    return found


def _arguments(text: str) -> dict[str, str | None]:
    """Return names and defaults, in order, of what the table says."""
    found: dict[str, str | None] = {}
    for item in filter(None, text.split(", ")):
        name, equals, default = item.partition("=")
        if not equals:
            found[name] = None
        elif default in ("Average", "global_process_set", "Compression.none"):
            found[name] = default
        else:
            found[name] = repr(ast.literal_eval(default))
    return found


@pytest.mark.parametrize("module", SECTIONS)
def test_the_table_has_every_name(module: str) -> None:
    assert set(ROWS[module]) == set(HOROVOD[module].split())


@pytest.mark.parametrize(("module", "name"), [(m, n) for m in SECTIONS for n in ROWS[m]])
def test_a_name_is_as_the_table_says(module: str, name: str) -> None:
    text, verdict = ROWS[module][name]
    there = _there()[module]
    assert (name in there) == (verdict != "absent")
    actual = there.get(name)
    if actual is None or (not text and name[0].isupper()):
        return
    wanted = _arguments(text)
    assert [argument for argument, _, _ in actual][: len(wanted)] == list(wanted)
    for argument, default, _ in actual[: len(wanted)]:
        # Keras's modules take the compressors of whatever backend there is.
        if (wanted[argument], default) == ("Compression.none", "None"):
            continue
        assert default == wanted[argument], argument
    more = actual[len(wanted) :]
    assert not more or verdict == "better", f"{name} takes {more} as well, so it is not the same"
    assert all(default is not None or is_variable for _, default, is_variable in more)


@pytest.mark.parametrize("module", ["hvdlite_tf", "hvdlite_tf.keras"])
def test_what_is_new_is_listed(module: str) -> None:
    line = re.search(rf"^New in {re.escape(module)}: (.*)\.$", PAGE, re.MULTILINE)
    assert line is not None
    listed = set(re.findall(r"`(\w+)`", line[1]))
    assert listed == set(_there()[module]) - set(ROWS[module])


def test_the_alias_has_these_names() -> None:
    found = {
        match[1]: re.findall(r"`(\w+)`", match[2])
        for match in re.finditer(
            r"^\| `(horovod\.(?:tensorflow|keras)[\w.]*)` \| (.*) \|$", PAGE, re.MULTILINE
        )
    }
    elsewhere = {
        "horovod.tensorflow": "hvdlite_tf",
        "horovod.tensorflow.mpi_ops": "hvdlite_tf",
        "horovod.tensorflow.keras": "hvdlite_tf.keras",
        "horovod.keras": "hvdlite_tf.keras",
        "horovod.tensorflow.keras.callbacks": "hvdlite_tf.keras.callbacks",
        "horovod.keras.callbacks": "hvdlite_tf.keras.callbacks",
    }
    # The table's names, those that only the alias has too.
    names = {
        module: [name for name, (_, verdict) in ROWS[source].items() if verdict != "absent"]
        for module, source in elsewhere.items()
    }
    names["horovod.tensorflow"] += [
        "handle_average_backwards_compatibility",
        "check_num_rank_power_of_2",
        "elastic",
    ]
    _run(f"""
import hvdlite, importlib
hvdlite.install_horovod_alias()
for module, names in {found!r}.items():
    there = importlib.import_module(module)
    for name in names:
        getattr(there, name)
    assert not names or set(there.__all__) == set(names), (module, there.__all__)
for module, source in {elsewhere!r}.items():
    there = importlib.import_module(module)
    assert set(importlib.import_module(source).__all__) <= set(there.__all__) | {{"callbacks"}}
    for name in {names!r}[module]:
        getattr(there, name)
        assert name in dir(there), name

import horovod.tensorflow as hvd
import horovod.keras
import hvdlite_tf.keras as hvdlite_keras
import horovod.tensorflow.keras
for name in hvdlite_keras.__all__:
    if name not in ("callbacks", "DistributedOptimizer"):
        thing = getattr(hvdlite_keras, name)
        assert getattr(horovod.keras, name) is getattr(horovod.tensorflow.keras, name) is thing
assert horovod.tensorflow.keras.DistributedOptimizer is hvdlite_keras.DistributedOptimizer
asked = dict()
hvdlite_keras.DistributedOptimizer = lambda *given, **named: asked.update(named, given=given)
half = hvd.Compression.fp16
horovod.keras.DistributedOptimizer("o", "n", "d", "s", half, True, 2.0, hvd.Sum, 3, None)
assert asked == dict(
    given=("o", "n", "d", "s", half, True, 2.0, hvd.Sum), num_groups=3, groups=None
), asked
try:
    horovod.keras.callbacks.BestModelCheckpoint("val_accuracy", 0, "max")
except TypeError as error:
    assert "save_weights_only" in str(error)
else:
    raise AssertionError
assert hvd.check_num_rank_power_of_2(4) and not hvd.check_num_rank_power_of_2(3)
average = hvd.handle_average_backwards_compatibility
assert average(None, False) is hvd.Sum and average(None, None) is hvd.Average
assert average(hvd.Max, None) is hvd.Max
import horovod
assert horovod.run is hvdlite.run
for stand_in in (
    lambda: hvd.elastic.run(print),
    lambda: hvd.elastic.TensorFlowState(variables=[]),
    lambda: hvd.elastic.TensorFlowKerasState(None),
    lambda: horovod.tensorflow.keras.elastic.KerasState(None),
    lambda: horovod.keras.elastic.CommitStateCallback(None, batches_per_commit=1),
    lambda: horovod.keras.elastic.UpdateBatchStateCallback(None),
    lambda: horovod.keras.elastic.UpdateEpochStateCallback(None),
):
    try:
        stand_in()
    except NotImplementedError as error:
        assert "docs/migrating.md" in str(error)
    else:
        raise AssertionError
for missing in ("BroadcastGlobalVariablesHook", "LocalGradientAggregationHelper"):
    try:
        getattr(hvd, missing)
    except AttributeError as error:
        assert "docs/migrating.md" in str(error)
    else:
        raise AssertionError(missing)
""")
