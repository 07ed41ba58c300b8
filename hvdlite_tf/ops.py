"""Collectives on TensorFlow tensors, eagerly and inside `tf.function`.

Every collective must be called by all ranks of its process set. Inside a `tf.function` they
run in the order in which they were called when it was traced, which has to be the same on all
ranks. Gradients pass through `allreduce` and `reducescatter` (with Sum and Average),
`allgather`, `broadcast`, `alltoall` and their grouped forms.

The loss that is differentiated is the sum of the losses of all ranks, so what a rank's input
gets is what all ranks' results pass back to it. The backward pass of a collective is itself a
collective: all ranks have to run it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import Average, ProcessSet, Sum, global_process_set
from hvdlite.collectives import resolve_op
from hvdlite.transport.types import ReduceOp

from . import bridge, requests
from .compression import Compression, Compressor
from .reduction import GradientReducer
from .requests import Reduction
from .tensors import check_tensor, check_tensors

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

Tensors = list[tf.Tensor]
untraced: Callable[[Any], Any] = tf.autograph.experimental.do_not_convert


# -- reductions ---------------------------------------------------------------------------


@untraced
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine the tensors of all ranks, which all get the same result, bit for bit.

    Args:
        tensor: of the same shape on all ranks; or IndexedSlices, whose rows are gathered from
            all ranks and added up where their indices are equal (Sum and Average only).
        average: old spelling of op: True for Average, False for Sum.
        device_dense, device_sparse, ignore_name_scope: accepted for compatibility.
        compression: what makes the tensor smaller on the wire.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplies every tensor before the reduction.
        postscale_factor: multiplies the result.
        name: identifies the tensor across ranks.
        process_set: the ranks that take part.

    Returns:
        A tensor, or IndexedSlices.

    Raises:
        TypeError: the argument is no tensor, or the operation is not defined for it.
        ValueError: both `average` and `op` are given.
        MismatchError: the ranks passed different things (on every rank; inside a
            `tf.function` as an error of TensorFlow that quotes it).
        HvdliteInternalError: a peer left, or the engine was shut down (likewise).
    """
    if isinstance(tensor, tf.IndexedSlices):
        factor = prescale_factor * postscale_factor
        return _sparse(tensor, resolve_op(average, op), factor, name, compression, process_set)
    reduction = Reduction(resolve_op(average, op), prescale_factor, postscale_factor, process_set)
    return _allreduce([check_tensor(tensor, "allreduce")], reduction, name, compression)[0]


@untraced
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Do an `allreduce` of several tensors, which become ready together."""
    op = resolve_op(average, op)
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    results: list[Any] = list(tensors) if isinstance(tensors, (list, tuple)) else []
    sparse = [i for i, item in enumerate(results) if isinstance(item, tf.IndexedSlices)]
    if not sparse:
        return _allreduce(check_tensors(tensors, "grouped_allreduce"), reduction, name, compression)
    dense = [i for i in range(len(results)) if i not in sparse]
    given = check_tensors([results[i] for i in dense], "grouped_allreduce")
    for i, result in zip(dense, _allreduce(given, reduction, name, compression), strict=True):
        results[i] = result
    factor = prescale_factor * postscale_factor
    for i in sparse:
        part = name and f"{name}.{i}"
        results[i] = _sparse(results[i], op, factor, part, compression, process_set)
    return results


def _allreduce(
    tensors: Tensors, reduction: Reduction, name: str | None, compression: type[Compressor]
) -> Tensors:
    if not tensors:
        return []
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = _reduce([small for small, _ in pairs], reduction, name)
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def _reduce(tensors: Tensors, reduction: Reduction, name: str | None) -> Tensors:
    def forward(given: Tensors) -> Tensors:
        return bridge.execute(
            [(requests.allreduce(reduction, name), given)],
            [tensor.dtype for tensor in given],
            [tensor.shape for tensor in given],
            "allreduce",
        )

    def backward(_: Any, gradients: Tensors) -> Tensors:
        _refuse_nonlinear(reduction.op, "allreduce")
        return _reduce(gradients, reduction, _backward_name(name))

    return _differentiable(lambda given: (forward(given), None), backward, tensors)


def _sparse(
    slices: tf.IndexedSlices,
    op: ReduceOp,
    factor: float,
    name: str | None,
    compression: type[Compressor],
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    if op not in (Sum, Average):
        raise NotImplementedError(f"allreduce: {op} of IndexedSlices is not defined here.")
    if factor != 1.0:
        values = slices.values * tf.cast(factor, slices.values.dtype)
        slices = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
    reducer = GradientReducer(op=op, compression=compression, process_set=process_set, name=name)
    result: tf.IndexedSlices = reducer([slices])[0]
    return result


@untraced
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce like `allreduce`, and return only this rank's part of the first dimension.

    The first `rows % size` ranks get one row more than the others.

    Raises:
        TypeError: the argument is no dense tensor, or the operation is not defined for it.
        ValueError: the tensor has no dimension.
        MismatchError, HvdliteInternalError: as for `allreduce`.
    """
    reduction = Reduction(resolve_op(None, op), prescale_factor, postscale_factor, process_set)
    given = [check_tensor(tensor, "reducescatter")]
    return _reducescatter(given, reduction, name, compression)[0]


