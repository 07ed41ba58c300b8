"""Which requests a reduction of gradients makes, and in which order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvdlite import MismatchError
from hvdlite.engine import submit
from hvdlite.transport.types import Array, DType

from . import bridge, memory
from .agreement import digest, marker
from .bridge import Work
from .partition import partition
from .sparse import submit_sparse
from .tensors import element_type, static_shape, storage_of

if TYPE_CHECKING:
    from .reduction import GradientReducer

__all__ = ["DENSE", "HINT", "SPARSE", "Plan", "describe", "is_sparse"]

DENSE = 1
SPARSE = 2
HINT = (
    "The ranks reduce gradients that differ in number, shape, type or kind. Inside a "
    "tf.function a gradient may not be None, or IndexedSlices, on some ranks only: "
    "tape.gradient(..., unconnected_gradients=tf.UnconnectedGradients.ZERO) or "
    "sparse_as_dense=True help."
)

_failures: Counter[int] = Counter()
"""How often the ranks of a process set disagreed.

Part of the names that follow, because some of what was submitted under the old ones is going
to wait for ever.
"""


class Plan:
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
        kinds = [0 if g is None else SPARSE if is_sparse(g) else DENSE for g in grads]
        sizes = [_bytes(grad, i, variables) for i, grad in enumerate(grads)]
        buckets = [
            [index for index in bucket if kinds[index] == DENSE]
            for bucket in partition(sizes, reducer.groups, variables)
        ]
        # The first one is always there, since it tells whether the ranks agree.
        self._buckets = [bucket for bucket in buckets if bucket] or [[]]
        self._sparse = [index for index, kind in enumerate(kinds) if kind == SPARSE]
        self._description = [*describe(grads, variables), str(kinds), str(self._buckets)]
        # Without a name, the first request is matched by its order, and the rest by the digest
        # that it has shown to be the same.
        self._label = reducer.name or f"gradients.{digest(self._description):08x}"
        for number, bucket in enumerate(self._buckets):
            self._add_dense(number, bucket)
        if self._sparse:
            self._add_sparse()

    def _name(self, part: int | str) -> str:
        failures = _failures[self._reducer.process_set.process_set_id or 0]
        return f"{self._label}.{part}" + (f".{failures}" if failures else "")

    def _add_dense(self, number: int, bucket: list[int]) -> None:
        tensors = [self._compressed(index, self._grads[index]) for index in bucket]
        self.types += [tensor.dtype for tensor in tensors]
        self.shapes += [tensor.shape for tensor in tensors]
        start = self._start_first if number == 0 else self._start_dense
        self.jobs.append((lambda arrays: start(arrays, number), tensors))

    def _add_sparse(self) -> None:
        tensors = []
        for index in self._sparse:
            grad = self._grads[index]
            values = self._compressed(index, grad.values)
            tensors += [values, tf.cast(grad.indices, tf.int64)]
            self.types += [values.dtype, tf.int64]
            self.shapes += [[None, *values.shape[1:]], [None]]
        reducer = self._reducer
        self.jobs.append(
            (
                lambda arrays: submit_sparse(
                    arrays, self._name("sparse"), reducer.op, reducer.process_set
                ),
                tensors,
            )
        )

    def _start_first(self, arrays: Sequence[Array], number: int) -> Work:
        """Submit the bucket that makes ranks that disagree fail, instead of waiting."""
        set_id = self._reducer.process_set.process_set_id or 0
        failures = _failures[set_id]

        def explain(error: MismatchError) -> MismatchError:
            _failures[set_id] = failures + 1
            return MismatchError(f"{error} {HINT}")

        name = self._reducer.name and self._name(number)
        return self._submit(arrays, name, [marker(self._description)], explain)

    def _start_dense(self, arrays: Sequence[Array], number: int) -> Work:
        return self._submit(arrays, self._name(number), [], None)

    def _submit(
        self, arrays: Sequence[Array], name: str | None, markers: list[Array], explain: Any
    ) -> Work:
        types = [array.dtype for array in arrays]
        inputs = [storage_of(array) for array in arrays]
        results = memory.lease_like(inputs)
        factor = self._reducer.gradient_predivide_factor
        handle = submit.submit_allreduce(
            [*inputs, *markers],
            [*results, *markers],
            dtypes=[DType.of(array) for array in [*arrays, *markers]],
            name=name,
            op=self._reducer.op,
            prescale=1.0 / factor,
            postscale=factor,
            process_set=self._reducer.process_set,
        )
        return Work(
            handle,
            lambda _: [a.view(dtype) for a, dtype in zip(results, types, strict=True)],
            explain,
        )

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


def is_sparse(grad: Any) -> bool:
    """Return whether a gradient holds some rows only."""
    return isinstance(grad, tf.IndexedSlices)


def describe(grads: Sequence[Any], variables: Sequence[Any] | None) -> list[str]:
    """Return what all ranks have to agree on about each gradient."""
    if variables is not None:
        return [f"{tf.as_dtype(v.dtype).name}{list(v.shape)}" for v in variables]
    # Whether a shape is known may depend on what a rank has traced before.
    return ["None" if g is None else tf.as_dtype(g.dtype).name for g in grads]


def _bytes(grad: Any, index: int, variables: Any) -> int:
    """Return the size of a gradient as far as all ranks know it, 0 for a sparse one."""
    like = grad if variables is None else variables[index]
    if like is None or is_sparse(like):
        return 0
    shape = static_shape(like)
    return 0 if shape is None else math.prod(shape) * element_type(like.dtype).itemsize
