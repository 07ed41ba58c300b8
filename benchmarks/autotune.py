"""What autotune finds, against the best of a grid, in a job that begins with a bad threshold.

Run on some ranks, with autotune off: the script switches it on itself.

HVDLITE_FUSION_THRESHOLD=32768 mpirun -np 2 python -m benchmarks.autotune [--turns 9] [--job resnet]

The job hands in the gradients of a model, waits for them, and does that again. First it is tuned;
then every point of the grid is measured beside what autotune found, several times; then the
fastest of the grid and the start once more and more often. Only ratios count: machines drift.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

START = 32 * 1024
THRESHOLDS = [START * 4**k for k in range(7)]
CYCLES = (0.1, 1.0, 5.0)
FINALISTS = 4
STEPS = 10
"""Of each measurement, after two that don't count."""


def resnet() -> list[int]:
    """Elements of 161 gradients as those of ResNet-50, each scaled down to a quarter."""
    sizes = [64 * 3 * 49, 64, 64]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [width_in * width, width, width, width * width * 9, width, width]
            sizes += [width * width * 4, width * 4, width * 4]
            if block == 0:
                sizes += [width_in * width * 4, width * 4, width * 4]
            width_in = width * 4
    return [max(size // 4, 1) for size in [*sizes, 2048 * 1000, 1000]]


JOBS = {"resnet": resnet, "many": lambda: [1000] * 500}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS, default="resnet")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each grid point")
    options = parser.parse_args()
    os.environ.setdefault("HVDLITE_FUSION_THRESHOLD", str(START))
    os.environ["HVDLITE_AUTOTUNE"] = "1"
    log = Path(tempfile.mkdtemp(), "autotune.csv")
    os.environ["HVDLITE_AUTOTUNE_LOG"] = str(log)

    import numpy as np

    import hvdlite as hvd
    from hvdlite.autotune import Parameters
    from hvdlite.world import current

    hvd.init()
    engine = current().engine
    first = hvd.rank() == 0
    sizes = JOBS[options.job]()
    gradients = [np.ones(size, np.float32) for size in sizes]
    nbytes = 4 * sum(sizes)

    def step() -> None:
        handles = [
            hvd.allreduce_async(gradient, name=f"gradient.{i}")
            for i, gradient in enumerate(gradients)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def everywhere(value: float) -> float:
        return float(hvd.broadcast(np.array([float(value)]), 0, name="from rank 0")[0])

    channel = engine.channels[0]
    start = channel.parameters
    began, steps = time.monotonic(), 0
    # Rank 0 alone measures.
    while everywhere(channel.meter is not None if first else 0):
        for _ in range(20):
            step()
        steps += 20
    tuned = channel.parameters
    seconds = time.monotonic() - began

    def measure(parameters: Parameters) -> float:
        if first:
            engine.retune(parameters, False)
        step()
        while channel.parameters != parameters:
            step()
        # All ranks have noticed in the same round, and so leave the loop alike.
        step()
        times = []
        for _ in range(STEPS):
            before = time.perf_counter()
            step()
            times.append(time.perf_counter() - before)
        return statistics.median(times)

    engine.agenda.session = None
    grid = [
        start._replace(fusion_threshold=threshold, cycle_time=cycle / 1e3)
        for threshold in THRESHOLDS
        for cycle in CYCLES
    ]
    points: dict[Parameters, list[float]] = {point: [] for point in grid}
    for _ in range(options.rounds):
        for point in grid:
            # Beside the tuned values, since the machine is faster at one time than at another.
            points[point].append(measure(point) / measure(tuned))
    ratios = {point: statistics.median(each) for point, each in points.items()}
    # Some of the fastest again: the fastest of many noisy ones is likely to have been lucky.
    order = sorted(range(len(grid)), key=lambda i: ratios[grid[i]])[:FINALISTS]
    finalists = [grid[int(everywhere(i))] for i in order]
    turns: dict[Parameters, list[float]] = {point: [] for point in [start, *finalists]}
    for _ in range(options.turns):
        for point, values in turns.items():
            values.append(measure(point) / measure(tuned))
    if first:
        print(f"{options.job}: {len(sizes)} gradients, {nbytes / 1e6:.1f} MB, {hvd.size()} ranks")
        print(f"tuned in {steps} steps, {seconds:.0f} s\n\n{log.read_text()}")
        print("| threshold KiB |" + "".join(f" cycle {cycle:g} ms |" for cycle in CYCLES))
        print("|---|" + "---|" * len(CYCLES))
        for threshold in THRESHOLDS:
            row = [ratios[p] for p in grid if p.fusion_threshold == threshold]
            print(f"| {threshold // 1024} |" + "".join(f" {ratio:.2f} |" for ratio in row))
        print("\n(step times, in that of the tuned values)\n")
        print(f"tuned: {tuned}")
        for point, values in turns.items():
            low, middle, high = statistics.quantiles(values, n=4)
            what = "start" if point == start else "one of the fastest of the grid"
            print(f"{what}: {point}")
            print(f"    {middle:.3f} of the tuned time (quartiles {low:.3f} to {high:.3f})")
        sys.stdout.flush()
    hvd.shutdown()


if __name__ == "__main__":
    main()
