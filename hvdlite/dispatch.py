"""Find the adapter that an optimizer needs, from its class."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["DistributedOptimizer"]

_ADAPTERS = {"torch": "hvdlite_torch", "keras": "hvdlite_tf", "tensorflow": "hvdlite_tf"}


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap an optimizer so that it averages gradients over all ranks before every step.

    Args:
        optimizer: a `torch.optim.Optimizer` or a Keras optimizer.
        args, kwargs: passed on to the `DistributedOptimizer` of the adapter.

    Returns:
        The wrapped optimizer.

    Raises:
        TypeError: it is neither.
        NotInitializedError: before `init()`.
    """
    for ancestor in type(optimizer).__mro__:
        adapter = _ADAPTERS.get(ancestor.__module__.partition(".")[0])
        if adapter is not None:
            module = importlib.import_module(adapter)
            return module.DistributedOptimizer(optimizer, *args, **kwargs)
    raise TypeError(
        "DistributedOptimizer takes an optimizer of PyTorch (torch.optim) or Keras, "
        f"not {type(optimizer).__module__}.{type(optimizer).__qualname__}."
    )
