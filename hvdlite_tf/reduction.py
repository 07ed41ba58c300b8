"""Reduce a list of gradients over the ranks: what tapes and optimizers build on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import Average, MismatchError, ProcessSet, Sum, global_process_set
from hvdlite.collectives import resolve_op
from hvdlite.engine import submit
from hvdlite.transport.types import Array, DType, ReduceOp

from . import bridge, memory
from .bridge import Work
from .compression import Compression, Compressor
from .partition import check_groups, partition
from .sparse import submit_sparse
from .tensors import (
    check_tensor,
    element_type,
    static_shape,
    storage_of,
)

__all__ = ["GradientReducer"]

_DENSE = 1
_SPARSE = 2
_SHAPELESS = 4
"""This rank has no gradient, and does not know what shape one would have."""

_HINT = (
    "The ranks reduce gradients that differ in number, shape, type or kind. Inside a "
    "tf.function a gradient may not be None, or IndexedSlices, on some ranks only: "
    "tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO) or "
    "sparse_as_dense=True help."
)


class GradientReducer:
    """Averages or sums gradients over the ranks, eagerly and inside `tf.function`.

    Gradients travel in buckets. In a graph each of them is submitted as soon as backward has
    produced what it holds, and one op at the end waits for all.

    Args:
        op: Average or Sum.
        compression: what makes gradients smaller on the wire.
        groups: how many buckets to form, or lists of variables that form one each; None
            leaves that to hvdlite.
        sparse_as_dense: whether IndexedSlices are made dense first.
        gradient_predivide_factor: what to divide by before the sum, the rest of an average
            being divided after it.
        process_set: the ranks that take part. On others, gradients stay as they are.
        name: identifies the reducer across ranks.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument makes no sense.
    """

    def __init__(
        self,
        *,
        op: ReduceOp | int = Average,
        compression: type[Compressor] = Compression.none,
        groups: Any = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        name: str,
    ) -> None:
        self.op = resolve_op(None, op)
        if self.op is ReduceOp.ADASUM:
            raise NotImplementedError("Adasum is not there yet; use Average or Sum.")
        if self.op not in (Average, Sum):
            raise ValueError(f"Gradients are combined by Average or Sum, not by {self.op}.")
        factor = float(gradient_predivide_factor)
        if factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor goes with op=Average only.")
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"gradient_predivide_factor must be positive, not {factor}.")
        check_groups(groups)
        self.compression = compression
        self.groups = groups
        self.sparse_as_dense = sparse_as_dense
        self.gradient_predivide_factor = factor
        self.process_set = process_set
        self.name = name

    @property
    def active(self) -> bool:
        """Whether there is anything to do on this rank."""
        hvdlite.size()  # raises before init()
        return self.process_set.included() and self.process_set.size() > 1

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """Return the gradients of all ranks combined.

        In a graph, ranks must have gradients for the same variables. Eagerly, a gradient
        that is missing on some ranks counts as zero; one missing on all of them stays None.

        Args:
            grads: tensors, IndexedSlices or None.
            variables: what the gradients are for, in the same order.

        Returns:
            As many gradients, of the same kinds; IndexedSlices have unique indices.

        Raises:
            MismatchError: the ranks' gradients differ in number, shape, type or kind (on every
                rank; in a graph as an error of TensorFlow that quotes it).
            NotImplementedError: a function that XLA is going to compile is being traced.
        """
        grads = list(grads)
        variables = None if variables is None else list(variables)
        if variables is not None and len(variables) != len(grads):
            raise ValueError(f"{len(grads)} gradients were given for {len(variables)} variables.")
        if not self.active or not grads:
            return grads
        grads = [self._checked(i, grad) for i, grad in enumerate(grads)]
        if tf.executing_eagerly():
            grads = self._filled(grads, variables)
        plan = _Plan(self, grads, variables)
        results = bridge.execute(plan.jobs, plan.types, plan.shapes, "allreduce of gradients")
        return plan.assemble(results)

    def _checked(self, index: int, grad: Any) -> Any:
        if grad is None:
            return None
        if isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
            return grad
        if isinstance(grad, tf.IndexedSlices):
            grad = tf.convert_to_tensor(grad)
        return check_tensor(grad, "The reduction of gradients", f"grads[{index}]")

    # -- agreement ----------------------------------------------------------------------

    def _filled(self, grads: list[Any], variables: Any) -> list[Any]:
        """Return gradients of the same kinds on all ranks, zero where one is missing."""
        kinds = self._agree([_kind(g, i, variables) for i, g in enumerate(grads)])
        for i, kind in enumerate(kinds):
            if kind & _DENSE and grads[i] is None:
                grads[i] = tf.zeros(variables[i].shape, variables[i].dtype)
            elif kind & _DENSE:
                grads[i] = tf.convert_to_tensor(grads[i])
            elif kind & _SPARSE and grads[i] is None:
                grads[i] = _no_rows(variables[i])
        return grads

    def _agree(self, kinds: list[int]) -> list[int]:
        """Return which kinds of gradients there are on any rank."""
        mine = np.array([[kind & bit for bit in (1, 2, 4)] for kind in kinds], dtype=np.uint8)
        handle = submit.submit_allreduce(
            [mine],
            [mine],
            name=f"{self.name}.kinds",
            op=ReduceOp.MAX,
            process_set=self.process_set,
        )
        try:
            bridge.wait_all([Work(handle, lambda _: [])])
        except MismatchError as error:
            raise MismatchError(
                "The ranks reduce different numbers of gradients, or do so in different "
                f"orders: {error}"
            ) from None
        for i, (dense, sparse, shapeless) in enumerate(mine.tolist()):
            if shapeless and (dense or sparse):
                raise ValueError(
                    f"Gradient {i} is None on some ranks only, and these do not know its "
                    "shape: pass the variables along with the gradients."
                )
        return [int(kind) for kind in mine.sum(axis=1)]

    # -- requests -----------------------------------------------------------------------

    def submit_dense(self, arrays: Sequence[Array], name: str, digest: int | None) -> Work:
        """Submit one bucket. The digest makes ranks that disagree fail instead of waiting."""
        types = [array.dtype for array in arrays]
        inputs = [storage_of(array) for array in arrays]
        outputs = memory.lease_like(inputs)
        dtypes = [DType.of(array) for array in arrays]
        results = outputs
        if digest is not None:
            # No data travels, but shapes are compared.
            marker = np.empty((0, digest), dtype=np.uint8)
            inputs, outputs, dtypes = [*inputs, marker], [*outputs, marker], [*dtypes, DType.UINT8]
        factor = self.gradient_predivide_factor
        handle = submit.submit_allreduce(
            inputs,
            outputs,
            dtypes=dtypes,
            name=name,
            op=self.op,
            prescale=1.0 / factor,
            postscale=factor,
            process_set=self.process_set,
        )
        return Work(
            handle,
            lambda _: [a.view(dtype) for a, dtype in zip(results, types, strict=True)],
            _HINT,
        )

    def submit_sparse(self, arrays: Sequence[Array], name: str) -> Work:
        """Submit all sparse gradients."""
        return submit_sparse(arrays, name, self.op, self.process_set)


class _Plan:
    """Which requests one call makes, and how their results become gradients again.

    Attributes:
        jobs: what to submit with which tensors, in this order.
        types, shapes: of the results.
    """

    def __init__(self, reducer: GradientReducer, grads: list[Any], variables: Any) -> None:
        self._reducer = reducer
        self._grads = grads
        self._contexts: dict[int, Any] = {}
        self.jobs: list[tuple[bridge.Submit, list[tf.Tensor]]] = []
        self.types: list[tf.DType] = []
        self.shapes: list[Any] = []
        kinds = [0 if g is None else _SPARSE if _is_sparse(g) else _DENSE for g in grads]
        sizes = [_bytes(grad, i, variables) for i, grad in enumerate(grads)]
        buckets = [
            [index for index in bucket if kinds[index] == _DENSE]
            for bucket in partition(sizes, reducer.groups, variables)
        ]
        # The first one is always there, since it carries the digest.
        self._buckets = [bucket for bucket in buckets if bucket] or [[]]
        self._sparse = [index for index, kind in enumerate(kinds) if kind == _SPARSE]
        digest = zlib.crc32(repr((kinds, self._buckets)).encode()) & 0x7FFFFFFF
        for number, bucket in enumerate(self._buckets):
            self._add_dense(number, bucket, digest if number == 0 else None)
        if self._sparse:
            self._add_sparse()

    def _add_dense(self, number: int, bucket: list[int], digest: int | None) -> None:
        name = f"{self._reducer.name}.{number}"
        tensors = [self._compressed(index, self._grads[index]) for index in bucket]
        self.types += [tensor.dtype for tensor in tensors]
        self.shapes += [tensor.shape for tensor in tensors]
        submit_dense = self._reducer.submit_dense
        self.jobs.append((lambda arrays: submit_dense(arrays, name, digest), tensors))

    def _add_sparse(self) -> None:
        name = f"{self._reducer.name}.sparse"
        tensors = []
        for index in self._sparse:
            grad = self._grads[index]
            values = self._compressed(index, grad.values)
            tensors += [values, tf.cast(grad.indices, tf.int64)]
            self.types += [values.dtype, tf.int64]
            self.shapes += [[None, *values.shape[1:]], [None]]
        submit_sparse = self._reducer.submit_sparse
        self.jobs.append((lambda arrays: submit_sparse(arrays, name), tensors))

    def _compressed(self, index: int, tensor: tf.Tensor) -> tf.Tensor:
        tensor, self._contexts[index] = self._reducer.compression.compress(tensor)
        return tensor

    def assemble(self, results: Sequence[tf.Tensor]) -> list[Any]:
        """Return gradients, from the results of the jobs in their order."""
        decompress = self._reducer.compression.decompress
        rest = iter(results)
        reduced: list[Any] = [None] * len(self._grads)
        for bucket in self._buckets:
            for index in bucket:
                reduced[index] = decompress(next(rest), self._contexts[index])
        for index in self._sparse:
            grad = self._grads[index]
            values = decompress(next(rest), self._contexts[index])
            indices = tf.cast(next(rest), grad.indices.dtype)
            reduced[index] = tf.IndexedSlices(values, indices, grad.dense_shape)
        return reduced


def _is_sparse(grad: Any) -> bool:
    return isinstance(grad, tf.IndexedSlices)


def _kind(grad: Any, index: int, variables: Any) -> int:
    if grad is None:
        known = variables is not None and static_shape(variables[index]) is not None
        return 0 if known else _SHAPELESS
    return _SPARSE if _is_sparse(grad) else _DENSE


def _no_rows(variable: Any) -> tf.IndexedSlices:
    shape = list(variable.shape)
    values = tf.zeros([0, *shape[1:]], variable.dtype)
    return tf.IndexedSlices(values, tf.zeros([0], tf.int64), tf.constant(shape, tf.int64))


def _bytes(grad: Any, index: int, variables: Any) -> int:
    """Return the size of a gradient as far as all ranks know it, 0 for a sparse one."""
    like = grad if variables is None else variables[index]
    if like is None or _is_sparse(like):
        return 0
    shape = static_shape(like)
    return 0 if shape is None else math.prod(shape) * element_type(like.dtype).itemsize
