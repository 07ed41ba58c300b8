"""How fast a job's collectives are: bytes per second of the time in which any were under way."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ..engine.requests import Response
    from ..engine.submissions import Entry

__all__ = ["Meter", "weighted_median"]

Number = TypeVar("Number", int, float)

_UNSETTLED = 2
"""Steps that do not count after a change: one that had begun before it, and one that fills
caches and new buffers."""

_LEAST_SECONDS = 0.02
"""Shorter samples say more about the scheduler than about the parameters."""


class Meter:
    """Measures samples of some steps each, on one rank, in the engine's thread.

    A step ends with the round in which something is agreed on that the step has had already: a
    name, or an equal request without one. Steps that move less than half of what the typical
    byte's step does (a metric that is averaged, say) are not counted. Time in which this rank
    has nothing under way, such as an evaluation or the forward pass, is left out.

    The score of a sample is the speed of its steps, the median over their bytes: neither a
    pause nor a few strange steps change it.

    Args:
        steps: how many make a sample.
        report: gets the score of each sample.
        clock: seconds; the one by which submissions are dated.
    """

    def __init__(
        self,
        steps: int,
        report: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._report = report
        self._clock = clock
        self._measures = False
        self._wanted = False
        self._sizes: Counter[int] = Counter()
        """Bytes that went in steps of so many bytes, of all steps so far."""
        self._sample: list[tuple[int, float]] = []
        """Bytes and seconds of the steps."""
        self._unsettled = 0
        self._seen: set[object] = set()
        self._bytes = 0
        self._began: float | None = None
        self._idle = 0.0
        self._rests_since: float | None = None

    @property
    def step_bytes(self) -> int:
        """The bytes of a typical step, 0 before the first one."""
        return weighted_median(self._sizes) if self._sizes else 0

    def begin(self) -> None:
        """Begin a sample. May be called by any thread."""
        self._wanted = True

    def agreed(self, agreed: Sequence[tuple[Response, Entry | None]]) -> None:
        """Take notice of a round's responses, which are about to be carried out."""
        if self._wanted:
            self._wanted = False
            self._start()
        if not self._measures or not agreed:
            return
        if self._rests_since is not None:
            submitted = [entry.submitted for _, entry in agreed if entry is not None]
            if submitted:
                self._idle += max(min(submitted) - self._rests_since, 0.0)
            self._rests_since = None
        now = self._clock()
        if self._began is None:
            self._began = now
        keys = {_identity(response) for response, _ in agreed}
        # Not within a round: many equal requests without names may come at once.
        if not self._seen.isdisjoint(keys):
            self._end_step(now)
        self._seen |= keys
        self._bytes += sum(_bytes(response) for response, _ in agreed)

    def rests(self) -> None:
        """Take notice that nothing is under way any more."""
        if self._measures:
            self._rests_since = self._clock()

    def _start(self) -> None:
        self._measures = True
        self._sample.clear()
        self._unsettled = _UNSETTLED
        self._seen.clear()
        self._bytes = 0
        self._began = None
        self._idle = 0.0
        self._rests_since = None

    def _end_step(self, now: float) -> None:
        assert self._began is not None
        step = self._bytes, now - self._began - self._idle
        self._began, self._idle, self._bytes = now, 0.0, 0
        self._seen.clear()
        self._sizes[step[0]] += step[0]
        if not self._is_typical(step[0]):
            return
        if self._unsettled:
            self._unsettled -= 1
            return
        self._sample.append(step)
        if len(self._sample) >= self._steps:
            self._finish()

    def _is_typical(self, nbytes: int) -> bool:
        return nbytes > 0 and 2 * nbytes >= self.step_bytes

    def _finish(self) -> None:
        # What is typical may have become clear only in the course of the sample.
        self._sample = [step for step in self._sample if self._is_typical(step[0])]
        enough = sum(seconds for _, seconds in self._sample) >= _LEAST_SECONDS
        if not enough or len(self._sample) < self._steps:
            return
        self._measures = False
        speeds: defaultdict[float, int] = defaultdict(int)
        for nbytes, seconds in self._sample:
            speeds[nbytes / max(seconds, 1e-9)] += nbytes
        self._report(weighted_median(speeds))


def _identity(response: Response) -> object:
    return response.key if isinstance(response.key, str) else response.request


def _bytes(response: Response) -> int:
    return 0 if response.error is not None else sum(piece.nbytes for piece in response.pieces)


def weighted_median(weights: Mapping[Number, int]) -> Number:
    """Return the smallest key up to which the keys have half of all weight."""
    left = sum(weights.values()) / 2
    for key in sorted(weights):
        left -= weights[key]
        if left <= 0:
            return key
    raise ValueError("a median of nothing")
