"""A rank that dies of an exception ends the job, with its traceback, instead of hanging it.

Plain `mpirun python` lets the other ranks wait for ever.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.engine import Engine

__all__ = ["abort_if_parallel", "guard", "unguard"]

_FLUSH_TIME = 0.1
"""Seconds for the launcher to pick up the traceback; MPICH's has lost it without."""

_FINALIZE_KEY: int | None = None
_previous: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def guard(engine: Engine, abort: bool) -> None:
    """Watch for exceptions that nobody catches, and for MPI being finalized too early."""
    global _previous
    if engine.size > 1 and abort and _previous is None:
        _previous = sys.excepthook, threading.excepthook
        sys.excepthook = _main_hook(engine, sys.excepthook)
        threading.excepthook = _thread_hook(engine, threading.excepthook)
    _watch_finalize()


def unguard() -> None:
    """Put the hooks back, unless somebody has put others on top."""
    global _previous
    if _previous is None:
        return
    if getattr(sys.excepthook, "_hvdlite", False):
        sys.excepthook = _previous[0]
    if getattr(threading.excepthook, "_hvdlite", False):
        threading.excepthook = _previous[1]
    _previous = None


def abort_if_parallel(engine: Engine) -> None:
    """End the whole job with status 1, if there is more to it than this process."""
    if engine.size > 1 and engine.is_mine:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        time.sleep(_FLUSH_TIME)
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)


def _main_hook(engine: Engine, previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(kind, error, traceback)
        if engine.is_mine:
            _say(engine, "an exception that nobody caught")
            abort_if_parallel(engine)

    hook._hvdlite = True  # type: ignore[attr-defined]
    return hook


def _thread_hook(engine: Engine, previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(args: threading.ExceptHookArgs) -> None:
        previous(args)
        # Other libraries' helper threads may die without harm; one that takes part in
        # collectives leaves the other ranks waiting.
        thread = args.thread
        if engine.is_mine and thread is not None and thread.ident in engine.submitters:
            _say(engine, f"an exception that nobody caught in thread {thread.name}")
            abort_if_parallel(engine)

    hook._hvdlite = True  # type: ignore[attr-defined]
    return hook


def _say(engine: Engine, what: str) -> None:
    print(
        f"hvdlite: rank {engine.rank} ended with {what} (its traceback is above); "
        f"ending all {engine.size} ranks.",
        file=sys.stderr,
        flush=True,
    )


def _watch_finalize() -> None:
    """Shut down in time if the user calls MPI.Finalize() first.

    MPI deletes the attributes of COMM_SELF as the first thing it does in MPI_Finalize, while
    communication still works (MPI 4.1, section 11.2.4).
    """
    global _FINALIZE_KEY
    if "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if _FINALIZE_KEY is None:
        _FINALIZE_KEY = MPI.Comm.Create_keyval(delete_fn=_before_finalize)
        MPI.COMM_SELF.Set_attr(_FINALIZE_KEY, True)


def _before_finalize(*_: Any) -> None:
    from . import world

    world._shutdown("MPI was finalized")
