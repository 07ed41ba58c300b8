"""Arrays of any strides mean what they mean: values right, layouts kept (B3)."""

from __future__ import annotations

import numpy as np
import pytest

from .expected import FORMS, OPS, assert_equal, known, reduced


def _unaligned(array):
    raw = bytearray(array.nbytes + 1)
    raw[1:] = array.tobytes()
    return np.frombuffer(raw, array.dtype, offset=1).reshape(array.shape)


def _strided(array):
    wide = np.full((array.shape[0] * 2, *array.shape[1:]), 99, array.dtype)
    wide[::2] = array
    return wide[::2]


def _window(array):
    wide = np.full([n + 2 for n in array.shape], 99, array.dtype)
    inner = tuple(slice(1, -1) for _ in array.shape)
    wide[inner] = array
    return wide[inner]


# Each keeps the values and changes only where they lie.
LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "rows reversed": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "columns reversed": lambda array: np.ascontiguousarray(array[:, ::-1])[:, ::-1],
    "every second row": _strided,
    "window": _window,
    "channels last": lambda array: np.moveaxis(
        np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1
    ),
    "swapped axes": lambda array: np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1),
    "unaligned": _unaligned,
}
DENSE = ("contiguous", "fortran", "channels last", "swapped axes")
SHAPE = (6, 4, 5)


def _known(rank):
    return known(rank, SHAPE)


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def test_layouts_are_what_they_claim(world):
    for name, make in LAYOUTS.items():
        array = make(_known(world.rank))
        np.testing.assert_array_equal(array, _known(world.rank), err_msg=name)
        assert array.flags.c_contiguous == (name in ("contiguous", "unaligned")), name
    assert not _unaligned(_known(0)).flags.aligned


def test_allreduce(hvd, world, layout):
    inputs = [_known(rank) for rank in world.ranks]
    for form in FORMS:
        mine = layout(inputs[world.rank].copy())
        result = getattr(hvd, form)(mine, op=hvd.Sum)
        if "async" in form:
            result = hvd.synchronize(result)
        assert_equal(result, reduced(inputs, "Sum"), form)
        if form.endswith("_"):
            assert result is mine
        else:
            np.testing.assert_array_equal(mine, inputs[world.rank])


@pytest.mark.parametrize("name", DENSE)
def test_dense_results_keep_their_strides(hvd, world, name):
    mine = LAYOUTS[name](_known(world.rank))
    assert hvd.allreduce(mine, op=hvd.Sum).strides == mine.strides
    assert hvd.broadcast(mine, 0).strides == mine.strides
    for result in hvd.grouped_allreduce([mine, mine], op=hvd.Sum):
        assert result.strides == mine.strides


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("op", OPS)
def test_ranks_may_use_different_layouts(hvd, world, op):
    inputs = [_known(rank) for rank in world.ranks]
    for shift in range(len(LAYOUTS)):
        mine = list(LAYOUTS.values())[(world.rank + shift) % len(LAYOUTS)](inputs[world.rank])
        result = hvd.allreduce(mine, op=getattr(hvd, op), name="mixed")
        assert_equal(result, reduced(inputs, op))


def test_in_place_touches_the_view_only(hvd, world):
    whole = np.arange(60, dtype=np.float64).reshape(6, 10) * (world.rank + 1)
    before = whole.copy()
    hvd.allreduce_(whole[1:5:2, 9:2:-3], op=hvd.Sum)
    factor = sum(rank + 1 for rank in world.ranks)
    touched = np.zeros(whole.shape, bool)
    touched[1:5:2, 9:2:-3] = True
    once = np.arange(60, dtype=np.float64).reshape(6, 10)
    np.testing.assert_array_equal(whole, np.where(touched, once * factor, before))

    whole = np.arange(60, dtype=np.float64).reshape(6, 10) + world.rank
    hvd.broadcast_(whole[:, ::4].T, world.size - 1)
    touched = np.zeros(whole.shape, bool)
    touched[:, ::4] = True
    np.testing.assert_array_equal(whole, once + np.where(touched, world.size - 1, world.rank))


def test_repeated_elements(hvd, world):
    row = np.arange(5, dtype=np.float32) + world.rank
    mine = np.broadcast_to(row, (3, 5))
    total = np.arange(5, dtype=np.float32) * world.size + sum(world.ranks)
    assert_equal(hvd.allreduce(mine, op=hvd.Sum), np.tile(total, (3, 1)))
    assert_equal(hvd.allgather(mine[:1]).ravel()[:5], np.arange(5, dtype=np.float32))


def test_allgather(hvd, world, layout):
    inputs = [known(rank, (rank + 2, 4, 5)) for rank in world.ranks]
    assert_equal(hvd.allgather(layout(inputs[world.rank])), np.concatenate(inputs))


def test_broadcast(hvd, world, layout):
    root = world.size - 1
    for form in ("broadcast", "broadcast_"):
        mine = layout(_known(world.rank))
        assert_equal(getattr(hvd, form)(mine, root), _known(root), form)


def test_alltoall(hvd, world, layout):
    inputs = [known(rank, (2 * world.size, 4, 5)) for rank in world.ranks]
    result = hvd.alltoall(layout(inputs[world.rank]))
    assert_equal(result, np.concatenate([array[2 * world.rank :][:2] for array in inputs]))


def test_reducescatter(hvd, world, layout):
    inputs = [known(rank, (2 * world.size, 4, 5)) for rank in world.ranks]
    result = hvd.reducescatter(layout(inputs[world.rank]), op=hvd.Sum)
    assert_equal(result, reduced(inputs, "Sum")[2 * world.rank :][:2])


def test_group_of_mixed_layouts(hvd, world):
    def make(rank):
        return [build(known(rank, SHAPE, seed=i)) for i, build in enumerate(LAYOUTS.values())]

    results = hvd.grouped_allreduce(make(world.rank), op=hvd.Sum)
    everyone = [make(rank) for rank in world.ranks]
    for result, parts in zip(results, zip(*everyone, strict=True), strict=True):
        assert_equal(result, reduced(parts, "Sum"))
    mine = make(world.rank)
    for kept, result, parts in zip(
        mine, hvd.grouped_allreduce_(mine, op=hvd.Max), zip(*everyone, strict=True), strict=True
    ):
        assert kept is result
        assert_equal(result, reduced(parts, "Max"))
