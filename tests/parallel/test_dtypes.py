"""Every element type through every operation: right values, or a clear refusal (B22)."""

from __future__ import annotations

import numpy as np
import pytest

from .expected import DTYPES, FORMS, OPS, assert_equal, dtype_of, known, reduced, run


def _refused(name, op):
    return (name == "bool" and op == "Average") or (
        name.startswith("complex") and op in ("Min", "Max")
    )


@pytest.mark.parametrize("name", DTYPES)
def test_allreduce(hvd, world, name):
    dtype = dtype_of(name)
    inputs = [known(rank, (5, 7), dtype) for rank in world.ranks]
    mine = inputs[world.rank]
    for op in OPS:
        if _refused(name, op):
            with pytest.raises(TypeError, match=f"(?i){op}"):
                hvd.allreduce(mine, op=getattr(hvd, op))
            continue
        for form in FORMS:
            result = run(hvd, form, mine.copy(), op=getattr(hvd, op))
            assert_equal(result, reduced(inputs, op), f"{form} {op}")
    assert_equal(hvd.allreduce(np.ones(1), op=hvd.Sum), np.full(1, float(world.size)))


@pytest.mark.parametrize("name", DTYPES)
def test_allreduce_of_many_elements(hvd, world, name):
    dtype = dtype_of(name)
    inputs = [known(rank, 70_001, dtype) for rank in world.ranks]
    for op in OPS:
        if not _refused(name, op):
            result = hvd.allreduce(inputs[world.rank], op=getattr(hvd, op))
            assert_equal(result, reduced(inputs, op), op)


@pytest.mark.parametrize("name", DTYPES)
def test_reducescatter(hvd, world, name):
    dtype = dtype_of(name)
    rows = 2 * world.size + 1
    inputs = [known(rank, (rows, 3), dtype) for rank in world.ranks]
    start = 2 * world.rank + min(world.rank, 1)
    mine = slice(start, start + 2 + (world.rank == 0))
    for op in OPS:
        if _refused(name, op):
            with pytest.raises(TypeError, match=f"(?i){op}"):
                hvd.reducescatter(inputs[world.rank], op=getattr(hvd, op))
        else:
            result = hvd.reducescatter(inputs[world.rank], op=getattr(hvd, op))
            assert_equal(result, reduced(inputs, op)[mine], op)


@pytest.mark.parametrize("name", DTYPES)
def test_moving_collectives(hvd, world, name):
    dtype = dtype_of(name)
    inputs = [known(rank, (rank + 1, 3), dtype) for rank in world.ranks]
    assert_equal(hvd.allgather(inputs[world.rank]), np.concatenate(inputs))
    root = world.size - 1
    assert_equal(hvd.broadcast(known(world.rank, (4, 2), dtype), root), known(root, (4, 2), dtype))
    squares = [known(rank, (world.size, 2), dtype) for rank in world.ranks]
    result = hvd.alltoall(squares[world.rank])
    assert_equal(result, np.stack([square[world.rank] for square in squares]))


@pytest.mark.parametrize("name", DTYPES)
def test_grouped_with_float32(hvd, world, name):
    dtype = dtype_of(name)
    op = "Sum" if name == "bool" else "Average"
    inputs = [[known(rank, 6, dtype), known(rank, 3, "float32")] for rank in world.ranks]
    results = hvd.grouped_allreduce(inputs[world.rank], op=getattr(hvd, op))
    for result, parts in zip(results, zip(*inputs, strict=True), strict=True):
        assert_equal(result, reduced(parts, op))


@pytest.mark.parametrize("name", ("float16", "bfloat16"))
def test_sixteen_bit_floats_average_without_overflow(hvd, world, name):
    dtype = dtype_of(name)
    value = np.full(300, 40000, dtype)
    for count in (1, 300):
        result = hvd.allreduce(value[:count], op=hvd.Average)
        wide = result.astype(np.float64)
        np.testing.assert_allclose(wide, float(value[0]), rtol=2e-2 if name == "bfloat16" else 2e-3)


@pytest.mark.parametrize("name", ("int8", "uint8", "int16", "int32", "int64"))
def test_integer_average_divides_the_exact_sum_toward_zero(hvd, world, name):
    # Sums beyond the type's own range, and quotients that rounding down would get wrong.
    dtype = np.dtype(name)
    top = np.iinfo(dtype).max if dtype.itemsize < 8 else 2**53 + 1
    for values in (
        [top - rank for rank in world.ranks],
        [-(rank + 1) if dtype.kind == "i" else rank for rank in world.ranks],
        [5 * rank % 3 for rank in world.ranks],
    ):
        total = sum(values)
        wanted = abs(total) // world.size * (1 if total >= 0 else -1)
        result = hvd.allreduce(np.full(9, values[world.rank], dtype), op=hvd.Average)
        assert_equal(result, np.full(9, wanted, dtype), f"{values}")


def test_int64_sum_is_exact(hvd, world):
    value = np.full(4, 2**53 + 1, np.int64)
    assert_equal(hvd.allreduce(value, op=hvd.Sum), value * world.size)


def test_infinities_and_nan_arrive(hvd, world):
    value = np.array([np.inf, 1.0, np.nan], np.float32)
    result = hvd.allreduce(value if world.rank == 0 else np.ones(3, np.float32), op=hvd.Sum)
    assert_equal(result, np.array([np.inf, world.size, np.nan], np.float32))


@pytest.mark.parametrize(
    "array",
    (
        np.array(["a", "b"]),
        np.array([object()]),
        np.array([1], "datetime64[s]"),
        np.zeros(2, [("x", "f4"), ("y", "i4")]),
        np.ones(2, np.longdouble),
        np.ones(2, np.dtype("f4").newbyteorder()),
    ),
    ids=lambda array: str(array.dtype),
)
def test_unsupported_types_are_refused_at_once(hvd, world, array):
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(TypeError):
            call(array)
    with pytest.raises(TypeError):
        hvd.broadcast(array, 0)
    assert_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(world.size)))
