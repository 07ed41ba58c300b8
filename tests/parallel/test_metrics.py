"""Live metrics of real jobs, read while these run."""

from __future__ import annotations

import json
import socket
import time

import pytest

from .jobs import Job, run_job, slower

pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.whole_job


def free_ports(count):
    """Return the first of so many ports in a row that nobody uses."""
    for first in range(21000, 32000, 10):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise RuntimeError("no free ports")


COUNTS = """
import os, sys, time
import numpy as np
import hvdlite as hvd
from hvdlite.metrics.poll import compare, read
from jobtools import say

port = int(os.environ["HVDLITE_METRICS_PORT"])
for turn in range(2):
    hvd.init()
    rank = hvd.rank()
    address = f"127.0.0.1:{port + hvd.local_rank()}"
    before = read(address)
    hvd.barrier()
    for step in range(5):
        if rank == 1:
            time.sleep(0.05)  # what makes it a straggler
        hvd.allreduce(np.ones(1000, np.float32), name="w")
    after = read(address)
    gain = {name: after.values[name] - before.values[name] for name in after.values}
    say(rank, info=after.info, tensors=gain["tensors"], bytes=gain["bytes"],
        responses=gain["responses"], waits=gain["negotiating_seconds"] / gain["responses"])
    hvd.shutdown()
"""


@pytest.mark.np(2)
def test_what_is_served_is_what_happened(np_size):
    port = free_ports(np_size)
    result = run_job(np_size, COUNTS, timeout=40, env={"HVDLITE_METRICS_PORT": str(port)})
    assert result.returncode == 0, result
    for rank in range(np_size):
        assert len(result.said[rank]) == 2, result  # with the same port after shutdown and init
        for said in result.said[rank]:
            assert (said["tensors"], said["bytes"], said["responses"]) == (5, 5 * 4000, 6)
            assert (said["info"]["rank"], said["info"]["size"]) == (str(rank), str(np_size))
    for zero, one in zip(result.said[0], result.said[1], strict=True):
        # Five of six requests of rank 0 waited 0.05 s for rank 1 or more.
        assert zero["waits"] - one["waits"] > 0.02, result


RUNS = """
import os
import numpy as np
import hvdlite as hvd
from jobtools import say

hvd.init()
over = os.path.join(os.environ["HVDLITE_TEST_FOLDER"], "over")
hvd.allreduce(np.ones(1000))
say(hvd.rank(), running=True)
while not hvd.allreduce(np.array([os.path.exists(over)]), op=hvd.Max, name="over")[0]:
    hvd.allreduce(np.ones(1000), name="w")
hvd.shutdown()
"""


@pytest.mark.np(2)
def test_top_watches_a_running_job(np_size, tmp_path, capsys):
    from hvdlite.metrics.top import main

    port = free_ports(np_size)
    script = tmp_path / "script.py"
    script.write_text(RUNS)
    job = Job(np_size, [str(script)], slower(60), {"HVDLITE_METRICS_PORT": str(port)})
    try:
        deadline = time.monotonic() + slower(40)
        while len(list(job.folder.glob("said*.jsonl"))) < np_size:
            assert job.returncode is None and time.monotonic() < deadline, job.output()
            time.sleep(0.05)
        # Any rank's address does: the others are found from it.
        status = main([f"127.0.0.1:{port + 1}", "--once", "--json", "--interval", "0.5"])
        assert status == 0
        speeds = json.loads(capsys.readouterr().out)
        assert [speed["rank"] for speed in speeds] == [0, 1]
        for speed in speeds:
            assert speed["tensors_per_second"] > 0 and speed["bytes_per_second"] > 0
            assert speed["late_ms"] is not None
        (job.folder / "over").touch()
        assert job.wait(slower(20)), job.output()
        assert job.returncode == 0, job.output()
    finally:
        job.close()


REFUSED = """
import sys
import hvdlite as hvd
from jobtools import say
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
HIDE
try:
    hvd.init()
except hvd.HvdliteError as error:
    say(rank, text=str(error), initialized=hvd.is_initialized())
"""


@pytest.mark.np(2)
def test_a_missing_library_is_named_on_every_rank(np_size):
    script = REFUSED.replace("HIDE", "if rank == 1: sys.modules['prometheus_client'] = None")
    env = {"HVDLITE_METRICS_PORT": str(free_ports(np_size))}
    result = run_job(np_size, script, timeout=30, env=env)
    assert result.returncode == 0, result
    for rank in range(np_size):
        (said,) = result.said[rank]
        assert "hvdlite[metrics]" in said["text"] and "on rank 1" in said["text"], said
        assert not said["initialized"]


@pytest.mark.np(2)
def test_a_port_in_use_is_named_on_every_rank(np_size):
    port = free_ports(np_size)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        env = {"HVDLITE_METRICS_PORT": str(port)}
        result = run_job(np_size, REFUSED.replace("HIDE", ""), timeout=30, env=env)
    assert result.returncode == 0, result
    for rank in range(np_size):
        (said,) = result.said[rank]
        assert f"port {port + 1}" in said["text"] and "on rank 1" in said["text"], said


@pytest.mark.np(1)
def test_without_the_setting_the_library_is_not_even_loaded(np_size):
    script = """
    import sys
    import numpy as np
    import hvdlite as hvd
    from jobtools import say

    hvd.init()
    hvd.allreduce(np.ones(3))
    say(0, loaded="prometheus_client" in sys.modules or "http.server" in sys.modules)
    """
    result = run_job(np_size, script, timeout=30)
    assert result.said == {0: [{"loaded": False}]}, result
