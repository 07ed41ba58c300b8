"""Keras on PyTorch: gradients are there when `apply` is called, and are reduced in one go."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvdlite
from hvdlite import Average, Sum
from hvdlite.collectives import resolve_op
from hvdlite.transport.types import ReduceOp
from hvdlite_torch import Compression, grouped_allreduce

__all__ = ["TorchBackend"]


class TorchBackend:
    """See `backends.Backend`."""

    compression = Compression

    def reducer(self, options: Any, groups: Any, name: str) -> _Reducer:
        return _Reducer(options, groups, name)

    def accumulator(self, passes: int, average: bool) -> _Accumulator:
        return _Accumulator(passes, average)

    def scaled(self, grad: Any, factor: float) -> Any:
        return grad * factor

    def has_updated(self, optimizer: Any) -> bool:
        return int(optimizer._iterations) % optimizer.gradient_accumulation_steps == 0

    def refuse_strategies(self) -> None:
        return


class _Reducer:
    def __init__(self, options: Any, groups: Any, name: str) -> None:
        self.op = resolve_op(None, options.op)
        if self.op is ReduceOp.ADASUM:
            raise NotImplementedError("Adasum is not there yet; use Average or Sum.")
        if self.op not in (Average, Sum):
            raise ValueError(f"Gradients are combined by Average or Sum, not by {self.op}.")
        self.factor = float(options.gradient_predivide_factor)
        if self.factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor goes with op=Average only.")
        if not self.factor > 0:
            raise ValueError(f"gradient_predivide_factor must be positive, not {self.factor}.")
        if isinstance(groups, (list, tuple)):
            raise NotImplementedError(
                "Groups of variables are not there for Keras on PyTorch, where gradients are "
                "reduced all at once; leave `groups` out."
            )
        self.compression = options.compression
        self.process_set = options.process_set
        self.name = name

    # Handles and waiting mean nothing to torch.compile, which would trace them.
    @torch.compiler.disable
    @torch.no_grad()
    def __call__(self, grads: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        hvdlite.size()  # raises before init()
        grads = list(grads)
        if not self.process_set.included() or self.process_set.size() == 1:
            return grads
        present = [place for place, grad in enumerate(grads) if grad is not None]
        # Places as the shape of an empty tensor: ranks that disagree about them get an error.
        digest = zlib.crc32(repr(present).encode()) & 0x7FFFFFFF
        dense = [grads[p].to_dense() if grads[p].is_sparse else grads[p] for p in present]
        results = grouped_allreduce(
            [*dense, torch.empty((0, digest), dtype=torch.uint8)],
            op=self.op,
            name=self.name,
            compression=self.compression,
            prescale_factor=1.0 / self.factor,
            postscale_factor=self.factor,
            process_set=self.process_set,
        )
        for place, result in zip(present, results[:-1], strict=True):
            grads[place] = result
        return grads


class _Accumulator:
    """Adds gradients up on this rank."""

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._divisor = passes if average else 1
        self._sums: dict[int, torch.Tensor] = {}
        self._count = 0

    @torch.compiler.disable
    @torch.no_grad()
    def __call__(
        self,
        places: Sequence[int],
        grads: Sequence[Any],
        use: Callable[[list[Any]], Any],
    ) -> None:
        for place, grad in zip(places, grads, strict=True):
            if grad is not None and place in self._sums:
                self._sums[place] += grad
            elif grad is not None:
                self._sums[place] = grad.clone()
        self._count += 1
        if self._count == self._passes:
            sums, self._sums, self._count = self._sums, {}, 0
            use([sums[p] / self._divisor if p in sums else None for p in places])
