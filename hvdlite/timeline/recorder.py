"""What one rank notes down while a timeline is on: as little as possible, as tuples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["EVENTS", "Recorder", "Span"]

EVENTS = 200_000
"""Events that a rank keeps, about 40 MB; the oldest make room for new ones."""


class Recorder:
    """Collects events. May be called by any thread.

    Times are seconds of the engine's clock. An event is one of

    - `("negotiate", name, begin, end, round, set_id, kind, nbytes)`: a tensor from its
      submission until all ranks were known to have submitted it;
    - `("pack" | "move" | "unpack", names, begin, end, round, lane, nbytes)`: a batch;
    - `("wait", name, begin, end)`: a caller blocked until a tensor was complete;
    - `("cycle", begin, end, round, ready)`: a round, if those are marked.

    Args:
        clock: tells the time.
        mark_cycles: whether rounds are recorded too.
        limit: events kept.
    """

    def __init__(
        self, clock: Callable[[], float], mark_cycles: bool = False, limit: int = EVENTS
    ) -> None:
        self.clock = clock
        self.mark_cycles = mark_cycles
        self.events: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self.count = 0

    def note(self, *event: Any) -> None:
        """Keep an event."""
        self.count += 1
        self.events.append(event)

    @property
    def lost(self) -> int:
        """Events that had to make room for later ones."""
        return self.count - len(self.events)


class Span:
    """Notes how long a `with` block took."""

    __slots__ = ("_begin", "_event", "_recorder", "_what")

    def __init__(self, recorder: Recorder, what: str, *event: Any) -> None:
        self._recorder = recorder
        self._what = what
        self._event = event

    def __enter__(self) -> None:
        self._begin = self._recorder.clock()

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        name, *rest = self._event
        recorder.note(self._what, name, self._begin, recorder.clock(), *rest)
