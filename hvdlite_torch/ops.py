"""Collectives on PyTorch tensors.

Every collective must be called by all ranks of its process set. Named calls may come in any
order on different ranks; calls without a name are matched by their order. Autograd passes
through `allreduce` and `reducescatter` (with Sum and Average), `allgather`, `broadcast`,
`alltoall` and their grouped forms. Functions that end in `_` put the result into their
argument, and the `_async` functions return handles; neither is seen by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import hvdlite
from hvdlite import Handle, ProcessSet, global_process_set
from hvdlite.collectives import resolve_op
from hvdlite.transport.types import ReduceOp

from . import async_ops, autograd
from .arguments import cast_type
from .async_ops import Splits
from .compression import Compression, Compressor
from .eager import eager
from .sparse import SparseHandle
from .tensors import check_tensor, check_tensors

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "join",
    "poll",
    "reducescatter",
    "synchronize",
]


@eager
def synchronize(handle: Handle | SparseHandle, timeout: float | None = None) -> Any:
    """Wait for a collective and return its result.

    Args:
        handle: what an `_async` function returned.
        timeout: seconds to wait at most; None waits for ever.

    Raises:
        HvdliteTimeoutError: the time is over; the collective goes on.
        MismatchError: the ranks asked for different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    if isinstance(handle, SparseHandle):
        return handle.wait(timeout)
    return hvdlite.synchronize(handle, timeout)


@eager
def poll(handle: Handle | SparseHandle) -> bool:
    """Return whether `synchronize(handle)` would return at once."""
    return handle.done() if isinstance(handle, SparseHandle) else hvdlite.poll(handle)


@eager
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called this."""
    hvdlite.barrier(process_set)


@eager
def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have.

    Until then this rank contributes nothing to the collectives of the others: zeros to sums,
    while averages still divide by the number of all ranks.

    Args:
        device: accepted for compatibility; there is nothing to choose.

    Returns:
        The last rank to join.
    """
    return hvdlite.join()


@eager
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine the tensors of all ranks, which all get the same result, bit for bit.

    Args:
        tensor: any shape, the same on all ranks.
        average: old spelling of op: True for Average, False for Sum.
        name: identifies the tensor across ranks.
        compression: what makes the tensor smaller on the wire.
        op: Average (the default), Sum, Min, Max, Product, or Adasum (of floats; each tensor of
            a group is combined by itself, and there is no gradient).
        prescale_factor: multiplies every tensor before the reduction.
        postscale_factor: multiplies the result.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape, type and (where dense) strides.

    Raises:
        TypeError: the argument is no dense tensor, or the operation is not defined for it.
        ValueError: both `average` and `op` are given.
        MismatchError: the ranks passed different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    check_tensor(tensor, "allreduce")
    return _reduced(
        [tensor],
        resolve_op(average, op),
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
    )[0]


@eager
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do an `allreduce` of several tensors, which become ready together."""
    return _reduced(
        check_tensors(tensors, "grouped_allreduce"),
        resolve_op(average, op),
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
    )


def _reduced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp,
    name: str | None,
    compression: type[Compressor],
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> list[torch.Tensor]:
    if cast_type(compression, torch.float32) and not autograd.needs_gradient(*tensors):
        reduction = op, prescale, postscale
        return async_ops.cast_allreduce_async(
            tensors, name, compression, reduction, process_set
        ).wait()  # type: ignore[no-any-return]
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    if autograd.needs_gradient(*small):
        results = autograd.apply(
            autograd.Allreduce, op, name, prescale, postscale, process_set, *small
        )
    else:
        # What compression has made is nobody else's, and fresh memory is what costs most.
        is_new = all(context is not None for _, context in pairs)
        submit = async_ops.grouped_allreduce_async_ if is_new else async_ops.grouped_allreduce_async
        results = submit(small, None, name, op, prescale, postscale, process_set).wait()
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


@eager
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do an `allreduce` in place, whatever the tensor's strides. Returns the tensor."""
    return async_ops.allreduce_async_(  # type: ignore[no-any-return]
        tensor, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


@eager
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do a `grouped_allreduce` in place. Returns the tensors."""
    return async_ops.grouped_allreduce_async_(  # type: ignore[no-any-return]
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()


@eager
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: at least one dimension; the first one may differ between ranks, and be 0.
        name: identifies the tensor across ranks.
        process_set: the ranks that take part.

    Raises:
        TypeError: the argument is no dense tensor.
        ValueError: the tensor has no dimension.
        MismatchError: the other dimensions or the types differ (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    check_tensor(tensor, "allgather")
    return grouped_allgather([tensor], name, process_set)[0]


@eager
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Do an `allgather` of several tensors, which become ready together."""
    tensors = check_tensors(tensors, "grouped_allgather")
    if autograd.needs_gradient(*tensors):
        return list(autograd.apply(autograd.Allgather, name, process_set, *tensors))
    return async_ops.grouped_allgather_async(  # type: ignore[no-any-return]
        tensors, name, process_set
    ).wait()


@eager
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return a new tensor with the values of rank `root_rank` on all ranks.

    Args:
        tensor: the same shape and type on all ranks; only the root's values matter.
        root_rank: a rank of the job, also within a process set.
        name: identifies the tensor across ranks.
        process_set: the ranks that take part.

    Raises:
        TypeError: the argument is no dense tensor.
        ValueError: the root is not in the process set.
        MismatchError: the ranks passed different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    check_tensor(tensor, "broadcast")
    if autograd.needs_gradient(tensor):
        output: torch.Tensor = autograd.apply(
            autograd.Broadcast, root_rank, name, process_set, tensor
        )
        return output
    return async_ops.broadcast_async(  # type: ignore[no-any-return]
        tensor, root_rank, name, process_set
    ).wait()


@eager
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Do a `broadcast` in place. Returns the tensor."""
    return async_ops.broadcast_async_(  # type: ignore[no-any-return]
        tensor, root_rank, name, process_set
    ).wait()


@eager
def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to rank 0, 1, ... and return the rows received, in rank order.

    Args:
        tensor: at least one dimension.
        splits: how many rows each rank gets (a tensor or a sequence); None splits evenly.
        name: identifies the tensor across ranks.
        process_set: the ranks that take part.

    Returns:
        The received rows; with `splits`, a pair of them and how many came from each rank.

    Raises:
        TypeError: the argument is no dense tensor.
        ValueError: the tensor has no dimension, or the splits don't fit it.
        MismatchError: the other dimensions or the types differ (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    check_tensor(tensor, "alltoall")
    if not autograd.needs_gradient(tensor):
        return async_ops.alltoall_async(tensor, splits, name, process_set).wait()
    output, received = autograd.apply(
        autograd.Alltoall, async_ops.counts_of(splits), name, process_set, tensor
    )
    return output if splits is None else (output, async_ops.counts_like(received, splits))


@eager
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce like `allreduce`, and return only this rank's part of the first dimension.

    The first `rows % size` ranks get one row more than the others.

    Raises:
        TypeError: the argument is no dense tensor, or the operation is not defined for it.
        ValueError: the tensor has no dimension.
        MismatchError: the ranks passed different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    check_tensor(tensor, "reducescatter")
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


@eager
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Do a `reducescatter` of several tensors, which become ready together."""
    tensors = check_tensors(tensors, "grouped_reducescatter")
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    if autograd.needs_gradient(*small):
        results = autograd.apply(
            autograd.Reducescatter, op, name, prescale_factor, postscale_factor, process_set, *small
        )
    else:
        results = async_ops.grouped_reducescatter_async(
            small, name, op, process_set, prescale_factor, postscale_factor
        ).wait()
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]
