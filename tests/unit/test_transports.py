"""Every transport does the same, whatever MPI's timing is."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.transport.auto import make_transport
from hvdlite.transport.local_communicator import LocalCommunicator
from hvdlite.transport.mpi import MPITransport
from hvdlite.transport.ring import RingTransport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, drive, random_scheduler, scripted_scheduler


def auto(comm):
    chosen = SimpleNamespace(transport="auto", segment_bytes=48, small_bytes=64, peer_memory=True)
    return make_transport(comm, chosen)


MAKERS = {
    "ring": lambda comm: RingTransport(comm, segment_bytes=32, window=2),
    "ring, one segment": lambda comm: RingTransport(comm, segment_bytes=2**20),
    "mpi": lambda comm: MPITransport(comm, RingTransport(comm, 32), gather_bytes=200),
    "auto": auto,
}
OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


# -- operations whose results are known ---------------------------------------------------


def to_storage(values, dtype):
    if dtype is DType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype.storage)


def double(dtype):
    """Return a `finish` that doubles, exactly."""

    def finish(piece):
        assert len(piece)
        if dtype is DType.BFLOAT16:
            wide = (piece.astype(np.uint32) << 16).view(np.float32) * 2
            piece[...] = (wide.view(np.uint32) >> 16).astype(np.uint16)
        else:
            np.multiply(piece, 2, out=piece)

    return finish


def combined(contributions, op):
    function = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }[op]
    return function.reduce(contributions, axis=0)


@st.composite
def counts_of(draw, size, largest=40):
    return draw(st.lists(st.integers(0, largest), min_size=size, max_size=size))


@st.composite
def reduction(draw, size, kind):
    dtype = draw(st.sampled_from(list(DType)))
    ops = OPS[:2] if dtype.is_complex else OPS
    op = draw(st.sampled_from(ops))
    finished = dtype is not DType.BOOL and draw(st.booleans())
    counts = draw(counts_of(size)) if kind == "reduce_scatter" else [draw(st.integers(0, 150))]
    length = sum(counts)
    source = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Small enough for every intermediate result to be exact in every type.
    values = source.integers(0, 3, (size, length))
    total = combined(values, op)
    if dtype is DType.BOOL:
        values = values > 1
        total = values.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else values.all(0)
    expected = to_storage(total * 2 if finished else total, dtype)
    finish = double(dtype) if finished else None
    buffers = [to_storage(values[rank], dtype) for rank in range(size)]

    def start(transport, rank, tag):
        if kind == "allreduce":
            return transport.allreduce(buffers[rank], dtype, op, finish, tag)
        return transport.reduce_scatter(buffers[rank], counts, dtype, op, finish, tag)

    def check():
        for rank, buffer in enumerate(buffers):
            first = sum(counts[:rank]) if kind == "reduce_scatter" else 0
            part = slice(first, first + counts[rank] if kind == "reduce_scatter" else None)
            np.testing.assert_array_equal(buffer[part], expected[part])

    return start, check


@st.composite
def allgather(draw, size, kind):
    dtype = draw(st.sampled_from([DType.UINT8, DType.FLOAT32, DType.COMPLEX128]))
    each = st.integers(0, 40).map(lambda count: [count] * size)
    counts = draw(st.one_of(counts_of(size), each))
    expected = np.random.default_rng(0).integers(0, 100, sum(counts)).astype(dtype.storage)
    buffers = []
    for rank in range(size):
        first = sum(counts[:rank])
        buffer = np.full_like(expected, 111)
        buffer[first : first + counts[rank]] = expected[first : first + counts[rank]]
        buffers.append(buffer)

    def check():
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, expected)

    return (
        lambda transport, rank, tag: transport.allgather(buffers[rank], counts, tag),
        check,
    )


@st.composite
def broadcast(draw, size, kind):
    root = draw(st.integers(0, size - 1))
    length = draw(st.integers(0, 200))
    buffers = [np.full(length, rank, np.uint8) for rank in range(size)]

    def check():
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, np.full(length, root))

    return lambda transport, rank, tag: transport.broadcast(buffers[rank], root, tag), check


@st.composite
def alltoall(draw, size, kind):
    counts = [draw(counts_of(size)) for _ in range(size)]
    sent = [np.repeat(np.arange(size) + 10 * rank, counts[rank]) for rank in range(size)]
    received = [
        np.full(sum(counts[source][rank] for source in range(size)), -1) for rank in range(size)
    ]

    def start(transport, rank, tag):
        incoming = [counts[source][rank] for source in range(size)]
        return transport.alltoall(sent[rank], counts[rank], received[rank], incoming, tag)

    def check():
        for rank in range(size):
            incoming = [counts[source][rank] for source in range(size)]
            expected = np.repeat(np.arange(size) * 10 + rank, incoming)
            np.testing.assert_array_equal(received[rank], expected)

    return start, check


KINDS = {
    "allreduce": reduction,
    "reduce_scatter": reduction,
    "allgather": allgather,
    "broadcast": broadcast,
    "alltoall": alltoall,
}


@st.composite
def operations(draw, size, kinds=tuple(KINDS)):
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    return [draw(KINDS[kind](size, kind)) for kind in chosen]


def run(maker, size, drawn, scheduler, order):
    world = FakeWorld(size, scheduler)
    transports = [maker(comm) for comm in world.communicators]
    drive(
        world,
        [
            [start(transports[rank], rank, tag) for tag, (start, _) in enumerate(drawn)]
            for rank in range(size)
        ],
        order,
    )
    for _, check in drawn:
        check()
    world.check_quiet()
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_operations_at_once(name, data):
    size = data.draw(st.integers(1, 5), "size")
    drawn = data.draw(operations(size))
    script = data.draw(st.lists(st.booleans(), max_size=40), "schedule")
    order = data.draw(st.one_of(st.none(), st.integers(0, 1000)), "order")
    run(
        MAKERS[name],
        size,
        drawn,
        scripted_scheduler(script),
        None if order is None else random.Random(order),
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_each_operation(name, kind, data):
    size = data.draw(st.integers(1, 8), "size")
    drawn = data.draw(operations(size, (kind,)))
    seed = data.draw(st.integers(0, 1000), "seed")
    run(MAKERS[name], size, drawn, random_scheduler(seed), random.Random(seed))


# -- what rounding shows ------------------------------------------------------------------


def reduced(maker, contributions, dtype, op, seed):
    buffers = [contribution.copy() for contribution in contributions]
    world = FakeWorld(len(buffers), random_scheduler(seed))
    transports = [maker(comm) for comm in world.communicators]
    drive(
        world,
        [
            [transport.allreduce(buffer, dtype, op, None, 0)]
            for transport, buffer in zip(transports, buffers, strict=True)
        ],
        random.Random(seed),
    )
    return buffers


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [5, 300])
def test_all_ranks_get_the_same_bits_at_any_timing(name, dtype, size, length):
    source = np.random.default_rng(size)
    contributions = [to_storage(source.normal(size=length), dtype) for _ in range(size)]
    first = reduced(MAKERS[name], contributions, dtype, ReduceOp.SUM, 0)[0]
    for seed in range(3):
        for buffer in reduced(MAKERS[name], contributions, dtype, ReduceOp.SUM, seed):
            np.testing.assert_array_equal(buffer.view(np.uint8), first.view(np.uint8))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM], ids=str)
def test_nan_from_any_rank_reaches_all(name, op):
    for size in (2, 3):
        contributions = [np.ones(200, np.float32) for _ in range(size)]
        for rank in range(size):
            contributions[rank][rank::7] = np.nan
        lost = np.isnan(sum(contributions))
        for buffer in reduced(MAKERS[name], contributions, DType.FLOAT32, op, 1):
            np.testing.assert_array_equal(np.isnan(buffer), lost)


# -- the choice ---------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "ring", "mpi"])
def test_one_process_needs_nobody(transport):
    chosen = SimpleNamespace(
        transport=transport, segment_bytes=64, small_bytes=64, peer_memory=True
    )
    alone = make_transport(LocalCommunicator(), chosen)
    buffer, received = np.arange(50.0), np.zeros(50)
    for operation in (
        alone.allreduce(buffer, DType.FLOAT64, ReduceOp.SUM, double(DType.FLOAT64), 0),
        alone.reduce_scatter(buffer, [50], DType.FLOAT64, ReduceOp.MAX, None, 1),
        alone.allgather(buffer, [50], 2),
        alone.broadcast(buffer, 0, 3),
        alone.alltoall(buffer, [50], received, [50], 4),
    ):
        assert list(operation) == []
    np.testing.assert_array_equal(buffer, np.arange(50.0) * 2)
    np.testing.assert_array_equal(received, buffer)
    alone.close()


def test_forced_transports():
    comm = FakeWorld(2).communicators[0]
    for name, kind in (("ring", RingTransport), ("mpi", MPITransport)):
        chosen = SimpleNamespace(transport=name, segment_bytes=64, small_bytes=64, peer_memory=True)
        assert isinstance(make_transport(comm, chosen), kind)


def collectives_used(world):
    return [call.signature[0] for call in world.groups[0].calls]


@pytest.mark.parametrize(
    ("nbytes", "dtype", "used"),
    [
        (60, DType.FLOAT32, ["iallgather"]),
        (60, DType.FLOAT16, ["iallgather"]),
        (64, DType.FLOAT32, []),
    ],
    ids=str,
)
def test_auto_leaves_little_to_mpi(nbytes, dtype, used):
    world = FakeWorld(2)
    buffers = [np.zeros(nbytes // dtype.itemsize, dtype.storage) for _ in range(2)]
    transports = [auto(comm) for comm in world.communicators]
    drive(
        world,
        [[transports[r].allreduce(buffers[r], dtype, ReduceOp.SUM, None, 0)] for r in range(2)],
    )
    assert collectives_used(world) == used


@pytest.mark.parametrize(
    ("dtype", "op", "used"),
    [
        (DType.FLOAT32, ReduceOp.SUM, ["iallreduce"]),
        (DType.FLOAT32, ReduceOp.MAX, []),
        (DType.FLOAT16, ReduceOp.SUM, []),
    ],
    ids=str,
)
def test_mpi_reduces_what_it_can(dtype, op, used):
    world = FakeWorld(2)
    buffers = [np.ones(200, dtype.storage) for _ in range(2)]
    transports = [MAKERS["mpi"](comm) for comm in world.communicators]
    drive(
        world,
        [[transports[r].allreduce(buffers[r], dtype, op, None, 0)] for r in range(2)],
    )
    assert collectives_used(world) == used
    assert (buffers[0] == (2 if op is ReduceOp.SUM else 1)).all()
