"""The command line: `hvdlite run`, `hvdlite doctor`; `hvdliterun` for horovodrun's users.

What it needs beyond hvdlite itself (click, rich, PyYAML) comes with the extra `cli` and is
imported by the commands only.
"""

from __future__ import annotations

import sys

__all__ = ["main", "main_run"]


def main() -> None:
    """Run the command `hvdlite`."""
    _need_click()
    from .app import cli

    cli(prog_name="hvdlite")


def main_run() -> None:
    """Run the command `hvdliterun`, which is `hvdlite run`."""
    _need_click()
    from .app import run_command

    run_command(prog_name="hvdliterun")


def _need_click() -> None:
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        sys.exit(f"hvdlite's command line needs {error.name}: pip install 'hvdlite[cli]'")
