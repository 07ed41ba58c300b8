"""Checks of what callers submit: errors say what is wrong before any other rank hears of it."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex

from ..transport.adasum import adasum_refusal
from ..transport.types import Array, DType, ReduceOp
from ..world import engine
from .requests import Kind

if TYPE_CHECKING:
    from ..process_sets import ProcessSet

__all__ = [
    "check_reduction",
    "factor_of",
    "index_of",
    "ranks_of",
    "refuse_scalars",
    "set_id_of",
    "splits_of",
]


def ranks_of(process_set: ProcessSet) -> list[int]:
    """Return the ranks of a process set.

    Raises:
        TypeError: it is none.
        ValueError: it is not registered.
    """
    if not hasattr(process_set, "require_ranks"):
        raise TypeError(
            f"process_set must be a ProcessSet, such as global_process_set, not {process_set!r}."
        )
    return process_set.require_ranks()


def set_id_of(process_set: ProcessSet, kind: Kind) -> int:
    """Return the number of a process set that this rank is in.

    Whether there still is such a set is for the engine to say.

    Raises:
        TypeError: it is no process set.
        ValueError: this rank is not in it, or it is not registered.
    """
    rank = engine().rank
    ranks = ranks_of(process_set)
    if rank not in ranks:
        raise ValueError(f"{kind}: rank {rank} is not in the process set {list(ranks)}.")
    assert process_set.process_set_id is not None
    return process_set.process_set_id


def factor_of(value: object, argument: str) -> float:
    """Return a factor as a finite float.

    Raises:
        TypeError: it is not a real number.
        ValueError: it is infinite or not a number.
    """
    scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "__float__")
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) or scalar):
        raise TypeError(
            f"rank {engine().rank}: {argument} must be a number, not {value!r} "
            f"({type(value).__name__})."
        )
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"rank {engine().rank}: {argument} must be finite, not {number}.")
    return number


def index_of(value: SupportsIndex, what: str) -> int:
    """Return a whole number as an int. Raises TypeError where it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be integer, not {type(value).__name__}.") from None


def splits_of(splits: Sequence[SupportsIndex] | None, rows: int, size: int) -> tuple[int, ...]:
    """Return how many of its rows a rank sends to each of the ranks.

    Args:
        splits: what the caller says; None for as many to each.
        rows: how many there are.
        size: how many ranks.

    Raises:
        TypeError: what the caller says is not whole numbers.
        ValueError: it does not fit the rows and ranks.
    """
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall: the first dimension ({rows}) is not divisible by the number of "
                f"ranks ({size}); pass splits."
            )
        return (rows // size,) * size
    counts = tuple(index_of(item, "splits") for item in splits)
    if len(counts) != size or min(counts, default=0) < 0 or sum(counts) != rows:
        raise ValueError(
            f"alltoall: splits must be {size} non-negative numbers (one for each rank) that "
            f"add up to the first dimension ({rows}); got {list(counts)}, "
            f"which add up to {sum(counts)}."
        )
    return counts


def refuse_scalars(kind: Kind, arrays: Sequence[Array]) -> None:
    """Raise ValueError where a tensor has no first dimension."""
    for array in arrays:
        if array.ndim == 0:
            raise ValueError(
                f"{kind}: a tensor without dimensions has no first dimension to work along; "
                "reshape it to (1,)."
            )


def check_reduction(dtypes: Sequence[DType], op: ReduceOp) -> None:
    """Raise TypeError where the operation is not defined for an element type."""
    for dtype in dtypes:
        if dtype is DType.BOOL and op is ReduceOp.AVERAGE:
            raise TypeError("The average of bool is not defined: use Sum, Min, Max or Product.")
        if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
            raise TypeError(f"Complex numbers have no order, so {op} of {dtype} is not defined.")
        if op is ReduceOp.ADASUM:
            refusal = adasum_refusal(dtype)
            if refusal is not None:
                raise TypeError(refusal)
