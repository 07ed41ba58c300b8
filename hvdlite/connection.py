"""How `init` brings the ranks together: a communicator, settings they share, an engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .exceptions import HvdliteError
from .settings import Settings
from .transport.base import Communicator, Pending
from .world import World

if TYPE_CHECKING:
    from typing import TextIO

    from .engine.engine import Engine
    from .metrics import MetricsServer

__all__ = ["base_communicator", "connect"]


def base_communicator(comm: Any) -> tuple[Communicator, Any]:
    """Return a private communicator of the job's ranks, and their MPI group.

    Args:
        comm: see `init`.
    """
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


def connect(base: Communicator, mpi_group: Any, settings: Settings) -> World:
    """Make the engine and what belongs to it, as all ranks agree (collective, and it blocks).

    Args:
        base: the communicator of all ranks.
        mpi_group: the same ranks, None without MPI.
        settings: this rank's own.
    """
    from .autotune import Parameters
    from .engine.engine import Engine
    from .engine.stall import StallLimits
    from .transport.auto import make_transport

    hosts = _gather_text(base, _host_key(settings))
    shared, affinity = _agree(base, settings, hosts)
    autotune_log = _prepare_autotune(base, shared) if shared.autotune else None
    metrics = _serve_metrics(base, shared, hosts) if shared.metrics_port else None
    engine = Engine(
        base,
        base.duplicate(),
        lambda comm, ranks: make_transport(comm, shared, hosts=[hosts[r] for r in ranks]),
        Parameters(
            shared.fusion_threshold,
            shared.cycle_time / 1e3,
            shared.cache_capacity,
            shared.transport,
        ),
        StallLimits(shared.stall_warning_time, shared.stall_shutdown_time)
        if shared.stall_check
        else None,
        affinity=affinity,
    )
    if shared.autotune and base.rank == 0:
        _tune(engine, shared, autotune_log)
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


def _prepare_autotune(comm: Communicator, settings: Settings) -> TextIO | None:
    """Return the open log on rank 0; refuse on all ranks what rank 0 cannot do."""
    from .autotune import EXTRA

    log, trouble = None, ""
    if comm.rank == 0:
        # Not imported yet, which takes seconds in which the others would wait.
        if importlib.util.find_spec("bayes_opt") is None:
            trouble = f"the library bayesian-optimization is missing on rank 0: {EXTRA}"
        elif settings.autotune_log is not None:
            try:
                log = Path(settings.autotune_log).open("w", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                trouble = f"HVDLITE_AUTOTUNE_LOG cannot be written on rank 0 ({error})"
    trouble = _gather_text(comm, trouble)[0]
    if trouble:
        raise HvdliteError(
            f"HVDLITE_AUTOTUNE=1 cannot be heeded: {trouble}. Or set HVDLITE_AUTOTUNE=0."
        )
    return log


def _tune(engine: Engine, settings: Settings, log: TextIO | None) -> None:
    from .autotune import Session, Tuner

    tuner = Tuner(
        engine.sets.parameters,
        engine.transports,
        settings.autotune_bayes_opt_max_samples,
        settings.autotune_gaussian_process_noise,
    )
    engine.autotune(
        Session(
            tuner,
            settings.autotune_steps_per_sample,
            settings.autotune_warmup_samples,
            engine.clock,
            log,
        )
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
