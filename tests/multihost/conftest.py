"""Starts jobs on several hosts with mpirun's own command line; see README.md."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..parallel.jobs import Job, JobResult, is_open_mpi, mpirun, run_job
from .cluster import Cluster, why_not

_why_not = functools.cache(why_not)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three hosts."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(f"no hosts can be made of namespaces: {reason}")
    with Cluster(3) as made:
        yield made


@pytest.fixture
def launch(cluster: Cluster) -> Callable[..., JobResult]:
    """Run a script by `mpirun -np N -H HOSTS` on host1."""

    def run(
        np: int,
        hosts: str,
        script: str,
        timeout: float = 20,
        env: dict[str, str | None] | None = None,
        meanwhile: Callable[[Job], object] | None = None,
    ) -> JobResult:
        environment: dict[str, Any] = {
            **cluster.environment(),
            # Of scripts/common.sh: with it, the first host would get all ranks.
            "PRTE_MCA_rmaps_default_mapping_policy": None,
            # A folder of this machine's /dev/shm, which the hosts do not have.
            "OMPI_MCA_btl_sm_backing_directory": None,
            **(env or {}),
        }
        launcher = mpirun()
        # MPICH spells it otherwise.
        option = "-H" if is_open_mpi(launcher[0]) else "-hosts"
        command = [*cluster.enter("host1"), *launcher, "-np", str(np), option, hosts]
        return run_job(np, script, timeout, environment, launcher=command, meanwhile=meanwhile)

    return run
