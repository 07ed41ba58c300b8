"""Wait for collectives that were begun."""

from __future__ import annotations

from typing import Any

from ..engine.submissions import Handle

__all__ = [
    "poll",
    "synchronize",
]


def synchronize(handle: Handle, timeout: float | None = None) -> Any:
    """Wait for a collective and return its result.

    Args:
        handle: what an `_async` function returned.
        timeout: seconds to wait at most.

    Raises:
        HvdliteTimeoutError: the time is over; the collective goes on.
        MismatchError: the ranks asked for different things (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    return _handle(handle).wait(timeout)


def poll(handle: Handle) -> bool:
    """Return whether `synchronize(handle)` would return at once."""
    return _handle(handle).done()


def _handle(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"Expected the handle of an asynchronous collective, got {type(handle).__name__}."
        )
    return handle
