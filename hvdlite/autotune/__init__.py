"""Finding the engine's parameters while a job runs: measured on rank 0, applied on all ranks.

Nothing here communicates. The engine announces what the session proposes, and has every rank
apply it after one and the same negotiation round.
"""

from .meter import Meter
from .parameters import Parameters
from .session import CSV_HEADER, Session
from .tuner import EXTRA, Tuner

__all__ = ["CSV_HEADER", "EXTRA", "Meter", "Parameters", "Session", "Tuner"]
