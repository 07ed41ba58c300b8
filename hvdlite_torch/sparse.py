"""Sums and averages of sparse tensors: gather everybody's indices and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvdlite import Handle, ProcessSet, global_process_set
from hvdlite.engine import submit
from hvdlite.transport.types import ReduceOp

from .arguments import checked_op, whereabouts
from .compression import Compression, Compressor
from .eager import eager
from .tensors import dtype_of, source_of, tensor_of

__all__ = [
    "SparseHandle",
    "SparsePart",
    "SparseSums",
    "exchange_sparse",
    "sparse_allreduce_async",
]


class SparseSums(NamedTuple):
    """What has become of several sparse tensors.

    Attributes:
        totals: a coalesced tensor for each part, or None where no rank had anything.
        notes: what the ranks had to say besides, in rank order.
    """

    totals: list[torch.Tensor | None]
    notes: list[int]


class SparsePart(NamedTuple):
    """What this rank adds to one sparse sum.

    Attributes:
        gradient: a sparse COO tensor, or None where this rank has nothing.
        like: a tensor of the dense shape, the element type and the device.
        sparse_dim: number of dimensions that are indexed; the same on all ranks.
    """

    gradient: torch.Tensor | None
    like: torch.Tensor
    sparse_dim: int


def exchange_sparse(
    parts: Sequence[SparsePart],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    compression: type[Compressor] = Compression.none,
    note: int = 0,
) -> Handle:
    """Begin the reduction of several sparse tensors as one request.

    Args:
        note: from 0 to 255, for all ranks to know.

    Returns:
        A handle whose result is a `SparseSums`.
    """
    present = torch.tensor(
        [[note, *(part.gradient is not None for part in parts)]], dtype=torch.uint8
    )
    tensors = [present]
    contexts = []
    for part in parts:
        indices, values = _pieces(part)
        values, context = compression.compress(values)
        contexts.append(context)
        tensors += [indices, values]
    handle = submit.submit_allgather(
        [source_of(tensor) for tensor in tensors],
        dtypes=[dtype_of(tensor) for tensor in tensors],
        name=name,
        process_set=process_set,
    )
    divisor = process_set.size() if op is ReduceOp.AVERAGE else 1

    def convert(arrays: list[Any]) -> SparseSums:
        gathered = [tensor_of(a, t.dtype) for a, t in zip(arrays, tensors, strict=True)]
        notes = gathered[0][:, 0].tolist()
        anywhere = gathered[0][:, 1:].any(0).tolist()
        results: list[torch.Tensor | None] = []
        for i, part in enumerate(parts):
            if not anywhere[i]:
                results.append(None)
                continue
            indices, values = gathered[1 + 2 * i], gathered[2 + 2 * i]
            values = compression.decompress(values, contexts[i])
            total = _sum(indices, values, divisor, part.like.shape)
            results.append(total.to(part.like.device))
        return SparseSums(results, notes)

    handle.convert = convert
    return handle


def _sum(
    indices: torch.Tensor, values: torch.Tensor, divisor: int, shape: torch.Size
) -> torch.Tensor:
    """Add up the values of equal indices, in rank order, and divide."""
    before = values.dtype is torch.float16  # the sum of two halves can be infinite
    if before and divisor > 1:
        values = values / divisor
    total = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce()
    if before or divisor == 1:
        return total
    rounding = None if values.is_floating_point() or values.is_complex() else "trunc"
    summed = torch.div(total.values(), divisor, rounding_mode=rounding)
    return torch.sparse_coo_tensor(
        total.indices(), summed, shape, check_invariants=False, is_coalesced=True
    )


def _pieces(part: SparsePart) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row of indices, and of values, for each entry."""
    like = part.like
    if part.gradient is None:
        shape = like.shape[part.sparse_dim :]
        return (
            torch.empty((0, part.sparse_dim), dtype=torch.int64),
            torch.empty((0, *shape), dtype=like.dtype),
        )
    # Coalesced first: a token that occurs a hundred times travels once.
    gradient = part.gradient.detach().coalesce()
    return gradient.indices().t().contiguous(), gradient.values()


class SparseHandle:
    """A sparse reduction in progress. Call it, or `synchronize` it, for the result."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __call__(self) -> torch.Tensor:
        return self.wait()

    def done(self) -> bool:
        """Return whether `wait()` would return at once."""
        return self._handle.done()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the reduction and return the coalesced tensor."""
        result: torch.Tensor = self._handle.wait(timeout).totals[0]
        return result


@eager
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Begin the sum or average of a sparse COO tensor; ranks may hold different entries.

    Args:
        tensor: of the same dense shape on all ranks.
        name: identifies the tensor across ranks.
        op: Sum or Average.
        process_set: the ranks that take part.

    Returns:
        A handle whose result is a coalesced sparse tensor.

    Raises:
        TypeError: the tensor is not in the COO layout, or `op` is a bool.
        ValueError: another operation is asked for.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        found = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            "sparse_allreduce_async: argument 'tensor' must be a sparse COO tensor, "
            f"not {found} ({whereabouts()})."
        )
    op = checked_op(op, "sparse_allreduce_async")
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ValueError(f"sparse_allreduce_async: op must be Sum or Average, not {op}.")
    like = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    part = SparsePart(tensor, like, tensor.sparse_dim())
    return SparseHandle(exchange_sparse([part], name, op, process_set))
