"""Data-parallel training of TensorFlow models over MPI.

In a training script: `import hvdlite_tf as hvd` and `hvd.init()`; give all ranks the weights of
one with `hvd.broadcast_variables`; then wrap the tape of every step with
`hvd.DistributedGradientTape`. For Keras's `fit` see `hvdlite_tf.keras`.

TensorFlow itself is imported when something that needs it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdlite import (
    Adasum,
    Average,
    DuplicateNameError,
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
    SettingsError,
    Statistics,
    Sum,
    add_process_set,
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
from hvdlite import __version__ as __version__

if TYPE_CHECKING:
    from .compression import Compression
    from .keras import broadcast_global_variables
    from .movement import allgather, alltoall, grouped_allgather
    from .ops import (
        allreduce,
        barrier,
        broadcast,
        grouped_allreduce,
        grouped_reducescatter,
        join,
        reducescatter,
    )
    from .optimizer import DistributedOptimizer
    from .state import (
        allgather_object,
        broadcast_,
        broadcast_object,
        broadcast_object_fn,
        broadcast_variables,
        cross_rank_op,
        cross_size_op,
        local_rank_op,
        local_size_op,
        process_set_included_op,
        rank_op,
        size_op,
    )
    from .sync_batch_norm import SyncBatchNormalization
    from .tape import DistributedGradientTape, PartialDistributedGradientTape

HorovodInternalError = HvdliteInternalError
"""Under the name that scripts written for Horovod catch."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DuplicateNameError",
    "HorovodInternalError",
    "HvdliteError",
    "HvdliteInternalError",
    "HvdliteTimeoutError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "SettingsError",
    "Statistics",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_rank_op",
    "cross_size",
    "cross_size_op",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "statistics",
    "stop_timeline",
]

_PLACES = {
    "compression": "Compression",
    "keras": "broadcast_global_variables",
    "movement": "allgather alltoall grouped_allgather",
    "ops": (
        "allreduce barrier broadcast grouped_allreduce grouped_reducescatter join reducescatter"
    ),
    "optimizer": "DistributedOptimizer",
    "state": (
        "allgather_object broadcast_ broadcast_object broadcast_object_fn broadcast_variables "
        "cross_rank_op cross_size_op local_rank_op local_size_op process_set_included_op "
        "rank_op size_op"
    ),
    "sync_batch_norm": "SyncBatchNormalization",
    "tape": "DistributedGradientTape PartialDistributedGradientTape",
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in ("tensorflow", "keras"):
            raise
        raise ImportError(
            f"hvdlite_tf.{name} needs {error.name}, which is not installed: "
            "pip install 'hvdlite[tensorflow]', or pip install keras tensorflow-cpu where "
            "there is no GPU."
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
