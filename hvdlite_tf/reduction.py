"""Reduce a list of gradients over the ranks: what tapes and optimizers build on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import Average, MismatchError, ProcessSet, Sum, global_process_set
from hvdlite.collectives import resolve_op
from hvdlite.engine import submit
from hvdlite.transport.types import ReduceOp

from . import bridge
from .agreement import difference, marker
from .bridge import Work
from .compression import Compression, Compressor
from .partition import check_groups
from .plan import DENSE, HINT, SPARSE, Plan, describe, is_sparse
from .tensors import check_tensor, static_shape

__all__ = ["GradientReducer"]

_SHAPELESS = 4
"""This rank has no gradient, and does not know what shape one would have."""


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
        name: identifies the reducer across ranks; None has its calls matched by their order.

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
        name: str | None,
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
        plan = Plan(self, grads, variables)
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
        kinds = self._agree(
            [_kind(g, i, variables) for i, g in enumerate(grads)], describe(grads, variables)
        )
        for i, kind in enumerate(kinds):
            if kind & DENSE and grads[i] is None:
                grads[i] = tf.zeros(variables[i].shape, variables[i].dtype)
            elif kind & DENSE:
                grads[i] = tf.convert_to_tensor(grads[i])
            elif kind & SPARSE and grads[i] is None:
                grads[i] = _no_rows(variables[i])
        return grads

    def _agree(self, kinds: list[int], described: list[str]) -> list[int]:
        """Return which kinds of gradients there are on any rank, once all reduce the same."""
        mine = np.array([[kind & bit for bit in (1, 2, 4)] for kind in kinds], dtype=np.uint8)
        both = [mine, marker(described)]
        handle = submit.submit_allreduce(
            both,
            both,
            name=self.name and f"{self.name}.kinds",
            op=ReduceOp.MAX,
            process_set=self.process_set,
        )
        try:
            bridge.wait_all([Work(handle, lambda _: [])])
        except MismatchError as error:
            found = difference(described, self.process_set)
            raise MismatchError(
                f"Mismatched gradients: {found}." if found else f"{error} {HINT}"
            ) from None
        for i, (dense, sparse, shapeless) in enumerate(mine.tolist()):
            if shapeless and (dense or sparse):
                raise ValueError(
                    f"Gradient {i} is None on some ranks only, and these do not know its "
                    "shape: pass the variables along with the gradients."
                )
        return [int(kind) for kind in mine.sum(axis=1)]


def _kind(grad: Any, index: int, variables: Any) -> int:
    if grad is None:
        known = variables is not None and static_shape(variables[index]) is not None
        return 0 if known else _SHAPELESS
    return SPARSE if is_sparse(grad) else DENSE


def _no_rows(variable: Any) -> tf.IndexedSlices:
    shape = list(variable.shape)
    values = tf.zeros([0, *shape[1:]], variable.dtype)
    return tf.IndexedSlices(values, tf.zeros([0], tf.int64), tf.constant(shape, tf.int64))
