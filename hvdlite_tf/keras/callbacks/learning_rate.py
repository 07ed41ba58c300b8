"""Learning rates that change with the epoch.

Goyal et al. 2017, "Accurate, Large Minibatch SGD": gradual warm-up, and the correction of the
momentum where the learning rate changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdlite

from ..values import as_array

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to a multiple of the initial one, within some epochs.

    Epochs are counted as `fit` does, from `initial_epoch` after a resume.

    Args:
        initial_lr: what is multiplied.
        multiplier: a number, or a function of the epoch that returns one.
        start_epoch: the first epoch in which the callback acts.
        end_epoch: the first one in which it no longer does; None for no end.
        staircase: whether the rate changes between epochs only. If not, it changes in every
            batch, and the function gets fractions of epochs. A number is always a staircase.
        momentum_correction: whether to rescale what SGD with momentum has gathered, which
            contains the learning rate, when that changes.
        steps_per_epoch: batches per epoch; None for what `fit` knows.

    Raises:
        ValueError: in `fit`: the optimizer has a schedule of its own, or the number of steps
            is not known.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required: the learning rate that is multiplied.")
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.current_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._set(self._get())  # fails now rather than in some epoch
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: fit() does not know how many batches an epoch has "
                    "with these data; pass steps_per_epoch."
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.current_epoch = epoch
        if self._acts() and self.staircase:
            self._adjust(self.multiplier(epoch))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._acts() and not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.multiplier(self.current_epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self._get()

    def _acts(self) -> bool:
        before_end = self.end_epoch is None or self.current_epoch < self.end_epoch
        return self.start_epoch <= self.current_epoch and before_end

    def _adjust(self, multiplier: float) -> None:
        old, new = self._get(), self.initial_lr * float(multiplier)
        if new == old:
            return
        self._set(new)
        if self.momentum_correction and old > 0:
            self._rescale_momentum(self._get() / old)

    def _get(self) -> float:
        return float(as_array(self.model.optimizer.learning_rate))

    def _set(self, rate: float) -> None:
        optimizer = self.model.optimizer
        try:
            optimizer.learning_rate = rate
        except (TypeError, AttributeError):
            raise ValueError(
                f"{type(self).__name__} cannot set the learning rate of {optimizer.name!r}, which "
                "follows a LearningRateSchedule or a function: give the optimizer a number, or "
                "leave out this callback and put the warm-up into the schedule."
            ) from None

    def _rescale_momentum(self, ratio: float) -> None:
        # The paper multiplies the momentum of one step; scaling what it is multiplied with is
        # the same, and works within a compiled step, of which the momentum is a constant.
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum and optimizer.built:
            for momentum in optimizer.momentums:
                if momentum is not None:
                    value = as_array(momentum)
                    momentum.assign((value * np.float32(ratio)).astype(value.dtype))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size()` to `initial_lr`, batch by batch.

    Args:
        initial_lr: the learning rate after the warm-up, as scaled for all ranks.
        warmup_epochs: how many epochs that takes.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: whether rank 0 prints a line at the end of the warm-up.

    Raises:
        ValueError: see `LearningRateScheduleCallback`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = hvdlite.size()
            # A batch further than the epoch says, so that the last batch has the full rate.
            done = min((epoch + 1 / (self.steps_per_epoch or 1)) / warmup_epochs, 1.0)
            return (1 + done * (size - 1)) / size

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.end_epoch is not None and epoch == self.end_epoch - 1:
            # With steps_per_execution the last batches of an epoch share one rate.
            self._adjust(1.0)
            if self.verbose and hvdlite.rank() == 0:
                print(f"\nEpoch {epoch + 1}: warm-up is over, learning rate {self._get():g}.")
        super().on_epoch_end(epoch, logs)
