"""The MPI library's own collectives, which are the fastest for little data."""

from __future__ import annotations

from collections.abc import Sequence

from . import kernels
from .base import Communicator, Finish, Operation, Scattered, Staging, Words, staged
from .ring import RingTransport, ScratchPool
from .types import Array, DType, ReduceOp

__all__ = ["GATHER_BYTES", "MPITransport"]

GATHER_BYTES = 64 * 1024


class MPITransport:
    """Leaves to MPI what it can do with these elements, and the rest to a ring.

    Collectives of one communicator must start in the same order on all ranks, so each
    operation makes its only one in its first step.

    Args:
        comm: the ranks.
        ring: moves what MPI has no collective for.
        gather_bytes: contributions of all ranks together up to which every rank gets all of
            them and reduces them itself, in the order of the ranks.
    """

    words: Words | None = None
    scattered: Scattered | None = None

    def __init__(
        self,
        comm: Communicator,
        ring: RingTransport | None = None,
        gather_bytes: int = GATHER_BYTES,
    ) -> None:
        self._comm = comm
        self._size = comm.size
        self._ring = RingTransport(comm) if ring is None else ring
        self._pool = ScratchPool()
        self._gather_bytes = gather_bytes

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
        yield from staged(self._reduce(buffer, dtype, op, finish, tag), staging, len(buffer))

    def _reduce(
        self, buffer: Array, dtype: DType, op: ReduceOp, finish: Finish | None, tag: int
    ) -> Operation[None]:
        if self._size == 1 or not len(buffer):
            yield from self._ring.allreduce(buffer, dtype, op, finish, tag)
        elif buffer.nbytes * self._size <= self._gather_bytes:
            yield from self._gather_and_reduce(buffer, (0, len(buffer)), dtype, op, finish)
        elif self._comm.reduces(dtype, op):
            yield self._comm.iallreduce(buffer, dtype, op)
            if finish is not None:
                finish(buffer)
        else:
            yield from self._ring.allreduce(buffer, dtype, op, finish, tag)

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
        if self._size == 1 or not 0 < buffer.nbytes * self._size <= self._gather_bytes:
            yield from self._ring.reduce_scatter(buffer, counts, dtype, op, finish, tag)
            return
        start = sum(counts[: self._comm.rank])
        span = start, start + counts[self._comm.rank]
        yield from self._gather_and_reduce(buffer, span, dtype, op, finish)

    def _gather_and_reduce(
        self,
        buffer: Array,
        span: tuple[int, int],
        dtype: DType,
        op: ReduceOp,
        finish: Finish | None,
    ) -> Operation[None]:
        """Get everybody's buffer, and reduce a part of them in the order of the ranks."""
        combine = kernels.combiner(dtype, op)
        scratch = self._pool.take(self._gather_bytes)
        gathered = scratch[: buffer.nbytes * self._size].view(buffer.dtype)
        yield self._comm.iallgather(buffer, gathered)
        part = buffer[slice(*span)]
        if len(part):
            parts = [rows[slice(*span)] for rows in gathered.reshape(self._size, len(buffer))]
            part[...] = parts[0]
            for other in parts[1:]:
                combine(part, other)
            if finish is not None:
                finish(part)
        self._pool.give_back(scratch)

    def allgather(self, buffer: Array, counts: Sequence[int], tag: int) -> Operation[None]:
        """Fill `buffer`, in which this rank's piece is in place already; counts[r] is rank r's."""
        if self._size == 1 or len(set(counts)) > 1 or not len(buffer):
            yield from self._ring.allgather(buffer, counts, tag)
            return
        start = self._comm.rank * counts[0]
        yield self._comm.iallgather(buffer[start : start + counts[0]].copy(), buffer)

    def broadcast(self, buffer: Array, root: int, tag: int) -> Operation[None]:
        """Copy the root's buffer to all."""
        if self._size > 1 and len(buffer):
            yield self._comm.ibcast(buffer, root)

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
        """Return ordinary memory."""
        return self._ring.allocate(nbytes)

    def close(self) -> None:
        """Release the scratch buffers."""
        self._pool.clear()
        self._ring.close()
