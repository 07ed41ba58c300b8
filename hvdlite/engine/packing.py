"""How tensors get into the buffer of a reduction, and results out of it.

Floats that travel in 16 bits are cast on the way in and out: the caller's arrays are wider than
the elements that the ranks have agreed on. Where a buffer holds one tensor only, the transport
copies or casts it part by part, while the network is at work on other parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..transport import kernels
from ..transport.base import Staging
from ..transport.places import Places
from ..transport.types import Array, DType, ReduceOp
from .fusion import Batch
from .requests import Piece
from .submissions import Entry

__all__ = ["cast_staging", "in_place", "in_places", "neutral", "pack", "starts", "typed", "unpack"]

_FEW_BYTES = 32 * 1024
"""Up to this many bytes for each tensor, calls cost more than copying."""

_STAGED_BYTES = 1024 * 1024
"""From this many bytes on, copying is worth being hidden."""


def neutral(dtype: DType, op: ReduceOp) -> Any:
    """Return what a rank that has joined contributes."""
    return kernels.neutral(dtype, ReduceOp.SUM if op in _SUMS else op)


_SUMS = (ReduceOp.AVERAGE, ReduceOp.ADASUM)


def typed(scratch: Array, nbytes: int, dtype: DType) -> Array:
    """Return the beginning of a byte buffer as elements of a type."""
    return scratch[:nbytes].view(dtype.storage)


def in_place(
    piece: Piece, entry: Entry | None, dtype: DType, copy: bool = True
) -> tuple[Array, Staging | None] | None:
    """Return the caller's own output, flat, if it can be the buffer.

    Args:
        copy: whether the buffer has to hold the input.

    Returns:
        The buffer, and what is left to do to it; None if it cannot be that output.
    """
    out = _own_output(piece, entry, dtype)
    if out is None or entry is None:
        return None
    source = entry.inputs[piece.index]
    buffer = out.reshape(-1)
    if not copy or out is source:
        return buffer, None
    if out.nbytes < _STAGED_BYTES or not source.flags.c_contiguous:
        np.copyto(out, source)
        return buffer, None
    flat = source.reshape(-1)

    def load(start: int, stop: int) -> None:
        buffer[start:stop] = flat[start:stop]

    return buffer, Staging(load)


def in_places(batch: Batch) -> Places | None:
    """Return the caller's own outputs, flat and holding the inputs, if all can be reduced there.

    Those that are empty are left out.
    """
    buffers = []
    pairs = list(zip(batch.pieces, batch.entries, strict=True))
    for piece, entry in pairs:
        out = _own_output(piece, entry, batch.dtype)
        if out is None:
            return None
        if out.size:
            buffers.append(out.reshape(-1))
    places = Places.of(buffers)
    if places.overlap():
        return None
    for piece, entry in pairs:
        assert entry is not None
        out, source = entry.outputs[piece.index], entry.inputs[piece.index]
        if out is not source and out is not None:
            np.copyto(out, source)
    return places


def starts(batch: Batch) -> Array:
    """Return where the tensors of a batch begin in its buffer, but for the first one."""
    return np.cumsum([piece.elements for piece in batch.pieces[:-1]])


def _own_output(piece: Piece, entry: Entry | None, dtype: DType) -> Array | None:
    """Return the caller's own output if it has the form of a buffer."""
    if entry is None or piece.dtype is not dtype:
        return None
    out = entry.outputs[piece.index]
    assert out is not None
    return out if out.flags.c_contiguous and not _is_wider(out, dtype) else None


def cast_staging(batch: Batch, buffer: Array) -> Staging | None:
    """Return how the only tensor of a batch is cast into a buffer; None if it need not be."""
    (piece,), (entry,), dtype = batch.pieces, batch.entries, batch.dtype
    if entry is None:
        return None
    out, source = entry.outputs[piece.index], entry.inputs[piece.index]
    assert out is not None
    if not (_is_wider(out, dtype) and out.flags.c_contiguous and source.flags.c_contiguous):
        return None
    wide_in, wide_out = source.reshape(-1), out.reshape(-1)

    def load(start: int, stop: int) -> None:
        kernels.narrow_into(buffer[start:stop], wide_in[start:stop], dtype)

    def store(start: int, stop: int) -> None:
        kernels.widen_into(wide_out[start:stop], buffer[start:stop], dtype)

    return Staging(load, store)


def pack(batch: Batch, buffer: Array) -> None:
    """Fill a fusion buffer with the tensors of a batch."""
    pieces, entries, dtype = batch.pieces, batch.entries, batch.dtype
    casting = dtype in _HALVES and any(
        entry is not None and _is_wider(entry.inputs[piece.index], dtype)
        for piece, entry in zip(pieces, entries, strict=True)
    )
    if batch.nbytes <= len(pieces) * _FEW_BYTES and not casting and None not in entries:
        flat = [
            entry.inputs[piece.index].ravel()  # type: ignore[union-attr]
            for piece, entry in zip(pieces, entries, strict=True)
        ]
        # One call for all of them, which takes a tenth of the time for small tensors.
        np.concatenate(flat, out=buffer, casting="unsafe")
        return
    at = 0
    for piece, entry in zip(pieces, entries, strict=True):
        target = buffer[at : at + piece.elements]
        if entry is None:
            target[...] = neutral(dtype, batch.request.op)
        else:
            source = entry.inputs[piece.index]
            if casting and _is_wider(source, dtype):
                kernels.narrow_into(target, np.ascontiguousarray(source).reshape(-1), dtype)
            else:
                np.copyto(target.reshape(piece.shape), source, casting="unsafe")
        at += piece.elements


def unpack(batch: Batch, buffer: Array) -> None:
    """Copy a fusion buffer to where the tensors of a batch go."""
    at = 0
    may_cast = batch.dtype in _HALVES
    for piece, entry in zip(batch.pieces, batch.entries, strict=True):
        stop = at + piece.elements
        if entry is not None:
            out: Any = entry.outputs[piece.index]
            part = buffer[at:stop]
            if may_cast and _is_wider(out, batch.dtype):
                wide = np.empty(piece.elements, out.dtype)
                kernels.widen_into(wide, part, batch.dtype)
                part = wide
            if out.ndim != 1:
                part = part.reshape(piece.shape)
            out[...] = part
        at = stop


_HALVES = (DType.FLOAT16, DType.BFLOAT16)


def _is_wider(array: Array, dtype: DType) -> bool:
    return dtype in _HALVES and array.dtype.itemsize > 2
