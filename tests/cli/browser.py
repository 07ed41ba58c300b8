"""A Chromium to look at pages with: its own protocol through a pipe, so nothing else is needed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Page", "find_browser"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")


def find_browser() -> str | None:
    """Return the path of an installed browser."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of one browser.

    Args:
        browser: the program.
        profile: an empty folder for it.
        seconds: how long an answer may take.

    Attributes:
        complaints: what the page, or the browser about it, wrote to the console.
        requests: addresses that were loaded.
    """

    def __init__(self, browser: str, profile: Path, seconds: float = 60) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._seconds = seconds
        self._loaded = False
        self._numbers = itertools.count(1)
        self._received = b""
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # The browser expects 3 and 4. Out of the way first, lest one falls upon the other.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]

        def place() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._process = subprocess.Popen(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            pass_fds=(3, 4),
            start_new_session=True,
        )
        for end in (to_browser, from_browser, *theirs):
            os.close(end)
        self._session: str | None = None
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def close(self) -> None:
        """End the browser, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, address: str) -> None:
        """Load a page and wait until all of it is there."""
        self._loaded = False
        self.requests.clear()
        failure = self.do("Page.navigate", url=address).get("errorText")
        assert not failure, failure
        while not self._loaded:
            self._note(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def do(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer)

    def _receive(self) -> Any:
        end = time.monotonic() + self._seconds
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(0, end - time.monotonic()))
            assert ready, f"the browser has said nothing for {self._seconds:g} s"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._received += data
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(details["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(details["entry"]["text"])
