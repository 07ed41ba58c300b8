"""What ranks have to know alike to lay out buckets, and how parameters are divided among these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hvdlite import ProcessSet
from hvdlite.transport.types import ReduceOp

from .compression import Compressor
from .compressors import GradientCompressor

__all__ = ["Place", "Reduction", "distribute"]


@dataclass(frozen=True)
class Reduction:
    """How gradients are combined."""

    op: ReduceOp
    prescale: float
    postscale: float
    compression: type[Compressor] | GradientCompressor
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass(frozen=True)
class Place:
    """What has to be known of a parameter to lay out a bucket, the same on all ranks."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    group: int

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


def distribute(
    places: Iterable[Place], bucket_bytes: int, first_bucket_bytes: int
) -> list[list[Place]]:
    """Divide parameters into buckets.

    Args:
        places: in the order in which their gradients are expected. Those of one explicit
            group (not negative) share a bucket of any size.
        bucket_bytes: about how large the other buckets become.
        first_bucket_bytes: the same for the first one, which should be under way early.
    """
    buckets: list[list[Place]] = []
    filling: dict[tuple[torch.dtype, int], tuple[list[Place], int]] = {}
    for place in places:
        key = (place.dtype, place.group)
        bucket, nbytes = filling.get(key, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(place)
        nbytes += place.elements * place.dtype.itemsize
        limit = first_bucket_bytes if bucket is buckets[0] else bucket_bytes
        filling[key] = ([], 0) if place.group < 0 and nbytes >= limit else (bucket, nbytes)
    return buckets
