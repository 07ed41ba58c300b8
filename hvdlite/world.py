"""Who and where this process is: `init`, `shutdown`, and the ranks."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .exceptions import NotInitializedError
from .log import configure, logger
from .settings import Settings
from .timeline.session import check_start

if TYPE_CHECKING:
    from .engine.engine import Engine
    from .engine.statistics import Statistics
    from .engine.submissions import Handle
    from .metrics import MetricsServer
    from .process_sets import ProcessSet

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "statistics",
    "stop_timeline",
]


@dataclass(eq=False)
class World:
    """Everything that lasts from `init` to `shutdown`."""

    engine: Engine
    settings: Settings
    rank: int
    size: int
    hosts: list[str]
    """Host of every rank."""
    mpi_group: Any
    """The ranks as an MPI group, None without MPI."""
    metrics: MetricsServer | None = None
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    adding: list[list[int]] = field(default_factory=list)
    """Ranks of the process sets that threads are about to register."""
    removing: dict[int, Handle] = field(default_factory=dict)
    """By their numbers, the removals of process sets that are under way."""

    def __post_init__(self) -> None:
        mine = [r for r in range(self.size) if self.hosts[r] == self.hosts[self.rank]]
        self.local_rank = mine.index(self.rank)
        self.local_size = len(mine)
        sizes = [self.hosts.count(host) for host in dict.fromkeys(self.hosts)]
        self.is_homogeneous = len(set(sizes)) == 1
        # Across hosts, a rank counts among those with the same local rank.
        seen: dict[str, int] = {}
        peers = []
        for r, host in enumerate(self.hosts):
            if seen.setdefault(host, 0) == self.local_rank:
                peers.append(r)
            seen[host] += 1
        self.cross_rank = peers.index(self.rank)
        self.cross_size = len(peers)

    def ranks_of(self, comm: Any) -> list[int]:
        """Return the job's ranks that form an mpi4py communicator."""
        if self.mpi_group is None:
            return [0]
        group = comm.Get_group()
        members = group.Translate_ranks(range(group.Get_size()), self.mpi_group)
        return sorted(int(member) for member in members)


_lock = threading.RLock()
_world: World | None = None


def current() -> World:
    """Return the state of this process.

    Raises:
        NotInitializedError: there is none.
    """
    if _world is None:
        raise NotInitializedError(
            "hvdlite has not been initialized; call init() first (before rank(), size(), any "
            "collective or DistributedOptimizer, and again after shutdown())."
        )
    return _world


def engine() -> Engine:
    """Return the engine of this process, or raise NotInitializedError."""
    return current().engine


def attended() -> AbstractContextManager[None]:
    """Return a context in which the calling thread is going to wait for what it submits."""
    return current().engine.attended()


