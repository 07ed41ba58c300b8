"""`DistributedOptimizer` for Keras 3."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import keras

import hvdlite
from hvdlite import Average, ProcessSet, global_process_set
from hvdlite.collectives import resolve_op
from hvdlite.transport.types import ReduceOp

from .backends import backend
from .distributed import Distributed, Options, distribute
from .loss_scale import teach_loss_scale_optimizer

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]

OptimizerT = TypeVar("OptimizerT")

_counters: defaultdict[int | None, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of optimizers within each process set: all its ranks create the same ones."""


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> OptimizerT:
    """Make a Keras optimizer reduce gradients over all ranks before it uses them.

    The reduction comes before everything that the optimizer does with gradients: unscaling,
    clipping, weight decay, moving averages. With `gradient_accumulation_steps` of Keras, what
    has been accumulated is reduced. The optimizer itself is changed, and keeps its slots; it
    is saved as the plain optimizer that it was, so `load_model` of hvdlite_tf.keras, and not
    that of Keras, returns a distributed one.

    Args:
        optimizer: a Keras 3 optimizer, a `LossScaleOptimizer` too.
        name: prefix of the reductions' names, the same on all ranks.
        device_dense: ignored; for scripts written for Horovod.
        device_sparse: ignored.
        compression: what makes gradients smaller on the wire.
        sparse_as_dense: reduce gradients of embeddings as dense tensors.
        gradient_predivide_factor: divides gradients before they are summed and multiplies them
            again after; the result is still their average.
        op: Average or Sum.
        backward_passes_per_step: how many calls of `apply` add their gradients up on each
            rank; only the last of them reduces them and updates the model, and only it counts
            in `optimizer.iterations`.
        average_aggregated_gradients: divide their sum by their number.
        num_groups: older spelling of `groups` as a number.
        groups: into how many buckets to divide the gradients, or lists of variables whose
            gradients are to be reduced together.
        process_set: the ranks that train together.
        scale_local_gradients: divide by the number of ranks what is not reduced; see
            `PartialDistributedOptimizer`.

    Returns:
        The optimizer.

    Raises:
        TypeError: it is no Keras optimizer.
        ValueError: an argument does not fit, or the optimizer is distributed already.
        NotInitializedError: before `init()`.
        NotImplementedError: Keras runs on a backend that hvdlite does not know.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "DistributedOptimizer takes an optimizer of Keras 3, such as "
            f"keras.optimizers.Adam(), not {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}."
        )
    hvdlite.size()  # raises before init()
    if isinstance(optimizer, Distributed) or isinstance(
        getattr(optimizer, "inner_optimizer", None), Distributed
    ):
        raise ValueError("DistributedOptimizer: this optimizer is a distributed one already.")
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(backward_passes_per_step, bool) or backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, not {backward_passes_per_step}."
        )
    if backward_passes_per_step > 1 and inner.gradient_accumulation_steps:
        raise ValueError(
            "The optimizer has gradient_accumulation_steps already: leave out "
            "backward_passes_per_step, which does the same."
        )
    if groups is None and num_groups:
        groups = num_groups
    is_number = isinstance(groups, int) and not isinstance(groups, bool)
    options = Options(
        compression=backend().compression.none if compression is None else compression,
        op=resolve_op(None, op),
        sparse_as_dense=bool(sparse_as_dense),
        gradient_predivide_factor=float(gradient_predivide_factor),
        passes=backward_passes_per_step,
        average_passes=bool(average_aggregated_gradients),
        number_of_groups=groups if is_number else None,  # type: ignore[arg-type]
        process_set=process_set,
        scale_local=bool(scale_local_gradients),
    )
    set_id = process_set.process_set_id
    label = f"{name or 'DistributedOptimizer'}.{next(_counters[set_id])}"
    distribute(optimizer, options, label, None if is_number else groups)
    teach_loss_scale_optimizer()
    return optimizer


def PartialDistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> OptimizerT:
    """Make a `DistributedOptimizer` that leaves the gradients of some layers on their ranks.

    Args:
        local_layers: a layer or several, built, whose weights each rank trains alone.
        scale_local_gradients: divide their gradients by the number of ranks, as the average
            does with those that only one rank contributes to.

    Returns:
        The optimizer; `register_local_var(variable)` adds single variables.

    Raises:
        TypeError: `local_layers` holds something else.
        ValueError: a layer has no weights yet.
    """
    layers = [] if local_layers is None else local_layers
    layers = layers if isinstance(layers, (list, tuple, set)) else [layers]
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise TypeError(f"local_layers must be layers of Keras, not {type(layer).__name__}.")
        if not layer.built:
            raise ValueError(f"The local layer {layer.name!r} is not built: build the model first.")
    optimizer = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        0,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            optimizer.register_local_var(variable)  # type: ignore[attr-defined]
    return optimizer
