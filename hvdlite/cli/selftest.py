"""What `hvdlite doctor` runs on two ranks."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["measure"]

_BYTES = 16 * 2**20


def measure() -> dict[str, Any]:
    """Check one result and take a few timings.

    Returns:
        `threads` (whether MPI is used from threads), `right` (whether the sum was),
        `latency_us` (median of a scalar allreduce, microseconds), `bandwidth_gbs` (bus
        bandwidth of 16 MiB of float32, 10^9 bytes per second), `hosts`, `direct` (whether
        ranks reach each other's memory).
    """
    import numpy as np

    import hvdlite as hvd
    from hvdlite.engine.engine import GLOBAL_SET
    from hvdlite.world import engine

    hvd.init()
    n = hvd.size()
    total = hvd.allreduce(np.arange(1000.0) + hvd.rank(), op=hvd.Sum)
    right = bool(np.array_equal(total, n * np.arange(1000.0) + n * (n - 1) / 2))
    latency = _median(np.zeros(1, dtype=np.float32), 200, 20)
    seconds = _median(np.zeros(_BYTES // 4, dtype=np.float32), 7, 2)
    moved = 2 * (n - 1) / n * _BYTES
    result = {
        "right": right,
        "latency_us": latency * 1e6,
        "bandwidth_gbs": moved / seconds / 1e9,
        "threads": hvd.mpi_threads_supported(),
        "hosts": hvd.cross_size(),
        "direct": engine().channels[GLOBAL_SET].transport.scattered is not None,
    }
    hvd.shutdown()
    return result


def _median(data: Any, repeats: int, warm_up: int) -> float:
    import hvdlite as hvd

    times = []
    for _ in range(warm_up + repeats):
        begin = time.perf_counter()
        hvd.allreduce_(data, op=hvd.Sum, name="doctor")
        times.append(time.perf_counter() - begin)
    times = sorted(times[warm_up:])
    return times[len(times) // 2]
