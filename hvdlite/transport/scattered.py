"""Reductions of what lies in many arrays, where they are, as if it were one buffer.

To pack tensors into a buffer and to unpack it again crosses memory four times, which is more
than the reduction itself. Where ranks reach each other's memory by way of the kernel, one call
gathers what lies in many places and another one puts it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import kernels
from .base import Finish, Operation
from .peer_memory import PeerMemory
from .rank_order import combine_in_order
from .ring import even_counts
from .shared_lanes import Lane
from .shared_segment import SharedSegments, address_of
from .types import Array, DType, ReduceOp

__all__ = ["ScatteredReductions"]

BLOCK_BYTES = 256 * 1024
LEAST_BYTES = 1024 * 1024
PART_BYTES = 32 * 1024
"""What the whole has to have, and each part in the mean, for this to be faster than packing."""

_MOST_VECTORS = 512
"""Places in one call to the kernel, which takes 1024."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some consecutive elements of the whole, and where they lie."""

    spans: tuple[tuple[int, int, int, int], ...]
    """For each part that is concerned: its number, first element and end, place in the block."""
    parts: Array
    """The numbers of the parts."""
    offsets: Array
    """(places, 2): for each part, the first byte in it and how many."""
    count: int
    """Elements."""
    nbytes: int

    def places(self, addresses: Array) -> Array:
        """Return where the elements lie, as the kernel wants to be told."""
        found: Any = self.offsets.copy()
        found[:, 0] += addresses[self.parts]
        places: Array = found
        return places


@functools.lru_cache(maxsize=256)
def _blocks(lengths: tuple[int, ...], size: int, rank: int, itemsize: int) -> list[_Block]:
    """Divide a rank's share of the whole into blocks.

    Args:
        lengths: elements of the parts.
        size: the number of ranks.
        rank: whose share.
        itemsize: bytes of an element.
    """
    counts = even_counts(sum(lengths), size)
    start = sum(counts[:rank])
    stop = start + counts[rank]
    most = BLOCK_BYTES // itemsize
    blocks: list[_Block] = []
    spans: list[tuple[int, int, int, int]] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if spans:
            parts = np.array([span[0] for span in spans])
            offsets = [(start * itemsize, (end - start) * itemsize) for _, start, end, _ in spans]
            table = np.array(offsets, dtype=np.int64)
            blocks.append(_Block(tuple(spans), parts, table, filled, filled * itemsize))
        spans.clear()
        filled = 0

    at = 0
    for part, length in enumerate(lengths):
        first, end = max(start - at, 0), min(stop - at, length)
        while first < end:
            until = min(end, first + most - filled)
            spans.append((part, first, until, filled))
            filled += until - first
            first = until
            if filled == most or len(spans) == _MOST_VECTORS:
                close()
        at += length
    close()
    return blocks


class ScatteredReductions:
    """All-reduces of many arrays at once, in a lane of the shared-memory transport.

    Args:
        rank: this rank.
        size: the number of ranks.
        segments: where the ranks show each other the addresses of their arrays.
        peers: how to reach these.
        enter: waits for a lane, which has to be left.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        segments: SharedSegments,
        peers: PeerMemory,
        enter: Callable[[], Operation[Lane]],
    ) -> None:
        self._rank = rank
        self._size = size
        self._others = [other for other in range(size) if other != rank]
        self._segments = segments
        self._peers = peers
        self._enter = enter
        self._tables: dict[int, Array] = {}
        self._scratch = np.empty((2, BLOCK_BYTES), dtype=np.uint8)

    def pays(self, count: int, nbytes: int) -> bool:
        """Return whether so many arrays of so many bytes together should not be packed."""
        return nbytes >= max(LEAST_BYTES, count * PART_BYTES)

    def reaches(self, parts: Sequence[Array]) -> bool:
        """Return whether `allreduce` can work on these arrays of this rank. None is empty."""
        return self._peers.reaches_own(parts)

    def allreduce(
        self, parts: Sequence[Array], dtype: DType, op: ReduceOp, finish: Finish | None, tag: int
    ) -> Operation[None]:
        """Reduce arrays in place; every rank ends with bit-identical contents.

        Args:
            parts: flat arrays, of the same lengths on all ranks; none is empty.
            dtype: their element type.
            op: how to combine.
            finish: called with reduced elements, once with each, on one rank.
            tag: see `Transport`.
        """
        combine = kernels.combiner(dtype, op)
        lane = yield from self._enter()
        table = self._table(lane, len(parts))
        table[:] = [address_of(part) for part in parts]
        place = self._segments.offset_of(table)
        lane.show(place if place >= 0 else -address_of(table))
        yield lane.meet()
        shown = lane.shown()
        addresses = {
            other: self._addresses(other, shown[other], len(parts)) for other in self._others
        }
        addresses[self._rank] = table
        lengths = tuple(len(part) for part in parts)
        for block in _blocks(lengths, self._size, self._rank, dtype.itemsize):
            self._reduce(block, parts, addresses, combine, finish)
        yield lane.meet()
        lane.leave()

    def _table(self, lane: Lane, count: int) -> Array:
        """Return room for addresses, which nobody else uses before the lane is left."""
        table = self._tables.get(id(lane))
        if table is None or len(table) < count:
            memory = self._segments.allocate(8 * 2 * count)
            table = np.empty(2 * count, np.int64) if memory is None else memory.view(np.int64)
            self._tables[id(lane)] = table
        return table[:count]

    def _addresses(self, rank: int, place: int, count: int) -> Array:
        if place >= 0:
            return self._segments.view(rank, place, 8 * count).view(np.int64)
        table = np.empty(count, dtype=np.int64)
        self._peers.read(rank, -place, table)
        return table

    def _reduce(
        self,
        block: _Block,
        parts: Sequence[Array],
        addresses: dict[int, Array],
        combine: kernels.Combine,
        finish: Finish | None,
    ) -> None:
        """Combine everybody's elements in the order of the ranks, and give them to all."""
        scratch: Any = self._scratch.view(parts[0].dtype)
        own = [
            (parts[part][start:stop], at, at + stop - start)
            for part, start, stop, at in block.spans
        ]

        def load(rank: int, which: int) -> Array:
            into: Array = scratch[which, : block.count]
            self._peers.gather(rank, block.places(addresses[rank]), into)
            return into

        def add(there: Array) -> None:
            for mine, start, stop in own:
                combine(mine, there[start:stop])

        combine_in_order(self._rank, self._others, load, combine, add)
        if finish is not None:
            for mine, _, _ in own:
                finish(mine)
        here = block.places(addresses[self._rank])
        for other in self._others:
            self._peers.scatter(other, here, block.places(addresses[other]), block.nbytes)
