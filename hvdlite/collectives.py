"""The collectives on NumPy arrays.

Every collective must be called by all ranks of its process set. Named calls may come in any
order on different ranks; calls without a name are matched by their order. The functions that
end in `_async` return a `Handle` for `synchronize` and `poll`; the arrays that they were given
must not change before that. Functions that end in `_` put the result into their argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .engine import submit
from .engine.submissions import Handle
from .process_sets import ProcessSet, global_process_set
from .transport.types import Array, DType, ReduceOp
from .world import attended

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "resolve_op",
    "synchronize",
]

T = TypeVar("T")


def synchronize(handle: Handle, timeout: float | None = None) -> Any:
    """Wait for a collective and return its result.

    Args:
        handle: what an `_async` function returned.
        timeout: seconds to wait at most.

    Raises:
        HvdliteTimeoutError: the time is over; the collective goes on.
        MismatchError: the ranks asked for different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    return _handle(handle).wait(timeout)


def poll(handle: Handle) -> bool:
    """Return whether `synchronize(handle)` would return at once."""
    return _handle(handle).done()


def _handle(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"Expected the handle of an asynchronous collective, got {type(handle).__name__}."
        )
    return handle


def resolve_op(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """Return the reduce operation that the arguments `average` and `op` mean together.

    Raises:
        ValueError: both are given, or `op` is none of the operations.
    """
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average: pass only one of them.")
    if op is None:
        return ReduceOp.AVERAGE if average or average is None else ReduceOp.SUM
    try:
        return ReduceOp(op)
    except ValueError:
        names = ", ".join(str(member) for member in ReduceOp)
        raise ValueError(f"op must be one of {names}; got {op!r}.") from None


# -- all-reduce ---------------------------------------------------------------------------


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
    before it is summed, so that it does not overflow); of integers, the exact sum divided by
    it and rounded toward zero. Sums and maxima of bool are "or", products and minima "and".

    Args:
        array: any shape, the same on all ranks.
        average: old spelling of op: True for Average, False for Sum.
        name: identifies the array across ranks.
        op: Average (the default), Sum, Min, Max or Product.
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
    handle = grouped_allreduce_async(
        [array], average, name, op, prescale_factor, postscale_factor, process_set
    )
    return _then(handle, _only)


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
    handle = grouped_allreduce_async_(
        [array], average, name, op, prescale_factor, postscale_factor, process_set
    )
    return _then(handle, _only)


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
    handle = submit.submit_allreduce(
        _storage(inputs, dtypes),
        _storage(outputs, dtypes),
        dtypes=dtypes,
        name=name,
        op=resolve_op(average, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
    )
    return _then(handle, lambda _: outputs)


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
    targets = _targets("allreduce_", arrays)
    dtypes = [DType.of(array) for array in targets]
    storage = _storage(targets, dtypes)
    handle = submit.submit_allreduce(
        storage,
        storage,
        dtypes=dtypes,
        name=name,
        op=resolve_op(average, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
    )
    return _then(handle, lambda _: targets)


# -- all-gather ---------------------------------------------------------------------------


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
    return _then(grouped_allgather_async([array], name, process_set), _only)


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
        _storage(inputs, dtypes), dtypes=dtypes, name=name, process_set=process_set
    )
    return _then(handle, lambda outputs: _as(outputs, inputs))


# -- broadcast ----------------------------------------------------------------------------


def broadcast(
    array: npt.ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the array of one rank on all of them.

    Args:
        array: any shape, the same on all ranks; the contents matter on the root alone.
        root_rank: the rank of the job that sends.
        name: identifies the array across ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: the root is not one of these ranks.
        MismatchError: shapes, types or roots differ (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    with attended():
        return broadcast_async(array, root_rank, name, process_set).wait()  # type: ignore[no-any-return]


def broadcast_async(
    array: npt.ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast`."""
    source = np.asarray(array)
    output = np.empty_like(source, subok=False)
    return _broadcast(source, output, root_rank, name, process_set)


def broadcast_(
    array: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Do a `broadcast` in place. Returns the array."""
    with attended():
        return broadcast_async_(array, root_rank, name, process_set).wait()  # type: ignore[no-any-return]


def broadcast_async_(
    array: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast` in place."""
    (target,) = _targets("broadcast_", [array])
    return _broadcast(target, target, root_rank, name, process_set)


def _broadcast(
    source: Array, output: Array, root_rank: int, name: str | None, process_set: ProcessSet
) -> Handle:
    dtypes = [DType.of(source)]
    inputs = _storage([source], dtypes)
    outputs = inputs if output is source else _storage([output], dtypes)
    handle = submit.submit_broadcast(
        inputs, outputs, root_rank=root_rank, dtypes=dtypes, name=name, process_set=process_set
    )
    return _then(handle, lambda _: output)


# -- all-to-all, reduce-scatter -----------------------------------------------------------


def alltoall(
    array: npt.ArrayLike,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Send consecutive rows of the array to rank 0, 1, ... and return the rows received.

    Args:
        array: at least one dimension; the first one may differ between ranks.
        splits: how many rows go to each rank; None splits evenly.
        name: identifies the array across ranks.
        process_set: the ranks that take part.

    Returns:
        The rows received, in rank order; with splits, also how many came from each rank
        (int64).

    Raises:
        ValueError: the array has no dimension, or the splits don't fit it.
        MismatchError: the other dimensions or the types differ (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    with attended():
        return alltoall_async(array, splits, name, process_set).wait()  # type: ignore[no-any-return]


def alltoall_async(
    array: npt.ArrayLike,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `alltoall`."""
    source = np.asarray(array)
    dtype = DType.of(source)
    counts = None if splits is None else list(np.asarray(splits).reshape(-1))
    handle = submit.submit_alltoall(
        _storage([source], [dtype])[0], counts, dtype=dtype, name=name, process_set=process_set
    )

    def convert(result: tuple[Array, Array]) -> Any:
        (output,) = _as([result[0]], [source])
        return output if splits is None else (output, result[1])

    return _then(handle, convert)


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
    return _then(handle, _only)


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
        _storage(inputs, dtypes),
        dtypes=dtypes,
        name=name,
        op=resolve_op(None, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
    )
    return _then(handle, lambda outputs: _as(outputs, inputs))


# -- barrier, join ------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    with attended():
        submit.submit_barrier(process_set=process_set).wait()


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank has said so.

    Meanwhile this rank takes part in the others' collectives: with zeros in sums and averages
    (which are still divided by `size()`) and what changes nothing in the other reductions,
    with no rows in an allgather; it can receive a broadcast but not send one. An alltoall, and
    a broadcast from a rank that has joined, fail with MismatchError on every rank.

    Args:
        device: accepted for compatibility; without meaning here.

    Returns:
        The last rank to join.
    """
    return submit.submit_join(process_set=global_process_set).wait()  # type: ignore[no-any-return]


# -- arrays in, arrays out ----------------------------------------------------------------


def _then(handle: Handle, convert: Any) -> Handle:
    """Add a conversion of the result to those that the handle makes already."""
    before = handle.convert
    handle.convert = convert if before is None else lambda result: convert(before(result))
    return handle


def _only(results: Sequence[T]) -> T:
    return results[0]


def _targets(what: str, arrays: Sequence[Array]) -> list[Array]:
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{what} works in place and needs NumPy arrays, not {type(array).__name__}."
            )
    return list(arrays)


def _storage(arrays: Sequence[Array], dtypes: Sequence[DType]) -> list[Array]:
    """Return views as the engine wants them: plain arrays, bfloat16 as its bits."""
    return [
        np.asarray(array) if array.dtype == dtype.storage else array.view(dtype.storage)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]


def _as(outputs: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    return [
        output if output.dtype == array.dtype else output.view(array.dtype)
        for output, array in zip(outputs, like, strict=True)
    ]
