"""The process of mpirun (or srun): its start, with each rank in a wrapper, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from .command import LAUNCHER_VARIABLES, Plan
from .problems import LaunchProblem
from .rank import ADDRESS, NO_INPUT, TOKEN

__all__ = ["end_launcher", "signal_launcher", "start_launcher"]

_WRAPPER = Path(__file__).with_name("rank.py")


def start_launcher(plan: Plan, addresses: str, token: str) -> subprocess.Popen[bytes]:
    """Start a job whose ranks report to some addresses.

    Args:
        plan: how to start it.
        addresses: where the supervisor listens.
        token: by which it knows its ranks.

    Raises:
        LaunchProblem: the launcher's program cannot be run.
    """
    environment = plan.environment() | {ADDRESS: addresses, TOKEN: token}
    if not _has_input():
        environment[NO_INPUT] = "1"
    extra = [name for name in LAUNCHER_VARIABLES if name in environment]
    # Neither site-packages nor the user's variables: they cost time and may break it.
    wrapper = [sys.executable, "-I", "-S", str(_WRAPPER)]
    arguments = plan.arguments(wrapper, extra)
    try:
        process = subprocess.Popen(
            arguments,
            stdin=None if _has_input() else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            # The terminal's signals come to this process alone, which passes them on.
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchProblem(f"{arguments[0]} cannot be run: {error.strerror}.") from error
    assert process.stdout is not None and process.stderr is not None
    for pipe in (process.stdout, process.stderr):
        os.set_blocking(pipe.fileno(), False)
    return process


def _has_input() -> bool:
    """Return whether rank 0 may read what this process is given: a file or a pipe.

    A terminal's input belongs to its foreground processes, which the launcher's are not.
    """
    try:
        status = os.fstat(0)
        return not os.isatty(0) and not os.path.samestat(status, os.stat(os.devnull))
    except OSError:
        return False


def signal_launcher(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the launcher and what it has started here, such as ssh."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def end_launcher(process: subprocess.Popen[bytes], patience: float) -> None:
    """End the launcher if it has not ended, and close its pipes.

    Args:
        process: the launcher.
        patience: seconds from asking it to killing it.
    """
    if process.poll() is None:
        signal_launcher(process, signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            signal_launcher(process, signal.SIGKILL)
            process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
