"""What goes wrong before a job runs."""

from __future__ import annotations

from ..exceptions import HvdliteError

__all__ = ["LaunchProblem"]


class LaunchProblem(HvdliteError):
    """A job cannot be started as asked for; the text says why and what to do."""
