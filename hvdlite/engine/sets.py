"""The process sets that this rank belongs to: made, changed, watched and freed.

All ranks make the same sets in the same order, so a set has the same number everywhere, also
where it is only counted because this rank is not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ..autotune import Parameters
from ..timeline import Recorder
from ..transport.adasum import Adasum
from ..transport.base import Communicator, Transport
from ..transport.task import Task
from .channel import REMOVED, Channel
from .requests import Announcement, Kind, Response, display
from .stall import StallInspector, StallLimits, Waiting
from .statistics import Counters
from .submissions import Entry

__all__ = ["GLOBAL_SET", "Sets"]

GLOBAL_SET = 0
"""Number of the process set that all ranks belong to."""


@dataclass(frozen=True, slots=True)
class _Belongings:
    """What goes with a set's channel."""

    control: Communicator
    data: Communicator
    inspector: StallInspector | None
    watch: Task | None
    """The inspector at work."""


class Sets:
    """The process sets that this rank belongs to, from the beginning the one of all ranks.

    Args:
        control: communicator of all ranks, for negotiation only.
        data: communicator of the same ranks, for the transport only.
        make_transport: makes the transport of a process set, from a communicator and its
            ranks; called on all of them.
        parameters: what sets begin with.
        stall: when the stall inspectors speak; None for no inspectors.
        counters: of the engine.
        on_announcement: called with the number of a set, and what a rank has announced to it.
        clock: seconds.
    """

    def __init__(
        self,
        control: Communicator,
        data: Communicator,
        make_transport: Callable[[Communicator, tuple[int, ...]], Transport],
        parameters: Parameters,
        stall: StallLimits | None,
        counters: Counters,
        on_announcement: Callable[[int, Announcement], None],
        clock: Callable[[], float],
    ) -> None:
        self.channels: dict[int, Channel] = {}
        """By the numbers of the sets."""
        self.parameters = parameters
        """What sets begin with."""
        self.removed: list[int] = []
        """Numbers of the sets that are to be freed once they have come to rest."""
        self._control = control
        self._data = data
        self._make_transport = make_transport
        self._stall = stall
        self._counters = counters
        self._on_announcement = on_announcement
        self._clock = clock
        self._recorder: Recorder | None = None
        self._belongings: dict[int, _Belongings] = {}
        self._next = GLOBAL_SET
        self._add(tuple(range(control.size)), control, data)

    @property
    def closed(self) -> bool:
        """Whether nothing is going to happen in any of the sets."""
        # A copy: another thread's step may add or free a process set meanwhile.
        channels = list(self.channels.values())
        return all(channel.negotiator.closed and channel.quiet for channel in channels)

    def split(self, ranks: tuple[int, ...]) -> int:
        """Make the set of some ranks, and return its number (on all ranks, in one order)."""
        return self._add(ranks, self._control.subset(ranks), self._data.subset(ranks))

    def record_with(self, recorder: Recorder | None) -> None:
        """Have all sets, also later ones, note down events; None for no more."""
        self._recorder = recorder
        for channel in self.channels.values():
            channel.recorder = recorder

    def inspect(self) -> str | None:
        """Let the stall inspectors do their work; return why the job has to end, if it has to."""
        for each in list(self._belongings.values()):
            if each.inspector is not None and each.watch is not None:
                each.watch.advance()
                if each.inspector.verdict is not None:
                    return each.inspector.verdict
        return None

    def free_removed(self) -> None:
        """Free the sets that were removed and have come to rest."""
        for set_id in list(self.removed):
            channel = self.channels[set_id]
            if channel.negotiator.closed and channel.quiet:
                self.removed.remove(set_id)
                self._free(set_id)

    def free_all(self) -> None:
        """Free all sets (collective)."""
        for set_id in list(self.channels):
            self._free(set_id)

    def _add(
        self, ranks: tuple[int, ...], control: Communicator | None, data: Communicator | None
    ) -> int:
        set_id = self._next
        self._next += 1
        if control is None or data is None:
            return set_id
        channel = Channel(
            control,
            self._make_transport(data, ranks),
            ranks,
            parameters=self.parameters,
            counters=self._counters,
            on_change=self._change,
            on_announcement=functools.partial(self._on_announcement, set_id),
            set_id=set_id,
            adasum=Adasum(data),
        )
        channel.recorder = self._recorder
        inspector = watch = None
        if self._stall is not None and len(ranks) > 1:
            inspector = StallInspector(
                control, ranks, self._stall, lambda: self._waiting(channel), self._clock
            )
            watch = Task(inspector.watch())
        self._belongings[set_id] = _Belongings(control, data, inspector, watch)
        self.channels[set_id] = channel
        return set_id

    def _change(self, response: Response, entry: Entry) -> None:
        if response.request.kind is Kind.ADD_PROCESS_SET:
            entry.handle.finish(self.split(response.request.splits))
            return
        (set_id,) = response.request.splits
        channel = self.channels.get(set_id)
        if channel is not None and set_id not in self.removed:
            channel.negotiator.leave(REMOVED, now=True)
            self.removed.append(set_id)
        entry.handle.finish(None)

    def _free(self, set_id: int) -> None:
        self.channels.pop(set_id).transport.close()
        belongings = self._belongings.pop(set_id)
        belongings.control.free()
        belongings.data.free()

    def _waiting(self, channel: Channel) -> Waiting:
        now = self._clock()
        return {
            display(entry.key, entry.request.kind): now - entry.submitted
            for entry in [*channel.negotiator.pending.values(), *channel.executing()]
            if entry.request.kind is not Kind.JOIN and not entry.handle.finished
        }
