"""Gradients of matrices as products of two thin ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from hvdlite import Handle

from ..async_ops import allreduce_async
from .base import Exchange, GradientCompressor, Part, State, Steps, working

__all__ = ["PowerSGDCompressor"]

_SERIAL = 16384
"""Elements up to which torch sums in one thread, whatever their number."""


class PowerSGDCompressor(GradientCompressor):
    """Sends an approximation of low rank, found by one power iteration a step.

    Vogels, Karimireddy, Jaggi 2019 (arXiv:1905.13727), algorithms 1 and 2: warm start from the
    last step's factor, and error feedback. Tensors of more than 2 dimensions are matrices of
    shape[0] rows. Tensors of one dimension, and those that would not become smaller, are sent
    as they are. Ranks may join.

    Args:
        rank: of the approximation.
        error_feedback: whether to add what the approximation lacks to the next gradient.
        seed: of the first factor; the same on all ranks.

    Raises:
        ValueError: the rank is not positive.
    """

    def __init__(self, rank: int = 4, error_feedback: bool = True, seed: int = 0) -> None:
        if rank < 1:
            raise ValueError(f"powersgd: rank must be at least 1, not {rank}.")
        super().__init__(error_feedback)
        self.rank = rank
        self.seed = seed

    def _rank_of(self, part: Part) -> int:
        """Return the rank for a tensor, 0 if it is sent as it is."""
        if part.view.ndim < 2 or not len(part.flat):
            return 0
        rows = part.view.shape[0]
        columns = len(part.flat) // rows
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def exchange(self, parts: Sequence[Part], exchange: Exchange) -> Steps:
        """Replace the gradients of this rank by those of all ranks together."""
        ranks = [self._rank_of(part) for part in parts]
        thin = [part for part, rank in zip(parts, ranks, strict=True) if rank]
        plain = [part for part, rank in zip(parts, ranks, strict=True) if not rank]
        matrices, factors = [], []
        for part in thin:
            matrix = working(part.view).reshape(part.view.shape[0], -1)
            residual = self.state_of(part).get("residual")
            if residual is not None and residual.shape == matrix.shape:
                matrix += residual
            matrices.append(matrix)
            factors.append(self._factor(part, matrix))
        left = [matrix @ factor for matrix, factor in zip(matrices, factors, strict=True)]
        handle = _sum([*left, *(working(part.flat) for part in plain)], exchange, "left")
        yield handle
        totals = _unpacked(handle.wait(), [*left, *(part.flat for part in plain)])
        for part, total in zip(plain, totals[len(thin) :], strict=True):
            part.flat.copy_(total)
        left = [_orthonormal(total) for total in totals[: len(thin)]]
        states: dict[int, State] = {}
        if thin:
            right = [matrix.t() @ basis for matrix, basis in zip(matrices, left, strict=True)]
            handle = _sum(right, exchange, "right")
            yield handle
            for i, total in enumerate(_unpacked(handle.wait(), right)):
                part = thin[i]
                rest = matrices[i] - left[i] @ right[i].t()
                states[id(part)] = {"factor": total, **self.residual(part, rest)}
                part.view.copy_(_product(left[i], total).view(part.view.shape))
        return [states.get(id(part), {}) for part in parts]

    def _factor(self, part: Part, matrix: torch.Tensor) -> torch.Tensor:
        """Return where the power iteration begins, the same on all ranks."""
        kept = self.state_of(part).get("factor")
        shape = (matrix.shape[1], self._rank_of(part))
        if kept is not None and kept.shape == shape and kept.dtype == matrix.dtype:
            norms = kept.norm(dim=0)
            # A gradient of zeros or NaN has left nothing to begin with.
            if bool(((norms > 0) & torch.isfinite(norms)).all()):
                return kept
        seed = zlib.crc32(f"{self.seed} {part.name}".encode())
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(matrix.dtype)


def _sum(tensors: Sequence[torch.Tensor], exchange: Exchange, what: str) -> Handle:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return allreduce_async(
        flat, None, f"{exchange.name}.{what}", exchange.op, process_set=exchange.process_set
    )


def _unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    # Copies, so that a step's result does not keep all the others alive.
    return [p.view(t.shape).clone() for p, t in zip(pieces, like, strict=True)]


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Make columns orthonormal by Gram and Schmidt, twice, which is enough.

    Not by LAPACK, whose blocks may depend on where in memory a matrix lies, nor by sums and
    norms of torch, which depend on the number of threads: ranks may differ in that.
    """
    columns = [column.clone() for column in matrix.double().t()]
    for i, column in enumerate(columns):
        length = _dot(column, column).sqrt()
        for _ in range(2):
            for other in columns[:i]:
                column -= _dot(other, column) * other
        norm = _dot(column, column).sqrt()
        # What is left of a column that depends on others is noise.
        columns[i] = column / norm if norm > 1e-9 * length else torch.zeros_like(column)
        if not bool(torch.isfinite(norm)):
            columns[i] = torch.full_like(column, torch.nan)
    return torch.stack(columns, 1).to(matrix.dtype)


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the inner product, summed in an order that is the same on all ranks."""
    products = a * b
    while len(products) > _SERIAL:
        half = (len(products) + 1) // 2
        products[: len(products) - half] += products[half:]
        products = products[:half]
    return products.sum()


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left times right transposed, summed in an order that is the same on all ranks."""
    total = torch.zeros((len(left), len(right)), dtype=left.dtype)
    for a, b in zip(left.t(), right.t(), strict=True):
        total.addcmul_(a.unsqueeze(1), b.unsqueeze(0))
    return total
