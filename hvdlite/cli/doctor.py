"""`hvdlite doctor`: all checks, other hosts, a self-test, and the report."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..exceptions import HvdliteError
from . import checks as checks_module
from .checks import Check
from .hosts import is_this_host, parse_hosts

__all__ = ["check_host", "examine", "print_json", "print_report", "self_test_check"]

_SSH_SECONDS = 20.0
_TEST_SECONDS = 60.0


def examine(
    *,
    self_test: bool = True,
    hosts: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    launch_agent: str | None = None,
    mpirun: str | None = None,
) -> list[Check]:
    """Make all checks.

    Args:
        self_test: whether to run two ranks.
        hosts: other hosts to look at, `host1:2,host2:2`.
        ssh_port, ssh_identity_file, launch_agent: how to reach them.
        mpirun: the launcher to look at, if not the one that is found.
    """
    library_check, library = checks_module.check_library()
    found = [
        checks_module.check_python(),
        checks_module.check_frameworks(),
        library_check,
        checks_module.check_launcher(library, mpirun),
        checks_module.check_wheels(),
        checks_module.check_shared_memory(),
        checks_module.check_locked_memory(),
        checks_module.check_huge_pages(),
        checks_module.check_cores(),
        checks_module.check_host_name(),
        checks_module.check_interfaces(),
        checks_module.check_temporary_folder(),
        checks_module.check_environment(),
    ]
    results = [check for check in found if check is not None]
    agent = _agent(launch_agent, ssh_port, ssh_identity_file)
    if hosts is not None:
        try:
            named = parse_hosts(hosts)
        except HvdliteError as error:
            results.append(Check("hosts", "trouble", str(error)))
            named = []
        results += [check_host(one.name, agent) for one in named if not is_this_host(one.name)]
    if self_test:
        results.append(self_test_check(results, mpirun))
    return results


def _agent(launch_agent: str | None, port: int | None, identity: str | None) -> list[str]:
    words = shlex.split(launch_agent) if launch_agent else ["ssh"]
    if not launch_agent:
        # Nobody is there to answer questions when mpirun asks.
        words += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]
    if port is not None:
        words += ["-p", str(port)]
    if identity is not None:
        words += ["-i", identity]
    return words


def check_host(name: str, agent: Sequence[str], seconds: float = _SSH_SECONDS) -> Check:
    """Look whether another host can be reached, and has this Python with this hvdlite.

    Args:
        name: the host.
        agent: the command that runs another one there.
        seconds: how long it may take.
    """
    from .. import __version__

    title = f"host {name}"
    root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); import socket, hvdlite; "
        "print('hvdlite', hvdlite.__version__, socket.gethostname())"
    )
    remote = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"
    data = {"host": name}
    try:
        done = subprocess.run(
            [*agent, name, remote],
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Check(
            title,
            "trouble",
            f"does not answer within {seconds:g} s",
            "Is it up, and does a firewall let ssh through?",
            data,
        )
    except OSError as error:
        return Check(title, "trouble", f"{agent[0]} cannot be run: {error.strerror}", "", data)
    said = done.stdout.split()
    if done.returncode == 0 and said[:1] == ["hvdlite"]:
        if said[1] != __version__:
            return Check(
                title,
                "trouble",
                f"has hvdlite {said[1]}, and this host {__version__}",
                "Ranks of different versions do not understand each other: install the same.",
                data,
            )
        if is_this_host(said[2]):
            text = f"can be reached, but calls itself {said[2]}, as this host does"
            return Check(title, "warning", text, "Two hosts need two names.", data)
        return Check(title, "ok", f"can be reached ({said[2]}), has the same hvdlite", data=data)
    words = (done.stderr.strip() or done.stdout.strip()).splitlines()
    why = words[-1] if words else f"status {done.returncode}"
    return Check(title, "trouble", f"cannot be used: {why}", _host_advice(why, name, root), data)


def _host_advice(why: str, name: str, root: str) -> str:
    texts = {
        "resolve": f"{name} is no known name: add it to /etc/hosts or DNS, or give its address.",
        "Permission denied": f"Log in must work without a question: ssh-copy-id {name}.",
        "Host key": f"Accept its key once: ssh {name} true.",
        "refused": "No sshd answers there: is it running, is the port right (--ssh-port)?",
        "timed out": "Is it up, and does a firewall let ssh through?",
        "No route": "Is it up, and on the same network?",
        "No such file": f"This Python ({sys.executable}) must be there under the same path.",
        "not found": f"This Python ({sys.executable}) must be there under the same path.",
        "No module named": f"hvdlite must be there as well, under {root}.",
    }
    return next((text for sign, text in texts.items() if sign in why), "")


def self_test_check(before: Sequence[Check], mpirun: str | None = None) -> Check:
    """Run two ranks here and take timings, unless MPI is known to be broken."""
    broken = [
        c.name for c in before if c.state == "trouble" and c.name in ("MPI library", "mpirun")
    ]
    if broken:
        return Check("self-test", "note", f"left out: {' and '.join(broken)} first")
    from .function import package_environment
    from .launch import JobOptions, prepare
    from .output import Output, last_words
    from .selftest import measure
    from .supervisor import Limits, Supervisor

    said = io.StringIO()
    try:
        plan = prepare(
            [sys.executable, "-m", "hvdlite.cli.task"],
            JobOptions(np=2, mpirun=mpirun, environment=package_environment({})),
        )
        output = Output(said, said)
        supervisor = Supervisor(
            plan,
            output,
            Limits(total=_TEST_SECONDS),
            payload=_call(measure),
            catch_signals=False,
        )
        verdict = supervisor.run()
    except HvdliteError as error:
        return Check("self-test", "trouble", str(error))
    if verdict.status != 0 or len(supervisor.results) < 2:
        words = last_words(output.tail(verdict.rank)) if verdict.rank is not None else ""
        last = (words or said.getvalue().strip()).splitlines()[-12:]
        return Check(
            "self-test",
            "trouble",
            verdict.text or "two ranks ended without results",
            "\n".join(last),
            {"status": verdict.status},
        )
    import pickle

    data: dict[str, Any] = pickle.loads(supervisor.results[0])
    if not data["right"]:
        return Check("self-test", "trouble", "two ranks got a wrong sum", "Report this.", data)
    text = (
        f"2 ranks with MPI_THREAD_MULTIPLE: {data['latency_us']:.0f} us for a scalar allreduce, "
        f"{data['bandwidth_gbs']:.1f} GB/s for 16 MiB of float32"
    )
    if data["latency_us"] > 20e3:
        return Check(
            "self-test",
            "warning",
            text,
            "Very slow: is the machine busy, or are ranks bound to one core?",
            data,
        )
    if data["direct"]:
        text += "; ranks reach each other's memory"
    elif not {"HVDLITE_TRANSPORT", "HVDLITE_PEER_MEMORY"} & set(os.environ):
        text += "; ranks cannot reach each other's memory, so large arrays take two copies more"
        hint = "In a container, the capability SYS_PTRACE permits it."
        return Check("self-test", "note", text, hint, data)
    return Check("self-test", "ok", text, data=data)


def _call(function: Any) -> bytes:
    import pickle

    return pickle.dumps((list(sys.path), pickle.dumps((function, (), {}))))


def print_json(results: Sequence[Check]) -> None:
    """Print the checks as one JSON object."""
    troubles = sum(check.state == "trouble" for check in results)
    print(
        json.dumps(
            {
                "ok": troubles == 0,
                "troubles": troubles,
                "warnings": sum(check.state == "warning" for check in results),
                "checks": [dataclasses.asdict(check) for check in results],
            },
            indent=2,
        )
    )


def print_report(results: Sequence[Check]) -> None:
    """Print the checks for people, what to do below what is wrong."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "cyan", "warning": "yellow", "trouble": "bold red"}
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in results:
        text = Text(check.text)
        if check.advice and check.state != "ok":
            text.append(f"\n-> {check.advice}", style="bold")
        table.add_row(Text(check.state, style=styles[check.state]), Text(check.name), text)
    console = Console(highlight=False)
    console.print(table)
    count = {state: sum(c.state == state for c in results) for state in ("trouble", "warning")}
    if count["trouble"]:
        console.print(f"\n{count['trouble']} in trouble, {count['warning']} to look at.")
    elif count["warning"]:
        console.print(f"\nReady, with {count['warning']} to look at.")
    else:
        console.print("\nReady.")
