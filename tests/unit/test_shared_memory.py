"""Collectives through shared memory: their results under any timing, and their effort."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from hvdlite.transport import shared_lanes
from hvdlite.transport.shared_memory import SharedMemoryTransport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, drive, random_scheduler

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no anonymous files"
)

WHERE = ("ordinary", "shared", "mixed", "far", "far and shared")
"""Far memory is reached by way of the kernel; ordinary memory goes through slots."""


@pytest.fixture(params=[True, False], ids=["counting", "barriers"], autouse=True)
def how_ranks_meet(request, monkeypatch):
    monkeypatch.setattr(shared_lanes, "STORES_IN_ORDER", request.param)


class Watched:
    """A communicator that keeps count of its rank's meetings."""

    def __init__(self, comm):
        self._comm = comm
        self.barriers = []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def watch(self, transport):
        def counted(meet):
            def meet_and_count():
                self.barriers.append(1)
                return meet()

            return meet_and_count

        for lane in transport._lanes:
            lane.meet = counted(lane.meet)


def is_far(where):
    return where.startswith("far")


def make(size, scheduler=None, segment_bytes=64, capacity=2**20, far=False):
    world = FakeWorld(size, scheduler)
    comms = [Watched(comm) for comm in world.communicators]
    creations = [
        [
            SharedMemoryTransport.creating(
                comm, segment_bytes, capacity=capacity, direct_bytes=1 if far else None
            )
        ]
        for comm in comms
    ]
    transports = [made for (made,) in drive(world, creations)]
    for comm, transport in zip(comms, transports, strict=True):
        comm.watch(transport)
    return world, comms, transports


def placed(transports, values, where):
    """Copy each rank's values into memory of a kind."""
    buffers = []
    for rank, (transport, value) in enumerate(zip(transports, values, strict=True)):
        buffer = np.empty_like(value)
        if where == "shared" or (where in ("mixed", "far and shared") and rank % 2):
            # So that no two ranks have theirs at the same place.
            allocated = transport.allocate(64 * (rank + 1) + value.nbytes)
            buffer = allocated[64 * (rank + 1) :].view(value.dtype)
        buffer[...] = value
        buffers.append(buffer)
    return buffers


def floats(size, length, seed=0):
    source = np.random.default_rng([length, seed])
    return [source.normal(size=length).astype(np.float32) for _ in range(size)]


def in_order(values):
    total = values[0].copy()
    for value in values[1:]:
        total += value
    return total


# -- results ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("size", range(1, 7))
def test_an_allreduce_sums_in_the_order_of_the_ranks(size, where):
    world, _, transports = make(size, far=is_far(where))
    for length in (0, 1, 2, 15, 16, 17, 96, 97, 1000):
        values = floats(size, length)
        buffers = placed(transports, values, where)
        drive(
            world,
            [
                [transport.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
                for transport, buffer in zip(transports, buffers, strict=True)
            ],
        )
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, in_order(values))
    world.check_quiet()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [DType.UINT8, DType.FLOAT32, DType.COMPLEX128])
