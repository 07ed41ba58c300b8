"""The largest elements of gradients only, with their positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..async_ops import grouped_allgather_async
from .base import Exchange, GradientCompressor, Part, State, Steps

__all__ = ["TopKCompressor"]


class TopKCompressor(GradientCompressor):
    """Sends the elements of largest magnitude of each tensor; the rest waits for later steps.

    Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887) without its changes to
    momentum: the optimizer's own acts on the sparse gradients. Each rank gets the selections of
    all others, so what it receives grows with their number: `ratio` should be well below
    1 / size(). Ranks may join.

    Args:
        ratio: share of elements to send, above 0 and at most 1; at least one of each tensor.
        error_feedback: whether to add what was not sent to the next gradient.

    Raises:
        ValueError: the ratio is out of range.
    """

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"topk: ratio must be above 0 and at most 1, not {ratio}.")
        super().__init__(error_feedback)
        self.ratio = ratio

    def exchange(self, parts: Sequence[Part], exchange: Exchange) -> Steps:
        """Replace the gradients of this rank by those of all ranks together."""
        values, positions = [], []
        states: list[State] = []
        offset = 0
        for part in parts:
            gradient = self.with_residual(part)
            count = math.ceil(self.ratio * len(gradient))
            chosen = gradient.abs().topk(count, sorted=False).indices.sort().values
            sent = gradient[chosen].to(part.flat.dtype)
            values.append(sent)
            positions.append(chosen + offset)
            gradient[chosen] -= sent.to(gradient.dtype)
            states.append(self.residual(part, gradient))
            offset += len(gradient)
        # A bucket of 2^31 elements would be one parameter of 8 GB.
        position = torch.int32 if offset < 2**31 else torch.int64
        handle = grouped_allgather_async(
            [torch.cat(values).unsqueeze(0), torch.cat(positions).to(position).unsqueeze(0)],
            exchange.name,
            exchange.process_set,
        )
        yield handle
        everybodys_values, everybodys_positions = handle.wait()

        total = torch.zeros(offset, dtype=gradient.dtype)
        # Rank by rank, in each of which no position comes twice: the order of sums is fixed.
        for row, where in zip(everybodys_values, everybodys_positions.long(), strict=True):
            total[where] += row.to(total.dtype)
        total /= exchange.divisor
        for part, piece in zip(parts, total.split([len(p.flat) for p in parts]), strict=True):
            part.flat.copy_(piece)
        return states
