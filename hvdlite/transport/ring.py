"""Pipelined rings over point-to-point messages.

An all-reduce is a reduce-scatter followed by an all-gather (Patarasuk and Yuan, 2009), which
moves as little as can be: each rank sends 2(n-1)/n of the buffer. The buffer is divided into
one piece for each rank and each piece into segments; a segment goes on to the next rank as soon
as it has been added to, while the segments behind it are still on their way.

Rank r owns piece r. A piece starts its way at the rank after its owner and is summed in the
order of the ring, so the result does not depend on timing, and every rank gets the owner's bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from . import kernels
from .base import Communicator, Finish, Operation, Pending, Scattered, Staging, Words, staged
from .types import Array, DType, ReduceOp

__all__ = ["SEGMENT_BYTES", "WINDOW", "RingTransport", "ScratchPool", "even_counts"]

SEGMENT_BYTES = 512 * 1024
WINDOW = 4
"""Receives posted ahead by one operation."""

_SENDS = 128
"""Sends in flight of one operation. With as few as receives, the ranks wait for each other: an
all-reduce of 16 MiB on 2 ranks takes twice as long with 4 as with 64."""

_Span = tuple[int, int]


class ScratchPool:
    """Byte buffers that operations borrow.

    It keeps those that are lent out too: MPI may still write to the buffer of an operation
    that was abandoned.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}
        self._all: list[Array] = []

    def take(self, nbytes: int) -> Array:
        """Lend a buffer of exactly this size."""
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        buffer = np.empty(nbytes, dtype=np.uint8)
        self._all.append(buffer)
        return buffer

    def give_back(self, buffer: Array) -> None:
        """Take back what was lent."""
        self._free[buffer.nbytes].append(buffer)

    def clear(self) -> None:
        """Drop everything."""
        self._free.clear()
        self._all.clear()


