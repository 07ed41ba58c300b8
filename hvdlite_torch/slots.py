"""What is known of each parameter's gradient, and whether it is still what backward has left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .arguments import whereabouts
from .tensors import shares_memory

if TYPE_CHECKING:
    from .buckets import Bucket

__all__ = ["Slot", "refuse_changes"]

_SHOWN = 5
_UNKNOWN = -1


class Slot:
    """A parameter and what has become of its gradient in this step.

    Attributes:
        name: the parameter's name, the same on all ranks.
        bucket: what its gradient is reduced with; None before that is agreed, and for sparse ones.
        view: its place in the bucket's memory; None without a bucket.
        address: of that place.
        sparse_dim: dimensions that its sparse gradients index; 0 for dense gradients.
        passes: backward passes since the last reduction.
        pass_number: of the last one.
        recurs: whether its gradient comes in several pieces within a backward pass.
        present: whether it had a gradient when its bucket was submitted.
        lent_at: the address of `lent`.
        memory: the array that owns the memory of `lent`.
        lent: its gradient, where that is reduced in its own memory and not in the bucket.
        change: what was done to the gradient after backward; nothing as it should be.
    """

    __slots__ = (
        "_at",
        "_left",
        "_version",
        "address",
        "bucket",
        "change",
        "lent",
        "lent_at",
        "memory",
        "name",
        "parameter",
        "pass_number",
        "passes",
        "present",
        "recurs",
        "sparse_dim",
        "view",
    )

    def __init__(self, name: str, parameter: torch.Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.bucket: Bucket | None = None
        self.view: Any = None  # a tensor, once there is a bucket
        self.address = 0
        self.sparse_dim = 0
        self.passes = 0
        self.pass_number = 0
        self.recurs = False
        self.present = False
        self.lent: torch.Tensor | None = None
        self.lent_at = 0
        self.memory: Any = None
        self.change = ""
        self._left: torch.Tensor | None = None
        self._version = self._at = 0

    @property
    def holds_sparse(self) -> bool:
        """Whether the parameter has a sparse gradient now."""
        gradient = self.parameter.grad
        return gradient is not None and gradient.layout is not torch.strided

    def observe(self) -> None:
        """Note the gradient as backward leaves it."""
        self.change = ""
        self.follow()

    def follow(self) -> None:
        """Note where the gradient is now, which has moved."""
        self._left = gradient = self.parameter.grad
        if gradient is not None:
            is_strided = gradient.layout is torch.strided
            self._at = gradient.data_ptr() if is_strided else 0
            # Pieces of one tensor count each other's changes, such as what a further pass adds.
            aliases = is_strided and self._at != self.address and shares_memory(gradient)
            self._version = _UNKNOWN if aliases else gradient._version

    def inspect(self) -> str:
        """Note in `change`, and return, what has become of the gradient since then.

        That it is gone is no change: it was discarded. `gradient.data.mul_(2)`, and what NumPy
        does to it, leave no trace; nor does any change in place of a gradient that shares its
        memory with others.
        """
        left, gradient = self._left, self.parameter.grad
        if left is None or gradient is None:
            pass
        elif gradient is not left:
            self.change = "replaced"
        elif self._version not in (_UNKNOWN, gradient._version):
            self.change = "changed in place"
        elif self._at and gradient.data_ptr() != self._at:
            self.change = "replaced"  # by `gradient.data = ...`, which leaves the version
        return self.change

    def forget(self) -> None:
        """Begin a step: nothing has come yet."""
        self.passes = 0
        self.change = ""
        self.lent = self.memory = None
        self._left = None


def refuse_changes(slots: Sequence[Slot]) -> None:
    """Say which gradients were changed while they were being reduced, if any.

    Raises:
        RuntimeError: some were.
    """
    if not slots:
        return
    shown = ", ".join(f"{slot.name!r} ({slot.change})" for slot in slots[:_SHOWN])
    more = f" and {len(slots) - _SHOWN} more" if len(slots) > _SHOWN else ""
    raise RuntimeError(
        f"{whereabouts()}: gradients were changed between backward() and step() or "
        f"synchronize(), while they are being reduced: {shown}{more}. The change may be lost, "
        "or reach some ranks only: call optimizer.synchronize() first, then change (clip, say) the "
        "reduced gradients, and write `with optimizer.skip_synchronize(): optimizer.step()`. A "
        "hook that is to change this rank's own gradients must be registered before "
        "DistributedOptimizer(...)."
    )
