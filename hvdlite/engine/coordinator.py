"""The coordinator: matches the requests of all ranks and checks that they agree.

Pure bookkeeping on rank 0 of a process set; the messages are negotiation.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .requests import Key, Kind, News, Reply, Request, Response, display, gathered_rows

__all__ = ["Coordinator", "find_mismatch", "show_ranks"]


@dataclass(slots=True)
class Coordinator:
    """Collects announcements until every rank that takes part has made its own."""

    ranks: Sequence[int]
    """The set's ranks under the numbers that users know, which is what messages show."""
    waiting: dict[Key, dict[int, Request]] = field(default_factory=dict)
    joined: list[int] = field(default_factory=list)

    def digest(self, news: list[News]) -> Reply:
        """Take in what each rank announced and return what is decided now.

        Args:
            news: one message for each rank, in rank order.
        """
        left = tuple((r, m.leaving) for r, m in enumerate(news) if m.leaving is not None)
        touched: dict[Key, None] = {}
        for rank, message in enumerate(news):
            for key, request in message.requests:
                if request.kind is Kind.JOIN:
                    self.joined.append(rank)
                else:
                    self.waiting.setdefault(key, {})[rank] = request
                    touched[key] = None
        if any(request.kind is Kind.JOIN for message in news for _, request in message.requests):
            # With one rank fewer to wait for, anything that waits may have become complete.
            touched = dict.fromkeys(self.waiting)
        responses = [self._match(key) for key in touched if self._complete(key)]
        joined = tuple(self.joined)
        if len(self.joined) == len(self.ranks):
            self.joined.clear()
        announcements = tuple(each for message in news for each in message.announcements)
        return Reply(tuple(responses), joined, left, announcements)

    def _complete(self, key: Key) -> bool:
        announced = self.waiting[key]
        return len(announced) + sum(r not in announced for r in self.joined) == len(self.ranks)

    def _match(self, key: Key) -> Response:
        by_rank = self.waiting.pop(key)
        ranks = sorted(by_rank)
        request = by_rank[ranks[0]]
        error = find_mismatch(key, by_rank, self.ranks)
        absent = [r for r in self.joined if r not in by_rank]
        if error is None and absent:
            error = self._refuse_joined(key, request, absent)
        if error is not None:
            return Response(key, request, error=error)
        # A rank that has joined adds no rows.
        stand_in = request._replace(shapes=tuple((0, *s[1:]) for s in request.shapes))
        return Response(
            key, request, gathered_rows([by_rank.get(r, stand_in) for r in range(len(self.ranks))])
        )

    def _refuse_joined(self, key: Key, request: Request, absent: list[int]) -> str | None:
        name = display(key, request.kind)
        who = show_ranks([self.ranks[r] for r in absent])
        if request.kind is Kind.ALLTOALL:
            return (
                f"alltoall '{name}' cannot run while {who} has joined: "
                "a rank that has joined has nowhere to receive rows."
            )
        if request.kind is Kind.BROADCAST and request.root in absent:
            return (
                f"broadcast '{name}' cannot run: its root rank {self.ranks[request.root]} has "
                "joined and has no tensor to send."
            )
        if request.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
            return f"process sets cannot change while {who} has joined."
        return None


def find_mismatch(key: Key, by_rank: dict[int, Request], ranks: Sequence[int]) -> str | None:
    """Return what the ranks disagree about, with all values and their ranks, or None."""
    first = by_rank[min(by_rank)]
    if all(request == first for request in by_rank.values()):
        return None
    for what, value_of in _CHECKS:
        values: dict[str, list[int]] = {}
        for rank in sorted(by_rank):
            values.setdefault(value_of(by_rank[rank], ranks), []).append(ranks[rank])
        if len(values) > 1:
            kinds = {request.kind for request in by_rank.values()}
            name = display(key, first.kind if len(kinds) == 1 else Kind.ALLREDUCE)
            if not isinstance(key, str) and len(kinds) > 1:
                name = f"noname.{key}"
            sides = "; ".join(f"{v} on {show_ranks(who)}" for v, who in values.items())
            return (
                f"Mismatched {what} for tensor '{name}': {sides}. Every rank must submit the "
                f"same collective under this name{_hint(key)}."
            )
    return None


def _hint(key: Key) -> str:
    if isinstance(key, str):
        return ""
    return (
        "; unnamed collectives are matched by the order of the calls, so give them names if "
        "that differs"
    )


def _each(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _shapes(request: Request) -> str:
    shapes: list[list[object]] = [list(shape) for shape in request.shapes]
    if request.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        # The first dimension may differ; showing it would suggest otherwise.
        shapes = [["*", *shape[1:]] for shape in shapes]
    return _each(
        "(" + ", ".join(map(str, shape)) + ("," * (len(shape) == 1)) + ")" for shape in shapes
    )


def _set_ranks(request: Request) -> str:
    is_change = request.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET)
    return str(list(request.splits)) if is_change else ""


_CHECKS: tuple[tuple[str, Callable[[Request, Sequence[int]], str]], ...] = (
    ("operation", lambda r, _: str(r.kind)),
    ("number of tensors", lambda r, _: str(len(r.shapes))),
    ("data type", lambda r, _: _each(r.dtypes)),
    ("shape", lambda r, _: _shapes(r)),
    ("prescale factor", lambda r, _: str(r.prescale)),
    ("postscale factor", lambda r, _: str(r.postscale)),
    ("reduce op", lambda r, _: str(r.op)),
    ("root rank", lambda r, ranks: str(ranks[r.root])),
    ("process set", lambda r, _: _set_ranks(r)),
)


_RUNS_SHOWN = 20


def show_ranks(ranks: Sequence[int]) -> str:
    """Return 'rank 3' or 'ranks 0-2, 5', short enough to read with hundreds of ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:_RUNS_SHOWN])
    if len(runs) > _RUNS_SHOWN:
        text += f" and {sum(b - a + 1 for a, b in runs[_RUNS_SHOWN:])} more"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
