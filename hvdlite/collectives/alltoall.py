"""Exchange rows between all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine import submit
from ..engine.submissions import Handle
from ..process_sets import ProcessSet, global_process_set
from ..transport.types import Array, DType
from ..world import attended
from .arrays import storage_views, then, views_as

__all__ = [
    "alltoall",
    "alltoall_async",
]


def alltoall(
    array: npt.ArrayLike,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Send consecutive rows of the array to rank 0, 1, ... and return the rows received.

    Args:
        array: at least one dimension; the first one may differ between ranks.
        splits: how many rows go to each rank; None splits evenly.
        name: identifies the array across ranks.
        process_set: the ranks that take part.

    Returns:
        The rows received, in rank order; with splits, also how many came from each rank
        (int64).

    Raises:
        ValueError: the array has no dimension, or the splits don't fit it.
        MismatchError: the other dimensions or the types differ (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    with attended():
        return alltoall_async(array, splits, name, process_set).wait()  # type: ignore[no-any-return]


def alltoall_async(
    array: npt.ArrayLike,
    splits: npt.ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `alltoall`."""
    source = np.asarray(array)
    dtype = DType.of(source)
    counts = None if splits is None else list(np.asarray(splits).reshape(-1))
    handle = submit.submit_alltoall(
        storage_views([source], [dtype])[0], counts, dtype=dtype, name=name, process_set=process_set
    )

    def convert(result: tuple[Array, Array]) -> Any:
        (output,) = views_as([result[0]], [source])
        return output if splits is None else (output, result[1])

    return then(handle, convert)
