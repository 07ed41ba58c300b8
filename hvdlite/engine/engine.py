"""The engine: carries out what callers submit.

Its step reads: take in what was submitted, negotiate, fuse, execute, watch for stalls. It
never waits; driver.py decides which thread takes the steps, and when. sets.py keeps the process
sets, and agenda.py does what ranks announce.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from ..autotune import Parameters, Session
from ..exceptions import DuplicateNameError, HvdliteInternalError, HvdliteTimeoutError
from ..log import logger
from ..timeline.session import START, STOP
from ..transport.base import Communicator, Transport
from ..transport.types import Array
from .agenda import RETUNE, Agenda
from .driver import IDLE, Driver
from .requests import Announcement, Request
from .sets import GLOBAL_SET, Sets
from .stall import StallLimits
from .statistics import Counters, Statistics
from .submissions import Entry, Handle, Names

__all__ = ["GLOBAL_SET", "Engine"]

_forks = 0
"""How often this process was forked off since it imported this."""


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Engine:
    """Negotiates and executes the collectives of one process.

    Args:
        control: communicator of all ranks, for negotiation only.
        data: communicator of the same ranks, for the transport only.
        make_transport: makes the transport of a process set, from a communicator and its
            ranks; called on all of them.
        parameters: what process sets begin with; the same on every rank.
        stall: when stall inspectors speak, the same on every rank; None for no inspectors.
        affinity: the core that the thread is to run on.
    """

    def __init__(
        self,
        control: Communicator,
        data: Communicator,
        make_transport: Callable[[Communicator, tuple[int, ...]], Transport],
        parameters: Parameters,
        stall: StallLimits | None = None,
        *,
        affinity: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = control.rank
        self.size = control.size
        self.counters = Counters()
        self.submissions = 0
        self.submitters: set[int] = set()
        """Identifiers of the threads that have submitted anything."""
        self.clock = clock
        self.sets = Sets(
            control,
            data,
            make_transport,
            parameters,
            stall,
            self.counters,
            lambda set_id, announcement: self.agenda.act_on(set_id, announcement),
            clock,
        )
        self.channels = self.sets.channels
        self._submitted: deque[tuple[int, Entry]] = deque()
        self._announcements: deque[tuple[Announcement, bool]] = deque()
        """And whether each of them is worth a round of its own."""
        self.agenda = Agenda(self.sets, control, clock)
        self._timeline = self.agenda.timeline
        self._names: defaultdict[int, Names] = defaultdict(dict)
        self._driver = Driver(self.step, self._due, affinity)
        self._closing: str | None = None
        self._failure: str | None = None
        self._fork = _forks

    # -- callers ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background thread."""
        self._driver.start()
        if self.agenda.session is not None:
            self.agenda.session.start(self.retune)

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports that the ranks can choose from."""
        return self.channels[GLOBAL_SET].transports

    def autotune(self, session: Session) -> None:
        """Let a session measure and retune the set of all ranks (on rank 0, before `start`)."""
        self.agenda.session = session
        self.channels[GLOBAL_SET].meter = session.meter

    def retune(self, parameters: Parameters, final: bool) -> None:
        """Have all ranks apply parameters after one and the same round.

        That is the next one in which all take part anyway: an idle job stays idle for it, and
        one that ends does not wait for it.

        Args:
            parameters: for the process set of all ranks.
            final: whether they are for the other sets, too.
        """
        self._announcements.append(((RETUNE, *parameters, final), False))

    def undo(self) -> None:
        """Free what was made, where the engine is not going to be started (collective)."""
        self.sets.free_all()

    def submit(
        self,
        set_id: int,
        request: Request,
        name: str | None,
        inputs: Sequence[Array],
        outputs: list[Array | None],
        result: object = None,
    ) -> Handle:
        """Hand in a request.

        Args:
            result: what the handle is to return in place of the outputs.

        Raises:
            DuplicateNameError: the name is in flight on this rank.
            HvdliteInternalError: the engine cannot take anything any more.
        """
        if _forks != self._fork:
            self._refuse_fork()
        names = self._names[set_id]
        handle = Handle(self, name, request.kind, names)
        entry = Entry(request, inputs, outputs, handle, self.clock(), name)
        if result is not None:
            entry.result = result
        driver = self._driver
        with driver.lock:
            if self._failure is not None or self._closing is not None:
                self._refuse_if_over()
            if name is not None:
                if name in names:
                    raise DuplicateNameError(
                        f"Rank {self.rank} submitted '{name}' while a tensor with the same name "
                        "is still in flight: wait for its handle first, or use another name."
                    )
                names[name] = handle
            self.submissions += 1
            self.submitters.add(threading.get_ident())
            self._submitted.append((set_id, entry))
            driver.wake()
        return handle

    def wait(self, handle: Handle, timeout: float | None = None) -> None:
        """Drive the engine until a handle is done. Raises HvdliteTimeoutError."""
        self._refuse_fork()
        start = self.clock()
        done = self._driver.drive_until(handle.done, timeout)
        end = self.clock()
        self.counters.waiting_seconds += end - start
        recorder = self._timeline.recorder
        if recorder is not None:
            recorder.note("wait", handle.name, start, end, threading.get_ident())
        if not done:
            raise HvdliteTimeoutError(
                f"'{handle.name}' was not completed within {timeout:g} s on rank {self.rank}; "
                "it goes on, and its handle can be waited for again."
            )

    def announce(self, *announcement: str | int | float | bool) -> None:
        """Have all ranks act on something after one and the same round, the next one possible.

        Raises:
            HvdliteInternalError: the engine cannot take anything any more.
        """
        self._refuse_fork()
        with self._driver.lock:
            self._refuse_if_over()
            self._announcements.append((announcement, True))
            self._driver.wake()

    def start_timeline(self, path: str, mark_cycles: bool, announced: bool = False) -> None:
        """Have all ranks begin a timeline.

        Args:
            path: the file, absolute.
            mark_cycles: whether rounds are recorded too.
            announced: whether another rank does the asking.
        """
        self._timeline.asked = path
        if not announced:
            self.announce(START, path, mark_cycles)

    def stop_timeline(self) -> None:
        """Have all ranks end the timeline that this rank has asked for, or else whichever."""
        path, self._timeline.asked = self._timeline.asked, ""
        self.announce(STOP, path)

    def shutdown(self, reason: str) -> None:
        """Leave: finish what all ranks agree on, tell the others, and stop the thread.

        Returns when every rank has noticed, that is when each of them has submitted something
        more (and got an error) or leaves as well.
        """
        self._refuse_fork()
        self._driver.refuse_reentry()
        with self._driver.lock:
            self._closing = reason
            self._driver.wake()
        if self._failure is None:
            self._driver.drive_until(self._closed, leaving=True)
        self._driver.stop()
        if self.agenda.session is not None:
            self.agenda.session.close()
        self._timeline.finish()
        if self._failure is None:
            # Callers that waited in other threads may be in the middle of a step.
            with self._driver.drive:
                self.sets.free_all()

    def fail(self, text: str) -> None:
        """Give up: fail all that is in flight, and refuse what comes."""
        with self._driver.lock:
            if self._failure is None:
                self._failure = text
        self._timeline.rescue()
        for channel in self.channels.values():
            channel.abandon(text)
        while self._submitted:
            _, entry = self._submitted.popleft()
            entry.handle.fail(HvdliteInternalError(text))

    def rescue(self) -> None:
        """Save what would be lost when the process ends without `shutdown`."""
        self._timeline.rescue()

    @property
    def is_mine(self) -> bool:
        """Whether this is the process that made the engine, and not a fork of it."""
        return _forks == self._fork

    @property
    def failed(self) -> bool:
        """Whether the engine has given up."""
        return self._failure is not None

    def statistics(self) -> Statistics:
        """Return a snapshot of the counters."""
        counters = self.counters
        channels = list(self.channels.values())
        return Statistics(
            rounds=counters.rounds,
            empty_rounds=counters.empty_rounds,
            responses=counters.responses,
            cache_hits=counters.cache_hits,
            cache_size=sum(len(channel.negotiator.cache) for channel in channels),
            batches=counters.batches,
            tensors=counters.tensors,
            bytes=counters.bytes,
            wire_bytes=counters.wire_bytes,
            packing_seconds=counters.packing.seconds,
            moving_seconds=counters.moving.seconds,
            waiting_seconds=counters.waiting_seconds,
            queue_depth=len(self._submitted) + sum(len(c.negotiator.pending) for c in channels),
            in_flight=sum(channel.in_flight for channel in channels),
        )

    def failure(self) -> HvdliteInternalError:
        """Return the error of an engine that has given up."""
        return HvdliteInternalError(self._failure)

    def _refuse_fork(self) -> None:
        # Before any lock is taken: it may have been held at the time of the fork.
        if not self.is_mine:
            raise HvdliteInternalError(
                "This process was forked from one that uses hvdlite; only the original can "
                "communicate. Start workers that need collectives with mpirun instead."
            )

    def _refuse_if_over(self) -> None:
        if self._failure is not None:
            raise self.failure()
        if self._closing is not None:
            raise HvdliteInternalError(
                f"hvdlite has been shut down (rank {self.rank}: {self._closing})."
            )

    def attended(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the calling thread is going to wait."""
        self._refuse_fork()
        return self._driver.attended()

    def _due(self) -> float | None:
        """Return the seconds until there is something to do; None if MPI is to be tested."""
        if self.agenda.chores and self._failure is None:
            return None
        due = IDLE
        for channel in list(self.channels.values()):
            if not channel.quiet:
                until = channel.sleeps_until()
                if until is None:
                    return None
                due = min(due, until - self.clock())
        return max(due, 0.0)

    # -- the step -----------------------------------------------------------------------

    def step(self, tests: int = 1) -> bool:
        """Do what can be done without waiting; return whether that was anything.

        One thread at a time may call this.

        Args:
            tests: how often to test for what an operation waits for. More than once is for
                callers that have nothing better to do.
        """
        if self._failure is not None:
            return False
        try:
            moved = self._take_in()
            now = self.clock()
            for channel in list(self.channels.values()):
                moved |= channel.advance(now, tests)
            # Most steps have neither to do, and are too short for two calls in vain.
            if self.sets.removed:
                self.sets.free_removed()
            if self.agenda.chores:
                moved |= self.agenda.advance(tests)
            verdict = self.sets.inspect()
            if verdict is not None:
                self.fail(f"hvdlite has been shut down: {verdict}")
            return moved
        except BaseException as error:
            details = traceback.format_exc()
            self.fail(f"hvdlite failed on rank {self.rank}: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise  # Ctrl-C and the like, in the thread of a caller that drives
            logger.error("internal error on rank %d\n%s", self.rank, details)
            return True

    def _take_in(self) -> bool:
        # Read first: what was submitted before shutdown() must not be left behind.
        closing = self._closing
        moved = False
        while self._announcements:
            announcement, urgent = self._announcements.popleft()
            moved |= urgent
            self.channels[GLOBAL_SET].negotiator.announce(announcement, urgent)
        while self._submitted:
            set_id, entry = self._submitted.popleft()
            moved = True
            channel = self.channels.get(set_id)
            if channel is None:
                entry.handle.fail(HvdliteInternalError(f"Process set {set_id} was removed."))
            elif channel.closed_by is not None:
                entry.handle.fail(
                    HvdliteInternalError(
                        f"hvdlite has been shut down ({channel.closed_by}); "
                        f"'{entry.handle.name}' cannot be completed."
                    )
                )
            else:
                channel.negotiator.add(entry)
        if closing is not None:
            for channel in self.channels.values():
                channel.negotiator.leave(closing)
        return moved

    def _closed(self) -> bool:
        if self._failure is not None:
            return True
        return not (self._submitted or self.agenda.chores) and self.sets.closed

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a process set before the engine has started (on all ranks, in one order)."""
        return self.sets.split(tuple(ranks))
