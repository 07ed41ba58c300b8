"""Collectives on values: numbers, arrays and tensors in, NumPy arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np

import hvdlite
from hvdlite import Average, MismatchError, ProcessSet, global_process_set
from hvdlite.collectives import synchronize
from hvdlite.collectives.arrays import storage_views
from hvdlite.engine.submit import submit_broadcast
from hvdlite.transport.types import Array, DType, ReduceOp

from .backends import backend

__all__ = [
    "allgather",
    "allreduce",
    "as_array",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_weights",
    "reducescatter",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    compression: Any = None,
) -> Array:
    """Combine a value of all ranks, which all get the same result.

    Args:
        value: a number, array or tensor, of the same shape on all ranks.
        name: identifies the value across ranks.
        average: old spelling of op: True for Average, False for Sum.
        prescale_factor: multiplies the value before the reduction.
        postscale_factor: multiplies the result.
        op: Average (the default), Sum, Min, Max or Product.
        compression: what makes the value smaller on the wire.

    Returns:
        An array of the value's shape.
    """
    small, context = as_array(value), None
    if compression is not None and compression is not backend().compression.none:
        tensor, context = compression.compress(keras.ops.convert_to_tensor(small))
        small = as_array(tensor)
    result = hvdlite.allreduce(
        small,
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    if context is not None:
        result = compression.decompress(keras.ops.convert_to_tensor(result), context)
    return as_array(result)


def allgather(value: Any, name: str | None = None) -> Array:
    """Join a value of all ranks along its first dimension, which may differ between ranks."""
    return hvdlite.allgather(as_array(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Array:
    """Return the value of one rank on all ranks."""
    return hvdlite.broadcast(as_array(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Array:
    """Combine a value of all ranks; each gets a part of the result's first dimension."""
    return hvdlite.reducescatter(as_array(value), name=name, op=op)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Say what to use instead: Keras 3 has no collection of all variables.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "broadcast_global_variables: Keras 3 keeps no list of all variables. Pass "
        "BroadcastGlobalVariablesCallback to model.fit(), or call "
        f"broadcast_weights(model.weights + model.optimizer.variables, root_rank={root_rank})."
    )


def broadcast_weights(
    variables: Sequence[Any],
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give Keras variables the values that they have on one rank.

    Args:
        variables: variables of a model or an optimizer, the same ones in the same order on
            all ranks, whatever they are called there.
        root_rank: the rank (of the job) that has the values.
        name: identifies the broadcast across ranks.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' variables differ in number, shape or type (on every rank).
    """
    variables = list(variables)
    _check_alike(variables, name, process_set)
    if not variables or process_set.size() == 1:
        return
    arrays = [np.array(as_array(variable), order="C") for variable in variables]
    dtypes = [DType.of(array) for array in arrays]
    views = storage_views(arrays, dtypes)
    handle = submit_broadcast(
        views, views, root_rank=root_rank, dtypes=dtypes, name=name, process_set=process_set
    )
    synchronize(handle)
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def _check_alike(variables: Sequence[Any], name: str | None, process_set: ProcessSet) -> None:
    """Compare what ranks are about to broadcast, for an error that says what differs."""
    mine = [(tuple(v.shape), str(keras.backend.standardize_dtype(v.dtype))) for v in variables]
    everyone = hvdlite.allgather_object(mine, name and f"{name}.shapes", process_set)
    ranks = process_set.require_ranks()
    for rank, theirs in zip(ranks, everyone, strict=True):
        if theirs == everyone[0]:
            continue
        if len(theirs) != len(everyone[0]):
            what = f"{len(everyone[0])} variables there and {len(theirs)} here"
        else:
            index, (there, here) = next(
                (i, pair)
                for i, pair in enumerate(zip(everyone[0], theirs, strict=True))
                if pair[0] != pair[1]
            )
            what = f"variable {index} is {there[1]}{there[0]} there and {here[1]}{here[0]} here"
        raise MismatchError(
            f"broadcast_weights: the variables of rank {ranks[0]} and of rank {rank} differ: "
            f"{what}, on rank {rank}. Models and optimizers must be built alike on all ranks."
        )


def as_array(value: Any) -> Array:
    """Return a number, array, tensor or variable as a NumPy array."""
    # NumPy 2 warns about what Keras variables convert themselves with.
    if isinstance(value, keras.Variable):
        value = value.value
    if isinstance(value, (np.ndarray, np.generic, int, float, complex, list, tuple)):
        return np.asarray(value)
    return np.asarray(keras.ops.convert_to_numpy(value))
