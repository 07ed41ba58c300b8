"""Give all ranks the variables or objects of one of them, and ask who and where we are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import MismatchError, ProcessSet, global_process_set, world
from hvdlite.transport.types import Array

from . import bridge, requests
from .agreement import difference, marker
from .tensors import check_tensor

__all__ = [
    "allgather_object",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "cross_rank_op",
    "cross_size_op",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]

_REQUEST_BYTES = 32 << 20
"""Variables are grouped into requests of about this size: few, and none of them huge."""

untraced: Any = tf.autograph.experimental.do_not_convert


# -- variables ----------------------------------------------------------------------------


@untraced
def broadcast_variables(
    variables: Any,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with the values of one rank.

    Args:
        variables: variables of TensorFlow or Keras, in the same order on all ranks; their
            names don't matter.
        root_rank: the rank (of the job) whose values all others get.
        process_set: the ranks that take part.
        inplace: accepted for compatibility.

    Returns:
        None; in a graph, an op that does it.

    Raises:
        TypeError: something else is among `variables`.
        MismatchError: number, shapes or types differ between ranks (on every rank).
    """
    variables = _checked(variables)
    _broadcast(variables, root_rank, "broadcast_variables", process_set)
    return None if tf.executing_eagerly() else tf.no_op()


@untraced
def broadcast_(
    variables: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Do a `broadcast_variables` and return the variables."""
    variables = _checked(variables)
    _broadcast(variables, root_rank, name or "broadcast_", process_set)
    return list(variables)


def _checked(variables: Any) -> list[Any]:
    if hasattr(variables, "assign"):
        variables = [variables]
    variables = list(variables)
    for index, variable in enumerate(variables):
        if not hasattr(variable, "assign"):
            raise TypeError(
                "broadcast_variables takes variables of TensorFlow or Keras; item "
                f"{index} is a {type(variable).__name__}."
            )
    return variables


def _broadcast(variables: list[Any], root: int, name: str, process_set: ProcessSet) -> None:
    if process_set.size() == 1:
        return
    tensors = [
        check_tensor(variable, "broadcast_variables", f"variables[{i}]")
        for i, variable in enumerate(variables)
    ]
    described = [f"{tensor.dtype.name}{list(tensor.shape)}" for tensor in tensors]
    if tf.executing_eagerly():
        found = difference(described, process_set)
        if found:
            raise MismatchError(f"Mismatched variables in broadcast_variables: {found}.")
    if not tensors:
        return
    jobs = [
        (requests.broadcast(root, process_set, f"{name}.{i}"), chunk)
        for i, chunk in enumerate(_chunks(tensors))
    ]
    if not tf.executing_eagerly():
        jobs.insert(0, _comparison(described, process_set))
    values = bridge.execute(
        jobs,
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
        "broadcast_variables",
    )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _comparison(described: list[str], process_set: ProcessSet) -> Any:
    """Return a job without data, which fails on all ranks where their variables differ."""
    start = requests.allgather(process_set, None)

    def compare(_: Sequence[Array]) -> bridge.Work:
        work = start([marker(described)])
        return bridge.Work(work.handle, lambda _: [], explain)

    def explain(error: MismatchError) -> MismatchError:
        return MismatchError(f"Mismatched variables in broadcast_variables: {error}")

    return compare, []


def _chunks(tensors: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    chunks: list[list[tf.Tensor]] = []
    filled = _REQUEST_BYTES
    for tensor in tensors:
        if filled >= _REQUEST_BYTES:
            chunks.append([])
            filled = 0
        chunks[-1].append(tensor)
        filled += (tensor.shape.num_elements() or 0) * tensor.dtype.size
    return chunks


# -- objects ------------------------------------------------------------------------------


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send an object from one rank to all others; see `hvdlite.broadcast_object`.

    Args:
        session: accepted for compatibility; there are no sessions.
    """
    return hvdlite.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that does a `broadcast_object` of its argument."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Collect one object from every rank; see `hvdlite.allgather_object`.

    Args:
        session: accepted for compatibility; there are no sessions.
    """
    return hvdlite.allgather_object(obj, name, process_set)


# -- who and where, known only when a graph runs ------------------------------------------


def _number(get: Callable[[], int], name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(get(), tf.int32)
    result = tf.numpy_function(lambda: np.int32(get()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return `rank()` as a scalar tensor, which a graph asks for each time it runs."""
    return _number(hvdlite.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return `local_rank()` as a scalar tensor."""
    return _number(hvdlite.local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return `local_size()` as a scalar tensor."""
    return _number(hvdlite.local_size, name)


def cross_rank_op(name: str | None = None) -> tf.Tensor:
    """Return `cross_rank()` as a scalar tensor."""
    return _number(hvdlite.cross_rank, name)


def cross_size_op(name: str | None = None) -> tf.Tensor:
    """Return `cross_size()` as a scalar tensor."""
    return _number(hvdlite.cross_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks in a process set as a scalar tensor."""
    return _number(lambda: _set(process_set_id).size(), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return as a scalar tensor 1 if this rank is in a process set, and 0 if not."""
    return _number(lambda: int(_set(process_set_id).included()), name)


def _set(process_set_id: int) -> ProcessSet:
    found = world.current().sets.get(process_set_id)
    if found is None:
        raise ValueError(f"There is no process set of the number {process_set_id}.")
    return found
