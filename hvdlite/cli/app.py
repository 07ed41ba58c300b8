"""The commands, with click."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..exceptions import HvdliteError
from .launch import JobOptions, prepare, run_plain, run_supervised
from .options import REFUSED, SETTINGS, WITHOUT_EFFECT, settings_of
from .problems import LaunchProblem

__all__ = ["cli", "run_command"]

F = TypeVar("F", bound=Callable[..., Any])
_TYPES = {"integer": int, "number": float, "text": str}


def _setting_options(function: F) -> F:
    for setting in reversed(SETTINGS):
        kind: dict[str, Any] = {"default": None}
        if setting.kind != "switch":
            kind["type"] = _TYPES[setting.kind]
        function = click.option(*setting.flags, setting.name, help=setting.doc, **kind)(function)
    return function


def _refused_options(function: F) -> F:
    def refuse(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value:
            flag = parameter.opts[0]
            raise click.UsageError(f"{flag} is refused: {REFUSED[flag][1]}", context)

    for flag, (shape, _) in REFUSED.items():
        kinds: dict[str, dict[str, Any]] = {
            "flag": {"is_flag": True},
            "value": {"type": str},
            "pair": {"type": str, "nargs": 2},
        }
        function = click.option(
            flag, hidden=True, expose_value=False, callback=refuse, **kinds[shape]
        )(function)
    for flag in WITHOUT_EFFECT:
        function = click.option(flag, is_flag=True, hidden=True, expose_value=False)(function)
    return function


def _load_config(context: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    from .config_file import read_config_file

    try:
        # What the command line says wins over defaults, and these become defaults.
        context.default_map = {**(context.default_map or {}), **read_config_file(value)}
    except LaunchProblem as error:
        raise click.UsageError(str(error), context) from error


def _version() -> str:
    from .. import __version__

    return __version__


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"hvdlite {_version()}")
        context.exit()


def _check_build(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.exit(_doctor(as_json=False, self_test=False, hosts=None))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
def cli() -> None:
    """Data-parallel training over MPI."""


@cli.command(
    "run",
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    short_help="Run a training script on several ranks.",
)
@click.option("-np", "--num-proc", "np", type=click.IntRange(min=1), help="Number of ranks.")
@click.option("-H", "--hosts", help="Hosts and their slots: host1:2,host2:4.")
@click.option("-hostfile", "--hostfile", help="File of lines `host slots=2`.")
@click.option("--host-discovery-script", help="Program that prints lines `host:2`.")
@click.option("--slots-per-host", type=click.IntRange(min=1), help="Slots of hosts that name none.")
@click.option(
    "-x",
    "environment",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable on all ranks, or forward it to other hosts; NAME may be a pattern.",
)
@click.option("--network-interfaces", "--network-interface", help="Interfaces or networks to use.")
@click.option("-p", "--ssh-port", type=int, help="Port of other hosts' ssh.")
@click.option("-i", "--ssh-identity-file", type=str, help="Key for other hosts' ssh.")
@click.option("--launch-agent", help="Command to use in place of ssh.")
@click.option("--launcher-port", type=int, default=0, help="Where other hosts' ranks report to.")
@click.option("--mpirun", help="The mpirun to use; else the one that fits mpi4py's library.")
@click.option(
    "--launcher",
    type=click.Choice(["auto", "mpirun", "srun"]),
    default="auto",
    help="auto: mpirun; srun in a Slurm allocation where no mpirun fits.",
)
@click.option("--mpi-args", help="More options for mpirun, in one text.")
@click.option("--binding-args", help="mpirun's options for binding, instead of none.")
@click.option("--tcp", is_flag=True, help="Use TCP (and shared memory) only.")
@click.option("--wdir", help="Working directory of the ranks.")
@click.option("--output-filename", metavar="DIR", help="Keep DIR/rank.N/stdout and stderr.")
@click.option(
    "-prefix-timestamp",
    "--prefix-output-with-timestamp",
    is_flag=True,
    help="Begin lines with the time of day.",
)
@click.option("--no-prefix", is_flag=True, help="Do not begin lines with [rank].")
@click.option(
    "--start-timeout", type=float, default=120.0, help="Seconds until all ranks must run."
)
@click.option(
    "--grace", type=float, default=30.0, help="Seconds to end after a signal, before SIGKILL."
)
@click.option(
    "--config-file",
    is_eager=True,
    expose_value=False,
    callback=_load_config,
    help="YAML file of settings, in horovodrun's form.",
)
@click.option("--hierarchical-allreduce", is_flag=True, help="Reduce in hosts, then across.")
@click.option("--dry-run", is_flag=True, help="Print the command line and do nothing.")
@click.option("--plain", is_flag=True, help="Become mpirun: its output, signals and status.")
@click.option("--verbose", is_flag=True, help="Print the command line first.")
@click.option(
    "-v",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version.",
)
@click.option(
    "-cb",
    "--check-build",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_check_build,
    help="Show what is installed (see `hvdlite doctor`).",
)
@_setting_options
@_refused_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run_command(command: tuple[str, ...], **given: Any) -> None:
    """Run COMMAND on several ranks: `hvdlite run -np 4 -H host1:2,host2:2 python train.py`."""
    if not command:
        raise click.UsageError("say what to run: hvdlite run -np 2 python train.py")
    try:
        options = JobOptions(
            np=given["np"],
            hosts=given["hosts"],
            hostfile=given["hostfile"],
            discovery_script=given["host_discovery_script"],
            slots_per_host=given["slots_per_host"] or 1,
            environment=given["environment"],
            settings=settings_of(given),
            interfaces=given["network_interfaces"],
            agent=given["launch_agent"],
            ssh_port=given["ssh_port"],
            ssh_identity_file=given["ssh_identity_file"],
            mpirun=given["mpirun"],
            launcher=given["launcher"],
            mpi_arguments=shlex.split(given["mpi_args"] or ""),
            binding=None if given["binding_args"] is None else shlex.split(given["binding_args"]),
            tcp=given["tcp"],
            working_directory=given["wdir"],
        )
        plan = prepare(command, options)
        from .command import show

        if given["dry_run"]:
            click.echo(show(plan))
            return
        if given["verbose"]:
            click.echo(show(plan), err=True)
        if given["plain"]:
            run_plain(plan)
        verdict = run_supervised(
            plan,
            folder=Path(given["output_filename"]) if given["output_filename"] else None,
            prefix=not given["no_prefix"],
            timestamps=given["prefix_output_with_timestamp"],
            start=given["start_timeout"],
            grace=given["grace"],
            port=given["launcher_port"],
        )
    except HvdliteError as error:
        click.echo(f"hvdlite run: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:  # `hvdlite run ... | head`: the ranks have been ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    sys.exit(verdict.status)


@cli.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--no-self-test", is_flag=True, help="Do not run two ranks to measure.")
@click.option("-H", "--hosts", help="Also check that these hosts can be reached and used.")
@click.option("-p", "--ssh-port", type=int, help="Port of their ssh.")
@click.option("-i", "--ssh-identity-file", type=str, help="Key for their ssh.")
@click.option("--launch-agent", help="Command to use in place of ssh.")
@click.option("--mpirun", help="The mpirun to look at.")
def doctor_command(as_json: bool, no_self_test: bool, hosts: str | None, **given: Any) -> None:
    """Find out what this machine can do, what is wrong with it, and what to do about it."""
    sys.exit(_doctor(as_json, not no_self_test, hosts, **given))


_PASSED_ON: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": []}


@cli.command("bench", context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench_command(arguments: tuple[str, ...]) -> None:
    """Measure hvdlite against MPI's Allreduce, Gloo and others on this machine."""
    from ..bench import main

    sys.exit(main(list(arguments)))


@cli.command("timeline", context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def timeline_command(arguments: tuple[str, ...]) -> None:
    """Sum up a timeline: slow tensors, straggling ranks, hidden communication."""
    from ..timeline.analysis import main

    sys.exit(main(list(arguments)))


@cli.command("top", context_settings=_PASSED_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def top_command(arguments: tuple[str, ...]) -> None:
    """Show what the ranks of a running job do (it needs HVDLITE_METRICS_PORT)."""
    from ..metrics.top import main

    sys.exit(main(list(arguments)))


def _doctor(as_json: bool, self_test: bool, hosts: str | None, **given: Any) -> int:
    from .doctor import examine, print_json, print_report

    checks = examine(self_test=self_test, hosts=hosts, **given)
    if as_json:
        print_json(checks)
    else:
        print_report(checks)
    return int(any(check.state == "trouble" for check in checks))
