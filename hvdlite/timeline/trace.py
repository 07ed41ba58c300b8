"""The file: Chrome's trace event format, which Perfetto and chrome://tracing open.

Each rank is a process with rows for its batches, its rounds and the callers that wait; the
negotiation of tensors, which overlap, are asynchronous events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RankEvents", "trace_events", "write_trace"]

_LANES, _ROUNDS, _WAITS = 1, 8, 9
"""Rows of a rank."""

Event = dict[str, Any]


class RankEvents(NamedTuple):
    """What one rank has recorded."""

    rank: int
    offset: float
    """Seconds to add to its times."""
    events: list[tuple[Any, ...]]
    lost: int


def write_trace(path: str, parts: Sequence[RankEvents]) -> None:
    """Write the timeline of all ranks, complete or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for i, event in enumerate(trace_events(parts)):
            file.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
        lost = {str(part.rank): part.lost for part in parts if part.lost}
        about = {"producer": "hvdlite", "ranks": len(parts), "lost_events": lost}
        file.write('\n], "otherData": ' + json.dumps(about) + "}\n")
    unfinished.replace(target)


def trace_events(parts: Sequence[RankEvents]) -> Iterator[Event]:
    """Yield the events of the file, times in microseconds from the first one."""
    origin = min(
        (_begin(event) + part.offset for part in parts for event in part.events), default=0.0
    )
    submitted = _submissions(parts)
    for part in parts:
        shift = part.offset - origin
        yield from _rows(part.rank)
        for number, event in enumerate(part.events):
            kind = event[0]
            if kind == "negotiate":
                yield from _negotiation(part.rank, number, event, shift, submitted)
            elif kind == "cycle":
                _, begin, end, round_, ready = event
                args = {"round": round_, "ready": ready}
                yield _span(part.rank, _ROUNDS, "round", begin + shift, end - begin, args)
            elif kind == "wait":
                _, name, begin, end = event
                yield _span(part.rank, _WAITS, "wait", begin + shift, end - begin, {"tensor": name})
            else:
                _, names, begin, end, round_, lane, nbytes = event
                args = {"tensors": list(names), "bytes": nbytes, "round": round_}
                yield _span(part.rank, _LANES + lane, kind, begin + shift, end - begin, args)


def _begin(event: tuple[Any, ...]) -> float:
    return float(event[1] if event[0] == "cycle" else event[2])


_Key = tuple[str, int, int]


def _submissions(parts: Sequence[RankEvents]) -> dict[_Key, dict[int, float]]:
    """Return when each rank submitted each tensor, by name, round and process set."""
    times: dict[_Key, dict[int, float]] = {}
    for part in parts:
        for event in part.events:
            if event[0] == "negotiate":
                _, name, begin, _, round_, set_id, *_ = event
                times.setdefault((name, round_, set_id), {})[part.rank] = begin + part.offset
    return times


def _negotiation(
    rank: int,
    number: int,
    event: tuple[Any, ...],
    shift: float,
    submitted: dict[_Key, dict[int, float]],
) -> Iterator[Event]:
    _, name, begin, end, round_, set_id, kind, nbytes = event
    ranks = submitted[name, round_, set_id]
    first = min(ranks.values())
    args = {
        "kind": kind,
        "bytes": nbytes,
        "round": round_,
        "process_set": set_id,
        "ready_ms": {str(r): round((t - first) * 1e3, 3) for r, t in sorted(ranks.items())},
        "last_rank": max(ranks, key=lambda r: ranks[r]),
    }
    common = {"name": name, "cat": "negotiate", "id": number, "pid": rank, "tid": 0}
    yield {**common, "ph": "b", "ts": _micro(begin + shift), "args": args}
    yield {**common, "ph": "e", "ts": _micro(end + shift)}


def _rows(rank: int) -> Iterator[Event]:
    names = {_LANES: "batches", _LANES + 1: "batches (2)", _ROUNDS: "rounds", _WAITS: "waiting"}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for row, name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}


def _span(rank: int, row: int, name: str, begin: float, length: float, args: Event) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": row,
        "ts": _micro(begin),
        "dur": _micro(length),
        "args": args,
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 1)
