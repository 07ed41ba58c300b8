"""Runs a job to its end: output, signals, records of all ranks, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from .command import Plan
from .connections import Peer, accept, caught_signals, listen_here, listen_to_hosts
from .output import Output, speaks_of_others
from .process import end_launcher, signal_launcher, start_launcher
from .rank import (
    ERROR,
    EXIT,
    HELLO,
    OUTPUT,
    SIGNAL,
    TASK,
)
from .verdict import RankRecord, Verdict, judge

__all__ = ["Limits", "Supervisor"]

_SIGNALS = object()
"""Marks the descriptor that becomes readable when a signal has come."""
_TICK = 0.1
_LINGER_SECONDS = 3.0
"""How long records are awaited once mpirun has ended."""
_KILL_SECONDS = 3.0
"""From killing the ranks to killing mpirun."""
_GREETING_BYTES = 4096
_KEPT_CHARACTERS = 65536
_HOLD_SECONDS = 0.5
"""How long mpirun's own words wait for a rank's, which may explain them better."""


@dataclass(frozen=True)
class Limits:
    """How long, in seconds, the launcher waits for what."""

    start: float = 120.0
    """Until all ranks have started."""
    grace: float = 30.0
    """From a signal that is passed on to SIGKILL."""
    failure: float | None = 10.0
    """From the failure of one rank to the end of the others by force; None: they may go on."""
    total: float | None = None
    """For the whole job, if it is limited."""


class Supervisor:
    """One job. Call `run` once."""

    def __init__(
        self,
        plan: Plan,
        output: Output,
        limits: Limits | None = None,
        *,
        payload: bytes = b"",
        port: int = 0,
        catch_signals: bool = True,
    ) -> None:
        """Prepare.

        Args:
            plan: what to start.
            output: where the ranks' output goes.
            limits: how long to wait for what.
            payload: what a task is sent when it asks.
            port: where to listen for ranks of other hosts, 0 for any free port.
            catch_signals: whether to pass on signals (main thread only).
        """
        self._plan = plan
        self._output = output
        self._limits = limits or Limits()
        self._payload = payload
        self._port = port
        self._catch = catch_signals
        self._token = secrets.token_hex(16)
        self._events = selectors.DefaultSelector()
        self._records: dict[int, RankRecord] = {}
        self._peers: dict[int, Peer] = {}
        self._stopping: float | None = None
        self._force_at: float | None = None
        self._forced: float | None = None
        self._reason = ""
        self._own_text = ""
        self._held = b""
        """What mpirun itself has said lately."""
        self._held_since: float | None = None
        self._asked = 0
        self._signal_asked = 0
        self.interrupted = False
        """Whether Ctrl-C has been passed on where signals are not caught."""
        self.results: dict[int, bytes] = {}
        """What tasks have answered, by rank."""

    def run(self) -> Verdict:
        """Start the job, see it to its end, and say how it ended.

        Raises:
            LaunchProblem: the launcher's program cannot be run.
        """
        began = time.monotonic()
        self._began = self._now = began
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            process = self._start(self._listen())
            stack.callback(end_launcher, process, _KILL_SECONDS)
            if self._catch:
                woken = stack.enter_context(caught_signals())
                self._events.register(woken, selectors.EVENT_READ, _SIGNALS)
            self._loop(process)
        for rank, when in self._output.trouble.items():
            if rank in self._records:
                self._records[rank].trouble = when
        for rank, record in self._records.items():
            record.secondary = speaks_of_others(self._output.tail(rank))
        verdict = judge(
            self._records,
            self._plan.np,
            process.returncode,
            launcher=os.path.basename(self._plan.launcher.path),
            launcher_text=self._own_text + self._held.decode(errors="replace"),
            stopping=self._stopping,
            reason=self._reason,
            asked=self._signal_asked,
            here=socket.gethostname(),
            seconds=self._failed_at() - began,
        )
        if self._held and not verdict.explained:
            self._show_own()
        self._output.close()
        return verdict

    def _failed_at(self) -> float:
        ends = [r.ended for r in self._records.values() if r.ended is not None and not r.good]
        return min(ends, default=time.monotonic())

    # -- starting -----------------------------------------------------------------------

    def _listen(self) -> str:
        if self._plan.remote or "SLURM_JOB_ID" in os.environ:
            listener, address = listen_to_hosts(self._plan.remote, self._port)
        else:
            listener, address = listen_here()
        self._events.register(listener, selectors.EVENT_READ, self._accept)
        return address

    def _start(self, addresses: str) -> subprocess.Popen[bytes]:
        process = start_launcher(self._plan, addresses, self._token)
        assert process.stdout is not None and process.stderr is not None
        for pipe, stream in ((process.stdout, OUTPUT), (process.stderr, ERROR)):
            self._events.register(pipe, selectors.EVENT_READ, stream)
        with contextlib.suppress(OSError, AttributeError):
            self._events.register(os.pidfd_open(process.pid), selectors.EVENT_READ, None)
        return process

    # -- the loop -----------------------------------------------------------------------

    def _loop(self, process: subprocess.Popen[bytes]) -> None:
        ended: float | None = None
        while True:
            try:
                events = self._events.select(_TICK)
                # What is noticed at once counts as simultaneous, whatever the order here.
                self._now = time.monotonic()
                for key, _ in events:
                    self._handle(key)
            except KeyboardInterrupt:  # where signals are not caught: in a notebook
                self.interrupted = True
                self._pass_on(signal.SIGINT)
            self._output.idle()
            since = self._held_since
            if since and time.monotonic() - since > _HOLD_SECONDS and not self._is_failing():
                self._show_own()
            self._watch(process)
            if process.poll() is None:
                continue
            ended = ended or time.monotonic()
            if not self._peers or time.monotonic() - ended > _LINGER_SECONDS:
                break
        for key in list(self._events.get_map().values()):
            if key.data in (OUTPUT, ERROR):
                self._handle(key)

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.data in (OUTPUT, ERROR):
            self._read_own(key)
        elif key.data is _SIGNALS:
            for number in os.read(key.fd, 64):
                self._pass_on(number)
        elif isinstance(key.data, Peer):
            self._read_peer(key.data)
        elif key.data is None:
            self._events.unregister(key.fileobj)
            os.close(key.fd)
        else:
            key.data(key.fileobj)

    def _read_own(self, key: selectors.SelectorKey) -> None:
        """Show what mpirun itself says; the ranks' output takes another way."""
        while True:
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                with contextlib.suppress(KeyError):
                    self._events.unregister(key.fileobj)
                return
            # Open MPI's banners hold NULs, which make a terminal's or grep's life hard.
            self._held += data.replace(b"\0", b"")
            self._held_since = self._held_since or time.monotonic()

    def _show_own(self) -> None:
        """Show what mpirun said, unless a rank's own word makes it needless."""
        text = self._held.decode(errors="replace")
        self._own_text = (self._own_text + text)[-_KEPT_CHARACTERS:]
        self._output.note(text)
        self._held, self._held_since = b"", None

    def _is_failing(self) -> bool:
        return bool(self._output.trouble) or any(
            record.ended is not None and not record.good for record in self._records.values()
        )

    def _accept(self, listener: socket.socket) -> None:
        for peer in accept(listener):
            self._events.register(peer.connection, selectors.EVENT_READ, peer)

    def _read_peer(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(262144)
        except OSError:
            data = b""
        if not data:
            self._forget(peer)
            return
        for kind, payload in peer.frames.feed(data):
            if peer.rank is None:
                if kind != HELLO or not self._welcome(peer, payload):
                    self._forget(peer)
                    return
            else:
                self._take(peer, peer.rank, kind, payload)
        if peer.rank is None and peer.frames.pending > _GREETING_BYTES:
            self._forget(peer)  # a stranger who fills this process's memory

    def _welcome(self, peer: Peer, payload: bytes) -> bool:
        try:
            hello = json.loads(payload)
            known = secrets.compare_digest(str(hello["token"]), self._token)
            rank = int(hello["rank"])
        except (ValueError, KeyError, TypeError):
            return False
        if not known or not 0 <= rank < self._plan.np:
            return False
        peer.rank = rank
        if hello.get("task"):
            peer.is_task = True
            peer.send(TASK, self._payload)
            return True
        if int(hello["size"]) != self._plan.np:
            self._end(
                f"Rank {rank} believes in {hello['size']} ranks where {self._plan.np} were asked "
                "for: the starter and the MPI library do not belong together."
            )
        self._peers[rank] = peer
        record = self._records.setdefault(rank, RankRecord())
        record.host, record.started = str(hello["host"]), True
        return True

    def _take(self, peer: Peer, rank: int, kind: bytes, payload: bytes) -> None:
        if peer.is_task:
            self.results[rank] = payload
        elif kind in (OUTPUT, ERROR):
            self._output.feed(rank, kind, payload, self._plan.np)
        elif kind == EXIT:
            record = self._records[rank]
            told = json.loads(payload)
            record.status, record.told = int(told["status"]), bool(told["told"])
            record.ended = self._now

    def _forget(self, peer: Peer) -> None:
        self._events.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None and not peer.is_task:
            del self._peers[peer.rank]
            record = self._records[peer.rank]
            if record.ended is None:
                record.ended = self._now

    # -- ending -------------------------------------------------------------------------

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """End what should have ended by now."""
        now = time.monotonic()
        if process.poll() is None and self._stopping is None:
            missing = self._plan.np - len(self._records)
            if missing and now - self._began > self._limits.start:
                names = [str(r) for r in range(self._plan.np) if r not in self._records]
                self._end(
                    f"Ranks {', '.join(names[:16])} had not started {self._limits.start:g} s "
                    "after the launch (--start-timeout)."
                )
            total = self._limits.total
            if total is not None and now - self._began > total:
                self._end(f"The job had not ended {total:g} s after the launch.")
            bad = [r.ended for r in self._records.values() if r.ended and not r.good]
            if bad and self._force_at is None and self._limits.failure is not None:
                # mpirun ends the others, as a rule at once.
                self._force_at = min(bad) + self._limits.failure
        if self._force_at is not None and now > self._force_at and self._forced is None:
            self._kill()
        if self._forced is not None and now > self._forced + _KILL_SECONDS:
            signal_launcher(process, signal.SIGKILL)

    def _pass_on(self, number: int) -> None:
        """Send a signal to all ranks; the second one that asks for the end is final."""
        for peer in list(self._peers.values()):
            peer.send(SIGNAL, str(number).encode())
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            return
        self._asked += 1
        if self._asked == 1:
            self._stopping = time.monotonic()
            self._signal_asked = number
            name = signal.Signals(number).name
            self._reason = f"The job was asked to end by {name}."
            self._force_at = self._stopping + self._limits.grace
            if len(self._peers) == 0:
                self._force_at = self._stopping
            print(
                f"hvdlite run: {name} passed on to all ranks; they have {self._limits.grace:g} s. "
                "Once more kills them.",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._kill()

    def _end(self, reason: str) -> None:
        if self._stopping is None:
            self._stopping, self._reason = time.monotonic(), reason
            self._kill()

    def _kill(self) -> None:
        self._stopping = self._stopping or time.monotonic()
        self._forced = time.monotonic()
        if self._signal_asked:
            self._signal_asked = signal.SIGKILL
        for peer in list(self._peers.values()):
            peer.send(SIGNAL, str(int(signal.SIGKILL)).encode())
        if not self._peers:
            self._forced -= _KILL_SECONDS

    def _close(self) -> None:
        for key in list(self._events.get_map().values()):
            self._events.unregister(key.fileobj)
            if isinstance(key.data, Peer):
                key.data.connection.close()
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.data is None:
                os.close(key.fd)
        self._events.close()
