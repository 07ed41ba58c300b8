"""Ranks that ask for different things all get the same readable error, and go on (B19, B21)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from .expected import assert_equal

ONES = np.ones((2, 3), np.float32)

# What rank 1 does, what everyone else does, and the words for both in the error's text.
CASES = {
    "dtype": (
        lambda hvd, name: hvd.allreduce(ONES.astype(np.float64), name=name),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        ("float64", "float32"),
    ),
    "dtype of equal size": (
        lambda hvd, name: hvd.allreduce(ONES.astype(np.int32), name=name),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        ("int32", "float32"),
    ),
    "shape": (
        lambda hvd, name: hvd.allreduce(np.ones((2, 4), np.float32), name=name),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        (r"2, 4", r"2, 3"),
    ),
    "shape of equal size": (
        lambda hvd, name: hvd.allreduce(ONES.T.copy(), name=name),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        (r"3, 2", r"2, 3"),
    ),
    "number of dimensions": (
        lambda hvd, name: hvd.allreduce(ONES.ravel(), name=name),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        (r"[\[(]6", r"2, 3"),
    ),
    "broadcast shape": (
        lambda hvd, name: hvd.broadcast(np.ones(5, np.float32), 0, name=name),
        lambda hvd, name: hvd.broadcast(ONES, 0, name=name),
        (r"[\[(]5", r"2, 3"),
    ),
    "allgather trailing dimensions": (
        lambda hvd, name: hvd.allgather(np.ones((2, 4), np.float32), name=name),
        lambda hvd, name: hvd.allgather(ONES, name=name),
        (r", 4[\])]", r", 3[\])]"),
    ),
    "allgather number of dimensions": (
        lambda hvd, name: hvd.allgather(np.ones((2, 3, 7), np.float32), name=name),
        lambda hvd, name: hvd.allgather(ONES, name=name),
        (r"3, 7", r", 3[\])]"),
    ),
    "alltoall trailing dimensions": (
        lambda hvd, name: hvd.alltoall(np.ones((12, 5), np.float32), name=name),
        lambda hvd, name: hvd.alltoall(np.ones((12, 3), np.float32), name=name),
        (r", 5[\])]", r", 3[\])]"),
    ),
    "reducescatter shape": (
        lambda hvd, name: hvd.reducescatter(np.ones((12, 3), np.float32), name=name),
        lambda hvd, name: hvd.reducescatter(np.ones((24, 3), np.float32), name=name),
        (r"12, 3", r"24, 3"),
    ),
    "operation": (
        lambda hvd, name: hvd.allgather(ONES, name=name),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        ("allgather", "allreduce"),
    ),
    "broadcast for allreduce": (
        lambda hvd, name: hvd.broadcast(ONES, 0, name=name),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        ("broadcast", "allreduce"),
    ),
    "reduce op": (
        lambda hvd, name: hvd.allreduce(ONES, name=name, op=hvd.Max),
        lambda hvd, name: hvd.allreduce(ONES, name=name, op=hvd.Sum),
        ("Max", "Sum"),
    ),
    "sum for average": (
        lambda hvd, name: hvd.allreduce(ONES, name=name, op=hvd.Sum),
        lambda hvd, name: hvd.allreduce(ONES, name=name, op=hvd.Average),
        ("Sum", "Average"),
    ),
    "reducescatter op": (
        lambda hvd, name: hvd.reducescatter(ONES, name=name, op=hvd.Max),
        lambda hvd, name: hvd.reducescatter(ONES, name=name, op=hvd.Sum),
        ("Max", "Sum"),
    ),
    "prescale": (
        lambda hvd, name: hvd.allreduce(ONES, name=name, prescale_factor=0.25),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        (r"0\.25", r"1\.0"),
    ),
    "postscale": (
        lambda hvd, name: hvd.allreduce(ONES, name=name, postscale_factor=0.25),
        lambda hvd, name: hvd.allreduce(ONES, name=name),
        (r"0\.25", r"1\.0"),
    ),
    "root": (
        lambda hvd, name: hvd.broadcast(ONES, 1, name=name),
        lambda hvd, name: hvd.broadcast(ONES, 0, name=name),
        ("1", "0"),
    ),
    "number of tensors": (
        lambda hvd, name: hvd.grouped_allreduce([ONES, ONES, ONES], name=name),
        lambda hvd, name: hvd.grouped_allreduce([ONES, ONES], name=name),
        ("3", "2"),
    ),
    "one tensor of a group": (
        lambda hvd, name: hvd.grouped_allreduce([ONES, ONES[:1]], name=name),
        lambda hvd, name: hvd.grouped_allreduce([ONES, ONES], name=name),
        (r"1, 3", r"2, 3"),
    ),
}


def _all_raise_the_same(hvd, world, comm, call, other, words, name=None):
    with pytest.raises(hvd.MismatchError) as caught:
        (call if world.rank == 1 else other)(hvd, name)
    text = str(caught.value)
    assert text.startswith("Mismatched ")
    assert len(set(comm.allgather(text))) == 1
    for word in words:
        assert re.search(word, text), (word, text)
    # Rank 1 stands alone with its value; the others share theirs, maybe written as a range.
    assert re.search(r"\brank 1\b", text), text
    wanted = {2: r"\brank 0\b", 3: r"\branks 0, 2\b", 4: r"\branks 0, 2(-|, )3\b"}[world.size]
    assert re.search(wanted, text), text
    return text


def _goes_on(hvd, world, name=None):
    result = hvd.allreduce(np.full(3, float(world.rank)), name=name, op=hvd.Sum)
    assert_equal(result, np.full(3, float(sum(world.ranks))))


@pytest.mark.np(2, 3, 4)
@pytest.mark.parametrize("case", CASES)
def test_mismatch(hvd, world, comm, case):
    call, other, words = CASES[case]
    text = _all_raise_the_same(hvd, world, comm, call, other, words, name="layer.7")
    assert "layer.7" in text
    _goes_on(hvd, world, name="layer.7")
    _all_raise_the_same(hvd, world, comm, call, other, words)
    _goes_on(hvd, world)


@pytest.mark.np(2, 3)
def test_every_rank_has_its_own_value(hvd, world, comm):
    with pytest.raises(hvd.MismatchError) as caught:
        hvd.allreduce(np.ones(10 + world.rank), name="all differ")
    for rank in world.ranks:
        assert str(10 + rank) in str(caught.value)
        assert f"rank {rank}" in str(caught.value)
    _goes_on(hvd, world)


@pytest.mark.np(2, 3)
def test_one_rank_changes_what_the_others_repeat(hvd, world, comm):
    for _ in range(3):
        assert_equal(hvd.allreduce(ONES, name="settled", op=hvd.Sum), ONES * world.size)
    with pytest.raises(hvd.MismatchError, match="settled"):
        hvd.allreduce(ONES[: 1 + (world.rank != 1)], name="settled", op=hvd.Sum)
    for _ in range(2):
        assert_equal(hvd.allreduce(ONES, name="settled", op=hvd.Sum), ONES * world.size)


@pytest.mark.np(1, 2, 3)
def test_all_ranks_change_a_settled_name_together(hvd, world):
    for rows in (2, 2, 1, 1, 2):
        result = hvd.allreduce(ONES[:rows], name="changing", op=hvd.Sum)
        assert_equal(result, ONES[:rows] * world.size)
    result = hvd.allgather(ONES, name="changing")
    assert_equal(result, np.ones((2 * world.size, 3), np.float32))
    for dtype in ("float64", "int32", "int32"):
        result = hvd.allreduce(ONES.astype(dtype), name="changing", op=hvd.Sum)
        assert_equal(result, (ONES * world.size).astype(dtype))


@pytest.mark.np(2, 3)
def test_allgather_rows_may_change_on_one_rank(hvd, world):
    for rows in (1, 1, 4, 0, 1):
        mine = np.full((rows if world.rank == 1 else 2, 2), world.rank)
        parts = [np.full((rows if rank == 1 else 2, 2), rank) for rank in world.ranks]
        assert_equal(hvd.allgather(mine, name="rows"), np.concatenate(parts))


@pytest.mark.np(2, 3)
def test_mismatch_among_good_ones(hvd, world):
    good = [
        hvd.allreduce_async(np.full(3, i, np.int64), name=f"a{i}", op=hvd.Sum) for i in range(20)
    ]
    bad = hvd.allreduce_async(np.ones(3 + world.rank), name="bad")
    good += [
        hvd.allreduce_async(np.full(3, i, np.int64), name=f"b{i}", op=hvd.Sum) for i in range(20)
    ]
    with pytest.raises(hvd.MismatchError, match="bad"):
        hvd.synchronize(bad)
    with pytest.raises(hvd.MismatchError, match="bad"):
        hvd.synchronize(bad)
    for i, handle in enumerate(good):
        assert_equal(hvd.synchronize(handle), np.full(3, i % 20 * world.size, np.int64))


@pytest.mark.np(2, 3)
def test_mismatch_leaves_in_place_arrays_alone(hvd, world):
    mine = np.full(3 + world.rank, 7.0)
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce_(mine, name="in place")
    np.testing.assert_array_equal(mine, np.full(3 + world.rank, 7.0))


def test_splits_that_do_not_add_up(hvd, world):
    rows = np.ones((world.size, 2))
    for splits in ([2] * world.size, [1] * (world.size + 1), [-1, *[1] * (world.size - 1)]):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(rows, splits=splits)
    # Refused before anybody heard of it, so the same rank may try again.
    if world.rank == 0:
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(rows, splits=[3] * world.size, name="again")
    output, _ = hvd.alltoall(rows, splits=[1] * world.size, name="again")
    assert_equal(output, rows)
    _goes_on(hvd, world)


@pytest.mark.np(2, 3)
def test_same_name_in_flight_hurts_only_the_rank_that_did_it(hvd, world, comm):
    if world.rank == 0:
        first = hvd.allreduce_async(np.ones(3), name="twice", op=hvd.Sum)
        for call in (hvd.allreduce_async, hvd.allgather_async):
            with pytest.raises(hvd.DuplicateNameError, match="same name") as caught:
                call(np.ones(3), name="twice")
            assert "twice" in str(caught.value)
    comm.barrier()
    if world.rank != 0:
        first = hvd.allreduce_async(np.ones(3), name="twice", op=hvd.Sum)
    assert_equal(hvd.synchronize(first), np.full(3, float(world.size)))
    _goes_on(hvd, world, name="twice")


def test_name_is_free_again_after_the_wait(hvd, world):
    for step in range(5):
        handle = hvd.allreduce_async(np.full(2, step, np.int32), name="free", op=hvd.Sum)
        assert_equal(hvd.synchronize(handle), np.full(2, step * world.size, np.int32))


def test_nonsense_arguments_are_refused_before_anything_is_sent(hvd, world):
    with pytest.raises((TypeError, ValueError)):
        hvd.allreduce(np.ones(2), op="sum")
    with pytest.raises((TypeError, ValueError)):
        hvd.allreduce(np.ones(2), name=3)
    with pytest.raises(TypeError):
        hvd.synchronize(3)
    _goes_on(hvd, world)
