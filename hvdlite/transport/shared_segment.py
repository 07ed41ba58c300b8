"""Memory that the processes of one host share, and that cannot outlive them.

Each rank makes an anonymous file, which has no name in any file system, and the others open it
by way of /proc. A segment is given as much address space as anybody could want, which costs
nothing: a page exists from its first use on.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .base import Communicator, Operation
from .places import address_of
from .types import Array

__all__ = [
    "HEADER",
    "PROOF_BYTES",
    "SegmentUnavailableError",
    "SharedSegments",
    "agree",
    "completed",
    "map_segments",
]

T = TypeVar("T")

_PAGE = mmap.PAGESIZE
HEADER = _PAGE
"""Bytes at the beginning of a segment, outside of what is allocated."""

PROOF_BYTES = 64
"""The first ones of them show that it is the right segment."""

_TOKEN = 16
_REASON = 256


class SegmentUnavailableError(Exception):
    """The ranks cannot share memory; the text says which of them cannot, and why."""


class SharedSegments:
    """The mapped segments of all ranks, and the allocator of this rank's own.

    Args:
        memory: the mappings, by rank.
        rank: this rank.
        reserved: bytes at the beginning of each that are not for the allocator.
    """

    def __init__(self, memory: Sequence[mmap.mmap], rank: int, reserved: int = 0) -> None:
        self._own = memory[rank]
        self._segments: list[Array] = [np.frombuffer(each, dtype=np.uint8) for each in memory]
        self._size = len(self._own)
        self._address = address_of(self._segments[rank])
        self._free = [(HEADER + _pages(reserved), self._size)]
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._taken = self._free[0][0]
        self._process = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's segment that are reserved or allocated; no more are in use."""
        with self._lock:
            self._take_back()
            return self._taken

    def allocate(self, nbytes: int) -> Array | None:
        """Return bytes of this rank's segment, None if it has no room for them.

        The memory goes back to the system once nothing refers to the array or a view of it.
        """
        if os.getpid() != self._process:
            # A fork shares the memory with its parent, but not the knowledge of what is free.
            return None
        length = _pages(max(1, nbytes))
        with self._lock:
            self._take_back()
            fitting = (i for i, (start, stop) in enumerate(self._free) if stop - start >= length)
            index = next(fitting, None)
            if index is None:
                return None
            start, stop = self._free.pop(index)
            if stop - start > length:
                self._free.insert(index, (start + length, stop))
            self._taken += length
        # The memoryview keeps NumPy from making the whole segment the base of every view of
        # this array, so that its end is the end of the last view.
        array: Array = np.frombuffer(memoryview(self._own)[start : start + nbytes], np.uint8)
        weakref.finalize(array, self._returned.append, (start, start + length)).atexit = False
        return array

    def offset_of(self, array: Array) -> int:
        """Return where a flat array lies in this rank's segment, -1 if it lies elsewhere."""
        offset = address_of(array) - self._address
        return offset if 0 <= offset <= self._size - array.nbytes else -1

    def view(self, rank: int, offset: int, nbytes: int) -> Array:
        """Return bytes of a rank's segment."""
        return self._segments[rank][offset : offset + nbytes]

    def close(self) -> None:
        """Let go of the mappings, but for what arrays still refer to. Nothing works after."""
        with self._lock:
            self._take_back()
            self._free = []
            self._segments = []

    def _take_back(self) -> None:
        # Finalizers run anywhere, even inside this lock, so they do no more than leave a note.
        while self._returned and os.getpid() == self._process:
            start, stop = self._returned.popleft()
            self._taken -= stop - start
            with contextlib.suppress(AttributeError, OSError):
                self._own.madvise(mmap.MADV_REMOVE, start, stop - start)
            index = bisect.bisect(self._free, (start, stop))
            if index < len(self._free) and self._free[index][0] == stop:
                stop = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, stop))


