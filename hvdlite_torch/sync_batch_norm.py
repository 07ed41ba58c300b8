"""Batch normalization over the batches of all ranks, on any device.

Every rank tells the others how many values each channel has, their mean, and the sum of their
squared distances from it; these are combined as Chan, Golub and LeVeque (1979) do, which loses
no digits where the mean is large. Forward takes one collective, and so does backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdlite import ProcessSet, global_process_set
from hvdlite.transport.types import ReduceOp

from .async_ops import allgather_async, allreduce_async
from .eager import eager

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalization that trains as one process does on the batches of all ranks together.

    Batches may differ in size, and be empty on some ranks; all ranks have to call a layer
    equally often, and run backward through it. Running statistics are the same on all ranks,
    bit for bit. In eval mode it is plain batch normalization.

    Args:
        num_features: channels, the second dimension of inputs of 2 or more dimensions.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None weighs all batches
            alike.
        affine: whether to learn a scale and a shift of each channel.
        track_running_stats: whether to keep running statistics for eval mode.
        process_set: the ranks whose batches are one.
        device: of parameters and buffers.
        dtype: of parameters and buffers.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(
                "SyncBatchNorm: expected an input of at least 2 dimensions (batch, channels, "
                f"...), got {input.ndim} of shape {tuple(input.shape)}."
            )
        if input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected {self.num_features} channels in the second dimension, "
                f"got an input of shape {tuple(input.shape)}."
            )
        if not input.is_floating_point():
            raise TypeError(f"SyncBatchNorm: expected floating-point numbers, got {input.dtype}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch.

        Raises:
            ValueError: the shape is not right, or training on one value per channel (on every
                rank).
            TypeError: the input is not of floating-point numbers.
            MismatchError: the number of channels differs between ranks (on every rank).
            NotInitializedError: training before `init()`.
        """
        self._check_input_dim(input)
        if not self.training or self.process_set.size() == 1:
            output: torch.Tensor = super().forward(input)
            return output
        result, mean, variance, count = _normalize(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if self.track_running_stats and self.running_mean is not None and count:
            self._track(mean, variance * (count / (count - 1)))
        return result

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        factor = self.momentum
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if factor is None:
                    factor = 1.0 / float(self.num_batches_tracked)
            if factor is None:
                factor = 0.0
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                # In 64 bits: what the ranks agree on is rounded once.
                running.copy_(running.double().mul_(1.0 - factor).add_(new, alpha=factor))

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Replace every batch normalization of a model by a synchronized one.

        Parameters, buffers, hooks and modes are kept: the very objects, so that an optimizer
        made before keeps working.

        Args:
            module: the model; changed in place, unless it is a batch normalization itself.
            process_set: the ranks whose batches are one.

        Returns:
            The model, or what has replaced it.

        Raises:
            ValueError: a lazy layer has not seen its first batch yet.
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: ProcessSet, done: dict[int, torch.nn.Module]
    ) -> torch.nn.Module:
        if id(module) in done:  # shared by several parts of the model
            return done[id(module)]
        result = module
        if isinstance(module, _BatchNorm):
            if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
                raise ValueError(
                    f"convert_sync_batchnorm: {type(module).__name__} does not know its channels "
                    "yet; run one batch through the model first."
                )
            result = cls.__new__(cls)
            result.__dict__ = module.__dict__.copy()
            result.process_set = process_set
        done[id(module)] = result
        for name, child in module._modules.items():
            if child is not None:
                result._modules[name] = cls._converted(child, process_set, done)
        return result


@eager
def _normalize(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    process_set: ProcessSet,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return the normalized input, each channel's mean and (biased) variance, and the count."""
    mean, squares, count = _combined(input.detach(), process_set)
    if count == 1:
        raise ValueError(
            "SyncBatchNorm: expected more than 1 value per channel when training, but the "
            f"batches of all {process_set.size()} ranks together have 1 (input of shape "
            f"{tuple(input.shape)} here)."
        )
    variance = squares / max(count, 1.0)
    apply: Any = _Normalize.apply
    return (
        apply(input, weight, bias, mean, variance, count, eps, process_set),
        mean,
        variance,
        count,
    )


def _combined(
    input: torch.Tensor, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean, sum of squared distances from it (float64, per channel), and the count."""
    dims = _all_but_channels(input)
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    mine = torch.zeros((1, 1 + 2 * channels), dtype=torch.float64, device=input.device)
    if count:
        variance, mean = torch.var_mean(_wide(input), dims, correction=0)
        mine[0, 0] = count
        mine[0, 1 : 1 + channels] = mean
        mine[0, 1 + channels :] = variance.double() * count
    everybody = allgather_async(mine, None, process_set).wait()
    counts = everybody[:, :1]
    means, squares = everybody[:, 1:].split(channels, 1)
    total = counts.sum().item()
    mean = (means * counts).sum(0) / max(total, 1.0)
    return mean, squares.sum(0) + ((means - mean).square() * counts).sum(0), total


class _Normalize(torch.autograd.Function):
    """What is done to a batch once the statistics of all batches are known."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: float,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        ctx.arguments = (count, process_set, None if bias is None else bias.dtype)
        if not input.numel():
            return torch.empty_like(input)
        dtype = _wide_dtype(input)
        parameters = (None if p is None else p.to(dtype) for p in (weight, bias))
        return F.batch_norm(
            input, mean.to(dtype), variance.to(dtype), *parameters, training=False, eps=eps
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        count, process_set, bias_dtype = ctx.arguments
        dims = _all_but_channels(input)
        shape = [1, -1] + [1] * (input.ndim - 2)
        dtype = _wide_dtype(input)
        centered = _wide(input) - mean.to(dtype).view(shape)
        wide = _wide(gradient)
        sums = torch.stack([wide.sum(dims), (wide * centered).sum(dims)]).double()
        for_weight = for_bias = for_input = None
        # Of this rank's batch only: an optimizer sums or averages them like all others.
        if weight is not None and ctx.needs_input_grad[1]:
            for_weight = (sums[1] * inverse).to(weight.dtype)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            for_bias = sums[0].to(bias_dtype)
        if ctx.needs_input_grad[0]:
            totals = allreduce_async(sums, op=ReduceOp.SUM, process_set=process_set).wait() / max(
                count, 1.0
            )
            scale = inverse if weight is None else inverse * weight.double()
            slope, shift = -scale * inverse.square() * totals[1], -scale * totals[0]
            centered *= slope.to(dtype).view(shape)
            centered.addcmul_(wide, scale.to(dtype).view(shape))
            centered += shift.to(dtype).view(shape)
            for_input = centered.to(input.dtype)
        return for_input, for_weight, for_bias, None, None, None, None, None


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.ndim) if dim != 1]


def _wide_dtype(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_wide_dtype(tensor))
