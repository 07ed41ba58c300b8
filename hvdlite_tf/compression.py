"""Smaller gradients on the wire: casts to 16 bits before a reduction, and back after it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """Interface of a compressor. Subclass it to bring your own.

    What `compress` returns is summed over the ranks, so it has to be linear and elementwise.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the smaller tensor, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor in its original type."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16; values beyond 65504 become infinite."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _narrow(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16: the range of float32, with 8 significant bits."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _narrow(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


def _narrow(tensor: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, Any]:
    # A cast between the 16-bit types would lose digits or range and save nothing.
    if not tensor.dtype.is_floating or tensor.dtype.size <= 2:
        return tensor, None
    return tf.cast(tensor, dtype), tensor.dtype


class Compression:
    """The compressors that come with hvdlite."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
