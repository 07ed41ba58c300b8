"""Give all ranks the optimizer state of one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import hvdlite
from hvdlite import MismatchError, ProcessSet, global_process_set

from .broadcast import broadcast_tensors
from .eager import eager
from .tensors import check_tensor, is_dense

__all__ = ["broadcast_optimizer_state"]

_LOCAL_OPTIONS = ("params", "param_names")


@eager
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks the state and the options (learning rates, ...) of one rank's optimizer.

    The root's optimizer is only read. State that another rank has and the root has not is
    dropped; numbers stay numbers and tensors tensors, of the root's types.

    Args:
        optimizer: any optimizer, wrapped or not, with as many parameters in each group as on
            the root.
        root_rank: the rank (of the job) whose state all others get.
        model: accepted for compatibility.
        process_set: the ranks that take part.

    Raises:
        TypeError: `optimizer` is not an optimizer, or its state cannot be communicated.
        MismatchError: the groups differ between ranks (on every rank).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "broadcast_optimizer_state: argument 'optimizer' must be a torch.optim.Optimizer, "
            f"not {type(optimizer).__name__}."
        )
    if process_set.size() == 1:
        return
    is_root = hvdlite.rank() == root_rank
    name = "broadcast_optimizer_state"
    tensors: list[torch.Tensor] = []
    snapshot: Any = None
    if is_root:
        try:
            snapshot = _Snapshot.of(optimizer, tensors)
        except TypeError as error:  # the others are waiting
            snapshot = error
    snapshot = hvdlite.broadcast_object(snapshot, root_rank, f"{name}.structure", process_set)
    if isinstance(snapshot, TypeError):
        raise snapshot
    _agree(_Layout.of(optimizer), snapshot.layout, root_rank, process_set)
    if not is_root:
        tensors = [spec.empty(optimizer) for spec in snapshot.tensors]
    with torch.no_grad():
        broadcast_tensors(tensors, root_rank, name, process_set)
    if not is_root:
        snapshot.restore(optimizer, tensors)


@dataclass(frozen=True)
class _Layout:
    """What has to be equal on all ranks."""

    optimizer: str
    shapes: list[list[tuple[int, ...]]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Layout:
        return cls(
            type(optimizer).__name__,
            [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups],
        )


def _agree(mine: _Layout, root: _Layout, root_rank: int, process_set: ProcessSet) -> None:
    differs = None if mine == root else f"{mine.optimizer} with {_summary(mine)}"
    others = hvdlite.allgather_object(differs, "broadcast_optimizer_state.check", process_set)
    if any(others):
        found = ", ".join(
            f"rank {rank} has {text}"
            for rank, text in zip(process_set.require_ranks(), others, strict=True)
            if text
        )
        raise MismatchError(
            f"Mismatched optimizers in broadcast_optimizer_state: rank {root_rank} (the root) "
            f"has {root.optimizer} with {_summary(root)}, but {found}."
        )


def _summary(layout: _Layout) -> str:
    groups = "; ".join(
        f"group {i}: " + ", ".join(map(str, shapes[:8])) + (", ..." if len(shapes) > 8 else "")
        for i, shapes in enumerate(layout.shapes)
    )
    return f"parameters of shapes {groups}"


@dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor in the structure, and says how to make one like it."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    on_host: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, index: int) -> _TensorSpec:
        return cls(
            index,
            tuple(tensor.shape),
            tuple(tensor.stride()) if is_dense(tensor) else None,
            tensor.dtype,
            tensor.device.type == "cpu",
        )

    def empty(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        device = torch.device("cpu")
        if not self.on_host:
            device = optimizer.param_groups[0]["params"][0].device
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Snapshot:
    """An optimizer's state and options, with stand-ins for tensors."""

    layout: _Layout
    tensors: list[_TensorSpec]
    options: list[dict[str, Any]]
    state: list[tuple[int, Any]]
    """By position of the parameter, counted over all groups."""
    other_state: list[tuple[Any, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> _Snapshot:
        """Take the snapshot, and collect the tensors in `tensors`."""
        specs: dict[int, _TensorSpec] = {}

        def stand_in(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in specs:
                check_tensor(value, "broadcast_optimizer_state", "optimizer.state")
                specs[id(value)] = _TensorSpec.of(value, len(tensors))
                tensors.append(value.detach() if is_dense(value) else value.detach().contiguous())
            return specs[id(value)]

        positions = {parameter: i for i, parameter in enumerate(_parameters(optimizer))}
        state: list[tuple[int, Any]] = []
        other_state: list[tuple[Any, Any]] = []
        for key, value in optimizer.state.items():
            if not isinstance(key, torch.Tensor):
                other_state.append((key, _walk(value, stand_in)))
            elif key in positions:
                state.append((positions[key], _walk(value, stand_in)))
        options = [
            {k: _walk(v, stand_in) for k, v in group.items() if k not in _LOCAL_OPTIONS}
            for group in optimizer.param_groups
        ]
        return cls(_Layout.of(optimizer), list(specs.values()), options, state, other_state)

    def restore(self, optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> None:
        """Put the state and options into an optimizer of the same layout.

        Not by `load_state_dict`, which casts state to the type of its parameter.
        """

        def tensor_for(value: Any) -> Any:
            return tensors[value.index] if isinstance(value, _TensorSpec) else value

        parameters = _parameters(optimizer)
        optimizer.state.clear()
        for position, value in self.state:
            optimizer.state[parameters[position]] = _walk(value, tensor_for)
        for key, value in self.other_state:
            optimizer.state[key] = _walk(value, tensor_for)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            for key in [k for k in group if k not in options and k not in _LOCAL_OPTIONS]:
                del group[key]
            group.update((key, _walk(value, tensor_for)) for key, value in options.items())


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _walk(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a nest of dicts, lists and tuples with `change` applied to everything inside."""
    if type(value) is list:
        return [_walk(item, change) for item in value]
    if isinstance(value, tuple):
        items = [_walk(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        copy = value.copy()  # of the same class
        copy.update((key, _walk(item, change)) for key, item in value.items())
        return copy
    return change(value)
