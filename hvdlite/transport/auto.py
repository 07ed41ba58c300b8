"""Which transport an operation takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..log import logger
from .base import Communicator, Finish, Operation, Transport
from .mpi import MPITransport
from .ring import RingTransport
from .shared_memory import SharedMemoryTransport
from .types import Array, DType, ReduceOp

__all__ = ["AutoTransport", "TransportSettings", "make_transport"]


class TransportSettings(Protocol):
    """The knobs of `Settings` that matter here; they are the same on every rank."""

    @property
    def transport(self) -> str: ...

    @property
    def segment_bytes(self) -> int: ...

    @property
    def small_bytes(self) -> int: ...


def make_transport(
    comm: Communicator, settings: TransportSettings, *, one_host: bool = False
) -> Transport:
    """Make the transport of one group of ranks.

    Args:
        comm: the ranks; all of them call this (it may communicate and block). The transport
            uses it alone from then on.
        settings: says which transport, and how it works.
        one_host: whether all ranks are on one host.
    """
    ring = RingTransport(comm, settings.segment_bytes)
    if comm.size == 1 or settings.transport == "ring":
        return ring
    mpi = MPITransport(comm, ring)
    if settings.transport == "mpi":
        return mpi
    large: Transport = ring
    if one_host:
        shared = SharedMemoryTransport.create(comm, refused=_no_shared_memory)
        large = shared or ring
    elif settings.transport == "shared_memory":
        _no_shared_memory("the ranks are on several hosts")
    if large is not ring and settings.transport == "shared_memory":
        return large
    return AutoTransport(small=mpi, large=large, small_bytes=settings.small_bytes)


def _no_shared_memory(reason: str) -> None:
    logger.warning("no shared memory between the ranks, messages instead: %s", reason)


class AutoTransport:
    """Chooses for each operation by what all ranks know alike: its bytes.

    Args:
        small: takes what is below `small_bytes`.
        large: takes the rest.
        small_bytes: the limit.
    """

    def __init__(self, small: Transport, large: Transport, small_bytes: int) -> None:
        self._small = small
        self._large = large
        self._small_bytes = small_bytes

    def _by_size(self, buffer: Array) -> Transport:
        return self._small if buffer.nbytes < self._small_bytes else self._large

    def allreduce(
        self, buffer: Array, dtype: DType, op: ReduceOp, finish: Finish | None, tag: int
    ) -> Operation[None]:
        """Reduce in place; every rank ends with bit-identical contents."""
        return self._by_size(buffer).allreduce(buffer, dtype, op, finish, tag)

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
        return self._by_size(buffer).reduce_scatter(buffer, counts, dtype, op, finish, tag)

    def allgather(
        self, buffer: Array, counts: Sequence[int], dtype: DType, tag: int
    ) -> Operation[None]:
        """Fill `buffer`, in which this rank's piece is in place already; counts[r] is rank r's."""
        return self._by_size(buffer).allgather(buffer, counts, dtype, tag)

    def broadcast(self, buffer: Array, root: int, tag: int) -> Operation[None]:
        """Copy the root's buffer to all."""
        return self._by_size(buffer).broadcast(buffer, root, tag)

    def alltoall(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        tag: int,
    ) -> Operation[None]:
        """Send a piece of `send` to every rank and fill `recv` with theirs, by rank."""
        # Its bytes differ from rank to rank.
        return self._large.alltoall(send, send_counts, recv, recv_counts, tag)

    def barrier(self, tag: int) -> Operation[None]:
        """Return when every rank has come here."""
        return self._small.barrier(tag)

    def allocate(self, nbytes: int) -> Array:
        """Return memory that suits large operations best."""
        return self._large.allocate(nbytes)

    def close(self) -> None:
        """Release what the transports hold (collective, after the last operation)."""
        self._small.close()
        self._large.close()
