"""What callers handed in and have not got back: entries and their handles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..transport.types import Array
from .requests import Key, Kind, Request

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Entry", "Handle"]


_converting = threading.RLock()
"""Several threads may wait for one handle, and its result is converted once."""


class Handle:
    """A collective in progress. Ask `done()`, or `wait()` for its result."""

    __slots__ = (
        "__weakref__",
        "_engine",
        "_error",
        "_finished",
        "_kind",
        "_name",
        "_names",
        "_result",
        "convert",
    )

    def __init__(self, engine: Engine, name: str | None, kind: Kind, names: Names) -> None:
        self._engine = engine
        self._finished = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._name = name
        self._kind = kind
        self._names = names
        self.convert: Callable[[Any], Any] | None = None
        """Turns the raw result into what the caller gets, once, in the thread that waits."""

    @property
    def name(self) -> str:
        """The name under which it was submitted, or one to show."""
        return self._name or f"{self._kind}.noname"

    def __repr__(self) -> str:
        state = "in progress" if not self._finished else "failed" if self._error else "done"
        return f"<hvdlite.Handle {self.name!r}: {state}>"

    def done(self) -> bool:
        """Return whether `wait()` would return, or raise, at once."""
        return self._finished or self._engine.failed

    @property
    def finished(self) -> bool:
        """Whether it has been completed, whatever has become of the engine."""
        return self._finished

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
        if self.convert is not None and self._error is None:
            self._convert()
        if self._error is not None:
            raise self._error
        return self._result

    def _convert(self) -> None:
        with _converting:
            if self.convert is None:
                return
            try:
                self._result = self.convert(self._result)
            except BaseException as error:
                # For all who wait: it must not run again on a half-used result.
                self._error = error
            finally:
                self.convert = None

    def finish(self, result: Any) -> None:
        """Complete with a result (engine only)."""
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        """Complete with an error (engine only)."""
        self._error = error
        self._end()

    def _end(self) -> None:
        # A rank may use the name again once it sees that this has finished.
        name = self._name
        if name is not None and self._names.get(name) is self:
            del self._names[name]
        self._finished = True


Names: TypeAlias = "dict[str, Handle]"
"""Names in flight within one process set."""


@dataclass(slots=True, eq=False)
class Entry:
    """One submission: the request, the caller's arrays, and the handle that waits for them."""

    request: Request
    inputs: Sequence[Array]
    outputs: list[Array | None]
    """Where results go; None where only the negotiation tells how large they are."""
    handle: Handle
    submitted: float
    name: str | None = None
    key: Key = -1
    remaining: int = 0
    """Tensors whose communication has not ended."""
    result: Any = None
    """What the handle is to return; None for the outputs."""
