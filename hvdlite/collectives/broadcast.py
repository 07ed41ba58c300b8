"""Copy one rank's array to all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..engine import submit
from ..engine.submissions import Handle
from ..process_sets import ProcessSet, global_process_set
from ..transport.types import Array, DType
from ..world import attended
from .arrays import in_place_targets, storage_views, then

__all__ = [
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
]


def broadcast(
    array: npt.ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the array of one rank on all of them.

    Args:
        array: any shape, the same on all ranks; the contents matter on the root alone.
        root_rank: the rank of the job that sends.
        name: identifies the array across ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: the root is not one of these ranks.
        MismatchError: shapes, types or roots differ (on every rank).
        HvdliteInternalError: a peer left, or the engine was shut down.
    """
    with attended():
        return broadcast_async(array, root_rank, name, process_set).wait()  # type: ignore[no-any-return]


def broadcast_async(
    array: npt.ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast`."""
    source = np.asarray(array)
    output = np.empty_like(source, subok=False)
    return _broadcast(source, output, root_rank, name, process_set)


def broadcast_(
    array: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Do a `broadcast` in place. Returns the array."""
    with attended():
        return broadcast_async_(array, root_rank, name, process_set).wait()  # type: ignore[no-any-return]


def broadcast_async_(
    array: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast` in place."""
    (target,) = in_place_targets("broadcast_", [array])
    return _broadcast(target, target, root_rank, name, process_set)


def _broadcast(
    source: Array, output: Array, root_rank: int, name: str | None, process_set: ProcessSet
) -> Handle:
    dtypes = [DType.of(source)]
    inputs = storage_views([source], dtypes)
    outputs = inputs if output is source else storage_views([output], dtypes)
    handle = submit.submit_broadcast(
        inputs, outputs, root_rank=root_rank, dtypes=dtypes, name=name, process_set=process_set
    )
    return then(handle, lambda _: output)
