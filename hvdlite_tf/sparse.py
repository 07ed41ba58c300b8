"""Sums and averages of IndexedSlices: gather everybody's rows and indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import ProcessSet
from hvdlite.engine import submit
from hvdlite.transport.types import Array, DType, ReduceOp

from .bridge import Work
from .tensors import storage_of

__all__ = ["submit_sparse"]


def submit_sparse(
    arrays: Sequence[Array], name: str | None, op: ReduceOp, process_set: ProcessSet
) -> Work:
    """Begin the reduction of several sparse gradients as one request.

    Args:
        arrays: values and indices of the first, of the second, ...; the indices are int64.
        name: identifies the request across ranks.
        op: Sum or Average.
        process_set: the ranks that take part.

    Returns:
        Work whose arrays are like those given, with ascending indices that occur once each.
    """
    divisor = process_set.size() if op is ReduceOp.AVERAGE else 1
    pieces: list[Array] = []
    for values, indices in zip(arrays[::2], arrays[1::2], strict=True):
        # Summed here first: a token that occurs a hundred times travels once.
        pieces += _coalesce(values, indices, 1)
    types = [piece.dtype for piece in pieces]
    stored = [storage_of(piece) for piece in pieces]
    handle = submit.submit_allgather(
        stored,
        dtypes=[DType.of(piece) for piece in pieces],
        name=name,
        process_set=process_set,
    )

    def finish(gathered: Sequence[Array]) -> list[Array]:
        everything = [array.view(dtype) for array, dtype in zip(gathered, types, strict=True)]
        results: list[Array] = []
        for values, indices in zip(everything[::2], everything[1::2], strict=True):
            results += _coalesce(values, indices, divisor)
        return results

    return Work(handle, finish)


def _coalesce(values: Array, indices: Array, divisor: int) -> list[Array]:
    """Add up the rows of equal indices, in the order given, and divide."""
    if not len(indices):
        return [values, indices]
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    rows: Any = values[order]
    wide = _wider(rows.dtype)
    if len(starts) != len(rows):
        rows = np.add.reduceat(rows.astype(wide, copy=False), starts, axis=0)
    if divisor != 1:
        rows = rows.astype(wide, copy=False) / divisor
    return [rows.astype(values.dtype, copy=False), ordered[starts]]


def _wider(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type to calculate in: 16 bits lose too much, and bfloat16 is new to NumPy."""
    return np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
