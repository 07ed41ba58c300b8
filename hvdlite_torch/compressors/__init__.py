"""Compressors of gradients that cannot be summed on the wire."""

from __future__ import annotations

from ..compression import Compression
from .base import Exchange, GradientCompressor, Part
from .int8 import Int8Compressor
from .powersgd import PowerSGDCompressor
from .topk import TopKCompressor

__all__ = [
    "Exchange",
    "GradientCompressor",
    "Int8Compressor",
    "Part",
    "PowerSGDCompressor",
    "TopKCompressor",
]

Compression.int8 = Int8Compressor
Compression.topk = TopKCompressor
Compression.powersgd = PowerSGDCompressor
