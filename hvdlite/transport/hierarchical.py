"""All-reduce over several hosts: shared memory inside each, rings between them.

The ranks of a host sum their buffers through shared memory, in as many slices as the host with
the fewest ranks has ranks: so local rank i of every host has slice i of its host's sum. Then all
slices go around at the same time, each in a ring of the ranks that own it, one on each host, so
that every one of these ranks keeps the network busy. At last each host's ranks copy the slices
from each other. Where a host has more ranks than the smallest one, the others of its ranks add
to the sum and own no slice.

A network of h hosts then carries 2(h-1)/h of the buffer for each host, whatever the number of
ranks; a ring of all n ranks carries 2(n-1)/n of it.

A buffer is reduced in chunks, so that the hosts are at work on one while the network carries
another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .base import TAGS, Communicator, Finish, Operation, Pending, Scattered, Staging, Words
from .ring import RingTransport, even_counts
from .shared_lanes import Lane
from .shared_memory import DIRECT_BYTES, SharedMemoryTransport
from .shared_segment import SegmentUnavailableError, agree, completed
from .task import Task
from .types import Array, DType, ReduceOp

__all__ = ["CHUNK_BYTES", "HierarchicalTransport"]

CHUNK_BYTES = 2 * 1024 * 1024
"""What the ranks of a host reduce before its slices go to the network, but for the first chunks:
they are smaller, so that the network has something to do soon."""

_FIRST_SHARE = 4
"""The first chunk is this part of the others; each one doubles it."""

_ON_NETWORK = 4
"""Chunks that may be on the network at once. With fewer of them the network runs dry where the
ranks of a host have to wait for a core before they can meet."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a buffer whose slices are on the network."""

    array: Array
    start: int
    counts: list[int]
    ring: Pending