class _Either:
    """Done as soon as one of two communications is."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Pending, second: Pending) -> None:
        self._first = first
        self._second = second

    def Test(self) -> bool:
        return self._first.Test() or self._second.Test()


@dataclass
class _Route:
    """The segments that pass one rank, each list in the order of the ring.

    What comes from the rank before is first `reduced` into the buffer, then `copied` there. The
    last `complete` ones of the reduced segments have then met all ranks; the last `kept` ones
    of all have come to the end of their way, the others go on to the next rank.
    """

    first: list[_Span]
    copied: list[_Span]
    kept: int
    reduced: list[_Span] = field(default_factory=list)
    complete: int = 0


class RingTransport:
    """Moves data in segments around a ring of all ranks.

    Args:
        comm: the ranks. Only point-to-point messages are used.
        segment_bytes: what is sent, summed and forwarded as one.
        window: receives posted ahead by one operation.
    """

    words: Words | None = None
    scattered: Scattered | None = None

    def __init__(
        self, comm: Communicator, segment_bytes: int = SEGMENT_BYTES, window: int = WINDOW
    ) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._size = comm.size
        self._segment_bytes = segment_bytes
        self._window = window
        self._pool = ScratchPool()

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
        combine = kernels.combiner(dtype, op)
        pieces = self._pieces(even_counts(len(buffer), self._size), buffer.itemsize)
        if self._size == 1:
            yield from staged(_finish_alone(buffer, finish), staging, len(buffer))
            return
        yield from self._circulate(
            _Route(
                first=pieces[self._rank - 1],
                reduced=self._behind(pieces, 2),
                complete=len(pieces[self._rank]),
                copied=self._behind(pieces, 1),
                kept=len(pieces[(self._rank + 1) % self._size]),
            ),
            buffer,
            combine,
            finish,
            tag,
            staging,
        )

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
        combine = kernels.combiner(dtype, op)
        pieces = self._pieces(counts, buffer.itemsize)
        if self._size == 1:
            yield from _finish_alone(buffer, finish)
            return
        own = len(pieces[self._rank])
        yield from self._circulate(
            _Route(
                first=pieces[self._rank - 1],
                reduced=self._behind(pieces, 2),
                complete=own,
                copied=[],
                kept=own,
            ),
            buffer,
            combine,
            finish,
            tag,
        )

    def allgather(self, buffer: Array, counts: Sequence[int], tag: int) -> Operation[None]:
        """Fill `buffer`, in which this rank's piece is in place already; counts[r] is rank r's."""
        pieces = self._pieces(counts, buffer.itemsize)
        if self._size == 1:
            return
        yield from self._circulate(
            _Route(
                first=pieces[self._rank],
                copied=self._behind(pieces, 1),
                kept=len(pieces[(self._rank + 1) % self._size]),
            ),
            buffer,
            None,
            None,
            tag,
        )

    def broadcast(self, buffer: Array, root: int, tag: int) -> Operation[None]:
        """Copy the root's buffer to all."""
        if buffer.nbytes <= self._segment_bytes:
            yield from self._broadcast_tree(buffer, root, tag)
            return
        data = buffer.view(np.uint8)
        segments = list(self._segments(0, len(data), 1))
        is_root = self._rank == root
        is_last = (self._rank + 1) % self._size == root
        yield from self._circulate(
            _Route(
                first=segments if is_root and not is_last else [],
                copied=[] if is_root else segments,
                kept=len(segments) if is_last else 0,
            ),
            data,
            None,
            None,
            tag,
        )

    def _broadcast_tree(self, buffer: Array, root: int, tag: int) -> Operation[None]:
        size = self._size
        place = (self._rank - root) % size
        # The lowest set bit of a place says how far away its parent is.
        distance = place & -place if place else 1 << (size - 1).bit_length()
        if not len(buffer):
            return
        if place:
            yield self._comm.irecv(buffer, (self._rank - distance) % size, tag)
        sending = []
        while distance := distance >> 1:
            if place + distance < size:
                dest = (self._rank + distance) % size
                sending.append(self._comm.isend(buffer, dest, tag))
        yield from sending

    def alltoall(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        tag: int,
    ) -> Operation[None]:
        """Send a piece of `send` to every rank and fill `recv` with theirs, by rank."""
        rank, size = self._rank, self._size
        outgoing, incoming = _spans(send_counts), _spans(recv_counts)
        recv[slice(*incoming[rank])] = send[slice(*outgoing[rank])]
        waiting: deque[Pending] = deque()
        for distance in range(1, size):
            source, dest = (rank - distance) % size, (rank + distance) % size
            if recv_counts[source]:
                part = recv[slice(*incoming[source])]
                waiting.append(self._comm.irecv(part, source, tag))
            if send_counts[dest]:
                waiting.append(self._comm.isend(send[slice(*outgoing[dest])], dest, tag))
            while len(waiting) > 2 * self._window:
                yield waiting.popleft()
        yield from waiting

    def allocate(self, nbytes: int) -> Array:
        """Return ordinary memory."""
        return np.empty(nbytes, dtype=np.uint8)

    def close(self) -> None:
        """Release the scratch buffers."""
        self._pool.clear()

    # -- the ring -----------------------------------------------------------------------

    def _segments(self, start: int, stop: int, itemsize: int) -> Iterator[_Span]:
        step = max(1, self._segment_bytes // itemsize)
        return ((at, min(at + step, stop)) for at in range(start, stop, step))

    def _pieces(self, counts: Sequence[int], itemsize: int) -> list[list[_Span]]:
        """Return the segments of every rank's piece."""
        return [list(self._segments(*span, itemsize)) for span in _spans(counts)]

    def _behind(self, pieces: Sequence[list[_Span]], first: int) -> list[_Span]:
        """Return the segments of n-1 pieces in the order in which the ring brings them.

        Args:
            first: how many ranks behind this one the owner of the first piece is.
        """
        owners = ((self._rank - first - step) % self._size for step in range(self._size - 1))
        return [segment for owner in owners for segment in pieces[owner]]

    def _circulate(
        self,
        route: _Route,
        buffer: Array,
        combine: kernels.Combine | None,
        finish: Finish | None,
        tag: int,
        staging: Staging | None = None,
    ) -> Operation[None]:
        """Send, receive, combine and forward segments until the route is at its end.

        Nothing is ever held up by a send that is not complete, and so no rank waits for
        another one in a circle.
        """
        comm, window, pool = self._comm, self._window, self._pool
        source, dest = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        incoming = [*route.reduced, *route.copied]
        reductions = len(route.reduced)
        final = reductions - route.complete
        forwarded = len(incoming) - route.kept
        outgoing = deque(route.first)
        unloaded = 0 if staging is None else len(outgoing)
        receiving: deque[tuple[Pending, Array, Array | None]] = deque()
        sending: deque[Pending] = deque()
        posted = received = sent = 0
        while True:
            # Sends are looked after only where something depends on them.
            blocked = False
            while posted < len(incoming) and len(receiving) < window:
                start, stop = incoming[posted]
                target, scratch = buffer[start:stop], None
                if posted < reductions:
                    scratch = pool.take(self._segment_bytes)
                    target = scratch[: target.nbytes].view(buffer.dtype)
                elif combine is not None and sent <= posted - reductions:
                    # This segment comes back into the place from which it was sent, and
                    # segments come back in the order in which they were sent.
                    blocked = True
                    break
                receiving.append((comm.irecv(target, source, tag), target, scratch))
                posted += 1
            while outgoing and len(sending) < _SENDS:
                start, stop = outgoing.popleft()
                if staging is not None and unloaded:
                    staging.load(start, stop)
                    unloaded -= 1
                sending.append(comm.isend(buffer[start:stop], dest, tag))
                if unloaded:
                    # Loading takes time, in which MPI moves nothing.
                    break
            if receiving and receiving[0][0].Test():
                _, target, scratch = receiving.popleft()
                start, stop = incoming[received]
                if scratch is not None:
                    assert combine is not None
                    if staging is not None:
                        staging.load(start, stop)
                    combine(buffer[start:stop], target)
                    pool.give_back(scratch)
                    if finish is not None and received >= final:
                        finish(buffer[start:stop])
                if received < forwarded:
                    outgoing.append(incoming[received])
                if received >= final and staging is not None and staging.store is not None:
                    staging.store(start, stop)
                received += 1
            elif outgoing and len(sending) < _SENDS:
                continue
            elif sending and (not receiving or blocked or outgoing):
                if sending[0].Test():
                    sending.popleft()
                    sent += 1
                elif receiving:
                    yield _Either(receiving[0][0], sending[0])
                else:
                    yield sending[0]
            elif receiving:
                yield receiving[0][0]
            else:
                return


def even_counts(length: int, size: int) -> list[int]:
    """Divide a length among the ranks as evenly as can be, the first ones getting more."""
    each, more = divmod(length, size)
    return [each + (rank < more) for rank in range(size)]


def _spans(counts: Sequence[int]) -> list[_Span]:
    stops = list(accumulate(counts))
    return [(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _finish_alone(buffer: Array, finish: Finish | None) -> Operation[None]:
    if finish is not None and len(buffer):
        finish(buffer)
    yield from ()
