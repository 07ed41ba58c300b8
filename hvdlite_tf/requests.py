"""What collectives submit, as functions from NumPy arrays to work; nothing of TensorFlow.

The arrays that go in belong to TensorFlow and are only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite import ProcessSet
from hvdlite.engine import submit
from hvdlite.transport.types import Array, DType, ReduceOp

from . import memory
from .bridge import Submit, Work
from .tensors import storage_of

__all__ = [
    "Reduction",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "reducescatter",
]


class Reduction:
    """How tensors are combined.

    Attributes:
        op, prescale, postscale, process_set: as of `submit_allreduce`.
    """

    __slots__ = ("op", "postscale", "prescale", "process_set")

    def __init__(
        self, op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet
    ) -> None:
        self.op = op
        self.prescale = float(prescale)
        self.postscale = float(postscale)
        self.process_set = process_set

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the submission."""
        return {name: getattr(self, name) for name in self.__slots__}


def allreduce(reduction: Reduction, name: str | None) -> Submit:
    """All-reduce the arrays as one request."""

    def start(arrays: Sequence[Array]) -> Work:
        inputs, dtypes = _plain(arrays)
        outputs = [memory.empty(array.shape, array.dtype) for array in inputs]
        handle = submit.submit_allreduce(
            inputs, outputs, dtypes=dtypes, name=name, **reduction.arguments()
        )
        return Work(handle, lambda results: _typed(results, arrays))

    return start


def reducescatter(reduction: Reduction, name: str | None) -> Submit:
    """Reduce the arrays as one request and keep some rows of each."""

    def start(arrays: Sequence[Array]) -> Work:
        inputs, dtypes = _plain(arrays)
        handle = submit.submit_reducescatter(
            inputs, dtypes=dtypes, name=name, **reduction.arguments()
        )
        return Work(handle, lambda results: _typed(results, arrays))

    return start


def allgather(process_set: ProcessSet, name: str | None) -> Submit:
    """Concatenate the arrays of all ranks, as one request."""

    def start(arrays: Sequence[Array]) -> Work:
        inputs, dtypes = _plain(arrays)
        handle = submit.submit_allgather(inputs, dtypes=dtypes, name=name, process_set=process_set)
        return Work(handle, lambda results: _typed(results, arrays))

    return start


def broadcast(root_rank: int, process_set: ProcessSet, name: str | None) -> Submit:
    """Send the arrays of one rank to all, as one request."""

    def start(arrays: Sequence[Array]) -> Work:
        inputs, dtypes = _plain(arrays)
        outputs = [memory.empty(array.shape, array.dtype) for array in inputs]
        handle = submit.submit_broadcast(
            inputs,
            outputs,
            root_rank=root_rank,
            dtypes=dtypes,
            name=name,
            process_set=process_set,
        )
        return Work(handle, lambda results: _typed(results, arrays))

    return start


def alltoall(process_set: ProcessSet, name: str | None) -> Submit:
    """Send rows of the first array to the ranks, as many as the second says, if there is one.

    The results are the rows received, and how many came from each rank, in the type of the
    second array.
    """

    def start(arrays: Sequence[Array]) -> Work:
        (array,), (dtype,) = _plain(arrays[:1])
        splits = None if len(arrays) == 1 else np.asarray(arrays[1])
        if splits is not None and splits.ndim != 1:
            raise ValueError(
                f"alltoall: splits must have one dimension, not the shape {splits.shape}."
            )
        handle = submit.submit_alltoall(
            array,
            None if splits is None else splits.tolist(),
            dtype=dtype,
            name=name,
            process_set=process_set,
        )
        kind = np.dtype(np.int32) if splits is None else splits.dtype
        return Work(handle, lambda result: [*_typed(result[:1], arrays), result[1].astype(kind)])

    return start


def _plain(arrays: Sequence[Array]) -> tuple[list[Array], list[DType]]:
    arrays = [np.asarray(array) for array in arrays]
    return [storage_of(array) for array in arrays], [DType.of(array) for array in arrays]


def _typed(results: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    return [result.view(array.dtype) for result, array in zip(results, like, strict=False)]
