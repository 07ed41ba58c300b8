"""Gradients through collectives.

The loss that is differentiated is the sum of the losses of all ranks, so what a rank's input
gets is what all ranks' results pass back to it. The backward pass of a collective is itself a
collective: all ranks have to run it, so on all of them the inputs have to require gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvdlite import Handle, ProcessSet
from hvdlite.collectives import resolve_op
from hvdlite.engine import submit
from hvdlite.transport.types import ReduceOp

from . import async_ops
from .tensors import dtype_of, source_of, tensor_of

__all__ = [
    "Allgather",
    "Allreduce",
    "Alltoall",
    "Broadcast",
    "Reducescatter",
    "apply",
    "needs_gradient",
]


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd has to know what is done to any of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def apply(function: Any, *arguments: Any) -> Any:
    """Run a function of this module under autograd."""
    return function.apply(*arguments)


def _linear(op: ReduceOp, operation: str) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(f"{operation}: the gradient of {op} is not defined here.")


def _backward_name(name: str | None) -> str | None:
    return name and f"{name}.gradient"


def _note_differentiable(ctx: Any, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Remember which outputs pass gradients back: a group may hold integers too."""
    ctx.differentiable = [out.is_floating_point() or out.is_complex() for out in outputs]
    ctx.mark_non_differentiable(
        *(out for out, yes in zip(outputs, ctx.differentiable, strict=True) if not yes)
    )
    return tuple(outputs)


def _select(ctx: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(itertools.compress(gradients, ctx.differentiable))


def _spread(ctx: Any, gradients: Iterable[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Put the gradients of the differentiable inputs into the places of all of them."""
    rest = iter(gradients)
    return tuple(next(rest) if yes else None for yes in ctx.differentiable)


class Allreduce(torch.autograd.Function):
    """Several tensors reduced as one request."""

    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOp,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (op, _backward_name(name), prescale, postscale, process_set)
        handle = async_ops.grouped_allreduce_async(
            tensors, None, name, op, prescale, postscale, process_set
        )
        return _note_differentiable(ctx, handle.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op, name, prescale, postscale, process_set = ctx.arguments
        _linear(op, "allreduce")
        handle = async_ops.grouped_allreduce_async(
            _select(ctx, gradients), None, name, op, prescale, postscale, process_set
        )
        return (None,) * 5 + _spread(ctx, handle.wait())


class Allgather(torch.autograd.Function):
    """Several tensors gathered as one request."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # The rows of every rank travel along: the backward pass has to know who gave which.
        rows = torch.tensor([[len(tensor) if tensor.ndim else 0 for tensor in tensors]])
        handle = async_ops.grouped_allgather_async([*tensors, rows], name, process_set)
        *outputs, ctx.rows = handle.wait()
        ctx.arguments = (_backward_name(name), process_set)
        return _note_differentiable(ctx, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.arguments
        rows = _select(ctx, ctx.rows.unbind(1))
        handles = [
            async_ops.alltoall_async(
                gradient, rows[i].tolist(), name and f"{name}.{i}", process_set
            )
            for i, gradient in enumerate(_select(ctx, gradients))
        ]
        size = process_set.size()
        parts = [handle.wait()[0] for handle in handles]
        sums = (part.unflatten(0, (size, len(part) // size)).sum(0) for part in parts)
        return None, None, *_spread(ctx, sums)


class Broadcast(torch.autograd.Function):
    """One tensor of one rank."""

    @staticmethod
    def forward(
        ctx: Any, root_rank: int, name: str | None, process_set: ProcessSet, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.is_root = process_set.require_ranks()[process_set.rank()] == root_rank
        ctx.arguments = (_backward_name(name), process_set)
        output: torch.Tensor = async_ops.broadcast_async(
            tensor, root_rank, name, process_set
        ).wait()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.arguments
        handle = async_ops.allreduce_async(
            gradient, None, name, ReduceOp.SUM, 1.0, 1.0, process_set
        )
        total = handle.wait()
        return None, None, None, total if ctx.is_root else torch.zeros_like(total)


class Alltoall(torch.autograd.Function):
    """One tensor whose rows go to all ranks. Returns the received splits as well."""

    @staticmethod
    def forward(
        ctx: Any,
        splits: list[int] | None,
        name: str | None,
        process_set: ProcessSet,
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        handle = submit.submit_alltoall(
            source_of(tensor), splits, dtype=dtype_of(tensor), name=name, process_set=process_set
        )
        array, counts = handle.wait()
        ctx.arguments = (counts.tolist(), _backward_name(name), process_set)
        received = torch.from_numpy(counts)
        ctx.mark_non_differentiable(received)
        return tensor_of(array, tensor.dtype).to(tensor.device), received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
        handle = async_ops.alltoall_async(gradient, *ctx.arguments)
        return None, None, None, handle.wait()[0]


class Reducescatter(torch.autograd.Function):
    """Several tensors reduced as one request, of which each rank keeps some rows."""

    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOp,
        name: str | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        op = resolve_op(None, op)
        handle: Handle = async_ops.grouped_reducescatter_async(
            tensors, name, op, process_set, prescale, postscale
        )
        ctx.op, ctx.factor = op, float(prescale) * float(postscale)
        ctx.arguments = (_backward_name(name), process_set)
        return _note_differentiable(ctx, handle.wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        name, process_set = ctx.arguments
        _linear(ctx.op, "reducescatter")
        factor = ctx.factor
        if ctx.op is ReduceOp.AVERAGE:
            factor /= process_set.size()
        handle = async_ops.grouped_allgather_async(_select(ctx, gradients), name, process_set)
        return (None,) * 5 + _spread(ctx, (gathered * factor for gathered in handle.wait()))
