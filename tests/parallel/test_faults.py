"""One rank fails: the job ends within seconds, with the cause and a bad status (B28, B29)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import run_job, slower

pytestmark = pytest.mark.whole_job

SOON = 12.0
"""Seconds for start, fault and end together; most of it is for slow machines."""

LOOP = """
import os, signal, sys, time
import numpy as np
import hvdlite as hvd
from jobtools import say

hvd.init()
rank = hvd.rank()
for step in range(100000):
    if rank == 1 and step == 3:
        say(1, reached=True)
        FAULT
    OTHERS
"""

WORK = 'hvd.allreduce(np.ones(1000), name="grad")'
FAULTS = {
    "raise": 'raise ArithmeticError("the very cause")',
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit(3)": "sys.exit(3)",
    "os._exit(1)": "os._exit(1)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT)",
    "with work in flight": (
        'handle = hvd.allreduce_async(np.ones(10), name="mine"); '
        'raise ArithmeticError("the very cause")'
    ),
}
TRACEBACKS = {
    "raise": "ArithmeticError: the very cause",
    "with work in flight": "ArithmeticError: the very cause",
    "SIGINT": "KeyboardInterrupt",
}


def _loop(fault, others=WORK):
    return LOOP.replace("FAULT", fault).replace("OTHERS", others)


def _segments():
    return {path.name for path in Path("/dev/shm").glob("*hvdlite*")}


def _ended(result, before):
    assert not result.timed_out, str(result)
    assert result.returncode != 0, str(result)
    assert result.seconds < slower(SOON), str(result)
    assert result.left_behind == 0, str(result)
    assert _segments() <= before


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_fails_in_mid_step(np_size, fault):
    before = _segments()
    result = run_job(np_size, _loop(FAULTS[fault]), timeout=25)
    assert result.said.get(1) == [{"reached": True}], str(result)
    _ended(result, before)
    if fault in TRACEBACKS:
        assert "Traceback" in result.stderr, str(result)
        assert TRACEBACKS[fault] in result.stderr, str(result)
    if fault in ("sys.exit(0)", "sys.exit(3)"):
        assert "rank 1" in result.stderr, str(result)


@pytest.mark.np(2)
@pytest.mark.parametrize("fault", ("raise", "sys.exit(3)"))
def test_coordinator_fails(np_size, fault):
    before = _segments()
    script = _loop(FAULTS[fault]).replace("rank == 1", "rank == 0")
    _ended(run_job(np_size, script, timeout=25), before)


@pytest.mark.np(2)
@pytest.mark.parametrize("fault", ("raise", "sys.exit(3)"))
def test_others_are_far_from_any_collective(np_size, fault):
    before = _segments()
    script = _loop(
        FAULTS[fault], others=f"{WORK}\n    if rank == 0 and step == 2: time.sleep(1000)"
    )
    result = run_job(np_size, script, timeout=25)
    _ended(result, before)


@pytest.mark.np(2)
def test_failure_of_a_thread_that_does_collectives(np_size):
    result = run_job(
        np_size,
        """
        import threading
        import numpy as np
        import hvdlite as hvd

        hvd.init()

        def train():
            for step in range(100000):
                if hvd.rank() == 1 and step == 5:
                    raise ArithmeticError("the very cause")
                hvd.allreduce(np.ones(100), name="grad")

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """,
        timeout=25,
    )
    _ended(result, _segments())
    assert "ArithmeticError: the very cause" in result.stderr, str(result)


@pytest.mark.np(2)
def test_exception_that_the_script_handles_is_no_failure(np_size):
    result = run_job(
        np_size,
        """
        import numpy as np
        import hvdlite as hvd
        from jobtools import say

        hvd.init()
        for step in range(5):
            try:
                if hvd.rank() == 1:
                    raise ArithmeticError("handled")
            except ArithmeticError:
                pass
            total = hvd.allreduce(np.ones(10), op=hvd.Sum)
        say(hvd.rank(), total=float(total[0]))
        """,
        timeout=25,
    )
    assert result.returncode == 0, str(result)
    assert result.said == {rank: [{"total": 2.0}] for rank in range(2)}, str(result)


@pytest.mark.np(2)
@pytest.mark.parametrize("fault", ("raise", "sys.exit(3)"))
def test_users_own_excepthook_still_runs(np_size, fault):
    hook = 'sys.excepthook = lambda *_: print("users hook", file=sys.stderr, flush=True)\n'
    script = _loop(FAULTS[fault]).replace("import numpy", f"{hook}import numpy", 1)
    result = run_job(np_size, script, timeout=25)
    _ended(result, _segments())
    if fault == "raise":
        assert "users hook" in result.stderr, str(result)


@pytest.mark.np(2)
def test_ending_the_others_can_be_switched_off(np_size):
    script = """
import numpy as np
import hvdlite as hvd
from jobtools import say