@untraced
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> Tensors:
    """Do a `reducescatter` of several tensors, which become ready together."""
    reduction = Reduction(resolve_op(None, op), prescale_factor, postscale_factor, process_set)
    given = check_tensors(tensors, "grouped_reducescatter")
    return _reducescatter(given, reduction, name, compression)


def _reducescatter(
    tensors: Tensors, reduction: Reduction, name: str | None, compression: type[Compressor]
) -> Tensors:
    if not tensors:
        return []
    pairs = [compression.compress(tensor) for tensor in tensors]
    process_set = reduction.process_set

    def forward(given: Tensors) -> tuple[Tensors, Any]:
        results = bridge.execute(
            [(requests.reducescatter(reduction, name), given)],
            [tensor.dtype for tensor in given],
            [_after_first(tensor) for tensor in given],
            "reducescatter",
        )
        return results, None

    def backward(_: Any, gradients: Tensors) -> Tensors:
        _refuse_nonlinear(reduction.op, "reducescatter")
        factor = reduction.prescale * reduction.postscale
        if reduction.op is Average:
            factor /= process_set.size()
        gathered = _allgather(gradients, _backward_name(name), process_set)
        return [tensor * tf.cast(factor, tensor.dtype) for tensor in gathered]

    results = _differentiable(forward, backward, [small for small, _ in pairs])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


# -- movement -----------------------------------------------------------------------------


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
    return _allgather([check_tensor(tensor, "allgather")], name, process_set)[0]


@untraced
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensors:
    """Do an `allgather` of several tensors, which become ready together."""
    return _allgather(check_tensors(tensors, "grouped_allgather"), name, process_set)


