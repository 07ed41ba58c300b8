"""The steps between what the user asks for and a running job."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from ..settings import Settings
from . import mpi
from .command import Plan, Request, make_plan, resolve_program
from .hosts import Host, discover_hosts, parse_hosts, read_hostfile, slurm_tasks
from .output import Output, last_words
from .problems import LaunchProblem
from .supervisor import Limits, Supervisor
from .verdict import Verdict

__all__ = ["JobOptions", "pick_launcher", "prepare", "run_plain", "run_supervised"]


@dataclass(frozen=True)
class JobOptions:
    """What a user says about a job, besides its command."""

    np: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    discovery_script: str | None = None
    slots_per_host: int = 1
    environment: Sequence[str] = ()
    """`NAME=VALUE` to set, `NAME` to forward."""
    settings: Mapping[str, str] = field(default_factory=dict)
    interfaces: str | None = None
    agent: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    mpirun: str | None = None
    launcher: str = "auto"
    mpi_arguments: Sequence[str] = ()
    binding: Sequence[str] | None = None
    tcp: bool = False
    working_directory: str | None = None


def prepare(
    command: Sequence[str], options: JobOptions, environ: Mapping[str, str] = os.environ
) -> Plan:
    """Work out how to start a job, without starting anything.

    Raises:
        LaunchProblem: it cannot be started as asked for.
        SettingsError: a variable is unknown or malformed, which the ranks would find out, too.
    """
    hosts = _hosts(options)
    np = options.np or sum(host.slots for host in hosts) or slurm_tasks(environ)
    if not np:
        raise LaunchProblem("say how many ranks there are to be: -np 4, or -H host1:2,host2:2")
    assigned: dict[str, str] = dict(options.settings)
    forward = []
    for item in options.environment:
        name, equals, value = item.partition("=")
        if not name:
            raise LaunchProblem(f"-x {item}: it must be NAME or NAME=VALUE.")
        if equals:
            assigned[name] = value
        else:
            forward.append(name)
    Settings.from_environment({**environ, **assigned})
    program = resolve_program(command, environ)
    launcher = pick_launcher(_interpreter(program), options, environ)
    request = Request(
        command=program,
        np=np,
        hosts=hosts,
        environment=assigned,
        forward=forward,
        interfaces=options.interfaces,
        agent=options.agent,
        ssh_port=options.ssh_port,
        ssh_identity_file=options.ssh_identity_file,
        mpi_arguments=options.mpi_arguments,
        binding=options.binding,
        tcp=options.tcp,
        working_directory=options.working_directory,
    )
    return make_plan(request, launcher, environ)


def _hosts(options: JobOptions) -> list[Host]:
    given = [
        name
        for name, value in (
            ("--hosts", options.hosts),
            ("--hostfile", options.hostfile),
            ("--host-discovery-script", options.discovery_script),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise LaunchProblem(f"{' and '.join(given)} both name hosts; give one of them.")
    if options.hosts is not None:
        return parse_hosts(options.hosts, options.slots_per_host)
    if options.hostfile is not None:
        return read_hostfile(options.hostfile, options.slots_per_host)
    if options.discovery_script is not None:
        return discover_hosts(options.discovery_script, options.slots_per_host)
    return []


def _interpreter(program: Sequence[str]) -> str:
    """Return the Python of a command, this one if it is no Python."""
    name = os.path.basename(program[0])
    return program[0] if name.startswith("python") else sys.executable


def pick_launcher(
    python: str, options: JobOptions, environ: Mapping[str, str] = os.environ
) -> mpi.Launcher:
    """Find the mpirun (or srun) that belongs to the MPI library of an interpreter.

    Raises:
        LaunchProblem: there is none, or only those of other MPIs.
    """
    library = mpi.load_library(python)
    srun = mpi.find_srun(environ) if "SLURM_JOB_ID" in environ else None
    if options.launcher == "srun":
        if srun is None:
            raise LaunchProblem("--launcher srun: there is no Slurm allocation, or no srun in PATH")
        return mpi.Launcher(srun, "Slurm", mpi.srun_interface(srun, library.vendor))
    if options.mpirun is not None:
        if not os.access(options.mpirun, os.X_OK) or os.path.isdir(options.mpirun):
            raise LaunchProblem(f"--mpirun {options.mpirun} is no program.")
        paths = [os.path.abspath(options.mpirun)]
    else:
        paths = mpi.candidates(python, library.path, environ)
    launchers = mpi.find_launchers(paths)
    try:
        return mpi.choose(launchers, library)
    except LaunchProblem:
        if srun is not None and options.launcher == "auto" and options.mpirun is None:
            return mpi.Launcher(srun, "Slurm", mpi.srun_interface(srun, library.vendor))
        raise


def run_plain(plan: Plan) -> None:
    """Become the launcher; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = plan.arguments()
    os.execve(arguments[0], arguments, plan.environment())


def run_supervised(
    plan: Plan,
    *,
    folder: Path | None = None,
    prefix: bool = True,
    timestamps: bool = False,
    start: float = 120.0,
    grace: float = 30.0,
    port: int = 0,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> Verdict:
    """Run a job to its end and tell the user how it ended.

    Raises:
        LaunchProblem: the launcher's program cannot be run.
    """
    output = Output(
        out or sys.stdout, err or sys.stderr, folder, prefix=prefix, timestamps=timestamps
    )
    # With fault tolerance on, the survivors decide how to go on.
    failure = None if "--with-ft" in plan.before else Limits.failure
    limits = Limits(start=start, grace=grace, failure=failure)
    supervisor = Supervisor(plan, output, limits, port=port)
    verdict = supervisor.run()
    if verdict.text:
        report(verdict, output)
    return verdict


def report(verdict: Verdict, output: Output) -> None:
    """Print how a job failed, and last what the rank that failed first has said."""
    lines = [f"\nhvdlite run: {verdict.text}"]
    if verdict.rank is not None:
        words = last_words(output.tail(verdict.rank))
        if words:
            lines += [f"The last that rank {verdict.rank} wrote to stderr:", "", words]
    print("\n".join(lines), file=sys.stderr, flush=True)
