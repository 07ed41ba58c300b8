"""Let peers take turns, and keep what they measure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .jobs import JobFailed, launch
from .records import Record, Results, Skipped, Table, shown

__all__ = ["DDP", "Options", "Session", "installed", "library_of", "plain", "rotated"]

DDP = ("ddp", "ddp-huge", "ddp-views")
_ON_TORCH = ("gloo", *DDP)


@dataclass(frozen=True)
class Options:
    """What the user asks for."""

    ranks: tuple[int, ...] = (1, 2, 4)
    turns: int = 3
    quick: bool = False
    modules: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    """The only peers to measure; empty for all."""
    dtypes: tuple[str, ...] = ()
    """The only element types of all-reduces to measure; empty for all."""
    other_mpi: tuple[str, ...] = ()
    """Interpreters whose mpi4py loads another MPI library."""


def installed(module: str) -> bool:
    """Return whether a module can be found, without importing it (its parents are)."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def rotated(items: Sequence[str], by: int) -> list[str]:
    """Return a list that begins somewhere else, so that no peer always follows the same rest."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


@dataclass
class Session:
    """One run of the benchmark: options, and what has come of it so far."""

    options: Options
    results: Results
    pythons: dict[str, str] = field(default_factory=dict)
    """Interpreters of the peers that need another one."""

    def __post_init__(self) -> None:
        for number, python in enumerate(self.options.other_mpi, start=2):
            self.pythons[f"mpi{number}"] = python

    def say(self, text: str) -> None:
        """Print something that stays."""
        print(text, flush=True)

    def skip(self, suite: str, ranks: int | None, peer: str, why: str) -> None:
        """Note, once, that something is not measured."""
        skipped = Skipped(suite, ranks, peer, why)
        if skipped not in self.results.skipped:
            self.results.skipped.append(skipped)
            self.say(str(skipped))

    def show(self, table: Table) -> None:
        """Print a table and keep it."""
        if table.rows:
            self.results.tables.append(table)
            self.say("\n" + table.markdown() + "\n")

    def peers(self, suite: str, wanted: Iterable[str], modules: str = "") -> list[str]:
        """Return the peers that are installed, and say which are not.

        Args:
            suite: who asks.
            wanted: names. "mpi" stands for the other MPI libraries as well.
            modules: what to put before the names of the user's modules; empty for none.
        """
        candidates = [
            name for peer in wanted for name in ([peer, *self.pythons] if peer == "mpi" else [peer])
        ]
        candidates += [modules + name for name in self.options.modules if modules]
        found = []
        for peer in candidates:
            name = shown(peer)
            if self.options.peers and name not in self.options.peers:
                continue
            if name != peer and not installed(name):
                self.skip(suite, None, name, "there is no such module")
            elif (name != peer or peer in _ON_TORCH) and not installed("torch"):
                self.skip(suite, None, name, "torch is not installed")
            else:
                found.append(peer)
        return found

    def measure(
        self,
        suite: str,
        ranks: int,
        tasks: Mapping[str, Mapping[str, Any]],
        *,
        case: str = "",
        unit: str | Mapping[str, str] = "s",
        sizes: Mapping[str, int] | None = None,
        turns: int | None = None,
    ) -> list[Record]:
        """Run one job of every peer in every turn, and keep the samples.

        Args:
            suite: who asks; its module has the `work` that the ranks run.
            ranks: of every job.
            tasks: what to tell the worker, by peer.
            case: which part of the suite.
            unit: of the samples, or that of each by its label.
            sizes: bytes of what is measured, by its label.
            turns: jobs of each peer, if not as many as the options say.

        Returns:
            The new records; without those of peers that failed, which are noted as skipped.
        """
        turns = turns or self.options.turns
        taken: dict[str, dict[str, list[list[float]]]] = {peer: {} for peer in tasks}
        working = list(tasks)
        for turn in range(turns):
            for peer in rotated(working, turn):
                self._progress(f"{suite} {case} np {ranks}: turn {turn + 1} of {turns}, {peer}")
                task = {"suite": suite, "case": case, "peer": peer, **tasks[peer]}
                try:
                    report = launch(ranks, task, python=self.pythons.get(peer, sys.executable))
                except JobFailed as failure:
                    self._progress("")
                    where = f"{peer} ({case})" if case else peer
                    self.skip(suite, ranks, where, str(failure))
                    working.remove(peer)
                    continue
                for what, samples in report.samples.items():
                    taken[peer].setdefault(what, [[] for _ in range(turns)])[turn] = samples
                about = {"suite": suite, "case": case, "ranks": ranks, "peer": peer, "turn": turn}
                self.results.facts.append({**about, **report.facts})
        self._progress("")
        records = [
            Record(
                suite,
                case,
                ranks,
                peer,
                what,
                unit if isinstance(unit, str) else unit[what],
                samples,
                (sizes or {}).get(what),
            )
            for peer in tasks
            for what, samples in taken[peer].items()
        ]
        self.results.records += records
        return records

    def _progress(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text:78}\r", end="", file=sys.stderr, flush=True)

    def save(self, folder: Path) -> None:
        """Write all samples and tables."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.results.as_json())
        folder.joinpath("results.json").write_text(text + "\n")
        parts = [_lines(self.results.about), *(t.markdown() for t in self.results.tables)]
        parts += ["\n".join(f"- {skipped}" for skipped in self.results.skipped)]
        folder.joinpath("tables.md").write_text("\n\n".join(filter(None, parts)) + "\n")


def _lines(about: Mapping[str, Any]) -> str:
    """Write facts as lines of text."""
    return "\n".join(f"{key}: {plain(value)}  " for key, value in about.items())


def plain(value: Any) -> str:
    """Write a value, whatever it consists of, in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(plain(item) for item in value)
    return str(value)


def library_of(python: str) -> str:
    """Return the name of the MPI library that an interpreter's mpi4py loads."""
    code = "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0])"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    name = " ".join(done.stdout.strip("\0\n ").split(",")[0].split())
    return name if done.returncode == 0 else "none"
