"""Loading models whose optimizer is to be a distributed one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from .distributed import Distributed
from .optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
    *,
    compile: bool = True,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Load a model, and make its optimizer a distributed one.

    Every rank loads the file, which has to be in its reach. The optimizer keeps the state that
    was saved with it.

    Args:
        filepath: of a model saved with or without hvdlite.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other things that it does not know, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: ignored; for scripts written for Horovod.
        compile: whether the model gets the optimizer and losses it was saved with.
        safe_mode: whether lambdas in the file are refused.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model.

    Raises:
        ValueError: Keras cannot load the file.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.saving.load_model(
        filepath, custom_objects=objects, compile=compile, safe_mode=safe_mode
    )
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, keras.optimizers.Optimizer) and not (
        isinstance(optimizer, Distributed) or isinstance(inner, Distributed)
    ):
        DistributedOptimizer(optimizer, compression=compression, **options)
    return model
