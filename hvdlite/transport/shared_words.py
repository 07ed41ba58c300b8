"""The all-reduce of a negotiation round among ranks that share memory.

Each rank writes its words to a table of its own and counts the round; once everybody has
counted it, all tables are there to be read. No message has to be passed on by a rank that is
not running, which is what makes rounds slow on a host with more ranks than cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import Pending
from .types import Array

__all__ = ["TABLE_BYTES", "SharedWords"]

_WORDS = 1024
_HEAD = 64
_BYTES = _WORDS * 8
TABLE_BYTES = _HEAD + 2 * _BYTES
"""What each rank needs of its segment."""


class SharedWords:
    """Combines few 64-bit words of all ranks, one round after the other.

    A rank may begin a round before others have read its words of the one before; so there are
    two places, used in turn. It cannot be two rounds ahead, because a round ends when all
    ranks have begun it, and so ended the one before.

    Args:
        rank: this rank.
        tables: `TABLE_BYTES` of every rank's segment, zero at first.
    """

    def __init__(self, rank: int, tables: Sequence[Array]) -> None:
        plain: Sequence[Any] = tables
        counts = [memoryview(table[:8]).cast("q") for table in plain]
        places = [
            [table[_HEAD + i * _BYTES :][:_BYTES].view(np.uint64) for table in plain]
            for i in range(2)
        ]
        self._own_count = counts.pop(rank)
        self._own_places = [place.pop(rank) for place in places]
        self._counts = counts
        self._places = places
        self._round = 0

    def iband(self, words: Array) -> Pending | None:
        """Combine words by bitwise AND, in place; None if they are too many.

        Every rank calls this with equally many words, in the same order.
        """
        size = words.size
        if size > _WORDS:
            return None
        self._round += 1
        place = self._round % 2
        self._own_places[place][:size] = words
        # The last store: whoever sees it sees the words as well.
        self._own_count[0] = self._round
        return _Round(self._counts, self._round, words, self._places[place])


class _Round:
    __slots__ = ("_counts", "_others", "_round", "_words")

    def __init__(
        self,
        counts: Sequence[memoryview[int]],
        number: int,
        words: Array,
        others: Sequence[Array],
    ) -> None:
        self._counts = counts
        self._round = number
        self._words = words
        self._others = others

    def Test(self) -> bool:
        number = self._round
        for count in self._counts:
            if count[0] < number:
                return False
        words: Any = self._words
        for other in self._others:
            words &= other[: words.size]
        self._others = ()
        return True
