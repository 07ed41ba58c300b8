"""What a timeline says: slow tensors, straggling ranks, and communication that costs time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .intervals import Intervals, length, subtract, union

__all__ = ["Batches", "RankTimes", "Report", "TensorTimes", "analyse", "load", "main"]


@dataclass
class TensorTimes:
    """Where the time of a tensor went, on average over the times that it was reduced."""

    name: str
    kind: str
    count: int
    nbytes: int
    straggling_ms: float
    """From its first submission by any rank to the last one."""
    agreeing_ms: float
    """From the last submission until the ranks knew that all of them had submitted it."""
    moving_ms: float
    """In the transport operation that carried it, with all else that travelled along."""
    total_ms: float
    """From the first submission until it had been moved."""
    slowest_ms: float
    """The same, the worst time."""


@dataclass
class RankTimes:
    """What one rank did, in milliseconds of wall clock."""

    rank: int
    last: int = 0
    """How often it was the last to submit a tensor, of those where that is known."""
    known: int = 0
    mean_late_ms: float = 0.0
    """When it was the last: after the last but one."""
    max_late_ms: float = 0.0
    held_up_ms: float = 0.0
    """Time in which something waited for this rank alone."""
    negotiating_ms: float = 0.0
    """Time in which any of its tensors was not agreed on."""
    moving_ms: float = 0.0
    """Time in which any transport operation was in progress."""
    packing_ms: float = 0.0
    waiting_ms: float = 0.0
    """Time in which any caller was blocked."""
    hidden: float | None = None
    """The share of moving during which no caller was blocked; None if nothing moved."""
    moving: Intervals = field(default_factory=list, repr=False)
    waiting: Intervals = field(default_factory=list, repr=False)


@dataclass
class Batches:
    """What tensor fusion did, on the first rank of the file."""

    count: int
    tensors: int
    nbytes: int
    most_tensors: int
    largest: int
    sizes: list[tuple[int, int, float]] = field(default_factory=list, repr=False)
    """Of each batch: tensors, bytes, milliseconds of moving."""


@dataclass
class Report:
    """All that is said about one file."""

    size: int
    ranks: list[RankTimes]
    duration_ms: float
    lost_events: int
    tensors: list[TensorTimes]
    """The slowest first."""
    batches: Batches


def load(path: str | Path) -> dict[str, Any]:
    """Return the document in a timeline file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no timeline of hvdlite.
    """
    try:
        document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no timeline: it is not JSON ({error})") from None
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("producer") != "hvdlite":
        raise ValueError(f"{path} is no timeline of hvdlite")
    return document


def analyse(document: dict[str, Any]) -> Report:
    """Sum up the document of a timeline file."""
    about, events = document["otherData"], document["traceEvents"]
    ranks = {rank: RankTimes(rank) for rank in about["ranks"]}
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            spans["end" if event["ph"] == "e" else event.get("cat", event["name"])].append(event)
    ends = {event["id"]: event["ts"] for event in spans["end"]}
    for times in ranks.values():
        _measure(times, spans, ends)
    uses = _uses(spans, ends)
    _find_stragglers(ranks, uses)
    last = max((e["ts"] + e.get("dur", 0.0) for e in events if "ts" in e), default=0.0)
    return Report(
        about["size"],
        [ranks[rank] for rank in sorted(ranks)],
        last / 1e3,
        sum(about["lost_events"].values()),
        _tensors(uses),
        _batches(spans["move"], min(ranks, default=0)),
    )


def _of(events: list[dict[str, Any]], rank: int) -> Intervals:
    return union((e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == rank)


def _measure(rank: RankTimes, spans: dict[str, list[dict[str, Any]]], ends: Any) -> None:
    moving, waiting = _of(spans["move"], rank.rank), _of(spans["wait"], rank.rank)
    negotiating = union(
        (e["ts"], ends[e["id"]]) for e in spans["negotiate"] if e["pid"] == rank.rank
    )
    packing = _of([*spans["pack"], *spans["unpack"]], rank.rank)
    rank.moving, rank.waiting = moving, waiting
    rank.negotiating_ms = length(negotiating) / 1e3
    rank.moving_ms = length(moving) / 1e3
    rank.packing_ms = length(packing) / 1e3
    rank.waiting_ms = length(waiting) / 1e3
    if moving:
        rank.hidden = length(subtract(moving, waiting)) / length(moving)


@dataclass
class _Use:
    """One collective on one tensor: what all ranks' events say about it, in microseconds."""

    name: str
    kind: str
    nbytes: int
    submitted: dict[int, float]
    last_rank: int | None
    agreed: float
    moved: tuple[float, float] | None = None


