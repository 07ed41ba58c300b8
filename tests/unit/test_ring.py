"""What a ring promises beyond its results: how much it sends, in which order it sums."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hvdlite.transport.ring import RingTransport, ScratchPool, even_counts
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, Stuck, drive, random_scheduler


class Watched:
    """A communicator that notes what passes through it."""

    def __init__(self, comm):
        self._comm = comm
        self.sent = []
        self.received = []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, data, dest, tag):
        self.sent.append((dest, data.nbytes))
        return self._comm.isend(data, dest, tag)

    def irecv(self, data, source, tag):
        self.received.append((source, data.nbytes))
        return self._comm.irecv(data, source, tag)


def make(size, scheduler=None, **options):
    world = FakeWorld(size, scheduler)
    watched = [Watched(comm) for comm in world.communicators]
    return world, watched, [RingTransport(comm, **options) for comm in watched]


def floats(size, length):
    source = np.random.default_rng(length)
    return [source.normal(size=length).astype(np.float32) for _ in range(size)]


@pytest.mark.parametrize("size", range(2, 7))
@pytest.mark.parametrize("length", [0, 1, 6, 60, 61, 1000])
def test_an_allreduce_sends_as_little_as_can_be(size, length):
    world, watched, rings = make(size, segment_bytes=64)
    buffers = floats(size, length)
    drive(
        world,
        [
            [ring.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
            for ring, buffer in zip(rings, buffers, strict=True)
        ],
    )
    world.check_quiet()
    counts = even_counts(length, size)
    for rank, comm in enumerate(watched):
        # All but the last piece of each half: its own, and that of the rank after it.
        passed = 2 * length - counts[rank] - counts[(rank + 1) % size]
        assert sum(nbytes for _, nbytes in comm.sent) == 4 * passed
        assert {dest for dest, _ in comm.sent} <= {(rank + 1) % size}
        assert {source for source, _ in comm.received} <= {(rank - 1) % size}
        assert all(0 < nbytes <= 64 for _, nbytes in comm.sent)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("segment_bytes", [16, 64, 4096])
def test_a_piece_is_summed_from_the_rank_after_its_owner_on(size, segment_bytes):
    contributions = floats(size, 101)
    expected = []
    stop = 0
    for owner, count in enumerate(even_counts(101, size)):
        start, stop = stop, stop + count
        total = contributions[(owner + 1) % size][start:stop]
        for step in range(2, size + 1):
            total = total + contributions[(owner + step) % size][start:stop]
        expected.append(total)
    world, _, rings = make(size, random_scheduler(size), segment_bytes=segment_bytes)
    buffers = [contribution.copy() for contribution in contributions]
    drive(
        world,
        [
            [ring.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
            for ring, buffer in zip(rings, buffers, strict=True)
        ],
    )
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, np.concatenate(expected))


def test_finish_sees_each_owned_element_once():
    size, length = 3, 100
    seen = [[] for _ in range(size)]
    world, _, rings = make(size, segment_bytes=32)
    buffers = [np.arange(length, dtype=np.float32) for _ in range(size)]
    drive(
        world,
        [
            [
                rings[rank].allreduce(
                    buffers[rank], DType.FLOAT32, ReduceOp.SUM, seen[rank].extend, 0
                )
            ]
            for rank in range(size)
        ],
    )
    assert [len(values) for values in seen] == even_counts(length, size)
    assert [value for values in seen for value in values] == [3.0 * i for i in range(length)]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_no_more_is_in_flight_than_the_limits_say(window):
    _, watched, rings = make(2, lambda event: event != "eager", segment_bytes=16, window=window)
    buffer = np.zeros(4000, np.float32)  # 500 segments on each rank
    waits = rings[0].allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)
    next(waits)
    assert len(watched[0].received) == window
    assert len(watched[0].sent) == 128


def test_operations_in_flight_share_scratch_that_is_used_again():
    world, _, rings = make(3, random_scheduler(3), segment_bytes=16, window=2)
    for round_ in range(5):
        buffers = [[np.ones(50, np.float32) for _ in range(4)] for _ in rings]
        drive(
            world,
            [
                [
                    ring.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, tag)
                    for tag, buffer in enumerate(buffers[rank])
                ]
                for rank, ring in enumerate(rings)
            ],
            random.Random(round_),
        )
        assert all((buffer == 3).all() for of_rank in buffers for buffer in of_rank)
    for ring in rings:
        assert len(ring._pool._all) <= 4 * 2
        assert sum(map(len, ring._pool._free.values())) == len(ring._pool._all)


def test_scratch_of_an_abandoned_operation_is_not_used_again():
    _, _, rings = make(2, segment_bytes=16, window=2)
    waits = rings[0].allreduce(np.zeros(100, np.float32), DType.FLOAT32, ReduceOp.SUM, None, 0)
    next(waits)
    waits.close()
    pool = rings[0]._pool
    assert len(pool._all) == 2
    assert not any(pool._free.values())


def test_a_lost_rank_stops_the_others_without_harm():
    world, _, rings = make(3, segment_bytes=16)
    world.drop(1)
    buffers = floats(3, 60)
    with pytest.raises(Stuck):
        drive(
            world,
            [
                [ring.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
                for ring, buffer in zip(rings, buffers, strict=True)
            ],
        )


def test_operations_do_not_wait_for_each_other():
    world, _, rings = make(2, segment_bytes=16)
    ones = [np.ones(40, np.float32) for _ in rings]
    # Rank 1 has only the second one in flight so far, and may complete it.
    late = rings[0].allreduce(np.ones(40, np.float32), DType.FLOAT32, ReduceOp.SUM, None, 0)
    next(late)
    drive(
        world,
        [
            [ring.allreduce(one, DType.FLOAT32, ReduceOp.SUM, None, 1)]
            for ring, one in zip(rings, ones, strict=True)
        ],
    )
    assert all((one == 2).all() for one in ones)


@pytest.mark.parametrize("itemsize_above_segment", [DType.COMPLEX128, DType.FLOAT64])
def test_a_segment_holds_at_least_one_element(itemsize_above_segment):
    dtype = itemsize_above_segment
    world, _, rings = make(2, segment_bytes=dtype.itemsize)
    buffers = [np.ones(5, dtype.storage) for _ in rings]
    drive(
        world,
        [
            [ring.allreduce(buffer, dtype, ReduceOp.SUM, None, 0)]
            for ring, buffer in zip(rings, buffers, strict=True)
        ],
    )
    assert all((buffer == 2).all() for buffer in buffers)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("root", [0, 2])
def test_little_is_broadcast_along_a_tree(size, root):
    if root >= size:
        return
    world, watched, rings = make(size)
    buffers = [np.full(10, rank) for rank in range(size)]
    drive(world, [[rings[rank].broadcast(buffers[rank], root, 0)] for rank in range(size)])
    assert all((buffer == root).all() for buffer in buffers)
    assert sum(len(comm.sent) for comm in watched) == size - 1
    assert max(len(comm.sent) for comm in watched) <= (size - 1).bit_length()


def test_much_is_broadcast_along_a_chain():
    world, watched, rings = make(4, segment_bytes=64)
    buffers = [np.full(100, rank, np.int64) for rank in range(4)]
    drive(world, [[rings[rank].broadcast(buffers[rank], 2, 0)] for rank in range(4)])
    assert all((buffer == 2).all() for buffer in buffers)
    assert [sum(nbytes for _, nbytes in comm.sent) for comm in watched] == [800, 0, 800, 800]


def test_even_counts():
    assert even_counts(7, 3) == [3, 2, 2]
    assert even_counts(0, 2) == [0, 0]
    assert even_counts(2, 4) == [1, 1, 0, 0]


def test_scratch_pool():
    pool = ScratchPool()
    first, second = pool.take(8), pool.take(8)
    assert first is not second
    pool.give_back(first)
    assert pool.take(16) is not first
    assert pool.take(8) is first
    pool.clear()
    assert pool.take(8) is not first
