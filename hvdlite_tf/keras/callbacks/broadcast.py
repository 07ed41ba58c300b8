"""All ranks begin with the weights and the optimizer of one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

import hvdlite

from ..values import broadcast_weights

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all ranks the weights and the optimizer state of one when training begins.

    That happens before the first batch, or, where a model or optimizer does not have its
    variables until then, right after it. Seeds of random layers stay each rank's own.

    Args:
        root_rank: the rank (of the job) whose state all get.
        device: ignored; for scripts written for Horovod.
        local_variables: variables that stay each rank's own.

    Raises:
        MismatchError: the ranks' variables differ (in `fit`, on every rank).
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = list(local_variables or ())
        self._pending = False

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on every rank."""
        self._local.append(var)

    def set_model(self, model: Any) -> None:
        """Keep Keras from handing the training step to XLA, which cannot communicate."""
        super().set_model(model)
        compiled = keras.backend.backend() == "tensorflow" and model.jit_compile
        if compiled and hvdlite.size() > 1:
            warnings.warn(
                "jit_compile=True is switched off for this model: XLA cannot compile a training "
                "step that reduces gradients over ranks. Pass jit_compile=False to "
                "model.compile() to silence this.",
                stacklevel=2,
            )
            model.jit_compile = False
            # fit() makes these when they are missing; the old ones are compiled.
            model.train_function = model.test_function = model.predict_function = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        built = all(layer.built for layer in self.model._flatten_layers())
        if built and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        ready = built and all(other.built for other in self._optimizers())
        # A rank that has loaded a checkpoint has variables that others do not have yet.
        ready_everywhere = hvdlite.allreduce(np.int32(ready), op=hvdlite.Min, name=self._name)
        self._pending = not ready_everywhere
        if not self._pending:
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Not at the end of the first one: that would make Keras wait for every batch's logs.
        if self._pending and batch > 0:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._pending:
            self._broadcast()

    def _broadcast(self) -> None:
        self._pending = False
        variables = list(self.model.weights)
        for optimizer in self._optimizers():
            variables += optimizer.variables
        local = {id(variable) for variable in self._local}
        seen: set[int] = set()
        distinct = []
        for variable in variables:
            if id(variable) not in seen | local:
                distinct.append(variable)
                seen.add(id(variable))
        broadcast_weights(distinct, self.root_rank, name=self._name)

    @property
    def _name(self) -> str:
        return "BroadcastGlobalVariablesCallback"

    def _optimizers(self) -> list[Any]:
        """Return the model's optimizers: those of a GAN are attributes of its own making."""
        found: list[Any] = []
        main = getattr(self.model, "optimizer", None)
        for _, value in [("", main), *sorted(vars(self.model).items(), key=lambda item: item[0])]:
            is_new = all(value is not other for other in found)
            if isinstance(value, keras.optimizers.Optimizer) and is_new:
                found.append(value)
        return found
