"""One process set at work: its rounds, and the batches that they led to.

Nothing here waits. `advance` moves whatever can move and says whether anything did.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..autotune import Meter, Parameters
from ..exceptions import HvdliteInternalError, MismatchError
from ..log import logger
from ..transport.adasum import Adasum
from ..transport.auto import choices
from ..transport.base import TAGS, Communicator, Transport
from ..transport.task import Task
from .coordinator import show_ranks
from .execution import Executor
from .fusion import Batch, FusionBuffers, plan
from .negotiation import Negotiator, Round
from .requests import Announcement, Kind, Response, display
from .statistics import Counters
from .submissions import Entry

if TYPE_CHECKING:
    from ..timeline.recorder import Recorder

__all__ = ["CLOSED", "IN_FLIGHT", "REMOVED", "Channel"]

REMOVED = "the process set was removed"
"""The reason to leave a process set that is not the end of the job."""

CLOSED = "closed"
"""What a channel announces by itself when its set is closed."""

IN_FLIGHT = 2
"""Batches on their way at once: one is packed or unpacked while the other one moves."""

_PATIENCE = 1 / 20
"""Rounds that lead to nothing slow down to this share of the time already waited."""

_LONGEST_PAUSE = 5e-3

_unfinished: list[object] = []
"""Operations that were given up, kept for the memory that belongs to them."""


class Channel:
    """The engine's state for one process set, on one rank that belongs to it."""

    def __init__(
        self,
        control: Communicator,
        transport: Transport,
        ranks: Sequence[int],
        *,
        parameters: Parameters,
        counters: Counters,
        on_change: Callable[[Response, Entry], None] | None = None,
        on_announcement: Callable[[Announcement], None] | None = None,
        set_id: int = 0,
        adasum: Adasum | None = None,
    ) -> None:
        """Make a channel.

        Args:
            control: the private communicator of the rounds.
            transport: moves the data, on a communicator of its own.
            ranks: the set's ranks, numbered as users know them.
            parameters: in force until `retune` brings others.
            on_change: called for an agreed change of the process sets.
            on_announcement: called for what a rank has announced to all.
            set_id: the set's number.
            adasum: does what no transport does, on the transport's communicator.
        """
        self.control = control
        self.transport = transport
        self.ranks = tuple(ranks)
        self.negotiator = Negotiator(
            control, parameters.cache_capacity, self.ranks, transport.words
        )
        self.closed_by: str | None = None
        self.parameters = parameters
        self._choices = choices(transport)
        self._chosen = self._choices.get(parameters.transport, transport)
        self._counters = counters
        self._on_change = on_change
        self._on_announcement = on_announcement
        self._set_id = set_id
        self._rounds = 0
        self._buffers = FusionBuffers(IN_FLIGHT, transport.allocate)
        self._executor = Executor(
            transport,
            control.rank,
            control.size,
            self._buffers,
            counters,
            adasum,
            set_id,
        )
        self._round: Task | None = None
        self._round_began = 0.0
        self._next_round = 0.0
        self._in_vain_since = 0.0
        self._queue: deque[Batch] = deque()
        self._in_flight: list[tuple[Task, Batch]] = []
        self._tag = 0
        self.recorder: Recorder | None = None
        """What notes down events for a timeline, while there is one."""
        self.meter: Meter | None = None
        """What measures for autotune, on the rank that does and while it does."""

    @property
    def in_flight(self) -> int:
        """Transport operations in progress."""
        return len(self._in_flight)

    def executing(self) -> list[Entry]:
        """Return what was agreed on and has not completed."""
        batches = [*(batch for _, batch in self._in_flight), *self._queue]
        entries = {id(e): e for batch in batches for e in batch.entries if e is not None}
        return [entry for entry in entries.values() if not entry.handle.finished]

    @property
    def quiet(self) -> bool:
        """Whether nothing is left to do here until somebody submits something."""
        return not (self._round or self._queue or self._in_flight or self.negotiator.wants_round())

    def sleeps_until(self) -> float | None:
        """Return when there is something to do next, if all there is to do is wait for it.

        None means that communications are in progress and want to be tested.
        """
        if self._round or self._in_flight or self._queue or self.negotiator.fresh:
            return None
        return self._next_round

    def advance(self, now: float, tests: int = 1) -> bool:
        """Do what can be done now, and return whether that was anything."""
        moved = self._advance_round(now, tests)
        if self._in_flight or self._queue:
            moved |= self._advance_batches(tests)
        return moved

    # -- rounds -------------------------------------------------------------------------

    def _advance_round(self, now: float, tests: int) -> bool:
        negotiator = self.negotiator
        if self._round is None:
            if not negotiator.wants_round():
                return False
            if not negotiator.fresh and now < self._next_round:
                return False
            if negotiator.fresh:
                self._in_vain_since = now
            self._round = Task(negotiator.round())
            self._round_began = now
        moved = self._round.advance(tests)
        if self._round.finished:
            outcome: Round = self._round.result
            self._round = None
            self._take(outcome, now)
        return moved

    def _take(self, outcome: Round, now: float) -> None:
        counters = self._counters
        counters.rounds += 1
        self._rounds += 1
        recorder = self.recorder
        if self._on_announcement is not None:
            for announcement in outcome.announcements:
                self._on_announcement(announcement)
        # What was agreed on in the rounds that start and end a timeline belongs to it.
        recorder = self.recorder or recorder
        if recorder is not None:
            self._record(recorder, outcome)
        if logger.isEnabledFor(logging.DEBUG):
            names = [display(r.key, r.request.kind) for r, _ in outcome.agreed]
            logger.debug("round on ranks %s: ready %s", list(self.ranks), names)
        counters.responses += len(outcome.agreed)
        counters.cache_hits += outcome.cached
        if counters.negotiating_seconds is not None:
            counters.negotiating_seconds += sum(
                now - entry.submitted for _, entry in outcome.agreed if entry is not None
            )
        if outcome.agreed or outcome.join is not None:
            self._in_vain_since = now
        else:
            counters.empty_rounds += 1
        waited = now - self._in_vain_since
        cycle_time = self.parameters.cycle_time
        pause = min(max(cycle_time, waited * _PATIENCE), max(cycle_time, _LONGEST_PAUSE))
        # A round that led to something may well be followed by another one at once.
        self._next_round = now + (0.0 if outcome.agreed else pause)
        runnable: list[tuple[Response, Entry | None]] = []
        for response, entry in outcome.agreed:
            if response.error is not None:
                if entry is not None:
                    entry.handle.fail(MismatchError(response.error))
            elif response.request.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET):
                assert self._on_change is not None and entry is not None
                self._on_change(response, entry)
            else:
                if entry is not None:
                    entry.remaining = len(response.request.dtypes)
                    if not entry.remaining:
                        # A group of no tensors, or a barrier: agreement is all there is to it.
                        entry.handle.finish([])
                runnable.append((response, entry))
        batches = plan(runnable, self.parameters.fusion_threshold)
        for batch in batches:
            batch.transport = self._chosen
        if self.meter is not None:
            self.meter.agreed(outcome.agreed)
        if recorder is not None:
            recorder.unfinished += len(batches)
            for batch in batches:
                batch.round = self._rounds
                batch.recorder = recorder
        self._queue.extend(batches)
        self._notice_rest()
        if outcome.join is not None:
            assert outcome.last_joined is not None
            outcome.join.handle.finish(self.ranks[outcome.last_joined])
        if outcome.left is not None:
            self._close(outcome.left)
            if self._on_announcement is not None:
                self._on_announcement((CLOSED,))

    def _record(self, recorder: Recorder, outcome: Round) -> None:
        now = recorder.clock()
        if recorder.mark_cycles:
            ready = len(outcome.agreed)
            recorder.note("cycle", self._round_began, now, self._rounds, self._set_id, ready)
        for response, entry in outcome.agreed:
            if entry is not None:
                recorder.note(
                    "negotiate",
                    display(response.key, response.request.kind),
                    entry.submitted,
                    now,
                    self._rounds,
                    self._set_id,
                    str(response.request.kind),
                    sum(piece.nbytes for piece in response.pieces),
                )

    def _close(self, left: Sequence[tuple[int, str]]) -> None:
        reasons: dict[str, list[int]] = {}
        for rank, reason in left:
            reasons.setdefault(reason, []).append(self.ranks[rank])
        who = "; ".join(f"{show_ranks(ranks)}: {reason}" for reason, ranks in reasons.items())
        self.closed_by = who
        removed = all(reason == REMOVED for _, reason in left)
        self.fail_pending(
            f"The process set {list(self.ranks)} was removed"
            if removed
            else f"hvdlite has been shut down ({who})"
        )

    def fail_pending(self, text: str) -> None:
        """Fail what has not been agreed on."""
        pending = list(self.negotiator.pending.values())
        self.negotiator.pending.clear()
        for entry in pending:
            entry.handle.fail(
                HvdliteInternalError(f"{text}; '{entry.handle.name}' cannot be completed.")
            )

    def abandon(self, text: str) -> None:
        """Fail everything that has not completed, and do nothing any more."""
        self.negotiator.closed = True
        self.closed_by = text
        self.fail_pending(text)
        for entry in self.executing():
            entry.handle.fail(
                HvdliteInternalError(f"{text}; '{entry.handle.name}' was interrupted.")
            )
        self._queue.clear()
        # MPI may still write into the buffers that these hold.
        _unfinished.append((self._round, self._in_flight))
        self._round, self._in_flight = None, []

    # -- batches ------------------------------------------------------------------------

    def _advance_batches(self, tests: int) -> bool:
        moved = False
        while self._queue and len(self._in_flight) < IN_FLIGHT:
            batch = self._queue.popleft()
            used = {other.lane for _, other in self._in_flight}
            batch.lane = next(lane for lane in range(IN_FLIGHT) if lane not in used)
            self._tag = (self._tag + 1) % TAGS
            self._in_flight.append((Task(self._executor.run(batch, self._tag)), batch))
            # The first step of every operation comes in the same order on every rank.
            self._in_flight[-1][0].advance()
            moved = True
        for task, _ in self._in_flight:
            if not task.finished:
                moved |= task.advance(tests)
        if moved:
            self._in_flight = [item for item in self._in_flight if not item[0].finished]
            self._notice_rest()
        return moved

    # -- autotune -----------------------------------------------------------------------

    def retune(self, parameters: Parameters) -> None:
        """Apply new parameters to what is planned from now on.

        All ranks call this after one and the same round. Batches keep what they were planned
        with, and the buffers that they use.
        """
        if parameters.cache_capacity != self.parameters.cache_capacity:
            self.negotiator.replace_cache(parameters.cache_capacity)
        self._chosen = self._choices.get(parameters.transport, self._chosen)
        self.parameters = parameters

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports that there are to choose from."""
        return tuple(self._choices)

    def trim_buffers(self) -> None:
        """Free the memory that larger thresholds have taken."""
        self._buffers.trim(self.parameters.fusion_threshold)

    def _notice_rest(self) -> None:
        if self.meter is not None and not self._in_flight and not self._queue:
            self.meter.rests()