class HierarchicalTransport:
    """Reduces inside the hosts and between them; see the module. Made by `create`.

    What is not an all-reduce goes around one ring of all ranks, which crosses the network about
    as seldom as can be where the ranks of a host follow each other.
    """

    words: Words | None = None
    scattered: Scattered | None = None

    def __init__(
        self,
        ring: RingTransport,
        shared: SharedMemoryTransport | None,
        across: RingTransport | None,
        communicators: Sequence[Communicator],
        slices: int,
        local_size: int,
        chunk_bytes: int,
    ) -> None:
        self._ring = ring
        self._shared = shared
        self._across = across
        self._communicators = communicators
        self._slices = slices
        self._local_size = local_size
        self._local_rank = communicators[0].rank
        self._chunk_bytes = chunk_bytes

    @classmethod
    def create(
        cls,
        comm: Communicator,
        hosts: Sequence[object],
        ring: RingTransport,
        segment_bytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        direct_bytes: int | None = DIRECT_BYTES,
        refused: Callable[[str], object] | None = None,
    ) -> HierarchicalTransport | None:
        """Make the transport, or find out that the ranks of some host cannot share memory.

        Collective and blocking; all ranks come to the same decision.

        Args:
            comm: the ranks.
            hosts: the host of each rank.
            ring: of the same ranks.
            segment_bytes: what the rings between the hosts send as one.
            chunk_bytes: what is reduced inside the hosts as one.
            direct_bytes: see `SharedMemoryTransport.create`.
            refused: called on every rank with the reason why there is no transport.

        Returns:
            The transport, or None.
        """
        creation = cls.creating(
            comm, hosts, ring, segment_bytes, chunk_bytes=chunk_bytes, direct_bytes=direct_bytes
        )
        return completed(creation, refused)

    @classmethod
    def creating(
        cls,
        comm: Communicator,
        hosts: Sequence[object],
        ring: RingTransport,
        segment_bytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        capacity: int | None = None,
        direct_bytes: int | None = DIRECT_BYTES,
    ) -> Operation[HierarchicalTransport]:
        """Make the transport step by step; see `create`.

        Args:
            capacity: bytes that `allocate` can hand out on this rank.

        Raises:
            SegmentUnavailableError: there can be none; raised on all ranks.
        """
        by_host: dict[object, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        slices = min(map(len, by_host.values()))
        made = [
            comm.subset(ranks)
            for ranks in (
                *by_host.values(),
                *([ranks[i] for ranks in by_host.values()] for i in range(slices)),
            )
        ]
        local, *across = [each for each in made if each is not None]
        shared, failure = None, ""
        if local.size > 1:
            try:
                shared = yield from SharedMemoryTransport.creating(
                    local, capacity=capacity, direct_bytes=direct_bytes
                )
            except SegmentUnavailableError as error:
                # Its ranks are numbered by this host; one of them is enough to tell.
                failure = f"has a host where local {error}"
        try:
            yield from agree(comm, failure)
        except SegmentUnavailableError:
            if shared is not None:
                shared.close()
            for each in (local, *across):
                each.free()
            raise
        return cls(
            ring,
            shared,
            RingTransport(across[0], segment_bytes) if across else None,
            [local, *across],
            slices,
            local.size,
            chunk_bytes,
        )

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
        if len(buffer):
            tasks: list[Task] = []
            tasks.append(Task(self._reduce(buffer, dtype, op, finish, tag, tasks, staging)))
            yield from _together(tasks)

    def _reduce(
        self,
        buffer: Array,
        dtype: DType,
        op: ReduceOp,
        finish: Finish | None,
        tag: int,
        tasks: list[Task],
        staging: Staging | None,
    ) -> Operation[None]:
        """Do what this host has to do, and add the rings to `tasks` as their slices are ready.

        All of it takes place in one lane, where the ranks of the host do everything in the same
        order; rings end in whatever order they like.
        """
        shared = self._shared
        lane = None if shared is None else (yield from shared.enter())
        unshared: deque[_Chunk] = deque()
        for number, (start, stop) in enumerate(self._chunks(len(buffer), buffer.itemsize)):
            array = buffer[start:stop]
            counts = even_counts(len(array), self._slices)
            counts += [0] * (self._local_size - self._slices)
            if staging is not None:
                staging.load(start, stop)
            if shared is not None and lane is not None:
                yield from shared.reduce_in(lane, array, counts, dtype, op)
            own_tag = tag + number % _ON_NETWORK * TAGS
            ring = Task(self._between_hosts(array, counts, dtype, op, finish, own_tag))
            tasks.append(ring)
            unshared.append(_Chunk(array, start, counts, ring))
            if len(unshared) == _ON_NETWORK:
                yield from self._share(lane, unshared.popleft(), staging)
        while unshared:
            yield from self._share(lane, unshared.popleft(), staging)
        if lane is not None:
            lane.leave()

    def _chunks(self, length: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Divide a buffer: where each chunk begins, and where it ends."""
        largest = max(1, self._chunk_bytes // itemsize)
        size = max(1, largest // _FIRST_SHARE)
        start = 0
        while start < length:
            stop = min(start + size, length)
            yield start, stop
            start, size = stop, min(2 * size, largest)

    def _between_hosts(
        self,
        chunk: Array,
        counts: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        finish: Finish | None,
        tag: int,
    ) -> Operation[None]:
        if self._across is not None:
            start = sum(counts[: self._local_rank])
            own = chunk[start : start + counts[self._local_rank]]
            yield from self._across.allreduce(own, dtype, op, finish, tag)

    def _share(self, lane: Lane | None, chunk: _Chunk, staging: Staging | None) -> Operation[None]:
        """Give a slice to the other ranks of the host once its ring is done."""
        yield chunk.ring
        if self._shared is not None and lane is not None:
            yield from self._shared.gather_in(lane, chunk.array, chunk.counts)
        if staging is not None and staging.store is not None:
            staging.store(chunk.start, chunk.start + len(chunk.array))

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
        yield from self._ring.reduce_scatter(buffer, counts, dtype, op, finish, tag)

    def allgather(self, buffer: Array, counts: Sequence[int], tag: int) -> Operation[None]:
        """Fill `buffer`, in which this rank's piece is in place already; counts[r] is rank r's."""
        yield from self._ring.allgather(buffer, counts, tag)

    def broadcast(self, buffer: Array, root: int, tag: int) -> Operation[None]:
        """Copy the root's buffer to all."""
        yield from self._ring.broadcast(buffer, root, tag)

    def alltoall(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        tag: int,
    ) -> Operation[None]:
        """Send a piece of `send` to every rank and fill `recv` with theirs, by rank."""
        yield from self._ring.alltoall(send, send_counts, recv, recv_counts, tag)

    def allocate(self, nbytes: int) -> Array:
        """Return memory that the other ranks of this host can read and write."""
        if self._shared is None:
            return np.empty(nbytes, dtype=np.uint8)
        return self._shared.allocate(nbytes)

    def close(self) -> None:
        """Release what the transport holds (collective, after its last operation)."""
        if self._shared is not None:
            self._shared.close()
        if self._across is not None:
            self._across.close()
        for comm in self._communicators:
            comm.free()
        self._ring.close()


class _Any:
    """Done as soon as one of several communications is."""

    __slots__ = ("_pending",)

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def Test(self) -> bool:
        for each in self._pending:  # noqa: SIM110 (no generator where a rank spends its waiting)
            if each.Test():
                return True
        return False


def _together(tasks: list[Task]) -> Operation[None]:
    """Run all tasks; any of them may add more."""
    while tasks:
        moved = False
        for task in tasks:  # also those that are added meanwhile
            moved |= task.advance()
        tasks[:] = [task for task in tasks if not task.finished]
        if tasks and not moved:
            yield _Any([task.pending for task in tasks if task.pending is not None])
