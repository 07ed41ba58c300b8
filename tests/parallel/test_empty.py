"""Nothing to send is no reason to fail, or to wait for ever (B24)."""

from __future__ import annotations

import numpy as np
import pytest

from .expected import FORMS, OPS, assert_equal, known, reduced


@pytest.mark.parametrize("shape", ((0,), (3, 0), (0, 3), (2, 0, 5)))
def test_empty_arrays(hvd, world, shape):
    empty = np.zeros(shape, np.float32)
    for form in FORMS:
        result = getattr(hvd, form)(empty.copy())
        assert_equal(hvd.synchronize(result) if "async" in form else result, empty, form)
    assert_equal(hvd.broadcast(empty, world.size - 1), empty)
    gathered = hvd.allgather(empty)
    assert_equal(gathered, np.zeros((shape[0] * world.size, *shape[1:]), np.float32))
    assert_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(world.size)))


def test_empty_reducescatter_and_alltoall(hvd, world):
    for shape in ((0, 3), (0,)):
        empty = np.zeros(shape, np.float32)
        assert_equal(hvd.reducescatter(empty, op=hvd.Sum), empty)
        assert_equal(hvd.alltoall(empty), empty)
        output, counts = hvd.alltoall(empty, splits=[0] * world.size)
        assert_equal(output, empty)
        assert list(counts) == [0] * world.size
    flat = np.zeros((2 * world.size, 0), np.int32)
    assert_equal(hvd.reducescatter(flat, op=hvd.Sum), flat[:2])
    assert_equal(hvd.alltoall(flat), flat)


def test_fewer_rows_than_ranks(hvd, world):
    inputs = [known(rank, (1, 3)) for rank in world.ranks]
    result = hvd.reducescatter(inputs[world.rank], op=hvd.Sum)
    assert_equal(result, reduced(inputs, "Sum")[: int(world.rank == 0)])


def test_allgather_where_some_have_no_rows(hvd, world):
    for silent in world.ranks:
        inputs = [known(rank, (0 if rank == silent else rank + 1, 2)) for rank in world.ranks]
        assert_equal(hvd.allgather(inputs[world.rank]), np.concatenate(inputs))


def test_alltoall_from_one_rank_only(hvd, world):
    root = world.size - 1
    rows = world.size + 1 if world.rank == root else 0
    splits = [2, *[1] * (world.size - 1)] if rows else [0] * world.size
    output, counts = hvd.alltoall(known(world.rank, (rows, 2)), splits=splits)
    sent = known(root, (world.size + 1, 2))
    assert_equal(output, sent[:2] if world.rank == 0 else sent[world.rank + 1 :][:1])
    wanted = [0] * world.size
    wanted[root] = 2 if world.rank == 0 else 1
    assert list(counts) == wanted


def test_scalars(hvd, world):
    for op in OPS:
        inputs = [known(rank, (), "float64", seed=3) for rank in world.ranks]
        for form in FORMS:
            result = getattr(hvd, form)(inputs[world.rank].copy(), op=getattr(hvd, op))
            result = hvd.synchronize(result) if "async" in form else result
            assert_equal(result, reduced(inputs, op), f"{form} {op}")
    root = world.size - 1
    assert_equal(hvd.broadcast(np.array(world.rank), root), np.array(root))
    mine = np.array(world.rank)
    assert hvd.broadcast_(mine, root) is mine
    assert mine == root


@pytest.mark.parametrize("call", ("allgather", "alltoall", "reducescatter"))
def test_scalars_have_no_rows(hvd, world, call):
    for suffix in ("", "_async"):
        with pytest.raises(ValueError, match=call):
            getattr(hvd, call + suffix)(np.array(1.0))
    assert_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(world.size)))


def test_empty_groups(hvd, world):
    assert hvd.grouped_allreduce([]) == []
    assert hvd.synchronize(hvd.grouped_allreduce_async([])) == []
    assert hvd.grouped_allgather([]) == []
    assert hvd.grouped_reducescatter([]) == []
    assert_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(world.size)))


def test_empty_tensors_among_others(hvd, world):
    shapes = [(0,), (3,), (2, 0), (), (1, 4)]
    inputs = [[known(rank, shape) for shape in shapes] for rank in world.ranks]
    results = hvd.grouped_allreduce(inputs[world.rank], op=hvd.Sum)
    for result, parts in zip(results, zip(*inputs, strict=True), strict=True):
        assert_equal(result, reduced(parts, "Sum"))
    handles = [
        hvd.allreduce_async(array, name=f"e{i}", op=hvd.Sum)
        for i, array in enumerate(inputs[world.rank])
    ]
    for handle, parts in zip(handles, zip(*inputs, strict=True), strict=True):
        assert_equal(hvd.synchronize(handle), reduced(parts, "Sum"))
