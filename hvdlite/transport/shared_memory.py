"""Collectives of the ranks of one host, through memory that all of them have mapped.

A buffer that lies in this memory (see `SharedMemoryTransport.allocate`) is reduced where it is:
each rank combines its own piece of everybody's buffers, a cache-sized block at a time, and
writes the result back to all of them. The same is done to other buffers where the system lets
processes read and write each other's memory, once that saves more than the calls cost.
What remains goes through slots in this memory, in chunks, so that a few slots do for any
length: while one chunk is reduced, the next one is copied in and the last one out.

Two barriers are all that the first ways take, and one more for each chunk the last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from . import kernels
from .base import Communicator, Finish, Operation, Scattered, Staging, Words, staged
from .peer_memory import Buffers, PeerMemory, reach_peers
from .places import address_of
from .rank_order import InOrder
from .ring import RingTransport, even_counts
from .scattered import BLOCK_BYTES, ScatteredReductions
from .shared_lanes import ELSEWHERE, Lane, Passage, make_lanes
from .shared_segment import SharedSegments, completed
from .shared_words import SharedWords
from .types import Array, DType, ReduceOp

__all__ = ["DIRECT_BYTES", "SEGMENT_BYTES", "SharedMemoryTransport"]

SEGMENT_BYTES = 256 * 1024
"""What a rank reduces of an ordinary buffer between two barriers. Larger segments leave the
caches, smaller ones need more barriers, which are slow when cores are contended."""

_LANES = 2
_SLOT_BYTES = 2 * 1024 * 1024
"""The most that one slot takes, however many ranks there are."""

_BLOCK_BYTES = 512 * 1024
"""What is reduced at a time, of buffers in segments: it is to stay in the cache of a core."""

DIRECT_BYTES = 256 * 1024
"""From here on, ordinary buffers are reached by way of the kernel."""

_CACHE_LINE = 64


class SharedMemoryTransport:
    """Moves and combines arrays among the ranks of one host; see the module.

    Made by `create`.
    """

    def __init__(
        self,
        comm: Communicator,
        segments: SharedSegments,
        lanes: Sequence[Lane],
        segment_bytes: int,
        words: SharedWords | None = None,
        peers: PeerMemory | None = None,
        direct_bytes: int = 0,
    ) -> None:
        self.words: Words | None = words
        """Carries the words of rounds; None where that does not work."""
        self._rank = comm.rank
        self._size = comm.size
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._segments = segments
        self._lanes = lanes
        self._segment_bytes = segment_bytes
        self._peers = peers
        self._direct_bytes = direct_bytes
        scratch_bytes = _CACHE_LINE if peers is None else BLOCK_BYTES
        self._scratch = np.empty((2, scratch_bytes), dtype=np.uint8)
        self._combine = InOrder(comm.rank, self._others, self._scratch)
        self._scattered: ScatteredReductions | None = None
        if peers is not None and comm.size > 1:
            self._scattered = ScatteredReductions(
                comm.rank, comm.size, segments, peers, self._scratch, self.enter
            )
        self.scattered: Scattered | None = self._scattered
        """Reduces many arrays where they are; None where that does not work."""
        self._operations = 0
        self._messages = RingTransport(comm)

    @classmethod
    def create(
        cls,
        comm: Communicator,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        capacity: int | None = None,
        direct_bytes: int | None = DIRECT_BYTES,
        refused: Callable[[str], object] | None = None,
    ) -> SharedMemoryTransport | None:
        """Make the transport, or find out that these ranks cannot share memory.

        Collective and blocking; all ranks come to the same decision.

        Args:
            comm: the ranks, which should be on one host. Alltoall uses its messages;
                the rest has communicators of its own.
            segment_bytes: what a rank reduces of an ordinary buffer between two barriers.
            capacity: bytes that `allocate` can hand out on this rank. By default its share
                of the machine's memory; nothing is used before it is needed.
            direct_bytes: from how many bytes on ordinary buffers are reached by way of the
                kernel, if it permits that; None for never.
            refused: called on every rank with the reason why there is no transport.

        Returns:
            The transport, or None.
        """
        creation = cls.creating(comm, segment_bytes, capacity=capacity, direct_bytes=direct_bytes)
        return completed(creation, refused)

    @classmethod
    def creating(
        cls,
        comm: Communicator,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        capacity: int | None = None,
        direct_bytes: int | None = DIRECT_BYTES,
    ) -> Operation[SharedMemoryTransport]:
        """Make the transport step by step; see `create`.

        Raises:
            SegmentUnavailableError: there can be none; raised on all ranks.
        """
        size = comm.size
        if capacity is None:
            capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // size
        segment = min(segment_bytes, _SLOT_BYTES // size) // _CACHE_LINE * _CACHE_LINE
        segment = max(segment, _CACHE_LINE)
        segments, lanes, words = yield from make_lanes(comm, _LANES, segment * size, capacity)
        peers = None if direct_bytes is None else (yield from reach_peers(comm))
        return cls(comm, segments, lanes, segment, words, peers, direct_bytes or 0)

    # -- memory -------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Array:
        """Return memory that operations need not copy, ordinary memory if there is none left.

        A rank may use it as it likes, whatever the others do: an operation goes the fast way
        if the buffers of all ranks are of this kind. The memory is freed with the last array
        that refers to it. May be called by any thread.
        """
        array = self._segments.allocate(nbytes)
        return np.empty(nbytes, dtype=np.uint8) if array is None else array

    # -- operations ---------------------------------------------------------------------

    def allreduce(
        self,
        buffer: Array,
        dtype: DType,
        op: ReduceOp,
        finish: Finish | None,
        tag: int,
        resident: bool = False,
        staging: Staging | None = None,
    ) -> Operation[None]:
        """Reduce in place; every rank ends with bit-identical contents."""
        combine = kernels.combiner(dtype, op, quiet=False)
        yield from staged(self._allreduce(buffer, combine, finish), staging, len(buffer))

    def _allreduce(
        self, buffer: Array, combine: kernels.Combine, finish: Finish | None
    ) -> Operation[None]:
        if self._is_trivial(buffer, finish):
            return
        lane = yield from self.enter()
        counts = even_counts(len(buffer), self._size)
        yield from self._reduce(lane, buffer, counts, combine, finish, True)
        lane.leave()

    def reduce_scatter(
        self,
        buffer: Array,
        counts: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        finish: Finish | None,
        tag: int,
    ) -> Operation[None]:
        """Reduce so that this rank's piece of `buffer` is complete; the rest is scratch after."""
        combine = kernels.combiner(dtype, op, quiet=False)
        if self._is_trivial(buffer, finish):
            return
        lane = yield from self.enter()
        yield from self._reduce(lane, buffer, counts, combine, finish, False)
        lane.leave()

    def allgather(self, buffer: Array, counts: Sequence[int], tag: int) -> Operation[None]:
        """Fill `buffer`, in which this rank's piece is in place already; counts[r] is rank r's."""
        yield from self._gather_alone(buffer, counts)

    def broadcast(self, buffer: Array, root: int, tag: int) -> Operation[None]:
        """Copy the root's buffer to all."""
        counts = [0] * self._size
        counts[root] = len(buffer)
        yield from self._gather_alone(buffer, counts)

    def alltoall(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        tag: int,
    ) -> Operation[None]:
        """Send a piece of `send` to every rank and fill `recv` with theirs, by rank."""
        # Nobody knows how long the longest of all pieces is, and so how often to meet.
        yield from self._messages.alltoall(send, send_counts, recv, recv_counts, tag)

    def close(self) -> None:
        """Release what the transport holds (collective, after its last operation).

        Arrays from `allocate` remain valid.
        """
        for lane in self._lanes:
            lane.comm.free()
        self._lanes = []
        self._segments.close()
        self._messages.close()

    # -- operations of several passes ---------------------------------------------------

    def enter(self) -> Operation[Lane]:
        """Return a lane for this operation alone, which must `leave` it.

        The first step of every operation is to enter, in the same order on every rank.
        """
        lane = self._lanes[self._operations % len(self._lanes)]
        self._operations += 1
        yield from lane.enter()
        return lane

    def reduce_in(
        self, lane: Lane, buffer: Array, counts: Sequence[int], dtype: DType, op: ReduceOp
    ) -> Operation[None]:
        """Do a `reduce_scatter` in a lane; the ranks do the same things there, in one order."""
        yield from self._reduce(
            lane, buffer, counts, kernels.combiner(dtype, op, quiet=False), None, False
        )

    def gather_in(self, lane: Lane, buffer: Array, counts: Sequence[int]) -> Operation[None]:
        """Do an `allgather` in a lane; the ranks do the same things there, in one order."""
        yield from self._gather(lane, buffer, counts)

    # -- how ----------------------------------------------------------------------------

    def _reaches(self, buffer: Array) -> bool:
        return (
            self._peers is not None
            and buffer.nbytes >= self._direct_bytes
            and self._peers.reaches_one(address_of(buffer), buffer.nbytes)
        )

    def _is_trivial(self, buffer: Array, finish: Finish | None = None) -> bool:
        """Return whether there is nothing to communicate, and then finish it."""
        if self._size > 1 and len(buffer):
            return False
        if finish is not None and len(buffer):
            finish(buffer)
        return True

    def _begin(
        self, lane: Lane, passage: Passage, given: Sequence[int], read: Sequence[int]
    ) -> Operation[Buffers | None]:
        """Show the others where the buffer is, or what is in it.

        Args:
            given: the pieces of this rank's buffer that others need.
            read: the ranks whose buffers others read.

        Returns:
            The buffers, if those of all `read` can be reached.
            Otherwise None, and the first two steps are in the slots; the first one is known
            to be so on every rank.
        """
        buffer = passage.buffer
        place = self._segments.offset_of(buffer)
        if place == ELSEWHERE and self._reaches(buffer):
            place = -address_of(buffer)
        if place == ELSEWHERE:
            passage.copy_in(given, 0)
        lane.show(place)
        meeting = lane.meet()
        if place == ELSEWHERE:
            passage.copy_in(given, 1)
        yield meeting
        shown = lane.shown()
        elsewhere = sum(shown[rank] == ELSEWHERE for rank in read)
        if not elsewhere:
            return Buffers(self._segments, self._peers, shown, buffer)
        if elsewhere < len(read):
            if place != ELSEWHERE:
                passage.copy_in(given, 0)
                passage.copy_in(given, 1)
            yield lane.meet()
        return None

    def _reduce(
        self,
        lane: Lane,
        buffer: Array,
        counts: Sequence[int],
        combine: kernels.Combine,
        finish: Finish | None,
        share: bool,
    ) -> Operation[None]:
        """Reduce this rank's piece, and give it to the others if `share`.

        Whoever starts a step's barrier has copied out the results of the step before the last.
        So, among five slots, the next but one to be reduced is free; and when a reduction
        ends, no more than its last two slots are still in use.
        """
        rank, others = self._rank, self._others
        passage = Passage(lane, buffer, counts, self._segment_bytes, True)
        buffers = yield from self._begin(lane, passage, others, range(self._size))
        if buffers is not None:
            if share and buffers.all_far:
                assert self._scattered is not None
                starts = [np.array([address]) for address in buffers.addresses()]
                self._scattered.reduce([buffer], starts, combine, finish)
            else:
                span = passage.starts[rank], passage.stops[rank]
                self._reduce_in_place(buffer, buffers, span, combine, finish, share)
            yield lane.meet()
            return
        results = [(int(piece == 0), piece) for piece in others]
        for step in range(passage.steps):
            own = passage.segment(rank, step)
            if len(own):
                self._combine(own, passage.loader(rank, step), combine, finish)
                if share:
                    passage.place(others[0], rank, step, len(own))[...] = own
            if not share and step + 1 == passage.steps:
                break
            meeting = lane.meet()
            if share and step:
                passage.copy_out(results, step - 1)
            passage.copy_in(others, step + 2)
            yield meeting
        if share:
            passage.copy_out(results, passage.steps - 1)

    def _reduce_in_place(
        self,
        buffer: Array,
        buffers: Buffers,
        span: tuple[int, int],
        combine: kernels.Combine,
        finish: Finish | None,
        share: bool,
    ) -> None:
        """Reduce a span of everybody's buffers, where they are."""
        scratch = self._scratch.view(buffer.dtype)
        length = len(scratch[0]) if buffers.any_far else _BLOCK_BYTES // buffer.itemsize
        for start in range(*span, length):
            own = buffer[start : min(start + length, span[1])]
            self._combine(own, buffers.loader(start), combine, finish)
            if share:
                for other in self._others:
                    buffers.store(other, start, own)

    def _gather_alone(self, buffer: Array, counts: Sequence[int]) -> Operation[None]:
        if not self._is_trivial(buffer):
            lane = yield from self.enter()
            yield from self._gather(lane, buffer, counts)
            lane.leave()

    def _gather(self, lane: Lane, buffer: Array, counts: Sequence[int]) -> Operation[None]:
        """Copy every rank's piece to all others."""
        rank, others = self._rank, self._others
        slot_bytes = self._segment_bytes * self._size
        passage = Passage(lane, buffer, counts, slot_bytes, False)
        sources = [source for source in range(self._size) if counts[source]]
        buffers = yield from self._begin(lane, passage, [rank], sources)
        if buffers is not None:
            for source in sources:
                if source != rank:
                    start, stop = passage.starts[source], passage.stops[source]
                    buffers.fetch(source, start, buffer[start:stop])
            yield lane.meet()
            return
        for step in range(passage.steps):
            is_last = step + 1 == passage.steps
            # Says that the next step is in the slots, and the last one out of them.
            meeting = None if is_last else lane.meet()
            passage.copy_out([(other, other) for other in others], step)
            passage.copy_in([rank], step + 2)
            if meeting is not None:
                yield meeting
