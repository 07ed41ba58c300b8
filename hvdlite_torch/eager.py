"""Keep torch.compile out of communication, which has nothing that it could compile."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["eager"]

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Make compiled code call a function as it is, instead of tracing into it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling() and not _runs_compiled():
            return function(*args, **kwargs)
        disabled: Any = getattr(function, "_hvdlite_eager", None)
        if disabled is None:
            compiler: Any = torch.compiler
            disabled = compiler.disable(function)
            function._hvdlite_eager = disabled  # type: ignore[attr-defined]
        return disabled(*args, **kwargs)  # type: ignore[no-any-return]

    return call


def _runs_compiled() -> bool:
    """Return whether this thread is in code that torch.compile looks at."""
    if "torch._dynamo" not in sys.modules:
        # Importing the compiler takes seconds: leave it to those who compile.
        return False
    # torch.optim imports it, too, and to disable what nobody compiles costs more than a hook does.
    # Older versions of torch do not tell.
    return _callback is None or _callback() is not None


_callback: Callable[[], object] | None = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", None
)
