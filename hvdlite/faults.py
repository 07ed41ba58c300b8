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
_previous: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]] | None = None
_exit_call: tuple[object, int] | None = None
"""The argument of the last sys.exit(), and how much had been submitted by then."""


def guard(engine: Engine, abort: bool) -> None:
    """Watch for exceptions that nobody catches, and for MPI being finalized too early."""
    global _previous
    if engine.size > 1 and abort and _previous is None:
        _previous = sys.excepthook, threading.excepthook, sys.exit
        sys.excepthook = _main_hook(engine, sys.excepthook)
        threading.excepthook = _thread_hook(engine, threading.excepthook)
        sys.exit = _recording_exit(engine, sys.exit)
    _watch_finalize()


def unguard() -> None:
    """Put the hooks back, unless somebody has put others on top."""
    global _previous, _exit_call
    _exit_call = None
    if _previous is None:
        return
    if getattr(sys.excepthook, "_hvdlite", False):
        sys.excepthook = _previous[0]
    if getattr(threading.excepthook, "_hvdlite", False):
        threading.excepthook = _previous[1]
    if getattr(sys.exit, "_hvdlite", False):
        sys.exit = _previous[2]
    _previous = None


def abort_if_exiting_badly(engine: Engine) -> None:
    """End the whole job if this process is about to exit with a bad status.

    Called while the interpreter exits. The other ranks may be far from the next collective,
    which would tell them.
    """
    if _exit_call is None:
        return
    argument, submissions = _exit_call
    if argument in (None, 0) or submissions != engine.submissions:
        return  # fine, or somebody caught the exception and the program went on
    _say(engine, f"sys.exit({argument!r})")
    abort_if_parallel(engine, argument if isinstance(argument, int) else 1)


def abort_if_parallel(engine: Engine, status: int = 1) -> None:
    """End the whole job with a status, if there is more to it than this process."""
    if engine.size > 1 and engine.is_mine:
        engine.rescue()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        time.sleep(_FLUSH_TIME)
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(status)


def _main_hook(engine: Engine, previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(kind, error, traceback)
        if engine.is_mine:
            _say(engine, "an exception that nobody caught (above)")
            abort_if_parallel(engine)

    hook._hvdlite = True  # type: ignore[attr-defined]
    return hook


def _thread_hook(engine: Engine, previous: Callable[..., Any]) -> Callable[..., Any]:
    def hook(args: threading.ExceptHookArgs) -> None:
        previous(args)
        # Other libraries' threads may die without harm; one that takes part in
        # collectives leaves the other ranks waiting.
        thread = args.thread
        if engine.is_mine and thread is not None and thread.ident in engine.submitters:
            _say(engine, f"an exception that nobody caught in thread {thread.name} (above)")
            abort_if_parallel(engine)

    hook._hvdlite = True  # type: ignore[attr-defined]
    return hook


def _recording_exit(engine: Engine, previous: Callable[..., Any]) -> Any:
    # An exit function cannot ask for the status that the interpreter exits with.
    def exit(status: object = None, /) -> None:
        global _exit_call
        if threading.current_thread() is threading.main_thread():
            _exit_call = status, engine.submissions
        previous(status)

    exit._hvdlite = True  # type: ignore[attr-defined]
    return exit


def _say(engine: Engine, what: str) -> None:
    print(
        f"hvdlite: rank {engine.rank} ended with {what}; ending all {engine.size} ranks.",
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
