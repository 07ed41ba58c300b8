"""Blocking in-place sums of float32, 4 B to 64 MiB: hvdlite, MPI's Allreduce, Gloo.

python -m benchmarks.allreduce [--np 2 4] [--turns 3]
"""

from __future__ import annotations

import sys

import numpy as np

from .jobs import Samples, main, repeat, report

SIZES = {
    "4 B": 4,
    "1 KiB": 1 << 10,
    "64 KiB": 64 << 10,
    "256 KiB": 256 << 10,
    "1 MiB": 1 << 20,
    "4 MiB": 4 << 20,
    "16 MiB": 16 << 20,
    "64 MiB": 64 << 20,
}


def work(name: str) -> None:
    """Measure one peer, inside a rank."""
    from mpi4py import MPI

    from .peers import make

    peer = make(name)
    samples: Samples = {}
    for label, nbytes in SIZES.items():
        array = np.zeros(nbytes // 4, dtype=np.float32)
        step = peer.blocking(array)
        samples[label] = repeat(step, MPI.COMM_WORLD.Barrier, seconds=0.7)
    peer.close()
    report(samples)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main(
            "benchmarks.allreduce",
            __doc__ or "",
            ["hvdlite", "mpi", "gloo"],
            "Blocking all-reduce, float32",
        )
