"""Readings of metrics, against sums done by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hvdlite.engine.statistics import Counters, Statistics
from hvdlite.metrics.poll import Reading, compare, find, read
from hvdlite.metrics.server import COUNTERS, GAUGES
from hvdlite.metrics.top import main

pytest.importorskip("prometheus_client")


def reading(at, rank, **values):
    zeros = dict.fromkeys([*COUNTERS, *GAUGES], 0.0)
    return Reading(at, zeros | values, {"rank": str(rank), "host": f"h{rank}"})


def test_speeds_are_differences_by_time():
    before = [
        reading(10.0, 0, bytes=1000, tensors=10, batches=5, responses=10, negotiating_seconds=1.0),
        reading(10.0, 1, responses=10, negotiating_seconds=1.0),
    ]
    after = [
        reading(12.0, 1, responses=30, negotiating_seconds=3.0, queue_depth=4, in_flight=1),
        reading(
            12.0, 0,
            bytes=5000, tensors=30, batches=10, responses=30, negotiating_seconds=5.0,
            waiting_seconds=0.5,
        ),
    ]  # fmt: skip
    zero, one = compare(before, after)
    assert (zero.rank, zero.host, one.rank) == (0, "h0", 1)
    assert zero.bytes_per_second == 2000
    assert zero.tensors_per_second == 10
    assert zero.tensors_per_batch == 4
    assert zero.waiting == 0.25
    assert (one.queue_depth, one.in_flight, one.tensors_per_batch) == (4, 1, 0.0)
    # Each request of rank 0 waited 0.2 s for others, each of rank 1 only 0.1 s: it is later.
    assert zero.late_ms == pytest.approx(0)
    assert one.late_ms == pytest.approx(100)


def test_idle_and_vanished_ranks_are_no_trouble():
    before = [reading(1.0, 0), reading(1.0, 1)]
    (speed,) = compare(before, [reading(2.0, 1), reading(2.0, 2)])
    assert speed.rank == 1 and speed.late_ms is None and speed.bytes_per_second == 0


def statistics(**values):
    return Statistics(**dict.fromkeys(Statistics.__dataclass_fields__, 0) | values)


@pytest.fixture
def serve():
    """Start servers for made-up engines on free ports."""
    from hvdlite.metrics import MetricsServer

    servers = []

    def start(port=0, **values):
        server = MetricsServer("127.0.0.1", port)
        servers.append(server)
        engine = SimpleNamespace(counters=Counters(), statistics=lambda: statistics(**values))
        world = SimpleNamespace(
            engine=engine, rank=0, size=1, local_rank=0, local_size=1, hosts=["box abc-boot-id"]
        )
        server.watch(world)
        return server, f"127.0.0.1:{server._server.server_port}", engine

    yield start
    for server in servers:
        server.close()


def test_what_is_served_is_what_was_counted(serve):
    _, address, engine = serve(bytes=2**40, rounds=3, waiting_seconds=1.25, queue_depth=7)
    engine.counters.negotiating_seconds += 2.5
    found = read(address)
    assert set(found.values) == {*COUNTERS, *GAUGES}
    assert found.values["bytes"] == 2**40
    assert found.values["waiting_seconds"] == 1.25
    assert found.values["queue_depth"] == 7
    assert found.values["negotiating_seconds"] == 2.5
    assert found.info == {
        "rank": "0", "size": "1", "local_rank": "0", "local_size": "1", "host": "box"
    }  # fmt: skip
    assert find([address]) == [address]


def test_every_statistic_is_served():
    assert {*COUNTERS, *GAUGES} - {"negotiating_seconds"} == set(Statistics.__dataclass_fields__)


def test_a_server_frees_its_port_and_serves_nothing_without_an_engine(serve):
    from hvdlite.metrics import MetricsServer

    server, address, _ = serve()
    with pytest.raises(OSError):
        MetricsServer("127.0.0.1", int(address.split(":")[1]))
    server._world = None
    with pytest.raises(ValueError, match="no rank of hvdlite"):
        read(address)
    server.close()
    again = MetricsServer("127.0.0.1", int(address.split(":")[1]))
    again.close()


def test_top_prints_a_table_or_json(serve, capsys, monkeypatch):
    monkeypatch.delenv("HVDLITE_METRICS_PORT", raising=False)
    _, address, _ = serve(queue_depth=7)
    assert main([address, "--once", "--interval", "0.05"]) == 0
    assert "0 on box" in capsys.readouterr().out
    monkeypatch.setenv("HVDLITE_METRICS_PORT", address.split(":")[1])
    assert main(["--once", "--json", "--interval", "0.05"]) == 0
    ((speed),) = json.loads(capsys.readouterr().out)
    assert speed["queue_depth"] == 7 and speed["host"] == "box"


def test_top_without_a_job_says_so(capsys, monkeypatch):
    monkeypatch.delenv("HVDLITE_METRICS_PORT", raising=False)
    with pytest.raises(SystemExit):
        main(["--once"])
    assert "HVDLITE_METRICS_PORT" in capsys.readouterr().err
    assert main(["127.0.0.1:1", "--once"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
