"""Reductions of many arrays where they lie: their results, blocks, and addresses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.transport import scattered, shared_lanes
from hvdlite.transport.places import Places
from hvdlite.transport.scattered import _share
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import drive, random_scheduler
from .test_shared_memory import in_order, is_far, make, one_after_the_other, placed, pytestmark

__all__ = ["pytestmark"]


@pytest.fixture(params=[True, False], ids=["counting", "barriers"])
def how_ranks_meet(request, monkeypatch):
    monkeypatch.setattr(shared_lanes, "STORES_IN_ORDER", request.param)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scattered, "BLOCK_BYTES", 256)
        patch.setattr(scattered, "_MOST_VECTORS", 5)
        _share.cache_clear()
        yield
    _share.cache_clear()


def values_of(size, lengths, seed):
    source = np.random.default_rng([seed, size])
    return [
        [source.normal(size=length).astype(np.float32) for length in lengths] for _ in range(size)
    ]


def parts_of(transports, values, where):
    """Return each rank's arrays, in memory of a kind."""
    by_part = [placed(transports, same, where) for same in zip(*values, strict=True)]
    return [list(parts) for parts in zip(*by_part, strict=True)]


def reduce(world, transports, parts, dtype=DType.FLOAT32, op=ReduceOp.SUM, finish=None):
    drive(
        world,
        [
            [transport.scattered.allreduce(Places.of(mine), dtype, op, finish, 0)]
            for transport, mine in zip(transports, parts, strict=True)
        ],
    )


@pytest.mark.parametrize("where", ["far", "far and shared"])
@pytest.mark.parametrize("size", range(2, 6))
def test_sums_are_in_the_order_of_the_ranks(size, where, how_ranks_meet):
    world, _, transports = make(size, far=is_far(where))
    for lengths in ([1], [3, 1, 1], [64], [65, 200, 1], [2] * 40, [1000, 1, 7] * 3):
        values = values_of(size, lengths, 1)
        parts = parts_of(transports, values, where)
        reduce(world, transports, parts)
        for mine in parts:
            for number, part in enumerate(mine):
                same = [of_rank[number] for of_rank in values]
                np.testing.assert_array_equal(part, in_order(same))
    world.check_quiet()


@pytest.mark.parametrize("dtype", list(DType))
def test_every_element_type(dtype):
    world, _, transports = make(3, far=True)
    numbers = np.random.default_rng(5).integers(0, 2, (3, 90))
    op, expected = ReduceOp.MAX, numbers.max(0)
    if dtype.is_complex:
        op, expected = ReduceOp.SUM, numbers.sum(0)
    if dtype is DType.BFLOAT16:
        numbers, expected = (
            array.astype(np.float32).view(np.uint32) >> 16 for array in (numbers, expected)
        )
    parts = [np.split(row.astype(dtype.storage), [30, 31]) for row in numbers]
    reduce(world, transports, parts, dtype, op)
    for mine in parts:
        np.testing.assert_array_equal(np.concatenate(mine), expected.astype(dtype.storage))


def test_finish_sees_each_element_once_and_reduced():
    size, lengths = 3, [10, 1, 130, 40]
    world, _, transports = make(size, far=True)
    parts = [[np.full(n, rank + 1, np.float32) for n in lengths] for rank in range(size)]
    seen = []

    def finish(part):
        assert (part == 6).all()
        seen.append(len(part))
        part *= 10

    reduce(world, transports, parts, finish=finish)
    assert sum(seen) == sum(lengths)
    assert all((part == 60).all() for mine in parts for part in mine)


@pytest.mark.parametrize("seed", range(40))
def test_among_other_operations_under_any_timing(seed, how_ranks_meet):
    order = random.Random(seed)
    size = order.randrange(2, 5)
    world, _, transports = make(size, random_scheduler(seed), far=True)
    operations = [[] for _ in range(size)]
    checks = []
    for tag in range(order.randrange(2, 10)):
        lengths = [order.choice([1, 3, 64, 150]) for _ in range(order.choice([1, 2, 30]))]
        values = values_of(size, lengths, tag)
        parts = parts_of(transports, values, order.choice(["far", "far and shared"]))
        single = order.random() < 0.4
        for rank, transport in enumerate(transports):
            kind = DType.FLOAT32, ReduceOp.SUM, None, tag
            if single:
                operations[rank].append(transport.allreduce(parts[rank][0], *kind))
            else:
                operations[rank].append(
                    transport.scattered.allreduce(Places.of(parts[rank]), *kind)
                )
        checks.append((parts, values, 1 if single else len(lengths)))
    if seed % 2:
        operations = [[one_after_the_other(of_rank)] for of_rank in operations]
    drive(world, operations, order)
    for parts, values, count in checks:
        for number in range(count):
            expected = in_order([of_rank[number] for of_rank in values])
            for mine in parts:
                np.testing.assert_array_equal(mine[number], expected)
    world.check_quiet()


def test_addresses_are_shown_even_where_the_segment_is_full(monkeypatch):
    world, _, transports = make(2, far=True)
    monkeypatch.setattr(type(transports[0]._segments), "allocate", lambda *_: None)
    parts = [[np.full(9, rank + 1, np.float32) for _ in range(20)] for rank in range(2)]
    reduce(world, transports, parts)
    assert all((part == 3).all() for mine in parts for part in mine)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(1, 7),
    st.sampled_from([1, 2, 8]),
)
def test_blocks_cover_everything_once(lengths, size, itemsize):
    covered = [np.zeros(length, int) for length in lengths]
    for rank in range(size):
        share = _share(tuple(lengths), size, rank, itemsize)
        assert sum(len(block.spans) for block in share.blocks) == len(share.parts)
        for block in share.blocks:
            assert block.nbytes <= 256
            assert len(block.spans) <= 5
            at = 0
            rows = slice(block.first, block.first + len(block.spans))
            for (part, start, stop, place), number, (first, nbytes) in zip(
                block.spans, share.parts[rows], share.pieces[rows], strict=True
            ):
                assert (part, start * itemsize) == (number, first)
                assert (stop - start) * itemsize == nbytes
                assert place == at
                at += stop - start
                covered[part][start:stop] += 1
            assert at * itemsize == block.nbytes
    assert all((part == 1).all() for part in covered)


def test_without_the_means_there_is_no_such_way():
    _, _, transports = make(2, far=False)
    assert transports[0].scattered is None
    _, _, transports = make(1, far=True)
    assert transports[0].scattered is None
