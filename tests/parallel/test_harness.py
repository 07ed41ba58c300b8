"""The harness itself: whatever a test does, it is reported, and the next one runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .jobs import run_job

pytestmark = pytest.mark.whole_job

SAMPLE = """
import os, sys, time
import pytest

pytestmark = pytest.mark.np(2)

def test_good(comm, world, rng):
    assert comm.size == world.size == 2
    assert len(set(comm.allgather(float(rng.random())))) == 1

def test_fails_on_one_rank(comm):
    print("some output")
    assert comm.rank == 0, "only one"

def test_after_failure(comm):
    comm.barrier()

def test_fails_while_the_other_waits(comm):
    if comm.rank == 1:
        raise ValueError("gave up")
    comm.barrier()

@pytest.mark.limit(1)
def test_hangs(comm):
    if comm.rank == 1:
        time.sleep(1000)
    comm.barrier()

def test_dies(comm):
    if comm.rank == 1:
        os._exit(5)
    comm.barrier()

@pytest.mark.parametrize("word", ("a", "b"))
def test_skipped(comm, word):
    pytest.skip("for a reason")

@pytest.mark.xfail(strict=True, reason="known")
def test_known_failure(comm):
    assert comm.rank == 0

def test_exits_badly_later(comm):
    import atexit
    atexit.register(os._exit, 7)
"""


def _pytest(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "HVDLITE_TEST_NP"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", *arguments],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    target = tmp_path_factory.mktemp("sample") / "parallel"
    target.mkdir()
    for name in ("__init__.py", "conftest.py", "jobs.py", "outer.py", "inner.py"):
        shutil.copy(Path(__file__).with_name(name), target)
    target.joinpath("test_sample.py").write_text(SAMPLE)
    target.joinpath("pytest.ini").write_text("[pytest]\n")
    return target


def test_everything_is_reported(place):
    result = _pytest(place)
    told = result.stdout
    for wanted in (
        "PASSED test_sample.py::test_good[np2]",
        "FAILED test_sample.py::test_fails_on_one_rank[np2]",
        "PASSED test_sample.py::test_after_failure[np2]",
        "FAILED test_sample.py::test_fails_while_the_other_waits[np2]",
        "FAILED test_sample.py::test_hangs[np2]",
        "FAILED test_sample.py::test_dies[np2]",
        "XFAIL test_sample.py::test_known_failure[np2]",
        "FAILED test_sample.py::test_exits_badly_later[np2]",
        "5 failed, 2 passed, 2 skipped, 1 xfailed",
        "AssertionError: only one",
        "some output",
        "ValueError: gave up",
        "ranks [0] were still in the test",
        "in test_fails_while_the_other_waits",
        "ranks [0, 1] did not finish within 1 s",
        "the job ended in this test",
        "left with status 7 after its last test",
    ):
        assert wanted in told, f"{wanted!r} is not in\n{told}\n{result.stderr}"


def test_one_test_by_its_id(place):
    result = _pytest(place, "test_sample.py::test_good[np2]")
    assert "1 passed" in result.stdout, result.stdout
    result = _pytest(place, "-k", "test_good", "--np", "3")
    assert "10 deselected" in result.stdout, result.stdout


def test_jobs_leave_nothing_behind():
    result = run_job(2, "import time; time.sleep(1000)", timeout=3)
    assert result.timed_out
    assert result.left_behind > 0
    assert result.seconds < 10
