"""How ranks agree on buckets: by names, in the order in which one of them saw gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import hvdlite
from hvdlite import MismatchError, ProcessSet
from hvdlite.engine.submit import submit_allreduce
from hvdlite.transport.types import ReduceOp

from .buckets import Place, Reduction, Slot
from .tensors import is_dense

__all__ = ["agree_on_kinds", "agree_on_places"]

_PROBLEM = 255


def agree_on_places(
    slots: Sequence[Slot], groups: Any, name: str, reduction: Reduction
) -> list[tuple[Slot, Place]]:
    """Give parameters one order and one layout on all ranks, and learn which are sparse.

    Args:
        slots: the parameters, in the order in which this rank has seen their gradients.
        groups: numbers of the explicit groups of parameters.
        name: identifies the agreement across ranks.
        reduction: what is agreed upon is for this.

    Returns:
        The parameters in the order of the set's first rank, with how to lay them out.

    Raises:
        MismatchError: names, shapes or types of parameters differ (on every rank).
    """
    process_set = reduction.process_set
    root = process_set.require_ranks()[0]
    mine = [_place(slot, groups) for slot in slots]
    # The root's strides hold for all, so that elements meet their counterparts.
    places = hvdlite.broadcast_object(mine, root, f"{name}.order", process_set)
    by_name = {slot.name: slot for slot in slots}
    problem = _difference(
        {p.name: p for p in mine}, {p.name: p for p in places}, hvdlite.rank(), root
    )
    kinds = [0] * len(places)
    if problem is None:
        kinds = [_kind(by_name[place.name]) for place in places]
        if reduction.sparse_as_dense:
            kinds = [min(kind, 1) for kind in kinds]
    agreed = _maximum([*kinds, _PROBLEM if problem else 0], f"{name}.kinds", process_set)
    if agreed[-1]:
        problems = hvdlite.allgather_object(problem, f"{name}.problem", process_set)
        raise MismatchError(
            "Mismatched parameters of a DistributedOptimizer: "
            + "; ".join(text for text in problems if text)
        )
    result = []
    for place, kind in zip(places, agreed, strict=False):
        slot = by_name[place.name]
        slot.sparse_dim = max(0, kind - 1)
        result.append((slot, place))
    return result


def agree_on_kinds(slots: Sequence[Slot], name: str, process_set: ProcessSet) -> None:
    """Learn how many dimensions the sparse gradients of these parameters index."""
    agreed = _maximum([_kind(slot) for slot in slots], name, process_set)
    for slot, kind in zip(slots, agreed, strict=True):
        slot.sparse_dim = max(0, kind - 1)


def _kind(slot: Slot) -> int:
    """Return 0 for no gradient, 1 for a dense one, 1 + sparse_dim for a sparse one."""
    gradient = slot.parameter.grad
    if gradient is None:
        return 0
    return 1 + (gradient.sparse_dim() if gradient.layout is torch.sparse_coo else 0)


def _maximum(values: list[int], name: str, process_set: ProcessSet) -> list[int]:
    array = np.array(values, dtype=np.uint8)
    submit_allreduce([array], [array], name=name, op=ReduceOp.MAX, process_set=process_set).wait()
    return [int(value) for value in array]


def _place(slot: Slot, groups: Any) -> Place:
    parameter = slot.parameter
    dense = is_dense(parameter)
    stride = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
    group = groups.get(parameter, -1)
    return Place(slot.name, tuple(parameter.shape), tuple(stride), parameter.dtype, group)


def _difference(
    mine: Mapping[str, Place], root: Mapping[str, Place], my_rank: int, root_rank: int
) -> str | None:
    for here, there, first, second in (
        (mine, root, my_rank, root_rank),
        (root, mine, root_rank, my_rank),
    ):
        missing = [name for name in here if name not in there]
        if missing:
            return f"rank {first} has {missing[0]!r} ({len(missing)} in all), rank {second} has not"
    for name, place in mine.items():
        other = root[name]
        if (place.shape, place.dtype) != (other.shape, other.dtype):
            return (
                f"{name!r} is {place.dtype} of shape {place.shape} on rank {my_rank}, "
                f"{other.dtype} of shape {other.shape} on rank {root_rank}"
            )
    return None
