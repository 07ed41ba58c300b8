"""What a rank of a benchmark's job runs: `python -m hvdlite.bench.worker TASK`.

TASK is JSON: the suite (a module of this package, or the full name of another one), the peer, and
what that suite's `work` wants to know.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..transport.mpi_library import load
from .jobs import REPORT, UNAVAILABLE

__all__: list[str] = []


def run(task: dict[str, Any]) -> None:
    """Measure, and let rank 0 write the report."""
    path = Path(os.environ.pop(REPORT))
    # A rank that waits for ever is of no use, and its stack says what for.
    faulthandler.dump_traceback_later(task["timeout"], exit=True)
    # As init() would: what MPI does over TCP is settled when it starts.
    MPI = load()

    from .timing import Unavailable

    if MPI.COMM_WORLD.Get_size() != task["ranks"]:
        sys.exit(
            f"the MPI library sees {MPI.COMM_WORLD.Get_size()} ranks in place of "
            f"{task['ranks']}: mpirun and mpi4py's library belong to different installations"
        )
    name = task["suite"]
    suite = importlib.import_module(name if "." in name else f"{__package__}.{name}")
    try:
        report = suite.work(task)
    except Unavailable as reason:
        print(f"{UNAVAILABLE} {reason}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Barrier()
        MPI.COMM_WORLD.Abort(3)
    if MPI.COMM_WORLD.Get_rank() == 0:
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ").split(",")[0]
        facts = {**report.facts, "mpi": library}
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"samples": report.samples, "facts": facts}))
        part.rename(path)
    # Peers without a shutdown of their own (a module's threads, say) must not keep a rank.
    MPI.COMM_WORLD.Barrier()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
