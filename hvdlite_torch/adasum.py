"""`DistributedOptimizer(op=Adasum)`: every rank steps by itself, and the steps are combined.

Maleki et al. 2021 (arXiv:2006.02924), section 4.1: what stateful optimizers make of gradients
is what has to be combined, not the gradients. So each rank takes its optimizer's step with its
own gradients, and then all go where the Adasum of the ranks' steps leads. Optimizer state stays
each rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .arguments import checked_integer
from .async_ops import grouped_allreduce_async_
from .eager import eager
from .names import Label
from .step_reducer import Options, StepReducer

__all__ = ["AdasumReducer"]


class AdasumReducer(StepReducer):
    """Combines the steps of one optimizer over all ranks, which travel in the order of names.

    Groups and sizes of buckets have no meaning here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, label: Label, options: Options) -> None:
        super().__init__(optimizer, label, options)
        self._before: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._stepped = False

    # -- what the optimizer's user may call -----------------------------------------------

    def synchronize(self) -> None:
        """Do nothing: gradients are this rank's own, and complete after backward."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Do nothing: a step is always combined with those of the other ranks."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Note how many backward passes accumulate (as a sum) before a step.

        Raises:
            TypeError: `passes` is not a whole number.
            ValueError: `passes` is not positive.
        """
        self.passes_per_step = checked_integer(passes, "set_backward_passes_per_step", "passes", 1)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, as the optimizer itself would."""
        self.reset_gradients(*args, **kwargs)

    # -- steps ----------------------------------------------------------------------------

    @eager
    def before_step(self, *_: Any) -> None:
        """Remember where the step begins."""
        self._before = None
        if self._is_active():
            self._before = [(p, p.detach().clone()) for p in self._parameters()]

    @eager
    def after_step(self, *step: Any) -> None:
        """Combine the step that was taken with those of the other ranks.

        Args:
            step: what an optimizer passes to its hooks; nothing where a gradient scaler says
                that it is done, having stepped or not.
        """
        if step:
            self._stepped = True
            before, self._before = self._before, None
            if before:
                self._combine(before)
        elif self._stepped:
            self._stepped = False
        elif self._is_active():
            # Infinities on this rank only: the others are about to combine their steps.
            self._combine([(p, p.detach().clone()) for p in self._parameters()])

    def settle(self) -> None:
        """Note that a gradient scaler is about to step or to skip."""
        self._stepped = False

    def _is_active(self) -> bool:
        process_set = self.reduction.process_set
        return process_set.included() and process_set.size() > 1

    def _parameters(self) -> list[torch.Tensor]:
        groups = self.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.requires_grad]
        if all(p in self.names for p in parameters):
            parameters.sort(key=lambda p: str(self.names[p]))
        return parameters

    def _combine(self, before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        compression: Any = self.reduction.compression
        parameters = [parameter.detach() for parameter, _ in before]
        starts = [start for _, start in before]
        pairs = []
        for parameter, start in zip(parameters, starts, strict=True):
            delta = parameter - start
            # The angle between complex vectors is that of their parts.
            pairs.append(
                compression.compress(torch.view_as_real(delta) if delta.is_complex() else delta)
            )
        small = [tensor for tensor, _ in pairs]
        grouped_allreduce_async_(
            small,
            name=f"{self.label}.steps",
            op=self.reduction.op,
            process_set=self.reduction.process_set,
        ).wait()
        with torch.no_grad():
            for parameter, start, (total, context) in zip(parameters, starts, pairs, strict=True):
                step = compression.decompress(total, context)
                step = torch.view_as_complex(step) if parameter.is_complex() else step
                # From the same start by the same step: the ranks stay equal, bit for bit.
                parameter.copy_(start + step)
