"""Which agreed tensors travel together, and the buffers in which they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ..transport.types import Array, DType, ReduceOp
from .requests import Kind, Response
from .submissions import Entry

__all__ = ["Batch", "FusionBuffers", "Piece", "plan", "sent_bytes", "wire_dtype"]

_FUSED = (Kind.ALLREDUCE, Kind.REDUCESCATTER, Kind.ALLGATHER, Kind.BROADCAST)


class Piece:
    """One tensor of an agreed response."""

    __slots__ = ("dtype", "elements", "entry", "index", "response", "row_bytes", "shape")

    def __init__(self, response: Response, index: int, entry: Entry | None) -> None:
        self.response = response
        self.index = index
        self.entry = entry
        """None on a rank that has joined: it has no such tensor."""
        self.dtype = response.request.dtypes[index]
        self.shape = response.request.shapes[index]
        """Shape on the lowest rank; for allgather only the trailing dimensions are common."""
        self.elements = math.prod(self.shape)
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        """Bytes of everything under one index of the first dimension."""


@dataclass(slots=True, eq=False)
class Batch:
    """Tensors that one transport operation moves."""

    kind: Kind
    dtype: DType
    response: Response
    """That of the first tensor; what makes a batch is equal in all of them."""
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


def wire_dtype(kind: Kind, dtype: DType, op: ReduceOp) -> DType:
    """Return the element type in which a tensor travels.

    The average of integers is taken of their sum in 64 bits, since their own type may not hold
    it. That of 64-bit integers wraps around like any of their sums.
    """
    if kind in (Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL):
        return DType.UINT8
    if op is ReduceOp.AVERAGE and dtype.is_integer:
        return DType.UINT64 if dtype is DType.UINT64 else DType.INT64
    return dtype


def plan(agreed: Iterable[tuple[Response, Entry | None]], threshold: int) -> list[Batch]:
    """Distribute the tensors of a round's responses over batches, the same on every rank.

    Args:
        agreed: responses without error, in the order that all ranks have them in.
        threshold: bytes up to which tensors share a batch; 0 gives each its own.
    """
    batches: list[Batch] = []
    open_batches: dict[tuple[object, ...], Batch] = {}
    for response, entry in agreed:
        request = response.request
        kind = request.kind
        for index, element in enumerate(request.dtypes):
            piece = Piece(response, index, entry)
            dtype = wire_dtype(kind, element, request.op)
            nbytes = _wire_bytes(piece, dtype)
            key = (kind, dtype, request.op, request.prescale, request.postscale, request.root)
            batch = open_batches.get(key)
            full = batch is not None and batch.nbytes + nbytes > threshold
            if batch is None or full or request.resident or kind not in _FUSED:
                batch = Batch(kind, dtype, response)
                batches.append(batch)
                if not request.resident:
                    open_batches[key] = batch
            batch.pieces.append(piece)
            batch.nbytes += nbytes
    return batches


def _wire_bytes(piece: Piece, dtype: DType) -> int:
    response = piece.response
    kind = response.request.kind
    if kind is Kind.ALLGATHER:
        return sum(response.rows[piece.index]) * piece.row_bytes
    if kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
        return piece.elements * dtype.itemsize
    if kind is Kind.BROADCAST:
        return piece.elements * piece.dtype.itemsize
    return 0


def sent_bytes(batch: Batch, rank: int, size: int) -> int:
    """Return how many bytes a rank has to send to others for a batch, at the least."""
    if batch.kind is Kind.ALLTOALL:
        (piece,) = batch.pieces
        rows = piece.response.rows[rank]
        return (sum(rows) - rows[rank]) * piece.row_bytes
    times = 2 if batch.kind is Kind.ALLREDUCE else 1
    return times * batch.nbytes * (size - 1) // size


class FusionBuffers:
    """A few buffers that live as long as the engine: fresh memory would cost page faults.

    Args:
        count: buffers that can be in use at once.
        allocate: returns so many bytes of memory.
    """

    def __init__(self, count: int, allocate: Callable[[int], Array]) -> None:
        self._allocate = allocate
        self._free: list[Array] = [np.empty(0, dtype=np.uint8) for _ in range(count)]

    def available(self) -> bool:
        """Whether `acquire` has something to give."""
        return bool(self._free)

    def acquire(self, nbytes: int) -> Array:
        """Return a buffer of at least `nbytes` bytes, to be given back with `release`."""
        # The largest first, so that buffers that have grown are the ones that get used.
        self._free.sort(key=len)
        buffer = self._free.pop()
        if len(buffer) < nbytes:
            del buffer  # its memory may be what the new one gets
            buffer = self._allocate(nbytes)
        return buffer

    def release(self, buffer: Array) -> None:
        self._free.append(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes held by the buffers that are not in use."""
        return sum(len(buffer) for buffer in self._free)
