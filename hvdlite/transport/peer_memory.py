"""The memory of the other processes of this host, read and written by way of the kernel.

Linux copies between the address spaces of two processes in one pass (`process_vm_readv` and
`process_vm_writev`), which serves arrays that no shared segment holds. Not every system permits
it: containers and hardened kernels may refuse, and so the ranks try it on each other first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .base import Communicator, Operation
from .places import Places, address_of
from .shared_segment import SegmentUnavailableError, SharedSegments, agree
from .types import Array

__all__ = ["Buffers", "Load", "PeerMemory", "reach_peers"]

Load = Callable[[int, int, Array], Array]
"""Returns so many elements of a rank; the array is memory that it may use for them."""

_MOST_BYTES = 1 << 30
_MOST_PLACES = 1024
_PROOF = 16
_SET_PTRACER = 0x59616D61
_ANYONE, _NOBODY = ctypes.c_ulong(-1), ctypes.c_ulong(0)


class PeerMemory:
    """Copies between this process and those of other ranks. For one thread at a time.

    Args:
        pids: the processes, by rank.
        rank: this one.

    Raises:
        OSError: the system has no such calls.
    """

    def __init__(self, pids: Sequence[int], rank: int = 0) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._pids = list(pids)
        self._rank = rank
        self._here, self._there = (np.empty((1, 2), dtype=np.int64) for _ in range(2))
        self._here_at, self._there_at = address_of(self._here), address_of(self._there)
        # Two bytes for the answer, and the descriptions of these and of one byte twice.
        probe: Any = np.zeros(8, dtype=np.int64)
        self._probe_at = address_of(probe)
        probe[:6] = self._probe_at + 56, 2, 0, 1, 0, 1
        self._probe_words = memoryview(probe)
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        kinds: list[Any] = [ctypes.c_int, pointer, number, pointer, number, number]
        try:
            self._read: Any = library.process_vm_readv
            self._write: Any = library.process_vm_writev
        except AttributeError:
            raise OSError("the C library cannot copy between processes") from None
        for function in (self._read, self._write):
            function.restype, function.argtypes = ctypes.c_ssize_t, kinds

    def read(self, rank: int, address: int, into: Array) -> None:
        """Fill an array with what is in another rank's memory.

        Raises:
            OSError: that rank's process is gone, or has nothing there.
        """
        self._copy_whole(self.gather, rank, address, into)

    def write(self, rank: int, address: int, source: Array) -> None:
        """Write an array's contents into another rank's memory. Raises as `read` does."""
        self._copy_whole(self.scatter, rank, address, source)

    def gather(self, rank: int, here: int, there: int, count: int, nbytes: int) -> None:
        """Fill a place with what is in several places of another rank's memory.

        Args:
            rank: that rank.
            here: where a place in this process is described, by its address and its bytes (two
                words of 64 bits).
            there: where `count` places are, one description after the other; at most 1024.
            count: places of the other rank.
            nbytes: of all of them.

        Raises:
            OSError: as `read` does.
        """
        moved = self._read(self._pids[rank], here, 1, there, count, 0)
        if moved != nbytes:
            self._refuse(rank, moved, nbytes)

    def scatter(self, rank: int, here: int, there: int, count: int, nbytes: int) -> None:
        """Write what is in several places to as many of another rank's memory.

        Args:
            rank: that rank.
            here: where `count` places in this process are described, as `gather` wants it.
            there: likewise for the other process; their bytes are the same.
            count: places.
            nbytes: of all of them.

        Raises:
            OSError: as `read` does.
        """
        moved = self._write(self._pids[rank], here, count, there, count, 0)
        if moved != nbytes:
            self._refuse(rank, moved, nbytes)

    def reaches_own(self, places: Places) -> bool:
        """Return whether the kernel can reach these places of this rank.

        It cannot where a device driver has made the mapping.
        """
        if len(places.arrays) == 1:
            return self.reaches_one(int(places.starts[0]), places.arrays[0].nbytes)
        ends = np.concatenate((places.starts, places.stops - 1))
        scratch = np.empty(min(len(ends), _MOST_PLACES), dtype=np.uint8)
        for first in range(0, len(ends), _MOST_PLACES):
            some = ends[first : first + _MOST_PLACES]
            there = np.ones((len(some), 2), dtype=np.int64)
            there[:, 0] = some
            self._here[0] = address_of(scratch), len(some)
            try:
                self.gather(self._rank, self._here_at, address_of(there), len(some), len(some))
            except OSError:
                return False
        return True

    def reaches_one(self, address: int, nbytes: int) -> bool:
        """Return whether the kernel can reach one place of this rank, as `reaches_own` does."""
        into, ends = self._probe_at, self._probe_at + 16
        self._probe_words[2], self._probe_words[4] = address, address + nbytes - 1
        return bool(self._read(self._pids[self._rank], into, 1, ends, 2, 0) == 2)

    def _copy_whole(self, copy: Callable[..., None], rank: int, address: int, array: Array) -> None:
        # One call copies a little less than 2 GiB.
        flat = array.view(np.uint8)
        for start in range(0, len(flat), _MOST_BYTES):
            part = flat[start : start + _MOST_BYTES]
            self._here[0] = address_of(part), len(part)
            self._there[0] = address + start, len(part)
            copy(rank, self._here_at, self._there_at, 1, len(part))

    def _refuse(self, rank: int, moved: int, nbytes: int) -> NoReturn:
        code = ctypes.get_errno() if moved < 0 else 0
        reason = os.strerror(code) if code else f"{moved} of {nbytes} bytes were copied"
        raise OSError(
            code,
            f"cannot reach the memory of rank {rank} on this host (process {self._pids[rank]}), "
            f"which may have ended, or no longer permits it: {reason}",
        )


class Buffers:
    """One buffer of every rank, as this rank reaches them.

    Args:
        segments: where buffers may be.
        peers: how to reach those that are elsewhere.
        shown: by rank, where its buffer is: the offset in its segment, or the negative address.
        buffer: this rank's own.
    """

    def __init__(
        self,
        segments: SharedSegments,
        peers: PeerMemory | None,
        shown: Sequence[int],
        buffer: Array,
    ) -> None:
        self._peers = peers
        self._itemsize = buffer.itemsize
        self._shown = shown
        self.any_far, self.all_far = min(shown) < 0, max(shown) < 0
        """Whether one of them, or every one, is in no segment."""
        self._views = [
            None if place < 0 else segments.view(rank, place, buffer.nbytes).view(buffer.dtype)
            for rank, place in enumerate(shown)
        ]

    def addresses(self) -> list[int]:
        """Return where the buffers are, by rank, if they are all far."""
        return [-place for place in self._shown]

    def loader(self, start: int) -> Load:
        """Return what finds elements of a rank's buffer, from `start` on.

        Its arguments are the rank, how many elements, and memory for so many, where they are
        copied to if the buffer is far.
        """

        def load(rank: int, count: int, scratch: Array) -> Array:
            view = self._views[rank]
            if view is not None:
                return view[start : start + count]
            copy = scratch[:count]
            self._reach().read(rank, start * self._itemsize - self._shown[rank], copy)
            return copy

        return load

    def fetch(self, rank: int, start: int, into: Array) -> None:
        """Copy elements of a rank's buffer, from `start` on."""
        found = self.loader(start)(rank, len(into), into)
        if self._views[rank] is not None:
            into[...] = found

    def store(self, rank: int, start: int, source: Array) -> None:
        """Write elements into a rank's buffer, from `start` on."""
        view = self._views[rank]
        if view is not None:
            view[start : start + len(source)] = source
        else:
            self._reach().write(rank, start * self._itemsize - self._shown[rank], source)

    def _reach(self) -> PeerMemory:
        assert self._peers is not None
        return self._peers


