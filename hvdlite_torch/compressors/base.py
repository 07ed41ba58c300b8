"""What compressors have in common that bring the gradients of a bucket together themselves.

With error feedback, what a step did not send is added to the gradient of the next one (Seide et
al. 2014; Karimireddy et al. 2019, arXiv:1901.09847): without it, compressed gradients are
biased, and training may stall. The residuals belong to the parameters and to this rank. They are
in no `state_dict`, and a copied or unpickled compressor begins without: that costs a run that is
resumed no more than what one step left unsent.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdlite import Handle, ProcessSet
from hvdlite.transport.types import ReduceOp

from ..compression import Compressor

__all__ = ["Exchange", "GradientCompressor", "Part", "State", "Steps", "working"]

State: TypeAlias = dict[str, torch.Tensor]
"""What a compressor keeps of one parameter from step to step."""

Steps: TypeAlias = Generator[Handle, None, list[State]]
"""Yields each handle that it is going to wait for when resumed; returns new states."""


class Part(NamedTuple):
    """The gradient of one parameter, in the memory where the result is to be put.

    Attributes:
        parameter: whose gradient it is.
        name: of the parameter, the same on all ranks.
        flat: all elements, in an order that is the same on all ranks. Real numbers.
        view: the same memory in the parameter's shape; for complex ones with a last dimension
            of 2.
    """

    parameter: torch.Tensor
    name: str
    flat: torch.Tensor
    view: torch.Tensor


@dataclass(frozen=True)
class Exchange:
    """How gradients are to be combined."""

    name: str
    op: ReduceOp
    process_set: ProcessSet

    @property
    def divisor(self) -> int:
        """What the sum over all ranks is divided by."""
        return self.process_set.size() if self.op is ReduceOp.AVERAGE else 1


class GradientCompressor(Compressor):
    """Base of compressors for `DistributedOptimizer`. All ranks use the same parameters.

    One object may serve several optimizers. Ranks must not `join()` while they use it, unless
    a compressor says otherwise.

    Args:
        error_feedback: whether to add what was not sent to the next gradient.
    """

    def __init__(self, error_feedback: bool = True) -> None:
        self.error_feedback = error_feedback
        self._states: Any = WeakIdKeyDictionary()

    def exchange(self, parts: Sequence[Part], exchange: Exchange) -> Steps:
        """Replace the gradients of this rank by those of all ranks together.

        All ranks must end with the same bits: what they compute from gathered data has to be
        element-wise, or in an order of its own.
        """
        raise NotImplementedError

    def state_of(self, part: Part) -> State:
        """Return what is kept of a parameter; empty in the beginning."""
        state: State = self._states.get(part.parameter, {})
        return state

    def keep(self, part: Part, state: State) -> None:
        """Keep what `exchange` has returned, now that some rank is known to have a gradient.

        Unless that of all ranks is not finite: the step will be skipped, or the run is lost, and
        what was kept before is still good, also on ranks whose own gradient is finite.
        """
        if bool(torch.isfinite(part.flat).all()):
            self._states[part.parameter] = state

    def with_residual(self, part: Part) -> torch.Tensor:
        """Return a copy of the gradient to work on, with what was not sent before."""
        gradient = working(part.flat)
        residual = self.state_of(part).get("residual")
        if residual is not None and residual.shape == gradient.shape:
            gradient += residual
        return gradient

    def residual(self, part: Part, rest: torch.Tensor) -> State:
        """Return the part of the state that says what was not sent."""
        return {"residual": rest} if self.error_feedback else {}

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_states"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._states = WeakIdKeyDictionary()

    def __repr__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.__getstate__().items())
        return f"{type(self).__name__}({shown})"

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        """Refuse: there is nothing that could be summed.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{cls.__name__} works for the gradients of a DistributedOptimizer (op=Average or "
            "Sum) only; collectives take Compression.none, fp16 or bf16."
        )

    decompress = compress


def working(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in a type to compute with."""
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return tensor.detach().to(dtype, copy=True)
