"""`DistributedOptimizer` with the arguments in the order that TensorFlow's scripts pass them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hvdlite import Average, ProcessSet, global_process_set
from hvdlite.transport.types import ReduceOp

from . import keras
from .compression import Compression, Compressor

__all__ = ["DistributedOptimizer"]

OptimizerT = TypeVar("OptimizerT")


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> OptimizerT:
    """Make a Keras optimizer reduce gradients over all ranks before it uses them.

    Does what `hvdlite_tf.keras.DistributedOptimizer` does, which explains the arguments; only
    their order differs, as it does between horovod.tensorflow and horovod.tensorflow.keras.

    Args:
        optimizer: a Keras 3 optimizer; those of `tf.compat.v1.train` are refused.
        use_locking: ignored; for scripts written for Horovod.

    Returns:
        The optimizer.

    Raises:
        TypeError: it is no Keras optimizer.
        ValueError: an argument does not fit, or the optimizer is distributed already.
        NotInitializedError: before `init()`.
    """
    return keras.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
