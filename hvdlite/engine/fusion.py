"""Which agreed tensors travel together, and the buffers in which they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..transport.base import Transport
from ..transport.types import Array, DType
from .requests import Kind, Piece, Request, Response
from .submissions import Entry

if TYPE_CHECKING:
    from ..timeline.recorder import Recorder

__all__ = ["Batch", "FusionBuffers", "plan", "sent_bytes"]


@dataclass(slots=True, eq=False)
class Batch:
    """Tensors that one transport operation moves."""

    kind: Kind
    dtype: DType
    request: Request
    """That of the first tensor; what makes a batch is equal in all of them."""
    pieces: list[Piece] = field(default_factory=list)
    entries: list[Entry | None] = field(default_factory=list)
    """What this rank submitted for each piece; None on a rank that has joined."""
    nbytes: int = 0
    round: int = 0
    """In which its tensors were agreed on; counted by the process set."""
    transport: Transport | None = None
    """Moves it: settled when it is planned, since ranks carry it out at different times."""
    lane: int = 0
    """Told apart from the batches that are in flight at the same time."""
    recorder: Recorder | None = None
    """Notes down what becomes of it, for a timeline."""


def plan(agreed: Iterable[tuple[Response, Entry | None]], threshold: int) -> list[Batch]:
    """Distribute the tensors of a round's responses over batches, the same on every rank.

    Args:
        agreed: responses without error, in the order that all ranks have them in.
        threshold: bytes up to which tensors share a batch; 0 gives each its own.
    """
    batches: list[Batch] = []
    open_batches: dict[int, Batch] = {}
    for response, entry in agreed:
        among_themselves = response.request.resident
        here = {} if among_themselves else open_batches
        most = math.inf if among_themselves else threshold
        for piece in response.pieces:
            nbytes = piece.nbytes
            batch = None if piece.alone else here.get(piece.kin)
            if batch is None or batch.nbytes + nbytes > most:
                batch = Batch(piece.request.kind, piece.wire, piece.request)
                batches.append(batch)
                if not piece.alone:
                    here[piece.kin] = batch
            batch.pieces.append(piece)
            batch.entries.append(entry)
            batch.nbytes += nbytes
    return batches


def sent_bytes(batch: Batch, rank: int, size: int) -> int:
    """Return how many bytes a rank has to send to others for a batch, at the least."""
    if batch.kind is Kind.ALLTOALL:
        (piece,) = batch.pieces
        rows = piece.splits[rank]
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

    def trim(self, nbytes: int) -> None:
        """Let go of buffers that are larger than so many bytes and not in use."""
        self._free = [b if len(b) <= nbytes else np.empty(0, dtype=np.uint8) for b in self._free]
