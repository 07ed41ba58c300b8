"""Wait for collectives that were begun."""

from __future__ import annotations

from typing import Any, NoReturn

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
    if type(handle) is not Handle:
        _refuse(handle)
    return handle.wait(timeout)


def poll(handle: Handle) -> bool:
    """Return whether `synchronize(handle)` would return at once."""
    if type(handle) is not Handle:
        _refuse(handle)
    return handle.done()


def _refuse(handle: object) -> NoReturn:
    raise TypeError(
        f"Expected the handle of an asynchronous collective, got {type(handle).__name__}."
    )
