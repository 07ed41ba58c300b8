"""Metrics of an epoch, averaged over the ranks."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

import hvdlite

from ..values import as_array

__all__ = ["MetricAverageCallback"]


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the logs of every epoch over the ranks.

    Put it before callbacks that act on logs (checkpoints, early stopping, schedules that wait
    for a plateau): those after it see the averages, the same on all ranks, and so does the
    history. A metric that only some ranks have stays as it is.

    Args:
        device: ignored; for scripts written for Horovod.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._has_warned = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {} if logs is None else {k: v for k, v in map(_numeric, logs.items()) if k}
        everyone = hvdlite.allgather_object(values, name="MetricAverageCallback")
        common = [key for key in everyone[0] if all(key in other for other in everyone)]
        everywhere = {key for other in everyone for key in other}
        if len(common) < len(everywhere) and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "MetricAverageCallback leaves metrics as they are that only some ranks have: "
                f"{', '.join(sorted(everywhere - set(common)))}.",
                stacklevel=2,
            )
        for key in common:
            mean = np.mean([other[key] for other in everyone], axis=0)
            # In place: the other callbacks hold the same dictionary.
            logs[key] = float(mean) if mean.ndim == 0 else mean  # type: ignore[index]


def _numeric(item: tuple[str, Any]) -> tuple[str, Any]:
    """Return name and value in double precision, or no name if it is no number."""
    key, value = item
    try:
        return key, as_array(value).astype(np.float64)
    except (TypeError, ValueError):
        return "", None
