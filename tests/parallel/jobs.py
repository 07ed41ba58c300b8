"""Starts MPI jobs from tests and never leaves one behind.

Nothing here imports MPI: the process that starts jobs must not be part of one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "FOLDER",
    "Job",
    "JobResult",
    "is_open_mpi",
    "mpirun",
    "run_job",
    "run_python",
    "slower",
    "tail",
]

FOLDER = "HVDLITE_TEST_FOLDER"
"""Variable that tells a job's processes where to write what they have to say."""

_TOKEN = "HVDLITE_TEST_TOKEN"
_SHARED_MEMORY = Path("/dev/shm")
_REPOSITORY = Path(__file__).resolve().parents[2]
# A job that believes it was started by another job's launcher does not start at all.
_IDENTITY = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPIEXEC_", "HYDI_")
_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_", "PRTE_MCA_", "PMIX_MCA_")

_JOBTOOLS = '''
"""What a script of a test uses to tell the test something."""
import json, os

def say(rank, **values):
    line = json.dumps(values) + "\\n"
    path = os.path.join(os.environ["HVDLITE_TEST_FOLDER"], f"said{rank}.jsonl")
    with open(path, "a") as file:
        file.write(line)
'''


def slower(seconds: float) -> float:
    """Stretch a time limit by HVDLITE_TEST_SLOWER, for machines that need it."""
    return seconds * float(os.environ.get("HVDLITE_TEST_SLOWER", "1"))


def tail(text: str, lines: int = 60) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.splitlines()[-lines:])


def mpirun() -> list[str]:
    chosen = os.environ.get("HVDLITE_TEST_MPIRUN")
    if chosen:
        return shlex.split(chosen)
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists():
        return [str(beside)]
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise RuntimeError("no mpirun next to python nor in PATH; set HVDLITE_TEST_MPIRUN")
    return [found]


@functools.cache
def is_open_mpi(launcher: str) -> bool:
    told = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30)
    return "Open MPI" in told.stdout + told.stderr or "PRRTE" in told.stdout + told.stderr


def _launch(np: int) -> list[str]:
    command = mpirun()
    if is_open_mpi(command[0]):
        return [*command, "-np", str(np), "--oversubscribe", "--bind-to", "none"]
    return [*command, "-n", str(np), "-bind-to", "none"]


def _python_path() -> str:
    """Let jobs import the same hvdlite as this process would, installed or not."""
    spec = importlib.util.find_spec("hvdlite")
    places = [str(_REPOSITORY)]
    if spec is not None and spec.origin is not None:
        places = [str(Path(spec.origin).parents[1])]
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*places, *([inherited] if inherited else [])])


def _environment(folder: Path, token: str, extra: Mapping[str, str | None]) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_IDENTITY) or name.startswith(_SETTINGS)
    }
    # Unbuffered output is written in fragments, which mpirun then mixes.
    environment.pop("PYTHONUNBUFFERED", None)
    environment |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": environment.get("OMPI_MCA_osc", "^ucx"),
        # Looking for fabrics takes MPI_Init a second, and these tests use none.
        "OMPI_MCA_btl": environment.get("OMPI_MCA_btl", "^ofi"),
        "OMPI_MCA_mtl": environment.get("OMPI_MCA_mtl", "^ofi"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([_python_path(), str(folder)]),
        "TMPDIR": str(folder),
        FOLDER: str(folder),
        _TOKEN: token,
    }
    for name, value in extra.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


