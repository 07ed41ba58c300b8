"""Carry out agreed batches: pack, let the transport move and reduce, unpack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..transport import kernels
from ..transport.adasum import Adasum
from ..transport.base import Finish, Operation, Transport
from ..transport.types import Array, DType, ReduceOp
from .fusion import Batch, FusionBuffers, Piece, sent_bytes
from .requests import Kind, Request
from .statistics import Counters

__all__ = ["Executor", "rows_of_rank"]


def rows_of_rank(rows: int, rank: int, size: int) -> int:
    """Return how many of `rows` rows a reducescatter leaves on a rank."""
    return rows // size + (rank < rows % size)


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
    ) -> None:
        self.transport = transport
        self.adasum = adasum
        self.rank = rank
        self.size = size
        self.buffers = buffers
        self.counters = counters

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

    # -- reductions ---------------------------------------------------------------------

    def _allreduce(self, batch: Batch, tag: int) -> Operation[None]:
        pieces, dtype = batch.pieces, batch.dtype
        request = batch.response.request
        with self.counters.packing:
            buffer = None if len(pieces) > 1 else _in_place(pieces[0], dtype)
            scratch = None
            if buffer is None:
                scratch = self.buffers.acquire(batch.nbytes)
                buffer = _typed(scratch, batch.nbytes, dtype)
                at = 0
                for piece in pieces:
                    _pack(piece, buffer[at : at + piece.elements], dtype, request.op)
                    at += piece.elements
            self._before(buffer, dtype, request)
        with self.counters.moving:
            if len(buffer):
                yield from self._reduce(batch, buffer, tag)
        with self.counters.packing:
            if scratch is not None:
                at = 0
                for piece in pieces:
                    if piece.entry is not None:
                        out = piece.entry.outputs[piece.index]
                        assert out is not None
                        np.copyto(
                            out,
                            buffer[at : at + piece.elements].reshape(piece.shape),
                            casting="unsafe",
                        )
                    at += piece.elements
                self.buffers.release(scratch)
        _complete(pieces)

    def _reduce(self, batch: Batch, buffer: Array, tag: int) -> Operation[None]:
        pieces, dtype = batch.pieces, batch.dtype
        request = batch.response.request
        finish = self._after(dtype, request)
        if request.op is ReduceOp.ADASUM:
            assert self.adasum is not None
            lengths = [piece.elements for piece in pieces]
            return self.adasum.allreduce(buffer, lengths, dtype, finish, tag)
        resident = request.resident or len(pieces) > 1
        op = _transport_op(request.op)
        return self.transport.allreduce(buffer, dtype, op, finish, tag, resident)

    def _reduce_scatter(self, batch: Batch, tag: int) -> Operation[None]:
        pieces, dtype = batch.pieces, batch.dtype
        request = batch.response.request
        counts = [0] * self.size
        places: list[tuple[Piece, int, int, int]] = []  # piece, first row, rows, start
        start = 0
        for rank in range(self.size):
            before = start
            for piece in pieces:
                each, more = divmod(piece.shape[0], self.size)
                first = rank * each + min(rank, more)
                rows = rows_of_rank(piece.shape[0], rank, self.size)
                places.append((piece, first, rows, start))
                start += rows * math.prod(piece.shape[1:])
            counts[rank] = start - before
        with self.counters.packing:
            scratch = self.buffers.acquire(batch.nbytes)
            buffer = _typed(scratch, batch.nbytes, dtype)
            for piece, first, rows, at in places:
                width = math.prod(piece.shape[1:])
                target = buffer[at : at + rows * width]
                if piece.entry is None:
                    target[...] = _neutral(dtype, request.op)
                else:
                    np.copyto(
                        target.reshape(rows, *piece.shape[1:]),
                        piece.entry.inputs[piece.index][first : first + rows],
                        casting="unsafe",
                    )
            self._before(buffer, dtype, request)
        with self.counters.moving:
            if len(buffer):
                yield from self.transport.reduce_scatter(
                    buffer,
                    counts,
                    dtype,
                    _transport_op(request.op),
                    self._after(dtype, request),
                    tag,
                )
        with self.counters.packing:
            for piece, _, rows, at in places[self.rank * len(pieces) :][: len(pieces)]:
                if piece.entry is not None:
                    width = math.prod(piece.shape[1:])
                    mine = buffer[at : at + rows * width].reshape(rows, *piece.shape[1:])
                    piece.entry.outputs[piece.index] = mine.astype(piece.dtype.storage)
            self.buffers.release(scratch)
        _complete(pieces)

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
        counts = [
            sum(p.response.rows[p.index][rank] * p.row_bytes for p in pieces)
            for rank in range(self.size)
        ]
        with self.counters.packing:
            scratch = None
            outputs = [self._gathered_output(piece) for piece in pieces]
            first = outputs[0]
            if len(pieces) == 1 and first is not None:
                buffer = _bytes(first)
            else:
                scratch = self.buffers.acquire(batch.nbytes)
                buffer = scratch[: batch.nbytes]
            at = sum(counts[: self.rank])
            for piece in pieces:
                if piece.entry is not None:
                    source = piece.entry.inputs[piece.index]
                    nbytes = piece.response.rows[piece.index][self.rank] * piece.row_bytes
                    if nbytes:
                        target = buffer[at : at + nbytes].view(piece.dtype.storage)
                        np.copyto(target.reshape(source.shape), source)
                    at += nbytes
        with self.counters.moving:
            if len(buffer):
                yield from self.transport.allgather(buffer, counts, DType.UINT8, tag)
        with self.counters.packing:
            if scratch is not None:
                self._unpack_gathered(pieces, outputs, buffer)
                self.buffers.release(scratch)
        for piece, output in zip(pieces, outputs, strict=True):
            if piece.entry is not None:
                piece.entry.outputs[piece.index] = output
        _complete(pieces)

    def _gathered_output(self, piece: Piece) -> Array | None:
        if piece.entry is None:
            return None
        rows = sum(piece.response.rows[piece.index])
        return np.empty((rows, *piece.shape[1:]), dtype=piece.dtype.storage)

    def _unpack_gathered(
        self, pieces: Sequence[Piece], outputs: Sequence[Array | None], buffer: Array
    ) -> None:
        at = 0
        filled = [0] * len(pieces)
        for rank in range(self.size):
            for i, piece in enumerate(pieces):
                nbytes = piece.response.rows[piece.index][rank] * piece.row_bytes
                output = outputs[i]
                if output is not None and nbytes:
                    _bytes(output)[filled[i] : filled[i] + nbytes] = buffer[at : at + nbytes]
                filled[i] += nbytes
                at += nbytes

    def _broadcast(self, batch: Batch, tag: int) -> Operation[None]:
        pieces = batch.pieces
        root = batch.response.request.root
        with self.counters.packing:
            scratch = None
            buffer = None
            if len(pieces) == 1:
                buffer = _in_place(pieces[0], pieces[0].dtype, copy=self.rank == root)
            if buffer is not None:
                buffer = buffer.view(np.uint8)
            else:
                scratch = self.buffers.acquire(batch.nbytes)
                buffer = scratch[: batch.nbytes]
                if self.rank == root:
                    for piece, target in _byte_places(pieces, buffer):
                        assert piece.entry is not None
                        np.copyto(target, piece.entry.inputs[piece.index])
        with self.counters.moving:
            if len(buffer):
                yield from self.transport.broadcast(buffer, root, tag)
        with self.counters.packing:
            if scratch is not None:
                for piece, source in _byte_places(pieces, buffer):
                    if piece.entry is not None:
                        out = piece.entry.outputs[piece.index]
                        assert out is not None
                        np.copyto(out, source)
                self.buffers.release(scratch)
        _complete(pieces)

    def _alltoall(self, batch: Batch, tag: int) -> Operation[None]:
        (piece,) = batch.pieces
        entry = piece.entry
        assert entry is not None
        splits = piece.response.rows
        received = [splits[rank][self.rank] for rank in range(self.size)]
        width = piece.row_bytes
        send = np.ascontiguousarray(entry.inputs[0])
        recv = np.empty((sum(received), *piece.shape[1:]), dtype=piece.dtype.storage)
        with self.counters.moving:
            if width:
                yield from self.transport.alltoall(
                    _bytes(send),
                    [rows * width for rows in splits[self.rank]],
                    _bytes(recv),
                    [rows * width for rows in received],
                    tag,
                )
        entry.outputs[0] = recv
        entry.extra = np.array(received, dtype=np.int64)
        _complete(batch.pieces)


def _transport_op(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op is ReduceOp.AVERAGE else op


def _neutral(dtype: DType, op: ReduceOp) -> Any:
    """Return what a rank that has joined contributes."""
    return kernels.neutral(dtype, ReduceOp.SUM if op is ReduceOp.ADASUM else _transport_op(op))


def _typed(scratch: Array, nbytes: int, dtype: DType) -> Array:
    return scratch[:nbytes].view(dtype.storage)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _in_place(piece: Piece, dtype: DType, copy: bool = True) -> Array | None:
    """Return the caller's own output, flat and holding the input, if it can be the buffer."""
    if piece.entry is None or piece.dtype is not dtype:
        return None
    out, source = piece.entry.outputs[piece.index], piece.entry.inputs[piece.index]
    assert out is not None
    if not out.flags.c_contiguous:
        return None
    if copy and out is not source:
        np.copyto(out, source)
    return out.reshape(-1)


def _pack(piece: Piece, target: Array, dtype: DType, op: ReduceOp) -> None:
    if piece.entry is None:
        target[...] = _neutral(dtype, op)
    else:
        source = piece.entry.inputs[piece.index]
        np.copyto(target.reshape(piece.shape), source, casting="unsafe")


def _byte_places(pieces: Sequence[Piece], buffer: Array) -> list[tuple[Piece, Array]]:
    places = []
    at = 0
    for piece in pieces:
        nbytes = piece.elements * piece.dtype.itemsize
        view = buffer[at : at + nbytes].view(piece.dtype.storage).reshape(piece.shape)
        places.append((piece, view))
        at += nbytes
    return places


def _complete(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        entry = piece.entry
        if entry is None:
            continue
        entry.remaining -= 1
        if entry.remaining <= 0:
            entry.handle.finish(_result(entry.outputs, entry.extra))


def _result(outputs: list[Any], extra: Any) -> Any:
    return outputs if extra is None else (outputs[0], extra)
