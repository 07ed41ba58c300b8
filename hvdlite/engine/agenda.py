"""What a rank announces to all, and what follows from it on each of them.

All ranks hear of it after one and the same round, so what they do then is in step without any
further agreement.
"""

from __future__ import annotations

from collections.abc import Callable

from ..autotune import Parameters, Session
from ..timeline import Timeline
from ..timeline.session import START, STOP
from ..transport.base import Communicator, Operation
from ..transport.task import Task
from .channel import CLOSED
from .requests import Announcement
from .sets import GLOBAL_SET, Sets

__all__ = ["RETUNE", "Agenda"]

RETUNE = "autotune.retune"


class Agenda:
    """One rank's part in what is announced: timelines, and new parameters.

    Args:
        sets: that announcements come from, and are about.
        control: communicator of all ranks.
        clock: seconds.
    """

    def __init__(self, sets: Sets, control: Communicator, clock: Callable[[], float]) -> None:
        self.session: Session | None = None
        """What measures and proposes parameters, on rank 0 of a job with autotune."""
        self.timeline = Timeline(control, clock, sets.record_with)
        self.chores: list[Task] = []
        """What all ranks do beside the rounds, in the same order."""
        self._sets = sets
        self._clock = clock

    def advance(self, tests: int) -> bool:
        """Do what can be done now of the first chore; return whether that was anything."""
        # One after the other: they share tags.
        moved = self.chores[0].advance(tests)
        if self.chores[0].finished:
            del self.chores[0]
        return moved

    def act_on(self, set_id: int, announcement: Announcement) -> None:
        """Begin to do what a rank has announced to a process set; ignore what is unknown."""
        what, *details = announcement
        if what == RETUNE:
            threshold, cycle_time, capacity, transport, final = details
            self._retune(
                set_id,
                Parameters(int(threshold), float(cycle_time), int(capacity), str(transport)),
                bool(final),
            )
        elif set_id != GLOBAL_SET:
            return
        elif what == START:
            path, mark_cycles = details
            self._add(self.timeline.start(str(path), bool(mark_cycles)))
        elif what == STOP:
            (path,) = details
            self._add(self.timeline.stop(str(path)))
        elif what == CLOSED:
            # Every rank comes here after the same round, so nobody has to announce the end.
            self._add(self.timeline.stop())

    def _retune(self, set_id: int, parameters: Parameters, final: bool) -> None:
        channels = self._sets.channels
        channel = channels[set_id]
        channel.retune(parameters)
        if final:
            channel.trim_buffers()
        if set_id != GLOBAL_SET:
            return
        if self.timeline.recorder is not None:
            self.timeline.recorder.note("mark", f"autotune: {parameters}", self._clock())
        if final:
            channel.meter = None
            # Sets are made in rounds of this channel: after this one, all ranks agree on it.
            self._sets.parameters = parameters
            for other in channels.values():
                # Their rounds come when they come. One of their ranks has to tell the rest.
                if other is not channel and other.control.rank == 0:
                    other.negotiator.announce((RETUNE, *parameters, True), urgent=False)
        if self.session is not None:
            self.session.applied(parameters, final)

    def _add(self, chore: Operation[None] | None) -> None:
        if chore is not None:
            self.chores.append(Task(chore))
