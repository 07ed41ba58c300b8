"""Give all ranks the parameters of one of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import hvdlite
from hvdlite import Handle, MismatchError, ProcessSet, global_process_set
from hvdlite.transport.types import Array

from .async_ops import broadcast_many_
from .eager import eager
from .names import clean_names
from .tensors import check_tensor

__all__ = ["broadcast_parameters", "broadcast_tensors"]

_REQUEST_BYTES = 32 << 20
"""Tensors are grouped into requests of about this size: few, and none of them huge."""


@eager
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters, or a model's whole state, with the values of one rank.

    Args:
        params: what `model.state_dict()`, `named_parameters()` or `parameters()` returns: a
            dict, or any iterable of tensors or of (name, tensor) pairs. Entries that are None
            are skipped; memory that several entries share is sent once.
        root_rank: the rank (of the job) whose values all others get.
        process_set: the ranks that take part.

    Raises:
        TypeError: something else is among `params`.
        MismatchError: names, shapes or types differ between ranks (on every rank).
    """
    named = _named(params)
    names = clean_names([name for name, _ in named])
    tensors = {name: tensor for name, (_, tensor) in zip(names, named, strict=True)}
    # Sorted, because dicts of different ranks may differ in their order.
    entries = [_Entry.of(name, tensors[name]) for name in sorted(tensors)]
    unique = list({entry.memory: entry for entry in reversed(entries)}.values())[::-1]
    if process_set.size() == 1:
        return
    _agree([entry.description for entry in unique], process_set)
    tensors_to_send = [entry.tensor for entry in unique]
    broadcast_tensors(tensors_to_send, root_rank, "broadcast_parameters", process_set)


def broadcast_tensors(
    tensors: list[torch.Tensor], root_rank: int, name: str, process_set: ProcessSet
) -> None:
    """Broadcast tensors in place, in as few requests as is reasonable."""
    handles: list[Handle] = []
    start = nbytes = 0
    for end, tensor in enumerate(tensors, 1):
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _REQUEST_BYTES or end == len(tensors):
            request = f"{name}.{len(handles)}"
            handles.append(broadcast_many_(tensors[start:end], root_rank, request, process_set))
            start, nbytes = end, 0
    for handle in handles:
        handle.wait()


class _Entry(NamedTuple):
    name: str
    tensor: torch.Tensor

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Entry:
        # One of several elements that share memory stands for all of them.
        for dim, (stride, extent) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride == 0 and extent > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return cls(name, tensor)

    @property
    def memory(self) -> tuple[Any, ...]:
        """Equal for two tensors that are one and the same memory."""
        tensor = self.tensor
        return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

    @property
    def description(self) -> str:
        return f"{self.name}: {str(self.tensor.dtype)[6:]} {tuple(self.tensor.shape)}"


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, Mapping):
        items = list(params.items())
    elif isinstance(params, torch.Tensor) or not hasattr(params, "__iter__"):
        raise TypeError(
            "broadcast_parameters takes a dict, or an iterable of tensors or of (name, tensor) "
            f"pairs, such as model.state_dict(); not {type(params).__name__}."
        )
    else:
        items = [
            (item[0], item[1]) if isinstance(item, tuple) and len(item) == 2 else (f"{i:06}", item)
            for i, item in enumerate(params)
        ]
    named = []
    for name, value in items:
        if not isinstance(name, str):
            raise TypeError(
                f"broadcast_parameters: names must be strings, not {type(name).__name__}."
            )
        if value is not None:
            named.append((name, check_tensor(value, "broadcast_parameters", f"params[{name!r}]")))
    return named


def _agree(descriptions: list[str], process_set: ProcessSet) -> None:
    """Raise on every rank if the ranks do not describe the same tensors."""
    digest = hashlib.blake2b("\n".join(descriptions).encode(), digest_size=16).digest()
    mine: Array = np.frombuffer(digest, dtype=np.uint8).reshape(1, -1)
    digests = hvdlite.allgather(mine, "broadcast_parameters.check", process_set)
    if (digests == digests[0]).all():
        return
    everybody = hvdlite.allgather_object(
        descriptions, "broadcast_parameters.differences", process_set
    )
    ranks = process_set.require_ranks()
    lines = []
    for rank, theirs in zip(ranks[1:], everybody[1:], strict=True):
        for here, there, others in (
            (ranks[0], rank, sorted(set(everybody[0]) - set(theirs))),
            (rank, ranks[0], sorted(set(theirs) - set(everybody[0]))),
        ):
            lines += [f"rank {here} has {text!r}, rank {there} has not" for text in others[:3]]
    raise MismatchError(
        "Mismatched parameters in broadcast_parameters: " + "; ".join(lines[:12]) + "."
    )
