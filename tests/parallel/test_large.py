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


SHAPES = ((50_000,), (1,), (300, 70), (0,), (7, 11), (90_001,))
"""Some are large and some are small; whether they are packed, the number of ranks decides (see
the fixture `hvd`)."""


def _group(world, dtype, rank=None):
    rank = world.rank if rank is None else rank
    return [known(rank, shape, dtype, seed=seed) for seed, shape in enumerate(SHAPES)]


@pytest.mark.limit(60)
@pytest.mark.parametrize("name", ["int32", "float16", "float32"])
@pytest.mark.parametrize("op", ["Sum", "Average", "Max"])
def test_groups(hvd, world, name, op):
    wanted = [
        reduced(inputs, op)
        for inputs in zip(*(_group(world, name, rank) for rank in world.ranks), strict=True)
    ]
    for _ in range(2):
        results = hvd.grouped_allreduce(_group(world, name), op=getattr(hvd, op), name="group")
        in_place = _group(world, name)
        hvd.grouped_allreduce_(in_place, op=getattr(hvd, op), name="group in place")
        for result, mine, total in zip(results, in_place, wanted, strict=True):
            assert_equal(result, total)
            assert_equal(mine, total)


@pytest.mark.limit(60)
def test_a_rank_whose_arrays_must_be_packed(hvd, world):
    wanted = [sum(_group(world, "float32", rank)[2] for rank in world.ranks)]
    mine = _group(world, "float32")[2]
    odd = world.rank == world.size - 1
    for _ in range(3):
        # Strided on one rank only: its memory cannot be reduced as one piece.
        array = np.empty((600, 70), np.float32)[::2] if odd else np.empty((300, 70), np.float32)
        array[...] = mine
        others = _group(world, "float32")
        hvd.grouped_allreduce_([array, *others], op=hvd.Sum, name="strided")
        assert_equal(np.ascontiguousarray(array), wanted[0])
        assert_equal(others[2], wanted[0])


@pytest.mark.limit(60)
def test_factors(hvd, world):
    wanted = [
        sum(inputs) * np.float32(0.5 * 4.0)
        for inputs in zip(*(_group(world, "float32", rank) for rank in world.ranks), strict=True)
    ]
    before = _group(world, "float32")
    results = hvd.grouped_allreduce(before, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    for result, total, mine, again in zip(
        results, wanted, before, _group(world, "float32"), strict=True
    ):
        assert_equal(result, total)
        np.testing.assert_array_equal(mine, again)


@pytest.mark.limit(60)
@pytest.mark.np(2, 3, 4)
def test_with_a_rank_that_has_joined(hvd, world):
    if world.rank:
        handles = [
            hvd.allreduce_async(array, op=hvd.Sum, name=f"unequal.{number}")
            for number, array in enumerate(_group(world, "float32"))
        ]
        for number, handle in enumerate(handles):
            total = sum(_group(world, "float32", rank)[number] for rank in world.ranks[1:])
            assert_equal(hvd.synchronize(handle), total)
    hvd.join()


@pytest.mark.limit(60)
def test_the_same_bits_alone_and_together(hvd, world, comm):
    def arrays(rank):
        rng = np.random.default_rng(rank)
        return [rng.standard_normal(shape, np.float32) for shape in SHAPES]

    together = hvd.grouped_allreduce(arrays(world.rank), op=hvd.Sum)
    alone = [hvd.allreduce(array, op=hvd.Sum) for array in arrays(world.rank)]
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert len(set(comm.allgather(one.tobytes()))) == 1
        if world.size <= 2:  # a + b is b + a: not one bit may differ
            wanted = sum(arrays(rank)[number] for rank in world.ranks)
            np.testing.assert_array_equal(one, wanted)
            np.testing.assert_array_equal(other, wanted)


@pytest.mark.limit(60)
def test_one_memory_several_times(hvd, world):
    total = sum(world.ranks) + world.size
    array = np.full(300_000, world.rank + 1, np.float32)
    first, second = hvd.grouped_allreduce_([array, array], op=hvd.Sum)
    assert first is array and second is array
    assert (array == total).all()
    # Two that overlap, of which either result may be what is left where they do.
    memory = np.full(300_000, world.rank + 1, np.float32)
    hvd.grouped_allreduce_([memory[:200_000], memory[100_000:]], op=hvd.Sum)
    assert (memory == total).all()


@pytest.mark.limit(60)
@pytest.mark.np(2, 3)
def test_the_means_can_be_switched_off(hvd, world, monkeypatch):
    from hvdlite.world import current

    def reaches():
        return current().engine.channels[0].transport.scattered is not None

    hvd.shutdown()
    monkeypatch.setenv("HVDLITE_PEER_MEMORY", "0")
    hvd.init()
    assert not reaches()
    array = np.full(LENGTH, world.rank, np.float32)
    hvd.allreduce_(array, op=hvd.Sum)
    assert (array == sum(world.ranks)).all()
    hvd.shutdown()
    monkeypatch.undo()
    hvd.init()
