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
from .places import Places, address_of
from .rank_order import combine_in_order
from .ring import even_counts
from .shared_lanes import Lane
from .shared_segment import SharedSegments
from .types import Array, DType, ReduceOp

__all__ = ["ScatteredReductions"]

BLOCK_BYTES = 256 * 1024
"""What is reduced at a time: two or three blocks are to stay in the cache of a core."""

LEAST_BYTES = 1024 * 1024
PART_BYTES = 32 * 1024
"""What the whole has to have, and each part in the mean, for this to be faster than packing."""

_MOST_VECTORS = 512
"""Places in one call to the kernel, which takes 1024."""

_ROW = 16
"""Bytes of a place's description."""


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some consecutive elements of the whole, and where they lie."""

    spans: tuple[tuple[int, int, int, int], ...]
    """For each part that is concerned: its number, first element and end, place in the block."""
    first: int
    """Which place of the share is the first one of these."""
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What one rank reduces."""

    blocks: tuple[_Block, ...]
    parts: Array
    """For each place, the number of the part that it belongs to."""
    pieces: Array
    """(places, 2): the first byte in that part, and how many."""

    def located(self, starts: Array) -> Array:
        """Return the places as the kernel wants them, given where each part begins."""
        found: Any = self.pieces.copy()
        found[:, 0] += starts[self.parts]
        located: Array = found
        return located


@functools.lru_cache(maxsize=64)
def _share(lengths: tuple[int, ...], size: int, rank: int, itemsize: int) -> _Share:
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
    parts: list[int] = []
    pieces: list[tuple[int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if spans:
            blocks.append(_Block(tuple(spans), len(parts), filled * itemsize))
            for part, first, end, _ in spans:
                parts.append(part)
                pieces.append((first * itemsize, (end - first) * itemsize))
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
    return _Share(
        tuple(blocks),
        np.array(parts, dtype=np.int64),
        np.array(pieces, dtype=np.int64).reshape(len(pieces), 2),
    )


class ScatteredReductions:
    """All-reduces of many arrays at once, in a lane of the shared-memory transport.

    Args:
        rank: this rank.
        size: the number of ranks.
        segments: where the ranks show each other the addresses of their arrays.
        peers: how to reach these.
        scratch: two blocks of BLOCK_BYTES.
        enter: waits for a lane, which has to be left.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        segments: SharedSegments,
        peers: PeerMemory,
        scratch: Array,
        enter: Callable[[], Operation[Lane]],
    ) -> None:
        self._rank = rank
        self._size = size
        self._others = [other for other in range(size) if other != rank]
        self._segments = segments
        self._peers = peers
        self._enter = enter
        self._tables: dict[int, Array] = {}
        self._scratch = scratch
        # A description of each block, and a way to write numbers that is faster than arrays.
        into: Any = np.array([[address_of(block), 0] for block in scratch], dtype=np.int64)
        self._into = [address_of(row) for row in into]
        self._into_words = memoryview(into.reshape(-1))

    def pays(self, count: int, nbytes: int) -> bool:
        """Return whether so many arrays of so many bytes together should not be packed."""
        return nbytes >= max(LEAST_BYTES, count * PART_BYTES)

    def reaches(self, places: Places) -> bool:
        """Return whether `allreduce` can work on these arrays of this rank."""
        return self._peers.reaches_own(places)

    def allreduce(
        self, places: Places, dtype: DType, op: ReduceOp, finish: Finish | None, tag: int
    ) -> Operation[None]:
        """Reduce arrays in place; every rank ends with bit-identical contents.

        Args:
            places: arrays of the same lengths on all ranks.
            dtype: their element type.
            op: how to combine.
            finish: called with reduced elements, once with each, on one rank.
            tag: see `Transport`.
        """
        lane = yield from self._enter()
        table = self._table(lane, len(places.arrays))
        table[:] = places.starts
        offset = self._segments.offset_of(table)
        lane.show(offset if offset >= 0 else -address_of(table))
        yield lane.meet()
        shown = lane.shown()
        starts = [
            places.starts if rank == self._rank else self._starts(rank, place, len(table))
            for rank, place in enumerate(shown)
        ]
        combine = kernels.combiner(dtype, op, quiet=False)
        self.reduce(places.arrays, starts, combine, finish)
        yield lane.meet()
        lane.leave()

    def reduce(
        self,
        arrays: Sequence[Array],
        starts: Sequence[Array],
        combine: kernels.Combine,
        finish: Finish | None,
    ) -> None:
        """Combine this rank's share of everybody's arrays, and give it to all.

        Args:
            arrays: this rank's, flat.
            starts: by rank, where its arrays begin.
            combine: combines two of them; NumPy's warnings are silenced.
            finish: as in `allreduce`.
        """
        kind = arrays[0].dtype
        lengths = tuple(len(array) for array in arrays)
        share = _share(lengths, self._size, self._rank, kind.itemsize)
        tables = [share.located(each) for each in starts]
        located = [address_of(table) for table in tables]
        scratch: Any = self._scratch.view(kind)
        into, words, peers = self._into, self._into_words, self._peers

        def load(rank: int, which: int) -> Array:
            there = located[rank] + block.first * _ROW
            peers.gather(rank, into[which], there, len(block.spans), block.nbytes)
            loaded: Array = scratch[which, : block.nbytes // kind.itemsize]
            return loaded

        def add(loaded: Array) -> None:
            for part, start, stop, at in block.spans:
                combine(arrays[part][start:stop], loaded[at : at + stop - start])

        with np.errstate(all="ignore"):
            for block in share.blocks:
                words[1] = words[3] = block.nbytes
                combine_in_order(self._rank, self._others, load, combine, add)
                if finish is not None:
                    for part, start, stop, _ in block.spans:
                        finish(arrays[part][start:stop])
                row, count = block.first * _ROW, len(block.spans)
                for other in self._others:
                    here, there = located[self._rank] + row, located[other] + row
                    peers.scatter(other, here, there, count, block.nbytes)

    def _table(self, lane: Lane, count: int) -> Array:
        """Return room for addresses, which nobody else uses before the lane is left."""
        table = self._tables.get(id(lane))
        if table is None or len(table) < count:
            memory = self._segments.allocate(8 * 2 * count)
            table = np.empty(2 * count, np.int64) if memory is None else memory.view(np.int64)
            self._tables[id(lane)] = table
        return table[:count]

    def _starts(self, rank: int, place: int, count: int) -> Array:
        if place >= 0:
            return self._segments.view(rank, place, 8 * count).view(np.int64)
        table = np.empty(count, dtype=np.int64)
        self._peers.read(rank, -place, table)
        return table
