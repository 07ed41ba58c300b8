"""How adapters hand tensors to the engine: NumPy views in, one handle out.

A list of tensors is one request: it is negotiated, cached and completed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from ..transport.base import Transport
from ..transport.types import BY_NUMPY, Array, DType, ReduceOp
from ..world import current, engine
from .checks import (
    check_reduction,
    factor_of,
    index_of,
    ranks_of,
    refuse_scalars,
    set_id_of,
    splits_of,
)
from .engine import GLOBAL_SET
from .negotiation import JOIN_KEY
from .requests import Kind, Request
from .submissions import Handle

if TYPE_CHECKING:
    from ..process_sets import ProcessSet

__all__ = [
    "allocate_buffer",
    "reduces_scattered",
    "resubmit_allreduce",
    "submit_allgather",
    "submit_allreduce",
    "submit_alltoall",
    "submit_barrier",
    "submit_broadcast",
    "submit_join",
    "submit_reducescatter",
]


def submit_allreduce(
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    *,
    dtypes: Sequence[DType] | None = None,
    name: str | None = None,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet,
    resident: bool = False,
    result: object = None,
) -> Handle:
    """Submit an all-reduce.

    Args:
        inputs: tensors of any shape and strides, equal on all ranks.
        outputs: where the results go, of the same shapes; may be the inputs themselves.
        dtypes: element types, where NumPy cannot tell (bfloat16 as uint16). Arrays of wider
            floats than the 16-bit ones named here are cast on their way, there and back.
        op: how to combine.
        prescale: factor applied before the reduction.
        postscale: factor applied after it.
        resident: whether the tensors lie, on every rank, in memory from `allocate_buffer`, or
            are many that `reduces_scattered`; they are reduced there then, all at once, and
            not fused with others.
        result: what the handle is to return in place of the outputs.

    Returns:
        A handle whose result is the list of the outputs.

    Raises:
        TypeError: the element type does not go with `op`.
        ValueError: this rank is not in the process set.
    """
    for output in outputs:
        if not output.flags.writeable:
            raise ValueError("allreduce cannot write its result: the output array is read-only.")
    if type(prescale) is not float:
        prescale = factor_of(prescale, "prescale_factor")
    if type(postscale) is not float:
        postscale = factor_of(postscale, "postscale_factor")
    key: object
    if len(inputs) == 1:
        array = inputs[0]
        kind = array.dtype if dtypes is None else dtypes[0]
        key = kind, array.shape, op, prescale, postscale, resident
    else:
        dtypes = _dtypes(inputs, dtypes)
        key = tuple(dtypes), _shapes(inputs), op, prescale, postscale, resident
    request = _requests.get(key)
    if request is None:
        request = _reduction(Kind.ALLREDUCE, inputs, dtypes, op, prescale, postscale, resident)
        if len(_requests) >= _REQUESTS:  # shapes that never come back must not pile up
            _requests.clear()
        _requests[key] = request
    return _submit(process_set, request, name, inputs, list(outputs), result)


def resubmit_allreduce(
    array: Array,
    output: Array,
    name: str | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle | None:
    """Submit an all-reduce like one that has passed `submit_allreduce` before.

    This is the way of most tensors of most steps, and takes half the time.

    Args:
        array: as it comes from the caller.
        output: of the same type and shape, also what the handle returns; may be the array.

    Returns:
        A handle; None if there was none like it, or something has to be checked or converted.
    """
    if (
        # What compares equal may still be refused: True is no number.
        type(prescale) is not float
        or type(postscale) is not float
        or type(array) is not np.ndarray
        or not output.flags.writeable
    ):
        return None
    key = BY_NUMPY.get(array.dtype), array.shape, op, prescale, postscale, False
    request = _requests.get(key)
    if request is None:
        return None
    return _submit(process_set, request, name, [array], [output], output)


_REQUESTS = 4096
_requests: dict[object, Request] = {}
"""Requests for all-reduces that passed the checks: the next one like it is the same object."""


def submit_allgather(
    inputs: Sequence[Array],
    *,
    dtypes: Sequence[DType] | None = None,
    name: str | None = None,
    process_set: ProcessSet,
) -> Handle:
    """Submit an all-gather along the first dimension, which may differ between ranks.

    Returns:
        A handle whose result is a list of new arrays.

    Raises:
        ValueError: a tensor has no dimension.
    """
    refuse_scalars(Kind.ALLGATHER, inputs)
    request = Request(Kind.ALLGATHER, tuple(_dtypes(inputs, dtypes)), _shapes(inputs))
    return _submit(process_set, request, name, inputs, [None] * len(inputs))


def submit_broadcast(
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    *,
    root_rank: int,
    dtypes: Sequence[DType] | None = None,
    name: str | None = None,
    process_set: ProcessSet,
) -> Handle:
    """Submit a broadcast of the tensors of `root_rank` (a rank of the job, also within a set).

    Returns:
        A handle whose result is the list of the outputs.

    Raises:
        ValueError: the root is not a rank of the process set.
    """
    ranks = ranks_of(process_set)
    root = index_of(root_rank, "root_rank")
    if root not in ranks:
        raise ValueError(
            f"broadcast: root_rank {root} is not a rank of the process set {list(ranks)}."
        )
    for output in outputs:
        if not output.flags.writeable:
            raise ValueError("broadcast cannot write its result: the output array is read-only.")
    request = Request(
        Kind.BROADCAST,
        tuple(_dtypes(inputs, dtypes)),
        _shapes(inputs),
        root=ranks.index(root),
    )
    return _submit(process_set, request, name, inputs, list(outputs))


def submit_alltoall(
    array: Array,
    splits: Sequence[SupportsIndex] | None,
    *,
    dtype: DType | None = None,
    name: str | None = None,
    process_set: ProcessSet,
) -> Handle:
    """Submit an all-to-all: consecutive rows of `array` go to rank 0, 1, ... of the set.

    Args:
        splits: how many rows each rank gets; None splits evenly.

    Returns:
        A handle whose result is the received rows in rank order, and (int64) how many came
        from each rank.

    Raises:
        ValueError: the tensor has no dimension, or the splits don't fit it.
    """
    refuse_scalars(Kind.ALLTOALL, [array])
    size = len(ranks_of(process_set))
    counts = splits_of(splits, array.shape[0], size)
    dtypes = tuple(_dtypes([array], None if dtype is None else [dtype]))
    request = Request(Kind.ALLTOALL, dtypes, _shapes([array]), splits=counts)
    return _submit(process_set, request, name, [array], [None])


def submit_reducescatter(
    inputs: Sequence[Array],
    *,
    dtypes: Sequence[DType] | None = None,
    name: str | None = None,
    op: ReduceOp,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet,
) -> Handle:
    """Submit a reduction whose first dimension is spread over the ranks.

    The first `rows % size` ranks get one row more than the others.

    Returns:
        A handle whose result is a list of new arrays.

    Raises:
        TypeError: the element type does not go with `op`.
        ValueError: a tensor has no dimension, or `op` is Adasum.
    """
    if op is ReduceOp.ADASUM:
        raise ValueError("reducescatter: Adasum combines whole tensors; use allreduce.")
    refuse_scalars(Kind.REDUCESCATTER, inputs)
    request = _reduction(Kind.REDUCESCATTER, inputs, dtypes, op, prescale, postscale)
    return _submit(process_set, request, name, inputs, [None] * len(inputs))


def submit_barrier(*, name: str | None = None, process_set: ProcessSet) -> Handle:
    """Submit a barrier: its handle is done once every rank has submitted it."""
    return _submit(process_set, Request(Kind.BARRIER), name, [], [])


def submit_join(*, process_set: ProcessSet) -> Handle:
    """Submit that this rank has no more data; the result is the last rank to say so."""
    return _submit(process_set, Request(Kind.JOIN), JOIN_KEY, [], [])


def submit_process_set_change(
    kind: Kind, numbers: Sequence[int], process_set: ProcessSet
) -> Handle:
    """Submit the addition of a set of ranks, or the removal of the set of a number."""
    return _submit(process_set, Request(kind, splits=tuple(numbers)), None, [], [])


def reduces_scattered(count: int, nbytes: int, process_set: ProcessSet) -> bool:
    """Return whether a group that says `resident` is reduced where it is, wherever that is.

    Args:
        count: how many tensors.
        nbytes: of all of them.
        process_set: where they are going to be reduced. This rank is in it.
    """
    scattered = _transport(process_set).scattered
    return scattered is not None and scattered.pays(count, nbytes)


def allocate_buffer(
    nbytes: int, process_set: ProcessSet | None = None, zeroed: bool = True
) -> Array:
    """Return memory for tensors that are reduced in place again and again.

    Args:
        nbytes: size in bytes.
        process_set: where they are going to be reduced; None for the set of all ranks. This
            rank is in it.
        zeroed: whether it must be zero; otherwise it takes no room before it is used.
    """
    buffer = _transport(process_set).allocate(nbytes)
    if zeroed:
        buffer[...] = 0
    return buffer


def _transport(process_set: ProcessSet | None) -> Transport:
    set_id = GLOBAL_SET if process_set is None else process_set.process_set_id
    assert set_id is not None
    return engine().channels[set_id].transport


def _submit(
    process_set: ProcessSet,
    request: Request,
    name: str | None,
    inputs: Sequence[Array],
    outputs: list[Array | None],
    result: object = None,
) -> Handle:
    state = current()
    set_id: Any = getattr(process_set, "process_set_id", None)
    if state.sets.get(set_id) is not process_set or set_id not in state.engine.channels:
        set_id = set_id_of(process_set, request.kind)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{request.kind}: name must be a string, not {type(name).__name__}.")
    return state.engine.submit(set_id, request, name or None, inputs, outputs, result)


def _dtypes(arrays: Sequence[Array], dtypes: Sequence[DType] | None) -> list[DType]:
    return [DType.of(array) for array in arrays] if dtypes is None else list(dtypes)


def _shapes(arrays: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in arrays)


def _reduction(
    kind: Kind,
    inputs: Sequence[Array],
    dtypes: Sequence[DType] | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    resident: bool = False,
) -> Request:
    """Return the request for a reduction, once its arguments have been checked."""
    dtypes = _dtypes(inputs, dtypes)
    check_reduction(dtypes, op)
    return Request(
        kind,
        tuple(dtypes),
        _shapes(inputs),
        op,
        prescale=factor_of(prescale, "prescale_factor"),
        postscale=factor_of(postscale, "postscale_factor"),
        resident=resident,
    )
