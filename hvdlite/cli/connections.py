"""Where ranks report to, and where signals arrive: what the supervisor's loop waits for."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence

from . import machine
from .rank import FrameReader, frame, notice_lost_hosts

__all__ = ["Peer", "accept", "caught_signals", "listen_here", "listen_to_hosts"]

_BACKLOG = 4096
_SEND_SECONDS = 30.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Peer:
    """A connection: of a rank, or of the function that a rank runs."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = FrameReader()
        self.rank: int | None = None
        """None until it has said who it is."""
        self.is_task = False

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send a message; that the other side has gone shows when it is read from."""
        with contextlib.suppress(OSError):
            self.connection.sendall(frame(kind, payload))


def listen_here() -> tuple[socket.socket, str]:
    """Listen to ranks of this host; return the socket and its address for them."""
    # A name outside the file system: nothing is left behind, however this process ends.
    name = f"hvdlite-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    return _listening(listener), f"unix:@{name}"


def listen_to_hosts(remote: Sequence[str], port: int = 0) -> tuple[socket.socket, str]:
    """Listen to ranks of any host; return the socket and its addresses for them.

    Args:
        remote: names of the other hosts, which decide what network is tried first.
        port: where to listen, 0 for any free port.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", port))
    port = listener.getsockname()[1]
    ours = [one for one in machine.interfaces() if not one.is_loopback]
    best = machine.common_network(remote, ours)
    # The most likely first: each that does not answer costs a rank seconds.
    ours.sort(key=lambda one: (one != best, one.is_virtual))
    addresses = [one.address for one in ours] or ["127.0.0.1"]
    return _listening(listener), ";".join(f"{address}:{port}" for address in addresses)


def _listening(listener: socket.socket) -> socket.socket:
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket) -> Iterator[Peer]:
    """Return those that have connected since the last call."""
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            connection.settimeout(_SEND_SECONDS)
            notice_lost_hosts(connection)
            yield Peer(connection)


@contextlib.contextmanager
def caught_signals() -> Iterator[int]:
    """Make signals bytes to read from the descriptor that is handed out. Main thread only."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    previous = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        yield woken
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(waker)
