"""A timeline from its start on all ranks to its file on rank 0.

Start and end are announced in a negotiation round, so every rank begins and ends with the same
round, whichever rank asked for it. Then the ranks compare clocks with rank 0; at the end they
send it what they have recorded, and it writes the file in a thread of its own.
"""

from __future__ import annotations

import os
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
from .recorder import Recorder, events_of_each
from .trace import RankEvents, write_trace

__all__ = ["START", "STOP", "Timeline", "check_start"]

START, STOP = "timeline.start", "timeline.stop"
_EVENTS_TAG = 21
_RESCUE_TIME = 5.0
_BREATH = 1e-3


class _Finished:
    """Completes when the batches that a recorder is to see to their end have ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def Test(self) -> bool:
        return not self._recorder.unfinished


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
        self.asked = ""
        """The file of the timeline that this rank has asked for and not asked to end."""
        self._comm = comm
        self._clock = clock
        self._changed = changed
        self._path = ""
        self._offset = 0.0
        self._unsaved: dict[Recorder, str] = {}
        """What is recorded, or on its way to rank 0, and the file that it is for."""
        self._writer: threading.Thread | None = None
        self._hurry = threading.Event()

    def start(self, path: str, mark_cycles: bool) -> Operation[None] | None:
        """Begin to record; return what is to be done beside that, on every rank."""
        if self.recorder is not None:
            # Scripts are the same on all ranks: each of them may have asked.
            if path != self._path and self._comm.rank == 0:
                logger.warning(
                    "a timeline is being recorded already, to %s; the one to %s is not started: "
                    "call stop_timeline() first",
                    self._path,
                    path,
                )
            return None
        if self._comm.rank == 0:
            _try_folder(path)
        self._path = path
        self.recorder = Recorder(self._clock, mark_cycles, events_of_each(self._comm.size))
        self._unsaved[self.recorder] = path
        self._changed(self.recorder)
        return self._compare()

    def stop(self, path: str = "") -> Operation[None] | None:
        """End the recording; return the operation that brings it to rank 0, on every rank.

        Args:
            path: the file of the one that is meant, "" for any. A rank that is late with
                ending one must not end the next.
        """
        if self.recorder is None or path not in ("", self._path):
            return None
        recorder, self.recorder = self.recorder, None
        self._changed(None)
        return self._collect(recorder, self._path)

    def finish(self, timeout: float | None = None) -> None:
        """Return when all files are written."""
        self._hurry.set()
        if self._writer is not None:
            self._writer.join(timeout)

    def rescue(self) -> None:
        """Write what this rank has recorded, since the job is about to end badly."""
        self.recorder = None
        for recorder, path in list(self._unsaved.items()):
            self._unsaved.pop(recorder, None)
            own = Path(path)
            own = own.with_name(f"{own.stem}.rank{self._comm.rank}{own.suffix}")
            _write(str(own), [self._part(recorder)], self._comm.size)
        self.finish(_RESCUE_TIME)

    def _compare(self) -> Operation[None]:
        self._offset = yield from compare_clocks(self._comm, self._clock)

    def _part(self, recorder: Recorder) -> RankEvents:
        return RankEvents(self._comm.rank, self._offset, recorder.events(), recorder.lost)

    def _collect(self, recorder: Recorder, path: str) -> Operation[None]:
        comm = self._comm
        yield _Finished(recorder)
        own = self._part(recorder)
        if comm.rank:
            message: Array = np.frombuffer(pickle.dumps(tuple(own)), dtype=np.uint8)
            yield comm.isend(message, 0, _EVENTS_TAG)
            self._unsaved.pop(recorder, None)
            return
        others: list[Array] = []
        for source in range(1, comm.size):
            others.append((yield from receive(comm, source, _EVENTS_TAG)))
        # Not a daemon: the file must be complete when the program ends.
        self._writer = threading.Thread(
            target=self._write_all, args=(self._writer, path, own, others), name="hvdlite-timeline"
        )
        self._writer.start()
        self._unsaved.pop(recorder, None)

    def _write_all(
        self, previous: threading.Thread | None, path: str, own: RankEvents, others: list[Array]
    ) -> None:
        if previous is not None:
            previous.join()  # it may be writing the same file
        parts = [own, *(RankEvents(*pickle.loads(data.tobytes())) for data in others)]
        # Training goes on meanwhile, and needs the interpreter more.
        _write(path, parts, self._comm.size, lambda: self._hurry.wait(_BREATH))


def _write(
    path: str, parts: list[RankEvents], size: int, pause: Callable[[], object] | None = None
) -> None:
    try:
        write_trace(path, parts, size, pause)
    except Exception as error:  # whatever it is, the job does not end for it
        logger.error("the timeline cannot be written to %s: %s", path, error)


def _try_folder(path: str) -> None:
    """Warn at the start, rather than after hours, when the file cannot be written."""
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("the timeline could not be written to %s: %s", path, error)
        return
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        what = "it is a folder" if os.path.isdir(path) else f"no permission to write in {folder}"
        logger.warning("the timeline could not be written to %s: %s", path, what)


def check_start(path: Any, mark_cycles: Any) -> tuple[str, bool]:
    """Return the arguments of `start_timeline` in their own types.

    Raises:
        TypeError: the path is none.
        ValueError: it cannot be that of a file.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = path
    if not isinstance(text, str):
        raise TypeError(f"start_timeline: file_path must be a path, not {path!r}.")
    if not Path(text).name or text.endswith("/") or "\0" in text:
        raise ValueError(f"start_timeline: file_path must name a file; {path!r} does not.")
    # Rank 0 writes it, maybe after somebody has changed the working directory.
    return os.path.abspath(text), bool(mark_cycles)
