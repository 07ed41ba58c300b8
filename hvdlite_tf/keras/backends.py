"""What differs between the backends of Keras: how a list of gradients is reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras

__all__ = ["Backend", "backend"]

Reducer = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
Accumulator = Callable[[Sequence[int], Sequence[Any], Callable[[list[Any]], Any]], Any]


class Backend(Protocol):
    """What distributed optimizers ask of a backend."""

    compression: Any
    """The class whose attributes are the compressors."""

    def reducer(self, options: Any, groups: Any, name: str) -> Reducer:
        """Return a function of gradients and their variables that reduces the former."""

    def accumulator(self, passes: int, average: bool) -> Accumulator:
        """Return a function that adds gradients up, and hands on what they come to.

        It takes the gradients' places among all, the gradients, and what to do with their
        sums (or averages) in every call that completes a number of passes.
        """

    def scaled(self, grad: Any, factor: float) -> Any:
        """Return a gradient times a factor."""

    def has_updated(self, optimizer: Any) -> bool:
        """Whether `apply` of one that accumulates gradients has just used them."""

    def refuse_strategies(self) -> None:
        """Raise where the framework distributes the model in a way of its own."""


@functools.cache
def backend() -> Backend:
    """Return what goes with the backend that Keras runs on.

    Raises:
        NotImplementedError: there is nothing for it.
    """
    name = keras.backend.backend()
    if name == "tensorflow":
        from .on_tensorflow import TensorFlowBackend

        return TensorFlowBackend()
    if name == "torch":
        from .on_torch import TorchBackend

        return TorchBackend()
    raise NotImplementedError(
        f"hvdlite does not average gradients with Keras's {name} backend; "
        "set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch."
    )
