"""What is measured and shown: records of samples, tables, and the file that keeps them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .arithmetic import pooled

__all__ = ["Record", "Results", "Skipped", "Table", "shown"]


@dataclass
class Record:
    """All samples of one thing on one peer."""

    suite: str
    case: str
    """Which part of the suite: the element type, the model; empty where there is one only."""
    ranks: int
    peer: str
    what: str
    """The row of the table, as it is printed."""
    unit: str
    """Of the samples: s, B/s, B, or 1 for a ratio."""
    turns: list[list[float]]
    """One list for each turn; empty where the job failed."""
    nbytes: int | None = None
    """Size of each rank's array, where there is one."""


@dataclass
class Skipped:
    """What could not be measured, and why."""

    suite: str
    ranks: int | None
    peer: str
    why: str

    def __str__(self) -> str:
        where = "" if self.ranks is None else f", np {self.ranks}"
        return f"skipped: {self.suite}{where}, {self.peer}: {self.why}"


@dataclass
class Table:
    """Rows of text under a title."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return the table as Markdown that also reads well as text."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        written = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
        rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
        return "\n".join([f"### {self.title}", "", written[0], rule, *written[1:]])


@dataclass
class Results:
    """Everything that one run of the benchmark found out."""

    about: dict[str, Any]
    """The machine, versions, options, load."""
    records: list[Record] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    """What jobs said besides samples, such as the name of the MPI library."""

    def select(self, suite: str, case: str | None = None, ranks: int | None = None) -> list[Record]:
        """Return the records of a suite, of one case and number of ranks if given."""
        return [
            record
            for record in self.records
            if record.suite == suite
            and case in (None, record.case)
            and ranks in (None, record.ranks)
        ]

    def limits(self, ranks: int) -> dict[int, float]:
        """Return what the memory gives to each of so many ranks at once, by array size.

        Bytes read and written per second and rank: the better of copying and adding. Empty
        where that was not measured.
        """
        found: dict[int, float] = {}
        for record in self.select("limits", ranks=ranks):
            if record.nbytes is not None and any(record.turns):
                middle = pooled(record.turns).median
                found[record.nbytes] = max(middle, found.get(record.nbytes, 0.0))
        return found

    def as_json(self) -> dict[str, Any]:
        """Return what is saved."""
        return dataclasses.asdict(self)


def shown(peer: str) -> str:
    """Return a peer's name as tables show it."""
    return peer.removeprefix("module:")
