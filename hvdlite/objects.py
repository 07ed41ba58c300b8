"""Collectives on Python objects."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from . import world
from .collectives import broadcast, synchronize
from .engine.submit import submit_allgather
from .process_sets import ProcessSet, global_process_set
from .transport.types import Array

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send an object from one rank to all others.

    Args:
        obj: what the root sends; anything that can be pickled. Ignored on the other ranks.
        root_rank: the rank (of the job) that sends.
        name: name of the collective.
        process_set: the ranks that take part.

    Returns:
        The object itself on the root, a copy of it elsewhere.

    Raises:
        Exception: what pickling raised, on the root; RuntimeError elsewhere in that case.
    """
    is_root = world.rank() == root_rank
    data: Array = np.empty(0, dtype=np.uint8)
    problem: Exception | None = None
    if is_root:
        try:
            data = np.frombuffer(pickle.dumps(obj, protocol=4), dtype=np.uint8)
        except Exception as error:
            # The others wait for something: tell them, or they hang.
            problem = error
    header = np.array([len(data) if problem is None else -1], dtype=np.int64)
    name = name and f"{name}.size"
    length = int(broadcast(header, root_rank, name, process_set)[0])
    if problem is not None:
        raise problem
    if length < 0:
        raise RuntimeError(
            f"broadcast_object: the object of rank {root_rank} cannot be pickled; "
            "that rank's error says why."
        )
    if not is_root:
        data = np.empty(length, dtype=np.uint8)
    name = name and f"{name[: -len('.size')]}.data"
    data = broadcast(data, root_rank, name, process_set)
    return obj if is_root else pickle.loads(data.tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect one object from every rank.

    Args:
        obj: anything that can be pickled.
        name: name of the collective.
        process_set: the ranks that take part.

    Returns:
        The objects in rank order, on every rank.

    Raises:
        Exception: what pickling raised, on the rank where it did; RuntimeError elsewhere.
    """
    problem: Exception | None = None
    data: Array = np.empty(0, dtype=np.uint8)
    try:
        data = np.frombuffer(pickle.dumps(obj, protocol=4), dtype=np.uint8)
    except Exception as error:
        problem = error
    lengths = np.array([len(data)], dtype=np.int64)
    handle = submit_allgather([lengths, data], name=name, process_set=process_set)
    sizes, gathered = synchronize(handle)
    if problem is not None:
        raise problem
    if not sizes.all():
        failed = [process_set.require_ranks()[i] for i in np.flatnonzero(sizes == 0)]
        raise RuntimeError(f"allgather_object: the objects of ranks {failed} cannot be pickled.")
    ends = np.cumsum(sizes)
    return [
        pickle.loads(gathered[end - size : end].tobytes())
        for end, size in zip(ends, sizes, strict=True)
    ]
