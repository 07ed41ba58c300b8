"""Gradients as 8-bit integers: a quarter of the bytes of float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from hvdlite.transport.ring import even_counts

from ..async_ops import allgather_async, alltoall_async
from .base import Exchange, GradientCompressor, Part, State, Steps

__all__ = ["Int8Compressor"]

_LEVELS = 127


class Int8Compressor(GradientCompressor):
    """Sends each tensor as a scale and integers from -127 to 127, rounded to nearest.

    Uniform levels as in QSGD (Alistarh et al. 2017, arXiv:1610.02132), but error feedback in
    place of random rounding. A rank sums its slice of everybody's integers and sends the result
    quantized again, with error feedback of its own (Tang et al. 2019, arXiv:1905.05957), so
    that the saving is the same for any number of ranks. A tensor with an infinity or a NaN
    becomes NaN on all ranks.

    Args:
        error_feedback: whether to add what was rounded away to the next gradient.
    """

    def exchange(self, parts: Sequence[Part], exchange: Exchange) -> Steps:
        """Replace the gradients of this rank by those of all ranks together."""
        size, rank = exchange.process_set.size(), exchange.process_set.rank()
        tensors = [self.with_residual(part) for part in parts]
        lengths = [len(tensor) for tensor in tensors]
        counts = even_counts(sum(lengths), size)
        ends = list(accumulate(counts))
        scales, integers = _quantized(tensors)
        states: list[State] = []
        for part, tensor, scale, whole in zip(parts, tensors, scales, integers, strict=True):
            states.append(self.residual(part, tensor - whole.to(tensor.dtype) * scale))

        head = scales.view(torch.uint8)
        body = torch.cat(integers).view(torch.uint8)
        message = torch.cat([piece for rows in body.split(counts) for piece in (rows, head)])
        splits = [count + len(head) for count in counts]
        handle = alltoall_async(message, splits, f"{exchange.name}.slices", exchange.process_set)
        yield handle
        received, _ = handle.wait()

        mine = counts[rank]
        places = list(_overlaps(lengths, ends[rank] - mine, ends[rank]))
        sums = [torch.zeros(stop - start, dtype=tensors[0].dtype) for _, _, start, stop in places]
        for row in received.view(size, mine + len(head)):
            theirs = row[mine:].clone().view(torch.float32)
            for total, (tensor, _, start, stop) in zip(sums, places, strict=True):
                total.add_(row[start:stop].view(torch.int8).to(total.dtype) * theirs[tensor])
        for total, (tensor, _, _, _) in zip(sums, places, strict=True):
            total.div_(exchange.divisor)
            kept = self.state_of(parts[tensor]).get("slice")
            if kept is not None and kept.shape == total.shape:
                total.add_(kept)
        scales, integers = _quantized(sums)
        for i, (total, (tensor, _, _, _)) in enumerate(zip(sums, places, strict=True)):
            if self.error_feedback:
                states[tensor]["slice"] = total - integers[i].to(total.dtype) * scales[i]
        result = torch.cat(
            [*(whole.view(torch.uint8) for whole in integers), scales.view(torch.uint8)]
        )
        handle = allgather_async(result, f"{exchange.name}.sums", exchange.process_set)
        yield handle
        gathered = handle.wait()

        at = 0
        for count, end in zip(counts, ends, strict=True):
            places = list(_overlaps(lengths, end - count, end))
            theirs = gathered[at + count : at + count + 4 * len(places)].clone().view(torch.float32)
            for i, (tensor, first, start, stop) in enumerate(places):
                values = gathered[at + start : at + stop].view(torch.int8)
                target = parts[tensor].flat[first : first + stop - start]
                target.copy_(values.to(tensors[0].dtype) * theirs[i])
            at += count + 4 * len(places)
        return states


def _quantized(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the scales (float32) and integers (int8) that stand for tensors."""
    scales = torch.zeros(len(tensors), dtype=torch.float32)
    integers = []
    for i, tensor in enumerate(tensors):
        largest = tensor.abs().amax() if len(tensor) else torch.zeros(())
        scale = (largest / _LEVELS).to(torch.float32)
        scales[i] = scale if torch.isfinite(scale) else torch.nan
        if scale > 0 and torch.isfinite(scale):
            scaled = (tensor / scale).round_().clamp_(-_LEVELS, _LEVELS)
        else:
            scaled = torch.zeros_like(tensor)
        integers.append(scaled.to(torch.int8))
    return scales, integers


def _overlaps(lengths: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield which parts of tensors, one behind the other, lie in a slice.

    Each is the tensor's number, where in the tensor it begins, and where in the slice it begins
    and ends.
    """
    end = 0
    for tensor, length in enumerate(lengths):
        begin, end = end, end + length
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield tensor, low - begin, low - start, high - start
