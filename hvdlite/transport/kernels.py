"""Element-wise arithmetic in place: what a transport does to the numbers it moves.

Buffers hold `dtype.storage`, so bfloat16 comes as uint16 bit patterns. 16-bit floats are
computed in float32 and rounded to nearest even, by torch where the program has imported it (20
times as fast as NumPy's float16), by NumPy otherwise. Both give the same bits, but for which
NaN stands for a NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .types import Array, DType, ReduceOp

__all__ = [
    "Combine",
    "combiner",
    "divide",
    "narrow_into",
    "neutral",
    "scale",
    "widen_into",
    "widened",
]

Combine = Callable[[Array, Array], None]
"""Combines the second array into the first one."""

_Wide = npt.NDArray[np.float32]

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
_BOOL_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.logical_or,
    ReduceOp.MAX: np.logical_or,
    ReduceOp.PRODUCT: np.logical_and,
    ReduceOp.MIN: np.logical_and,
}

_BLOCK = 16384
"""Elements whose wide copies stay in the cache."""

_TORCH_BLOCK = 32704
"""From 32768 elements on, torch would start threads that take the cores from other ranks."""


def combiner(dtype: DType, op: ReduceOp, *, quiet: bool = True) -> Combine:
    """Return the function that combines one contribution into another one.

    Args:
        dtype: the elements of both arrays.
        op: Sum, Product, Min or Max. For bool, Sum and Max are "or", Product and Min "and".
        quiet: whether it silences NumPy's warnings. That takes as long as to combine some
            kilobytes, so a caller that does it often may do it once instead.

    Returns:
        A function of two flat arrays of equal length; the result is left in the first. Min
        and Max of a NaN and a number are NaN.

    Raises:
        TypeError: complex numbers have no order.
        ValueError: the operation is not element-wise.
    """
    _check(dtype, op)
    if dtype in (DType.FLOAT16, DType.BFLOAT16) and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        torch = _torch()
        if torch is not None:
            return _torch_combiner(torch, dtype, op)
    if dtype is DType.BFLOAT16:
        return _bfloat16_combiner(op)
    ufunc: Any = (_BOOL_UFUNCS if dtype is DType.BOOL else _UFUNCS)[op]

    def combine(into: Array, other: Array) -> None:
        ufunc(into, other, out=into)

    def combine_quietly(into: Array, other: Array) -> None:
        with np.errstate(all="ignore"):
            ufunc(into, other, out=into)

    return combine_quietly if quiet else combine


def scale(array: Array, dtype: DType, factor: float) -> None:
    """Multiply in place. Integers are computed in float64 and rounded toward zero."""
    if dtype is DType.BOOL:
        if factor == 0:
            array[...] = False
    elif dtype.is_integer:
        for block in _blocks(array):
            _store_integers(block, block * np.float64(factor))
    elif dtype in (DType.FLOAT16, DType.BFLOAT16):
        torch = _torch()
        if torch is not None:
            for part in _torch_parts(torch, array, dtype):
                part.mul_(factor)
        else:
            _in_float32(array, dtype, lambda wide: np.multiply(wide, np.float32(factor), out=wide))
    else:
        values: Any = array
        with np.errstate(all="ignore"):
            np.multiply(values, values.real.dtype.type(factor), out=values)


def divide(array: Array, dtype: DType, n: int) -> None:
    """Divide in place by a positive number. Integers are rounded toward zero.

    Raises:
        TypeError: a bool cannot be divided.
    """
    if dtype is DType.BOOL:
        raise TypeError("bool has no average")
    if dtype.is_integer:
        for block in _blocks(array):
            quotient, rest = np.divmod(block, block.dtype.type(n))
            if dtype.storage.kind == "i":
                quotient += (block < 0) & (rest != 0)
            block[...] = quotient
    elif dtype in (DType.FLOAT16, DType.BFLOAT16):
        torch = _torch()
        if torch is not None:
            for part in _torch_parts(torch, array, dtype):
                part.div_(n)
        else:
            _in_float32(array, dtype, lambda wide: np.divide(wide, np.float32(n), out=wide))
    else:
        values: Any = array
        kind = values.real.dtype.type
        with np.errstate(all="ignore"):
            if n & (n - 1):
                np.divide(values, kind(n), out=values)
            else:
                # The same numbers in a tenth of the time: powers of two have exact inverses.
                np.multiply(values, kind(1 / n), out=values)


def neutral(dtype: DType, op: ReduceOp) -> Any:
    """Return the element that changes nothing, as `dtype.storage` holds it.

    Raises:
        TypeError: complex numbers have no order.
        ValueError: the operation is not element-wise.
    """
    _check(dtype, op)
    storage: Any = dtype.storage
    if op is ReduceOp.SUM:
        return storage.type(0)
    if dtype is DType.BOOL:
        return storage.type(_BOOL_UFUNCS[op] is np.logical_and)
    if dtype is DType.BFLOAT16:
        bits = {ReduceOp.PRODUCT: 0x3F80, ReduceOp.MIN: 0x7F80, ReduceOp.MAX: 0xFF80}
        return storage.type(bits[op])
    if op is ReduceOp.PRODUCT:
        return storage.type(1)
    if dtype.is_integer:
        limits = np.iinfo(storage)
        return storage.type(limits.max if op is ReduceOp.MIN else limits.min)
    return storage.type(np.inf if op is ReduceOp.MIN else -np.inf)


def widened(array: Array, dtype: DType) -> Array:
    """Return floats to compute with: 16-bit ones as a float32 copy, others as they are."""
    return _widen(array, dtype) if dtype in (DType.FLOAT16, DType.BFLOAT16) else array


def narrow_into(target: Array, values: Array, dtype: DType) -> None:
    """Store floats as `dtype`, rounded to nearest even. Both arrays are flat."""
    if dtype not in (DType.FLOAT16, DType.BFLOAT16):
        target[...] = values
        return
    torch = _torch()
    if torch is not None:
        parts = _split(torch, torch.from_numpy(values))
        for part, wide_part in zip(_torch_parts(torch, target, dtype), parts, strict=True):
            part.copy_(wide_part)
        return
    with np.errstate(all="ignore"):
        for block, wide_block in zip(_blocks(target), _blocks(values), strict=True):
            _narrow(wide_block.astype(np.float32, copy=False), block, dtype)


def widen_into(target: Array, values: Array, dtype: DType) -> None:
    """Store elements of `dtype` in an array of wider floats. Both arrays are flat."""
    torch = _torch() if dtype in (DType.FLOAT16, DType.BFLOAT16) else None
    if torch is not None:
        parts = _split(torch, torch.from_numpy(target))
        for wide_part, part in zip(parts, _torch_parts(torch, values, dtype), strict=True):
            wide_part.copy_(part)
    else:
        for wide_block, block in zip(_blocks(target), _blocks(values), strict=True):
            wide_block[...] = widened(block, dtype)


def _check(dtype: DType, op: ReduceOp) -> None:
    if op not in _UFUNCS:
        raise ValueError(f"{op} does not combine element by element")
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"complex numbers have no {op}")


def _blocks(array: Array) -> Iterator[Any]:
    for start in range(0, len(array), _BLOCK):
        yield array[start : start + _BLOCK]


def _store_integers(block: Any, values: npt.NDArray[np.float64]) -> None:
    # By way of 64 bits, so that what does not fit wraps around as sums do.
    wide = np.uint64 if block.dtype == np.uint64 else np.int64
    with np.errstate(all="ignore"):
        block[...] = values.astype(wide).astype(block.dtype)


# -- 16-bit floats ------------------------------------------------------------------------


def _torch() -> Any:
    """Return torch if the program uses it already; importing it takes seconds."""
    torch = sys.modules.get("torch")
    # Another thread may be in the middle of importing it.
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "bfloat16") else None


def _torch_parts(torch: Any, array: Array, dtype: DType) -> Any:
    bits = torch.from_numpy(array.view(np.int16))
    return _split(torch, bits.view(torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float16))


def _split(torch: Any, whole: Any) -> Any:
    # Parts cost half of the speed.
    return (whole,) if torch.get_num_threads() == 1 else whole.split(_TORCH_BLOCK)


def _torch_combiner(torch: Any, dtype: DType, op: ReduceOp) -> Combine:
    in_place = torch.Tensor.add_ if op is ReduceOp.SUM else torch.Tensor.mul_

    def combine(into: Array, other: Array) -> None:
        parts = _torch_parts(torch, into, dtype)
        for part, other_part in zip(parts, _torch_parts(torch, other, dtype), strict=True):
            in_place(part, other_part)

    return combine


def _bfloat16_combiner(op: ReduceOp) -> Combine:
    ufunc: Any = _UFUNCS[op]

    def combine(into: Array, other: Array) -> None:
        with np.errstate(all="ignore"):
            for block, other_block in zip(_blocks(into), _blocks(other), strict=True):
                wide = _widen(block, DType.BFLOAT16)
                ufunc(wide, _widen(other_block, DType.BFLOAT16), out=wide)
                _narrow(wide, block, DType.BFLOAT16)

    return combine


def _in_float32(array: Array, dtype: DType, change: Callable[[_Wide], object]) -> None:
    with np.errstate(all="ignore"):
        for block in _blocks(array):
            wide = _widen(block, dtype)
            change(wide)
            _narrow(wide, block, dtype)


def _widen(block: Any, dtype: DType) -> _Wide:
    if dtype is DType.FLOAT16:
        wide: _Wide = block.astype(np.float32)
        return wide
    bits = block.astype(np.uint32)
    bits <<= 16
    widened: _Wide = bits.view(np.float32)
    return widened


def _narrow(wide: _Wide, block: Any, dtype: DType) -> None:
    if dtype is DType.FLOAT16:
        block[...] = wide
        return
    bits = wide.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    block[...] = rounded
    nan = np.isnan(wide)
    if nan.any():
        # Rounding would carry some NaNs over into infinity or zero.
        block[nan] = (bits[nan] >> 16) | 0x40
