"""Measurements against peers: `python -m hvdlite.bench`, see docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line.

    Args:
        argv: the arguments; None for those of the process.

    Returns:
        The exit status: 0, or 1 if nothing could be measured.
    """
    # Here, because ranks import this package too, and need nothing of the command line.
    from .cli import run

    return run(argv)
