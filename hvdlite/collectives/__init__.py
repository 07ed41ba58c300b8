"""The collectives on NumPy arrays.

Every collective must be called by all ranks of its process set. Named calls may come in any
order on different ranks; calls without a name are matched by their order. The functions that
end in `_async` return a `Handle` for `synchronize` and `poll`; the arrays that they were given
must not change before that, and those that get results must not overlap. Functions that end in
`_` put the result into their argument.
"""

from __future__ import annotations

from .allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from .allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from .alltoall import alltoall, alltoall_async
from .arrays import resolve_op
from .barrier import barrier
from .broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from .handles import poll, synchronize
from .join import join
from .reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "resolve_op",
    "synchronize",
]
