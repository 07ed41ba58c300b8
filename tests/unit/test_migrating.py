"""docs/migrating.md says what is there."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvdlite  # noqa: E402
import hvdlite_torch  # noqa: E402
from hvdlite.horovod_alias import MODULES  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")

TORCH = PAGE[PAGE.index("\n## horovod.torch\n") : PAGE.index("\n## horovod.tensorflow\n")]

# What `import horovod.torch` of Horovod 0.28.1 provides.
HOROVOD_TORCH = set(
    """
    elastic Compression allgather_object broadcast_object broadcast_optimizer_state
    broadcast_parameters allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce
    grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async
    allgather allgather_async grouped_allgather grouped_allgather_async broadcast
    broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter
    reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll
    synchronize init shutdown is_initialized start_timeline stop_timeline size local_size
    cross_size rank local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built
    gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet
    global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product
    HorovodInternalError DistributedOptimizer SyncBatchNorm
    """.split()
)

ROWS = {
    match[1]: (match[2] or "", match[3])
    for match in re.finditer(
        r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| (same|better|absent) \|", TORCH, re.MULTILINE
    )
}
CONSTANTS: dict[str, Any] = {
    "Average": hvdlite.Average,
    "Compression.none": hvdlite_torch.Compression.none,
    "global_process_set": hvdlite.global_process_set,
}


def _arguments(text: str) -> dict[str, Any]:
    """Return names and defaults, in order, of what the table says."""
    found = {}
    for item in filter(None, text.split(", ")):
        name, equals, default = item.partition("=")
        value: Any = inspect.Parameter.empty
        if equals:
            value = CONSTANTS[default] if default in CONSTANTS else ast.literal_eval(default)
        found[name] = value
    return found


def test_the_table_has_every_name() -> None:
    assert set(ROWS) == HOROVOD_TORCH


@pytest.mark.parametrize("name", ROWS)
def test_a_name_is_as_the_table_says(name: str) -> None:
    text, verdict = ROWS[name]
    if verdict == "absent":
        assert name not in hvdlite_torch.__all__
        return
    thing = getattr(hvdlite_torch, name)
    assert name in hvdlite_torch.__all__
    if not text and (not callable(thing) or isinstance(thing, type)):
        return
    wanted = _arguments(text)
    actual = {p.name: p.default for p in inspect.signature(thing).parameters.values()}
    assert list(actual)[: len(wanted)] == list(wanted)
    for argument, default in wanted.items():
        assert actual[argument] is default or actual[argument] == default, argument
    more = list(actual)[len(wanted) :]
    assert not more or verdict == "better", f"{name} takes {more} as well, so it is not the same"
    assert all(actual[argument] is not inspect.Parameter.empty for argument in more)


def test_what_is_new_is_listed() -> None:
    line = re.search(r"^New in hvdlite_torch: (.*)\.$", PAGE, re.MULTILINE)
    assert line is not None
    assert set(re.findall(r"`(\w+)`", line[1])) == set(hvdlite_torch.__all__) - set(ROWS)


def test_the_other_modules_have_these_names() -> None:
    listed = {
        match[1]: re.findall(r"`(\w+)`", match[2])
        for match in re.finditer(r"^\| `(horovod\.[\w.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
        if not match[1].startswith(("horovod.tensorflow", "horovod.keras"))
    }
    # Packages without names of their own have no row; test_migrating_tf looks at the others.
    wanted = {
        module
        for module, source in MODULES.items()
        if source.modules and not module.startswith(("horovod.tensorflow", "horovod.keras"))
    }
    assert set(listed) == wanted - {"horovod.torch"}
    script = f"""
import hvdlite, importlib
hvdlite.install_horovod_alias()
for module, names in {listed!r}.items():
    there = importlib.import_module(module)
    for name in names:
        getattr(there, name)
    assert not names or set(there.__all__) == set(names), (module, there.__all__)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
