"""How a TensorFlow graph reaches the engine: ops that run Python, of which few are needed.

An operation inside `tf.function` is two ops: one that submits and returns a ticket at once,
and one that takes tickets and waits. TensorFlow runs such ops in the order in which they were
created, so whatever comes between the two overlaps with the communication.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import Handle, HvdliteTimeoutError, MismatchError
from hvdlite.transport.types import Array
from hvdlite.world import attended

from . import memory
from .tensors import array_of, tensor_of

__all__ = ["Mailbox", "Submit", "Work", "execute", "refuse_xla", "run", "wait_all"]

_SLICE = 0.5
"""Seconds between looks whether another handle has failed meanwhile."""
_DRAIN = 2.0
"""Seconds to wait, after a failure, for what was submitted along with what failed."""

Submit = Callable[[Sequence[Array]], "Work"]


class Work:
    """Something submitted, and how its result becomes the arrays that go to TensorFlow.

    Args:
        handle: what to wait for.
        finish: turns the handle's result into arrays.
        explain: makes the error of ranks that have submitted different things say more.
    """

    __slots__ = ("explain", "finish", "handle")

    def __init__(
        self,
        handle: Handle,
        finish: Callable[[Any], list[Array]],
        explain: Callable[[MismatchError], MismatchError] | None = None,
    ) -> None:
        self.handle = handle
        self.finish = finish
        self.explain = explain

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the handle and return its raw result."""
        try:
            return self.handle.wait(timeout)
        except MismatchError as error:
            if self.explain is None:
                raise
            raise self.explain(error) from None


def wait_all(works: Sequence[Work]) -> list[Array]:
    """Wait for all and return their arrays, one list after the other.

    Raises:
        Exception: what the first of them to fail raised; the others have been waited for,
            so that their names can be used again.
    """
    try:
        for work in works:
            _wait(work, works)
    except Exception:
        _drain(works)
        raise
    return [array for work in works for array in work.finish(work.wait())]


def _wait(work: Work, works: Sequence[Work]) -> None:
    while True:
        try:
            work.wait(_SLICE)
            return
        except HvdliteTimeoutError:
            # One that failed explains why this one is not completed.
            for other in works:
                if other is not work and other.handle.done():
                    other.wait()


def _drain(works: Sequence[Work]) -> None:
    for work in works:
        try:
            work.handle.wait(_DRAIN)
        except HvdliteTimeoutError:
            return
        except Exception:
            continue


class Mailbox:
    """Work under way between the two ops of one place in a graph."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self._works: dict[int, tuple[int, Work]] = {}
        self._lock = threading.Lock()

    def put(self, place: int, work: Work) -> int:
        """Keep work and return its ticket; what an aborted step has left there is forgotten."""
        with self._lock:
            ticket = next(self._numbers)
            self._works[place] = (ticket, work)
            return ticket

    def take(self, tickets: Sequence[int]) -> list[Work]:
        """Return the work of all tickets, which are those of places 0, 1, ..."""
        with self._lock:
            works = []
            for place, wanted in enumerate(tickets):
                ticket, work = self._works.pop(place, (0, None))
                if work is None or ticket != wanted:
                    raise RuntimeError(
                        "hvdlite: the same tf.function runs in several threads at once; "
                        "collectives inside it cannot tell them apart. Run one at a time."
                    )
                works.append(work)
            return works


def execute(
    jobs: Sequence[tuple[Submit, Sequence[tf.Tensor]]],
    types: Sequence[tf.DType],
    shapes: Sequence[Any],
    name: str,
) -> list[tf.Tensor]:
    """Submit each job and return the results of all: now, or when the graph runs.

    Args:
        jobs: what to submit, in this order; gets arrays that it must not write to.
        types: element types of all results.
        shapes: of all results, as far as they are known.
        name: of the collective, as users know it.

    Raises:
        NotImplementedError: a function that XLA is going to compile is being traced.
    """
    if tf.executing_eagerly():
        with attended():
            works = [submit([array_of(tensor) for tensor in tensors]) for submit, tensors in jobs]
            return [tensor_of(array) for array in wait_all(works)]
    refuse_xla(name)
    results = run(jobs, types, f"hvdlite_{name.replace(' ', '_')}")
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def run(
    jobs: Sequence[tuple[Submit, Sequence[tf.Tensor]]], types: Sequence[tf.DType], name: str
) -> list[tf.Tensor]:
    """Add ops to the graph that submit each job when its tensors are there, then wait for all.

    Args:
        jobs: what to submit, in this order; gets arrays that it must not write to.
        types: element types of all results.
        name: of the ops.

    Returns:
        The results, of unknown shapes.
    """
    mailbox = Mailbox()

    def submitter(place: int, submit: Submit) -> Callable[..., np.int64]:
        def enqueue(*arrays: Array) -> np.int64:
            return np.int64(mailbox.put(place, submit([np.asarray(array) for array in arrays])))

        return enqueue

    def synchronize(*tickets: np.int64) -> list[Array]:
        works = mailbox.take([int(ticket) for ticket in tickets])
        return [memory.aligned(array) for array in wait_all(works)]

    tickets = [
        tf.numpy_function(submitter(place, submit), tensors, tf.int64, name=f"{name}_{place}")
        for place, (submit, tensors) in enumerate(jobs)
    ]
    results = tf.numpy_function(synchronize, tickets, list(types), name=name)
    return list(results)


def refuse_xla(operation: str) -> None:
    """Raise if the function that is being traced is going to be compiled by XLA.

    Raises:
        NotImplementedError: it is.
    """
    try:
        from tensorflow.python.framework import ops
        from tensorflow.python.ops import control_flow_util

        inside = control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph())
    except (ImportError, AttributeError):
        return  # XLA itself then refuses, in words of its own
    if inside:
        raise NotImplementedError(
            f"{operation} cannot be compiled by XLA: remove jit_compile=True from the "
            "tf.function around it, or pass jit_compile=False to model.compile(). Functions "
            "without communication, such as the forward pass, may stay compiled."
        )
