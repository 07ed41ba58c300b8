"""Reads the metrics of a running job and says what happened between two readings."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Reading", "Speed", "compare", "find", "read"]

_TIMEOUT = 2.0


@dataclass
class Reading:
    """What one rank answered."""

    at: float
    """Seconds."""
    values: dict[str, float]
    """By names without prefix and suffix."""
    info: dict[str, str]

    @property
    def rank(self) -> int:
        """The rank of the job."""
        return int(self.info["rank"])


@dataclass
class Speed:
    """What one rank did between two readings."""

    rank: int
    host: str
    bytes_per_second: float
    tensors_per_second: float
    tensors_per_batch: float
    waiting: float
    """Share of the time during which callers were blocked; more than 1 with several."""
    queue_depth: int
    in_flight: int
    late_ms: float | None
    """How much later than the earliest rank it submits, on average; None if nothing was."""


def read(address: str) -> Reading:
    """Return what the rank at `host:port` counts.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: nobody answers.
        ValueError: what answers is no rank of hvdlite.
    """
    from prometheus_client.parser import text_string_to_metric_families

    # Not by a proxy: ranks are near, and mostly on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=_TIMEOUT) as answer:
        text = answer.read().decode()
    at = time.monotonic()
    values: dict[str, float] = {}
    info: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("hvdlite_")
            if name == "job_info":
                info = dict(sample.labels)
            elif name != sample.name:
                values[name.removesuffix("_total")] = sample.value
    if not info:
        raise ValueError(f"{address} is no rank of hvdlite")
    return Reading(at, values, info)


def find(addresses: Sequence[str]) -> list[str]:
    """Return the addresses of all ranks on the hosts of the given ones.

    Raises:
        OSError, ValueError: one does not answer as it should.
    """
    found: dict[str, None] = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        info = read(address).info
        first = int(port) - int(info["local_rank"])
        for local_rank in range(int(info["local_size"])):
            found[f"{host}:{first + local_rank}"] = None
    return list(found)


def compare(before: Sequence[Reading], after: Sequence[Reading]) -> list[Speed]:
    """Return what the ranks that are in both did in between, by rank."""
    earlier = {reading.rank: reading for reading in before}
    pairs = [(earlier[r.rank], r) for r in sorted(after, key=lambda r: r.rank) if r.rank in earlier]
    patience = {b.rank: _patience(a, b) for a, b in pairs}
    known = [value for value in patience.values() if value is not None]
    speeds = []
    for a, b in pairs:
        seconds = max(b.at - a.at, 1e-9)
        gain = {name: b.values[name] - a.values.get(name, 0.0) for name in b.values}
        mine = patience[b.rank]
        speeds.append(
            Speed(
                b.rank,
                b.info["host"],
                gain["bytes"] / seconds,
                gain["tensors"] / seconds,
                gain["tensors"] / gain["batches"] if gain["batches"] else 0.0,
                gain["waiting_seconds"] / seconds,
                int(b.values["queue_depth"]),
                int(b.values["in_flight"]),
                None if mine is None else (max(known) - mine) * 1e3,
            )
        )
    return speeds


def _patience(a: Reading, b: Reading) -> float | None:
    """Return for how many seconds a request waited for the other ranks, on average."""
    count = b.values["responses"] - a.values["responses"]
    if count <= 0:
        return None
    return (b.values["negotiating_seconds"] - a.values["negotiating_seconds"]) / count
