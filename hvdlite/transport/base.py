"""What the engine needs of a communicator and of a transport, and nothing more.

Everything here is non-blocking. A transport operation is a generator: it yields whatever
request it waits for and is resumed once that request has completed, so one thread can keep
many operations in flight and none of them can hold up the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from .places import Places
from .types import Array, DType, ReduceOp

__all__ = [
    "TAGS",
    "Communicator",
    "Finish",
    "Operation",
    "Pending",
    "Scattered",
    "Staging",
    "Transport",
    "Words",
    "staged",
]

T = TypeVar("T")

TAGS = 4096
"""Tags of operations are below this. A transport may add multiples of it, up to the 32767 that
MPI guarantees, to tell apart the messages of one operation."""


class Pending(Protocol):
    """A communication in progress; `mpi4py.MPI.Request` is one."""

    def Test(self) -> bool:
        """Make progress and return whether the communication has completed."""
        ...


Operation: TypeAlias = Generator[Pending, None, T]
"""Yields what it waits for; returns its result when done."""

Finish: TypeAlias = Callable[[Array], None]
"""Applied in place to a fully reduced piece, on the rank that reduced it, before it is shared."""


@dataclass(frozen=True, slots=True)
class Staging:
    """How the contents of a buffer get there and how results get away, part by part.

    A transport that does this where it works on a part anyway hides the time that it takes
    behind the network. Each element is loaded once, before anything else is done to it, and
    stored once, when it has its final value.
    """

    load: Callable[[int, int], None]
    """Fills `buffer[start:stop]`."""
    store: Callable[[int, int], None] | None = None
    """Takes `buffer[start:stop]` to where it belongs; None if it belongs there."""


def staged(operation: Operation[None], staging: Staging | None, length: int) -> Operation[None]:
    """Load everything before an operation, and store everything after it."""
    if staging is not None:
        staging.load(0, length)
    yield from operation
    if staging is not None and staging.store is not None:
        staging.store(0, length)


class Communicator(Protocol):
    """A private group of ranks. All data are C-contiguous NumPy arrays.

    The collective methods must be called in the same order on every rank; point-to-point
    messages of one (source, tag) arrive in the order in which they were sent.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def isend(self, data: Array, dest: int, tag: int) -> Pending: ...

    def irecv(self, data: Array, source: int, tag: int) -> Pending: ...

    def probe(self, source: int, tag: int) -> int | None:
        """Return the bytes of the next message from `source` with `tag`, None without one."""
        ...

    def iband(self, words: Array) -> Pending:
        """Combine uint64 words of all ranks by bitwise AND, in place."""
        ...

    def iallreduce(self, data: Array, dtype: DType, op: ReduceOp) -> Pending:
        """Reduce in place with the library's own collective; only where `reduces` says so."""
        ...

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        """Whether `iallreduce` can reduce these elements."""
        ...

    def iallgather(self, send: Array, recv: Array) -> Pending:
        """Gather equally many bytes from every rank: recv holds size x send."""
        ...

    def ibcast(self, data: Array, root: int) -> Pending: ...

    def ibarrier(self) -> Pending: ...

    def duplicate(self) -> Communicator:
        """Return a communicator of the same ranks with its own traffic (collective, blocking)."""
        ...

    def subset(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator of these ranks in this order, None on the others (collective)."""
        ...

    def free(self) -> None: ...


class Words(Protocol):
    """A way to combine few words of all ranks."""

    def iband(self, words: Array) -> Pending | None:
        """Combine uint64 words by bitwise AND, in place; None if they are too many."""
        ...


class Scattered(Protocol):
    """A way to reduce what lies in many arrays, where it is."""

    def pays(self, count: int, nbytes: int) -> bool:
        """Return whether so many arrays of so many bytes together should not be packed."""
        ...

    def reaches(self, places: Places) -> bool:
        """Return whether `allreduce` can work on these arrays of this rank."""
        ...

    def allreduce(
        self, places: Places, dtype: DType, op: ReduceOp, finish: Finish | None, tag: int
    ) -> Operation[None]:
        """Reduce arrays in place, as `Transport.allreduce` does one."""
        ...


class Transport(Protocol):
    """Moves and combines flat, C-contiguous arrays among the ranks of one communicator.

    Operations are started (their first `next`) in the same order on every rank; after that
    they may interleave in any way. `tag` is the same on every rank and unique among the
    operations in flight. Lengths are counted in elements of `dtype`.

    Attributes:
        words: combines the words of negotiation rounds faster than messages could; None if
            there is no such way.
        scattered: reduces many arrays without packing them; None if there is no such way.
    """

    words: Words | None
    scattered: Scattered | None

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
        """Reduce in place; every rank ends with bit-identical contents.

        Args:
            resident: whether the buffer came from `allocate`, as far as all ranks know: a
                hint that must be equal on all of them, and need not be true.
            staging: fills the buffer, and takes the results away; a rank's own business.
        """
        ...

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
        ...

    def allgather(self, buffer: Array, counts: Sequence[int], tag: int) -> Operation[None]:
        """Fill `buffer`, in which this rank's piece is in place already; counts[r] is rank r's."""
        ...

    def broadcast(self, buffer: Array, root: int, tag: int) -> Operation[None]: ...

    def alltoall(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        tag: int,
    ) -> Operation[None]: ...

    def allocate(self, nbytes: int) -> Array:
        """Return bytes of memory for buffers: the kind that this transport moves fastest.

        Any memory works, whatever kind the other ranks use.
        """
        ...

    def close(self) -> None:
        """Release what the transport holds (collective, after its last operation)."""
        ...
