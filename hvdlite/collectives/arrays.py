"""What the collectives have in common: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ..engine.submissions import Handle
from ..transport.types import Array, DType, ReduceOp

__all__ = [
    "in_place_targets",
    "only",
    "resolve_op",
    "storage_view",
    "storage_views",
    "then",
    "views_as",
]

T = TypeVar("T")


def resolve_op(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """Return the reduce operation that the arguments `average` and `op` mean together.

    Raises:
        TypeError: `op` is a bool, which only `average` may be.
        ValueError: both are given, or `op` is none of the operations.
    """
    if isinstance(op, bool):
        raise TypeError(
            f"op must be an operation such as Sum, not {op}; did you mean average={op}?"
        )
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average: pass only one of them.")
    if type(op) is ReduceOp:
        return op
    if op is None:
        return ReduceOp.AVERAGE if average or average is None else ReduceOp.SUM
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(str(member) for member in ReduceOp)
        raise ValueError(f"op must be one of {names}; got {op!r}.") from None


def then(handle: Handle, convert: Any) -> Handle:
    """Add a conversion of the result to those that the handle makes already."""
    before = handle.convert
    handle.convert = convert if before is None else lambda result: convert(before(result))
    return handle


def only(results: Sequence[T]) -> T:
    """Return the one result of a group of one."""
    return results[0]


def in_place_targets(what: str, arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays, once it is clear that results can be written to them."""
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{what} works in place and needs NumPy arrays, not {type(array).__name__}."
            )
    return list(arrays)


def storage_view(array: Array, dtype: DType) -> Array:
    """Return a view as the engine wants it: a plain array, bfloat16 as its bits."""
    if array.dtype is dtype.storage:
        return np.asarray(array)
    return np.asarray(array.view(dtype.storage))


def storage_views(arrays: Sequence[Array], dtypes: Sequence[DType]) -> list[Array]:
    """Return `storage_view` of several arrays."""
    return [storage_view(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def views_as(outputs: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """Return results with the element types that the caller knows them by."""
    return [
        output if output.dtype == array.dtype else output.view(array.dtype)
        for output, array in zip(outputs, like, strict=True)
    ]
