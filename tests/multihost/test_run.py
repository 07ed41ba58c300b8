"""What `hvdlite run` on several hosts says when something goes wrong on one of them."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..parallel.jobs import Job, JobResult, is_open_mpi, mpirun, run_job, slower

pytest.importorskip("click")

STEPS = """
    import numpy as np
    import hvdlite as hvd
    from jobtools import say

    hvd.init()
    step = 0
    while True:
        step += 1
        hvd.allreduce(np.ones(1000), name="weights")
        if step == 3:
            say(hvd.rank(), started=True)
        {trouble}
        hvd.allreduce(np.ones(300_000), name="bias")
"""


@pytest.fixture
def run(cluster: Any) -> Callable[..., JobResult]:
    """Run a script by `hvdlite run -np 4 -H host1:2,host2:2` on host1."""

    def start(
        trouble: str,
        timeout: float = 40,
        env: dict[str, str] | None = None,
        meanwhile: Callable[[Job], object] | None = None,
    ) -> JobResult:
        environment: dict[str, Any] = {
            **cluster.environment(),
            "PRTE_MCA_rmaps_default_mapping_policy": None,
            "OMPI_MCA_btl_sm_backing_directory": None,
            **(env or {}),
        }
        command = [*cluster.enter("host1"), sys.executable, "-m", "hvdlite", "run", "-np", "4"]
        command += ["-H", "host1:2,host2:2", "--mpirun", mpirun()[0]]
        command += ["--launch-agent", environment["PRTE_MCA_plm_ssh_agent"]]
        script = STEPS.format(trouble=trouble)
        return run_job(4, script, timeout, environment, launcher=command, meanwhile=meanwhile)

    return start


def test_a_rank_that_raises(run):
    result = run('if step == 3 and hvd.rank() == 3: raise RuntimeError("no batch for you")')
    assert not result.timed_out, result
    assert result.returncode == 1, result
    verdict = result.stderr.partition("hvdlite run: ")[2]
    assert re.match(
        r"Rank 3 on host2 (ended with status 1|failed), [0-9.]+ s after the start", verdict
    )
    assert "RuntimeError: no batch for you" in verdict
    assert result.left_behind == 0


def test_a_rank_that_skips_a_tensor(run):
    result = run(
        'if step == 5 and hvd.rank() == 3: hvd.allreduce(np.ones(5), name="other")',
        env={
            "HVDLITE_STALL_CHECK_TIME_SECONDS": "1",
            "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "3",
        },
    )
    assert not result.timed_out, result
    assert result.returncode == 1, result
    verdict = result.stderr.partition("hvdlite run: ")[2]
    for text in (
        "stalled for more than 3 s",
        "('bias'): not submitted by rank 3",
        "('other'): not submitted by ranks 0-2",
        "The ranks may have taken different branches",
    ):
        assert text in verdict, result
    assert result.left_behind == 0


def ranks_of(job: Job) -> list[int]:
    """Return the processes that are ranks, or stand in for them."""
    found = []
    for pid in job.processes():
        with contextlib.suppress(OSError):
            if b"script.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("how", ["crash", "unplug"])
def test_a_host_that_vanishes(run, cluster, how):
    if how == "crash" and not is_open_mpi(mpirun()[0]):
        pytest.skip("with MPICH this is noticed by what the second case shows")
    took = []

    def vanish(job: Job) -> None:
        deadline = time.monotonic() + slower(20)
        while len(job.said()) < 4 and job.returncode is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(job.said()) == 4, job.output()
        getattr(cluster, how)("host2")
        since = time.monotonic()
        assert job.wait(slower(50)), job.output()
        took.append(time.monotonic() - since)
        # Those on the host that nobody hears have no one to end them but themselves. (Open MPI's
        # daemon there waits idly until its last message can be delivered or TCP gives up.)
        deadline = time.monotonic() + slower(20)
        while (left := ranks_of(job)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, job.output()

    try:
        result = run("pass", timeout=90, meanwhile=vanish)
    finally:
        cluster.plug("host2")
    # Half a minute for a connection that is only silent, and what it takes to end the rest.
    assert took[0] < slower(15 if how == "crash" else 45), result
    assert result.returncode != 0, result
    verdict = result.stderr.partition("hvdlite run: ")[2]
    assert "Ranks 2, 3 on host2 vanished without a word" in verdict, result
    assert "the host, its network, or its MPI daemon has gone" in verdict, result
