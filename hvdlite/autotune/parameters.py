"""What autotune changes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Parameters"]


class Parameters(NamedTuple):
    """Values that all ranks must change at one and the same point of the order of responses."""

    fusion_threshold: int
    """Bytes."""
    cycle_time: float
    """Seconds."""
    cache_capacity: int
    transport: str
    """As in `HVDLITE_TRANSPORT`; kept as it is where a process set has no such choice."""

    @property
    def cycle_milliseconds(self) -> float:
        """The cycle time in the unit of `HVDLITE_CYCLE_TIME`."""
        return float(f"{self.cycle_time * 1e3:.6g}")

    def __str__(self) -> str:
        """Return the variables that set these values in a later job."""
        return (
            f"HVDLITE_FUSION_THRESHOLD={self.fusion_threshold} "
            f"HVDLITE_CYCLE_TIME={self.cycle_milliseconds:g} "
            f"HVDLITE_CACHE_CAPACITY={self.cache_capacity} "
            f"HVDLITE_TRANSPORT={self.transport}"
        )
