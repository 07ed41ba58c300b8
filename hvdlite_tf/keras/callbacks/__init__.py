"""Callbacks of `model.fit` for training on several ranks. Pass them on every rank."""

from __future__ import annotations

from .broadcast import BroadcastGlobalVariablesCallback
from .checkpoint import BestModelCheckpoint
from .learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from .metrics import MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
