"""Lanes: the places where the ranks of one host meet, and the slots that data pass through.

The ranks meet by counting in shared memory: whoever comes adds one to a number of its own, and
goes on when nobody's is less. That takes a microsecond, and no message that would have to be
passed on by a rank that is not running. It needs a processor that shows one core's stores to
the others in their order, as x86 does, and Python has no means to ask others for it: elsewhere
the ranks meet in barriers of MPI. These must start in the same order on all ranks, but
operations interleave as they like; so there are several lanes, each with a communicator and
slots of its own, and a lane carries one operation at a time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from .base import Communicator, Operation, Pending
from .shared_segment import HEADER, PROOF_BYTES, SharedSegments, map_segments
from .shared_words import TABLE_BYTES, SharedWords
from .types import Array

__all__ = ["ELSEWHERE", "Lane", "Passage", "make_lanes"]

SLOTS = 5
"""A reduction writes a slot two steps before the others read it and put their results there.
Other ranks copy these out one step later, and a rank knows after one more that they have."""

SLOTS_OF_TWO = 4
"""Of two ranks, each copies results out of its own slots; four slots are what a gather needs.
The fewer there are, the more of them stay in the caches."""

ELSEWHERE = -1
"""On a card: the buffer lies in no segment, and what others need of it is in the slots."""

_CARDS = PROOF_BYTES
_CARD_WORDS = 8  # a cache line, of which a rank writes its own
_CARD_BYTES = _CARD_WORDS * 8
_COUNT = 2
"""Where on a card the meetings are counted, behind two places."""

STORES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")
"""Whether other cores see the stores of one core in the order in which it made them."""


class Lane:
    """What one operation at a time uses: barriers, slots, and a card that each rank shows.

    The card says where the rank's buffer lies: the offset in its segment, or else the negative
    address. Each rank has two and uses them in turn: it may begin an operation before others have
    read its card of the one before.

    Args:
        comm: carries the barriers and nothing else.
        slots: the slots of each rank.
        cards: the cards of each rank.
        counts: whether the ranks meet by counting; by default where that works.
    """

    def __init__(
        self,
        comm: Communicator,
        slots: Sequence[Array],
        cards: Sequence[Array],
        counts: bool | None = None,
    ) -> None:
        self.comm = comm
        self.slots = slots
        self.slot_count = _slots(comm.size)
        plain: Sequence[Any] = cards
        # Ten times as fast as arrays, for single numbers.
        self._cards = [memoryview(card).cast("q") for card in plain]
        self._own = self._cards[comm.rank]
        self._others = [card for rank, card in enumerate(self._cards) if rank != comm.rank]
        self._counts = STORES_IN_ORDER if counts is None else counts
        self._meetings = 0
        self.entered = 0
        self.left = 0
        self.passes = 0
        """How often the ranks have shown their buffers; an operation may do so several times."""
        self.next_slot = 0

    def enter(self) -> Operation[None]:
        """Wait until all operations that entered earlier have left."""
        turn = _Turn(self)
        if not turn.Test():
            yield turn

    def leave(self) -> None:
        """Let the next operation in."""
        self.left += 1

    def meet(self) -> Pending:
        """Complete when every rank has come here, and what it did before can be seen."""
        if not self._counts:
            return self.comm.ibarrier()
        self._meetings += 1
        self._own[_COUNT] = self._meetings
        return _Meeting(self._others, self._meetings)

    def show(self, place: int) -> None:
        self._own[self.passes % 2] = place

    def shown(self) -> list[int]:
        """Return what the ranks showed before they met."""
        place = self.passes % 2
        self.passes += 1
        return [cards[place] for cards in self._cards]


class _Meeting:
    """Completes when every other rank has counted this far."""

    __slots__ = ("_cards", "_count")

    def __init__(self, cards: Sequence[memoryview[int]], count: int) -> None:
        self._cards = cards
        self._count = count

    def Test(self) -> bool:
        count = self._count
        for card in self._cards:  # noqa: SIM110 (no generator where a rank spends its waiting)
            if card[_COUNT] < count:
                return False
        return True


class _Turn:
    """Completes when all operations that entered a lane earlier have left it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._number = lane.entered
        lane.entered += 1

    def Test(self) -> bool:
        return self._lane.left == self._number


