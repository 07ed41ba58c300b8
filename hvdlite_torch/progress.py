"""Waiting for one optimizer must not hold up what another has to do before ranks can go on.

Before its first step an optimizer agrees with the other ranks on its buckets, and cannot submit
any before that. Ranks that step several optimizers in different orders would wait for each
other: the first step of one needs buckets that another rank only submits when it can go on.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from hvdlite import HvdliteTimeoutError

__all__ = ["Agreeing", "announce", "wait"]

_SHORTEST, _LONGEST = 0.001, 0.02


class Agreeing(Protocol):
    """Who may have an agreement under way."""

    def advance(self) -> bool:
        """Do what can be done without waiting, and return whether something is left."""
        ...


_agreeing: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()  # a set must not change while another thread goes through it


def announce(who: Agreeing) -> None:
    """Have everybody who waits call `who.advance()` until it returns False."""
    with _lock:
        _agreeing.add(who)


def wait(handle: Any) -> Any:
    """Wait for a handle and return its result; others advance meanwhile."""
    seconds = _SHORTEST
    while not handle.done():
        _advance()
        if not _agreeing:
            break
        try:
            return handle.wait(seconds)
        except HvdliteTimeoutError:
            seconds = min(2 * seconds, _LONGEST)
    return handle.wait()


def _advance() -> None:
    if not _agreeing:
        return
    with _lock:
        others = list(_agreeing)
    for other in others:
        if not other.advance():
            with _lock:
                _agreeing.discard(other)
