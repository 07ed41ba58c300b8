"""Whole jobs through `hvdlite run`, `hvdlite.run` and `hvdlite doctor`, with a real mpirun."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from inspect import getsource
from pathlib import Path

import pytest

import hvdlite
from hvdlite.cli import mpi
from hvdlite.cli.problems import LaunchProblem

from ..mappings import asks_for_huge_pages

pytest.importorskip("click")

ROOT = Path(__file__).parents[2]
LIMIT = 60 * float(os.environ.get("HVDLITE_TEST_SLOWER", "1"))
pytestmark = pytest.mark.timeout(3 * LIMIT)


def glibc_asks_for_huge_pages() -> bool:
    """Return whether it can, and whether it has any need to."""
    with contextlib.suppress(ValueError, OSError):  # another C library does not know the name
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        knows = name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
        return knows and "[madvise]" in enabled
    return False


@pytest.fixture(scope="module")
def library() -> mpi.Library:
    try:
        found = mpi.load_library()
        mpi.choose(mpi.find_launchers(mpi.candidates(library=found.path)), found)
    except LaunchProblem as error:
        pytest.skip(str(error))
    return found


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HVDLITE_", "HOROVOD_", "SLURM_"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def run(
    words: Sequence[str], command: str = "run", **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdlite", command, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A job whose last rank ends as its argument says, while the others wait for it."""
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
        import os, signal, sys
        import numpy as np
        import hvdlite as hvd

        hvd.init()
        total = hvd.allreduce(np.full(2, 1.0 + hvd.rank()), op=hvd.Sum)
        print("total", total.tolist())
        print("careful", file=sys.stderr)
        if hvd.rank() == hvd.size() - 1:
            match sys.argv[1:]:
                case ["raise"]:
                    raise ValueError("the seventh seal")
                case ["exit", status]:
                    sys.exit(int(status))
                case ["os_exit", status]:
                    os._exit(int(status))
                case ["kill"]:
                    os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1:]:
            hvd.barrier()
        """)
    )
    return path


def test_a_job_runs_and_says_who_says_what(
    library: mpi.Library, script: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    done = run(["-np", "3", "--output-filename", str(folder), "python", str(script)])
    assert done.returncode == 0, done.stderr
    expected = [f"[{r}] total [6.0, 6.0]" for r in range(3)]
    assert sorted(done.stdout.splitlines()) == expected
    for r in range(3):
        assert f"[{r}] careful" in done.stderr
        assert (folder / f"rank.{r}/stdout").read_text() == "total [6.0, 6.0]\n"
        assert (folder / f"rank.{r}/stderr").read_text() == "careful\n"


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["raise"], 1, "ValueError: the seventh seal"),
        (["exit", "3"], 3, r"sys\.exit\(3\)"),
        (["os_exit", "4"], 4, "Rank 1 on .* ended with status 4"),
        (["kill"], 137, "Rank 1 on .* was ended by SIGKILL"),
    ],
)
def test_the_first_bad_status_and_the_ranks_own_words_come_last(
    library: mpi.Library, script: Path, arguments: list[str], status: int, text: str
) -> None:
    done = run(["-np", "2", "python", str(script), *arguments])
    assert done.returncode == status, done.stderr
    _, found, summary = done.stderr.rpartition("hvdlite run: Rank 1 on ")
    assert found, done.stderr
    assert re.search(text, found + summary), done.stderr
    if arguments == ["raise"]:
        # After that word of the launcher there is nothing but the traceback of this rank.
        words = summary.split("wrote to stderr:\n\n")[1].splitlines()
        assert words[0] == "Traceback (most recent call last):"
        assert not [line for line in words if line.startswith("[0]")]


def test_a_program_that_ends_without_mpi(library: mpi.Library) -> None:
    code = "import os, sys; r = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK'))"
    done = run(["-np", "2", "python", "-c", f"{code}; print(r); sys.exit(5 * (r == '1'))"])
    assert done.returncode == 5
    assert "Rank 1 on" in done.stderr


@pytest.mark.parametrize("given", ["hello\n", None])
def test_input_is_rank_0s(library: mpi.Library, given: str | None) -> None:
    code = "import sys; print(repr(sys.stdin.readline()))"
    done = subprocess.run(
        [sys.executable, "-m", "hvdlite", "run", "-np", "2", "python", "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
        **({"stdin": subprocess.DEVNULL} if given is None else {"input": given}),
    )
    assert sorted(done.stdout.splitlines()) == [f"[0] {given or ''!r}", "[1] ''"]


@pytest.mark.skipif(
    not glibc_asks_for_huge_pages(), reason="the C library asks for huge pages in no case here"
)
@pytest.mark.parametrize("value", ["1", "0"])
def test_memory_of_ranks_is_on_huge_pages(library: mpi.Library, value: str) -> None:
    """What is asked for shows in the mapping of a large piece of memory."""
    program = """
        import ctypes
        memory = bytearray(2**23)
        middle = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 2**22
        print("asked:", asks_for_huge_pages(middle))
    """
    program = getsource(asks_for_huge_pages) + textwrap.dedent(program)
    words = ["-np", "2", "python", "-c", program]
    done = run(words, HVDLITE_HUGE_PAGES=value, GLIBC_TUNABLES="")
    assert done.stdout.count(f"asked: {value == '1'}") == 2, done


# -- signals ----------------------------------------------------------------------------------


@contextlib.contextmanager
def started(tmp_path: Path, mode: str) -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """Start two ranks that wait, and hand out the launcher and the ranks' process ids."""
    path = tmp_path / "wait.py"
    path.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        if sys.argv[1] == "handle":
            signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
        if sys.argv[1] == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", os.getpid(), flush=True)
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline:
            signal.sigtimedwait([], 1)
        """)
    )
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdlite", "run", "-np", "2", "python", str(path), mode],
            stdout=file,
            stderr=file,
            text=True,
            env=environment(),
            stdin=subprocess.DEVNULL,
        )
    try:
        deadline = time.monotonic() + LIMIT
        ids: list[int] = []
        while len(ids) < 2:
            assert time.monotonic() < deadline, output.read_text()
            assert process.poll() is None, output.read_text()
            ids = [int(one) for one in re.findall(r"ready (\d+)", output.read_text())]
            time.sleep(0.02)
        yield process, ids, output
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_end(ids: Sequence[int], seconds: float = 20) -> list[int]:
    deadline = time.monotonic() + seconds
    while any(map(alive, ids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in ids if alive(pid)]


@pytest.mark.parametrize(("mode", "status"), [("handle", 0), ("default", 143)])
def test_sigterm_reaches_the_ranks(
    library: mpi.Library, tmp_path: Path, mode: str, status: int
) -> None:
    with started(tmp_path, mode) as (process, ids, output):
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == status, output.read_text()
        assert output.read_text().count("saved") == (2 if mode == "handle" else 0)
        assert await_end(ids) == []


def test_the_second_signal_kills(library: mpi.Library, tmp_path: Path) -> None:
    with started(tmp_path, "ignore") as (process, ids, output):
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LIMIT
        while "passed on" not in output.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 137, output.read_text()
        assert time.monotonic() - begin < 15  # and not the 30 s of grace
        assert await_end(ids) == []


def test_ranks_do_not_outlive_a_launcher_that_is_killed(
    library: mpi.Library, tmp_path: Path
) -> None:
    with started(tmp_path, "ignore") as (process, ids, _):
        process.kill()
        process.wait()
        assert await_end(ids) == []


# -- stand-ins for mpirun and srun ----------------------------------------------------------


def fake_launcher(path: Path, library: mpi.Library, body: str) -> str:
    """Write a launcher that says that it is of the library's MPI, and then does something."""
    versions = {"Open MPI": f"mpirun (Open MPI) {library.version}"}
    version = versions.get(library.vendor, f"HYDRA build details:\n Version: {library.version}")
    path.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo '{version}'; exit;;"
        f" --mpi=list) echo none pmi2 pmix; exit;; esac\n"
        f'while [ "$1" != "{sys.executable}" ]; do shift; done\n{body}\n'
    )
    path.chmod(0o755)
    return str(path)


