"""Run a script written for Horovod: `mpirun -np 4 python -m hvdlite.horovod train.py ...`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from .horovod_alias import install_horovod_alias

__all__ = ["main"]

_USAGE = """\
usage: python -m hvdlite.horovod [--force] script.py [arguments ...]
       python -m hvdlite.horovod [--force] -m module [arguments ...]

Runs a script as python does, with `import horovod` finding hvdlite.

  --force  also where Horovod itself is installed
"""


def main(arguments: Sequence[str]) -> None:
    """Run a script or module under the alias.

    Args:
        arguments: as after `python -m hvdlite.horovod`.
    """
    rest = list(arguments)
    force = rest[:1] == ["--force"]
    if force:
        rest.pop(0)
    is_module = rest[:1] == ["-m"]
    if is_module:
        rest.pop(0)
    if not rest or rest[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if rest else sys.stderr)
        sys.exit(0 if rest else 2)
    if rest[0].startswith("-"):
        sys.exit(f"{_USAGE}\npython -m hvdlite.horovod: unknown option {rest[0]}")
    try:
        install_horovod_alias(force)
    except ImportError as error:
        sys.exit(f"python -m hvdlite.horovod: {error}")
    if is_module:
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(rest[0]):
        sys.exit(f"python -m hvdlite.horovod: there is no script {rest[0]!r}")
    sys.argv[:] = rest
    # As python does: the script's folder in place of the current one.
    sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
    runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
