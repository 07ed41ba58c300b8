"""The 161 gradients of ResNet-50 (25.6 M floats) at once: hvdlite, Gloo, MPI's Allreduce.

hvdlite and MPI reduce each tensor by itself; Gloo gets the same bytes in pieces of 25 MiB.

python -m benchmarks.many_tensors [--np 2 4] [--turns 3]
"""

from __future__ import annotations

import math
import sys

import numpy as np

from .jobs import main, repeat, report


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters in backward order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    shapes += [(1000, 2048), (1000,)]
    assert len(shapes) == 161 and sum(map(math.prod, shapes)) == 25_557_032
    return shapes[::-1]


def work(name: str) -> None:
    """Measure one peer, inside a rank."""
    from mpi4py import MPI

    from .peers import make

    peer = make(name)
    arrays = [np.zeros(shape, dtype=np.float32) for shape in resnet50_shapes()]
    samples = repeat(peer.many(arrays), MPI.COMM_WORLD.Barrier, seconds=4)
    peer.close()
    report({"161 gradients": samples})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main(
            "benchmarks.many_tensors",
            __doc__ or "",
            ["hvdlite", "gloo", "mpi"],
            "The gradients of ResNet-50",
        )
