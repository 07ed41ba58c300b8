"""One float at a time: the blocking sum of a scalar, end to end."""

from __future__ import annotations

from typing import Any

from ..transport.types import DType
from .jobs import Report
from .many import ratio_table
from .turns import Session

__all__ = ["run", "work"]


def work(task: dict[str, Any]) -> Report:
    """Measure one peer, inside a rank."""
    from .peers import check, make
    from .timing import repeat

    peer = make(task["peer"])
    array = peer.allocate(4).view(DType.FLOAT32.storage)
    step = peer.blocking(array, DType.FLOAT32)
    check(step, array, DType.FLOAT32)
    samples = repeat(step, task["seconds"], least=50, most=task["most"])
    peer.close()
    return Report({"scalar": samples})


def run(session: Session) -> None:
    """Measure all peers, and print tables."""
    options = session.options
    for ranks in options.ranks:
        peers = session.peers("latency", ["hvdlite", "mpi", "gloo"], "module:")
        task = {"seconds": 0.1 if options.quick else 2.0, "most": 50 if options.quick else 3000}
        records = session.measure("latency", ranks, dict.fromkeys(peers, task), sizes={"scalar": 4})
        session.show(ratio_table(f"Blocking scalar, np {ranks}", records, scale=1e6, unit="us"))
