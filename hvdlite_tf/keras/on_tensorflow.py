"""Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ..compression import Compression
from ..reduction import GradientReducer

__all__ = ["TensorFlowBackend"]


class TensorFlowBackend:
    """See `backends.Backend`."""

    compression = Compression

    def reducer(self, options: Any, groups: Any, name: str) -> GradientReducer:
        return GradientReducer(
            op=options.op,
            compression=options.compression,
            groups=groups,
            sparse_as_dense=options.sparse_as_dense,
            gradient_predivide_factor=options.gradient_predivide_factor,
            process_set=options.process_set,
            name=name,
        )

    def accumulator(self, passes: int, average: bool) -> _Accumulator:
        return _Accumulator(passes, average)

    def scaled(self, grad: Any, factor: float) -> Any:
        if isinstance(grad, tf.IndexedSlices):
            values = grad.values * tf.cast(factor, grad.values.dtype)
            return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
        return grad * tf.cast(factor, grad.dtype)

    def has_updated(self, optimizer: Any) -> bool:
        if not tf.executing_eagerly():
            return True  # a trace takes all the ways that a step can go
        return int(optimizer._iterations) % optimizer.gradient_accumulation_steps == 0

    def refuse_strategies(self) -> None:
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        if replicas > 1:
            raise RuntimeError(
                f"DistributedOptimizer does not work within a tf.distribute strategy (of "
                f"{replicas} replicas): start one rank per device instead."
            )


class _Accumulator:
    """Adds gradients up in variables of its own, eagerly and in graphs."""

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._sums: dict[int, tf.Variable] = {}
        self._count: tf.Variable | None = None
        self._pending: set[int] = set()

    def __call__(
        self,
        places: Sequence[int],
        grads: Sequence[Any],
        use: Callable[[list[Any]], Any],
    ) -> None:
        present = {
            place: tf.convert_to_tensor(grad)
            for place, grad in zip(places, grads, strict=True)
            if grad is not None
        }
        with tf.init_scope():  # outside of the function that is being traced, if one is
            if self._count is None:
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
            for place, grad in present.items():
                if place not in self._sums:
                    zeros = tf.zeros(grad.shape, grad.dtype)
                    self._sums[place] = tf.Variable(zeros, trainable=False)
        for place, grad in present.items():
            self._sums[place].assign_add(grad)
        if tf.executing_eagerly():
            self._pending |= set(present)
        else:
            self._pending = set(present)
        count = self._count.assign_add(1)
        pending = [place for place in places if place in self._pending]

        def update() -> None:
            divisor = self._passes if self._average else 1
            sums = {
                place: self._sums[place] / tf.cast(divisor, self._sums[place].dtype)
                for place in pending
            }
            use([sums.get(place) for place in places])
            for place in pending:
                self._sums[place].assign(tf.zeros_like(self._sums[place]))
            self._pending.clear()

        tf.cond(tf.equal(count % self._passes, 0), update, lambda: None)
