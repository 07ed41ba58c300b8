"""Tables in the terminal: by rich where it is installed, plainly elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Table", "human", "print_tables", "rich_table"]

_WIDTH = 140
"""Of what goes to a file or a pipe, where nobody says how wide it may be."""


@dataclass
class Table:
    """A table; the first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]
    note: str = ""


def human(nbytes: float) -> str:
    """Return a number of bytes for people to read."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def rich_table(table: Table) -> Any:
    """Return a table of rich's. Raises ImportError where that is not installed."""
    import rich.box
    import rich.table
    import rich.text

    shown = rich.table.Table(
        title=table.title,
        caption=table.note or None,
        title_justify="left",
        caption_justify="left",
        box=rich.box.SIMPLE_HEAD,
    )
    shown.add_column(table.columns[0], overflow="fold")
    for column in table.columns[1:]:
        shown.add_column(column, justify="right", no_wrap=True)
    for row in table.rows:
        # Text, because names may look like markup.
        shown.add_row(*(rich.text.Text(cell) for cell in row))
    return shown


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables."""
    try:
        import rich.console
    except ImportError:
        for table in tables:
            _print_plainly(table)
        return
    console = rich.console.Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in tables:
        console.print(rich_table(table))


def _print_plainly(table: Table) -> None:
    lines = [list(table.columns), *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    print(f"\n{table.title}")
    for line in lines:
        cells = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    if table.note:
        print(f"({table.note})")