def _processes_of(token: str) -> Iterator[int]:
    """Find a job's processes, wherever in the process tree they ended up."""
    wanted = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = entry.joinpath("stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
            if alive and wanted in entry.joinpath("environ").read_bytes().split(b"\0"):
                yield int(entry.name)


class _Segments:
    """Removes the shared memory that MPI leaves behind when its processes are killed.

    It may be all of a container's 64 MiB after a few tests.
    """

    def __init__(self) -> None:
        self._began = time.time()
        self._own: Path | None = None
        self.environment: dict[str, str] = {}
        if _SHARED_MEMORY.is_dir():
            self._own = Path(tempfile.mkdtemp(prefix="hvdt", dir=_SHARED_MEMORY))
            self.environment["OMPI_MCA_btl_sm_backing_directory"] = str(self._own)

    def clean(self) -> None:
        if self._own is None:
            return
        shutil.rmtree(self._own, ignore_errors=True)
        # MPICH has no such setting: what nobody maps and came while the job ran was the job's.
        found = [path for path in _SHARED_MEMORY.glob("mpich_shm_*") if self._is_ours(path)]
        if found:
            mapped = "".join(_read(entry / "maps") for entry in Path("/proc").glob("[0-9]*"))
            for path in found:
                if str(path) not in mapped:
                    path.unlink(missing_ok=True)

    def _is_ours(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            return status.st_uid == os.getuid() and status.st_ctime >= self._began
        return False


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


@dataclass(repr=False)
class JobResult:
    """How a job ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    left_behind: int
    """Processes that were still there when the launcher had gone."""
    said: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """What each rank said through `jobtools.say`."""

    def __repr__(self) -> str:
        return (
            f"status {self.returncode} after {self.seconds:.1f} s"
            f"{' (TIMED OUT)' if self.timed_out else ''}, {self.left_behind} left behind\n"
            f"said: {self.said}\n--- stdout\n{tail(self.stdout)}\n--- stderr\n{tail(self.stderr)}"
        )


class Job:
    """One running command with its own temporary folder, process group and deadline.

    The folder is short-lived: read what you need before `close()`.
    """

    def __init__(
        self,
        np: int | None,
        arguments: Sequence[str],
        deadline: float,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        files: Mapping[str, str] | None = None,
        launcher: Sequence[str] | None = None,
    ) -> None:
        """Start `python arguments...` on `np` ranks, or without a launcher if `np` is None.

        `launcher` is the beginning of the command line, in place of the usual mpirun.
        """
        # Short, because MPI puts sockets there and their paths may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="hvdt", dir="/tmp"))
        for name, text in {"jobtools.py": _JOBTOOLS, **(files or {})}.items():
            self.folder.joinpath(name).write_text(text)
        self._token = uuid.uuid4().hex
        self._segments = _Segments()
        env = {**self._segments.environment, **(env or {})}
        command = [sys.executable, *arguments]
        if launcher is not None:
            command = [*launcher, *command]
        elif np is not None:
            command = [*_launch(np), *command]
        guard = shutil.which("timeout")
        if guard is not None:  # ends the job even where this process is killed first
            command = [guard, "--kill-after=5", str(deadline + 15), *command]
        self.started = time.monotonic()
        with (
            self.folder.joinpath("out").open("wb") as out,
            self.folder.joinpath("err").open("wb") as err,
        ):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=_environment(self.folder, self._token, env),
                cwd=cwd or self.folder,
                start_new_session=True,
            )

    @property
    def returncode(self) -> int | None:
        """The launcher's exit status, None while it runs."""
        return self._process.poll()

    def output(self) -> tuple[str, str]:
        """Return what the job has written to stdout and stderr so far."""
        out, err = (
            self.folder.joinpath(name).read_text(errors="replace") for name in ("out", "err")
        )
        return out, err

    def wait(self, seconds: float) -> bool:
        """Return whether the launcher ended within so many seconds."""
        try:
            self._process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def said(self) -> dict[int, list[dict[str, Any]]]:
        """Return what each rank has said so far."""
        return _said(self.folder)

    def processes(self) -> list[int]:
        """Return the ids of the job's living processes."""
        return list(_processes_of(self._token))

    def signal(self, number: int, only: Container[int] | None = None) -> None:
        """Send a signal to the job's living processes, or to those of them named by id."""
        for pid in self.processes():
            if only is None or pid in only:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """End whatever is left of the job."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self.wait(2)
        # Launchers give their children process groups of their own.
        self.signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the job and delete its folder."""
        self.kill()
        self._segments.clean()
        shutil.rmtree(self.folder, ignore_errors=True)


def _said(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        int(path.stem.removeprefix("said")): [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in sorted(folder.glob("said*.jsonl"))
    }


def run_job(
    np: int | None,
    script: str | Path,
    timeout: float = 30,
    env: Mapping[str, str | None] | None = None,
    arguments: Sequence[str] = (),
    launcher: Sequence[str] | None = None,
    meanwhile: Callable[[Job], object] | None = None,
) -> JobResult:
    """Run a whole script as a job and return how it ended.

    Args:
        np: number of ranks; None starts plain `python script` without a launcher.
        script: path of a file, or the text of one (which is dedented).
        timeout: seconds after which the job is ended by force.
        env: variables to add; None as a value removes one.
        arguments: the script's own arguments.
        launcher: the beginning of the command line, in place of the usual mpirun.
        meanwhile: called with the job right after its start.

    Returns:
        Status, output, duration, and what ranks said: in a script,
        `from jobtools import say; say(rank, key=value)` adds to `result.said[rank]`.
    """
    timeout = slower(timeout)
    with tempfile.TemporaryDirectory(prefix="hvds", dir="/tmp") as place:
        if not isinstance(script, Path):
            text, script = script, Path(place, "script.py")
            script.write_text(textwrap.dedent(text))
        job = Job(np, [str(script), *arguments], timeout, env, launcher=launcher)
        try:
            if meanwhile is not None:
                meanwhile(job)
            ended = job.wait(timeout)
            seconds = time.monotonic() - job.started
            deadline = time.monotonic() + 2
            while ended and job.processes() and time.monotonic() < deadline:
                time.sleep(0.02)  # the launcher's own helpers take a moment to go
            left = len(job.processes())
            job.kill()
            assert job.returncode is not None
            out, err = job.output()
            return JobResult(job.returncode, out, err, seconds, not ended, left, _said(job.folder))
        finally:
            job.close()


def run_python(
    script: str | Path,
    timeout: float = 30,
    env: Mapping[str, str | None] | None = None,
    arguments: Sequence[str] = (),
) -> JobResult:
    """Run a script by plain `python`, without mpirun."""
    return run_job(None, script, timeout, env, arguments)
