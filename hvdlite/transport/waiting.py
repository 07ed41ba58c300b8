"""How to wait: test again soon at first, then ever less often. Nothing else decides this.

Measured (2 ranks on 2 cores): blocking inside MPI costs a whole core for each thread that
waits, sleeping 0.1 ms between tests a fifth of one, sleeping 1 ms a twenty-fifth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["Pacer"]

_SHORTEST = 5e-5
_LONGEST = 1e-3
_SHARE = 1 / 20
"""Of the time already waited: sleeping never delays anything by much more than that."""


class Pacer:
    """Spaces the tests of one waiting thread.

    Args:
        burst: seconds of tests without sleep after the last progress.
        sleep: sleeps for the given seconds, or less.
    """

    def __init__(self, burst: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self._burst = burst
        self._sleep = sleep
        self._since = time.perf_counter()

    def progressed(self) -> None:
        """Note that something moved, so that more is likely to follow."""
        self._since = time.perf_counter()

    def pause(self, at_most: float = _LONGEST) -> None:
        """Let others run before the next test.

        Args:
            at_most: seconds after which something is due anyway.
        """
        waited = time.perf_counter() - self._since
        if waited < self._burst:
            # Not sleep(0): that takes 0.1 ms.
            os.sched_yield()
        else:
            self._sleep(min(max(_SHORTEST, waited * _SHARE), _LONGEST, at_most))
