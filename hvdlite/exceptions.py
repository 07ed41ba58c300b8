"""The errors that hvdlite raises, one class per thing a caller can do about it."""

from __future__ import annotations

__all__ = [
    "DuplicateNameError",
    "HvdliteError",
    "HvdliteInternalError",
    "HvdliteTimeoutError",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "SettingsError",
]


class HvdliteError(Exception):
    """Base of every error that hvdlite defines."""


class NotInitializedError(HvdliteError, ValueError):
    """hvdlite was asked for something before `init()` or after `shutdown()`."""


class SettingsError(HvdliteError, ValueError):
    """A `HVDLITE_*` or `HOROVOD_*` variable is unknown or malformed."""


class MismatchError(HvdliteError, RuntimeError):
    """The ranks asked for different things under one name. Raised alike on every rank.

    The engine goes on: the next collective works.
    """


class DuplicateNameError(HvdliteError, ValueError):
    """A name was submitted while a tensor of the same name is in flight on this rank.

    Raised on the rank that did it; the others are unharmed.
    """


class HvdliteTimeoutError(HvdliteError, TimeoutError):
    """A wait with a timeout ended before its collective did. The collective goes on."""


class HvdliteInternalError(HvdliteError, RuntimeError):
    """The job cannot go on as it is: a peer left, died, or stalled past the limit."""


class LaunchError(HvdliteError, RuntimeError):
    """A rank of `hvdlite.run` failed. The text names the rank and ends with its traceback."""