def map_segments(comm: Communicator, capacity: int, reserved: int) -> Operation[SharedSegments]:
    """Make a segment on every rank and map those of all others (collective).

    Args:
        comm: ranks that should be on one host.
        capacity: bytes of this rank's segment that it may allocate.
        reserved: bytes of each segment that are used otherwise, from offset HEADER on.

    Returns:
        The segments, when all ranks have them all.

    Raises:
        SegmentUnavailableError: it does not work on some rank; raised on all of them.
    """
    token = os.urandom(_TOKEN)
    descriptor = -1
    memory: list[mmap.mmap] = []
    failure = ""
    try:
        try:
            descriptor, own = _make(token, HEADER + _pages(reserved) + _pages(capacity))
        except _FAILURES as error:
            failure = f"cannot make a shared segment: {error}"
        yield from agree(comm, failure)
        card = np.array([os.getpid(), descriptor, len(own), 0, 0], dtype=np.int64)
        card[3:] = np.frombuffer(token, dtype=np.int64)
        cards = np.empty((comm.size, len(card)), dtype=np.int64)
        yield comm.iallgather(card, cards)
        try:
            for rank in range(comm.size):
                pid, number, size = (int(word) for word in cards[rank, :3])
                theirs = cards[rank, 3:].tobytes()
                memory.append(own if rank == comm.rank else _open(pid, number, size, theirs))
        except _FAILURES as error:
            failure = f"cannot map the segment of rank {len(memory)}: {error}"
        # Nobody may close a descriptor that somebody has still to open.
        yield from agree(comm, failure)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return SharedSegments(memory, comm.rank, reserved)


def completed(creation: Operation[T], refused: Callable[[str], object] | None = None) -> T | None:
    """Return what a creation makes, None where it cannot be made (blocks).

    Args:
        creation: may raise SegmentUnavailableError.
        refused: called with the reason then.
    """
    try:
        while True:
            pending = next(creation)
            while not pending.Test():
                os.sched_yield()
    except StopIteration as end:
        made: T = end.value
        return made
    except SegmentUnavailableError as error:
        if refused is not None:
            refused(str(error))
        return None


_FAILURES = (OSError, ValueError, OverflowError, AttributeError)
"""AttributeError: this system's `os` has no such function."""


def agree(comm: Communicator, failure: str) -> Operation[None]:
    """Raise the first failure of any rank on all of them."""
    text = np.frombuffer(failure.encode()[:_REASON].ljust(_REASON, b"\0"), dtype=np.uint8)
    texts = np.empty((comm.size, _REASON), dtype=np.uint8)
    yield comm.iallgather(text, texts)
    for rank in range(comm.size):
        reason = texts[rank].tobytes().rstrip(b"\0").decode(errors="replace")
        if reason:
            raise SegmentUnavailableError(f"rank {rank} {reason}")


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _name(token: bytes) -> str:
    return f"hvdlite-{token.hex()}"


def _make(token: bytes, size: int) -> tuple[int, mmap.mmap]:
    descriptor = os.memfd_create(_name(token), os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        memory = _map(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    memory[:_TOKEN] = token
    return descriptor, memory


def _open(pid: int, descriptor: int, size: int, token: bytes) -> mmap.mmap:
    path = f"/proc/{pid}/fd/{descriptor}"
    # In another PID namespace this may be anything, even something that must not be opened.
    target = os.readlink(path)
    if _name(token) not in target:
        raise ValueError(f"{path} is {target}, which belongs to another process")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = _map(opened, size)
    finally:
        os.close(opened)
    if memory[:_TOKEN] != token:
        raise ValueError(f"{path} does not hold what that rank wrote there")
    return memory


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Before Python 3.13 a mapping keeps a duplicate of the descriptor open.
    untracked: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    memory = mmap.mmap(descriptor, size, **untracked)
    for advice in ("MADV_DONTDUMP", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, advice))
    return memory
