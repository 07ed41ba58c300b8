"""Nothing that a test leaves behind may keep pytest from ending."""

import faulthandler

_SECONDS = 60
"""What the interpreter may take to end after the summary."""


def pytest_unconfigure():
    # A thread that still waits would be joined for ever, long after the last test's limit.
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
