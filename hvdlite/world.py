"""Who and where this process is: `init`, `shutdown`, and the ranks."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .exceptions import HvdliteError, NotInitializedError
from .log import configure, logger
from .settings import Settings
from .timeline.session import check_start
from .transport.base import Communicator, Pending

if TYPE_CHECKING:
    from .engine.engine import Engine
    from .engine.statistics import Statistics
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
    from . import faults
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
        base, mpi_group = _base_communicator(comm)
        configure(base.rank, settings.log_level, settings.log_hide_time)
        state = _connect(base, mpi_group, settings)
        _register_global(state, global_process_set)
        try:
            for process_set in process_sets:
                if not isinstance(process_set, ProcessSet):
                    process_set = ProcessSet(process_set)
                ranks = check_new(process_set, state)
                register(process_set, ranks, state.engine.add_process_set(ranks), state)
        except BaseException:
            global_process_set.ranks = None
            if state.metrics is not None:
                state.metrics.close()
            raise
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


def shutdown() -> None:
    """Leave the job. Returns once the other ranks have noticed; `init` may be called again.

    What all ranks have submitted is still completed; what only some have fails there with
    HvdliteInternalError. MPI itself stays as it is.
    """
    _shutdown("shutdown() was called")


def _shutdown(reason: str) -> None:
    global _world
    from . import faults
    from .process_sets import global_process_set

    with _lock:
        state = _world
        if state is None:
            return
        state.engine.shutdown(reason)
        if state.metrics is not None:
            state.metrics.close()
        for process_set in state.sets.values():
            if process_set is not global_process_set:
                process_set.process_set_id = None
        global_process_set.ranks = None
        _world = None
        atexit.unregister(_leave_at_exit)
        faults.unguard()


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


# -- connecting ---------------------------------------------------------------------------


def _base_communicator(comm: Any) -> tuple[Communicator, Any]:
    """Return a private communicator of the job's ranks, and their MPI group."""
    from .transport import mpi_library

    if comm is None and not mpi_library.needed():
        from .transport.local_communicator import LocalCommunicator

        return LocalCommunicator(), None
    mpi = mpi_library.load()
    from .transport.mpi_communicator import MPICommunicator

    world = mpi.COMM_WORLD
    if comm is None:
        mpi_library.check_world(world.Get_size())
        return MPICommunicator(world.Dup(), owned=True), world.Get_group()
    if isinstance(comm, mpi.Comm):
        if comm == mpi.COMM_NULL:
            raise ValueError("init: comm is COMM_NULL: this process is not part of it.")
        return MPICommunicator(comm.Dup(), owned=True), comm.Get_group()
    if not isinstance(comm, Iterable):
        raise TypeError(
            f"init: comm is an mpi4py communicator or a list of ranks, not {type(comm).__name__}."
        )
    ranks = [int(item) for item in comm]
    if not ranks:
        return MPICommunicator(world.Dup(), owned=True), world.Get_group()
    available = world.Get_size()
    if len(set(ranks)) != len(ranks) or min(ranks) < 0 or max(ranks) >= available:
        raise ValueError(
            f"init: comm={ranks} must be distinct ranks of MPI.COMM_WORLD (0 to {available - 1})."
        )
    if world.Get_rank() not in ranks:
        raise ValueError(
            f"init: rank {world.Get_rank()} of MPI.COMM_WORLD is not in comm={ranks}; "
            "only these ranks may call init."
        )
    group = world.Get_group().Incl(ranks)
    return MPICommunicator(world.Create_group(group), owned=True), group