def rank_of(number: int) -> str:
    return f'env PMIX_RANK={number} PMIX_SIZE=2 "$@"'


def test_status_0_of_mpirun_is_not_believed(library: mpi.Library, tmp_path: Path) -> None:
    fake = fake_launcher(tmp_path / "mpirun", library, f"{rank_of(0)}; exit 0")
    done = run(["-np", "2", "--mpirun", fake, "sh", "-c", "echo fine"])
    assert done.returncode == 1
    assert "[0] fine" in done.stdout
    assert "Rank 1 on ? never started" in done.stderr


def test_ranks_that_do_not_start_in_time_are_named(library: mpi.Library, tmp_path: Path) -> None:
    fake = fake_launcher(tmp_path / "mpirun", library, rank_of(0))
    flags = ["-np", "2", "--mpirun", fake, "--start-timeout", "1"]
    done = run([*flags, "python", "-c", "import time; time.sleep(50)"])
    assert done.returncode != 0
    assert "Ranks 1 had not started" in done.stderr


def test_a_rank_whose_parent_dies_is_lost_and_told(library: mpi.Library, tmp_path: Path) -> None:
    body = f"{rank_of(0)} & {rank_of(1)} & wait; exit 0"
    fake = fake_launcher(tmp_path / "mpirun", library, body)
    code = (
        "import os, time\n"
        "if os.environ['PMIX_RANK'] == '1': os.kill(os.getppid(), 9)\n"
        "time.sleep(2)"
    )
    done = run(["-np", "2", "--mpirun", fake, "python", "-c", code])
    assert done.returncode == 1
    assert "Rank 1 on" in done.stderr
    assert "vanished" in done.stderr


