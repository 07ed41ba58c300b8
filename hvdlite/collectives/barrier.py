"""Wait for all ranks."""

from __future__ import annotations

from ..engine import submit
from ..process_sets import ProcessSet, global_process_set
from ..world import attended

__all__ = [
    "barrier",
]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called this."""
    with attended():
        submit.submit_barrier(process_set=process_set).wait()
