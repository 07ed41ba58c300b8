"""A timeline from its start on all ranks to its file on rank 0.

Start and end are announced in a negotiation round, so every rank begins and ends with the same
round, whichever rank asked for it. Then the ranks compare clocks with rank 0; at the end they
send it what they have recorded, and it writes the file in a thread of its own.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.negotiation import receive
from ..log import logger
from ..transport.base import Communicator, Operation
from ..transport.types import Array
from .clocks import compare_clocks
from .recorder import Recorder
from .trace import RankEvents, write_trace

__all__ = ["START", "STOP", "Timeline"]

START, STOP = "timeline.start", "timeline.stop"
_EVENTS_TAG = 21


class Timeline:
    """One rank's part in the timelines of a job.

    Args:
        comm: the control communicator of all ranks.
        clock: seconds; the engine's.
        changed: called with the recorder, or None, whenever that changes.
    """

    def __init__(
        self,
        comm: Communicator,
        clock: Callable[[], float],
        changed: Callable[[Recorder | None], object],
    ) -> None:
        self.recorder: Recorder | None = None
        self._comm = comm
        self._clock = clock
        self._changed = changed
        self._path = ""
        self._offset = 0.0
        self._writers: list[threading.Thread] = []

    def start(self, path: str, mark_cycles: bool) -> Operation[None] | None:
        """Begin to record; return what is to be done beside that, on every rank."""
        if self.recorder is not None:
            logger.warning(
                "a timeline is being recorded already, to %s; the one to %s is not started",
                self._path,
                path,
            )
            return None
        self._path = path
        self.recorder = Recorder(self._clock, mark_cycles)
        self._changed(self.recorder)
        return self._compare()

    def stop(self) -> Operation[None] | None:
        """End the recording; return the operation that brings it to rank 0, on every rank."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return None
        self._changed(None)
        return self._collect(recorder, self._path)

    def finish(self) -> None:
        """Return when all files are written."""
        for writer in self._writers:
            writer.join()
        self._writers.clear()

    def rescue(self) -> None:
        """Write what this rank has recorded, since the job is about to end badly."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            path = Path(self._path)
            own = path.with_name(f"{path.stem}.rank{self._comm.rank}{path.suffix}")
            _write(str(own), [self._part(recorder)])

    def _compare(self) -> Operation[None]:
        self._offset = yield from compare_clocks(self._comm, self._clock)

    def _part(self, recorder: Recorder) -> RankEvents:
        return RankEvents(self._comm.rank, self._offset, list(recorder.events), recorder.lost)

    def _collect(self, recorder: Recorder, path: str) -> Operation[None]:
        comm = self._comm
        own = self._part(recorder)
        if comm.rank:
            message: Array = np.frombuffer(pickle.dumps(tuple(own)), dtype=np.uint8)
            yield comm.isend(message, 0, _EVENTS_TAG)
            return
        parts = [own]
        for source in range(1, comm.size):
            data = yield from receive(comm, source, _EVENTS_TAG)
            parts.append(RankEvents(*pickle.loads(data.tobytes())))
        # Not a daemon: the file must be complete when the program ends.
        writer = threading.Thread(target=_write, args=(path, parts), name="hvdlite-timeline")
        writer.start()
        self._writers.append(writer)


def _write(path: str, parts: list[RankEvents]) -> None:
    try:
        write_trace(path, parts)
    except OSError as error:
        logger.error("the timeline cannot be written to %s: %s", path, error)


def check_start(path: Any, mark_cycles: Any) -> tuple[str, bool]:
    """Return the arguments of `start_timeline` in their own types, or raise TypeError."""
    try:
        return str(Path(path)), bool(mark_cycles)
    except TypeError:
        raise TypeError(f"start_timeline: file_path must be a path, not {path!r}.") from None
