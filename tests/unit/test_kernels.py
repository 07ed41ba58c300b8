"""Element-wise arithmetic, on both of its paths for 16-bit floats."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.transport import kernels
from hvdlite.transport.types import DType, ReduceOp

OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
HALVES = (DType.FLOAT16, DType.BFLOAT16)
LENGTHS = (0, 1, 7, 32704, 32705, 100_001)


@pytest.fixture(params=["numpy", "torch", "torch, one thread"])
def path(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setitem(sys.modules, "torch", None)
        yield
        return
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if request.param.endswith("one thread") else 2)
    yield
    torch.set_num_threads(threads)


def supported(dtype: DType, op: ReduceOp) -> bool:
    return not (dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX))


CASES = [(dtype, op) for dtype in DType for op in OPS if supported(dtype, op)]


def to_wide(bits, dtype):
    """Return 16-bit floats as float64."""
    if dtype is DType.BFLOAT16:
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return bits.astype(np.float64)


def to_bits(values, dtype):
    """Round float64 to 16-bit floats, by way of exact arithmetic only."""
    with np.errstate(all="ignore"):
        if dtype is DType.FLOAT16:
            return values.astype(np.float16)
        single = values.astype(np.float32)
        low = (single.view(np.uint32) & 0xFFFF0000).view(np.float32)
        high = ((single.view(np.uint32) & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32)
        below = np.abs(single.astype(np.float64) - low)
        above = np.abs(high.astype(np.float64) - single)
        # Beyond the largest number lies infinity, which counts as the next power of two.
        top = np.isinf(high) & np.isfinite(single)
        above[top] = 2.0**128 - np.abs(single.astype(np.float64)[top])
    odd = (low.view(np.uint32) >> 16) & 1 == 1
    up = (above < below) | ((above == below) & odd)
    rounded = np.where(np.isfinite(single) & up, high, low)
    rounded = np.where(np.isnan(single), np.float32(np.nan), rounded)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def assert_same(actual, expected, dtype):
    """Compare bits, but let any NaN stand for a NaN."""
    assert actual.dtype == expected.dtype == dtype.storage
    if dtype.is_floating:
        wide = to_wide if dtype in HALVES else (lambda values, _: values)
        nan = np.isnan(wide(expected, dtype))
        np.testing.assert_array_equal(np.isnan(wide(actual, dtype)), nan)
        actual, expected = actual[~nan], expected[~nan]
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def sample(dtype: DType, length: int, seed: int) -> np.ndarray:
    source = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return source.integers(0, 2, length).astype(bool)
    if dtype.is_integer:
        limits = np.iinfo(dtype.storage)
        return source.integers(limits.min, limits.max, length, dtype=dtype.storage, endpoint=True)
    if dtype is DType.BFLOAT16:
        return source.integers(0, 2**16, length, dtype=np.uint16)
    if dtype is DType.FLOAT16:
        return source.integers(0, 2**16, length, dtype=np.uint16).view(np.float16)
    values = source.normal(size=length)
    if dtype.is_complex:
        values = values + 1j * source.normal(size=length)
    return values.astype(dtype.storage)


def reference(dtype: DType, op: ReduceOp, first, second):
    functions = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }
    with np.errstate(all="ignore"):
        if dtype is DType.BOOL:
            return first | second if op in (ReduceOp.SUM, ReduceOp.MAX) else first & second
        if dtype in HALVES:
            wide = functions[op](to_wide(first, dtype), to_wide(second, dtype))
            return to_bits(wide, dtype)
        return functions[op](first, second)


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda value: str(value))
def test_combines_in_place(dtype, op, path):
    for length in LENGTHS:
        into, other = sample(dtype, length, 1), sample(dtype, length, 2)
        expected, before = reference(dtype, op, into, other), other.copy()
        if dtype in HALVES and op in (ReduceOp.MIN, ReduceOp.MAX):
            # Which zero is the smaller one is nobody's promise.
            into[to_wide(into, dtype) == 0] = other[to_wide(other, dtype) == 0] = 0
            expected, before = reference(dtype, op, into, other), other.copy()
        assert kernels.combiner(dtype, op)(into, other) is None
        if dtype.is_complex:  # NumPy rounds products in place differently from others
            np.testing.assert_allclose(into, expected, rtol=1e-6, atol=1e-6)
        else:
            assert_same(into, expected, dtype)
        np.testing.assert_array_equal(other.view(np.uint8), before.view(np.uint8))


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda value: str(value))
def test_neutral_changes_nothing(dtype, op):
    values = sample(dtype, 1000, 3)
    if dtype is DType.FLOAT16:
        values = values[np.isfinite(values)]
    elif dtype is DType.BFLOAT16:
        values = values[np.isfinite(to_wide(values, dtype))]
    neutral = kernels.neutral(dtype, op)
    assert neutral.dtype == dtype.storage
    into = np.full(len(values), neutral)
    kernels.combiner(dtype, op)(into, values)
    if dtype in HALVES:  # 0 + -0 is 0
        into, values = to_wide(into, dtype), to_wide(values, dtype)
    np.testing.assert_array_equal(into, values)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_both_paths_agree_on_sums(dtype, monkeypatch):
    pytest.importorskip("torch")
    every = np.arange(2**16, dtype=np.uint16).view(dtype.storage)
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        with_torch = kernels.combiner(dtype, op)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch", None)
            with_numpy = kernels.combiner(dtype, op)
        for seed in range(10):
            other = sample(dtype, 2**16, seed)
            first, second = every.copy(), every.copy()
            with_torch(first, other)
            with_numpy(second, other)
            assert_same(first, second, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1e-8, 3e38, 1e300, -7.0, 0.0])
def test_scales_every_half(dtype, factor, path):
    every = np.arange(2**16, dtype=np.uint16).view(dtype.storage)
    with np.errstate(all="ignore"):
        wide = to_wide(every, dtype).astype(np.float32) * np.float32(factor)
    expected = to_bits(wide.astype(np.float64), dtype)
    kernels.scale(every, dtype, factor)
    assert_same(every, expected, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("length", LENGTHS)
def test_casts_there_and_back(dtype, wide, length, path):
    # Ties between neighbours, subnormals, what overflows, infinities and NaN among them.
    bits = np.random.default_rng(length).integers(0, 2**32, length, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        values = bits.view(np.float32).astype(wide)
        values[: length // 2] = np.round(values[: length // 2].clip(-1e4, 1e4) * 8) / 8 + 2.0**-9
        narrow = np.empty(length, dtype.storage)
        kernels.narrow_into(narrow, values, dtype)
        assert_same(narrow, to_bits(values.astype(np.float64), dtype), dtype)
        back = np.empty(length, wide)
        kernels.widen_into(back, narrow, dtype)
        np.testing.assert_array_equal(back, to_wide(narrow, dtype).astype(wide))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 4099])
def test_divides_every_half(dtype, n, path):
    every = np.arange(2**16, dtype=np.uint16).view(dtype.storage)
    with np.errstate(all="ignore"):
        wide = to_wide(every, dtype).astype(np.float32) / np.float32(n)
    expected = to_bits(wide.astype(np.float64), dtype)
    kernels.divide(every, dtype, n)
    assert_same(every, expected, dtype)


@pytest.mark.parametrize(
    "dtype", [DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128], ids=str
)
def test_scales_and_divides_in_the_same_precision(dtype):
    values = sample(dtype, 1001, 5)
    precision = values.real.dtype.type
    scaled, divided = values.copy(), values.copy()
    kernels.scale(scaled, dtype, 0.1)
    kernels.divide(divided, dtype, 3)
    assert_same(scaled, values * precision(0.1), dtype)
    assert_same(divided, values / precision(3), dtype)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.integers(1, 9))
def test_integer_averages_round_toward_zero(values, n):
    array = np.array(values, dtype=np.int64)
    kernels.divide(array, DType.INT64, n)
    assert array.tolist() == [abs(v) // n * (1 if v >= 0 else -1) for v in values]


def test_unsigned_averages_are_exact():
    array = np.array([2**64 - 1, 7, 0], dtype=np.uint64)
    kernels.divide(array, DType.UINT64, 2)
    assert array.tolist() == [2**63 - 1, 3, 0]


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_integer], ids=str)
def test_integers_scale_toward_zero(dtype):
    signed = dtype.storage.kind == "i"
    values = [0, 1, 2, 3, 99, *([-1, -3, -99] if signed else [])]
    array = np.array(values, dtype=dtype.storage)
    kernels.scale(array, dtype, 0.5)
    assert array.tolist() == [int(value * 0.5) for value in values]


def test_integers_that_do_not_fit_wrap_around():
    array = np.array([200], dtype=np.uint8)
    kernels.scale(array, DType.UINT8, 2.0)
    assert array.tolist() == [400 - 256]
    large = np.array([2**62], dtype=np.uint64)
    kernels.scale(large, DType.UINT64, 3.0)
    assert large.tolist() == [3 * 2**62]


def test_bool():
    array = np.array([True, False])
    kernels.scale(array, DType.BOOL, 0.5)
    assert array.tolist() == [True, False]
    kernels.scale(array, DType.BOOL, 0.0)
    assert array.tolist() == [False, False]
    with pytest.raises(TypeError, match="bool"):
        kernels.divide(array, DType.BOOL, 2)


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_floating], ids=str)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_nan_spreads(dtype, op, path):
    if dtype is DType.BFLOAT16:
        # The last one would become infinity if its tail were cut, the first -0 if rounded up.
        nan, one = np.array([0xFFFF, 0x7FC0, 0x7F81], np.uint16), np.full(3, 0x3F80, np.uint16)
    else:
        nan, one = np.full(3, np.nan, dtype.storage), np.ones(3, dtype.storage)
    for first, second in ((nan.copy(), one), (one.copy(), nan)):
        kernels.combiner(dtype, op)(first, second)
        wide = to_wide(first, dtype) if dtype in HALVES else first
        assert np.isnan(wide).all()


def test_overflow_is_silent(path, recwarn):
    for dtype in (DType.FLOAT16, DType.FLOAT32):
        array = np.full(3, np.finfo(dtype.storage).max)
        kernels.combiner(dtype, ReduceOp.SUM)(array, array.copy())
        assert np.isinf(array).all()
        kernels.scale(array, dtype, 1e300)
    assert not recwarn.list


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=str)
def test_complex_numbers_have_no_order(op):
    for function in (kernels.combiner, kernels.neutral):
        with pytest.raises(TypeError, match="complex"):
            function(DType.COMPLEX64, op)


@pytest.mark.parametrize("op", [ReduceOp.ADASUM, ReduceOp.AVERAGE], ids=str)
def test_only_elementwise_operations(op):
    for function in (kernels.combiner, kernels.neutral):
        with pytest.raises(ValueError, match=str(op)):
            function(DType.FLOAT32, op)


def test_torch_is_never_imported():
    script = (
        "import sys, numpy as np\n"
        "from hvdlite.transport import kernels\n"
        "from hvdlite.transport.types import DType, ReduceOp\n"
        "a = np.ones(3, np.uint16)\n"
        "kernels.combiner(DType.BFLOAT16, ReduceOp.SUM)(a, a.copy())\n"
        "kernels.scale(a, DType.BFLOAT16, 2.0)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
