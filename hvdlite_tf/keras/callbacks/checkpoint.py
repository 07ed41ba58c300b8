"""The best model so far, saved by one rank."""

from __future__ import annotations

import os
from typing import Any

import keras

import hvdlite

__all__ = ["BestModelCheckpoint"]


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far, on rank 0 only.

    Put it after `MetricAverageCallback`, or the metrics of rank 0 decide.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: see Keras's `ModelCheckpoint`.
        filepath: where to save; may be set later, as the attribute of that name.

    Raises:
        TypeError: `save_weights_only` is no bool, but a `mode`, say.
        ValueError: there is no `filepath` when training begins.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        # In horovod.keras `mode` is the third argument.
        if not isinstance(save_weights_only, bool):
            raise TypeError(
                "BestModelCheckpoint: save_weights_only must be True or False, not "
                f"{save_weights_only!r}; pass mode=... and save_freq=... by name."
            )
        stand_in = "unset.weights.h5" if save_weights_only else "unset.keras"
        super().__init__(
            filepath=stand_in if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint does not know where to save: pass filepath=..., or set "
                "its attribute filepath before fit()."
            )
        self.filepath = os.fspath(self.filepath)
        super().on_train_begin(logs)

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        if hvdlite.rank() == 0:
            super()._save_model(epoch, batch, logs)
