"""What the ways have in common in which an optimizer's steps become those of all ranks."""

from __future__ import annotations

import abc
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .layout import Reduction
from .names import Label

__all__ = ["Options", "StepReducer"]


@dataclass(frozen=True)
class Options:
    """How an optimizer is distributed.

    Attributes:
        names: names of parameters, the same on all ranks (a `WeakIdKeyDictionary`, so that
            a parameter that is gone cannot be taken for a new one).
        groups: numbers of the explicit groups of parameters, likewise.
        reduction: how to combine gradients, or steps.
        passes_per_step: backward passes that accumulate before a reduction.
        bucket_bytes: size of a bucket, and of the first one.
    """

    names: Any
    groups: Any
    reduction: Reduction
    passes_per_step: int
    bucket_bytes: tuple[int, int]


class StepReducer(abc.ABC):
    """Stands between an optimizer and the other ranks. The optimizer owns it.

    Args:
        optimizer: whose steps these are; only known weakly.
        label: identifies the optimizer across ranks.
        options: see there.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, label: Label, options: Options) -> None:
        self.label = label
        self.names = options.names
        self.groups = options.groups
        self.reduction = options.reduction
        self.passes_per_step = options.passes_per_step
        self.bucket_bytes = options.bucket_bytes
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose steps these are."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("The optimizer of this reducer does not exist any more.")
        return optimizer

    @property
    def options(self) -> Options:
        """What a copy is to be made with."""
        return Options(
            self.names, self.groups, self.reduction, self.passes_per_step, self.bucket_bytes
        )

    def reset_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do what `zero_grad` of the optimizer's class does."""
        optimizer = self.optimizer
        type(optimizer).zero_grad(optimizer, *args, **kwargs)

    # What the optimizer's user may call.

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Have gradients be those of all ranks."""

    @abc.abstractmethod
    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Have `step()` use gradients as they are."""

    @abc.abstractmethod
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes accumulate before a step."""

    @abc.abstractmethod
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients."""

    # What the optimizer's hooks and gradient scalers call.

    @abc.abstractmethod
    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Get ready for a step, and return its arguments where they change."""

    @abc.abstractmethod
    def after_step(self, *step: Any) -> None:
        """Note that a step was taken; without arguments, that a scaler took it or skipped it."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Note that a gradient scaler is about to look at gradients."""