def init(
    comm: Any | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the job. Every rank must call this; a second call does nothing.

    Args:
        comm: the ranks that form the job: None for all of `MPI.COMM_WORLD`, an mpi4py
            communicator, or a list of ranks of `MPI.COMM_WORLD` (called by these only).
        process_sets: process sets to register, the same on every rank; "dynamic" is accepted
            and changes nothing, since sets can always be added later.

    Raises:
        SettingsError: an environment variable is unknown or malformed.
        HvdliteError: MPI is missing, was finalized, lacks thread support, or is another
            library than the one that `mpirun` belongs to.
        ValueError: this process is not among the ranks, or a process set is not valid.
    """
    global _world
    from . import connection, faults
    from .process_sets import ProcessSet, check_new, global_process_set, register

    with _lock:
        if _world is not None:
            return
        if process_sets is None or (
            isinstance(process_sets, str) and process_sets.lower() == "dynamic"
        ):
            process_sets = []
        if isinstance(process_sets, str):
            raise ValueError(
                f'init: process_sets is a list of ProcessSet or "dynamic", not {process_sets!r}.'
            )
        settings = Settings.from_environment()
        if settings.timeline is not None and settings.timeline.upper() != "DYNAMIC":
            # Whoever starts and ends timelines later names them by absolute paths, too.
            settings = dataclasses.replace(settings, timeline=os.path.abspath(settings.timeline))
        if settings.huge_pages:
            # PyTorch looks once, when it makes its first tensor. What `init` has decided is then
            # what DataLoader's processes inherit, too.
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        with contextlib.ExitStack() as undo:
            base, mpi_group = connection.base_communicator(comm)
            undo.callback(base.free)
            configure(base.rank, settings.log_level, settings.log_hide_time)
            state = connection.connect(base, mpi_group, settings)
            undo.callback(_undo, state)
            _register_global(state, global_process_set)
            for process_set in process_sets:
                if not isinstance(process_set, ProcessSet):
                    process_set = ProcessSet(process_set)
                ranks = check_new(process_set, state)
                register(process_set, ranks, state.engine.add_process_set(ranks), state)
            undo.pop_all()
        _world = state
        logger.debug(
            "rank %d of %d, local rank %d of %d on host %s; %s",
            *(state.rank, state.size, state.local_rank, state.local_size),
            *(state.hosts[state.rank], settings),
        )
        timeline = state.settings.timeline
        if timeline is not None and timeline.upper() != "DYNAMIC":
            state.engine.start_timeline(
                timeline, state.settings.timeline_mark_cycles, announced=state.rank != 0
            )
        state.engine.start()
        faults.guard(state.engine, settings.abort_on_exception)
        atexit.register(_leave_at_exit)


def _register_global(state: World, global_process_set: ProcessSet) -> None:
    global_process_set.ranks = list(range(state.size))
    state.sets[0] = global_process_set


def _undo(state: World) -> None:
    """Give back what `init` has made before it failed."""
    state.engine.undo()
    _forget(state)


def shutdown() -> None:
    """Leave the job. Returns once the other ranks have noticed; `init` may be called again.

    What all ranks have submitted is still completed; what only some have fails there with
    HvdliteInternalError. MPI itself stays as it is.
    """
    _shutdown("shutdown() was called")


def _shutdown(reason: str) -> None:
    global _world
    from . import faults

    with _lock:
        state = _world
        if state is None:
            return
        state.engine.shutdown(reason)
        _forget(state)
        _world = None
        atexit.unregister(_leave_at_exit)
        faults.unguard()


def _forget(state: World) -> None:
    from .process_sets import global_process_set

    if state.metrics is not None:
        state.metrics.close()
    for process_set in state.sets.values():
        if process_set is not global_process_set:
            process_set.process_set_id = None
    global_process_set.ranks = None


def _leave_at_exit() -> None:
    from . import faults

    state = _world
    if state is None or not state.engine.is_mine:
        return
    faults.abort_if_exiting_badly(state.engine)
    if state.engine.failed:
        # The others may wait for this rank inside MPI, where finalizing would join them.
        faults.abort_if_parallel(state.engine)
    _shutdown("its process exited")


def statistics() -> Statistics:
    """Return what the engine of this rank has done since `init`."""
    return current().engine.statistics()


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record a timeline of all ranks; any rank may ask for it.

    Recording begins on all of them with the next round that every rank takes part in; while
    one is going on, a second one to the same file changes nothing. Open the file at
    https://ui.perfetto.dev or in chrome://tracing, or let `python -m hvdlite.timeline` sum it up.

    Args:
        file_path: the file, which rank 0 writes when the timeline is stopped, or else at the
            end. A rank that ends badly leaves its own part beside it, named after its rank.
        mark_cycles: show the negotiation rounds too.

    Raises:
        TypeError: `file_path` is no path.
        ValueError: it does not name a file.
    """
    current().engine.start_timeline(*check_start(file_path, mark_cycles))


def stop_timeline() -> None:
    """End the timeline on all ranks; any rank may ask for it.

    Rank 0 writes the file after the next round that every rank takes part in. Without a
    timeline this does nothing.
    """
    current().engine.stop_timeline()


def is_initialized() -> bool:
    """Return whether `init` was called and `shutdown` was not."""
    return _world is not None


def rank() -> int:
    """Return this process's number in the job, from 0 to `size() - 1`."""
    return current().rank


def size() -> int:
    """Return the number of processes in the job."""
    return current().size


def local_rank() -> int:
    """Return this process's number among those on the same host."""
    return current().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return current().local_size


def cross_rank() -> int:
    """Return the number of this host among those that have a process of this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return current().cross_size


def is_homogeneous() -> bool:
    """Return whether every host runs equally many processes."""
    return current().is_homogeneous
