"""Hosts and slots: the command line's, hostfiles', discovery scripts', Slurm's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.cli.hosts import (
    Host,
    discover_hosts,
    is_this_host,
    parse_hosts,
    place,
    read_hostfile,
    slurm_tasks,
)
from hvdlite.cli.problems import LaunchProblem


def test_slots_default_to_one_and_names_may_be_addresses() -> None:
    assert parse_hosts("a,b:2,10.0.0.7:3,[fe80::1]:4") == [
        Host("a", 1),
        Host("b", 2),
        Host("10.0.0.7", 3),
        Host("fe80::1", 4),
    ]
    assert parse_hosts("a,b:2", default=5) == [Host("a", 5), Host("b", 2)]


def test_a_host_named_twice_has_the_slots_of_both() -> None:
    assert parse_hosts("a:1,b:1,a:2") == [Host("a", 3), Host("b", 1)]


@pytest.mark.parametrize("text", ["", "a,,b", "a:", "a:0", "a:x", "a:-1", "a:1:2", "-x:2", "a b:1"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(LaunchProblem, match="--hosts"):
        parse_hosts(text)


def test_hostfiles_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nhost1 slots=2 max_slots=4\n\nhost2:3\nhost3 # one\n")
    assert read_hostfile(path) == [Host("host1", 2), Host("host2", 3), Host("host3", 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "names no host"), ("a slots=x\n", "line 1.*'x'"), ("b\na cores=3\n", "line 2.*cores=3")],
)
def test_bad_hostfiles_are_refused_with_the_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchProblem, match=complaint):
        read_hostfile(path)


def test_a_missing_hostfile_is_named() -> None:
    with pytest.raises(LaunchProblem, match="/nowhere/hosts"):
        read_hostfile("/nowhere/hosts")


def test_a_discovery_script_prints_hosts_or_its_failure_is_told(tmp_path: Path) -> None:
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho host1:2\necho host2\n")
    script.chmod(0o755)
    assert discover_hosts(str(script), default=4) == [Host("host1", 2), Host("host2", 4)]
    script.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(LaunchProblem, match="status 3: broken"):
        discover_hosts(str(script))


def test_ranks_fill_hosts_in_order() -> None:
    hosts = [Host("a", 2), Host("b", 2), Host("c", 2)]
    assert place(hosts, 3) == [Host("a", 2), Host("b", 1)]
    assert place(hosts, 6) == hosts


def test_too_few_slots_are_told_with_what_to_write() -> None:
    with pytest.raises(LaunchProblem, match=r"4 ranks do not fit.*2 slots.*-H a:2"):
        place([Host("a"), Host("b")], 4)


def test_this_host_is_known_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "me.lab")
    assert [name for name in ("localhost", "127.0.0.1", "me", "me.lab") if is_this_host(name)] == [
        "localhost",
        "127.0.0.1",
        "me",
        "me.lab",
    ]
    assert not is_this_host("you")
    assert not is_this_host("10.1.2.3")


def test_slurm_tells_how_many_tasks_only_in_an_allocation() -> None:
    assert slurm_tasks({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) == 8
    assert slurm_tasks({"SLURM_NTASKS": "8"}) is None
    assert slurm_tasks({"SLURM_JOB_ID": "1"}) is None
