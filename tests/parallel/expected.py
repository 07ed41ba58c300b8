"""Known inputs, and what collectives must make of them: plain arithmetic, no communication.

Every rank can compute every rank's input, so tests never compare hvdlite with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

__all__ = [
    "DTYPES",
    "FORMS",
    "OPS",
    "assert_equal",
    "average",
    "dtype_of",
    "known",
    "reduced",
    "run",
]

OPS = ("Sum", "Average", "Min", "Max", "Product")
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
# What two or three roundings may cost; the inputs are small integers, so only division rounds.
_TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "complex64": 1e-6}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a dtype by name, skipping the test where bfloat16 is asked for and not there."""
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


def known(rank: int, shape: Sequence[int] | int, dtype: Any = "float32", seed: int = 0) -> Any:
    """Return one rank's input: integers so small that four ranks' products fit an int8."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng((seed, rank))
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, shape) == 1)
    low = 0 if dtype.kind == "u" else -3
    values = np.asarray(rng.integers(low, 4, shape))
    if dtype.kind == "c":
        return (values + 1j * rng.integers(-3, 4, shape)).astype(dtype)
    return values.astype(dtype)


def average(total: Any, n: int) -> Any:
    """Divide exact integer sums, rounding toward zero."""
    quotient = abs(total) // n
    return np.where(total < 0, -quotient, quotient)


def reduced(inputs: Sequence[Any], op: str) -> Any:
    """Return the reduction of all ranks' inputs, computed in the widest type there is."""
    dtype = inputs[0].dtype
    if dtype.kind == "b":
        return np.any(inputs, axis=0) if op in ("Sum", "Max") else np.all(inputs, axis=0)
    is_integer = dtype.kind in "iu"
    wide = np.int64 if is_integer else np.complex128 if dtype.kind == "c" else np.float64
    stack = np.stack([array.astype(wide) for array in inputs])
    if op == "Average":
        total = stack.sum(axis=0)
        return (average(total, len(inputs)) if is_integer else total / len(inputs)).astype(dtype)
    combine = {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op]
    return combine(stack, axis=0).astype(dtype)


def assert_equal(result: Any, wanted: Any, what: str = "") -> None:
    """Check type, shape and values: exact for integers, to rounding for the rest."""
    assert isinstance(result, np.ndarray), f"{what}: {type(result)}"
    wanted = np.asarray(wanted)
    assert result.dtype == wanted.dtype, f"{what}: {result.dtype} instead of {wanted.dtype}"
    assert result.shape == wanted.shape, f"{what}: {result.shape} instead of {wanted.shape}"
    if wanted.dtype.kind in "biu":
        np.testing.assert_array_equal(result, wanted, err_msg=what)
        return
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    tolerance = _TOLERANCE.get(wanted.dtype.name, 1e-13)
    np.testing.assert_allclose(
        result.astype(wide), wanted.astype(wide), rtol=tolerance, atol=tolerance, err_msg=what
    )


FORMS = ("allreduce", "allreduce_async", "allreduce_", "allreduce_async_")


def run(hvd: Any, form: str, array: Any, **options: Any) -> Any:
    """All-reduce by one of `FORMS`, checking what it does to its input."""
    before = array.copy()
    result = getattr(hvd, form)(array, **options)
    if "async" in form:
        result = hvd.synchronize(result)
    if form.endswith("_"):
        assert result is array
    else:
        np.testing.assert_array_equal(array, before, err_msg="the input was changed")
        assert not np.shares_memory(result, array)
    return result
