"""Data-parallel training of Keras 3 models over MPI.

In a training script: `import hvdlite_tf.keras as hvd` and `hvd.init()`; wrap the optimizer that
`model.compile` gets with `hvd.DistributedOptimizer`; pass
`hvd.callbacks.BroadcastGlobalVariablesCallback(0)` and `hvd.callbacks.MetricAverageCallback()`
to `model.fit`.
"""

from __future__ import annotations

from hvdlite import (
    Adasum,
    Average,
    HvdliteError,
    HvdliteInternalError,
    HvdliteTimeoutError,
    Max,
    Min,
    MismatchError,
    NotInitializedError,
    ProcessSet,
    Product,
    ReduceOp,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    statistics,
    stop_timeline,
)

from . import callbacks
from .backends import backend
from .optimizer import DistributedOptimizer, PartialDistributedOptimizer
from .saving import load_model
from .values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_weights,
    reducescatter,
)

Compression = backend().compression
"""The compressors for the backend that Keras runs on."""

HorovodInternalError = HvdliteInternalError
"""Under the name that scripts written for Horovod catch."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HvdliteError",
    "HvdliteInternalError",
    "HvdliteTimeoutError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_weights",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "statistics",
    "stop_timeline",
]