def _uses(spans: dict[str, list[dict[str, Any]]], ends: dict[str, float]) -> list[_Use]:
    uses: dict[tuple[str, int, int], _Use] = {}
    for event in spans["negotiate"]:
        args = event["args"]
        key = event["name"], args["round"], args["process_set"]
        agreed = ends[event["id"]]
        use = uses.get(key)
        if use is None:
            use = _Use(key[0], args["kind"], args["bytes"], {}, args.get("last_rank"), agreed)
            uses[key] = use
        use.submitted[event["pid"]] = event["ts"]
        use.agreed = max(use.agreed, agreed)
    for event in spans["move"]:
        args = event["args"]
        begin, end = event["ts"], event["ts"] + event["dur"]
        for name in args["tensors"]:
            use = uses.get((name, args["round"], args["process_set"]))
            if use is not None:
                before = use.moved or (begin, end)
                use.moved = min(begin, before[0]), max(end, before[1])
    return list(uses.values())


def _find_stragglers(ranks: dict[int, RankTimes], uses: list[_Use]) -> None:
    late: dict[int, Intervals] = defaultdict(list)
    for use in uses:
        if use.last_rank is None or len(use.submitted) < 2:
            continue
        for number in use.submitted:
            ranks[number].known += 1
        times = sorted(use.submitted.values())
        late[use.last_rank].append((times[-2], times[-1]))
    for number, intervals in late.items():
        rank = ranks[number]
        lengths = [end - begin for begin, end in intervals]
        rank.last = len(intervals)
        rank.mean_late_ms = sum(lengths) / len(lengths) / 1e3
        rank.max_late_ms = max(lengths) / 1e3
        rank.held_up_ms = length(union(intervals)) / 1e3


def _tensors(uses: list[_Use]) -> list[TensorTimes]:
    by_name: dict[str, list[_Use]] = defaultdict(list)
    for use in uses:
        # Unnamed ones have a number of their own each time.
        name, _, number = use.name.rpartition(".")
        by_name[name if name.endswith(".noname") and number.isdigit() else use.name].append(use)
    found = []
    for name, of_name in by_name.items():
        first = [min(use.submitted.values()) for use in of_name]
        last = [max(use.submitted.values()) for use in of_name]
        agreed = [max(use.agreed, end) for use, end in zip(of_name, last, strict=True)]
        moves = [use.moved for use in of_name if use.moved is not None]
        ends = [use.moved[1] if use.moved else use.agreed for use in of_name]
        totals = [end - begin for begin, end in zip(first, ends, strict=True)]
        count = len(of_name)
        found.append(
            TensorTimes(
                name,
                of_name[0].kind,
                count,
                max(use.nbytes for use in of_name),
                sum(b - a for a, b in zip(first, last, strict=True)) / count / 1e3,
                sum(b - a for a, b in zip(last, agreed, strict=True)) / count / 1e3,
                sum(b - a for a, b in moves) / max(len(moves), 1) / 1e3,
                sum(totals) / count / 1e3,
                max(totals) / 1e3,
            )
        )
    return sorted(found, key=lambda tensor: (-tensor.total_ms, tensor.name))


def _batches(moves: list[dict[str, Any]], rank: int) -> Batches:
    mine = [event for event in moves if event["pid"] == rank]
    sizes = [(e["args"]["count"], e["args"]["bytes"], e["dur"] / 1e3) for e in mine]
    return Batches(
        len(sizes),
        sum(tensors for tensors, _, _ in sizes),
        sum(nbytes for _, nbytes, _ in sizes),
        max((tensors for tensors, _, _ in sizes), default=0),
        max((nbytes for _, nbytes, _ in sizes), default=0),
        sizes,
    )


def _as_json(report: Report) -> str:
    values = dataclasses.asdict(report)
    for rank in values["ranks"]:
        del rank["moving"], rank["waiting"]
    del values["batches"]["sizes"]
    return json.dumps(values, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hvdlite timeline`; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="hvdlite timeline",
        description="Sum up a timeline: slow tensors, straggling ranks, hidden communication.",
    )
    parser.add_argument("file", help="what start_timeline or HVDLITE_TIMELINE has written")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="tensors shown (10)")
    parser.add_argument("--html", metavar="OUT", help="write a page with plots, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args(argv)
    from .page import page
    from .text import show

    try:
        report = analyse(load(arguments.file))
        if arguments.html is not None:
            text = page(report, Path(arguments.file).name, arguments.top)
            Path(arguments.html).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"hvdlite timeline: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(_as_json(report))
    else:
        show(report, max(arguments.top, 0))
    if arguments.html is not None and not arguments.json:
        print(f"Plots: {arguments.html}")
    return 0
