"""How a rank takes times."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

__all__ = ["Unavailable", "repeat", "slowest"]


class Unavailable(Exception):
    """A peer cannot do what is asked for; raised on all ranks alike."""


def slowest(samples: list[float]) -> list[float]:
    """Return the largest over the ranks of every sample (collective)."""
    array = np.asarray(samples, dtype=np.float64)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, op=MPI.MAX)
    return [float(value) for value in array]


def repeat(
    step: Callable[[], object],
    seconds: float,
    *,
    least: int = 5,
    most: int = 200,
    barrier: Callable[[], object] = MPI.COMM_WORLD.Barrier,
) -> list[float]:
    """Time a call that all ranks make together, each time after a barrier.

    Args:
        step: the call.
        seconds: about how long to go on.
        least: repetitions however long they take.
        most: repetitions however short they are.
        barrier: brings the ranks together before each repetition.

    Returns:
        Seconds of every repetition, on the rank where it took longest.
    """
    once = 0.0
    for _ in range(3):  # caches, connections, page faults
        barrier()
        start = time.perf_counter()
        step()
        once = slowest([time.perf_counter() - start])[0]
        if once > seconds / 4:
            break
    samples = []
    for _ in range(int(min(most, max(least, seconds / max(once, 1e-7))))):
        barrier()
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return slowest(samples)
