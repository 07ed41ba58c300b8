"""Many tensors at once: the 161 gradients of ResNet-50, and 500 tensors of 64 floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arithmetic import fraction_of_limit, nearest, paired, pooled
from .jobs import Report
from .records import Record, Table, shown
from .turns import Session

__all__ = ["ratio_table", "resnet50_shapes", "run", "work"]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters in backward order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    shapes += [(1000, 2048), (1000,)]
    return shapes[::-1]


SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "161 gradients of ResNet-50": resnet50_shapes,
    "500 tensors of 64 floats": lambda: [(64,)] * 500,
    "50 tensors of 64 floats": lambda: [(64,)] * 50,
}


def work(task: dict[str, Any]) -> Report:
    """Measure one peer, inside a rank."""
    from .peers import make
    from .timing import repeat

    peer = make(task["peer"])
    samples = {}
    for name in task["sets"]:
        arrays = [np.full(shape, 0, dtype=np.float32) for shape in SETS[name]()]
        samples[name] = repeat(peer.many(arrays), task["seconds"], least=8)
    peer.close()
    return Report(samples)


def run(session: Session) -> None:
    """Measure all peers, and print tables."""
    options = session.options
    sets = list(SETS)[2:] if options.quick else list(SETS)[:2]
    sizes = {name: 4 * sum(map(math.prod, SETS[name]())) for name in sets}
    for ranks in options.ranks:
        peers = session.peers("many", ["hvdlite", "gloo", "mpi"], "module:")
        task = {"sets": sets, "seconds": 0.2 if options.quick else 3.0}
        records = session.measure("many", ranks, dict.fromkeys(peers, task), sizes=sizes)
        table = ratio_table(f"Many tensors, np {ranks}", records, scale=1e3, unit="ms")
        limits = session.results.limits(ranks)
        if limits and ranks > 1 and not options.quick:
            table.header.append("hvdlite, fraction of the memory's limit")
            for row in table.rows:
                row.append(_fraction(records, row[0], limits))
        session.show(table)


def _fraction(records: Sequence[Record], what: str, limits: dict[int, float]) -> str:
    for record in records:
        nbytes = record.nbytes
        if record.what == what and record.peer == "hvdlite" and nbytes and nbytes >= 1 << 20:
            seconds = pooled(record.turns).median
            return f"{fraction_of_limit(nbytes, nearest(limits, nbytes), seconds):.2f}"
    return "-"


def ratio_table(
    title: str, records: Sequence[Record], *, scale: float, unit: str, base: str = "hvdlite"
) -> Table:
    """Return a table of medians with quartiles, and every other peer's ratio to `base`.

    Args:
        title: what is measured.
        records: of all peers.
        scale: from seconds to `unit`.
        unit: in which times are shown.
        base: the peer that divides.
    """
    by_what: dict[str, dict[str, Record]] = {}
    for record in records:
        by_what.setdefault(record.what, {})[record.peer] = record
    peers = list(dict.fromkeys(record.peer for record in records))
    others = [peer for peer in peers if peer != base]
    header = [
        "",
        *(f"{shown(p)}, {unit}" for p in peers),
        *(f"{shown(p)} / {base}" for p in others),
    ]
    rows = []
    for what, row in by_what.items():
        cells = [str(pooled(row[p].turns).scaled(scale)) if p in row else "-" for p in peers]
        cells += [
            str(paired(row[p].turns, row[base].turns)) if p in row and base in row else "-"
            for p in others
        ]
        rows.append([what, *cells])
    return Table(f"{title}: median (quartiles)", header, rows)
