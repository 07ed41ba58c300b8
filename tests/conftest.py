"""Nothing that a test leaves behind may keep pytest from ending."""

import faulthandler

_SECONDS = 60
"""What the interpreter may take to end after the summary."""


def pytest_unconfigure() -> None:
    # A thread that still waits, and that nobody has made a daemon, would be joined for ever.
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
