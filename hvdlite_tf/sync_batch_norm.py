"""Batch normalization over the batches of all ranks together."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdlite import ProcessSet, global_process_set

from .movement import allgather

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable(package="hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras's BatchNormalization with the statistics of all ranks' batches.

    Outputs, gradients and moving statistics are those of one process that has the whole batch;
    ranks may have batches of different sizes. Statistics are put together as by Chan, Golub
    and LeVeque (1979), which loses no digits where means are large.

    Args:
        fused: accepted for compatibility, and must be False.
        process_set: the ranks that take part.
        kwargs: as of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` or `synchronized` is set.
        RuntimeError: Keras does not run on TensorFlow.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                "hvdlite_tf.SyncBatchNormalization needs KERAS_BACKEND=tensorflow, "
                f"which is {keras.backend.backend()} now."
            )
        if fused or kwargs.get("synchronized"):
            raise ValueError("SyncBatchNormalization does not go with fused or synchronized.")
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> Any:
        if self._process_set.size() == 1 or not self._process_set.included():
            return super()._moments(inputs, mask)
        axes = self._reduction_axes
        if mask is None:
            count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype)
            # 0 / 0 for a rank without data; it weighs nothing below.
            mean = tf.math.divide_no_nan(tf.reduce_sum(inputs, axes, keepdims=True), count)
            squares = tf.reduce_sum(tf.square(inputs - mean), axes, keepdims=True)
        else:
            weights = tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
            weights = tf.broadcast_to(weights, tf.shape(inputs))
            count = tf.reduce_sum(weights[..., 0])
            total = tf.reduce_sum(inputs * weights, axes, keepdims=True)
            mean = tf.math.divide_no_nan(total, count)
            squares = tf.reduce_sum(tf.square(inputs - mean) * weights, axes, keepdims=True)
        mine = [tf.reshape(mean, [-1]), tf.reshape(squares, [-1]), tf.reshape(count, [1])]
        everybody = allgather(tf.concat(mine, 0)[tf.newaxis], process_set=self._process_set)
        channels = inputs.shape[self.axis]
        means, squares, counts = tf.split(everybody, [channels, channels, 1], axis=1)
        total = tf.reduce_sum(counts)
        mean = tf.math.divide_no_nan(tf.reduce_sum(means * counts, 0), total)
        between = tf.reduce_sum(tf.square(means - mean) * counts, 0)
        variance = tf.math.divide_no_nan(tf.reduce_sum(squares, 0) + between, total)
        return mean, variance
