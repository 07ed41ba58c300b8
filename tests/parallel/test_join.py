"""Ranks with unequal numbers of batches: the rest goes on without those that have joined."""

from __future__ import annotations

import numpy as np
import pytest

from .expected import assert_equal, known, reduced


@pytest.mark.parametrize("longest_first", (False, True))
def test_unequal_batches(hvd, world, longest_first):
    counts = [3 + 2 * rank for rank in world.ranks]
    if longest_first:
        counts.reverse()
    for step in range(counts[world.rank]):
        active = [rank for rank in world.ranks if counts[rank] > step]
        for op in ("Sum", "Average"):
            result = hvd.allreduce(
                known(world.rank, 11, seed=step), name=f"g.{op}", op=getattr(hvd, op)
            )
            total = reduced([known(rank, 11, seed=step) for rank in active], "Sum")
            # The documented divisor is the full size, however many still take part.
            wanted = total if op == "Sum" else total / np.float32(world.size)
            assert_equal(result, wanted, f"step {step} {op}")
    last = hvd.join()
    assert last == (0 if longest_first else world.size - 1)
    assert_equal(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(world.size)))


def test_join_again_and_again(hvd, world):
    for round_number in range(3):
        worker = round_number % world.size
        if world.rank == worker:
            result = hvd.allreduce(np.full(4, 5.0), name="alone", op=hvd.Sum)
            assert_equal(result, np.full(4, 5.0))
        assert hvd.join() == worker or world.size == 1
        assert_equal(
            hvd.allreduce(np.ones(2), name="all", op=hvd.Sum), np.full(2, float(world.size))
        )


@pytest.mark.np(2, 3, 4)
@pytest.mark.parametrize("dtype", ("float32", "float16", "int8", "uint8", "bool"))
def test_joined_ranks_contribute_the_neutral_element(hvd, world, dtype):
    if world.rank == 0:
        array = known(0, 9, dtype)
        for op in ("Sum", "Min", "Max", "Product"):
            assert_equal(hvd.allreduce(array, op=getattr(hvd, op)), array, op)
        negative = -np.abs(known(0, 9, "float32")) - 1
        assert_equal(hvd.allreduce(negative, op=hvd.Max), negative)
        assert_equal(hvd.allreduce(-negative, op=hvd.Min), -negative)
    hvd.join()


@pytest.mark.np(2, 3, 4)
def test_other_collectives_while_ranks_have_joined(hvd, world):
    if world.rank == 0:
        mine = known(0, (4, 3))
        assert_equal(hvd.allgather(mine), mine)
        assert_equal(hvd.broadcast(mine, 0), mine)
        total = hvd.reducescatter(known(0, (2 * world.size, 3)), op=hvd.Sum)
        assert_equal(total, known(0, (2 * world.size, 3))[:2])
        first, second = hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Sum)
        assert_equal(first, mine)
        assert_equal(second, mine[:1])
    hvd.join()
    assert_equal(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(world.size)))


@pytest.mark.np(2, 3, 4)
def test_what_cannot_run_while_a_rank_has_joined_says_so(hvd, world):
    if world.rank == 0:
        with pytest.raises(hvd.HvdliteError, match="joined"):
            hvd.alltoall(np.ones((world.size, 2)))
        with pytest.raises(hvd.HvdliteError, match="joined"):
            hvd.broadcast(np.ones(2), 1)
        assert_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.ones(2))
    hvd.join()
    assert_equal(hvd.broadcast(np.full(2, float(world.rank)), 1), np.ones(2))


@pytest.mark.np(2, 3)
def test_join_with_work_still_in_flight(hvd, world):
    handles = [
        hvd.allreduce_async(np.full(1000, i + world.rank, np.float64), name=f"f{i}", op=hvd.Sum)
        for i in range(10)
    ]
    hvd.join()
    for i, handle in enumerate(handles):
        wanted = np.full(1000, float(world.size * i + sum(world.ranks)))
        assert_equal(hvd.synchronize(handle), wanted)
