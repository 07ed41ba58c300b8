"""Waiting for one optimizer must not hold up what another has to do before ranks can go on.

Before its first step an optimizer agrees with the other ranks on its buckets, and cannot submit
any before that. Ranks that step several optimizers, or step and do something else that all ranks
do, in different orders would wait for each other: the first step needs buckets that another
rank only submits when it can go on.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any, Protocol

from hvdlite.engine.driver import while_waiting

__all__ = ["Agreeing", "announce"]


class Agreeing(Protocol):
    """Who may have an agreement under way."""

    def advance(self) -> bool:
        """Do what can be done without waiting, and return whether something is left."""
        ...


_agreeing: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.RLock()  # a set must not change while another thread goes through it


def announce(who: Agreeing) -> None:
    """Have everybody who waits call `who.advance()` until it returns False."""
    with _lock:
        _agreeing.add(who)


def _advance() -> None:
    if not _agreeing:
        return
    with _lock:
        others = list(_agreeing)
    for other in others:
        left = False
        with suppress(Exception):  # which comes again where it belongs, when `other` waits
            left = other.advance()
        if not left:
            with _lock:
                _agreeing.discard(other)


while_waiting(_advance)