def test_buffers_of_several_blocks(dtype, where):
    # A block is half a MiB of memory in segments, and a quarter of any other.
    size, length = 3, 3 * (2**19 + 70_001)
    world, _, transports = make(size, segment_bytes=2**16, capacity=2**26, far=is_far(where))
    for by in ("allreduce", "allgather"):
        values = [(np.arange(length) * (rank + 3) % 83).astype(dtype.storage) for rank in range(3)]
        third = length // 3
        expected = values[0] + values[1] + values[2]
        if by == "allgather":
            expected = np.concatenate(
                [value[rank * third : (rank + 1) * third] for rank, value in enumerate(values)]
            )
        buffers = placed(transports, values, where)
        drive(
            world,
            [
                [
                    transport.allreduce(buffer, dtype, ReduceOp.SUM, None, 0)
                    if by == "allreduce"
                    else transport.allgather(buffer, [third] * 3, 0)
                ]
                for transport, buffer in zip(transports, buffers, strict=True)
            ],
        )
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", list(DType))
def test_every_element_type_and_operation(dtype, where):
    size, length = 3, 101
    world, _, transports = make(size, far=is_far(where))
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
            continue
        numbers = np.random.default_rng(1).integers(0, 3, (size, length))
        function = {
            ReduceOp.SUM: np.add,
            ReduceOp.PRODUCT: np.multiply,
            ReduceOp.MIN: np.minimum,
            ReduceOp.MAX: np.maximum,
        }[op]
        expected = function.reduce(numbers)
        if dtype is DType.BOOL:
            numbers = numbers > 1
            either = op in (ReduceOp.SUM, ReduceOp.MAX)
            expected = numbers.any(0) if either else numbers.all(0)
        if dtype is DType.BFLOAT16:
            numbers, expected = (
                array.astype(np.float32).view(np.uint32) >> 16 for array in (numbers, expected)
            )
        values = [row.astype(dtype.storage) for row in numbers]
        buffers = placed(transports, values, where)
        drive(
            world,
            [
                [transport.allreduce(buffer, dtype, op, None, 0)]
                for transport, buffer in zip(transports, buffers, strict=True)
            ],
        )
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, expected.astype(dtype.storage))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("share", [True, False])
def test_finish_sees_each_owned_element_once_and_reduced(where, share):
    size, counts = 3, [34, 33, 33]
    seen = [[] for _ in range(size)]
    world, _, transports = make(size, far=is_far(where))
    buffers = placed(transports, [np.arange(100, dtype=np.float32)] * size, where)

    def start(rank):
        def finish(piece):
            seen[rank].extend(piece.tolist())
            piece *= 2

        arguments = (DType.FLOAT32, ReduceOp.SUM, finish, 0)
        if share:
            return transports[rank].allreduce(buffers[rank], *arguments)
        return transports[rank].reduce_scatter(buffers[rank], counts, *arguments)

    drive(world, [[start(rank)] for rank in range(size)])
    assert [len(values) for values in seen] == counts
    assert [value for values in seen for value in values] == [3.0 * i for i in range(100)]
    for rank, buffer in enumerate(buffers):
        part = slice(None) if share else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        np.testing.assert_array_equal(buffer[part], 6 * np.arange(100)[part])


@pytest.mark.parametrize("far", [True, False])
def test_all_ranks_agree_about_nan_and_signed_zero(far):
    size = 2
    world, _, transports = make(size, far=far)
    patterns = [0x7FC00001, 0x00000000], [0x7FC00002, 0x80000000]
    for where in WHERE:
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX):
            values = [np.array(rank * 20, np.uint32).view(np.float32) for rank in patterns]
            buffers = placed(transports, values, where)
            drive(
                world,
                [
                    [transport.allreduce(buffer, DType.FLOAT32, op, None, 0)]
                    for transport, buffer in zip(transports, buffers, strict=True)
                ],
            )
            assert buffers[0].tobytes() == buffers[1].tobytes()


def random_operations(size, transports, order):
    """Return operations for each rank, and a function that checks the results."""
    operations = [[] for _ in range(size)]
    checks = []
    for tag in range(order.randrange(1, 12)):
        kind = order.choice(["allreduce"] * 3 + ["reduce_scatter", "allgather", "broadcast"])
        where = order.choice([*WHERE, "ordinary"])
        counts = [order.choice([0, 1, 7, 16, 40, 150]) for _ in range(size)]
        root = order.randrange(size)
        if kind == "broadcast":
            counts = [count if rank == root else 0 for rank, count in enumerate(counts)]
        length = sum(counts)
        values = floats(size, length, tag)
        expected = in_order(values)
        if kind in ("allgather", "broadcast"):
            stops = np.cumsum(counts)
            expected = np.concatenate(
                [values[rank][stops[rank] - counts[rank] : stops[rank]] for rank in range(size)]
            )
        buffers = placed(transports, values, where)
        for rank, transport in enumerate(transports):
            buffer = buffers[rank]
            if kind == "allreduce":
                work = transport.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, tag)
            elif kind == "reduce_scatter":
                work = transport.reduce_scatter(
                    buffer, counts, DType.FLOAT32, ReduceOp.SUM, None, tag
                )
            elif kind == "allgather":
                work = transport.allgather(buffer, counts, tag)
            else:
                work = transport.broadcast(buffer, root, tag)
            operations[rank].append(work)
        checks.append((kind, counts, buffers, expected))

    def check():
        for kind, counts, buffers, expected in checks:
            for rank, buffer in enumerate(buffers):
                part = slice(None)
                if kind == "reduce_scatter":
                    part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
                np.testing.assert_array_equal(buffer[part], expected[part])

    return operations, check


