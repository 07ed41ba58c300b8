"""The file: Chrome's trace event format, which Perfetto and chrome://tracing open.

Each rank is a process with rows for its batches, its rounds and the callers that wait; the
negotiation of tensors, which overlap, are asynchronous events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RankEvents", "trace_events", "write_trace"]

Event = dict[str, Any]

# Once: json.dumps with separators makes a new encoder each time.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class RankEvents(NamedTuple):
    """What one rank has recorded."""

    rank: int
    offset: float
    """Seconds to add to its times."""
    events: list[tuple[Any, ...]]
    lost: int


_AT_ONCE = 100
"""Events, about a millisecond."""


def write_trace(
    path: str,
    parts: Sequence[RankEvents],
    size: int,
    pause: Callable[[], object] | None = None,
) -> None:
    """Write a timeline, complete or not at all.

    Args:
        path: of the file; folders that are missing are made.
        parts: of all ranks, or of some.
        size: ranks of the job.
        pause: called now and then, to let other threads run.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for i, event in enumerate(trace_events(parts, size)):
                file.write((",\n" if i else "") + _encode(event))
                if pause is not None and i % _AT_ONCE == 0:
                    pause()
            about = {
                "producer": "hvdlite",
                "size": size,
                "ranks": [part.rank for part in parts],
                "lost_events": {str(part.rank): part.lost for part in parts if part.lost},
            }
            file.write('\n], "otherData": ' + json.dumps(about) + "}\n")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def trace_events(parts: Sequence[RankEvents], size: int) -> Iterator[Event]:
    """Yield the events of the file, times in microseconds from the first one."""
    origin = min(
        (_begin(event) + part.offset for part in parts for event in part.events), default=0.0
    )
    submissions = _Submissions(parts, size)
    for part in parts:
        yield from _Rank(part, part.offset - origin, submissions).trace()


def _begin(event: tuple[Any, ...]) -> float:
    return float(event[1] if event[0] == "cycle" else event[2])


class _Submissions:
    """When each rank submitted what, across all parts."""

    def __init__(self, parts: Sequence[RankEvents], size: int) -> None:
        self._times: dict[tuple[str, int, int], dict[int, float]] = {}
        # Rounds of which a rank has events, by process set: it may have lost earlier ones, and
        # sets begin and end at their own rounds.
        self._rounds: dict[int, dict[int, tuple[int, int]]] = {}
        self._is_whole = len(parts) == size
        for part in parts:
            for event in part.events:
                if event[0] == "negotiate":
                    _, name, begin, _, round_, set_id, *_ = event
                    times = self._times.setdefault((name, round_, set_id), {})
                    times[part.rank] = begin + part.offset
                elif event[0] == "move":
                    _, _, _, _, round_, set_id, *_ = event
                else:
                    continue
                rounds = self._rounds.setdefault(set_id, {})
                first, last = rounds.get(part.rank, (round_, round_))
                rounds[part.rank] = min(first, round_), max(last, round_)

    def of(self, name: str, round_: int, set_id: int) -> dict[int, float]:
        """Return the ranks' times of submission."""
        return self._times[name, round_, set_id]

    def is_complete(self, round_: int, set_id: int) -> bool:
        """Whether no rank's submissions in that round are missing."""
        return self._is_whole and all(
            first <= round_ <= last for first, last in self._rounds[set_id].values()
        )


class _Rank:
    """The part of one rank in the file."""

    def __init__(self, part: RankEvents, shift: float, submissions: _Submissions) -> None:
        self._part = part
        self._shift = shift
        self._submissions = submissions
        self._rows: dict[tuple[str, int, int], int] = {}

    def trace(self) -> Iterator[Event]:
        rank = self._part.rank
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for number, event in enumerate(self._part.events):
            what = event[0]
            if what == "negotiate":
                yield from self._negotiation(number, event)
            elif what == "cycle":
                _, begin, end, round_, set_id, ready = event
                row = self._row("rounds", set_id, 0)
                yield self._span(row, "round", begin, end, {"round": round_, "ready": ready})
            elif what == "mark":
                _, text, time = event
                yield {
                    "ph": "i", "name": text, "cat": "mark", "s": "p", "pid": rank, "tid": 0,
                    "ts": self._micro(time),
                }  # fmt: skip
            elif what == "wait":
                _, name, begin, end, thread = event
                row = self._row("waiting", 0, thread)
                yield self._span(row, "wait", begin, end, {"tensor": name})
            else:
                _, names, begin, end, round_, set_id, lane, count, nbytes = event
                args = {
                    "tensors": list(names),
                    "count": count,
                    "bytes": nbytes,
                    "round": round_,
                    "process_set": set_id,
                }
                yield self._span(self._row("batches", set_id, lane), what, begin, end, args)
        yield from self._row_names()

    def _negotiation(self, number: int, event: tuple[Any, ...]) -> Iterator[Event]:
        rank = self._part.rank
        _, name, begin, end, round_, set_id, kind, nbytes = event
        ranks = self._submissions.of(name, round_, set_id)
        first = min(ranks.values())
        args = {
            "kind": kind,
            "bytes": nbytes,
            "round": round_,
            "process_set": set_id,
            "late_ms": round((ranks[rank] - first) * 1e3, 3),
        }
        if self._submissions.is_complete(round_, set_id):
            args["last_rank"] = max(ranks, key=lambda r: ranks[r])
        if rank == min(ranks):
            # Of all ranks, once: on every one of them it would grow with their square.
            args["ready_ms"] = {
                str(r): round((t - first) * 1e3, 3) for r, t in sorted(ranks.items())
            }
        # An identifier of its own across all ranks: viewers join events that share one.
        common = {"name": name, "cat": "negotiate", "id": f"{rank}.{number}", "pid": rank, "tid": 0}
        yield {**common, "ph": "b", "ts": self._micro(begin), "args": args}
        yield {**common, "ph": "e", "ts": self._micro(end)}

    def _span(self, row: int, name: str, begin: float, end: float, args: Event) -> Event:
        ts = self._micro(begin)
        # From rounded times, so that what follows at once does not seem to overlap.
        duration = round(self._micro(end) - ts, 1)
        rank = self._part.rank
        return {
            "ph": "X", "name": name, "pid": rank, "tid": row, "ts": ts, "dur": duration,
            "args": args,
        }  # fmt: skip

    def _micro(self, seconds: float) -> float:
        return round((seconds + self._shift) * 1e6, 1)

    def _row(self, what: str, set_id: int, lane: int) -> int:
        return self._rows.setdefault((what, set_id, lane), len(self._rows) + 1)

    def _row_names(self) -> Iterator[Event]:
        seen: dict[tuple[str, int], int] = {}
        order = ("batches", "rounds", "waiting")
        for what, set_id, lane in sorted(self._rows, key=lambda row: (order.index(row[0]), row)):
            row = self._rows[what, set_id, lane]
            nth = seen[what, set_id] = seen.get((what, set_id), 0) + 1
            name = what + (f" of process set {set_id}" if set_id else "")
            name += f" ({nth})" if nth > 1 else ""
            common = {"ph": "M", "pid": self._part.rank, "tid": row}
            yield {**common, "name": "thread_name", "args": {"name": name}}
            place = 100 * order.index(what) + 2 * set_id + nth
            yield {**common, "name": "thread_sort_index", "args": {"sort_index": place}}
