"""Answers to the questions that scripts ask about how a Horovod was built."""

from __future__ import annotations

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_threads_supported() -> bool:
    """Return whether MPI may be used from several threads (hvdlite insists on it).

    Raises:
        NotInitializedError: before `init()`.
    """
    from .world import current

    current()
    return True


def mpi_enabled() -> bool:
    """Return whether MPI carries the communication: always."""
    return True


def mpi_built() -> bool:
    """Return whether MPI is supported: always."""
    return True


def gloo_enabled() -> bool:
    """Return whether Gloo carries the communication: never."""
    return False


def gloo_built() -> bool:
    """Return whether Gloo is supported: no."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL that is supported: 0, none."""
    return 0


def ddl_built() -> bool:
    """Return whether IBM's DDL is supported: no."""
    return False


def ccl_built() -> bool:
    """Return whether oneCCL is supported: no."""
    return False


def cuda_built() -> bool:
    """Return whether CUDA is supported: no."""
    return False


def rocm_built() -> bool:
    """Return whether ROCm is supported: no."""
    return False
