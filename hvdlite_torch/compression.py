"""Smaller gradients on the wire: casts to 16 bits before a reduction, and back after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .compressors import Int8Compressor, PowerSGDCompressor, TopKCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Interface of a compressor. Subclass it to bring your own.

    What `compress` returns is summed over the ranks, so it has to be linear and elementwise.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the smaller tensor, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16; values beyond 65504 become infinite."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _narrow(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16: the range of float32, with 8 significant bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _narrow(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    # A cast between the 16-bit types would lose digits or range and save nothing.
    if not tensor.dtype.is_floating_point or tensor.element_size() <= 2:
        return tensor, None
    return tensor.to(dtype), tensor.dtype


class Compression:
    """The compressors that come with hvdlite.

    `none`, `fp16` and `bf16` go with every reduction. The others have parameters and state, and
    go with `DistributedOptimizer` only: `Compression.int8()`, `Compression.topk(ratio=0.01)`,
    `Compression.powersgd(rank=4)`.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8: type[Int8Compressor]
    topk: type[TopKCompressor]
    powersgd: type[PowerSGDCompressor]
