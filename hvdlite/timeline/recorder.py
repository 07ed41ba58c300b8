"""What one rank notes down while a timeline is on: as little as possible, as tuples."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["EVENTS", "Recorder", "Span", "events_of_each"]

EVENTS = 200_000
"""Events that a rank keeps, about 55 MB; the oldest make room for new ones."""

_EVENTS_OF_ALL = 2_000_000
"""What rank 0 can hold and a viewer can still open."""

_NAMES = 8
"""So many names in an event take the room of one event more."""


def events_of_each(ranks: int) -> int:
    """Return how many events each of so many ranks keeps."""
    return max(min(EVENTS, _EVENTS_OF_ALL // ranks), 1000)


class Recorder:
    """Collects events. May be called by any thread.

    Times are seconds of the engine's clock. An event is one of

    - `("negotiate", name, begin, end, round, set_id, kind, nbytes)`: a tensor from its
      submission until all ranks were known to have submitted it;
    - `("pack" | "move" | "unpack", names, begin, end, round, set_id, lane, tensors, nbytes)`:
      a batch; the names, of groups once, are those that this rank has submitted;
    - `("wait", name, begin, end, thread)`: a caller blocked until a tensor was complete;
    - `("cycle", begin, end, round, set_id, ready)`: a round, if those are marked;
    - `("mark", text, time)`: something that changed at once.

    Args:
        clock: tells the time.
        mark_cycles: whether rounds are recorded too.
        limit: events kept; one with many names counts as several.
    """

    def __init__(
        self, clock: Callable[[], float], mark_cycles: bool = False, limit: int = EVENTS
    ) -> None:
        self.clock = clock
        self.mark_cycles = mark_cycles
        self.lost = 0
        """Events that had to make room for later ones."""
        self.unfinished = 0
        """Batches that were agreed on while this was recording and are not done."""
        self._events: deque[tuple[Any, ...]] = deque()
        self._room = limit
        self._lock = threading.Lock()

    def note(self, *event: Any) -> None:
        """Keep an event."""
        with self._lock:
            self._events.append(event)
            self._room -= _room_of(event)
            while self._room < 0 and len(self._events) > 1:
                self._room += _room_of(self._events.popleft())
                self.lost += 1

    def events(self) -> list[tuple[Any, ...]]:
        """Return what is kept, in the order in which it was noted."""
        with self._lock:
            return list(self._events)


def _room_of(event: tuple[Any, ...]) -> int:
    return 1 + len(event[1]) // _NAMES if type(event[1]) is tuple else 1


class Span:
    """Notes how long a `with` block took.

    Args:
        recorder: gets the event.
        stopwatch: is entered and left, too.
        event: what it is, its name, and what comes after the times.
    """

    __slots__ = ("_begin", "_event", "_recorder", "_stopwatch")

    def __init__(
        self, recorder: Recorder, stopwatch: AbstractContextManager[object], *event: Any
    ) -> None:
        self._recorder = recorder
        self._stopwatch = stopwatch
        self._event = event

    def __enter__(self) -> None:
        self._stopwatch.__enter__()
        self._begin = self._recorder.clock()

    def __exit__(self, *error: Any) -> None:
        recorder = self._recorder
        end = recorder.clock()
        self._stopwatch.__exit__(*error)
        what, name, *rest = self._event
        recorder.note(what, name, self._begin, end, *rest)
