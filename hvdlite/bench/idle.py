"""What hvdlite takes while it has nothing to do: processor time, memory, others' speed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from . import steps
from .arithmetic import number, paired, pooled
from .jobs import Report
from .models import MODELS, TINY
from .records import Record, Table, shown
from .turns import Session, installed

__all__ = ["run", "work"]

_SLEEP = "cores kept busy while idle"


def work(task: dict[str, Any]) -> Report:
    """Measure one peer, inside a rank: asleep, or, where a model is named, training."""
    if task["case"]:
        return steps.work(task)
    from mpi4py import MPI

    leave = _join(task["peer"])
    samples = []
    for _ in range(task["repeats"]):
        MPI.COMM_WORLD.Barrier()
        start, used = time.perf_counter(), time.process_time()
        time.sleep(task["seconds"])
        share = (time.process_time() - used) / (time.perf_counter() - start)
        samples.append(MPI.COMM_WORLD.allreduce(share) / MPI.COMM_WORLD.Get_size())
    leave()
    return Report({_SLEEP: samples})


def _join(peer: str) -> Any:
    """Start a peer and let it work once, and return how to leave."""
    import numpy as np

    if peer == "mpi":  # what the library itself takes
        return lambda: None
    if peer == "hvdlite":
        import hvdlite

        hvdlite.init()
        hvdlite.allreduce(np.ones(1000, dtype=np.float32), name="once")
        return hvdlite.shutdown
    torch: Any = importlib.import_module("torch")
    hvd: Any = importlib.import_module(peer.removeprefix("module:"))
    hvd.init()
    hvd.synchronize(hvd.allreduce_async_(torch.ones(1000), name="once"))
    return hvd.shutdown


def run(session: Session) -> None:
    """Measure all of it, and print tables."""
    options = session.options
    has_torch = installed("torch") and installed("hvdlite_torch")
    if not has_torch:
        session.skip("idle", None, "in step", "torch is not installed")
    model = TINY if options.quick else "mlp"
    for ranks in options.ranks:
        if ranks == 1:
            continue
        sleeping = session.peers("idle", ["mpi", "hvdlite"], "module:")
        task = {"repeats": 3, "seconds": 0.2 if options.quick else 3.0}
        rows = session.measure("idle", ranks, dict.fromkeys(sleeping, task), unit="1")
        session.show(
            Table(
                f"Asleep, np {ranks}: percent of a core per rank, all threads",
                ["peer", "median (quartiles)"],
                [[shown(row.peer), str(pooled(row.turns).scaled(100))] for row in rows],
            )
        )
        if has_torch:
            peers = session.peers(
                "idle", [steps.ALONE_HUGE, "idle", "ddp-huge", "hvdlite"], "module:"
            )
            records = session.measure(
                "idle",
                ranks,
                {peer: {"steps": 3 if options.quick else 12} for peer in peers},
                case=model,
                unit=steps.UNITS,
                turns=options.turns * (1 if options.quick else 2),
            )
            session.show(_in_step(records, MODELS.get(model, model), ranks))


def _in_step(records: Sequence[Record], model: str, ranks: int) -> Table:
    row: dict[str, dict[str, Record]] = {}
    for record in records:
        row.setdefault(record.peer, {})[record.what] = record
    table = Table(
        f"In step, {model}, np {ranks} ('idle': hvdlite initialised and not used)",
        [
            "peer",
            "step, ms",
            "step / alone-huge",
            "other threads, ms of processor per step",
            "other threads, percent of a core",
            "memory per rank above alone-huge, MiB (no program code)",
        ],
        [],
    )
    alone = row.get(steps.ALONE_HUGE)
    for peer, found in row.items():
        step = pooled(found["step"].turns)
        busy = pooled(found["other threads"].turns).median
        ratio = above = "-"
        if alone is not None and peer != steps.ALONE_HUGE:
            ratio = str(paired(found["step"].turns, alone["step"].turns))
            memory = pooled(found["memory"].turns).median - pooled(alone["memory"].turns).median
            above = number(memory / 2**20)
        cells = [str(step.scaled(1e3)), ratio, number(busy * step.median * 1e3)]
        table.rows.append([shown(peer), *cells, number(100 * busy), above])
    return table
