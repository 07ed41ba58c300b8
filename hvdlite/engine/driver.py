"""Who drives the engine: the background thread, or the callers that wait.

A caller that blocks takes the steps itself instead of waiting for the thread to be scheduled;
whoever holds the drive lock is the engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..log import logger
from ..transport.waiting import Pacer

__all__ = ["IDLE", "Driver", "while_waiting"]

IDLE = 0.25
"""Seconds between looks for messages of the stall inspector while there is nothing to do."""

_GATHERING = 2e-4
"""Seconds between the first submission and the thread's step. Whoever submits a tensor is
likely to submit more: they share a round, and the thread does not take turns with it at the
interpreter lock meanwhile."""

_BURST = 5e-5
_CALLER_BURST = 1e-3
_CALLER_TESTS = 16
"""A step costs as much as twenty tests, and delays what is about to complete by that."""


_REENTERED = (
    "a signal handler (or a finalizer) waits for a collective, or for shutdown(), in the middle of "
    "another one of the same thread, which cannot go on before the handler returns. Let the "
    "handler set a flag, look at it between training steps, and communicate there."
)


_meanwhile: list[Callable[[], None]] = []


def while_waiting(function: Callable[[], None]) -> None:
    """Have every caller that waits, in any thread, call a function between two steps.

    It may submit, and must not wait nor raise. For what other ranks may need before they submit
    what the caller waits for.
    """
    _meanwhile.append(function)


class _Attention:
    """Counts the callers that are inside; a plain class, being on the path of each of them."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver._attend()

    def __exit__(self, *_: object) -> None:
        self._driver._leave()


class Driver:
    """Calls `step` for as long as there is something to do.

    Args:
        step: does what can be done without waiting and returns whether that was anything;
            gets how often it may test for what operations wait for.
        due: returns the seconds until a step is worthwhile (at most IDLE), or None while
            communications are in progress and want to be tested.
        affinity: the core that the thread is to run on.
    """

    def __init__(
        self,
        step: Callable[[int], bool],
        due: Callable[[], float | None],
        affinity: int | None = None,
    ) -> None:
        # Reentrant ones: a signal handler runs in the middle of whatever the main thread does.
        self.lock = threading.RLock()
        """Guards what callers hand in."""
        self.drive = threading.RLock()
        """Held by whoever takes a step."""
        self._step = step
        self._due = due
        self._affinity = affinity
        self._wake = threading.Condition(self.lock)
        self._callers = 0
        self._attention = _Attention(self)
        self._news = False
        self._napping = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the background thread."""
        self._thread = threading.Thread(target=self._run, name="hvdlite", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the background thread."""
        with self.lock:
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wake(self) -> None:
        """Note that there is something new. The caller holds `lock`."""
        self._news = True
        if self._napping and not self._callers:
            self._napping = False
            self._wake.notify()

    def attended(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread is going to wait.

        The background thread sleeps meanwhile.
        """
        return self._attention

    def _attend(self) -> None:
        with self.lock:
            self._callers += 1

    def _leave(self) -> None:
        with self.lock:
            self._callers -= 1
            if not self._callers and (self._news or self._due() != IDLE):
                self.wake()

    def refuse_reentry(self) -> None:
        """Raise RuntimeError where this thread is in the middle of a step."""
        if self.drive._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(_REENTERED)

    def drive_until(
        self, done: Callable[[], bool], timeout: float | None = None, *, leaving: bool = False
    ) -> bool:
        """Take steps in the calling thread; return whether `done` came to hold in time.

        Args:
            leaving: whether nothing can be submitted any more.

        Raises:
            RuntimeError: this thread is in the middle of a step, which only a signal handler,
                or what the garbage collector calls, can be.
        """
        if done():
            return True
        self.refuse_reentry()
        deadline = None if timeout is None else time.monotonic() + timeout
        pacer = Pacer(_CALLER_BURST)
        with self.attended():
            while True:
                if self.drive.acquire(blocking=False):
                    try:
                        moved = not done() and self._take_step(_CALLER_TESTS)
                    finally:
                        self.drive.release()
                    if moved:
                        pacer.progressed()
                for function in () if leaving else _meanwhile:
                    function()
                if done():
                    return True
                left = 1.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                pacer.pause(left)

    def _take_step(self, tests: int) -> bool:
        self._news = False
        return self._step(tests)

    def _run(self) -> None:
        if self._affinity is not None:
            try:
                os.sched_setaffinity(0, {self._affinity})
            except OSError as error:
                logger.warning("the engine's thread stays where it is: %s", error)
        pacer = Pacer(_BURST, self._nap)
        while not self._stopping:
            if self._callers:
                self._nap(IDLE)
                continue
            if self.drive.acquire(blocking=False):
                try:
                    moved = self._take_step(1)
                finally:
                    self.drive.release()
                if moved:
                    pacer.progressed()
                    continue
            due = self._due()
            if due is None:
                pacer.pause()
            else:
                self._nap(due)
                if self._news and not self._callers:
                    time.sleep(_GATHERING)

    def _nap(self, seconds: float) -> None:
        """Sleep, unless something new has come since the last step."""
        with self.lock:
            if (not self._news or self._callers) and not self._stopping:
                self._napping = True
                self._wake.wait(seconds)
                self._napping = False
