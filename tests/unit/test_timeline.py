"""The timeline without MPI: recorder, clocks, sessions on fake communicators, the file."""

from __future__ import annotations

import itertools
import json
import random
import threading

import numpy as np
import pytest

from hvdlite.engine.requests import Kind
from hvdlite.engine.statistics import Stopwatch
from hvdlite.timeline import Recorder, Span
from hvdlite.timeline.clocks import compare_clocks
from hvdlite.timeline.recorder import EVENTS, events_of_each
from hvdlite.timeline.session import START, check_start
from hvdlite.timeline.trace import RankEvents, trace_events, write_trace
from hvdlite.transport.local_communicator import LocalCommunicator

from .fake_mpi import FakeWorld, drive, random_scheduler
from .test_engine_faults import Job

# -- recorder ---------------------------------------------------------------------------


def test_memory_is_bounded_and_what_is_lost_is_counted():
    recorder = Recorder(lambda: 0.0, limit=10)
    for number in range(25):
        recorder.note("wait", f"t{number}", 0.0, 1.0, 7)
    assert [event[1] for event in recorder.events()] == [f"t{n}" for n in range(15, 25)]
    assert recorder.lost == 15


def test_events_with_many_names_take_more_room():
    recorder = Recorder(lambda: 0.0, limit=100)
    for _ in range(50):
        recorder.note("move", tuple(f"t{n}" for n in range(160)), 0.0, 1.0, 1, 0, 0, 160, 640)
    assert len(recorder.events()) == 4  # 21 each
    assert recorder.lost == 46


def test_one_event_that_is_too_large_is_kept_all_the_same():
    recorder = Recorder(lambda: 0.0, limit=2)
    recorder.note("move", ("t",) * 1000, 0.0, 1.0, 1, 0, 0, 1000, 0)
    assert len(recorder.events()) == 1 and recorder.lost == 0


def test_threads_lose_no_count():
    recorder = Recorder(lambda: 0.0, limit=100)

    def work():
        for _ in range(2000):
            recorder.note("wait", "t", 0.0, 1.0, 7)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.lost + len(recorder.events()) == 8000
    assert len(recorder.events()) == 100


def test_a_large_job_records_less_on_each_rank():
    assert events_of_each(1) == events_of_each(4) == EVENTS
    assert events_of_each(64) * 64 <= 2_000_000
    assert events_of_each(100_000) >= 1000


def test_a_span_is_noted_when_its_block_fails_too():
    times = iter([1.0, 3.0])
    recorder = Recorder(lambda: next(times))
    stopwatch = Stopwatch()
    with pytest.raises(KeyError), Span(recorder, stopwatch, "move", ("a",), 5):
        raise KeyError
    assert recorder.events() == [("move", ("a",), 1.0, 3.0, 5)]
    assert stopwatch.running == 0 and stopwatch.seconds > 0


# -- clocks -----------------------------------------------------------------------------


class SkewedClock:
    """Counts what happens in a fake world, from a moment of its own, and remembers answers."""

    def __init__(self, world: FakeWorld, skew: float) -> None:
        self._world, self._skew = world, skew
        self.told: list[float] = []

    def __call__(self) -> float:
        self._world.moves += 1
        self.told.append(self._world.moves * 1e-4 + self._skew)
        return self.told[-1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [2, 4])
def test_clocks_are_compared_to_half_of_the_fastest_answer(size, seed):
    world = FakeWorld(size, random_scheduler(seed))
    skews = [0.0, 1234.5, -777.25, 1e6][:size]
    clocks = [SkewedClock(world, skew) for skew in skews]
    operations = [
        [compare_clocks(comm, clock)]
        for comm, clock in zip(world.communicators, clocks, strict=True)
    ]
    results = drive(world, operations, random.Random(seed))
    assert results[0] == [0.0]
    for rank in range(1, size):
        asked, answered = clocks[rank].told[::2], clocks[rank].told[1::2]
        fastest = min(b - a for a, b in zip(asked, answered, strict=True))
        (offset,) = results[rank]
        assert abs(offset + skews[rank]) <= fastest / 2 + 1e-6
    world.check_quiet()


@pytest.mark.parametrize("seed", range(20))
def test_clocks_of_one_host_are_taken_for_one(seed):
    world = FakeWorld(3, random_scheduler(seed))
    operations = [[compare_clocks(comm, SkewedClock(world, 0.0))] for comm in world.communicators]
    assert drive(world, operations, random.Random(seed)) == [[0.0]] * 3


def test_a_single_rank_has_the_right_time():
    with pytest.raises(StopIteration) as end:
        next(compare_clocks(LocalCommunicator(), lambda: 5.0))
    assert end.value.value == 0.0


