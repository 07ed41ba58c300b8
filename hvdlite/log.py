"""The logger of the package: to stderr, each line marked with the rank it comes from."""

from __future__ import annotations

import logging
import sys

__all__ = ["configure", "logger", "tell"]

logger = logging.getLogger("hvdlite")

_LEVELS = {
    "trace": 5,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


def tell(text: str) -> None:
    """Show what the user has asked to be told, although it is no warning."""
    if logger.getEffectiveLevel() <= logging.WARNING:
        # Past the logger's own level, which hides what nobody has asked for.
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at the time, so that captures and redirections work."""

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass


def configure(rank: int, level: str, hide_time: bool) -> None:
    """Make the logger say which rank speaks. A user's own handlers are left alone.

    Args:
        rank: this process's rank.
        level: a name of `HVDLITE_LOG_LEVEL`.
        hide_time: whether lines come without the time of day.
    """
    logger.setLevel(_LEVELS[level])
    for handler in [h for h in logger.handlers if isinstance(h, _StderrHandler)]:
        logger.removeHandler(handler)
    if logger.handlers:
        return
    handler = _StderrHandler()
    time = "" if hide_time else "%(asctime)s "
    handler.setFormatter(
        logging.Formatter(f"{time}hvdlite[rank {rank}] %(levelname)s: %(message)s")
    )
    logger.addHandler(handler)
    logger.propagate = False
