"""Concatenate the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..engine import submit
from ..engine.submissions import Handle
from ..process_sets import ProcessSet, global_process_set
from ..transport.types import Array, DType
from ..world import attended
from .arrays import only, storage_views, then, views_as

__all__ = [
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
]


def allgather(
    array: npt.ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Concatenate the arrays of all ranks along the first dimension, in rank order.

    Args:
        array: at least one dimension; the first one may differ between ranks, and be 0.
        name: identifies the array across ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: the array has no dimension.
        MismatchError: the other dimensions or the types differ (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    with attended():
        return allgather_async(array, name, process_set).wait()  # type: ignore[no-any-return]


def allgather_async(
    array: npt.ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin an `allgather`."""
    return then(grouped_allgather_async([array], name, process_set), only)


def grouped_allgather(
    arrays: Sequence[npt.ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Do an `allgather` of several arrays, which become ready together."""
    with attended():
        return grouped_allgather_async(arrays, name, process_set).wait()  # type: ignore[no-any-return]


def grouped_allgather_async(
    arrays: Sequence[npt.ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allgather`."""
    inputs = [np.asarray(array) for array in arrays]
    dtypes = [DType.of(array) for array in inputs]
    handle = submit.submit_allgather(
        storage_views(inputs, dtypes), dtypes=dtypes, name=name, process_set=process_set
    )
    return then(handle, lambda outputs: views_as(outputs, inputs))
