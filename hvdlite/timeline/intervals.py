"""Sets of times, as sorted lists of intervals that don't touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Intervals", "length", "subtract", "union"]

Intervals: TypeAlias = "list[tuple[float, float]]"


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the times that any of the intervals covers."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Intervals) -> float:
    """Return how much time a set covers."""
    return sum(end - begin for begin, end in intervals)


def subtract(these: Intervals, those: Intervals) -> Intervals:
    """Return the times in the first set and not in the second."""
    left: Intervals = []
    at = 0
    for begin, end in these:
        while at < len(those) and those[at][1] <= begin:
            at += 1
        i = at
        while i < len(those) and those[i][0] < end:
            if those[i][0] > begin:
                left.append((begin, those[i][0]))
            begin = max(begin, those[i][1])
            i += 1
        if begin < end:
            left.append((begin, end))
    return left