# -- sessions ---------------------------------------------------------------------------


def load(path):
    document = json.loads(path.read_text())
    return document["otherData"], document["traceEvents"]


def negotiations(events):
    return [e for e in events if e.get("cat") == "negotiate" and e["ph"] == "b"]


def submit_all(job, names):
    handles = [job.submit(r, name) for name in names for r in range(len(job.engines))]
    job.run(lambda: all(h.done() for h in handles))


def end(job):
    for rank in range(len(job.engines)):
        job.leave(rank)
    job.run(lambda: all(engine._closed() for engine in job.engines))
    for engine in job.engines:
        engine._timeline.finish()
    job.world.check_quiet()


def recorded(path):
    """Return the tensors' names by rank."""
    found = {}
    for event in negotiations(load(path)[1]):
        found.setdefault(event["pid"], []).append(event["name"])
    return found


SKEWS = (0.0, 5000.0, -300.0)


@pytest.mark.parametrize("asks", range(3))
@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_record_the_same_on_one_clock(asks, seed, tmp_path):
    job = Job(3, seed, skews=SKEWS, tick=1e-5)
    path = tmp_path / "t.json"
    job.engines[asks].start_timeline(str(path), False)
    # Rank 2 submits 0.5 s after the others, and what it waits for takes less.
    early = [job.submit(r, "w") for r in (0, 1)]
    job.run(lambda: job.now > 0.5)
    early.append(job.submit(2, "w"))
    job.run(lambda: all(h.done() for h in early))
    submit_all(job, ["x", "y"])
    end(job)
    about, events = load(path)
    assert about["ranks"] == [0, 1, 2] and about["lost_events"] == {}
    (first, *rest) = [e for e in negotiations(events) if e["name"] == "w"]
    assert [e["pid"] for e in [first, *rest]] == [0, 1, 2]
    assert all(e["args"]["last_rank"] == 2 for e in [first, *rest])
    assert first["args"]["ready_ms"]["0"] == pytest.approx(0, abs=20)
    assert first["args"]["ready_ms"]["1"] == pytest.approx(0, abs=20)
    assert first["args"]["ready_ms"]["2"] == pytest.approx(500, abs=20)
    assert rest[1]["args"]["late_ms"] == first["args"]["ready_ms"]["2"]
    times = [e["ts"] for e in events if "ts" in e]
    assert min(times) == 0 and max(times) < job.now * 1e6
    assert {r: sorted(names) for r, names in recorded(path).items()} == {
        r: ["w", "x", "y"] for r in range(3)
    }


@pytest.mark.parametrize("seed", range(10))
def test_scripts_that_are_the_same_on_all_ranks_record_once_each(seed, tmp_path):
    job = Job(3, seed)
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    late = random.Random(seed).randrange(3)
    for engine in job.engines:
        engine.start_timeline(str(paths[0]), False)
    submit_all(job, ["first"])
    # One rank is late with ending the first and starting the second.
    for rank in range(3):
        if rank != late:
            job.engines[rank].stop_timeline()
            job.engines[rank].start_timeline(str(paths[1]), False)
    for _ in range(300):
        job.engines[job.order.randrange(3)].step()
    job.engines[late].stop_timeline()
    job.engines[late].start_timeline(str(paths[1]), False)
    submit_all(job, ["second"])
    for engine in job.engines:
        engine.stop_timeline()
    submit_all(job, ["third"])
    end(job)
    assert recorded(paths[0]) == {r: ["first"] for r in range(3)}
    for names in recorded(paths[1]).values():
        # The round that ends it may be one in which more was agreed on.
        assert names in (["second"], ["second", "third"])


