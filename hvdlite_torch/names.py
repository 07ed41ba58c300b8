"""Names of parameters and of optimizers that mean the same on every rank."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

__all__ = ["Label", "clean_names"]


def clean_names(names: Sequence[str]) -> list[str]:
    """Drop what wrappers put into names: torch.compile's `_orig_mod.`, a leading `module.`.

    Ranks may wrap differently (only one of them compiles, say) and still have to agree. Names
    that would no longer be distinct are all left as they are.
    """
    cleaned = [_clean(name) for name in names]
    return cleaned if len(set(cleaned)) == len(set(names)) else list(names)


def _clean(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


class Label:
    """The name of an optimizer.

    A copy gets a number of its own when it is first used: one that a single rank makes, to
    save it, say, must not shift the numbers of those that all ranks use.
    """

    def __init__(self, text: str, is_copy: bool = False) -> None:
        self._text = text
        self._is_copy = is_copy

    def __str__(self) -> str:
        if self._is_copy:
            self._text = f"{self._text}.copy.{next(_copies[self._text])}"
            self._is_copy = False
        return self._text


_copies: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
