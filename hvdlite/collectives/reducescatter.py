"""Combine the arrays of all ranks and spread the result over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..engine import submit
from ..engine.submissions import Handle
from ..process_sets import ProcessSet, global_process_set
from ..transport.types import Array, DType, ReduceOp
from ..world import attended
from .arrays import only, resolve_op, storage_views, then, views_as

__all__ = [
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def reducescatter(
    array: npt.ArrayLike,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Combine the arrays of all ranks and return this rank's share of the rows.

    The first `rows % size` ranks get one row more than the others.

    Args:
        array: at least one dimension, the same shape on all ranks.
        name: identifies the array across ranks.
        op: see `allreduce`.
        process_set: the ranks that take part.
        prescale_factor: multiplies every array before the reduction.
        postscale_factor: multiplies the result.

    Raises:
        TypeError: the operation is not defined for the elements.
        ValueError: the array has no dimension.
        MismatchError: the ranks passed different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    with attended():
        return reducescatter_async(  # type: ignore[no-any-return]
            array, name, op, process_set, prescale_factor, postscale_factor
        ).wait()


def reducescatter_async(
    array: npt.ArrayLike,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`."""
    handle = grouped_reducescatter_async(
        [array], name, op, process_set, prescale_factor, postscale_factor
    )
    return then(handle, only)


def grouped_reducescatter(
    arrays: Sequence[npt.ArrayLike],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Do a `reducescatter` of several arrays, which become ready together."""
    with attended():
        return grouped_reducescatter_async(  # type: ignore[no-any-return]
            arrays, name, op, process_set, prescale_factor, postscale_factor
        ).wait()


def grouped_reducescatter_async(
    arrays: Sequence[npt.ArrayLike],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`."""
    inputs = [np.asarray(array) for array in arrays]
    dtypes = [DType.of(array) for array in inputs]
    handle = submit.submit_reducescatter(
        storage_views(inputs, dtypes),
        dtypes=dtypes,
        name=name,
        op=resolve_op(None, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
    )
    return then(handle, lambda outputs: views_as(outputs, inputs))
