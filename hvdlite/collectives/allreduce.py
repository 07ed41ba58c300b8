"""Combine the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..engine import submit
from ..engine.submissions import Handle
from ..process_sets import ProcessSet, global_process_set
from ..transport.types import Array, DType, ReduceOp
from ..world import attended
from .arrays import in_place_targets, resolve_op, storage_view, storage_views

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def allreduce(
    array: npt.ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Combine the arrays of all ranks, which all get the same result, bit for bit.

    The average of floats is their sum divided by the number of ranks (float16 is divided
    before it is summed, so that it does not overflow); of integers, their sum in 64 bits (which
    wraps around beyond that) divided by it and rounded toward zero. Sums and maxima of bool
    are "or", products and minima "and".

    Args:
        array: any shape, the same on all ranks.
        average: old spelling of op: True for Average, False for Sum.
        name: identifies the array across ranks.
        op: Average (the default), Sum, Min, Max, Product, or Adasum (of floats: see
            `hvdlite.transport.adasum`; each array of a group is combined by itself).
        prescale_factor: multiplies every array before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        A new array of the same shape and type.

    Raises:
        TypeError: the operation is not defined for the elements.
        MismatchError: the ranks passed different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    with attended():
        return allreduce_async(  # type: ignore[no-any-return]
            array, average, name, op, prescale_factor, postscale_factor, process_set
        ).wait()


def allreduce_async(
    array: npt.ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce`."""
    source = np.asarray(array)
    output: Array = np.empty_like(source, subok=False)
    factors = prescale_factor, postscale_factor
    return _begin(source, output, name, resolve_op(average, op), *factors, process_set)


def allreduce_(
    array: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Do an `allreduce` in place. Returns the array."""
    with attended():
        return allreduce_async_(  # type: ignore[no-any-return]
            array, average, name, op, prescale_factor, postscale_factor, process_set
        ).wait()


def allreduce_async_(
    array: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce` in place."""
    if not isinstance(array, np.ndarray):
        in_place_targets("allreduce_", [array])
    factors = prescale_factor, postscale_factor
    return _begin(array, array, name, resolve_op(average, op), *factors, process_set)


def _begin(
    source: Array,
    output: Array,
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle:
    again = submit.resubmit_allreduce(source, output, name, op, prescale, postscale, process_set)
    if again is not None:
        return again
    dtype = DType.of(source)
    return submit.submit_allreduce(
        [storage_view(source, dtype)],
        [storage_view(output, dtype)],
        dtypes=[dtype],
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
        result=output,
    )


def grouped_allreduce(
    arrays: Sequence[npt.ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Do an `allreduce` of several arrays, which become ready together."""
    with attended():
        return grouped_allreduce_async(  # type: ignore[no-any-return]
            arrays, average, name, op, prescale_factor, postscale_factor, process_set
        ).wait()


def grouped_allreduce_async(
    arrays: Sequence[npt.ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce`."""
    inputs = [np.asarray(array) for array in arrays]
    outputs = [np.empty_like(array, subok=False) for array in inputs]
    dtypes = [DType.of(array) for array in inputs]
    return submit.submit_allreduce(
        storage_views(inputs, dtypes),
        storage_views(outputs, dtypes),
        dtypes=dtypes,
        name=name,
        op=resolve_op(average, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        result=outputs,
    )


def grouped_allreduce_(
    arrays: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Do a `grouped_allreduce` in place. Returns the arrays."""
    with attended():
        return grouped_allreduce_async_(  # type: ignore[no-any-return]
            arrays, average, name, op, prescale_factor, postscale_factor, process_set
        ).wait()


def grouped_allreduce_async_(
    arrays: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce` in place."""
    targets = in_place_targets("allreduce_", arrays)
    dtypes = [DType.of(array) for array in targets]
    storage = storage_views(targets, dtypes)
    return submit.submit_allreduce(
        storage,
        storage,
        dtypes=dtypes,
        name=name,
        op=resolve_op(average, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
        result=targets,
    )
