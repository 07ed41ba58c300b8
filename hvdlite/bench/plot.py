"""The picture: bus bandwidth by size, a line for each peer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .arithmetic import bus_bandwidth, pooled
from .records import Record, Results, shown

__all__ = ["curves", "plot"]

Curve = list[tuple[int, float, float, float]]
"""Bytes, then lower quartile, median and upper quartile of the bandwidth in GB/s."""


def curves(records: Sequence[Record]) -> dict[str, Curve]:
    """Return a curve for each peer of one number of ranks and element type."""
    found: dict[str, Curve] = {}
    for record in records:
        if record.nbytes and record.ranks > 1 and any(record.turns):
            seconds = pooled(record.turns)
            # The slowest quarter of the times is the lowest quarter of the bandwidths.
            low, middle, high = (
                bus_bandwidth(record.nbytes, record.ranks, time) / 1e9 for time in seconds[::-1]
            )
            found.setdefault(record.peer, []).append((record.nbytes, low, middle, high))
    return {peer: sorted(curve) for peer, curve in found.items()}


def plot(results: Results, path: Path) -> str | None:
    """Draw all-reduce figures into a PNG.

    Returns:
        Why there is none; None if there is.
    """
    panels: dict[tuple[str, int], dict[str, Curve]] = {}
    for record in results.select("allreduce"):
        if record.ranks > 1:
            key = record.case, record.ranks
            panels[key] = curves(results.select("allreduce", *key))
    if not panels:
        return "there are no all-reduces on several ranks to draw"
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return "matplotlib is not installed (pip install 'hvdlite[bench]')"
    cases = list(dict.fromkeys(case for case, _ in panels))
    numbers = sorted({ranks for _, ranks in panels})
    figure, axes = pyplot.subplots(
        len(cases),
        len(numbers),
        figsize=(6.5 * len(numbers), 4.2 * len(cases)),
        squeeze=False,
        layout="constrained",
    )
    peers = list(dict.fromkeys(peer for panel in panels.values() for peer in panel))
    colours = {peer: f"C{number}" for number, peer in enumerate(peers)}
    for y, case in enumerate(cases):
        for x, ranks in enumerate(numbers):
            panel = panels.get((case, ranks), {})
            _draw(axes[y][x], panel, colours, f"{case}, np {ranks}", _roof(results, ranks))
    figure.suptitle(f"All-reduce in place: {results.about.get('machine', {}).get('processor', '')}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def _roof(results: Results, ranks: int) -> dict[int, float]:
    """Return the bus bandwidth, GB/s, that the memory's speed allows, by size."""
    return {
        nbytes: bus_bandwidth(nbytes, ranks, 2 * nbytes / limit) / 1e9
        for nbytes, limit in sorted(results.limits(ranks).items())
    }


def _draw(
    axes: Any,
    panel: Mapping[str, Curve],
    colours: Mapping[str, str],
    title: str,
    roof: Mapping[int, float],
) -> None:
    for peer, curve in panel.items():
        sizes, low, middle, high = zip(*curve, strict=True)
        axes.plot(sizes, middle, marker="o", markersize=3, label=shown(peer), color=colours[peer])
        axes.fill_between(sizes, low, high, alpha=0.15, color=colours[peer], linewidth=0)
    if roof:
        axes.plot(list(roof), list(roof.values()), "k--", linewidth=1, label="memory's limit")
    axes.set(title=title, xlabel="bytes", ylabel="bus bandwidth, GB/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
