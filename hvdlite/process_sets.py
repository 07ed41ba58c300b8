"""Process sets: groups of ranks with collectives of their own."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any, SupportsIndex

from . import world

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


_lock = threading.RLock()
"""Guards which sets there are, and which are about to be added or removed by some thread. Not
held while the ranks agree: their threads may come here in different orders."""


class ProcessSet:
    """Ranks that communicate among themselves. Registered by `init` or `add_process_set`.

    Args:
        ranks_or_comm: ranks of the job, in any order, or an mpi4py communicator of them.

    Attributes:
        process_set_id: number of the set; None until it is registered.
        ranks: its ranks in ascending order; None until that is known.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            ranks = sorted(operator.index(rank) for rank in ranks_or_comm)
        except TypeError:
            raise TypeError(
                "ProcessSet takes a sequence of ranks or an mpi4py communicator, "
                f"not {ranks_or_comm!r}."
            ) from None
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ProcessSet: the ranks {ranks} are not distinct.")
        self.ranks = ranks or None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    # A set is what the job knows it as: a model that is copied stays in the set it was in, and
    # the set of all ranks is that of whatever job unpickles it.
    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self is global_process_set:
            return "global_process_set"
        return super().__reduce_ex__(protocol)

    def require_ranks(self) -> list[int]:
        """Return the ranks of a registered set.

        Raises:
            NotInitializedError: before `init()`.
            ValueError: the set is not registered, or was removed.
        """
        state = world.current()
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(
                f"{self} is not registered: pass it to init(process_sets=[...]) or to "
                "add_process_set() on every rank first."
            )
        if state.sets.get(self.process_set_id) is not self:
            raise ValueError(f"{self} is not a set of this job: it was removed or is from before.")
        return self.ranks

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.require_ranks())

    def rank(self) -> int:
        """Return this process's rank within the set.

        Raises:
            ValueError: this process is not in the set.
        """
        ranks, mine = self.require_ranks(), world.rank()
        if mine not in ranks:
            raise ValueError(f"Rank {mine} is not in {self}.")
        return ranks.index(mine)

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return world.rank() in self.require_ranks()


global_process_set = ProcessSet([])
"""All ranks. Registered by `init`."""
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set while the job runs. Every rank of the job must call this alike.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The registered set.

    Raises:
        MismatchError: the ranks passed different sets (on every rank).
        ValueError: a rank does not exist, or an equal set is registered, or another thread is
            about to register one (on every rank).
    """
    from .engine.requests import Kind
    from .engine.submit import submit_process_set_change

    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    state = world.current()
    with _lock:
        ranks = check_new(process_set, state)
        if ranks in state.adding:
            raise ValueError(
                f"A process set of the ranks {ranks} is being registered by another thread: "
                "register it once and share it."
            )
        state.adding.append(ranks)
    try:
        handle = submit_process_set_change(Kind.ADD_PROCESS_SET, ranks, global_process_set)
        register(process_set, ranks, handle.wait(), state)
    finally:
        state.adding.remove(ranks)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. Every rank of the job must call this alike.

    Returns:
        Whether the set was registered, and this is the call that removed it (of threads that
        remove it at once, one does). What it had not completed fails with an error.

    Raises:
        ValueError: the set of all ranks cannot be removed.
    """
    from .engine.requests import Kind
    from .engine.submit import submit_process_set_change

    state = world.current()
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"remove_process_set takes a ProcessSet, not {process_set!r}.")
    if process_set.process_set_id == 0:
        raise ValueError("The global process set cannot be removed.")
    with _lock:
        set_id = process_set.process_set_id
        if set_id is None or state.sets.get(set_id) is not process_set:
            return False
        handle = state.removing.get(set_id)
        is_first = handle is None
        if handle is None:
            handle = submit_process_set_change(
                Kind.REMOVE_PROCESS_SET, [set_id], global_process_set
            )
            state.removing[set_id] = handle
    try:
        handle.wait()
        if is_first:
            with _lock:
                del state.sets[set_id]
                process_set.process_set_id = None
    finally:
        if is_first:
            del state.removing[set_id]
    return is_first


def check_new(process_set: ProcessSet, state: world.World) -> list[int]:
    """Return the ranks of a set that is to be registered, or raise why it cannot be."""
    if process_set.mpi_comm is not None:
        process_set.ranks = state.ranks_of(process_set.mpi_comm)
    ranks = process_set.ranks
    if not ranks:
        raise ValueError("A process set needs at least one rank.")
    if ranks[0] < 0 or ranks[-1] >= state.size:
        raise ValueError(f"Process set {ranks}: the ranks of this job are 0 to {state.size - 1}.")
    for other in state.sets.values():
        if other.ranks == ranks:
            raise ValueError(f"A process set of the ranks {ranks} is registered already: {other}.")
    return ranks


def register(process_set: ProcessSet, ranks: list[int], set_id: int, state: world.World) -> None:
    """Note under which number a set is known."""
    process_set.ranks = ranks
    process_set.process_set_id = set_id
    state.sets[set_id] = process_set
