"""What the engine does when ranks leave, stop or disagree about process sets; no real time."""

from __future__ import annotations

import random
import signal
import threading

import numpy as np
import pytest

from hvdlite.autotune import Parameters
from hvdlite.engine.engine import GLOBAL_SET, Engine
from hvdlite.engine.requests import Kind, Request
from hvdlite.engine.stall import StallLimits
from hvdlite.exceptions import (
    DuplicateNameError,
    HvdliteInternalError,
    HvdliteTimeoutError,
    MismatchError,
)
from hvdlite.settings import Settings
from hvdlite.transport.auto import make_transport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, random_scheduler

SIZES = [2, 3, 5]


class Job:
    """Engines of all ranks in one thread, with a clock that moves when they are stepped."""

    def __init__(self, size, seed=0, stall=None, capacity=16, tick=0.001, skews=None):
        self.now = 0.0
        self.tick = tick
        self.order = random.Random(seed)
        self.world = FakeWorld(size, random_scheduler(seed))
        data = [comm.duplicate() for comm in self.world.communicators]
        self.engines = [
            Engine(
                comm,
                data[r],
                lambda comm, ranks: make_transport(comm, Settings()),
                Parameters(1 << 20, 0.001, capacity, "auto"),
                stall,
                clock=lambda skew=skews[r] if skews else 0.0: self.now + skew,
            )
            for r, comm in enumerate(self.world.communicators)
        ]
        self.stopped: set[int] = set()

    def submit(self, rank, name, shape=(2,), kind=Kind.ALLREDUCE, set_id=GLOBAL_SET, splits=()):
        is_change = kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET)
        if is_change:
            request = Request(kind, splits=splits)
            return self.engines[rank].submit(set_id, request, None, [], [])
        data = np.full(shape, rank + 1.0)
        request = Request(kind, (DType.FLOAT64,), (shape,), ReduceOp.SUM)
        return self.engines[rank].submit(set_id, request, name, [data], [np.empty_like(data)])

    def run(self, done, limit=100_000):
        alive = [r for r in range(len(self.engines)) if r not in self.stopped]
        for _ in range(limit):
            if done():
                return
            self.engines[self.order.choice(alive)].step()
            self.now += self.tick
        raise AssertionError("hangs")

    def leave(self, rank, reason="done"):
        self.engines[rank]._closing = reason


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(20))
def test_what_needs_a_rank_that_has_left_fails_with_its_reason(size, seed):
    job = Job(size, seed)
    handles = [job.submit(r, "common") for r in range(size)]
    lonely = [job.submit(r, "lonely") for r in range(size - 1)]
    job.leave(size - 1, "its process exited")
    job.run(lambda: all(h.done() for h in [*handles, *lonely]))
    for handle in handles:
        np.testing.assert_array_equal(handle.wait()[0], [size * (size + 1) / 2] * 2)
    for handle in lonely:
        with pytest.raises(HvdliteInternalError, match="has been shut down") as caught:
            handle.wait()
        assert f"rank {size - 1}: its process exited" in str(caught.value)
    late = job.submit(0, "late")
    job.run(late.done)
    with pytest.raises(HvdliteInternalError, match="has been shut down"):
        late.wait()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_leave_with_different_things_pending_do_not_wait_for_each_other(size, seed):
    job = Job(size, seed)
    handles = [job.submit(r, f"mine{r}") for r in range(size)]
    for rank in range(size):
        job.leave(rank)
    job.run(lambda: all(engine._closed() for engine in job.engines))
    for handle in handles:
        with pytest.raises(HvdliteInternalError):
            handle.wait()
    job.world.check_quiet()


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_leaves_early_waits_for_what_the_others_are_about_to_submit(size):
    job = Job(size)
    first = job.submit(0, "a")
    job.leave(0)
    for _ in range(50):
        job.engines[0].step()
    rest = [job.submit(r, "a") for r in range(1, size)]
    job.run(lambda: all(h.done() for h in [first, *rest]))
    for handle in [first, *rest]:
        np.testing.assert_array_equal(handle.wait()[0], [size * (size + 1) / 2] * 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_stall_is_reported_with_tensors_and_missing_ranks(seed, caplog, monkeypatch):
    monkeypatch.setattr("hvdlite.log.logger.propagate", True)
    job = Job(3, seed, StallLimits(60, 0), tick=0.05)
    handles = [job.submit(r, "w") for r in (0, 2)]
    job.run(lambda: any("not submitted by rank 1" in t for t in caplog.messages))
    text = next(t for t in caplog.messages if "not submitted by rank 1" in t)
    assert "'w'" in text and "Stall" in text
    assert job.now > 60
    # It is a warning: the collective still works.
    handles.append(job.submit(1, "w"))
    job.run(lambda: all(h.done() for h in handles))
    for handle in handles:
        np.testing.assert_array_equal(handle.wait()[0], [6.0, 6.0])


@pytest.mark.parametrize("seed", range(20))
def test_a_stall_past_the_second_limit_ends_the_job_everywhere(seed):
    job = Job(3, seed, StallLimits(10, 30), tick=0.05)
    handles = [job.submit(r, "w") for r in (1, 2)]
    job.run(lambda: all(h.done() for h in handles) and all(e.failed for e in job.engines))
    for handle in handles:
        with pytest.raises(HvdliteInternalError, match="'w'.*not submitted by rank 0"):
            handle.wait()
    with pytest.raises(HvdliteInternalError, match="not submitted by rank 0"):
        job.submit(0, "w")


@pytest.mark.parametrize("seed", range(5))
def test_a_shutdown_limit_below_the_warning_limit_is_heeded(seed):
    job = Job(3, seed, StallLimits(60, 10), tick=0.05)
    handles = [job.submit(r, "w") for r in (0, 2)]
    job.run(lambda: all(e.failed for e in job.engines))
    assert 10 < job.now < 30
    for handle in handles:
        with pytest.raises(HvdliteInternalError, match="10 s.*'w'.*not submitted by rank 1"):
            handle.wait()


def test_a_stall_among_64_ranks_is_one_short_warning(caplog, monkeypatch):
    monkeypatch.setattr("hvdlite.log.logger.propagate", True)
    job = Job(64, 0, StallLimits(10, 0), tick=0.0005)
    late = {3, 4, 5, 40}
    handles = [job.submit(r, f"g{i}") for i in range(20) for r in range(64) if r not in late]
    job.run(lambda: caplog.messages, limit=300_000)
    (text,) = caplog.messages
    assert "20 tensors" in text and "not submitted by ranks 3-5, 40" in text
    assert len(text) < 500
    handles += [job.submit(r, f"g{i}") for i in range(20) for r in sorted(late)]
    job.run(lambda: all(h.done() for h in handles))


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_does_not_even_answer_is_named(stopped, caplog, monkeypatch):
    monkeypatch.setattr("hvdlite.log.logger.propagate", True)
    job = Job(3, 1, StallLimits(10, 0), tick=0.05)
    job.stopped.add(stopped)
    job.world.drop(stopped)
    for rank in {0, 1, 2} - {stopped}:
        job.submit(rank, "w")
    job.run(lambda: any("answer" in t for t in caplog.messages))
    text = next(t for t in caplog.messages if "answer" in t)
    assert f"rank {stopped}" in text and "'w'" in text


@pytest.mark.parametrize("seed", range(20))
def test_a_duplicate_name_hurts_nobody_else(seed):
    job = Job(2, seed)
    first = job.submit(0, "w")
    with pytest.raises(DuplicateNameError, match=r"Rank 0.*'w'.*same name"):
        job.submit(0, "w")
    other = job.submit(1, "w")
    job.run(lambda: first.done() and other.done())
    np.testing.assert_array_equal(first.wait()[0], [3.0, 3.0])
    again = [job.submit(r, "w") for r in range(2)]
    job.run(lambda: all(h.done() for h in again))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", range(20))
def test_process_sets_come_and_go_while_others_work(size, seed):
    job = Job(size, seed)
    for turn in range(3):
        ranks = tuple(range(turn % size, size))
        adding = [job.submit(r, None, kind=Kind.ADD_PROCESS_SET, splits=ranks) for r in range(size)]
        background = [job.submit(r, f"b{turn}") for r in reversed(range(size))]
        job.run(lambda a=adding: all(h.done() for h in a))
        (set_id,) = {h.wait() for h in adding}
        inside = {r: job.submit(r, "w", set_id=set_id) for r in ranks}
        lonely = job.submit(ranks[0], "lonely", set_id=set_id) if len(ranks) > 1 else None
        job.run(lambda i=inside: all(h.done() for h in i.values()))
        for handle in inside.values():
            np.testing.assert_array_equal(handle.wait()[0], [sum(r + 1.0 for r in ranks)] * 2)
        removing = [
            job.submit(r, None, kind=Kind.REMOVE_PROCESS_SET, splits=(set_id,)) for r in range(size)
        ]
        everything = [*removing, *background, *([lonely] if lonely else [])]
        job.run(lambda e=everything: all(h.done() for h in e))
        if lonely:
            with pytest.raises(HvdliteInternalError, match="removed"):
                lonely.wait()
        job.run(lambda s=set_id: all(s not in e.channels for e in job.engines))
    for rank in range(size):
        job.leave(rank)
    job.run(lambda: all(engine._closed() for engine in job.engines))
    job.world.check_quiet()


def test_different_process_sets_are_a_mismatch_on_every_rank():
    job = Job(3)
    handles = [
        job.submit(r, None, kind=Kind.ADD_PROCESS_SET, splits=(0, 1 + r % 2)) for r in range(3)
    ]
    job.run(lambda: all(h.done() for h in handles))
    texts = set()
    for handle in handles:
        with pytest.raises(MismatchError, match="Mismatched process set") as caught:
            handle.wait()
        texts.add(str(caught.value))
    assert len(texts) == 1


def test_a_wait_with_a_timeout_ends_and_the_collective_goes_on():
    job = Job(2)
    handle = job.submit(0, "w")
    with pytest.raises(HvdliteTimeoutError, match="'w'.*rank 0"):
        handle.wait(timeout=0.01)
    other = job.submit(1, "w")
    job.run(lambda: handle.done() and other.done())
    np.testing.assert_array_equal(handle.wait()[0], [3.0, 3.0])


def test_ranks_that_wait_for_different_tensors_slow_down():
    job = Job(2, tick=1e-4)
    job.submit(0, "a")
    job.submit(1, "b")
    job.run(lambda: job.now > 1.0)
    first = job.engines[0].counters.rounds
    # 1 ms at first, then a twentieth of the time waited, up to 5 ms.
    assert 150 < first < 400
    job.run(lambda: job.now > 3.0)
    assert job.engines[0].counters.rounds - first < 500


@pytest.mark.parametrize("seed", range(10))
def test_an_internal_error_fails_what_is_in_flight_and_what_comes(seed, monkeypatch):
    job = Job(2, seed)
    handle = job.submit(0, "w")

    def broken(now, tests):
        raise RuntimeError("broken by the test")

    monkeypatch.setattr(job.engines[0].channels[GLOBAL_SET], "advance", broken)
    job.engines[0].step()
    with pytest.raises(HvdliteInternalError, match="failed on rank 0: RuntimeError: broken by"):
        handle.wait()
    with pytest.raises(HvdliteInternalError, match="broken by the test"):
        job.submit(0, "x")


def test_an_interrupted_collective_is_named(monkeypatch):
    class Never:
        def Test(self):
            return False

    job = Job(2)
    channel = job.engines[0].channels[GLOBAL_SET]
    monkeypatch.setattr(channel.transport, "allreduce", lambda *_: iter([Never()]))
    handles = [job.submit(rank, "w") for rank in range(2)]
    job.run(lambda: channel.in_flight)
    job.engines[0].fail("broken by the test")
    with pytest.raises(HvdliteInternalError, match="broken by the test; 'w' was interrupted"):
        handles[0].wait()


def test_an_engine_that_fails_while_it_leaves_has_left(tmp_path):
    job = Job(2)
    job.engines[0].start_timeline(str(tmp_path / "a.json"), False)
    for rank in range(2):
        job.submit(rank, "w")
    job.run(lambda: job.engines[0].agenda.chores)
    job.leave(0)
    assert not job.engines[0]._closed()
    job.engines[0].fail("broken by the test")
    assert job.engines[0]._closed()


def test_a_result_that_cannot_be_converted_is_an_error_for_all_who_wait(monkeypatch):
    job = Job(2)
    handles = [job.submit(rank, "w") for rank in range(2)]
    job.run(lambda: all(handle.done() for handle in handles))
    second = threading.Event()
    lock = threading.RLock()

    class Watched:
        def __enter__(self):
            if threading.current_thread() is thread:
                second.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def broken(result):
        thread.start()
        assert second.wait(10)
        raise ValueError("broken by the test")

    def wait():
        try:
            outcomes.append(handles[0].wait())
        except ValueError as error:
            outcomes.append(str(error))

    outcomes = []
    thread = threading.Thread(target=wait, daemon=True)
    monkeypatch.setattr("hvdlite.engine.submissions._converting", Watched())
    handles[0].convert = broken
    wait()
    thread.join(10)
    wait()
    assert outcomes == ["broken by the test"] * 3


@pytest.mark.parametrize("count", [1, 33, 100])
def test_all_that_every_rank_has_submitted_is_completed_before_the_end(count):
    job = Job(2, count)
    handles = [job.submit(r, None) for r in range(2) for _ in range(count)]
    for rank in range(2):
        job.leave(rank)
    job.run(lambda: all(engine._closed() for engine in job.engines))
    for handle in handles:
        np.testing.assert_array_equal(handle.wait()[0], [3.0, 3.0])


def test_a_handle_does_not_outlive_its_engine_undone(monkeypatch):
    job = Job(2)
    handles = [job.submit(r, "w") for r in range(2)]
    # Between being agreed on and being carried out, a request is in none of the queues.
    monkeypatch.setattr("hvdlite.engine.channel.plan", lambda agreed, threshold: 1 / 0)
    job.run(lambda: all(engine.failed for engine in job.engines))
    for handle in handles:
        assert handle.done()
        with pytest.raises(HvdliteInternalError, match="ZeroDivisionError"):
            handle.wait(timeout=5)


# -- signal handlers ------------------------------------------------------------------------


@pytest.fixture
def on_signal():
    """Have a function called when SIGUSR1 arrives, for the length of a test."""
    before = signal.getsignal(signal.SIGUSR1)

    def set_handler(function):
        signal.signal(signal.SIGUSR1, lambda *_: function())

    yield set_handler
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("call", ["wait", "shutdown", "wait with a timeout"])
@pytest.mark.parametrize("caught", [True, False])
def test_a_signal_handler_that_waits_in_the_middle_of_a_step_is_told(
    on_signal, monkeypatch, call, caught
):
    job = Job(1)
    engine = job.engines[0]
    errors = []

    def handler():
        try:
            if call == "shutdown":
                engine.shutdown("by a handler")
            else:
                job.submit(0, "inner").wait(5 if "timeout" in call else None)
        except RuntimeError as error:
            errors.append(error)
            if not caught:
                raise

    on_signal(handler)
    inspect = engine.sets.inspect

    def interrupted():
        if not errors:
            signal.raise_signal(signal.SIGUSR1)
        return inspect()

    monkeypatch.setattr(engine.sets, "inspect", interrupted)
    handle = job.submit(0, "outer")
    if caught:
        np.testing.assert_array_equal(handle.wait()[0], [1.0, 1.0])
        assert not engine.failed
        job.submit(0, "next").wait()
    else:
        try:
            handle.wait()  # which may have been completed before
        except HvdliteInternalError as error:
            assert "a signal handler" in str(error)
        assert engine.failed
        with pytest.raises(HvdliteInternalError, match="a signal handler .* waits"):
            job.submit(0, "next")
    assert "set a flag" in str(errors[0])


def test_a_signal_handler_may_submit_anywhere_and_wait_between_steps(on_signal, monkeypatch):
    job = Job(1)
    engine = job.engines[0]
    results = []

    class Names(dict):
        """Names in flight, interrupted by a signal when one is looked up, with a lock held."""

        def __contains__(self, name):
            if name == "outer" and not results:
                signal.raise_signal(signal.SIGUSR1)
            return super().__contains__(name)

    on_signal(lambda: results.append(job.submit(0, "inner").wait()[0]))
    monkeypatch.setitem(engine._names, GLOBAL_SET, Names())
    np.testing.assert_array_equal(job.submit(0, "outer").wait()[0], [1.0, 1.0])
    np.testing.assert_array_equal(results, [[1.0, 1.0]])


def test_a_process_set_that_is_removed_twice_at_once():
    job = Job(3)
    adding = [job.submit(r, None, kind=Kind.ADD_PROCESS_SET, splits=(0, 1)) for r in range(3)]
    job.run(lambda: all(h.done() for h in adding))
    (set_id,) = {h.wait() for h in adding}
    removing = [
        job.submit(r, None, kind=Kind.REMOVE_PROCESS_SET, splits=(set_id,))
        for r in [*range(3), *range(3)]
    ]
    job.run(lambda: all(h.done() for h in removing))
    job.run(lambda: all(set_id not in engine.channels for engine in job.engines))
    after = [job.submit(r, "after") for r in range(3)]
    job.run(lambda: all(h.done() for h in after))
    assert not any(engine.failed for engine in job.engines)
    for handle in [*removing, *after]:
        handle.wait()
