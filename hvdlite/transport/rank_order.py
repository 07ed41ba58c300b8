"""The order in which the ranks' elements are combined: that of the ranks, whoever does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from . import kernels
from .base import Finish
from .peer_memory import Load
from .types import Array

__all__ = ["InOrder", "combine_in_order"]


def combine_in_order(
    rank: int,
    others: Sequence[int],
    load: Callable[[int, int], Array],
    combine: kernels.Combine,
    add: Callable[[Array], None],
) -> None:
    """Combine one block of every rank.

    Args:
        rank: this rank.
        others: all others, in their order; there is one at least.
        load: returns the block of a rank, which may be overwritten. Its second argument says
            in which of two scratch blocks, if in one: that must keep it until it is next named.
        combine: combines two blocks into the first.
        add: combines a block into this rank's own.
    """
    before = max(1, rank)
    # The first two may change places: what they combine to is the same.
    first = load(others[0], 0)
    for other in others[1:before]:
        combine(first, load(other, 1))
    add(first)
    for other in others[before:]:
        add(load(other, 1))


class InOrder:
    """Combines one block of every rank into this rank's.

    Args:
        rank: this rank.
        others: all others, in their order.
        scratch: two blocks of bytes.
    """

    def __init__(self, rank: int, others: Sequence[int], scratch: Array) -> None:
        self._rank = rank
        self._others = others
        self._scratch = scratch

    def __call__(
        self, own: Array, load: Load, combine: kernels.Combine, finish: Finish | None
    ) -> None:
        """Combine everybody's block in the order of the ranks, into this rank's `own`.

        Args:
            own: holds this rank's block.
            load: gets a rank, how many elements, and memory that it may use for them; returns
                the rank's block, which may be overwritten.
            combine: combines two blocks into the first; silenced here.
            finish: called with the result.
        """
        scratch, count = self._scratch.view(own.dtype), len(own)
        with np.errstate(all="ignore"):
            combine_in_order(
                self._rank,
                self._others,
                lambda other, which: load(other, count, scratch[which]),
                combine,
                lambda there: combine(own, there),
            )
        if finish is not None:
            finish(own)
