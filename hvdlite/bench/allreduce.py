"""Blocking in-place sums, 4 B to 256 MiB, in float32, float16 and bfloat16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..transport.types import DType
from .arithmetic import (
    best,
    bus_bandwidth,
    fraction_of_limit,
    nearest,
    number,
    paired,
    pooled,
    size_label,
)
from .jobs import Report
from .machine import available_memory
from .records import Record, Table, shown
from .turns import Session, installed

__all__ = ["DTYPES", "OWN", "SIZES", "run", "tables", "work"]

SIZES = (4, *(1 << n for n in (10, 14, 16, 18, 20, 22, 24, 26, 28)))
QUICK_SIZES = (4, 64 << 10, 1 << 20)
DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)

OWN = ("hvdlite", "hvdlite-resident", "hvdlite-parts", "transport", "transport-ordinary")
"""What hvdlite offers; everything else is a rival."""

_FROM = 64 << 10
"""Smaller messages are a matter of latency: to divide them by a bandwidth says nothing."""


def work(task: dict[str, Any]) -> Report:
    """Measure one peer and element type, inside a rank."""
    from .peers import check, make
    from .timing import repeat

    dtype = DType[task["case"].upper()]
    if dtype is not DType.FLOAT32 and installed("torch"):
        import torch  # with which hvdlite's 16-bit sums are fast, as in training

        torch.set_num_threads(1)
    peer = make(task["peer"])
    samples = {}
    for nbytes in task["sizes"]:
        array = peer.allocate(nbytes).view(dtype.storage)
        step = peer.blocking(array, dtype)
        check(step, array, dtype)
        samples[size_label(nbytes)] = repeat(step, task["seconds"])
        del array, step
    peer.close()
    return Report(samples)


def run(session: Session) -> None:
    """Measure all peers, and print tables."""
    options = session.options
    sizes = QUICK_SIZES if options.quick else SIZES
    for ranks in options.ranks:
        # The array itself, copies that a peer makes, and room for the machine.
        possible = [n for n in sizes if 6 * n * ranks <= available_memory()]
        if len(possible) < len(sizes):
            largest = size_label(max(possible))
            session.skip("allreduce", ranks, f"above {largest}", "the machine's memory")
        for dtype in DTYPES[: 1 if options.quick else None]:
            if options.dtypes and str(dtype) not in options.dtypes:
                continue
            peers = session.peers("allreduce", [*OWN, "mpi", "gloo"], "module:")
            if dtype is not DType.FLOAT32:
                peers = [peer for peer in peers if not peer.startswith("mpi")]
            if ranks == 1:
                peers = [peer for peer in peers if peer not in OWN[1:]]
            task = {"sizes": possible, "seconds": 0.1 if options.quick else 0.5}
            records = session.measure(
                "allreduce",
                ranks,
                dict.fromkeys(peers, task),
                case=str(dtype),
                sizes={size_label(n): n for n in possible},
            )
            for table in tables(records, session.results.limits(ranks)):
                session.show(table)


def tables(records: Sequence[Record], limits: Mapping[int, float]) -> list[Table]:
    """Return the times, and what follows from them, of one number of ranks and element type.

    Args:
        records: of all peers.
        limits: bytes per second that the memory gives each rank, by size; may be empty.
    """
    by_what: dict[str, dict[str, Record]] = {}
    for record in records:
        by_what.setdefault(record.what, {})[record.peer] = record
    peers = list(dict.fromkeys(record.peer for record in records))
    if not peers:
        return []
    where = f"{records[0].case}, np {records[0].ranks}"
    times = Table(f"All-reduce, {where}: ms, median (quartiles)", ["bytes", *map(shown, peers)], [])
    for what, row in by_what.items():
        cells = [str(pooled(row[p].turns).scaled(1e3)) if p in row else "-" for p in peers]
        times.rows.append([what, *cells])
    rivals = [peer for peer in peers if peer not in OWN]
    own = [peer for peer in peers if peer in OWN]
    pairs = [([rival], mine) for mine in own[:1] for rival in rivals]
    pairs += [(rivals, mine) for mine in own] if len(rivals) > 1 else []
    ratios = Table(
        f"All-reduce, {where}: time of a rival / time of hvdlite (above 1: hvdlite is faster)",
        [
            "bytes",
            *(f"{shown(r[0]) if len(r) == 1 else 'best of them'} / {mine}" for r, mine in pairs),
        ],
        [],
    )
    speeds = Table(
        f"All-reduce, {where}: bus bandwidth, GB/s (fraction of the memory's limit)",
        ["bytes", *map(shown, peers)],
        [],
    )
    for what, row in by_what.items():
        ratios.rows.append([what, *(_ratio(row, some, mine) for some, mine in pairs)])
        nbytes = next(iter(row.values())).nbytes
        if nbytes is not None and nbytes >= _FROM and records[0].ranks > 1:
            cells = [_speed(row[peer], nbytes, limits) if peer in row else "-" for peer in peers]
            speeds.rows.append([what, *cells])
    return [times, *([ratios] if pairs else []), speeds]


def _ratio(row: Mapping[str, Record], rivals: Sequence[str], mine: str) -> str:
    there = [row[rival].turns for rival in rivals if rival in row]
    return str(paired(best(there), row[mine].turns)) if there and mine in row else "-"


def _speed(record: Record, nbytes: int, limits: Mapping[int, float]) -> str:
    seconds = pooled(record.turns).median
    text = number(bus_bandwidth(nbytes, record.ranks, seconds) / 1e9)
    if limits:
        part = fraction_of_limit(nbytes, nearest(limits, nbytes), seconds)
        text += f" ({part:.2f})"
    return text
