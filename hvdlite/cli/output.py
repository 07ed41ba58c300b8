"""What ranks print: prefixed on the terminal, raw in files, and the end of it kept."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO, TextIO

from .rank import ERROR

__all__ = ["Output", "last_words", "speaks_of_others"]

_KEPT_LINES = 400
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\n)")
_IDLE_SECONDS = 0.25
"""After this time a line without an end is shown: it may be a prompt."""
_LONG_LINE = 65536
"""Bytes of a line without an end that are shown at once, rather than collected."""
_SHOWN_LINES = 100
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# What a rank prints before it gives up: the interpreter's, or hvdlite's own word.
_TROUBLE = re.compile(r"Traceback \(most recent call last\)|hvdlite: rank \d+ ended with")


# The end of those that notice the end of others, in the words of MPI libraries and hvdlite.
_OF_OTHERS = re.compile(
    r"Socket closed|Connection reset by peer|MPI_ERR_PROC_FAILED|readv failed|"
    r"Communication error with rank|HvdliteInternalError|error occurred in PMIx Event Notification"
)


class Output:
    """Receives pieces of the ranks' output and shows whole lines of it."""

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        folder: Path | None = None,
        *,
        prefix: bool = True,
        timestamps: bool = False,
    ) -> None:
        """Prepare.

        Args:
            out: where the ranks' standard output goes.
            err: where their standard error goes.
            folder: where to keep a file of each stream of each rank, if anywhere.
            prefix: whether lines begin with their rank.
            timestamps: whether they begin with the time of day.
        """
        self._streams = {False: out, True: err}
        self._folder = folder
        self._prefix = prefix
        self._timestamps = timestamps
        self._partial: dict[tuple[int, bytes], bytes] = {}
        self._touched: dict[tuple[int, bytes], float] = {}
        self._files: dict[tuple[int, bytes], BinaryIO] = {}
        self._open: tuple[int, bytes] | None = None
        """Whose line on the terminal has not been ended."""
        self._tails: dict[int, deque[str]] = {}
        self.trouble: dict[int, float] = {}
        """When each rank last printed what looks like a reason to give up."""

    def feed(self, rank: int, kind: bytes, data: bytes, size: int = 1) -> None:
        """Take a piece of a rank's output.

        Args:
            rank: whose.
            kind: OUTPUT or ERROR.
            data: any bytes.
            size: number of ranks, for the width of numbers in file names.
        """
        if self._folder is not None:
            self._file(rank, kind, size).write(data)
        key = (rank, kind)
        data = self._partial.pop(key, b"") + data
        start = 0
        for found in _LINE_END.finditer(data):
            if found[0] == b"\r" and found.end() == len(data):
                break  # the other half of a line end may come
            self._show(key, data[start : found.start()], found[0])
            start = found.end()
        if len(data) - start > _LONG_LINE:
            self._show(key, data[start:], b"")
        elif start < len(data):
            self._partial[key] = data[start:]
            self._touched[key] = time.monotonic()
        for stream in self._streams.values():
            stream.flush()

    def note(self, text: str) -> None:
        """Show what is no rank's output, on standard error."""
        if self._open is not None:
            self._streams[self._open[1] == ERROR].write("\n")
            self._open = None
        self._streams[True].write(text if text.endswith("\n") else f"{text}\n")
        self._streams[True].flush()

    def idle(self) -> None:
        """Show prompts: beginnings of lines that have not gone on for a while."""
        for key in list(self._partial):
            if time.monotonic() - self._touched[key] > _IDLE_SECONDS:
                self._show(key, self._partial.pop(key), b"")
                self._streams[key[1] == ERROR].flush()

    def close(self) -> None:
        """Show what is left, and close the files."""
        for key in list(self._partial):
            self._show(key, self._partial.pop(key), b"\n")
        if self._open is not None:
            self._streams[self._open[1] == ERROR].write("\n")
            self._open = None
        for file in self._files.values():
            file.close()
        for stream in self._streams.values():
            with contextlib.suppress(ValueError, OSError):
                stream.flush()

    def tail(self, rank: int) -> list[str]:
        """Return the last lines of a rank's standard error."""
        return list(self._tails.get(rank, ()))

    def _show(self, key: tuple[int, bytes], line: bytes, end: bytes) -> None:
        rank, kind = key
        text = line.decode(errors="replace")
        stream = self._streams[kind == ERROR]
        if kind == ERROR and end != b"\r":
            self._tails.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(text)
            if _TROUBLE.match(text):
                self.trouble[rank] = time.monotonic()
        continued = self._open == key
        if self._open is not None and not continued:
            self._streams[self._open[1] == ERROR].write("\n")
        clock = time.strftime("%H:%M:%S ") if self._timestamps else ""
        mark = f"{clock}[{rank}] " if self._prefix else clock
        ending = end.decode().replace("\r\n", "\n")
        stream.write(f"{'' if continued else mark}{text}{ending}")
        self._open = None if end else key

    def _file(self, rank: int, kind: bytes, size: int) -> BinaryIO:
        key = (rank, kind)
        if key not in self._files:
            assert self._folder is not None
            width = len(str(max(size - 1, 0)))
            folder = self._folder / f"rank.{rank:0{width}}"
            folder.mkdir(parents=True, exist_ok=True)
            name = "stderr" if kind == ERROR else "stdout"
            # Whoever follows the file should see lines when they come.
            self._files[key] = folder.joinpath(name).open("wb", buffering=0)
        return self._files[key]


def last_words(lines: list[str]) -> str:
    """Return the last traceback of a rank's standard error, with those it is chained to.

    Without one, its last lines.
    """
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return "\n".join(line for line in lines[-20:] if line.strip())
    start = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : start]):
        start = starts.pop()
    text = lines[start:]
    if len(text) > _SHOWN_LINES:
        middle = f"  ... {len(text) - _SHOWN_LINES} lines left out ..."
        text = [*text[: _SHOWN_LINES // 2], middle, *text[-_SHOWN_LINES // 2 :]]
    return "\n".join(text).rstrip()


def speaks_of_others(lines: list[str]) -> bool:
    """Return whether the last that a rank said is that it has lost others."""
    return bool(_OF_OTHERS.search(last_words(lines)))
