"""`hvdlite.run`: a function on several ranks, from Python or a notebook."""

from __future__ import annotations

import os
import pickle
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..exceptions import HvdliteError, LaunchError

__all__ = ["package_environment", "run"]

_ELASTIC = (
    "min_num_proc",
    "max_num_proc",
    "reset_limit",
    "cooldown_range",
    "min_np",
    "max_np",
)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    launch_agent: str | None = None,
) -> list[Any]:
    """Run a function on several ranks and return what each returns.

    The function calls `init()` itself. It, its arguments and its results are pickled, by
    cloudpickle if that is installed, which functions of scripts and notebooks need. What the
    ranks print appears here, marked with the rank.

    Args:
        func: the function.
        args: its positional arguments, the same on all ranks.
        kwargs: its named arguments.
        num_proc: number of ranks; as many as the hosts have slots, or 1.
        slots: slots of hosts that name none.
        hosts: as `hvdlite run -H` takes them: `host1:2,host2:2`; by default this machine.
        hostfile: file of lines `host slots=2`.
        host_discovery_script: program that prints lines `host:2`.
        start_timeout: seconds until all ranks must have started, 120 by default.
        ssh_port, ssh_identity_file: for ssh to other hosts.
        output_filename: folder to keep each rank's output in.
        verbose: whether to print the command line first.
        mpi_args: more options for mpirun.
        network_interface, network_interfaces: interfaces or networks to use.
        executable: the Python of the ranks; this one by default.
        np: the same as `num_proc`.
        env: variables to set on all ranks.
        launch_agent: command to use in place of ssh.
        use_mpi, disable_cache: accepted; nothing else is possible.
        min_num_proc, max_num_proc, reset_limit, cooldown_range, min_np, max_np, use_gloo:
            refused.

    Returns:
        The results, by rank.

    Raises:
        LaunchError: a rank failed; the text ends with its traceback.
        HvdliteError: the job cannot be started as asked for.
        ValueError: an argument that means nothing here is given.
    """
    given = locals()
    elastic = [name for name in _ELASTIC if given[name] is not None]
    if elastic:
        raise ValueError(
            f"run: {', '.join(elastic)}: elastic training is not there yet; a job has num_proc "
            "ranks from start to end."
        )
    if use_gloo:
        raise ValueError("run: use_gloo: hvdlite has no Gloo; MPI carries everything.")
    if np is not None and num_proc is not None and np != num_proc:
        raise ValueError(f"run: np={np} and num_proc={num_proc} differ; give one of them.")
    from .command import show
    from .launch import JobOptions, prepare

    interfaces = network_interfaces if network_interfaces is not None else network_interface
    if interfaces is not None and not isinstance(interfaces, str):
        interfaces = ",".join(interfaces)
    count = np if np is not None else num_proc
    if count is None and hosts is None and hostfile is None and host_discovery_script is None:
        count = 1
    if count is not None and count < 1:
        raise ValueError(f"run: num_proc is {count}, but it must be 1 or more.")
    payload = _pickle(func, args, kwargs or {})
    plan = prepare(
        [executable or sys.executable, "-m", "hvdlite.cli.task"],
        JobOptions(
            np=count,
            hosts=hosts,
            hostfile=hostfile,
            discovery_script=host_discovery_script,
            slots_per_host=slots or 1,
            environment=package_environment(env or {}),
            interfaces=interfaces,
            agent=launch_agent,
            ssh_port=ssh_port,
            ssh_identity_file=ssh_identity_file,
            mpi_arguments=_split(mpi_args),
        ),
    )
    if verbose:
        print(show(plan), file=sys.stderr)
    folder = Path(output_filename) if output_filename else None
    return _supervise(plan, payload, folder, start_timeout)


def _supervise(plan: Any, payload: bytes, folder: Path | None, start: float | None) -> list[Any]:
    from .output import Output, last_words
    from .supervisor import Limits, Supervisor

    output = Output(_stream("stdout"), _stream("stderr"), folder)
    supervisor = Supervisor(
        plan,
        output,
        Limits(start=start or Limits.start),
        payload=payload,
        # Handlers are the main thread's, and a notebook's or a test's own business.
        catch_signals=False,
    )
    verdict = supervisor.run()
    if supervisor.interrupted:
        raise KeyboardInterrupt
    if verdict.status != 0:
        words = "" if verdict.rank is None else last_words(output.tail(verdict.rank))
        raise LaunchError(f"{verdict.text}\n{words}".rstrip())
    missing = [rank for rank in range(plan.np) if rank not in supervisor.results]
    if missing:
        raise LaunchError(f"Ranks {missing} ended before the function had returned (os._exit?).")
    return [pickle.loads(supervisor.results[rank]) for rank in range(plan.np)]


def _stream(name: str) -> TextIO:
    stream = getattr(sys, name)
    return stream if stream is not None else open("/dev/null", "w")


def _split(text: str | None) -> list[str]:
    return shlex.split(text or "")


def package_environment(env: Mapping[str, str]) -> list[str]:
    """Return assignments with which ranks import the hvdlite that runs here, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(part for part in (root, inherited) if part)
    return [f"{name}={value}" for name, value in {**env, "PYTHONPATH": path}.items()]


def _pickle(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    if not callable(func):
        raise TypeError(f"run: func is a function, not a {type(func).__name__}.")
    try:
        import cloudpickle

        dumps = cloudpickle.dumps
    except ImportError:
        module = getattr(func, "__module__", None)
        if module == "__main__":
            raise HvdliteError(
                "run: functions of scripts and notebooks need cloudpickle: pip install "
                "'hvdlite[cli]' (or move the function into a module of its own)."
            ) from None
        dumps = pickle.dumps
    try:
        call = dumps((func, tuple(args), dict(kwargs)))
    except Exception as error:
        raise TypeError(
            f"run: the function or an argument cannot be sent to other processes: {error}"
        ) from error
    return pickle.dumps((list(sys.path), call))