def test_a_second_timeline_does_not_start_beside_the_first(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hvdlite.log.logger.propagate", True)
    job = Job(2)
    job.engines[0].start_timeline(str(tmp_path / "a.json"), False)
    submit_all(job, ["x"])
    job.engines[1].start_timeline(str(tmp_path / "b.json"), False)
    submit_all(job, ["y"])
    end(job)
    (text,) = caplog.messages
    assert "a.json" in text and "b.json" in text and "stop_timeline" in text
    assert recorded(tmp_path / "a.json") == {0: ["x", "y"], 1: ["x", "y"]}
    assert not (tmp_path / "b.json").exists()


def test_one_rank_starts_and_another_one_stops(tmp_path):
    job = Job(2)
    job.engines[1].start_timeline(str(tmp_path / "a.json"), False)
    submit_all(job, ["x"])
    job.engines[0].stop_timeline()
    submit_all(job, ["y"])
    submit_all(job, ["z"])
    end(job)
    # What is agreed on in the round that ends it still belongs to it.
    assert recorded(tmp_path / "a.json") == {0: ["x", "y"], 1: ["x", "y"]}


def test_stop_without_start_does_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hvdlite.log.logger.propagate", True)
    job = Job(2)
    job.engines[0].stop_timeline()
    submit_all(job, ["x"])
    end(job)
    assert list(tmp_path.iterdir()) == [] and caplog.messages == []


@pytest.mark.parametrize("size", [1, 2])
def test_stop_right_after_start_leaves_an_empty_file(size, tmp_path):
    job = Job(size)
    job.engines[0].start_timeline(str(tmp_path / "a.json"), True)
    job.engines[0].stop_timeline()
    end(job)
    about, events = load(tmp_path / "a.json")
    assert about["size"] == size and negotiations(events) == []


@pytest.mark.parametrize("seed", range(10))
def test_batches_in_flight_at_the_end_are_seen_to_their_end(seed, tmp_path):
    job = Job(2, seed)
    job.engines[0].start_timeline(str(tmp_path / "a.json"), False)
    handles = [job.submit(r, f"t{i}", (100 + i,)) for r in range(2) for i in range(4)]
    job.engines[1].stop_timeline()
    job.run(lambda: all(h.done() for h in handles))
    end(job)
    _, events = load(tmp_path / "a.json")
    if negotiations(events):  # else the start was announced in the round of the stop
        for rank in range(2):
            moved = {
                name
                for e in events
                if e["ph"] == "X" and e["name"] == "move" and e["pid"] == rank
                for name in e["args"]["tensors"]
            }
            assert moved == {e["name"] for e in negotiations(events) if e["pid"] == rank}


def test_a_process_set_made_meanwhile_has_rows_of_its_own(tmp_path):
    job = Job(3)
    job.engines[0].start_timeline(str(tmp_path / "a.json"), True)
    adding = [job.submit(r, None, kind=Kind.ADD_PROCESS_SET, splits=(1, 2)) for r in range(3)]
    job.run(lambda: all(h.done() for h in adding))
    set_id = adding[0].wait()
    inside = [job.submit(r, "w", set_id=set_id) for r in (1, 2)]
    job.run(lambda: all(h.done() for h in inside))
    submit_all(job, ["w"])
    end(job)
    _, events = load(tmp_path / "a.json")
    of_set = [e for e in negotiations(events) if e["args"]["process_set"] == set_id]
    assert [(e["pid"], e["name"]) for e in of_set] == [(1, "w"), (2, "w")]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert f"batches of process set {set_id}" in names.values()
    for event in events:
        if event["ph"] == "X" and event["name"] == "move":
            row = names[event["pid"], event["tid"]]
            assert (f"of process set {set_id}" in row) == (event["args"]["process_set"] == set_id)


def test_an_engine_that_fails_leaves_its_part(tmp_path):
    job = Job(2)
    job.engines[0].start_timeline(str(tmp_path / "a.json"), False)
    submit_all(job, ["x"])
    job.engines[1].fail("broken by the test")
    assert [path.name for path in tmp_path.iterdir()] == ["a.rank1.json"]
    about, events = load(tmp_path / "a.rank1.json")
    assert about["ranks"] == [1] and about["size"] == 2
    (event,) = negotiations(events)
    # Nobody can tell from one rank's part who was the last.
    assert event["name"] == "x" and "last_rank" not in event["args"]


def test_what_was_on_its_way_to_rank_0_is_saved_too(tmp_path):
    job = Job(2)
    job.engines[0].start_timeline(str(tmp_path / "a.json"), False)
    submit_all(job, ["x"])
    job.engines[1].stop_timeline()
    for rank in range(2):
        job.submit(rank, "y")
    job.run(lambda: job.engines[0]._timeline.recorder is None)
    job.engines[0].rescue()
    assert (tmp_path / "a.rank0.json").exists()


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hvdlite.log.logger.propagate", True)
    blocked = tmp_path / "file"
    blocked.write_text("")
    job = Job(2)
    job.engines[0].start_timeline(str(blocked / "a.json"), False)
    submit_all(job, ["x"])
    assert "could not be written" in caplog.messages[0]
    end(job)
    assert "cannot be written" in caplog.messages[1] and "a.json" in caplog.messages[1]


def test_a_folder_in_place_of_the_file_is_told_at_the_start(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hvdlite.log.logger.propagate", True)
    job = Job(1)
    job.engines[0].start_timeline(str(tmp_path), False)
    job.run(lambda: caplog.messages)
    assert "it is a folder" in caplog.messages[0]
    end(job)
    assert list(tmp_path.parent.glob("*.part")) == []


@pytest.mark.parametrize("path", [3, None, b"x", ["a"]])
def test_start_refuses_what_is_no_path(path):
    with pytest.raises(TypeError, match="file_path must be a path"):
        check_start(path, False)


@pytest.mark.parametrize("path", ["", ".", "/", "a/", "a\0b"])
def test_start_refuses_what_names_no_file(path):
    with pytest.raises(ValueError, match="must name a file"):
        check_start(path, False)


def test_relative_paths_are_those_of_the_moment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_start("a.json", 1) == (str(tmp_path / "a.json"), True)


def test_announcements_of_what_is_unknown_change_nothing():
    job = Job(2)
    job.engines[0].announce("something.new", 1)
    submit_all(job, ["x"])
    end(job)
    assert START != "something.new"


# -- the file ---------------------------------------------------------------------------


def negotiate(name, begin, end_, round_, set_id=0):
    return ("negotiate", name, begin, end_, round_, set_id, "allreduce", 4)


def move(names, begin, end_, round_, set_id=0, lane=0):
    return ("move", names, begin, end_, round_, set_id, lane, len(names), 4)


def test_ranks_are_merged_on_the_clock_of_rank_0(tmp_path):
    parts = [
        RankEvents(0, 0.0, [negotiate("a", 10.0, 11.0, 1), move(("a",), 11.0, 12.0, 1)], 0),
        RankEvents(1, -90.0, [negotiate("a", 100.5, 101.0, 1), move(("a",), 101.0, 102.0, 1)], 0),
    ]
    write_trace(str(tmp_path / "new" / "t.json"), parts, 2)
    about, events = load(tmp_path / "new" / "t.json")
    assert about == {"producer": "hvdlite", "size": 2, "ranks": [0, 1], "lost_events": {}}
    first, second = negotiations(events)
    assert (first["ts"], second["ts"]) == (0.0, 500_000.0)
    assert first["args"]["ready_ms"] == {"0": 0.0, "1": 500.0}
    assert "ready_ms" not in second["args"] and second["args"]["late_ms"] == 500.0
    assert first["args"]["last_rank"] == second["args"]["last_rank"] == 1
    assert first["id"] != second["id"]
    moves = [e for e in events if e["name"] == "move"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in moves] == [(0, 1e6, 1e6), (1, 1e6, 1e6)]
    assert list(tmp_path.glob("**/*.part")) == []


def test_a_round_that_a_rank_has_lost_has_no_last_rank():
    parts = [
        RankEvents(0, 0.0, [negotiate("a", 1.0, 2.0, 1), negotiate("a", 3.0, 4.0, 2)], 0),
        RankEvents(1, 0.0, [negotiate("a", 3.5, 4.0, 2)], 1),
    ]
    first, second, _ = negotiations(trace_events(parts, 2))
    assert "last_rank" not in first["args"]
    assert second["args"]["last_rank"] == 1


def test_spans_of_a_row_do_not_overlap_whatever_is_rounded():
    times = np.cumsum(np.random.default_rng(0).uniform(1e-8, 1e-5, 2000)) + 1e5
    events = [
        move((), a, b, 1) for a, b in zip(times[:-1].tolist(), times[1:].tolist(), strict=True)
    ]
    spans = [e for e in trace_events([RankEvents(0, 0.0, events, 0)], 1) if e["ph"] == "X"]
    for one, next_ in itertools.pairwise(spans):
        assert one["ts"] + one["dur"] <= next_["ts"] + 1e-3


def test_threads_that_wait_have_rows_of_their_own():
    events = [
        ("wait", "a", 0.0, 5.0, 111),
        ("wait", "b", 1.0, 2.0, 222),
        ("wait", "c", 6.0, 7.0, 111),
    ]
    found = list(trace_events([RankEvents(0, 0.0, events, 0)], 1))
    rows = {e["args"]["tensor"]: e["tid"] for e in found if e["name"] == "wait"}
    assert rows["a"] == rows["c"] != rows["b"]
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert (names[rows["a"]], names[rows["b"]]) == ("waiting", "waiting (2)")


def test_names_of_any_kind_survive(tmp_path):
    name = 'quote" back\\slash \u2028 \ud800 ü'
    write_trace(str(tmp_path / "t.json"), [RankEvents(0, 0.0, [negotiate(name, 0, 1, 1)], 0)], 1)
    assert negotiations(load(tmp_path / "t.json")[1])[0]["name"] == name


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("old")
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_trace(str(path), [RankEvents(0, 0.0, [("wait", {1}, 0.0, 1.0, 7)], 0)], 1)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("t.json", "old")]