def reach_peers(comm: Communicator) -> Operation[PeerMemory | None]:
    """Find out whether all ranks can read and write the memory of all others (collective).

    Returns:
        The means, on all ranks, or None on all of them.
    """
    _permit(_ANYONE)
    proof = np.frombuffer(bytearray(os.urandom(_PROOF)), dtype=np.int64)
    marks = np.zeros(comm.size, dtype=np.int64)
    card = np.array([os.getpid(), address_of(proof), address_of(marks), *proof], dtype=np.int64)
    cards = np.empty((comm.size, len(card)), dtype=np.int64)
    yield comm.iallgather(card, cards)
    memory = None
    failure = ""
    try:
        memory = PeerMemory([int(pid) for pid in cards[:, 0]], comm.rank)
        read = np.empty_like(proof)
        for rank in range(comm.size):
            memory.read(rank, int(cards[rank, 1]), read)
            if not np.array_equal(read, cards[rank, 3:]):
                raise OSError(f"what is read of rank {rank} is another process's memory")
        for rank in range(comm.size):
            memory.write(rank, int(cards[rank, 2]) + comm.rank * marks.itemsize, proof[:1])
    except OSError as error:
        failure = str(error)
    try:
        yield from agree(comm, failure)
        wrong = [rank for rank in range(comm.size) if marks[rank] != cards[rank, 3]]
        yield from agree(comm, f"was not written to by ranks {wrong}" if wrong else "")
    except SegmentUnavailableError:
        _permit(_NOBODY)
        return None
    return memory


def _permit(whom: ctypes.c_ulong) -> None:
    """Let other processes of this user reach this one, where only its parents may as a rule."""
    with contextlib.suppress(OSError):
        if Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip() == "1":
            ctypes.CDLL(None).prctl(_SET_PTRACER, whom, 0, 0, 0)
