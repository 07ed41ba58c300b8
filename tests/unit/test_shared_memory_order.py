"""No two ranks touch the same shared memory at once: whatever conflicts, a barrier lies between.

Ranks that take turns in one thread cannot race, so what they do is written down with the number
of barriers that each rank has started and completed, and checked afterwards.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import numpy as np
import pytest

from hvdlite.transport import shared_lanes
from hvdlite.transport.shared_lanes import Lane, Passage
from hvdlite.transport.shared_memory import SharedMemoryTransport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, drive, random_scheduler

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no anonymous files"
)


@dataclass
class Access:
    rank: int
    place: tuple
    start: int
    stop: int
    writes: bool
    started: list[int]
    completed: list[int]
    what: str

    def precedes(self, other):
        # Barriers that this rank started only after the access, and the other one completed
        # before its own.
        return any(
            completed > started
            for started, completed in zip(self.started, other.completed, strict=True)
        )

    def conflicts(self, other):
        return (
            self.rank != other.rank
            and (self.writes or other.writes)
            and self.place == other.place
            and self.start < other.stop
            and other.start < self.stop
            and not self.precedes(other)
            and not other.precedes(self)
        )


class CountedRequest:
    def __init__(self, request, on_completion):
        self._request = request
        self._on_completion = on_completion

    def Test(self):
        if not self._request.Test():
            return False
        if self._on_completion is not None:
            self._on_completion()
            self._on_completion = None
        return True


def counted(meet, number, started, completed):
    """Return `meet` of a lane, counting in the rank's lists."""

    def meet_and_count():
        started[number] += 1

        def complete():
            completed[number] += 1

        return CountedRequest(meet(), complete)

    return meet_and_count


@pytest.fixture(params=[True, False], ids=["counting", "barriers"], autouse=True)
def how_ranks_meet(request, monkeypatch):
    monkeypatch.setattr(shared_lanes, "STORES_IN_ORDER", request.param)


class Log:
    """Makes transports of which it writes down all accesses to shared memory."""

    def __init__(self, size, scheduler, monkeypatch):
        self.accesses = []
        self.world = FakeWorld(size, scheduler)
        creations = [
            [SharedMemoryTransport.creating(comm, 64, capacity=2**20)]
            for comm in self.world.communicators
        ]
        self.transports = [made for (made,) in drive(self.world, creations)]
        self.counts = []
        self.lanes = {}
        for rank, transport in enumerate(self.transports):
            lanes = transport._lanes
            started, completed = [0] * len(lanes), [0] * len(lanes)
            self.counts.append((started, completed))
            for number, lane in enumerate(lanes):
                lane.meet = counted(lane.meet, number, started, completed)
                self.lanes[id(lane)] = number
            self._watch_buffers(rank, transport._segments)
        self._watch(monkeypatch)

    def note(self, rank, place, start, stop, writes, what):
        started, completed = self.counts[rank]
        self.accesses.append(
            Access(rank, place, start, stop, writes, [*started], [*completed], what)
        )

    def _watch_buffers(self, rank, segments):
        view = segments.view

        def noted(owner, offset, nbytes):
            # Which part, is the transport's business; that of the owner is to wait for all.
            if owner != rank:
                self.note(rank, ("buffer", owner), offset, offset + nbytes, False, "in place")
            return view(owner, offset, nbytes)

        segments.view = noted

    def _watch(self, monkeypatch):
        place, show, shown = Passage.place, Lane.show, Lane.shown
        copy_in, copy_out = Passage.copy_in, Passage.copy_out
        doing = []

        def noted_place(passage, rank, piece, step, length):
            lane = passage._lane
            itemsize = passage.buffer.itemsize
            index = (passage._first + step) % lane.slot_count
            start = (index * passage._slot + piece * passage._spacing) * itemsize
            what = doing[-1] if doing else "reduce"
            self.note(
                lane.comm.rank,
                ("slots", self.lanes[id(lane)], rank),
                start,
                start + length * itemsize,
                what != "copy out",
                f"{what} {piece} {step}",
            )
            return place(passage, rank, piece, step, length)

        def during(name, function):
            def noted(*arguments):
                doing.append(name)
                try:
                    return function(*arguments)
                finally:
                    doing.pop()

            return noted

        def noted_show(lane, offset):
            at = lane.passes % 2
            rank = lane.comm.rank
            self.note(rank, ("card", self.lanes[id(lane)], rank), at, at + 1, True, "show")
            show(lane, offset)

        def noted_shown(lane):
            at = lane.passes % 2
            for owner in range(lane.comm.size):
                place = "card", self.lanes[id(lane)], owner
                self.note(lane.comm.rank, place, at, at + 1, False, "shown")
            return shown(lane)

        monkeypatch.setattr(Passage, "place", noted_place)
        monkeypatch.setattr(Passage, "copy_in", during("copy in", copy_in))
        monkeypatch.setattr(Passage, "copy_out", during("copy out", copy_out))
        monkeypatch.setattr(Lane, "show", noted_show)
        monkeypatch.setattr(Lane, "shown", noted_shown)

    def conflicts(self):
        return [
            (first, second)
            for index, first in enumerate(self.accesses)
            for second in self.accesses[:index]
            if first.conflicts(second)
        ]

    def used_by_owner(self, rank, buffer, operation):
        """Let the rank write to its buffer right before and right after an operation."""
        offset = self.transports[rank]._segments.offset_of(buffer)

        def note(what):
            if offset >= 0:
                self.note(rank, ("buffer", rank), offset, offset + buffer.nbytes, True, what)

        note("before")
        yield from operation
        note("after")