class Passage:
    """The way of one buffer through the slots of a lane, a segment of each piece at a time.

    Args:
        lane: lends its slots.
        buffer: all pieces, one behind the other.
        counts: elements of each rank's piece.
        segment: bytes that one step moves of each piece.
        shared: whether a slot holds a segment of every piece, or else one of its rank's own.
    """

    def __init__(
        self, lane: Lane, buffer: Array, counts: Sequence[int], segment: int, shared: bool
    ) -> None:
        self.buffer = buffer
        self.stops = list(accumulate(counts))
        self.starts = [stop - count for stop, count in zip(self.stops, counts, strict=True)]
        self._segment = segment // buffer.itemsize
        self._spacing = self._segment if shared else 0
        self._slot = self._segment * (len(counts) if shared else 1)
        self.steps = -(-max(counts) // self._segment)
        self._rank = lane.comm.rank
        self._lane = lane
        self._slots: list[Array] = []
        self._first = lane.next_slot
        lane.next_slot = (lane.next_slot + self.steps) % lane.slot_count

    def segment(self, piece: int, step: int) -> Array:
        """Return the segment of a piece that a step moves; it is empty behind the end."""
        start = self.starts[piece] + step * self._segment
        stop = min(start + self._segment, self.stops[piece])
        return self.buffer[start : max(start, stop)]

    def place(self, rank: int, piece: int, step: int, length: int) -> Array:
        """Return where a rank keeps the segment."""
        if not self._slots:
            self._slots = [slots.view(self.buffer.dtype) for slots in self._lane.slots]
        start = (self._first + step) % self._lane.slot_count * self._slot + piece * self._spacing
        return self._slots[rank][start : start + length]

    def loader(self, piece: int, step: int) -> Callable[[int, int, Array], Array]:
        """Return what finds the segment of a piece in the slot of a rank."""
        return lambda rank, count, _: self.place(rank, piece, step, count)

    def copy_in(self, pieces: Iterable[int], step: int) -> None:
        """Copy segments into this rank's slot."""
        for piece in pieces:
            segment = self.segment(piece, step)
            if len(segment):
                self.place(self._rank, piece, step, len(segment))[...] = segment

    def copy_out(self, pieces: Iterable[tuple[int, int]], step: int) -> None:
        """Copy segments of pieces from the slots of ranks; `pieces` has (rank, piece)."""
        for rank, piece in pieces:
            segment = self.segment(piece, step)
            if len(segment):
                segment[...] = self.place(rank, piece, step, len(segment))


def make_lanes(
    comm: Communicator, count: int, slot_bytes: int, capacity: int
) -> Operation[tuple[SharedSegments, list[Lane], SharedWords | None]]:
    """Map segments with room for lanes at their beginnings (collective, and it blocks).

    Args:
        comm: the ranks; each lane gets a duplicate of it.
        count: lanes.
        slot_bytes: a multiple of a cache line.
        capacity: bytes of this rank's segment beside the lanes.

    Raises:
        SegmentUnavailableError: it does not work on some rank; raised on all of them.
    """
    lane_bytes = _slots(comm.size) * slot_bytes
    segments = yield from map_segments(comm, capacity, count * lane_bytes + TABLE_BYTES)

    def on_all(start: int, nbytes: int) -> list[Array]:
        return [segments.view(rank, start, nbytes) for rank in range(comm.size)]

    lanes = [
        Lane(
            comm.duplicate(),
            on_all(HEADER + number * lane_bytes, lane_bytes),
            on_all(_CARDS + number * _CARD_BYTES, _CARD_BYTES),
        )
        for number in range(count)
    ]
    tables = on_all(HEADER + count * lane_bytes, TABLE_BYTES)
    return segments, lanes, SharedWords(comm.rank, tables) if STORES_IN_ORDER else None


def _slots(size: int) -> int:
    return SLOTS_OF_TWO if size == 2 else SLOTS
