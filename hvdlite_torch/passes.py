"""Which backward pass a gradient belongs to, and whether that pass came to its end."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from .eager import eager

__all__ = ["BackwardPasses"]


class BackwardPasses:
    """Numbers backward passes, as a parameter's hook sees them.

    A pass may hold others: reentrant activation checkpointing runs one for each segment, and a
    parameter that several segments share gets its gradient in as many pieces. They all belong
    to the outermost pass, which only the call stack knows.
    """

    def __init__(self) -> None:
        self._number = 0
        self._task = -1
        self._outermost: FrameType | None = None
        self._running: set[int] = set()

    def current(self, at_end: Callable[[], None]) -> int:
        """Return the number of the outermost pass that is going on (inside a hook).

        Args:
            at_end: called once that pass has come to its end without an error, where it has
                gradients of its own to accumulate.
        """
        task: int = torch._C._current_graph_task_id()
        if task == self._task:
            return self._number
        self._task = task
        frames = _frames_of_backward()
        outermost = frames[-1] if frames else None
        if outermost is None or outermost is not self._outermost:
            self._number += 1
            self._outermost = outermost
        if task not in self._running:
            self._running.add(task)
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(functools.partial(self._left, task, len(frames) <= 1, at_end))
        return self._number

    @eager
    def _left(self, task: int, is_outermost: bool, at_end: Callable[[], None]) -> None:
        self._running.discard(task)
        if is_outermost:
            self._outermost = None  # a frame keeps alive what the caller has
            self._task = -1
            at_end()

    @property
    def failed(self) -> bool:
        """Whether a pass began and has not come to its end."""
        return bool(self._running)

    def forget(self) -> None:
        """Note that what has been accumulated is used up or discarded."""
        self._running.clear()
        self._outermost = None
        self._task = -1


def _frames_of_backward() -> list[FrameType]:
    """Return the running calls of `torch.autograd.backward`, the outermost one last."""
    wanted: Any = torch.autograd.backward
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is wanted.__code__:
            found.append(frame)
        frame = frame.f_back
    return found