def run(log, seed):
    order = random.Random(seed)
    size = len(log.transports)
    operations = [[] for _ in range(size)]
    for tag in range(order.randrange(1, 10)):
        counts = [order.choice([0, 1, 16, 40, 170]) for _ in range(size)]
        kind = order.choice(["allreduce", "allreduce", "reduce_scatter", "allgather", "broadcast"])
        root = order.randrange(size)
        shared = order.choice(["all", "none", "some"])
        for rank, transport in enumerate(log.transports):
            buffer = np.zeros(sum(counts), np.float32)
            if shared == "all" or (shared == "some" and order.random() < 0.5):
                buffer = transport.allocate(buffer.nbytes).view(np.float32)
            operations[rank].append(
                log.used_by_owner(
                    rank,
                    buffer,
                    {
                        "allreduce": lambda t, b, c, r, tag: t.allreduce(
                            b, DType.FLOAT32, ReduceOp.SUM, None, tag
                        ),
                        "reduce_scatter": lambda t, b, c, r, tag: t.reduce_scatter(
                            b, c, DType.FLOAT32, ReduceOp.SUM, None, tag
                        ),
                        "allgather": lambda t, b, c, r, tag: t.allgather(b, c, tag),
                        "broadcast": lambda t, b, c, r, tag: t.broadcast(b, r, tag),
                    }[kind](transport, buffer, counts, root, tag),
                )
            )
    drive(log.world, operations, order)


@pytest.mark.parametrize("seed", range(40))
def test_barriers_separate_whatever_conflicts(seed, monkeypatch):
    log = Log(2 + seed % 3, random_scheduler(seed), monkeypatch)
    run(log, seed)
    assert not log.conflicts()


@pytest.mark.parametrize("size, name", [(2, "SLOTS_OF_TWO"), (3, "SLOTS")])
def test_one_slot_less_would_be_a_race(size, name, monkeypatch):
    # Shows that this check would find one.
    monkeypatch.setattr(shared_lanes, name, getattr(shared_lanes, name) - 1)
    found = []
    for seed in range(40):
        with monkeypatch.context() as patch:
            log = Log(size, random_scheduler(seed), patch)
            run(log, seed)
            found += log.conflicts()
    assert {first.place[0] for first, _ in found} == {"slots"}


def test_a_missing_last_barrier_would_be_a_race(monkeypatch):
    class Done:
        def Test(self):
            return True

    log = Log(2, random_scheduler(0), monkeypatch)
    buffers = [transport.allocate(4000).view(np.float32) for transport in log.transports]
    operations = []
    for rank, transport in enumerate(log.transports):
        lane = transport._lanes[0]
        meetings = iter([lane.meet])
        lane.meet = lambda meetings=meetings: next(meetings, Done)()
        work = transport.allreduce(buffers[rank], DType.FLOAT32, ReduceOp.SUM, None, 0)
        operations.append([log.used_by_owner(rank, buffers[rank], work)])
    drive(log.world, operations)
    assert {first.place[0] for first, _ in log.conflicts()} == {"buffer"}