def _allgather(tensors: Tensors, name: str | None, process_set: ProcessSet) -> Tensors:
    if not tensors:
        return []

    def forward(given: Tensors) -> tuple[Tensors, Any]:
        # The rows of every rank travel along: the backward pass has to know who gave which.
        rows = tf.stack([[tf.shape(t)[0] if t.shape.rank != 0 else 0 for t in given]])
        *results, rows = bridge.execute(
            [(requests.allgather(process_set, name), [*given, rows])],
            [*(tensor.dtype for tensor in given), tf.int32],
            [*map(_after_first, given), [process_set.size(), len(given)]],
            "allgather",
        )
        return results, tf.unstack(rows, axis=1, num=len(given))

    def backward(rows: Tensors, gradients: Tensors) -> Tensors:
        back = _backward_name(name)
        size = process_set.size()
        sums = []
        for i, (gradient, splits) in enumerate(zip(gradients, rows, strict=True)):
            part, _ = _alltoall(gradient, splits, back and f"{back}.{i}", process_set)
            shape = tf.shape(part)
            parts = tf.reshape(part, tf.concat([[size, shape[0] // size], shape[1:]], 0))
            sums.append(tf.reduce_sum(parts, axis=0))
        return sums

    return _differentiable(forward, backward, tensors)


@untraced
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensor of rank `root_rank` on all ranks.

    Args:
        tensor: the same shape and type on all ranks; only the root's values matter.
        root_rank: a rank of the job, also within a process set.
        name: identifies the tensor across ranks.
        ignore_name_scope: accepted for compatibility.
        process_set: the ranks that take part.

    Raises:
        TypeError: the argument is no dense tensor.
        ValueError: the root is not in the process set.
        MismatchError, HvdliteInternalError: as for `allreduce`.
    """

    def forward(given: Tensors) -> tuple[Tensors, Any]:
        results = bridge.execute(
            [(requests.broadcast(root_rank, process_set, name), given)],
            [tensor.dtype for tensor in given],
            [tensor.shape for tensor in given],
            "broadcast",
        )
        return results, None

    def backward(_: Any, gradients: Tensors) -> Tensors:
        reduction = Reduction(Sum, 1.0, 1.0, process_set)
        totals = _reduce(gradients, reduction, _backward_name(name))
        is_root = hvdlite.rank() == root_rank
        return totals if is_root else [tf.zeros_like(total) for total in totals]

    return _differentiable(forward, backward, [check_tensor(tensor, "broadcast")])[0]


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
        return _alltoall(given, None, name, process_set)[0]
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer:
        raise TypeError(f"alltoall: splits must be integers, not {splits.dtype.name}.")
    return tuple(_alltoall(given, splits, name, process_set))


def _alltoall(
    tensor: tf.Tensor, splits: tf.Tensor | None, name: str | None, process_set: ProcessSet
) -> Tensors:
    more = [] if splits is None else [splits]

    def forward(given: Tensors) -> tuple[Tensors, Any]:
        results = bridge.execute(
            [(requests.alltoall(process_set, name), [*given, *more])],
            [given[0].dtype, tf.int32 if splits is None else splits.dtype],
            [_after_first(given[0]), [process_set.size()]],
            "alltoall",
        )
        return results, results[1]

    def backward(received: tf.Tensor, gradients: Tensors) -> Tensors:
        return _alltoall(gradients[0], received, _backward_name(name), process_set)[:1]

    return _differentiable(forward, backward, [tensor])


# -- the rest -----------------------------------------------------------------------------


@untraced
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called this. In a graph, add an op."""
    if tf.executing_eagerly():
        hvdlite.barrier(process_set)
    else:
        bridge.refuse_xla("barrier")
        tf.numpy_function(functools.partial(_barrier, process_set), [], tf.int64)


def _barrier(process_set: ProcessSet) -> Any:
    hvdlite.barrier(process_set)
    return tf.int64.as_numpy_dtype(0)


@untraced
def join() -> Any:
    """Say that this rank has no more data, and wait until all ranks have.

    Until then this rank contributes nothing to the collectives of the others: zeros to sums,
    while averages still divide by the number of all ranks.

    Returns:
        The last rank to join; in a graph, a scalar tensor of it.
    """
    if tf.executing_eagerly():
        return hvdlite.join()
    bridge.refuse_xla("join")
    result = tf.numpy_function(lambda: tf.int32.as_numpy_dtype(hvdlite.join()), [], tf.int32)
    result.set_shape([])
    return result


# -- gradients ----------------------------------------------------------------------------


def _differentiable(
    forward: Callable[[Tensors], tuple[Tensors, Any]],
    backward: Callable[[Any, Tensors], Tensors],
    tensors: Tensors,
) -> Tensors:
    """Run a collective so that gradients pass through it.

    Args:
        forward: returns the results, and what `backward` has to know.
        backward: gets that and the gradients of the results that have any, and returns those
            of the tensors that have any. A result has a gradient if its tensor has; results
            beyond the tensors have none.
        tensors: the collective's inputs.
    """
    places = [i for i, tensor in enumerate(tensors) if _has_gradient(tensor)]
    if not places:
        return list(forward(tensors)[0])

    @tf.custom_gradient
    def function(*given: tf.Tensor) -> Any:
        results, known = forward(list(given))

        def gradient(*gradients: Any) -> list[Any]:
            some = [_dense(gradients[i], results[i]) for i in places]
            if len(places) != len(given) and isinstance(known, list):
                passed = backward([known[i] for i in places], some)
            else:
                passed = backward(known, some)
            spread: list[Any] = [None] * len(given)
            for i, value in zip(places, passed, strict=True):
                spread[i] = value
            return spread

        return results, gradient

    return list(function(*tensors))


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _dense(gradient: Any, like: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(like) if gradient is None else tf.convert_to_tensor(gradient)


def _refuse_nonlinear(op: ReduceOp, operation: str) -> None:
    if op not in (Sum, Average):
        raise NotImplementedError(f"{operation}: the gradient of {op} is not defined here.")


def _backward_name(name: str | None) -> str | None:
    return name and f"{name}.gradient"


def _after_first(tensor: tf.Tensor) -> Any:
    """Return the shape of a result of which only the ranks together know the rows."""
    return tf.TensorShape([None]).concatenate(tensor.shape[1:]) if tensor.shape.rank else None
