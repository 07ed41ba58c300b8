"""Gradient scaling has to see reduced gradients: the ranks must skip the same steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["teach_grad_scaler"]


def teach_grad_scaler(
    before: Callable[[torch.optim.Optimizer], None], after: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Have every GradScaler say when it looks at gradients and when it is done with a step.

    The scaler has no hook of its own, and unscales before `optimizer.step()`: it would divide
    gradients that are being reduced, and look for infinities in those of its own rank only.

    Args:
        before: called with the optimizer before its gradients are looked at.
        after: called with the optimizer after `scaler.step()`, also where that has skipped.
    """
    # PyTorch 2.2 has it for CUDA only.
    scaler: Any = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
    unscale, step = scaler._unscale_grads_, scaler.step
    if hasattr(step, "knows_hvdlite"):
        return

    @functools.wraps(unscale)
    def reduce_and_unscale(
        self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        before(optimizer)
        return unscale(self, optimizer, *args, **kwargs)

    @functools.wraps(step)
    def step_and_tell(
        self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        result = step(self, optimizer, *args, **kwargs)
        after(optimizer)
        return result

    step_and_tell.knows_hvdlite = True  # type: ignore[attr-defined]
    scaler._unscale_grads_ = reduce_and_unscale
    scaler.step = step_and_tell
