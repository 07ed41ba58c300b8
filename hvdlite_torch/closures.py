"""Closures of `optimizer.step(closure)`: what they leave behind has to be that of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .async_ops import allreduce_async
from .layout import Reduction

__all__ = ["is_reduced", "reduced"]

_REDUCED = "_hvdlite_reduced"


def is_reduced(closure: Callable[..., Any]) -> bool:
    """Whether `reduced` has made this closure: `step()` may call that of a parent class."""
    return hasattr(closure, _REDUCED)


def reduced(
    closure: Callable[..., Any], settle: Callable[[], None], name: str, reduction: Reduction
) -> Callable[..., Any]:
    """Return a closure after which gradients and the loss are those of all ranks.

    The loss too: optimizers decide by it how to go on, and have to decide alike.

    Args:
        closure: the user's.
        settle: reduces the gradients and waits for them.
        name: identifies the loss across ranks.
        reduction: how to combine the losses.
    """

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        settle()
        if loss is None:
            return None
        is_tensor = isinstance(loss, torch.Tensor)
        value = loss.detach() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
        handle = allreduce_async(
            value, name=name, op=reduction.op, process_set=reduction.process_set
        )
        total = handle.wait()
        return total if is_tensor else total.item()

    setattr(evaluate, _REDUCED, True)
    return evaluate
