"""The order in which the ranks' elements are combined: that of the ranks, whoever does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import kernels
from .types import Array

__all__ = ["combine_in_order"]


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
