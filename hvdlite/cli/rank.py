"""What `hvdlite run` starts in place of each rank: runs the rank and tells the launcher about it.

`mpirun` loses output, mixes lines of different ranks, and may report success for a job whose
host died. So every rank has a parent that sends its output, whole and in order, and a record of
how it ended over a connection of its own. The parent also passes signals on, and ends the rank
when the launcher is gone.

This file is run by its path, without the packages of the environment, so that it starts in
milliseconds on every host: it may import nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = [
    "ADDRESS",
    "ERROR",
    "EXIT",
    "HELLO",
    "NO_INPUT",
    "OUTPUT",
    "SIGNAL",
    "TASK",
    "THREADS",
    "TOKEN",
    "FrameReader",
    "connect",
    "frame",
    "identity",
    "main",
    "notice_lost_hosts",
]

ADDRESS = "HVDLITE_LAUNCHER_ADDRESS"
"""Where the launcher listens: `unix:@NAME` and `HOST:PORT`, separated by semicolons."""
TOKEN = "HVDLITE_LAUNCHER_TOKEN"
NO_INPUT = "HVDLITE_LAUNCHER_NO_INPUT"
"""Set where nothing comes from standard input: Open MPI would not tell rank 0 so."""
THREADS = "HVDLITE_LAUNCHER_THREADS"
"""Set where the threads of a rank are to be chosen by the cores of its own host."""

HELLO, OUTPUT, ERROR, EXIT, SIGNAL, TASK = b"h", b"o", b"e", b"x", b"s", b"t"

_HEADER = struct.Struct(">cQ")
_CONNECT_SECONDS = 10.0
_DRAIN_SECONDS = 0.5
"""How long output is awaited after a rank's end: its own children may hold the pipes open."""
_KILL_SECONDS = 5.0
"""From a polite signal to SIGKILL, where the launcher has gone."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Return a message: its kind, its length, what it says."""
    return _HEADER.pack(kind, len(payload)) + payload


class FrameReader:
    """Puts messages together from the pieces in which a connection delivers them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a message that has not come to its end."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Take what has arrived; return the messages that are complete by now."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield kind, payload


def connect(addresses: str, timeout: float = _CONNECT_SECONDS) -> socket.socket:
    """Connect to the launcher at the first of its addresses that answers.

    Raises:
        OSError: none does; the text names them all.
    """
    problems = []
    for address in addresses.split(";"):
        family, target = _parse(address)
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(target)
        except OSError as error:
            connection.close()
            problems.append(f"{address} ({error.strerror or error})")
            continue
        connection.settimeout(None)
        notice_lost_hosts(connection)
        return connection
    raise OSError("; ".join(problems))


def notice_lost_hosts(connection: socket.socket) -> None:
    """Let a host that has silently gone end its connections, within half a minute."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # The last one, in milliseconds, is for what has been sent and is not acknowledged.
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 25_000),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _parse(address: str) -> tuple[int, Any]:
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:").replace("@", "\0", 1)
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        return socket.AF_INET6, (host.strip("[]"), int(port))
    return socket.AF_INET, (host, int(port))


