"""Run out of data before the other ranks do."""

from __future__ import annotations

from ..engine import submit
from ..process_sets import global_process_set

__all__ = [
    "join",
]


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until every rank has said so.

    Meanwhile this rank takes part in the others' collectives: with zeros in sums and averages
    (which are still divided by `size()`) and what changes nothing in the other reductions,
    with no rows in an allgather; it can receive a broadcast but not send one. An alltoall, and
    a broadcast from a rank that has joined, fail with MismatchError on every rank.

    Args:
        device: accepted for compatibility; without meaning here.

    Returns:
        The last rank to join.
    """
    return submit.submit_join(process_set=global_process_set).wait()  # type: ignore[no-any-return]
