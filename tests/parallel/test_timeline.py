"""Timelines of real jobs: one file of all ranks, and what it says is what happened."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from .jobs import run_job


@pytest.fixture
def folder(comm):
    """A folder that all ranks know and that goes after the test."""
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="hvdt", dir="/tmp") if not comm.rank else None))
    yield path
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


def finish(hvd, comm):
    """Have all files written: that is what shutdown promises."""
    hvd.shutdown()
    comm.Barrier()
    hvd.init()


def load(path):
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    return document["otherData"], document["traceEvents"]


def check_format(events):
    """Check against the rules of the trace event format, and that rows are nested."""
    open_ids = {}
    rows = {}
    for event in events:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["args"]
            continue
        assert event["ts"] >= 0
        key = event.get("cat"), event.get("id")
        if event["ph"] == "b":
            assert key not in open_ids
            open_ids[key] = event["ts"]
        elif event["ph"] == "e":
            assert event["ts"] >= open_ids.pop(key)
            open_ids[key] = None  # identifiers are not used twice
        else:
            assert event["ph"] == "X" and event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    assert all(value is None for value in open_ids.values())
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(rows)
    for spans in rows.values():
        spans.sort(key=lambda e: (e["ts"], -e["dur"]))
        for one, after in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= after["ts"] + 1e-3, (one, after)


def negotiated(events, rank):
    return [e for e in events if e["ph"] == "b" and e["pid"] == rank]


def moved(events, rank):
    """Return the spans of moving by tensor."""
    found = {}
    for event in events:
        if event["ph"] == "X" and event["name"] == "move" and event["pid"] == rank:
            for name in event["args"]["tensors"]:
                found.setdefault(name, []).append(event)
    return found


@pytest.mark.parametrize("mark_cycles", [False, True])
def test_every_tensor_is_there_on_every_rank(hvd, comm, world, folder, mark_cycles):
    path = folder / "t.json"
    if world.rank == world.size - 1:
        hvd.start_timeline(path, mark_cycles)
    steps, count = 3, 8
    for _ in range(steps):
        handles = [
            hvd.allreduce_async(np.ones(10 + i, np.float32), name=f"grad.{i}") for i in range(count)
        ]
        hvd.grouped_allreduce([np.ones(5), np.ones(6)], name="group")
        hvd.allgather(np.ones((world.rank + 1, 2)), name="gathered")
        hvd.broadcast(np.ones(4), 0, name="sent")
        hvd.alltoall(np.ones(world.size), name="exchanged")
        hvd.reducescatter(np.ones(world.size), name="scattered")
        hvd.allreduce(np.ones(3))
        hvd.barrier()
        for handle in handles:
            hvd.synchronize(handle)
    finish(hvd, comm)
    about, events = load(path)
    assert about["ranks"] == list(world.ranks) and about["lost_events"] == {}
    check_format(events)
    named = [f"grad.{i}" for i in range(count)]
    named += ["group", "gathered", "sent", "exchanged", "scattered"]
    for rank in world.ranks:
        spans = moved(events, rank)
        names = [e["name"] for e in negotiated(events, rank)]
        unnamed = {n for n in names if n.startswith("allreduce.noname.")}
        assert len(unnamed) == steps
        assert sum(n.startswith("barrier.noname.") for n in names) == steps
        for name in named:
            assert names.count(name) == steps, name
            assert len(spans[name]) == steps, name
        assert unnamed <= set(spans)
        ends = {(e["name"], e["args"]["round"]): e["ts"] for e in negotiated(events, rank)}
        for name, of_name in spans.items():
            for span in of_name:
                assert ends[name, span["args"]["round"]] <= span["ts"]
        for event in negotiated(events, rank):
            if event["name"] == "grad.3":
                assert event["args"]["bytes"] == 13 * 4
                assert event["args"]["kind"] == "allreduce"
        rounds = [e for e in events if e["name"] == "round" and e["pid"] == rank]
        assert bool(rounds) == mark_cycles
        assert any(e["name"] == "wait" and e["pid"] == rank for e in events)


@pytest.mark.np(2, 3, 4)
def test_the_last_rank_is_named(hvd, comm, world, folder):
    hvd.start_timeline(folder / "t.json")
    for late in world.ranks:
        # The late rank submits only after it has heard that every other one has.
        if world.rank == late:
            for rank in world.ranks:
                if rank != late:
                    comm.recv(source=rank, tag=5)
            handle = hvd.allreduce_async(np.ones(4), name=f"late.{late}")
        else:
            handle = hvd.allreduce_async(np.ones(4), name=f"late.{late}")
            comm.send(None, dest=late, tag=5)
        hvd.synchronize(handle)
    hvd.stop_timeline()
    finish(hvd, comm)
    _, events = load(folder / "t.json")
    for late in world.ranks:
        found = [e for e in events if e["ph"] == "b" and e["name"] == f"late.{late}"]
        assert [e["pid"] for e in found] == list(world.ranks)
        assert [e["args"]["last_rank"] for e in found] == [late] * world.size
        ready = found[0]["args"]["ready_ms"]
        assert max(ready, key=ready.get) == str(late)
        assert [e["args"]["late_ms"] for e in found] == [ready[str(r)] for r in world.ranks]


def test_several_timelines_in_one_script(hvd, comm, world, folder):
    for number in range(3):
        hvd.start_timeline(str(folder / f"{number}.json"))
        hvd.allreduce(np.ones(4), name=f"w{number}")
        hvd.stop_timeline()
    hvd.allreduce(np.ones(4), name="outside")
    hvd.stop_timeline()
    finish(hvd, comm)
    for number in range(3):
        about, events = load(folder / f"{number}.json")
        assert about["size"] == world.size
        check_format(events)
        for rank in world.ranks:
            names = [e["name"] for e in negotiated(events, rank)]
            assert f"w{number}" in names, (number, rank, names)
            assert "w0" not in names or number == 0
    assert list(folder.glob("*.part")) == []


def test_ranks_that_have_joined_are_in_it(hvd, comm, world, folder):
    hvd.start_timeline(folder / "t.json")
    for step in range(2 + world.rank):
        hvd.allreduce(np.ones(4), name=f"step.{step}")
    hvd.join()
    hvd.stop_timeline()
    finish(hvd, comm)
    _, events = load(folder / "t.json")
    check_format(events)
    for rank in world.ranks:
        names = [e["name"] for e in negotiated(events, rank)]
        assert names == [f"step.{step}" for step in range(2 + rank)]
        # It still took part in moving the others' tensors.
        moves = [e for e in events if e["name"] == "move" and e["pid"] == rank]
        assert len(moves) == 1 + world.size


@pytest.mark.np(2, 3)
def test_process_sets_are_told_apart(hvd, comm, world, folder):
    process_set = hvd.add_process_set(range(1, world.size))
    hvd.start_timeline(folder / "t.json", True)
    hvd.allreduce(np.ones(4), name="w")
    if world.rank:
        hvd.allreduce(np.ones(4), name="w", process_set=process_set)
    hvd.allreduce(np.ones(4), name="w")
    number = comm.bcast(process_set.process_set_id)
    hvd.remove_process_set(process_set)
    finish(hvd, comm)
    _, events = load(folder / "t.json")
    check_format(events)
    for rank in world.ranks:
        mine = [e for e in negotiated(events, rank) if e["name"] == "w"]
        sets = [e["args"]["process_set"] for e in mine]
        assert sorted(sets) == ([0, 0, number] if rank else [0, 0])
        ranks = [sorted(e["args"].get("ready_ms", {})) for e in mine if e["args"]["process_set"]]
        assert ranks in ([], [[]], [[str(r) for r in world.ranks[1:]]])


def test_what_is_no_file_is_refused_at_once(hvd, folder):
    with pytest.raises(TypeError, match="file_path must be a path"):
        hvd.start_timeline(None)
    with pytest.raises(ValueError, match="must name a file"):
        hvd.start_timeline(f"{folder}/")


SCRIPT = """
import sys
import numpy as np
import hvdlite as hvd

