"""Arrays so large that their memory is reached directly, where the system permits that."""

from __future__ import annotations

import numpy as np
import pytest

from .expected import FORMS, OPS, assert_equal, dtype_of, known, reduced, run

# An odd number of elements, of which each rank's piece exceeds a block.
LENGTH = 4 * 70_000 + 3


@pytest.mark.limit(90)
@pytest.mark.parametrize("name", ["uint8", "bfloat16", "float32", "complex128"])
def test_reductions(hvd, world, name):
    dtype = dtype_of(name)
    inputs = [known(rank, LENGTH, dtype) for rank in world.ranks]
    for op in OPS:
        if dtype.kind == "c" and op in ("Min", "Max"):
            continue
        wanted = reduced(inputs, op)
        for form in FORMS:
            result = run(hvd, form, inputs[world.rank].copy(), op=getattr(hvd, op))
            assert_equal(result, wanted, f"{form} {op}")


@pytest.mark.limit(60)
def test_copies(hvd, world):
    inputs = [known(rank, (LENGTH + rank, 2)) for rank in world.ranks]
    mine = inputs[world.rank]
    assert_equal(hvd.allgather(mine), np.concatenate(inputs))
    for root in world.ranks:
        shared = known(root, LENGTH, seed=1)
        mine_too = known(world.rank, LENGTH, seed=1)
        assert_equal(hvd.broadcast(mine_too, root), shared)
        hvd.broadcast_(mine_too, root)
        assert_equal(mine_too, shared)
    total = reduced([known(rank, (LENGTH, 2)) for rank in world.ranks], "Sum")
    rows = [len(part) for part in np.array_split(np.arange(LENGTH), world.size)]
    start = sum(rows[: world.rank])
    scattered = hvd.reducescatter(known(world.rank, (LENGTH, 2)), op=hvd.Sum)
    assert_equal(scattered, total[start : start + rows[world.rank]])


@pytest.mark.limit(60)
def test_memory_of_every_kind(hvd, world, tmp_path):
    # Never touched, mapped from a file, in the middle of something, and the same all over again.
    def kinds():
        untouched = np.zeros(LENGTH, np.float32)
        mapped = np.memmap(tmp_path / "array", np.float32, "w+", shape=(LENGTH,))
        middle = np.zeros(3 * LENGTH, np.float32)[LENGTH : 2 * LENGTH]
        return untouched, mapped, middle

    for _ in range(3):
        for array in kinds():
            array[::1000] = world.rank
            hvd.allreduce_(array, op=hvd.Sum)
            assert (array[::1000] == sum(world.ranks)).all()
            assert np.count_nonzero(array) <= len(array[::1000])


@pytest.mark.limit(60)
def test_many_at_once_and_soon_forgotten(hvd, world):
    handles = []
    for number in range(12):
        array = np.full(LENGTH, world.rank + number, np.float32)
        handles.append(hvd.allreduce_async(array, op=hvd.Sum, name=f"large.{number}"))
        del array
    for number, handle in enumerate(handles):
        result = hvd.synchronize(handle)
        assert (result == sum(world.ranks) + number * world.size).all()
