"""Collectives on TensorFlow tensors, eagerly and inside `tf.function`.

Every collective must be called by all ranks of its process set. Inside a `tf.function` they
run in the order in which they were called when it was traced, which has to be the same on all
ranks. Gradients pass through `allreduce` and `reducescatter` (with Sum and Average),
`allgather`, `broadcast`, `alltoall` and their grouped forms; see autograd.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import Average, ProcessSet, Sum, global_process_set
from hvdlite.collectives import resolve_op
from hvdlite.transport.types import ReduceOp

from . import bridge, requests
from .autograd import Tensors, backward_name, differentiable, refuse_nonlinear
from .compression import Compression, Compressor
from .movement import after_first, allgather_tensors
from .reduction import GradientReducer
from .requests import Reduction
from .tensors import check_tensor, check_tensors

__all__ = [
    "allreduce",
    "barrier",
    "broadcast",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

untraced: Any = tf.autograph.experimental.do_not_convert


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
        refuse_nonlinear(reduction.op, "allreduce")
        return _reduce(gradients, reduction, backward_name(name))

    return differentiable(lambda given: (forward(given), None), backward, tensors)


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
        values = slices.values * tf.constant(factor, slices.values.dtype)
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
            [after_first(tensor) for tensor in given],
            "reducescatter",
        )
        return results, None

    def backward(_: Any, gradients: Tensors) -> Tensors:
        refuse_nonlinear(reduction.op, "reducescatter")
        factor = reduction.prescale * reduction.postscale
        if reduction.op is Average:
            factor /= process_set.size()
        gathered = allgather_tensors(gradients, backward_name(name), process_set)
        return [tensor * tf.constant(factor, tensor.dtype) for tensor in gathered]

    results = differentiable(forward, backward, [small for small, _ in pairs])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


# -- broadcast -----------------------------------------------------------------------------


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
        totals = _reduce(gradients, reduction, backward_name(name))
        is_root = hvdlite.rank() == root_rank
        return totals if is_root else [tf.zeros_like(total) for total in totals]

    return differentiable(forward, backward, [check_tensor(tensor, "broadcast")])[0]


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