for turn in range(2):
    hvd.init()
    for step in range(5):
        hvd.allreduce(np.ones(10), name=f"w{step}")
        if step == 3 and hvd.rank() == FAILS:
            raise ArithmeticError("the very cause")
    hvd.shutdown()
"""


@pytest.mark.whole_job
@pytest.mark.np(2, 3)
def test_a_rank_that_fails_leaves_its_own_part(np_size, tmp_path):
    path = tmp_path / "deep" / "t.json"
    env = {"HVDLITE_TIMELINE": str(path)}
    result = run_job(np_size, SCRIPT.replace("FAILS", "1"), timeout=30, env=env)
    assert result.returncode != 0 and "ArithmeticError: the very cause" in result.stderr, result
    assert path.with_name("t.rank1.json").exists(), result
    about, events = load(path.with_name("t.rank1.json"))
    assert about["ranks"] == [1] and about["size"] == np_size
    check_format(events)
    assert [e["name"] for e in negotiated(events, 1)] == [f"w{step}" for step in range(4)]
    assert not path.exists()


@pytest.mark.whole_job
@pytest.mark.np(1, 2)
@pytest.mark.parametrize("variable", ["HVDLITE_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_setting_records_the_whole_job(np_size, variable, tmp_path):
    env = {variable: str(tmp_path / "t.json"), "HVDLITE_TIMELINE_MARK_CYCLES": "1"}
    result = run_job(np_size, SCRIPT.replace("FAILS", "-1"), timeout=30, env=env)
    assert result.returncode == 0, result
    about, events = load(tmp_path / "t.json")
    assert about["ranks"] == list(range(np_size))
    check_format(events)
    for rank in range(np_size):
        assert [e["name"] for e in negotiated(events, rank)] == [f"w{step}" for step in range(5)]
    assert any(e["name"] == "round" for e in events)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.whole_job
@pytest.mark.np(2)
def test_dynamic_waits_for_start_timeline(np_size, tmp_path):
    env = {"HVDLITE_TIMELINE": "DYNAMIC"}
    result = run_job(np_size, SCRIPT.replace("FAILS", "-1"), timeout=30, env=env)
    assert result.returncode == 0 and "timeline" not in result.stderr, result
