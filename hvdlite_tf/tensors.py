"""TensorFlow tensors as the NumPy arrays that the engine works on, and back, without copies.

Arrays of TensorFlow's memory are to be read only: other tensors may share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.transport.types import Array, DType

from . import memory

__all__ = [
    "array_of",
    "check_tensor",
    "check_tensors",
    "dtype_of",
    "element_type",
    "static_shape",
    "storage_of",
    "tensor_of",
    "whereabouts",
]

_NAMES = {str(member): member for member in DType}


def whereabouts() -> str:
    """Return which rank an error is about."""
    return f"rank {hvdlite.rank()}" if hvdlite.is_initialized() else "before init()"


def check_tensor(value: Any, operation: str, argument: str = "tensor") -> tf.Tensor:
    """Return a tensor, variable, array or number as a dense tensor that can be communicated.

    Raises:
        TypeError: it is none of these, or has elements that don't travel.
    """
    if isinstance(value, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
        raise TypeError(
            f"{operation}: argument '{argument}' is a {type(value).__name__} "
            f"({whereabouts()}); convert it to a dense tensor first."
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{operation}: argument '{argument}' must be a tensor, not {type(value).__name__} "
            f"({whereabouts()}): {error}"
        ) from None
    if tensor.dtype.name not in _NAMES:
        raise TypeError(
            f"{operation}: argument '{argument}' has elements of type {tensor.dtype.name}, which "
            f"cannot be communicated ({whereabouts()})."
        )
    return tensor


def check_tensors(values: Any, operation: str) -> list[tf.Tensor]:
    """Return a sequence of tensors as a list, each checked like `check_tensor` does.

    Raises:
        TypeError: it is no sequence of tensors that can be communicated.
    """
    if tf.is_tensor(values) or isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"{operation}: argument 'tensors' must be a sequence of tensors, "
            f"not {type(values).__name__} ({whereabouts()})."
        )
    return [check_tensor(value, operation, f"tensors[{i}]") for i, value in enumerate(values)]


def dtype_of(tensor: Any) -> DType:
    """Return the element type of a tensor that `check_tensor` has passed."""
    return _NAMES[tf.as_dtype(tensor.dtype).name]


def element_type(dtype: Any) -> np.dtype[Any]:
    """Return the NumPy type that stands for a TensorFlow type."""
    return np.dtype(tf.as_dtype(dtype).as_numpy_dtype)


def array_of(tensor: tf.Tensor) -> Array:
    """Return the memory of an eager tensor, bfloat16 under the NumPy type of ml_dtypes."""
    if "GPU" in tensor.device:
        return np.asarray(tensor.numpy())
    if tensor.dtype == tf.bfloat16:
        # Python's buffer protocol does not know it.
        bits = np.asarray(memoryview(tf.bitcast(tensor, tf.uint16)))
        return bits.view(tf.bfloat16.as_numpy_dtype)
    return np.asarray(memoryview(tensor))


def storage_of(array: Any) -> Array:
    """Return an array, or the number that stands for one of no dimensions, as the engine's."""
    array = np.asarray(array)
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def tensor_of(array: Array) -> tf.Tensor:
    """Return an eager tensor that takes over the array's memory."""
    array = memory.aligned(array)
    if array.dtype.name == "bfloat16":
        return tf.bitcast(_take(array.view(np.uint16)), tf.bfloat16)
    return _take(array)


def _take(array: Array) -> tf.Tensor:
    if not array.flags.writeable:
        array = array.copy()
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def static_shape(tensor: Any) -> Sequence[int] | None:
    """Return a shape, or None where it is not known before the graph runs."""
    shape = tensor.shape
    return tuple(shape) if tf.TensorShape(shape).is_fully_defined() else None
