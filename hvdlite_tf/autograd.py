"""Gradients through collectives.

The loss that is differentiated is the sum of the losses of all ranks, so what a rank's input
gets is what all ranks' results pass back to it. The backward pass of a collective is itself a
collective: all ranks have to run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdlite import Average, Sum
from hvdlite.transport.types import ReduceOp

__all__ = ["Tensors", "backward_name", "differentiable", "refuse_nonlinear"]

Tensors = list[tf.Tensor]


def differentiable(
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


def refuse_nonlinear(op: ReduceOp, operation: str) -> None:
    """Raise in a backward pass through what is no sum."""
    if op not in (Sum, Average):
        raise NotImplementedError(f"{operation}: the gradient of {op} is not defined here.")


def backward_name(name: str | None) -> str | None:
    """Return the name of the collective in the backward pass."""
    return name and f"{name}.gradient"