def identity() -> tuple[int, int, int]:
    """Return rank, size and the number of ranks on this host, as the starter of ranks has set."""

    def first(default: int, *names: str) -> int:
        # Slurm writes `2(x3)` for three hosts of two.
        texts = (os.environ.get(name, "").partition("(")[0] for name in names)
        return next((int(text) for text in texts if text.isdigit()), default)

    rank = first(0, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    size = first(1, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")
    local = first(
        1,
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
    )
    return rank, size, local


def _child_environment(local: int) -> dict[str, str]:
    environment = dict(os.environ)
    # Through a pipe, Python would keep lines back until its buffer is full.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    if environment.pop(THREADS, ""):
        cores = len(os.sched_getaffinity(0))
        environment["OMP_NUM_THREADS"] = str(max(cores // local, 1))
    return environment


def _dies_with_parent() -> Callable[[], None]:
    libc = ctypes.CDLL(None)
    death_signal = 1  # PR_SET_PDEATHSIG

    def ask() -> None:
        libc.prctl(death_signal, signal.SIGKILL)

    return ask


class _Rank:
    """One child process, its pipes, and the connection to the launcher."""

    def __init__(self, command: Sequence[str], connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader()
        self.told_to_stop = False
        self._give_up: float | None = None
        # The wake-up pipe makes signals ordinary events of the loop.
        woken, waker = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (*_PASSED_ON, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self.rank, self.size, local = identity()
        hello = {
            "token": os.environ.get(TOKEN, ""),
            "rank": self.rank,
            "size": self.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._send(HELLO, json.dumps(hello).encode())
        self.child = subprocess.Popen(
            command,
            # MPICH leaves the others waiting for an end of input that never comes.
            stdin=subprocess.DEVNULL if self.rank or os.environ.get(NO_INPUT) else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # MPICH's ranks talk to their starter through an inherited descriptor.
            close_fds=False,
            env=_child_environment(local),
            preexec_fn=_dies_with_parent(),
        )
        assert self.child.stdout is not None and self.child.stderr is not None
        self._events = selectors.DefaultSelector()
        self._pipes = {self.child.stdout.fileno(): OUTPUT, self.child.stderr.fileno(): ERROR}
        for descriptor in (*self._pipes, woken, connection.fileno()):
            self._events.register(descriptor, selectors.EVENT_READ)
        self._woken = woken

    def _send(self, kind: bytes, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # the launcher has gone; the loop will notice
            self._connection.sendall(frame(kind, payload))

    def run(self) -> int:
        """Serve until the child has ended; return its status as subprocess does."""
        while self.child.poll() is None:
            self._step(0.2 if self._give_up is not None else 5.0)
            if self._give_up is not None and time.monotonic() > self._give_up:
                self._signal(signal.SIGKILL)
        end = time.monotonic() + _DRAIN_SECONDS
        while self._pipes and time.monotonic() < end and self._step(0.02):
            pass
        status = self.child.returncode
        record = {"status": status, "told": self.told_to_stop}
        self._send(EXIT, json.dumps(record).encode())
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        return status

    def _step(self, timeout: float) -> bool:
        events = self._events.select(timeout)
        for key, _ in events:
            if key.fd == self._woken:
                for number in os.read(self._woken, 64):
                    if number != signal.SIGCHLD:
                        self.told_to_stop |= number in (signal.SIGTERM, signal.SIGINT)
                        self._signal(number)
            elif key.fd in self._pipes:
                data = os.read(key.fd, 65536)
                if data:
                    self._send(self._pipes[key.fd], data)
                else:
                    self._events.unregister(key.fd)
                    del self._pipes[key.fd]
            else:
                self._listen()
        return bool(events)

    def _listen(self) -> None:
        try:
            data = self._connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._events.unregister(self._connection.fileno())
            self.told_to_stop = True
            self._signal(signal.SIGTERM)
            self._give_up = time.monotonic() + _KILL_SECONDS
        for kind, payload in self._frames.feed(data):
            if kind == SIGNAL:
                self.told_to_stop = True
                self._signal(int(payload))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(number)


def main(command: Sequence[str]) -> int:
    """Run a rank's command; return the status to exit with."""
    addresses = os.environ.get(ADDRESS, "")
    if not addresses:  # the line was copied from a job of the launcher's
        os.execvp(command[0], list(command))
    try:
        connection = connect(addresses)
    except OSError as error:
        print(
            f"hvdlite: rank {identity()[0]} on {socket.gethostname()} cannot reach the launcher: "
            f"{error}. Let its port pass (--launcher-port fixes it), name an interface that all "
            "hosts share (--network-interfaces), or run with --plain.",
            file=sys.stderr,
        )
        return 1
    try:
        rank = _Rank(command, connection)
    except OSError as error:
        text = f"hvdlite: cannot start {command[0]} on {socket.gethostname()}: {error.strerror}\n"
        connection.sendall(frame(ERROR, text.encode()))
        connection.sendall(frame(EXIT, json.dumps({"status": 127, "told": False}).encode()))
        return 127
    status = rank.run()
    if status < 0:
        # mpirun is to see the same death: some of its decisions depend on the signal.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-status, signal.SIG_DFL)
        _no_core_dump()
        os.kill(os.getpid(), -status)
        return 128 - status
    return status


def _no_core_dump() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
