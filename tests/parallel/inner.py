"""The side inside MPI: every rank runs the same tests in step and reports each as it goes.

Works without the outer side too: `mpirun -np 2 python -m pytest tests/parallel/test_x.py`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from .jobs import FOLDER
from .outer import limit_of, size_of

__all__ = ["Inner"]


class Inner:
    """A pytest plugin that keeps the ranks in step.

    Attributes:
        world: a communicator of the harness's own.
        tests: one for tests that want to talk to each other without hvdlite.
    """

    def __init__(self) -> None:
        self.world: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        self.tests: MPI.Intracomm = MPI.COMM_WORLD.Dup()
        folder = os.environ.get(FOLDER)
        self._folder = None if folder is None else Path(folder)
        self._stacks: Any = sys.__stderr__
        self._reports: list[pytest.TestReport] = []
        if self._folder is not None:
            rank = self.world.rank
            self._folder.joinpath(f"pid{rank}").write_text(str(os.getpid()))
            self._stacks = self._folder.joinpath(f"stacks{rank}").open("w")
            faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)

    def select(self, items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Split the collected tests into those that run here, in order, and the rest."""
        mine = [
            item
            for item in items
            if size_of(item) == self.world.size and item.get_closest_marker("whole_job") is None
        ]
        if self._folder is not None:
            wanted = json.loads(self._folder.joinpath("selection.json").read_text())
            by_id = {item.nodeid: item for item in mine}
            mine = [by_id[nodeid] for nodeid in wanted]
        kept = set(mine)
        return mine, [item for item in items if item not in kept]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to start when the ranks would run different tests."""
        lists = self.world.allgather([item.nodeid for item in session.items])
        if any(other != lists[0] for other in lists):
            raise pytest.UsageError("the ranks collected different tests")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Report a test's beginning and end, and agree with the other ranks how it ended."""
        self._reports.clear()
        self._write({"event": "start", "test": item.nodeid})
        # The outer side is faster; this is for runs by hand, and for when it has been killed.
        patience = 0 if self._folder is None else 20
        faulthandler.dump_traceback_later(limit_of(item) + patience, exit=True, file=self._stacks)
        result = yield
        event = self._judge()
        self._write({"event": "done", "test": item.nodeid, **event})
        failed = self._anywhere(event["outcome"] == "failed")
        faulthandler.cancel_dump_traceback_later()
        if failed:
            self._stop(item.session, event["outcome"] == "failed")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the reports of setup, call and teardown."""
        self._reports.append(report)

    def _judge(self) -> dict[str, Any]:
        last = self._reports[-1]
        sections = [list(section) for section in last.sections]
        for wanted in ("failed", "skipped"):
            for report in self._reports:
                if report.outcome == wanted:
                    text = report.longreprtext
                    if isinstance(report.longrepr, tuple):
                        text = report.longrepr[2]
                    if report.when != "call" and wanted == "failed":
                        text = f"in {report.when}\n{text}"
                    return {"outcome": wanted, "text": text, "sections": sections}
        return {"outcome": "passed", "text": "", "sections": sections}

    def _anywhere(self, mine: bool) -> bool:
        """Tell whether any rank says yes, sleeping rather than spinning while others work."""
        words = bytearray([mine])
        request = self.world.Iallreduce(MPI.IN_PLACE, [words, MPI.BYTE], MPI.BOR)
        pause = 1e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(pause * 2, 2e-3)
        return bool(words[0])

    def _stop(self, session: pytest.Session, here: bool) -> None:
        """Leave after a failure: nobody knows what is still in flight."""
        if self._folder is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        where = "here" if here else "on another rank"
        session.shouldstop = f"a test failed {where}"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Shut hvdlite down; test failures are in the reports, not in the exit status."""
        hvd = sys.modules.get("hvdlite")
        if hvd is not None and hvd.is_initialized() and not session.shouldstop:
            hvd.shutdown()
        if self._folder is not None and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK

    def _write(self, event: dict[str, Any]) -> None:
        if self._folder is not None:
            path = self._folder / f"rank{self.world.rank}.jsonl"
            with path.open("a") as file:
                file.write(json.dumps(event) + "\n")
