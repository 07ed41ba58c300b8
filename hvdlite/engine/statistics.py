"""What the engine has done so far: counters, and the snapshot that users get."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fusion import Batch

__all__ = ["Counters", "Statistics", "Stopwatch"]


@dataclass(frozen=True)
class Statistics:
    """A snapshot of the engine's counters on this rank since `init()`.

    Times are seconds of wall clock. Moving overlaps with everything else, and with itself
    where several buffers are in flight, so the times don't add up to the run's.
    """

    rounds: int
    """Negotiation rounds, over all process sets."""
    empty_rounds: int
    """Rounds in which nothing became ready."""
    responses: int
    """Requests that were agreed on; a group counts once."""
    cache_hits: int
    """Responses that the cache settled without the coordinator."""
    cache_size: int
    """Responses in the caches now."""
    batches: int
    """Transport operations."""
    tensors: int
    """Tensors that they carried."""
    bytes: int
    """Payload bytes that they carried, counted once on each rank; without those of alltoall."""
    wire_bytes: int
    """Bytes that an ideal algorithm would have had each rank send to others for all that: of
    `bytes`, 2(n-1)/n for an all-reduce of n ranks and (n-1)/n for other collectives; for an
    alltoall what this rank did send."""
    packing_seconds: float
    """Copying in and out of fusion buffers."""
    moving_seconds: float
    """Transport operations from start to end."""
    waiting_seconds: float
    """Callers blocked in `synchronize` and in blocking calls."""
    queue_depth: int
    """Requests that this rank has submitted and not all ranks have agreed on."""
    in_flight: int
    """Transport operations in progress."""

    @property
    def tensors_per_batch(self) -> float:
        """How many tensors a fusion buffer carried on average."""
        return self.tensors / self.batches if self.batches else 0.0


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds spent inside `with` blocks; blocks may overlap."""

    total: float = 0.0
    running: int = 0

    def __enter__(self) -> None:
        self.total -= time.perf_counter()
        self.running += 1

    def __exit__(self, *_: object) -> None:
        self.total += time.perf_counter()
        self.running -= 1

    @property
    def seconds(self) -> float:
        """Seconds so far, blocks that have not ended included."""
        return self.total + self.running * time.perf_counter()


@dataclass(slots=True)
class Counters:
    """The running counters of one engine."""

    rounds: int = 0
    empty_rounds: int = 0
    responses: int = 0
    cache_hits: int = 0
    batches: int = 0
    tensors: int = 0
    bytes: int = 0
    wire_bytes: int = 0
    packing: Stopwatch = field(default_factory=Stopwatch)
    moving: Stopwatch = field(default_factory=Stopwatch)
    waiting_seconds: float = 0.0
    negotiating_seconds: float | None = None
    """Of all requests, from their submission until all ranks were known to have submitted
    them; None if nobody wants to know. A rank that is often the last has the smallest."""

    def moved(self, batch: Batch, wire_bytes: int) -> None:
        self.wire_bytes += wire_bytes
        self.batches += 1
        self.tensors += len(batch.pieces)
        self.bytes += batch.nbytes
