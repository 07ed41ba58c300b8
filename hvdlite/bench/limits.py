"""The machine's own limits: how fast its memory copies and adds, by one core and by all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import pooled, size_label
from .jobs import Report
from .records import Table
from .turns import Session

__all__ = ["SIZES", "run", "work"]

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
QUICK_SIZES = (64 << 10, 1 << 20)

_READ_AND_WRITTEN = {"copy": 2, "add": 3}
"""Arrays that cross memory; what a processor reads only to overwrite it is not counted."""


def work(task: dict[str, Any]) -> Report:
    """Measure inside a rank, all ranks at once: bytes read and written per second and rank."""
    samples = {}
    for nbytes in task["sizes"]:
        for what in _READ_AND_WRITTEN:
            samples[f"{what} {size_label(nbytes)}"] = _bandwidth(what, nbytes, task["repeats"])
    return Report(samples)


def _bandwidth(what: str, nbytes: int, repeats: int) -> list[float]:
    from mpi4py import MPI

    one, other = (np.ones(nbytes // 4, dtype=np.float32) for _ in range(2))

    def copy() -> None:
        np.copyto(one, other)

    def add() -> None:
        np.add(one, other, out=one)

    once: Callable[[], None] = {"copy": copy, "add": add}[what]
    once()
    start = time.perf_counter()
    once()
    # Long enough that ranks that share a core take turns on it within one sample.
    times = max(1, int(0.05 / (time.perf_counter() - start)))
    times = MPI.COMM_WORLD.allreduce(times, op=MPI.MAX)
    found = []
    for _ in range(repeats):
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(times):
            once()
        stop = time.perf_counter()
        # All ranks are on one host, where this clock is the same for all.
        first = MPI.COMM_WORLD.allreduce(start, op=MPI.MIN)
        last = MPI.COMM_WORLD.allreduce(stop, op=MPI.MAX)
        found.append(times * nbytes * _READ_AND_WRITTEN[what] / (last - first))
    return found


def run(session: Session) -> None:
    """Measure one rank, and all."""
    sizes = QUICK_SIZES if session.options.quick else SIZES
    labels = {f"{what} {size_label(n)}": n for n in sizes for what in _READ_AND_WRITTEN}
    task = {"sizes": sizes, "repeats": 3 if session.options.quick else 7}
    numbers = sorted({*session.options.ranks, *(() if session.options.quick else (1,))})
    for ranks in numbers:
        session.measure("limits", ranks, {"memory": task}, unit="B/s", sizes=labels)
    rows = []
    for label in labels:
        cells = [label]
        for ranks in numbers:
            found = [r for r in session.results.select("limits", ranks=ranks) if r.what == label]
            cells.append(str(pooled(found[0].turns).scaled(1e-9)) if found else "-")
        rows.append(cells)
    header = ["each rank, GB/s read and written", *(f"np {ranks}" for ranks in numbers)]
    session.show(Table("The memory's limits: median (quartiles)", header, rows))
