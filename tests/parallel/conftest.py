"""Runs the tests of this folder on 1 to 4 ranks; see README.md."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from .outer import Runner, family_of, limit_of, size_of

HERE = Path(__file__).parent
SIZES = (1, 2, 3, 4)
INNER = bool({"HVDLITE_TEST_INNER", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & set(os.environ))

_runner = pytest.StashKey[Runner]()
_inner = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--np",
        dest="np_sizes",
        action="append",
        type=int,
        help="run distributed tests on so many ranks only (repeatable; or HVDLITE_TEST_NP=2,4)",
    )

    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        parser.addini("timeout", "of pytest-timeout, which ranks do without")


def pytest_configure(config: pytest.Config) -> None:
    for text in (
        "np(*sizes): run on these numbers of ranks instead of 1, 2, 3 and 4",
        "limit(seconds): time that the test may take (default 30)",
        "whole_job: runs outside MPI and starts jobs of its own",
    ):
        config.addinivalue_line("markers", text)
    if INNER:
        config.addinivalue_line("markers", "timeout(seconds): heeded outside only")
        from .inner import Inner

        config.stash[_inner] = Inner()
        config.pluginmanager.register(config.stash[_inner])
    else:
        config.stash[_runner] = Runner()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not INNER:
        config.stash[_runner].close()


# First, so that the order of ids does not depend on how early this file was loaded: the ranks
# load it before pytest's own parametrization of fixtures, a run of all tests after it.
@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("np")
    if marker is None and metafunc.definition.get_closest_marker("whole_job") is not None:
        return
    if "np_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("np_size")
    sizes = SIZES if marker is None else marker.args
    metafunc.parametrize("np_size", sizes, ids=[f"np{size}" for size in sizes])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    others = [item for item in items if not item.path.is_relative_to(HERE)]
    if INNER:
        ours, dropped = config.stash[_inner].select(ours)
        dropped += others
        others = []
    else:
        chosen = _chosen_sizes(config)
        dropped = [item for item in ours if chosen and (size_of(item) or chosen[0]) not in chosen]
        unwanted = set(dropped)
        ours = [item for item in ours if item not in unwanted]
        for item in filter(_runs_inside, ours):
            item.fixturenames = []  # type: ignore[attr-defined]  # they belong to the ranks
        # Jobs start once per family and size; whole-job tests come after them.
        files = list(dict.fromkeys(item.path for item in ours))
        ours.sort(
            key=lambda item: (
                family_of(item),
                not _runs_inside(item),
                (size_of(item) or 0) if _runs_inside(item) else 0,
                files.index(item.path),
            )
        )
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = others + ours


def _chosen_sizes(config: pytest.Config) -> list[int]:
    given = config.getoption("np_sizes", None)
    if given:
        return list(given)
    return [int(size) for size in os.environ.get("HVDLITE_TEST_NP", "").split(",") if size]


def _runs_inside(item: pytest.Item) -> bool:
    return item.get_closest_marker("whole_job") is None


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INNER or not _runs_inside(pyfuncitem):
        return None
    size = size_of(pyfuncitem)
    assert size is not None
    outcome = pyfuncitem.config.stash[_runner].run(pyfuncitem, size, limit_of(pyfuncitem))
    for title, text in outcome.sections:
        pyfuncitem.add_report_section("call", title, text)
    if outcome.kind == "failed":
        pytest.fail(outcome.text, pytrace=False)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    return True


@dataclass(frozen=True)
class World:
    """Who we are, by MPI's word and not by hvdlite's."""

    rank: int
    size: int

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.size)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """An mpi4py communicator of all ranks that hvdlite knows nothing of."""
    return request.config.stash[_inner].tests


@pytest.fixture
def world(comm: Any) -> World:
    """Rank and size of the job."""
    return World(comm.rank, comm.size)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same on all ranks and in every run."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def hvd(comm: Any) -> Iterator[ModuleType]:
    """hvdlite, initialised; once per job, and again after a test that shut it down.

    On an even number of ranks it reduces arrays and gradients where they are, however small
    they are; on an odd one it packs them.
    """
    import hvdlite
    from hvdlite.transport import scattered

    scattered.LEAST_BYTES = scattered.PART_BYTES = 2**62 if comm.size % 2 else 1
    if not hvdlite.is_initialized():
        hvdlite.init()
    yield hvdlite