hvd.init()
hvd.allreduce(np.ones(10), name="first")
if hvd.rank() == 1:
    raise ArithmeticError("the very cause")
try:
    hvd.allreduce(np.ones(10), name="second")
except hvd.HvdliteInternalError as error:
    say(0, text=str(error))
"""
    result = run_job(np_size, script, timeout=25, env={"HVDLITE_ABORT_ON_EXCEPTION": "0"})
    _ended(result, _segments())
    assert "ArithmeticError: the very cause" in result.stderr, str(result)
    text = result.said[0][0]["text"]
    assert "has been shut down" in text and "rank 1" in text, text


@pytest.mark.np(2, 3)
def test_failure_of_every_rank_at_once(np_size):
    script = _loop(FAULTS["raise"]).replace("rank == 1 and", "")
    result = run_job(np_size, script, timeout=25)
    _ended(result, _segments())
    assert "ArithmeticError: the very cause" in result.stderr, str(result)


@pytest.mark.np(2)
def test_plain_failure_of_a_mismatch_shows_the_mismatch(np_size):
    script = _loop("", others="hvd.allreduce(np.ones(3 + rank * (step > 2)), name='layer')")
    result = run_job(np_size, script.replace("rank == 1 and step == 3", "False"), timeout=25)
    _ended(result, _segments())
    assert "Mismatched shape" in result.stderr, str(result)
    assert "layer" in result.stderr, str(result)


STALL = """
import os, signal, sys, time
import numpy as np
import hvdlite as hvd
from mpi4py import MPI
from jobtools import say

hvd.init()
rank = hvd.rank()
hvd.allreduce(np.ones(10), name="common")
if rank != 1:
    handles = [hvd.allreduce_async(np.ones(10), name=f"skipped.{i}") for i in range(2)]
BODY
"""
WARN = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}


def _stall(body):
    return STALL.replace("BODY", body)


LATE = """
time.sleep(3)
MPI.COMM_WORLD.Barrier()
if rank == 1:
    handles = [hvd.allreduce_async(np.ones(10), name=f"skipped.{i}") for i in range(2)]
for handle in handles:
    hvd.synchronize(handle)
say(rank, finished=True)
"""


@pytest.mark.np(2, 3)
def test_stall_warning_names_tensors_and_missing_ranks(np_size):
    result = run_job(np_size, _stall(LATE), timeout=25, env=WARN)
    assert result.returncode == 0, str(result)
    assert result.said == {rank: [{"finished": True}] for rank in range(np_size)}, str(result)
    warned = [line for line in result.stderr.splitlines() if "skipped.0" in line]
    assert warned, str(result)
    for line in warned:
        assert "skipped.1" in line and "rank 1" in line, line
        assert "common" not in line, line
    assert len(warned) <= 4, "a warning a second, not a flood"


@pytest.mark.np(2)
@pytest.mark.parametrize(
    "quiet",
    (
        {"HVDLITE_STALL_CHECK_DISABLE": "1"},
        {"HOROVOD_STALL_CHECK_DISABLE": "1"},
        {"HVDLITE_STALL_CHECK": "0"},
    ),
    ids=lambda env: next(iter(env)),
)
def test_stall_warning_can_be_silenced(np_size, quiet):
    result = run_job(np_size, _stall(LATE), timeout=25, env={**WARN, **quiet})
    assert result.returncode == 0, str(result)
    assert result.said == {rank: [{"finished": True}] for rank in range(np_size)}, str(result)
    assert "skipped" not in result.stderr, str(result)


LIMITS = {
    "ours": {**WARN, "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "2"},
    "horovod's": {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2",
    },
}


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("spelling", LIMITS)
def test_stall_limit_ends_the_job(np_size, spelling):
    body = """
if rank == 1:
    time.sleep(1000)
try:
    hvd.synchronize(handles[0])
except hvd.HvdliteInternalError as error:
    say(rank, text=str(error))
    raise
"""
    result = run_job(np_size, _stall(body), timeout=25, env=LIMITS[spelling])
    _ended(result, _segments())
    texts = [said[0]["text"] for said in result.said.values()]
    assert texts, str(result)
    for text in texts:
        assert "has been shut down" in text and "skipped.0" in text and "rank 1" in text, text


@pytest.mark.np(2)
@pytest.mark.parametrize("stopped", (0, 1))
def test_stopped_process_ends_the_job_at_the_stall_limit(np_size, stopped):
    script = _loop("os.kill(os.getpid(), signal.SIGSTOP)").replace(
        "rank == 1", f"rank == {stopped}"
    )
    result = run_job(np_size, script, timeout=40, env=LIMITS["ours"])
    assert not result.timed_out, str(result)
    assert result.returncode != 0, str(result)
    assert result.left_behind == 0, str(result)
    assert f"rank {stopped}" in result.stderr, str(result)
