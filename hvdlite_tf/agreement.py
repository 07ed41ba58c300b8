"""How ranks that were given different things find out, instead of waiting for each other."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

import hvdlite
from hvdlite import ProcessSet
from hvdlite.transport.types import Array

__all__ = ["difference", "digest", "marker"]


def digest(described: Sequence[str]) -> int:
    """Return a number of 31 bits that hardly ever is the same for different descriptions."""
    return zlib.crc32("\n".join(described).encode()) & 0x7FFFFFFF


def marker(described: Sequence[str]) -> Array:
    """Return an array without elements: none of its data travels, but shapes are compared."""
    return np.empty((0, digest(described)), dtype=np.uint8)


def difference(described: Sequence[str], process_set: ProcessSet) -> str | None:
    """Return in words what ranks describe differently. All ranks of the set must call this.

    Returns:
        None if there is no difference.
    """
    ranks = process_set.require_ranks()
    everybody = hvdlite.allgather_object(list(described), None, process_set)
    first = everybody[0]
    for rank, theirs in zip(ranks, everybody, strict=True):
        if len(theirs) != len(first):
            return f"rank {ranks[0]} has {len(first)}, rank {rank} has {len(theirs)}"
        for i, (here, there) in enumerate(zip(first, theirs, strict=True)):
            if here != there:
                return f"number {i} is {here} on rank {ranks[0]}, {there} on rank {rank}"
    return None
