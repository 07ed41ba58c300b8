"""`hvdlite top`: throughput, waiting, queues and stragglers of a running job."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence

from ..tables import Table, human, print_tables, rich_table
from .poll import Reading, Speed, compare, find, read

__all__ = ["main"]

_LATE_MS = 1.0
"""Below this, whoever is the last is so by chance."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hvdlite top`; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="hvdlite top",
        description="Watch a job that runs with HVDLITE_METRICS_PORT.",
    )
    parser.add_argument(
        "address",
        nargs="*",
        help="host:port of a rank on each host (default: $HVDLITE_METRICS_PORT of this one); "
        "the other ranks of the host are found from it",
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds (1)")
    parser.add_argument("--once", action="store_true", help="end after one interval")
    parser.add_argument("--json", action="store_true", help="print JSON, a line each interval")
    arguments = parser.parse_args(argv)
    addresses = arguments.address
    if not addresses:
        port = os.environ.get("HVDLITE_METRICS_PORT", "").strip()
        if not port or port == "0":
            parser.error("which job? Give host:port of one of its ranks, or HVDLITE_METRICS_PORT.")
        addresses = [f"127.0.0.1:{port}"]
    addresses = [item if ":" in item else f"127.0.0.1:{item}" for item in addresses]
    try:
        addresses = find(addresses)
        speeds = _watch(addresses, max(arguments.interval, 0.05))
        if arguments.once:
            speeds = itertools.islice(speeds, 1)
        if not _show(speeds, arguments.json, live=not arguments.once):
            return _fail("the job ended before anything could be measured.")
    except ImportError:
        return _fail("prometheus-client is missing: pip install 'hvdlite[metrics]'")
    except (OSError, ValueError) as error:
        return _fail(f"{', '.join(addresses)}: {error}. Does a job run with HVDLITE_METRICS_PORT?")
    except KeyboardInterrupt:
        pass
    return 0


def _fail(text: str) -> int:
    print(f"hvdlite top: {text}", file=sys.stderr)
    return 1


def _watch(addresses: Sequence[str], interval: float) -> Iterator[list[Speed]]:
    """Yield what the ranks do, until none of them is there any more."""
    before = [read(address) for address in addresses]
    while True:
        time.sleep(interval)
        after = list(_answers(addresses))
        if not after:
            return
        yield compare(before, after)
        before = after


def _answers(addresses: Sequence[str]) -> Iterator[Reading]:
    for address in addresses:
        with contextlib.suppress(OSError, ValueError):
            yield read(address)


def _show(all_speeds: Iterator[list[Speed]], as_json: bool, live: bool) -> bool:
    """Show what comes, and return whether anything did."""
    shown = False
    if as_json:
        for speeds in all_speeds:
            print(json.dumps([dataclasses.asdict(speed) for speed in speeds]), flush=True)
            shown = True
        return shown
    if live and sys.stdout.isatty():
        try:
            import rich.live
        except ImportError:
            pass
        else:
            with rich.live.Live(auto_refresh=False) as screen:
                for speeds in all_speeds:
                    screen.update(rich_table(_table(speeds)), refresh=True)
                    shown = True
            return shown
    for speeds in all_speeds:
        print_tables([_table(speeds)])
        shown = True
    return shown


def _table(speeds: Sequence[Speed]) -> Table:
    columns = (
        "rank",
        "moved/s",
        "tensors/s",
        "a batch",
        "waiting",
        "queue",
        "in flight",
        "late ms",
    )
    rows = [
        [
            f"{speed.rank} on {speed.host}",
            human(speed.bytes_per_second),
            f"{speed.tensors_per_second:.0f}",
            f"{speed.tensors_per_batch:.1f}",
            f"{speed.waiting * 100:.0f} %",
            str(speed.queue_depth),
            str(speed.in_flight),
            "-" if speed.late_ms is None else f"{speed.late_ms:.1f}",
        ]
        for speed in speeds
    ]
    late = [speed for speed in speeds if speed.late_ms is not None]
    worst = max(late, key=lambda speed: speed.late_ms or 0.0, default=None)
    note = ""
    if worst is not None and (worst.late_ms or 0.0) >= _LATE_MS:
        note = f"rank {worst.rank} is the last one to submit, on average"
    return Table("hvdlite top", columns, rows, note)