def _connect(base: Communicator, mpi_group: Any, settings: Settings) -> World:
    from .engine.engine import Engine, EngineOptions
    from .engine.stall import StallLimits
    from .transport.auto import make_transport

    hosts = _gather_text(base, _host_key(settings))
    shared, affinity = _agree(base, settings, hosts)
    metrics = _serve_metrics(base, shared, hosts) if shared.metrics_port else None
    options = EngineOptions(
        fusion_threshold=shared.fusion_threshold,
        cache_capacity=shared.cache_capacity,
        cycle_time=shared.cycle_time / 1e3,
        stall=StallLimits(shared.stall_warning_time, shared.stall_shutdown_time)
        if shared.stall_check
        else None,
    )
    engine = Engine(
        base,
        base.duplicate(),
        lambda comm, ranks: make_transport(comm, shared, hosts=[hosts[r] for r in ranks]),
        options,
        affinity=affinity,
    )
    state = World(engine, shared, base.rank, base.size, hosts, mpi_group, metrics)
    if metrics is not None:
        metrics.watch(state)
    return state


def _host_key(settings: Settings) -> str:
    """Return what ranks of one host have in common and no other host has."""
    if settings.hostname:
        return settings.hostname
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    # Cloud images are known to run on several machines under one name.
    return f"{socket.gethostname()} {boot}"


def _agree(comm: Communicator, settings: Settings, hosts: list[str]) -> tuple[Settings, int | None]:
    """Return the settings of rank 0, which all ranks must decide by, and this rank's core.

    `mpirun` forwards variables to other hosts only when told to, so ranks may well differ.
    """
    texts = _gather_text(comm, json.dumps(dataclasses.asdict(settings)))
    everybody = [json.loads(text) for text in texts]
    affinity: int | None = None
    for rank, theirs in enumerate(everybody):
        cores = theirs["thread_affinity"]
        local = hosts[:rank].count(hosts[rank])
        # Raised on every rank: one that raised alone would leave the others waiting.
        if cores is not None and local >= len(cores):
            raise HvdliteError(
                f"HVDLITE_THREAD_AFFINITY names {len(cores)} cores on rank {rank}, which is "
                f"local rank {local}; name one core for each local rank."
            )
        if rank == comm.rank and cores is not None:
            affinity = cores[local]
    names = {f.name for f in dataclasses.fields(settings)} - {"hostname", "thread_affinity"}
    shared = dataclasses.replace(settings, **{name: everybody[0][name] for name in names})
    return shared, affinity


def _serve_metrics(comm: Communicator, settings: Settings, hosts: list[str]) -> MetricsServer:
    from .engine.coordinator import show_ranks
    from .metrics import MetricsServer

    server, trouble = None, ""
    port = settings.metrics_port + hosts[: comm.rank].count(hosts[comm.rank])
    try:
        server = MetricsServer(settings.metrics_host, port)
    except ImportError:
        trouble = "the library prometheus-client is missing: pip install 'hvdlite[metrics]'"
    except (OSError, OverflowError) as error:
        trouble = f"port {port} of {settings.metrics_host} cannot be opened ({error})"
    by_trouble: dict[str, list[int]] = {}
    for rank, text in enumerate(_gather_text(comm, trouble)):
        if text:
            by_trouble.setdefault(text, []).append(rank)
    if not by_trouble and server is not None:
        return server
    if server is not None:
        server.close()
    # On every rank, for the same reason as in _agree.
    texts = (f"{text} on {show_ranks(ranks)}" for text, ranks in by_trouble.items())
    raise HvdliteError(
        f"HVDLITE_METRICS_PORT={settings.metrics_port} cannot be heeded: {'; '.join(texts)}. "
        "Set another port, or none."
    )


def _gather_text(comm: Communicator, text: str) -> list[str]:
    """Return the texts of all ranks. Blocks, so it is for `init` alone."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    lengths = np.zeros(comm.size, dtype=np.int64)
    _finish(comm.iallgather(np.array([len(data)], dtype=np.int64), lengths))
    width = int(lengths.max())
    padded = np.zeros(width, dtype=np.uint8)
    padded[: len(data)] = data
    gathered = np.zeros((comm.size, width), dtype=np.uint8)
    _finish(comm.iallgather(padded, gathered))
    return [bytes(gathered[r, : lengths[r]]).decode() for r in range(comm.size)]


def _finish(pending: Pending) -> None:
    while not pending.Test():
        os.sched_yield()
