"""Whole training steps: without reduction, with DistributedDataParallel on Gloo, with hvdlite."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .arithmetic import number, paired, pooled
from .jobs import Report
from .models import MODELS, TINY, build
from .records import Record, Table, shown
from .turns import DDP, Session, installed

__all__ = ["ALONE_HUGE", "UNITS", "UNREDUCED", "run", "tables", "work"]

UNITS = {"step": "s", "memory": "B", "other threads": "1"}
"""Of what `work` measures: the time of a step, memory of a rank (without code; shared pages
divided by those who share them), and cores that other threads than the training one kept busy."""

_ALONE, ALONE_HUGE, _BARRIER = "alone", "alone-huge", "barrier"
_ALONE_PEERS = (_ALONE, ALONE_HUGE)
"""Training without reduction, each rank by itself: on the pages that come, and on huge ones."""
UNREDUCED = (*_ALONE_PEERS, _BARRIER)
"""And with the ranks waiting for each other."""

_HUGE = (ALONE_HUGE, _BARRIER, "ddp-huge", "hvdlite", "idle")
"""With huge pages for large tensors, for which hvdlite asks where it is initialised first."""

_WARM_UP = 4
"""Steps: bucket layouts settle after the first one."""


def work(task: dict[str, Any]) -> Report:
    """Train inside a rank. Samples are means over the ranks, of each step."""
    import numpy as np
    from mpi4py import MPI

    torch: Any = importlib.import_module("torch")
    comm = MPI.COMM_WORLD
    os.environ["THP_MEM_ALLOC_ENABLE"] = str(int(task["peer"] in _HUGE))
    torch.set_num_threads(1)
    model, inputs, targets = build(task["case"], comm.Get_rank())
    trained, optimizer, leave = _distribute(torch, task["peer"], model)
    lossy = torch.nn.CrossEntropyLoss()

    def step() -> Any:
        optimizer.zero_grad()
        outputs = trained(inputs)
        loss = lossy(outputs.reshape(-1, outputs.shape[-1]), targets)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(_WARM_UP):
        loss = step()
    comm.Barrier()
    began, whole, mine = time.perf_counter(), time.process_time(), time.thread_time()
    taken = []
    for _ in range(task["steps"]):
        start = time.perf_counter()
        loss = step()
        taken.append(time.perf_counter() - start)
    elapsed = time.perf_counter() - began
    mine = time.thread_time() - mine
    others = time.process_time() - whole - mine
    comm.Barrier()  # all ranks are there, and nobody is freeing yet
    row = np.array([*taken, others / elapsed, _memory(), float(loss.detach())])
    comm.Barrier()
    comm.Allreduce(MPI.IN_PLACE, row, op=MPI.SUM)
    *mean, cores, memory, final = (float(value) for value in row / comm.Get_size())
    leave()
    facts = {"loss": final, "parameters": sum(p.numel() for p in model.parameters())}
    return Report({"step": mean, "memory": [memory], "other threads": [cores]}, facts)


def _distribute(torch: Any, peer: str, model: Any) -> tuple[Any, Any, Callable[[], object]]:
    """Return the model to call, the optimizer, and how to leave."""
    from . import peers

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    if peer in UNREDUCED:
        if peer == _BARRIER:
            from mpi4py import MPI

            optimizer.register_step_pre_hook(lambda *_: MPI.COMM_WORLD.Barrier())
        return model, optimizer, lambda: None
    if peer in DDP:
        dist = peers.start_gloo()
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=peer == "ddp-views"
        )
        return wrapped, optimizer, dist.destroy_process_group
    own = peer in ("hvdlite", "idle")
    hvd: Any = importlib.import_module("hvdlite_torch" if own else peer.removeprefix(peers.MODULE))
    hvd.init()
    if peer != "idle":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=list(model.named_parameters())
        )
    return model, optimizer, hvd.shutdown


def _memory() -> int:
    # Pages of files are program code, which every process that runs Python shares.
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(
        int(line.split()[1]) * 1024
        for line in lines
        if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


def run(session: Session) -> None:
    """Train every model with every peer on two ranks and more, and print tables."""
    options = session.options
    if not installed("torch") or not installed("hvdlite_torch"):
        session.skip("steps", None, "all", "torch is not installed")
        return
    names = [TINY] if options.quick else list(MODELS)
    for ranks in options.ranks:
        if ranks == 1:
            continue  # nothing to reduce
        for name in names:
            wanted = [*UNREDUCED, *DDP, "hvdlite"]
            if options.quick:
                wanted.remove("ddp-views")
            peers = session.peers("steps", wanted, "module:")
            task = {"steps": 3 if options.quick else 12}
            session.measure(
                "steps",
                ranks,
                dict.fromkeys(peers, task),
                case=name,
                unit=UNITS,
                # Short turns, and so more of them: the machine drifts within a minute.
                turns=options.turns * (1 if options.quick else 2),
            )
            _compare_losses(session, name, ranks)
        for table in tables(session.results.select("steps", ranks=ranks)):
            session.show(table)


def _compare_losses(session: Session, name: str, ranks: int) -> None:
    """Say so where a peer has trained something else."""
    losses = {
        fact["peer"]: fact["loss"]
        for fact in session.results.facts
        if (fact["suite"], fact["case"], fact["ranks"]) == ("steps", name, ranks)
        and fact["peer"] not in UNREDUCED
    }
    if losses and max(losses.values()) - min(losses.values()) > 1e-3 * max(losses.values()):
        session.say(f"warning: {name}, np {ranks}: the losses differ: {losses}")


def tables(records: Sequence[Record]) -> list[Table]:
    """Return times with ratios, and overheads, of one number of ranks."""
    steps = [record for record in records if record.what == "step"]
    by_model: dict[str, dict[str, Record]] = {}
    for record in steps:
        by_model.setdefault(record.case, {})[record.peer] = record
    peers = list(dict.fromkeys(record.peer for record in steps))
    if not peers:
        return []
    ranks = steps[0].ranks
    others = [peer for peer in peers if peer not in (*UNREDUCED, "hvdlite")]
    times = Table(
        f"Training steps, np {ranks}: ms, median (quartiles); below 1: hvdlite is faster",
        ["model", *map(shown, peers), *(f"hvdlite / {shown(peer)}" for peer in others)],
        [],
    )
    adding = [peer for peer in peers if peer not in _ALONE_PEERS]
    added = Table(
        f"Training steps, np {ranks}: what the reduction adds to compute alone, on the same pages",
        ["model", *map(shown, adding), *(f"hvdlite's / {shown(peer)}'s" for peer in others)],
        [],
    )
    for model, row in by_model.items():
        title = MODELS.get(model, model)
        cells = [str(pooled(row[p].turns).scaled(1e3)) if p in row else "-" for p in peers]
        cells += [
            str(paired(row["hvdlite"].turns, row[p].turns)) if {p, "hvdlite"} <= set(row) else "-"
            for p in others
        ]
        times.rows.append([title, *cells])
        if not row.keys().isdisjoint(_ALONE_PEERS):
            added.rows.append([title, *_added(row, adding, others)])
    return [times, added]


def _added(row: dict[str, Record], adding: Sequence[str], others: Sequence[str]) -> list[str]:
    # Turn by turn, as the ratios: what drifts is the same for both.
    parts = {}
    for peer in filter(row.__contains__, adding):
        alone = row.get(ALONE_HUGE if peer in _HUGE else _ALONE)
        if alone is not None:
            parts[peer] = paired(row[peer].turns, alone.turns).median - 1
    cells = [f"{100 * parts[p]:.0f} %" if p in parts else "-" for p in adding]
    for peer in others:
        both = peer in parts and "hvdlite" in parts and parts[peer] > 0
        cells.append(number(parts["hvdlite"] / parts[peer]) if both else "-")
    return cells
