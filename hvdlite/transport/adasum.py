"""Adasum: a sum that adapts to how much two gradients have in common.

Maleki, Musuvathi, Mytkowicz, Saarikivi, Xu, Eksarevskiy, Ekanayake, Barsoum: "Scaling
Distributed Training with Adaptive Summation" (2021, arXiv:2006.02924). For two vectors

    adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b

which adds what is orthogonal and averages what is parallel. More vectors are combined in a
binary tree: neighbours first, then neighbouring pairs, and so on. Where the number of ranks is
no power of two, the first part of each node has the largest power of two of ranks that leaves
some for the second, so every number of ranks works, and powers of two give the paper's tree.

The tree needs whole vectors for its dot products only. So the ranks exchange slices: each gets
one slice of everybody's vector, climbs the tree on that, and on each level adds up its share of
the dot products with the other ranks. Each rank sends 2(n-1)/n of the vector in all, as in the
best all-reduce, and log2(n) messages of a few numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from . import kernels
from .base import Communicator, Finish, Operation
from .ring import RingTransport, even_counts
from .types import Array, DType, ReduceOp

__all__ = ["Adasum", "adasum_refusal", "tree"]

_BLOCK = 16384
"""Elements of which float64 copies stay in the cache."""


def adasum_refusal(dtype: DType) -> str | None:
    """Return why elements of a type cannot be combined by Adasum, None if they can."""
    if dtype.is_floating:
        return None
    return (
        f"Adasum is defined for real floating-point numbers, not for {dtype}: it scales vectors "
        "by the angle between them. Use Sum or Average, or convert to a float type."
    )


def tree(size: int) -> list[list[tuple[int, int]]]:
    """Return which vectors meet on each level, bottom up: the second is combined into the first.

    >>> tree(5)
    [[(0, 1), (2, 3)], [(0, 2)], [(0, 4)]]
    """
    levels = []
    distance = 1
    while distance < size:
        pairs = range(0, size - distance, 2 * distance)
        levels.append([(first, first + distance) for first in pairs])
        distance *= 2
    return levels


class _Part(NamedTuple):
    """Where in this rank's slice a tensor lies, and the number of the tensor."""

    tensor: int
    start: int
    stop: int


class Adasum:
    """Combines vectors over point-to-point messages.

    Args:
        comm: the ranks. May be used by other operations too, which have tags of their own.
        segment_bytes: what messages of the all-gather are divided into.
    """

    def __init__(self, comm: Communicator, segment_bytes: int | None = None) -> None:
        self._comm = comm
        # Nothing but messages: these operations begin whenever the ones before them end, and
        # collectives of MPI would have to begin in the same order on all ranks.
        self._ring = (
            RingTransport(comm) if segment_bytes is None else RingTransport(comm, segment_bytes)
        )

    def allreduce(
        self,
        buffer: Array,
        lengths: Sequence[int],
        dtype: DType,
        finish: Finish | None,
        tag: int,
    ) -> Operation[None]:
        """Combine in place; every rank ends with bit-identical contents.

        Args:
            buffer: tensors one after the other, flat.
            lengths: elements of each tensor, which is combined by itself.
            dtype: of the elements. 16-bit floats are combined in float32 and rounded at the
                end, others in their own type; dot products are float64.
            finish: applied in place to this rank's slice of the result.
            tag: the same on every rank, and no other operation's.
        """
        size, rank = self._comm.size, self._comm.rank
        if size == 1:
            if finish is not None and len(buffer):
                finish(buffer)
            return
        counts = even_counts(len(buffer), size)
        start = sum(counts[:rank])
        mine = counts[rank]
        gathered = np.empty((size, mine), dtype=buffer.dtype)
        yield from self._ring.alltoall(buffer, counts, gathered.reshape(-1), [mine] * size, tag)
        vectors = [kernels.widened(row, dtype) for row in gathered]
        parts = _parts(lengths, start, start + mine)
        for level in tree(size):
            dots = np.zeros((len(level), len(lengths), 3))
            for products, (first, second) in zip(dots, level, strict=True):
                _dot_products(vectors[first], vectors[second], parts, products)
            yield from self._ring.allreduce(
                dots.reshape(-1), DType.FLOAT64, ReduceOp.SUM, None, tag
            )
            for products, (first, second) in zip(dots, level, strict=True):
                _combine(vectors[first], vectors[second], parts, products)
        result = buffer[start : start + mine]
        kernels.narrow_into(result, vectors[0], dtype)
        if finish is not None and mine:
            finish(result)
        yield from self._ring.allgather(buffer, counts, tag)

    def close(self) -> None:
        """Release the scratch buffers."""
        self._ring.close()


def _parts(lengths: Sequence[int], start: int, stop: int) -> list[_Part]:
    """Return the parts of tensors that lie between two positions."""
    parts = []
    ends = list(accumulate(lengths))
    for tensor, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        low, high = max(start, end - length), min(stop, end)
        if low < high:
            parts.append(_Part(tensor, low - start, high - start))
    return parts


def _dot_products(a: Any, b: Any, parts: Sequence[_Part], into: Any) -> None:
    """Put a.a, b.b and a.b of each part's tensor into a row of `into`."""
    with np.errstate(all="ignore"):
        for tensor, start, stop in parts:
            for low in range(start, stop, _BLOCK):
                block = slice(low, min(low + _BLOCK, stop))
                x, y = a[block].astype(np.float64), b[block].astype(np.float64)
                # Not np.dot, whose threads would take the cores from other ranks.
                into[tensor] += [np.einsum("i,i", u, v) for u, v in ((x, x), (y, y), (x, y))]


def _combine(a: Any, b: Any, parts: Sequence[_Part], dots: Any) -> None:
    """Combine the second vector into the first, given the dot products of each tensor."""
    with np.errstate(all="ignore"):
        for tensor, start, stop in parts:
            aa, bb, ab = dots[tensor].tolist()
            # Of a vector without length there is nothing to scale.
            for_a = 1.0 - ab / (2.0 * aa) if aa else 1.0
            for_b = 1.0 - ab / (2.0 * bb) if bb else 1.0
            for low in range(start, stop, _BLOCK):
                block = slice(low, min(low + _BLOCK, stop))
                into, other = a[block], b[block]
                into *= into.dtype.type(for_a)
                into += other * other.dtype.type(for_b)
