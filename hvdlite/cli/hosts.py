"""Hosts and their slots: from the command line, a hostfile, a discovery script or Slurm."""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .problems import LaunchProblem

__all__ = [
    "Host",
    "discover_hosts",
    "is_this_host",
    "parse_hosts",
    "place",
    "read_hostfile",
    "slurm_tasks",
]

_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_SCRIPT_SECONDS = 60.0


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it takes."""

    name: str
    slots: int = 1


def _host(name: str, slots: str | None, where: str, default: int) -> Host:
    bare = name.strip("[]")
    is_address = True
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        is_address = False
    if not is_address and not _NAME.fullmatch(name):
        raise LaunchProblem(f"{where}: {name!r} is no host name.")
    if slots is None:
        return Host(bare, default)
    if not slots.isascii() or not slots.isdigit() or int(slots) == 0:
        raise LaunchProblem(f"{where}: {slots!r} is no number of slots for {name}; 1 or more.")
    return Host(bare, int(slots))


def parse_hosts(text: str, default: int = 1, where: str = "--hosts") -> list[Host]:
    """Read `host1:2,host2:4`.

    Args:
        text: names with slots, separated by commas.
        default: slots of a host that names none.
        where: what to blame in errors.

    Raises:
        LaunchProblem: it is something else.
    """
    hosts = []
    for item in text.split(","):
        entry = item.strip()
        if not entry:
            raise LaunchProblem(f"{where}: there is an empty entry in {text!r}.")
        found = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::(.*))?", entry)
        if found is None:
            raise LaunchProblem(
                f"{where}: {entry!r} is not of the form host:slots (IPv6 addresses in brackets)."
            )
        hosts.append(_host(found[1], found[2], where, default))
    return _merged(hosts)


def read_hostfile(path: str | Path, default: int = 1) -> list[Host]:
    """Read lines `host slots=2` (Open MPI's and Horovod's form) or `host:2` (MPICH's).

    Raises:
        LaunchProblem: the file cannot be read, is empty, or says something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchProblem(f"The hostfile {path} cannot be read: {error}.") from error
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        where = f"{path}, line {number}"
        name, *words = entry.split()
        slots = None
        for word in words:
            key, _, value = word.partition("=")
            if key == "slots":
                slots = value
            elif key not in ("max_slots", "max-slots"):
                raise LaunchProblem(f"{where}: only `host slots=N` is understood, not {word!r}.")
        if slots is None:
            hosts += parse_hosts(name, default, where)
        else:
            hosts.append(_host(name, slots, where, default))
    if not hosts:
        raise LaunchProblem(f"The hostfile {path} names no host.")
    return _merged(hosts)


def discover_hosts(script: str, default: int = 1) -> list[Host]:
    """Ask a script, which prints `host` or `host:slots` lines.

    Raises:
        LaunchProblem: it fails, or prints something else or nothing.
    """
    try:
        done = subprocess.run(
            shlex.split(script), capture_output=True, text=True, timeout=_SCRIPT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchProblem(f"--host-discovery-script {script}: {error}.") from error
    if done.returncode != 0:
        raise LaunchProblem(
            f"--host-discovery-script {script} ended with status {done.returncode}: "
            f"{done.stderr.strip() or 'it says nothing'}"
        )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if not lines:
        raise LaunchProblem(f"--host-discovery-script {script} names no host.")
    return parse_hosts(",".join(lines), default, f"--host-discovery-script {script}")


def _merged(hosts: Sequence[Host]) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, number) for name, number in slots.items()]


def place(hosts: Sequence[Host], np: int) -> list[Host]:
    """Return the hosts that np ranks fill, in order, with the ranks that each gets.

    Raises:
        LaunchProblem: there are too few slots.
    """
    used, left = [], np
    for host in hosts:
        count = min(host.slots, left)
        if count:
            used.append(Host(host.name, count))
        left -= count
    if left:
        have = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchProblem(
            f"{np} ranks do not fit: the hosts have {np - left} slots ({have}). Say how many "
            f"ranks each takes, as in -H {hosts[0].name}:{-(-np // len(hosts))}, or lower -np."
        )
    return used


def is_this_host(name: str) -> bool:
    """Return whether a name means the machine that this process runs on."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]) or own.partition(".")[0] == name:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def slurm_tasks(environ: Mapping[str, str]) -> int | None:
    """Return how many tasks the Slurm allocation of this process is for; None without one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    text = environ.get("SLURM_NTASKS") or environ.get("SLURM_NPROCS") or ""
    return int(text) if text.isdigit() else None
