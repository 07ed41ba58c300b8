"""Memory for results that TensorFlow takes over without a copy, used again once it is free.

Fresh memory costs a page fault for every 4 KiB, which in a training step is as much as the
copying itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.transport.types import Array

__all__ = ["aligned", "empty", "lease", "lease_like"]

ALIGNMENT = 64
"""Bytes: TensorFlow copies what does not begin at a multiple of it."""

_PATIENCE = 256
"""Leases after which memory that nobody has asked for is given back."""


class _Block:
    """Memory that is lent to one result at a time."""

    __slots__ = ("_borrower", "_memory", "used")

    def __init__(self, nbytes: int) -> None:
        # A memoryview, because NumPy makes a view of a view point to the owner of the memory:
        # with an array there, nothing would tell the borrower from the block itself.
        self._memory = memoryview(np.empty(nbytes + ALIGNMENT, dtype=np.uint8))  # type: ignore[arg-type]
        self._borrower: Any = None
        self.used = 0

    @property
    def is_free(self) -> bool:
        return self._borrower is None or self._borrower() is None

    def borrow(self) -> Array:
        """Return the memory as an array that every view of it keeps alive."""
        span = np.frombuffer(self._memory, dtype=np.uint8)
        self._borrower = weakref.ref(span)
        return span


_blocks: dict[int, list[_Block]] = {}
_leases = 0
_lock = threading.Lock()


def lease(nbytes: int) -> Array:
    """Return aligned, uninitialised bytes; they are lent again when no view of them is left."""
    global _leases
    with _lock:
        _leases += 1
        blocks = _blocks.setdefault(nbytes, [])
        block = next((block for block in blocks if block.is_free), None)
        if block is None:
            _drop_unused()
            block = _Block(nbytes)
            blocks.append(block)
        block.used = _leases
        span = block.borrow()
    offset = -span.ctypes.data % ALIGNMENT
    return span[offset : offset + nbytes]


def _drop_unused() -> None:
    for blocks in _blocks.values():
        blocks[:] = [b for b in blocks if not b.is_free or _leases - b.used < _PATIENCE]


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return a new aligned array that is not lent again."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(nbytes + ALIGNMENT, dtype=np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset : offset + nbytes].view(dtype).reshape(shape)


def lease_like(arrays: Sequence[Array]) -> list[Array]:
    """Return aligned arrays of the same shapes and types in leased memory."""
    offsets, total = [], 0
    for array in arrays:
        offsets.append(total)
        total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    span = lease(total)
    return [
        span[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        for offset, array in zip(offsets, arrays, strict=True)
    ]


def aligned(array: Array) -> Array:
    """Return the array, or a copy of it that TensorFlow can take over as it is."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy
