"""Which transport an operation takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..log import logger
from .base import Communicator, Finish, Operation, Staging, Transport, Words
from .hierarchical import HierarchicalTransport
from .mpi import MPITransport
from .ring import RingTransport
from .shared_memory import DIRECT_BYTES, SharedMemoryTransport
from .types import Array, DType, ReduceOp

__all__ = [
    "HIERARCHICAL_LIMITS",
    "SHARED_MEMORY_LIMITS",
    "AllreduceLimits",
    "AutoTransport",
    "TransportSettings",
    "choices",
    "make_transport",
]


class TransportSettings(Protocol):
    """The knobs of `Settings` that matter here; they are the same on every rank."""

    @property
    def transport(self) -> str: ...

    @property
    def segment_bytes(self) -> int: ...

    @property
    def small_bytes(self) -> int: ...

    @property
    def peer_memory(self) -> bool: ...


def make_transport(
    comm: Communicator, settings: TransportSettings, *, hosts: Sequence[object] | None = None
) -> Transport:
    """Make the transport of one group of ranks.

    Args:
        comm: the ranks; all of them call this (it may communicate and block). The transport
            uses it alone from then on.
        settings: says which transport, and how it works.
        hosts: the host of each rank, the same on all of them; each on its own if not given.
    """
    ring = RingTransport(comm, settings.segment_bytes)
    if comm.size == 1 or settings.transport == "ring":
        return ring
    mpi = MPITransport(comm, ring)
    if settings.transport == "mpi":
        return mpi
    large, limits = _large(comm, settings, ring, range(comm.size) if hosts is None else hosts)
    if settings.transport != "auto" and large is not ring:
        return large
    return AutoTransport(comm, mpi, large, limits, settings)


def _large(
    comm: Communicator,
    settings: TransportSettings,
    ring: RingTransport,
    hosts: Sequence[object],
) -> tuple[Transport, AllreduceLimits]:
    """Choose what moves much data, by where the ranks are."""
    count = len(set(hosts))
    ring_limits = AllreduceLimits.all(settings.small_bytes)
    direct = DIRECT_BYTES if settings.peer_memory else None
    if count == 1:
        shared = SharedMemoryTransport.create(comm, direct_bytes=direct, refused=_no_shared_memory)
        return (shared, SHARED_MEMORY_LIMITS) if shared is not None else (ring, ring_limits)
    if settings.transport == "shared_memory":
        _no_shared_memory("the ranks are on several hosts")
    elif count < comm.size:
        made = HierarchicalTransport.create(
            comm,
            hosts,
            ring,
            settings.segment_bytes,
            direct_bytes=direct,
            refused=_no_shared_memory,
        )
        if made is not None:
            return made, HIERARCHICAL_LIMITS.at_least(settings.small_bytes)
    return ring, ring_limits


def _no_shared_memory(reason: str) -> None:
    logger.warning("no shared memory between the ranks, messages instead: %s", reason)


@dataclass(frozen=True, slots=True)
class AllreduceLimits:
    """Below how many bytes MPI's own all-reduce is the fastest."""

    resident: int
    """Buffers in memory that the large transport has allocated."""
    ordinary: int
    """Other buffers, of elements that MPI can reduce."""
    foreign: int
    """Elements that MPI cannot reduce."""

    @classmethod
    def all(cls, nbytes: int) -> AllreduceLimits:
        """Return one limit for every kind."""
        return cls(nbytes, nbytes, nbytes)

    def at_least(self, nbytes: int) -> AllreduceLimits:
        """Return limits of which none is below a number."""
        return AllreduceLimits(
            max(self.resident, nbytes), max(self.ordinary, nbytes), max(self.foreign, nbytes)
        )


SHARED_MEMORY_LIMITS = AllreduceLimits(128 * 1024, 512 * 1024, 16 * 1024)
"""Measured through the engine on 2 and 4 ranks of 2 cores, with Open MPI. What lies in no segment
costs calls to the kernel, or copies in and out, which take what the reduction itself saves."""


HIERARCHICAL_LIMITS = AllreduceLimits(256 * 1024, 256 * 1024, 64 * 1024)
"""Measured on 2 hosts of 2 ranks with Open MPI and links of 1 Gbit/s, on a busy machine. The more
hosts, the larger: `small_bytes` raises them."""


class AutoTransport:
    """Chooses for each operation by what all ranks know alike.

    Args:
        comm: the ranks.
        small: takes what is below the limits.
        large: takes the rest.
        limits: of all-reduces.
        settings: `small_bytes` is the limit of the others.
    """

    def __init__(
        self,
        comm: Communicator,
        small: Transport,
        large: Transport,
        limits: AllreduceLimits,
        settings: TransportSettings,
    ) -> None:
        self._comm = comm
        self._small = small
        self._large = large
        self._limits = limits
        self.words: Words | None = large.words
        self.scattered = large.scattered
        self._small_bytes = settings.small_bytes

    @property
    def choices(self) -> dict[str, Transport]:
        """This and its parts, by the names of `HVDLITE_TRANSPORT`."""
        return {"auto": self, "mpi": self._small, _NAMES[type(self._large)]: self._large}

    def _by_size(self, buffer: Array) -> Transport:
        return self._small if buffer.nbytes < self._small_bytes else self._large

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
        if not self._comm.reduces(dtype, op):
            limit = self._limits.foreign
        else:
            limit = self._limits.resident if resident else self._limits.ordinary
        chosen = self._small if buffer.nbytes < limit else self._large
        return chosen.allreduce(buffer, dtype, op, finish, tag, resident, staging)

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

    def allgather(self, buffer: Array, counts: Sequence[int], tag: int) -> Operation[None]:
        """Fill `buffer`, in which this rank's piece is in place already; counts[r] is rank r's."""
        return self._by_size(buffer).allgather(buffer, counts, tag)

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

    def allocate(self, nbytes: int) -> Array:
        """Return memory that suits large operations best."""
        return self._large.allocate(nbytes)

    def close(self) -> None:
        """Release what the transports hold (collective, after the last operation)."""
        self._small.close()
        self._large.close()


_NAMES: dict[type, str] = {
    RingTransport: "ring",
    SharedMemoryTransport: "shared_memory",
    HierarchicalTransport: "hierarchical",
}


def choices(transport: Transport) -> dict[str, Transport]:
    """Return what may carry a batch in a transport's place, the same names on every rank.

    Operations of all of them may be in flight at once.
    """
    return transport.choices if isinstance(transport, AutoTransport) else {}
