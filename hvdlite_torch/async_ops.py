"""Collectives that return at once, with a handle for `synchronize` and `poll`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import Handle, ProcessSet, global_process_set
from hvdlite.collectives import resolve_op
from hvdlite.collectives.arrays import only, then
from hvdlite.engine import submit
from hvdlite.transport.types import Array, ReduceOp

from .arguments import cast_type
from .eager import eager
from .tensors import (
    Target,
    check_tensor,
    check_tensors,
    dtype_of,
    dtype_of_type,
    source_of,
    tensor_of,
)

__all__ = [
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_many_",
    "cast_allreduce_async",
    "counts_like",
    "counts_of",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "reducescatter_async",
]

Splits = Sequence[int] | torch.Tensor | None


# -- all-reduce ---------------------------------------------------------------------------


@eager
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce`; the result is a new tensor."""
    targets = [Target.fresh(check_tensor(tensor, "allreduce"))]
    reduction = (resolve_op(average, op), prescale_factor, postscale_factor)
    return then(_allreduce([tensor], targets, name, reduction, process_set), only)


@eager
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce` in place."""
    targets = [Target.in_place(check_tensor(tensor, "allreduce_"), "allreduce_")]
    reduction = (resolve_op(average, op), prescale_factor, postscale_factor)
    return then(_allreduce(None, targets, name, reduction, process_set), only)


@eager
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce`; the result is a list of new tensors."""
    tensors = check_tensors(tensors, "grouped_allreduce")
    targets = [Target.fresh(tensor) for tensor in tensors]
    reduction = (resolve_op(average, op), prescale_factor, postscale_factor)
    return _allreduce(tensors, targets, name, reduction, process_set)


@eager
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce` in place."""
    tensors = check_tensors(tensors, "grouped_allreduce_")
    targets = [Target.in_place(tensor, "grouped_allreduce_") for tensor in tensors]
    reduction = (resolve_op(average, op), prescale_factor, postscale_factor)
    return _allreduce(None, targets, name, reduction, process_set)


def cast_allreduce_async(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    compression: object,
    reduction: tuple[ReduceOp, float, float],
    process_set: ProcessSet,
) -> Handle:
    """Begin a `grouped_allreduce` with a compressor that only casts (see `cast_type`)."""
    wires = [cast_type(compression, tensor.dtype) for tensor in tensors]
    targets = [Target.fresh(tensor) for tensor in tensors]
    return _allreduce(tensors, targets, name, reduction, process_set, wires)


def _allreduce(
    tensors: Sequence[torch.Tensor] | None,
    targets: list[Target],
    name: str | None,
    reduction: tuple[ReduceOp, float, float],
    process_set: ProcessSet,
    wires: Sequence[torch.dtype | None] | None = None,
) -> Handle:
    """Reduce `tensors` into the targets, or the targets in place if None.

    Args:
        wires: the types to which elements are cast on their way; None where they are not.
    """
    op, prescale, postscale = reduction
    outputs = [target.array for target in targets]
    types = [target.tensor.dtype for target in targets]
    if wires is not None:
        types = [wire or own for wire, own in zip(wires, types, strict=True)]
    handle = submit.submit_allreduce(
        outputs if tensors is None else [source_of(tensor) for tensor in tensors],
        outputs,
        dtypes=[dtype_of_type(each) for each in types],
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
    )
    handle.convert = lambda _: [target.finish() for target in targets]
    return handle


# -- broadcast ----------------------------------------------------------------------------


@eager
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast`; the result is a new tensor."""
    source = source_of(check_tensor(tensor, "broadcast"))
    target = Target.fresh(tensor)
    handle = _broadcast([source], [target], root_rank, name, process_set)
    return then(handle, only)


@eager
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast` in place."""
    target = Target.in_place(check_tensor(tensor, "broadcast_"), "broadcast_")
    handle = _broadcast([target.array], [target], root_rank, name, process_set)
    return then(handle, only)


def broadcast_many_(
    tensors: Sequence[torch.Tensor],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a broadcast in place of several tensors as one request."""
    targets = [Target.in_place(tensor, "broadcast_") for tensor in tensors]
    arrays = [target.array for target in targets]
    return _broadcast(arrays, targets, root_rank, name, process_set)


def _broadcast(
    inputs: list[Array],
    targets: list[Target],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> Handle:
    handle = submit.submit_broadcast(
        inputs,
        [target.array for target in targets],
        root_rank=root_rank,
        dtypes=[dtype_of(target.tensor) for target in targets],
        name=name,
        process_set=process_set,
    )
    handle.convert = lambda _: [target.finish() for target in targets]
    return handle


# -- all-gather, all-to-all, reduce-scatter: results of sizes that only the ranks together know


@eager
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin an `allgather`."""
    check_tensor(tensor, "allgather")
    return then(grouped_allgather_async([tensor], name, process_set), only)


@eager
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allgather`."""
    tensors = check_tensors(tensors, "grouped_allgather")
    handle = submit.submit_allgather(
        [source_of(tensor) for tensor in tensors],
        dtypes=[dtype_of(tensor) for tensor in tensors],
        name=name,
        process_set=process_set,
    )
    return then(handle, lambda arrays: _like(arrays, tensors))


@eager
def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `alltoall`; the result is a tensor, and the received splits if given splits."""
    check_tensor(tensor, "alltoall")
    handle = submit.submit_alltoall(
        source_of(tensor),
        counts_of(splits),
        dtype=dtype_of(tensor),
        name=name,
        process_set=process_set,
    )

    def convert(result: tuple[Array, Array]) -> Any:
        output = _like([result[0]], [tensor])[0]
        if splits is None:
            return output
        return output, counts_like(torch.from_numpy(result[1]), splits)

    handle.convert = convert
    return handle


def counts_of(splits: Splits) -> list[int] | None:
    """Return the splits of an all-to-all as numbers."""
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor):
        if splits.dtype.is_floating_point or splits.dtype.is_complex or splits.ndim != 1:
            raise TypeError(
                "alltoall: argument 'splits' must be a one-dimensional tensor of integers, "
                f"not of shape {tuple(splits.shape)} and type {splits.dtype}."
            )
        return [int(count) for count in splits.tolist()]
    return list(splits)


def counts_like(received: torch.Tensor, splits: Splits) -> torch.Tensor:
    """Return received splits in the type in which the sent ones were given."""
    return received.to(splits) if isinstance(splits, torch.Tensor) else received


@eager
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`."""
    check_tensor(tensor, "reducescatter")
    handle = grouped_reducescatter_async(
        [tensor], name, op, process_set, prescale_factor, postscale_factor
    )
    return then(handle, only)


@eager
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`."""
    tensors = check_tensors(tensors, "grouped_reducescatter")
    handle = submit.submit_reducescatter(
        [source_of(tensor) for tensor in tensors],
        dtypes=[dtype_of(tensor) for tensor in tensors],
        name=name,
        op=resolve_op(None, op),
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
    )
    return then(handle, lambda arrays: _like(arrays, tensors))


# -- conversions --------------------------------------------------------------------------


def _like(arrays: Sequence[Array], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        tensor_of(array, tensor.dtype).to(tensor.device)
        for array, tensor in zip(arrays, tensors, strict=True)
    ]