def test_slurm_starts_ranks_by_srun(library: mpi.Library, tmp_path: Path) -> None:
    rank = 'env SLURM_PROCID={0} SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE="2" "$@"'
    body = f"{rank.format(0)} & {rank.format(1)} & wait"
    fake_launcher(tmp_path / "srun", library, body)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = run(
        ["--launcher", "srun", "sh", "-c", "echo hello"],
        PATH=path,
        SLURM_JOB_ID="1",
        SLURM_NTASKS="2",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] hello"]


def test_srun_without_an_interface_to_mpi_does_not_train_n_times(library: mpi.Library) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import hvdlite; hvdlite.init()"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="0", SLURM_JOB_ID="1"),
    )
    assert done.returncode == 1
    assert "srun --mpi=" in done.stderr


def test_other_hosts_are_reached_by_the_agent(library: mpi.Library, tmp_path: Path) -> None:
    """The agent gives the host's name to a command that it runs here."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--uts", "true"], check=False).returncode:
        pytest.skip("host names of their own are not allowed here")
    agent = tmp_path / "agent"
    agent.write_text(
        "#!/bin/sh\nwhile :; do case $1 in -*) shift;; *) break;; esac; done\nname=$1; shift\n"
        'exec unshare --uts sh -c \'hostname "$0"; exec sh -c "$1"\' "$name" "$*"\n'
    )
    agent.chmod(0o755)
    path = tmp_path / "where.py"
    path.write_text(
        "import os, socket, hvdlite as hvd\nhvd.init()\n"
        "print(socket.gethostname(), hvd.local_rank(), hvd.cross_rank(), os.environ['COLOUR'])\n"
    )
    flags = ["-np", "3", "-H", "hosta:2,hostb:2", "--launch-agent", str(agent)]
    done = run([*flags, "-x", "COLOUR=blue", "python", str(path)])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] hosta 0 0 blue",
        "[1] hosta 1 0 blue",
        "[2] hostb 0 1 blue",
    ]


# -- hvdlite.run and the doctor -------------------------------------------------------------


def _sum(base: float, scale: float = 1.0) -> tuple[int, list[float]]:
    import numpy as np

    hvdlite.init()
    total = hvdlite.allreduce(np.full(2, base + hvdlite.rank()), op=hvdlite.Sum)
    return hvdlite.rank(), (scale * total).tolist()


def _fail() -> None:
    hvdlite.init()
    if hvdlite.rank() == 1:
        raise KeyError("no such key")
    hvdlite.barrier()


def test_a_function_returns_from_every_rank(library: mpi.Library) -> None:
    results = hvdlite.run(_sum, (10.0,), {"scale": 2.0}, np=2)
    assert results == [(0, [42.0, 42.0]), (1, [42.0, 42.0])]


def test_a_function_that_fails_raises_with_its_traceback(library: mpi.Library) -> None:
    with pytest.raises(hvdlite.LaunchError, match=r"(?s)Rank 1 on .*in _fail.*no such key"):
        hvdlite.run(_fail, np=2)


def test_functions_of_scripts(library: mpi.Library, tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    path = tmp_path / "main.py"
    path.write_text("import hvdlite\nk = 3\nprint(hvdlite.run(lambda x: k * x, (5,), np=1))\n")
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(),
    )
    assert done.stdout == "[15]\n", done.stderr


def test_arguments_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="max_np: elastic"):
        hvdlite.run(_sum, max_np=4)
    with pytest.raises(ValueError, match="no Gloo"):
        hvdlite.run(_sum, use_gloo=True)
    with pytest.raises(ValueError, match="differ"):
        hvdlite.run(_sum, np=2, num_proc=3)


def test_the_doctors_findings_as_json(library: mpi.Library) -> None:
    done = run(["--json"], "doctor")
    findings = json.loads(done.stdout)
    checks = {check["name"]: check for check in findings["checks"]}
    assert done.returncode == int(not findings["ok"]), done.stdout
    assert checks["MPI library"]["data"]["vendor"] == library.vendor
    assert checks["mpirun"]["state"] in ("ok", "warning")
    test = checks["self-test"]
    assert test["state"] in ("ok", "warning", "note"), test
    assert test["data"]["direct"] or test["state"] != "ok"
    assert test["data"]["right"] is True
    assert test["data"]["latency_us"] > 0
    assert test["data"]["bandwidth_gbs"] > 0


def test_the_doctor_ends_badly_where_something_is_wrong(library: mpi.Library) -> None:
    flags = ["--no-self-test", "--json"]
    done = run(flags, "doctor", HVDLITE_CYCLE_TIM="1")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
