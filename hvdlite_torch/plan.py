"""How ranks agree on buckets: by names, in the order in which one of them saw gradients."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import hvdlite
from hvdlite import Handle, MismatchError, ProcessSet
from hvdlite.engine.submit import submit_allgather, submit_allreduce
from hvdlite.transport.types import ReduceOp

from .layout import Place, Reduction
from .slots import Slot
from .tensors import is_dense

__all__ = ["Proposal", "agree_on_kinds", "agreed_places", "propose_places"]


@dataclass(frozen=True)
class Proposal:
    """What one rank has to say about parameters without a place.

    Attributes:
        rank: whose it is.
        places: in the order in which gradients were seen there.
        kinds: what gradients were seen: see `_kind`.
    """

    rank: int
    places: list[Place]
    kinds: list[int]


def propose_places(slots: Sequence[Slot], groups: Any, name: str, reduction: Reduction) -> Handle:
    """Begin the agreement on one order and one layout of parameters on all ranks.

    Args:
        slots: the parameters, in the order in which this rank has seen their gradients.
        groups: numbers of the explicit groups of parameters.
        name: identifies the agreement across ranks.
        reduction: what is agreed upon is for this.

    Returns:
        A handle whose result is the list of all ranks' proposals, for `agreed_places`.
    """
    kinds = [_kind(slot) for slot in slots]
    if reduction.sparse_as_dense:
        kinds = [min(kind, 1) for kind in kinds]
    mine = Proposal(hvdlite.rank(), [_place(slot, groups) for slot in slots], kinds)
    # One request, so that nobody has to do anything before it is complete.
    data = np.frombuffer(pickle.dumps(mine, protocol=4), dtype=np.uint8)
    handle = submit_allgather(
        [np.array([len(data)]), data], name=name, process_set=reduction.process_set
    )
    handle.convert = _proposals
    return handle


def _proposals(result: list[Any]) -> list[Proposal]:
    sizes, data = result
    ends = np.cumsum(sizes)
    return [
        pickle.loads(data[end - size : end].tobytes())
        for end, size in zip(ends, sizes, strict=True)
    ]


def agreed_places(slots: Sequence[Slot], proposals: Sequence[Proposal]) -> list[tuple[Slot, Place]]:
    """Return what all ranks make of their proposals.

    Returns:
        The parameters in the order of the first rank, with how to lay them out.

    Raises:
        MismatchError: names, shapes or types of parameters differ (on every rank).
    """
    first = proposals[0]
    root = {place.name: place for place in first.places}
    problems = [
        text
        for other in proposals[1:]
        if (text := _difference({p.name: p for p in other.places}, root, other.rank, first.rank))
    ]
    if problems:
        raise MismatchError(
            "Mismatched parameters of a DistributedOptimizer: " + "; ".join(problems)
        )
    agreed = dict.fromkeys(root, 0)
    for proposal in proposals:
        for place, kind in zip(proposal.places, proposal.kinds, strict=True):
            agreed[place.name] = max(agreed[place.name], kind)
    by_name = {slot.name: slot for slot in slots}
    # The first rank's strides hold for all, so that elements meet their counterparts.
    result = []
    for place in first.places:
        slot = by_name[place.name]
        slot.sparse_dim = max(0, agreed[place.name] - 1)
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
