"""Operations under way: generators that wait for communications."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from .base import Pending

__all__ = ["Task"]


class Task:
    """A generator and what it waits for; as something to wait for, it completes at its end."""

    __slots__ = ("_generator", "finished", "pending", "result")

    def __init__(self, generator: Generator[Pending, None, Any]) -> None:
        self._generator = generator
        self.pending: Pending | None = None
        self.finished = False
        self.result: Any = None

    def advance(self, tests: int = 1) -> bool:
        """Resume as often as what it waits for has completed; return whether it was.

        Args:
            tests: how often to test what it waits for before giving up.
        """
        moved = False
        while not self.finished and (self.pending is None or _completes(self.pending, tests)):
            moved = True
            try:
                self.pending = next(self._generator)
            except StopIteration as end:
                self.finished, self.result = True, end.value
        return moved

    def Test(self) -> bool:
        return self.finished


def _completes(pending: Pending, tests: int) -> bool:
    # No generator: this is where a waiting caller spends its time.
    for _ in range(tests):  # noqa: SIM110
        if pending.Test():
            return True
    return False
