"""Loss scaling looks at reduced gradients, or ranks would disagree about steps to skip."""

from __future__ import annotations

import functools
from typing import Any

import keras

from .distributed import Distributed, run, state_of

__all__ = ["teach_loss_scale_optimizer"]


def teach_loss_scale_optimizer() -> None:
    """Make `LossScaleOptimizer` reduce gradients for an inner optimizer that is distributed.

    Keras itself puts one around the optimizer of a mixed_float16 model. On its own it would
    decide on each rank alone whether gradients are finite, and only then call the optimizer
    that talks to the others, some of which might not come.
    """
    plain = keras.optimizers.LossScaleOptimizer.apply
    if hasattr(plain, "_hvdlite"):
        return

    @functools.wraps(plain)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed) or state_of(inner).suspended:
            return plain(self, grads, trainable_variables)
        return run(
            inner,
            self,
            grads,
            trainable_variables,
            lambda grads, variables: plain(self, grads, variables),
        )

    apply._hvdlite = True  # type: ignore[attr-defined]
    keras.optimizers.LossScaleOptimizer.apply = apply
