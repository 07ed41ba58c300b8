"""Data-parallel training over MPI: the framework-neutral interface, on NumPy arrays."""

from __future__ import annotations

from .build_info import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from .cli.function import run
from .collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from .dispatch import DistributedOptimizer
from .engine.statistics import Statistics
from .engine.submissions import Handle
from .exceptions import (
    DuplicateNameError,
    HvdliteError,
    HvdliteInternalError,
    HvdliteTimeoutError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    SettingsError,
)
from .horovod_alias import install_horovod_alias
from .objects import allgather_object, broadcast_object
from .process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from .transport.types import ReduceOp
from .world import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    statistics,
    stop_timeline,
)

__version__ = "0.1.0"

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "DistributedOptimizer",
    "DuplicateNameError",
    "Handle",
    "HvdliteError",
    "HvdliteInternalError",
    "HvdliteTimeoutError",
    "LaunchError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "SettingsError",
    "Statistics",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "install_horovod_alias",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "statistics",
    "stop_timeline",
    "synchronize",
]
