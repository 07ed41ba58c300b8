"""What callers handed in and have not got back: entries and their handles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..transport.types import Array
from .requests import Key, Request

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Entry", "Handle"]


_converting = threading.RLock()
"""Several threads may wait for one handle, and its result is converted once."""


class Handle:
    """A collective in progress. Ask `done()`, or `wait()` for its result."""

    __slots__ = (
        "__weakref__",
        "_converted",
        "_engine",
        "_error",
        "_finished",
        "_result",
        "convert",
        "name",
    )

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._finished = False
        self._converted = False
        self._result: Any = None
        self._error: BaseException | None = None
        self.name = name
        self.convert: Callable[[Any], Any] | None = None
        """Turns the raw result into what the caller gets, once, in the thread that waits."""

    def __repr__(self) -> str:
        state = "in progress" if not self._finished else "failed" if self._error else "done"
        return f"<hvdlite.Handle {self.name!r}: {state}>"

    def done(self) -> bool:
        """Return whether `wait()` would return, or raise, at once."""
        return self._finished or self._engine.failed

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the collective and return its result.

        Args:
            timeout: seconds to wait at most; None waits for ever.

        Raises:
            HvdliteTimeoutError: the time is over; the collective goes on and can be waited
                for again.
            MismatchError: the ranks asked for different things (on every rank).
            HvdliteInternalError: a peer left or the engine was shut down.
        """
        if not self._finished:
            self._engine.wait(self, timeout)
        if not self._finished:
            raise self._engine.failure()
        if self._error is not None:
            raise self._error
        with _converting:
            if not self._converted:
                # Marked first: one that fails must not run again on a half-used result.
                self._converted = True
                if self.convert is not None:
                    self._result, self.convert = self.convert(self._result), None
        return self._result

    def finish(self, result: Any) -> None:
        """Complete with a result (engine only)."""
        self._result = result
        self._finished = True

    def fail(self, error: BaseException) -> None:
        """Complete with an error (engine only)."""
        self._error = error
        self._finished = True


@dataclass(slots=True, eq=False)
class Entry:
    """One submission: the request, the caller's arrays, and the handle that waits for them."""

    request: Request
    inputs: list[Array]
    outputs: list[Array | None]
    """Where results go; None where only the negotiation tells how large they are."""
    handle: Handle
    submitted: float
    name: str | None = None
    key: Key = -1
    remaining: int = 0
    """Tensors whose communication has not ended."""
    extra: Any = field(default=None)
    """alltoall: how many rows came from each rank."""
