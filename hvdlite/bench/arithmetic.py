"""What becomes of samples: quartiles, ratios, bandwidths, and how numbers are written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "Quartiles",
    "best",
    "bus_bandwidth",
    "fraction_of_limit",
    "nearest",
    "number",
    "paired",
    "pooled",
    "quartiles",
    "size_label",
]


class Quartiles(NamedTuple):
    """A median and the quarter of the samples on either side of it."""

    low: float
    median: float
    high: float

    def scaled(self, factor: float) -> Quartiles:
        """Return the same in another unit."""
        return Quartiles(*(value * factor for value in self))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


def quartiles(samples: Sequence[float]) -> Quartiles:
    """Return the median of some samples with its quartiles.

    Raises:
        ValueError: there are none.
    """
    if not samples:
        raise ValueError("no samples, no median")
    if len(samples) == 1:
        return Quartiles(samples[0], samples[0], samples[0])
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Quartiles(low, middle, high)


def pooled(turns: Sequence[Sequence[float]]) -> Quartiles:
    """Return the median and quartiles of the samples of all turns."""
    return quartiles([sample for turn in turns for sample in turn])


def paired(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Quartiles:
    """Return the ratio of two peers, turn by turn.

    The machine drifts, so that only medians of one turn can be compared.

    Args:
        above: samples by turn.
        below: samples of the same turns; empty where a turn failed.

    Returns:
        Median and quartiles, over the turns that both have, of the ratio of the medians.

    Raises:
        ValueError: they have no turn in common.
    """
    return quartiles(
        [
            statistics.median(one) / statistics.median(other)
            for one, other in zip(above, below, strict=False)
            if one and other
        ]
    )


def bus_bandwidth(nbytes: int, ranks: int, seconds: float) -> float:
    """Return bytes per second that each rank must send in an all-reduce, whatever it does.

    2(n-1)/n of the bytes, which makes figures of different numbers of ranks comparable
    (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009). 0 on one rank.
    """
    return 2 * (ranks - 1) / ranks * nbytes / seconds


def fraction_of_limit(nbytes: int, bandwidth: float, seconds: float) -> float:
    """Return which part of the memory's speed an in-place all-reduce reaches.

    Each rank's bytes must be read and written at least once, whoever does it.

    Args:
        nbytes: of each rank's array.
        bandwidth: bytes read and written per second and rank, with all ranks active.
        seconds: that the all-reduce took.
    """
    return 2 * nbytes / bandwidth / seconds


def best(peers: Sequence[Sequence[Sequence[float]]]) -> list[Sequence[float]]:
    """Return, for every turn, the samples of the peer that was the fastest in it.

    Args:
        peers: samples by turn, of every peer; empty where a turn failed.
    """
    return [
        min((samples for samples in turn if samples), key=statistics.median, default=())
        for turn in zip(*peers, strict=True)
    ]


def nearest(limits: Mapping[int, float], nbytes: int) -> float:
    """Return the value measured at the size nearest to one, by ratio."""
    return limits[min(limits, key=lambda size: abs(math.log(size / nbytes)))]


def number(value: float) -> str:
    """Write a number with three digits and without an exponent."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    # To three digits first: that may be what makes a number longer (9.999).
    value = float(f"{value:.2e}")
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, digits)}f}"


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def size_label(nbytes: int) -> str:
    """Write a size in the largest unit that divides it."""
    for unit, name in _UNITS:
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
