"""The stall inspector: when something waits too long, find out who is missing what.

A rank that has waited too long asks rank 0 of the set; rank 0 asks every rank what it has
submitted, and puts the answers together into one warning. These messages are apart from the
rounds, which are the very thing that may be stuck, and are answered by the engine's thread
even while the training thread does something else.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..log import logger
from ..transport.base import Communicator, Operation, Pending
from ..transport.types import Array
from .coordinator import show_ranks
from .negotiation import receive

__all__ = ["StallInspector", "StallLimits", "Waiting", "describe_stall"]

_ASK, _QUERY, _ANSWER, _END = 11, 12, 13, 14
_TICK = 0.1
_ANSWER_TIME = 5.0
_NAMES_SHOWN = 8
_GROUPS_SHOWN = 6

Waiting: TypeAlias = "dict[str, float]"
"""What a rank waits for: names and the seconds since it submitted them."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """After how many seconds to warn, and to give up (0: never)."""

    warning: float
    shutdown: float

    @property
    def patience(self) -> float:
        """Seconds after which to find out what is going on."""
        return min(self.warning, self.shutdown) if self.shutdown else self.warning


class _At:
    """Completes when the clock has reached a time."""

    def __init__(self, clock: Callable[[], float], when: float) -> None:
        self._clock, self._when = clock, when

    def Test(self) -> bool:
        return self._clock() >= self._when


class StallInspector:
    """Watches one process set on one rank. Drive `watch()` like a transport operation."""

    def __init__(
        self,
        comm: Communicator,
        ranks: Sequence[int],
        limits: StallLimits,
        waiting: Callable[[], Waiting],
        clock: Callable[[], float],
    ) -> None:
        self.verdict: str | None = None
        """Why the job has to end, once that is so."""
        self._comm = comm
        self._ranks = ranks
        self._limits = limits
        self._waiting = waiting
        self._clock = clock
        self._sending: list[tuple[Pending, Array]] = []

    def watch(self) -> Operation[None]:
        """Watch until there is a verdict."""
        yield from self._lead() if self._comm.rank == 0 else self._follow()

    def _send(self, content: Any, dest: int, tag: int) -> None:
        # Nobody waits for these: a peer that is stuck must not hold up the one who asks.
        data = np.frombuffer(pickle.dumps(content), dtype=np.uint8)
        self._sending = [item for item in self._sending if not item[0].Test()]
        self._sending.append((self._comm.isend(data, dest, tag), data))

    def _take(self, source: int, tag: int) -> Operation[Any]:
        """Return the content of a message, or None while there is none."""
        if self._comm.probe(source, tag) is None:
            return None
        data = yield from receive(self._comm, source, tag)
        return pickle.loads(data.tobytes())

    def _oldest(self) -> float:
        return max(self._waiting().values(), default=0.0)

    def _follow(self) -> Operation[None]:
        warning, shutdown = self._limits.patience, self._limits.shutdown
        # Rank 0 asks around once in each warning time, whoever asks it to.
        patience = warning + 2 * _ANSWER_TIME
        next_ask = 0.0
        unanswered_since: float | None = None
        while self.verdict is None:
            yield _At(self._clock, self._clock() + _TICK)
            now = self._clock()
            oldest = self._oldest()
            if oldest >= warning and now >= next_ask:
                self._send(True, 0, _ASK)
                next_ask = self._again(now, oldest)
                unanswered_since = unanswered_since or now
            if (yield from self._take(0, _QUERY)) is not None:
                self._send(self._waiting(), 0, _ANSWER)
                unanswered_since = None
            self.verdict = yield from self._take(0, _END)
            if unanswered_since is not None and now - unanswered_since > patience:
                names = _names(sorted(self._waiting()))
                text = (
                    f"{names} has waited for {oldest:.0f} s, and rank {self._ranks[0]}, which "
                    "would know who is missing, does not answer: it is stopped or unreachable."
                )
                logger.warning(text)
                unanswered_since = None
                if shutdown and oldest >= shutdown:
                    self.verdict = text

    def _lead(self) -> Operation[None]:
        next_inquiry = 0.0
        while self.verdict is None:
            yield _At(self._clock, self._clock() + _TICK)
            asked = self._oldest() >= self._limits.patience
            for source in range(1, self._comm.size):
                asked |= (yield from self._take(source, _ASK)) is not None
            if asked and self._clock() >= next_inquiry:
                oldest = yield from self._inquire()
                next_inquiry = self._again(self._clock(), oldest)

    def _again(self, now: float, oldest: float) -> float:
        """Return when to look into it again: when there is a warning or an end to declare."""
        pause = self._limits.patience
        if self._limits.shutdown > oldest:
            pause = min(pause, self._limits.shutdown - oldest)
        return now + pause

    def _inquire(self) -> Operation[float]:
        """Ask all ranks, say what comes out, and return how long the oldest has waited."""
        comm = self._comm
        answers: dict[int, Waiting] = {0: self._waiting()}
        for dest in range(1, comm.size):
            while (yield from self._take(dest, _ANSWER)) is not None:
                pass  # late answers to an earlier question
            self._send(True, dest, _QUERY)
        deadline = self._clock() + _ANSWER_TIME
        while len(answers) < comm.size and self._clock() < deadline:
            for source in range(1, comm.size):
                if source not in answers:
                    answer = yield from self._take(source, _ANSWER)
                    if answer is not None:
                        answers[source] = answer
            yield _At(self._clock, self._clock() + _TICK / 10)
        text = describe_stall(answers, self._ranks, self._limits.patience)
        oldest = max(max(answer.values(), default=0.0) for answer in answers.values())
        if text is None:
            return oldest
        if self._limits.shutdown and oldest >= self._limits.shutdown:
            verdict = f"stalled for more than {self._limits.shutdown:g} s. {text}"
            logger.error(verdict)
            for dest in range(1, comm.size):
                self._send(verdict, dest, _END)
            self.verdict = verdict
        else:
            logger.warning(text)
        return oldest


def describe_stall(answers: dict[int, Waiting], ranks: Sequence[int], limit: float) -> str | None:
    """Return who is missing what, or None if nothing has waited for `limit` seconds.

    Args:
        answers: what each rank that answered waits for, by rank within the set.
        ranks: the numbers under which users know the ranks.
    """
    silent = [ranks[r] for r in range(len(ranks)) if r not in answers]
    groups: dict[tuple[int, ...], dict[str, float]] = {}
    for name in sorted({name for answer in answers.values() for name in answer}):
        age = max(answer[name] for answer in answers.values() if name in answer)
        if age >= limit:
            missing = tuple(ranks[r] for r in sorted(answers) if name not in answers[r])
            groups.setdefault(missing, {})[name] = age
    if not groups:
        return None
    sentences = []
    # Those that have waited longest are likely the cause of the others.
    oldest_first = sorted(groups.items(), key=lambda group: -max(group[1].values()))
    for missing, ages in oldest_first[:_GROUPS_SHOWN]:
        count = f"{len(ages)} tensors" if len(ages) > 1 else "1 tensor"
        what = f"{count} waiting for up to {max(ages.values()):.0f} s ({_names(list(ages))})"
        if missing:
            sentences.append(f"{what}: not submitted by {show_ranks(missing)}")
        elif silent:
            sentences.append(f"{what}: submitted by every rank that answers")
        else:
            sentences.append(f"{what}: submitted by every rank and in progress")
    rest = oldest_first[_GROUPS_SHOWN:]
    if rest:
        more = sum(len(ages) for _, ages in rest)
        others = sorted({rank for missing, _ in rest for rank in missing})
        sentences.append(
            f"{more} more that wait for shorter"
            + (f", each for some of {show_ranks(others)}" if others else "")
        )
    if silent:
        sentences.append(f"{show_ranks(silent)} did not answer (stopped or unreachable)")
    return (
        "Stall: " + "; ".join(sentences) + ". The ranks may have taken different branches, or "
        "one of them may be slow, stuck or gone."
    )


def _names(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return shown + (f" and {more} more" if more > 0 else "")