def one_after_the_other(operations):
    for operation in operations:
        yield from operation


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("together", [True, False])
def test_any_operations_under_any_timing(seed, together):
    order = random.Random(seed)
    size = order.randrange(2, 6)
    world, _, transports = make(size, random_scheduler(seed), far=seed % 2 == 1)
    operations, check = random_operations(size, transports, order)
    if not together:
        operations = [[one_after_the_other(of_rank)] for of_rank in operations]
    drive(world, operations, order)
    check()
    world.check_quiet()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_alltoall(size):
    world, _, transports = make(size)
    send = [np.arange(size * 3, dtype=np.int32) + 100 * rank for rank in range(size)]
    recv = [np.zeros(size * 3, dtype=np.int32) for _ in range(size)]
    counts = [3] * size
    drive(
        world,
        [
            [transports[rank].alltoall(send[rank], counts, recv[rank], counts, 0)]
            for rank in range(size)
        ],
    )
    for rank in range(size):
        expected = np.concatenate([s[3 * rank : 3 * rank + 3] for s in send])
        np.testing.assert_array_equal(recv[rank], expected)


@pytest.mark.parametrize("far", [True, False])
def test_a_read_only_buffer_can_be_broadcast(far):
    world, _, transports = make(2, far=far)
    for root_memory in (np.ones(100, np.uint8), transports[0].allocate(100)):
        root_memory[:] = 7
        root_memory.flags.writeable = False
        other = np.zeros(100, np.uint8)
        drive(
            world,
            [
                [transport.broadcast(buffer, 0, 0)]
                for transport, buffer in zip(transports, (root_memory, other), strict=True)
            ],
        )
        assert (other == 7).all()


# -- effort -----------------------------------------------------------------------------


def barriers_of(where, length, size=2, segment_bytes=64):
    world, comms, transports = make(size, segment_bytes=segment_bytes, far=is_far(where))
    buffers = placed(transports, floats(size, length), where)
    drive(
        world,
        [
            [transport.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
            for transport, buffer in zip(transports, buffers, strict=True)
        ],
    )
    (count,) = {len(comm.barriers) for comm in comms}
    return count


@pytest.mark.parametrize(
    "where, length, barriers",
    [
        ("shared", 1, 2),
        ("shared", 5000, 2),
        ("ordinary", 32, 2),
        ("ordinary", 33, 3),
        ("ordinary", 320, 11),
        ("mixed", 32, 3),
        ("far", 5000, 2),
        ("far and shared", 5000, 2),
    ],
)
def test_ranks_meet_as_rarely_as_can_be(where, length, barriers):
    assert barriers_of(where, length) == barriers


@pytest.mark.parametrize("where", ["shared", "far", "far and shared"])
def test_what_can_be_reached_bypasses_the_slots(where):
    world, _, transports = make(2, far=is_far(where))
    slots = [lane.slots[rank] for rank in range(2) for lane in transports[rank]._lanes]
    for slot in slots:
        slot[:] = 0xEE
    buffers = placed(transports, floats(2, 1000), where)
    counts = [500, 500]
    for start in (
        lambda t, b: t.allreduce(b, DType.FLOAT32, ReduceOp.SUM, None, 0),
        lambda t, b: t.reduce_scatter(b, counts, DType.FLOAT32, ReduceOp.SUM, None, 0),
        lambda t, b: t.allgather(b, counts, 0),
        lambda t, b: t.broadcast(b, 1, 0),
    ):
        drive(world, [[start(t, b)] for t, b in zip(transports, buffers, strict=True)])
    assert all((slot == 0xEE).all() for slot in slots)


def test_staging_memory_is_bounded_however_many_ranks():
    for size in (2, 5):
        _, _, transports = make(size, segment_bytes=2**30)
        assert transports[0]._segments.nbytes <= 2 * 5 * 2 * 2**20 + 2**16
