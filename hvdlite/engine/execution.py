"""Carry out agreed batches: pack, let the transport move and reduce, unpack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..timeline.recorder import Span
from ..transport import kernels
from ..transport.adasum import Adasum
from ..transport.base import Finish, Operation, Scattered, Staging, Transport, staged
from ..transport.places import Places
from ..transport.types import Array, DType, ReduceOp
from .fusion import Batch, FusionBuffers, sent_bytes
from .packing import cast_staging, in_place, in_places, neutral, pack, starts, typed, unpack
from .requests import Kind, Piece, Request, display
from .statistics import Counters, Stopwatch
from .submissions import Entry

__all__ = ["Executor"]


class Executor:
    """Runs the batches of one process set on its transport."""

    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        buffers: FusionBuffers,
        counters: Counters,
        adasum: Adasum | None = None,
        set_id: int = 0,
    ) -> None:
        self.transport = transport
        self.adasum = adasum
        self.rank = rank
        self.size = size
        self.buffers = buffers
        self.counters = counters
        self._set_id = set_id

    def run(self, batch: Batch, tag: int) -> Operation[None]:
        """Carry out one batch and complete the entries that end with it."""
        run = {
            Kind.ALLREDUCE: self._allreduce,
            Kind.REDUCESCATTER: self._reduce_scatter,
            Kind.ALLGATHER: self._allgather,
            Kind.BROADCAST: self._broadcast,
            Kind.ALLTOALL: self._alltoall,
        }[batch.kind]
        yield from run(batch, tag)
        self.counters.moved(batch, sent_bytes(batch, self.rank, self.size))
        if batch.recorder is not None:
            batch.recorder.unfinished -= 1

    def _transport(self, batch: Batch) -> Transport:
        return self.transport if batch.transport is None else batch.transport

    def _packing(self, batch: Batch) -> AbstractContextManager[Any]:
        return self._watched(self.counters.packing, "pack", batch)

    def _moving(self, batch: Batch) -> AbstractContextManager[Any]:
        return self._watched(self.counters.moving, "move", batch)

    def _unpacking(self, batch: Batch) -> AbstractContextManager[Any]:
        return self._watched(self.counters.packing, "unpack", batch)

    def _watched(
        self, stopwatch: Stopwatch, what: str, batch: Batch
    ) -> AbstractContextManager[Any]:
        recorder = batch.recorder
        if recorder is None:
            return stopwatch
        # Those of copying are those of moving, and names take room.
        names = _names(batch) if what == "move" else ()
        place = batch.round, self._set_id, batch.lane
        return Span(recorder, stopwatch, what, names, *place, len(batch.pieces), batch.nbytes)

    # -- reductions ---------------------------------------------------------------------

    def _allreduce(self, batch: Batch, tag: int) -> Operation[None]:
        pieces, dtype, request = batch.pieces, batch.dtype, batch.request
        scattered = self._transport(batch).scattered
        if (
            scattered is not None
            and len(pieces) > 1
            and request.op is not ReduceOp.ADASUM
            and scattered.pays(len(pieces), batch.nbytes)
        ):
            yield from self._allreduce_scattered(batch, scattered, tag)
            return
        scratch = staging = None
        with self._packing(batch):
            own = in_place(pieces[0], batch.entries[0], dtype) if len(pieces) == 1 else None
            if own is not None:
                buffer, staging = own
            else:
                scratch = self.buffers.acquire(batch.nbytes)
                buffer = typed(scratch, batch.nbytes, dtype)
                if len(pieces) == 1:
                    staging = cast_staging(batch, buffer)
                if staging is None:
                    pack(batch, buffer)
            if staging is None:
                self._before(buffer, dtype, request)
            else:
                staging = self._prepared(staging, buffer, dtype, request)
        with self._moving(batch):
            if len(buffer):
                yield from self._reduce(batch, buffer, tag, staging)
        if scratch is not None:
            with self._unpacking(batch):
                if staging is None:
                    unpack(batch, buffer)
                self.buffers.release(scratch)
        _complete(batch)

    def _allreduce_scattered(self, batch: Batch, scattered: Scattered, tag: int) -> Operation[None]:
        """Reduce the tensors where they are, if that is possible on this rank."""
        dtype, request = batch.dtype, batch.request
        scratch = None
        with self._packing(batch):
            places = in_places(batch)
            if places is None or not scattered.reaches(places):
                scratch = self.buffers.acquire(batch.nbytes)
                buffer = typed(scratch, batch.nbytes, dtype)
                pack(batch, buffer)
                parts = np.split(buffer, starts(batch))
                places = Places.of([part for part in parts if len(part)])
            for part in places.arrays:
                self._before(part, dtype, request)
        with self._moving(batch):
            finish = self._after(dtype, request)
            op = _transport_op(request.op)
            yield from scattered.allreduce(places, dtype, op, finish, tag)
        if scratch is not None:
            with self._unpacking(batch):
                unpack(batch, buffer)
                self.buffers.release(scratch)
        _complete(batch)

    def _reduce(
        self, batch: Batch, buffer: Array, tag: int, staging: Staging | None
    ) -> Operation[None]:
        pieces, dtype, request = batch.pieces, batch.dtype, batch.request
        finish = self._after(dtype, request)
        if request.op is ReduceOp.ADASUM:
            assert self.adasum is not None
            lengths = [piece.elements for piece in pieces]
            adasum = self.adasum.allreduce(buffer, lengths, dtype, finish, tag)
            return staged(adasum, staging, len(buffer))
        resident = request.resident or len(pieces) > 1
        op = _transport_op(request.op)
        return self._transport(batch).allreduce(buffer, dtype, op, finish, tag, resident, staging)

    def _reduce_scatter(self, batch: Batch, tag: int) -> Operation[None]:
        pieces, dtype = batch.pieces, batch.dtype
        request = batch.request
        counts = [0] * self.size
        # piece, entry, first row, rows, start
        places: list[tuple[Piece, Entry | None, int, int, int]] = []
        start = 0
        for rank in range(self.size):
            before = start
            for piece, entry in zip(pieces, batch.entries, strict=True):
                each, more = divmod(piece.shape[0], self.size)
                first = rank * each + min(rank, more)
                rows = each + (rank < more)
                places.append((piece, entry, first, rows, start))
                start += rows * math.prod(piece.shape[1:])
            counts[rank] = start - before
        with self._packing(batch):
            scratch = self.buffers.acquire(batch.nbytes)
            buffer = typed(scratch, batch.nbytes, dtype)
            for piece, entry, first, rows, at in places:
                width = math.prod(piece.shape[1:])
                target = buffer[at : at + rows * width]
                if entry is None:
                    target[...] = neutral(dtype, request.op)
                else:
                    np.copyto(
                        target.reshape(rows, *piece.shape[1:]),
                        entry.inputs[piece.index][first : first + rows],
                        casting="unsafe",
                    )
            self._before(buffer, dtype, request)
        with self._moving(batch):
            if len(buffer):
                yield from self._transport(batch).reduce_scatter(
                    buffer,
                    counts,
                    dtype,
                    _transport_op(request.op),
                    self._after(dtype, request),
                    tag,
                )
        with self._unpacking(batch):
            for piece, entry, _, rows, at in places[self.rank * len(pieces) :][: len(pieces)]:
                if entry is not None:
                    width = math.prod(piece.shape[1:])
                    mine = buffer[at : at + rows * width].reshape(rows, *piece.shape[1:])
                    entry.outputs[piece.index] = mine.astype(piece.dtype.storage)
            self.buffers.release(scratch)
        _complete(batch)

    def _prepared(self, staging: Staging, buffer: Array, dtype: DType, request: Request) -> Staging:
        """Return a staging that leaves what it loads ready for the reduction."""

        def load(start: int, stop: int) -> None:
            staging.load(start, stop)
            self._before(buffer[start:stop], dtype, request)

        return Staging(load, staging.store)

    def _before(self, buffer: Array, dtype: DType, request: Request) -> None:
        if request.prescale != 1.0:
            kernels.scale(buffer, dtype, request.prescale)
        if request.op is ReduceOp.AVERAGE and dtype is DType.FLOAT16 and self.size > 1:
            # Two halves of 40000 must average to 40000, and their sum is infinite.
            kernels.divide(buffer, dtype, self.size)

    def _after(self, dtype: DType, request: Request) -> Finish | None:
        divide = request.op is ReduceOp.AVERAGE and dtype is not DType.FLOAT16 and self.size > 1
        if not divide and request.postscale == 1.0:
            return None

        def finish(piece: Array) -> None:
            if divide:
                kernels.divide(piece, dtype, self.size)
            if request.postscale != 1.0:
                kernels.scale(piece, dtype, request.postscale)

        return finish

    # -- copies -------------------------------------------------------------------------

    def _allgather(self, batch: Batch, tag: int) -> Operation[None]:
        pieces = batch.pieces
        counts = [sum(p.rows[rank] * p.row_bytes for p in pieces) for rank in range(self.size)]
        with self._packing(batch):
            scratch = None
            outputs = [
                None if entry is None else _gathered_output(piece)
                for piece, entry in zip(pieces, batch.entries, strict=True)
            ]
            first = outputs[0]
            if len(pieces) == 1 and first is not None:
                buffer = _bytes(first)
            else:
                scratch = self.buffers.acquire(batch.nbytes)
                buffer = scratch[: batch.nbytes]
            at = sum(counts[: self.rank])
            for piece, entry in zip(pieces, batch.entries, strict=True):
                if entry is not None:
                    source = entry.inputs[piece.index]
                    nbytes = piece.rows[self.rank] * piece.row_bytes
                    if nbytes:
                        target = buffer[at : at + nbytes].view(piece.dtype.storage)
                        np.copyto(target.reshape(source.shape), source)
                    at += nbytes
        with self._moving(batch):
            if len(buffer):
                yield from self._transport(batch).allgather(buffer, counts, tag)
        with self._unpacking(batch):
            if scratch is not None:
                self._unpack_gathered(pieces, outputs, buffer)
                self.buffers.release(scratch)
        for piece, entry, output in zip(pieces, batch.entries, outputs, strict=True):
            if entry is not None:
                entry.outputs[piece.index] = output
        _complete(batch)

    def _unpack_gathered(
        self, pieces: Sequence[Piece], outputs: Sequence[Array | None], buffer: Array
    ) -> None:
        at = 0
        filled = [0] * len(pieces)
        for rank in range(self.size):
            for i, piece in enumerate(pieces):
                nbytes = piece.rows[rank] * piece.row_bytes
                output = outputs[i]
                if output is not None and nbytes:
                    _bytes(output)[filled[i] : filled[i] + nbytes] = buffer[at : at + nbytes]
                filled[i] += nbytes
                at += nbytes

    def _broadcast(self, batch: Batch, tag: int) -> Operation[None]:
        pieces = batch.pieces
        root = batch.request.root
        with self._packing(batch):
            scratch = None
            own = None
            if len(pieces) == 1:
                is_root = self.rank == root
                own = in_place(pieces[0], batch.entries[0], pieces[0].dtype, copy=is_root)
            if own is not None:
                buffer, staging = own
                if staging is not None:
                    staging.load(0, len(buffer))
                buffer = buffer.view(np.uint8)
            else:
                scratch = self.buffers.acquire(batch.nbytes)
                buffer = scratch[: batch.nbytes]
                if self.rank == root:
                    for piece, entry, target in _byte_places(batch, buffer):
                        assert entry is not None
                        np.copyto(target, entry.inputs[piece.index])
        with self._moving(batch):
            if len(buffer):
                yield from self._transport(batch).broadcast(buffer, root, tag)
        with self._unpacking(batch):
            if scratch is not None:
                for piece, entry, source in _byte_places(batch, buffer):
                    if entry is not None:
                        out = entry.outputs[piece.index]
                        assert out is not None
                        np.copyto(out, source)
                self.buffers.release(scratch)
        _complete(batch)

    def _alltoall(self, batch: Batch, tag: int) -> Operation[None]:
        (piece,), (entry,) = batch.pieces, batch.entries
        assert entry is not None
        splits = piece.splits
        received = [splits[rank][self.rank] for rank in range(self.size)]
        width = piece.row_bytes
        send = np.ascontiguousarray(entry.inputs[0])
        recv = np.empty((sum(received), *piece.shape[1:]), dtype=piece.dtype.storage)
        with self._moving(batch):
            if width:
                yield from self._transport(batch).alltoall(
                    _bytes(send),
                    [rows * width for rows in splits[self.rank]],
                    _bytes(recv),
                    [rows * width for rows in received],
                    tag,
                )
        entry.result = recv, np.array(received, dtype=np.int64)
        _complete(batch)


def _names(batch: Batch) -> tuple[str, ...]:
    """Return the names that this rank has submitted, that of a group once."""
    entries = dict.fromkeys(entry for entry in batch.entries if entry is not None)
    return tuple(display(entry.key, entry.request.kind) for entry in entries)


def _transport_op(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op is ReduceOp.AVERAGE else op


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _gathered_output(piece: Piece) -> Array:
    return np.empty((sum(piece.rows), *piece.shape[1:]), dtype=piece.dtype.storage)


def _byte_places(batch: Batch, buffer: Array) -> list[tuple[Piece, Entry | None, Array]]:
    places = []
    at = 0
    for piece, entry in zip(batch.pieces, batch.entries, strict=True):
        nbytes = piece.elements * piece.dtype.itemsize
        view = buffer[at : at + nbytes].view(piece.dtype.storage).reshape(piece.shape)
        places.append((piece, entry, view))
        at += nbytes
    return places


def _complete(batch: Batch) -> None:
    for entry in batch.entries:
        if entry is not None:
            entry.remaining -= 1
            if entry.remaining <= 0:
                entry.handle.finish(entry.outputs if entry.result is None else entry.result)
