"""The side outside MPI: one job per family of files and number of ranks, one report per test.

A family is the files that need the same framework: to start a job and to import torch or
TensorFlow takes longer than most tests. The first test of a (family, np) starts the job with
all tests of that group that were selected; each test then waits for its own outcome, which
every rank writes to a file as it goes. When a job ends early, the tests that it did not reach
get a new one.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .jobs import Job, slower, tail

__all__ = ["Outcome", "Runner", "family_of", "limit_of", "size_of"]

FRAMEWORKS = ("torch", "tf", "keras")

START = 120.0
"""Seconds a job may take to begin its first test, and from one test to the next."""
END = 20.0
"""Seconds a job may take to leave after its last test."""
WHOLE = 1500.0
"""Seconds of a whole job; what it has not reached by then goes to a new one."""
GRACE = 4.0
"""Seconds for the other ranks to finish a test that has failed on one."""


@dataclass
class Outcome:
    """What became of one test on all ranks together."""

    kind: str
    """passed, failed or skipped."""
    text: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)


def _merge(done: dict[int, dict[str, Any]], note: str = "") -> Outcome:
    sections = [
        (f"rank {rank}: {title.removeprefix('Captured ')}", text)
        for rank, event in sorted(done.items())
        for title, text in event["sections"]
    ]
    kinds = {event["outcome"] for event in done.values()}
    texts = [
        f"[rank {rank}]\n{event['text']}"
        for rank, event in sorted(done.items())
        if event["outcome"] == "failed"
    ]
    if texts or note:
        return Outcome("failed", "\n\n".join([*texts, *([note] if note else [])]), sections)
    if kinds == {"skipped"}:
        return Outcome("skipped", next(iter(done.values()))["text"], sections)
    if "skipped" in kinds:
        who = [rank for rank, event in sorted(done.items()) if event["outcome"] == "skipped"]
        return Outcome("failed", f"skipped on ranks {who} but not on the others", sections)
    return Outcome("passed", "", sections)


def _telling(frame: str) -> bool:
    return not any(
        dull in frame for dull in ("/_pytest/", "/pluggy/", "/pytest/__main__", "<frozen")
    )


class _TestJob:
    """One `mpirun python -m pytest <files>` and what its ranks have reported so far."""

    def __init__(self, np: int, items: Sequence[pytest.Item], config: pytest.Config) -> None:
        self.np = np
        self.pending = [item.nodeid for item in items]
        root = Path(config.rootpath)
        arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
        arguments += ["--runxfail", "--rootdir", str(root), "--tb", "short", "--color", "no"]
        if config.inipath is not None:
            arguments += ["-c", str(config.inipath)]
        self._deadline = slower(WHOLE)
        self._job = Job(
            np,
            [*arguments, *dict.fromkeys(str(item.path) for item in items)],
            self._deadline,
            # Plugins that are installed by chance cost every rank seconds.
            {"HVDLITE_TEST_INNER": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            cwd=root,
            files={"selection.json": json.dumps(self.pending)},
        )
        self._read_bytes = [0] * np
        self._started: dict[str, dict[int, float]] = {}
        self._done: dict[str, dict[int, dict[str, Any]]] = {}
        self._last_news = time.monotonic()

    def _read(self) -> None:
        for rank in range(self.np):
            path = self._job.folder / f"rank{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_bytes[rank])
                news = file.read()
            complete = news[: news.rfind(b"\n") + 1]
            self._read_bytes[rank] += len(complete)
            for line in complete.splitlines():
                self._last_news = time.monotonic()
                event = json.loads(line)
                if event["event"] == "start":
                    self._started.setdefault(event["test"], {})[rank] = self._last_news
                else:
                    self._done.setdefault(event["test"], {})[rank] = event

    def outcome(self, nodeid: str, limit: float) -> Outcome | None:
        """Wait for one test; None if the job has ended without having begun it."""
        while True:
            gone = self._job.returncode is not None
            self._read()
            started = self._started.get(nodeid, {})
            done = self._done.get(nodeid, {})
            if len(done) == self.np:
                break
            if gone:
                if not started:
                    return None
                return self._broken(
                    nodeid, f"the job ended in this test with status {self._job.returncode}"
                )
            now = time.monotonic()
            failed = any(event["outcome"] == "failed" for event in done.values())
            if started and now - min(started.values()) > limit:
                return self._stuck(nodeid, f"did not finish within {limit:g} s")
            if failed and now - self._last_news > slower(GRACE):
                return self._stuck(nodeid, "were still in the test that had failed elsewhere")
            if not started and now - self._last_news > slower(START):
                self._job.kill()
                return None
            if now - self._job.started > self._deadline:
                return self._stuck(nodeid, "were in this test when the whole job's time was up")
            time.sleep(0.004)
        self.pending = [other for other in self.pending if other != nodeid]
        outcome = _merge(done)
        if not self.pending and outcome.kind != "failed":
            return self._left(outcome)
        return outcome

    def _broken(self, nodeid: str, why: str) -> Outcome:
        self.pending = [other for other in self.pending if other != nodeid]
        return _merge(self._done.get(nodeid, {}), f"{why}\n{self.output()}")

    def _stuck(self, nodeid: str, why: str) -> Outcome:
        late = [rank for rank in range(self.np) if rank not in self._done.get(nodeid, {})]
        stacks = self._stacks(late)
        self._job.kill()
        self._read()
        return self._broken(nodeid, f"ranks {late} {why}\n{stacks}")

    def _stacks(self, ranks: Sequence[int]) -> str:
        places = [self._job.folder / f"pid{rank}" for rank in ranks]
        only = {int(place.read_text()) for place in places if place.exists()}
        self._job.signal(signal.SIGUSR1, only)
        time.sleep(0.3)
        texts = []
        for rank in ranks:
            path = self._job.folder / f"stacks{rank}"
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()
                texts += [f"[stacks of rank {rank}]", *filter(_telling, lines)]
        return "\n".join(texts)

    def _left(self, outcome: Outcome) -> Outcome:
        """Charge a job that does not leave cleanly to its last test."""
        if not self._job.wait(slower(END)):
            stacks = self._stacks(range(self.np))
            self._job.kill()
            why = f"the job did not leave within {END:g} s after its last test\n{stacks}"
        elif self._job.returncode != 0:
            why = f"the job left with status {self._job.returncode} after its last test"
        else:
            return outcome
        return Outcome("failed", f"{why}\n{self.output()}", outcome.sections)

    def output(self) -> str:
        """Return the end of what the job has written."""
        out, err = self._job.output()
        return f"--- job's stdout\n{tail(out)}\n--- job's stderr\n{tail(err)}"

    def close(self, patience: float = 0.0) -> None:
        """End the job; one that is about to leave by itself gets a moment for it."""
        self._job.wait(patience)
        self._job.close()


class Runner:
    """Hands out outcomes, starting and ending jobs as needed; one job at a time."""

    def __init__(self) -> None:
        self._job: _TestJob | None = None
        self._group: tuple[str, int] | None = None
        self._barren = 0
        self._barren_text = ""

    def run(self, item: pytest.Item, np: int, limit: float) -> Outcome:
        """Return the outcome of one test.

        Args:
            item: the test.
            np: how many ranks it runs on.
            limit: seconds that it may take.
        """
        group = (family_of(item), np)
        if group != self._group:
            self.close()
            self._group, self._barren = group, 0
        if self._barren >= 2:
            return Outcome("failed", f"no job of these files starts\n{self._barren_text}")
        if self._job is not None and item.nodeid in self._job.pending:
            outcome = self._job.outcome(item.nodeid, limit)
            if outcome is not None:
                return self._note(outcome)
        self.close(patience=2.0)
        self._job = _TestJob(np, self._rest(item, np), item.config)
        outcome = self._job.outcome(item.nodeid, limit)
        if outcome is not None:
            self._barren = 0
            return self._note(outcome)
        self._barren += 1
        self._barren_text = self._job.output()
        self.close()
        return Outcome("failed", f"the job ended before this test\n{self._barren_text}")

    def _note(self, outcome: Outcome) -> Outcome:
        if outcome.kind == "failed":
            self.close(patience=2.0)  # its ranks leave after a failure: the engine may be broken
        return outcome

    def _rest(self, item: pytest.Item, np: int) -> list[pytest.Item]:
        """Find the tests from this one on that belong in the same job."""
        items = item.session.items
        return [
            other
            for other in items[items.index(item) :]
            if family_of(other) == family_of(item)
            and other.get_closest_marker("whole_job") is None
            and size_of(other) == np
        ]

    def close(self, patience: float = 0.0) -> None:
        """End the job that is running, if any."""
        if self._job is not None:
            self._job.close(patience)
            self._job = None


def family_of(item: pytest.Item) -> str:
    """Return what the tests of one job have in common: the framework in the file's name."""
    framework = item.path.stem.split("_")[1]
    return framework if framework in FRAMEWORKS else ""


def size_of(item: pytest.Item) -> int | None:
    """Return the number of ranks that a test was parametrised with."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("np_size")


def limit_of(item: pytest.Item) -> float:
    """Return the seconds that a test may take."""
    marker = item.get_closest_marker("limit")
    return slower(30.0 if marker is None else marker.args[0])
