"""The response cache: one bit for each request that all ranks have agreed on before.

Every rank changes its cache in the same order, driven by what the rounds answer, so the
positions of the bits are the same everywhere without being talked about.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from .requests import Request, Response

__all__ = ["CachedResponse", "ResponseCache"]


@dataclass(slots=True, eq=False)
class CachedResponse:
    """A response that needs no negotiation any more, as long as this rank's request is `mine`."""

    slot: int
    response: Response
    mine: Request


class ResponseCache:
    """Least-recently-used map of names to agreed responses, with a small integer for each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._by_name: OrderedDict[str, CachedResponse] = OrderedDict()
        self._by_slot: dict[int, CachedResponse] = {}
        self._free: list[int] = []
        self.slots = 0
        """Slots ever used: the width of the bit vectors."""

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> CachedResponse | None:
        """Return what is cached under a name, without counting it as a use."""
        return self._by_name.get(name)

    def use(self, slots: Iterable[int], waiting: dict[int, str]) -> list[Response]:
        """Return the responses of slots, which become the most recently used.

        Args:
            waiting: the names that this rank waits for, by slot; those of `slots` are removed.
        """
        by_slot, most_recent = self._by_slot, self._by_name.move_to_end
        responses = []
        for slot in slots:
            most_recent(waiting.pop(slot))
            responses.append(by_slot[slot].response)
        return responses

    def insert(self, response: Response, mine: Request) -> str | None:
        """Remember a response.

        Returns:
            The name that had to make room for it, if any.
        """
        name = response.key
        if self.capacity == 0 or not isinstance(name, str):
            return None
        if name in self._by_name:
            self.evict(self._by_name[name].slot)
        evicted: str | None = None
        if len(self._by_name) >= self.capacity:
            evicted, oldest = next(iter(self._by_name.items()))
            self.evict(oldest.slot)
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self.slots
            self.slots += 1
        cached = CachedResponse(slot, response, mine)
        self._by_name[name] = cached
        self._by_slot[slot] = cached
        return evicted

    def evict(self, slot: int) -> None:
        """Forget a slot."""
        del self._by_name[_name(self._by_slot.pop(slot))]
        heapq.heappush(self._free, slot)


def _name(cached: CachedResponse) -> str:
    assert isinstance(cached.response.key, str)
    return cached.response.key
