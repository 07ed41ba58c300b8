"""All-gather and all-to-all of TensorFlow tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import ProcessSet, global_process_set

from . import bridge, requests
from .autograd import Tensors, backward_name, differentiable
from .tensors import check_tensor, check_tensors

__all__ = [
    "after_first",
    "allgather",
    "allgather_tensors",
    "alltoall",
    "grouped_allgather",
]

untraced: Any = tf.autograph.experimental.do_not_convert


@untraced
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    Args:
        tensor: at least one dimension; the first one may differ between ranks, and be 0.
        name: identifies the tensor across ranks.
        ignore_name_scope: accepted for compatibility.
        process_set: the ranks that take part.

    Raises:
        TypeError: the argument is no dense tensor.
        ValueError: the tensor has no dimension.
        MismatchError, HvdliteInternalError: as for `allreduce`.
    """
    return allgather_tensors([check_tensor(tensor, "allgather")], name, process_set)[0]


@untraced
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensors:
    """Do an `allgather` of several tensors, which become ready together."""
    return allgather_tensors(check_tensors(tensors, "grouped_allgather"), name, process_set)


def allgather_tensors(tensors: Tensors, name: str | None, process_set: ProcessSet) -> Tensors:
    """Do a `grouped_allgather` of tensors that have been checked."""
    if not tensors:
        return []

    def forward(given: Tensors) -> tuple[Tensors, Any]:
        # The rows of every rank travel along: the backward pass has to know who gave which.
        rows = tf.stack([[tf.shape(t)[0] if t.shape.rank != 0 else 0 for t in given]])
        *results, rows = bridge.execute(
            [(requests.allgather(process_set, name), [*given, rows])],
            [*(tensor.dtype for tensor in given), tf.int32],
            [*map(after_first, given), [process_set.size(), len(given)]],
            "allgather",
        )
        return results, tf.unstack(rows, axis=1, num=len(given))

    def backward(rows: Tensors, gradients: Tensors) -> Tensors:
        back = backward_name(name)
        size = process_set.size()
        sums = []
        for i, (gradient, splits) in enumerate(zip(gradients, rows, strict=True)):
            part, _ = alltoall_tensors(gradient, splits, back and f"{back}.{i}", process_set)
            shape = tf.shape(part)
            parts = tf.reshape(part, tf.concat([[size, shape[0] // size], shape[1:]], 0))
            sums.append(tf.reduce_sum(parts, axis=0))
        return sums

    return differentiable(forward, backward, tensors)


@untraced
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to rank 0, 1, ... and return the rows received, in rank order.

    Args:
        tensor: at least one dimension.
        splits: how many rows each rank gets (a tensor or a sequence); None splits evenly.
        name: identifies the tensor across ranks.
        ignore_name_scope: accepted for compatibility.
        process_set: the ranks that take part.

    Returns:
        The received rows; with `splits`, a pair of them and how many came from each rank.

    Raises:
        TypeError: the argument is no dense tensor, or the splits are no integers.
        ValueError: the tensor has no dimension, or the splits don't fit it.
        MismatchError, HvdliteInternalError: as for `allreduce`.
    """
    given = check_tensor(tensor, "alltoall")
    if splits is None:
        return alltoall_tensors(given, None, name, process_set)[0]
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer:
        raise TypeError(f"alltoall: splits must be integers, not {splits.dtype.name}.")
    return tuple(alltoall_tensors(given, splits, name, process_set))


def alltoall_tensors(
    tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, process_set: ProcessSet
) -> Tensors:
    more = [] if splits is None else [splits]

    def forward(given: Tensors) -> tuple[Tensors, Any]:
        results = bridge.execute(
            [(requests.alltoall(process_set, name), [*given, *more])],
            [given[0].dtype, tf.int32 if splits is None else splits.dtype],
            [after_first(given[0]), [process_set.size()]],
            "alltoall",
        )
        return results, results[1]

    def backward(received: tf.Tensor, gradients: Tensors) -> Tensors:
        return alltoall_tensors(gradients[0], received, backward_name(name), process_set)[:1]

    return differentiable(forward, backward, [tensor])


def after_first(tensor: tf.Tensor) -> Any:
    """Return the shape of a result of which only the ranks together know the rows."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:]) if tensor.shape.rank else None
