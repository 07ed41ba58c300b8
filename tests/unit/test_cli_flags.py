"""horovodrun's flags and its configuration file: what each becomes, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

click_testing = pytest.importorskip("click.testing")
yaml = pytest.importorskip("yaml")

from hvdlite.cli import launch  # noqa: E402
from hvdlite.cli.app import cli, run_command  # noqa: E402
from hvdlite.cli.mpi import Launcher  # noqa: E402
from hvdlite.cli.options import FILE_KEYS, REFUSED, SETTINGS  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Open MPI that nobody runs, and no settings from outside."""
    launcher = Launcher("/mpi/bin/mpirun", "Open MPI", "5.0.11")
    monkeypatch.setattr(launch, "pick_launcher", lambda *_: launcher)
    for name in [*os.environ]:
        if name.startswith(("HVDLITE_", "HOROVOD_", "SLURM_")) or name == "OMP_NUM_THREADS":
            monkeypatch.delenv(name)


def call(*words: str, program: Any = None) -> Any:
    return click_testing.CliRunner().invoke(program or run_command, list(words))


def dry(*flags: str) -> dict[str, str]:
    """Return the variables that the flags set."""
    result = call(*flags, "-np", "2", "--dry-run", "python", "t.py")
    assert result.exit_code == 0, result.output
    words = shlex.split(result.output)
    before = words[1 : words.index("/mpi/bin/mpirun")]
    settings = dict(word.split("=", 1) for word in before)
    return {n: v for n, v in settings.items() if n.startswith("HVDLITE_")}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--fusion-threshold-mb", "8"], {"HVDLITE_FUSION_THRESHOLD": "8388608"}),
        (["--fusion-threshold-mb", "0"], {"HVDLITE_FUSION_THRESHOLD": "0"}),
        (["--cycle-time-ms", "2.5"], {"HVDLITE_CYCLE_TIME": "2.5"}),
        (["--cache-capacity", "0"], {"HVDLITE_CACHE_CAPACITY": "0"}),
        (["--no-stall-check"], {"HVDLITE_STALL_CHECK": "0"}),
        (["--stall-check"], {"HVDLITE_STALL_CHECK": "1"}),
        (
            ["--stall-check-warning-time-seconds", "5"],
            {"HVDLITE_STALL_CHECK_TIME_SECONDS": "5"},
        ),
        (
            ["--stall-check-shutdown-time-seconds", "9"],
            {"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "9"},
        ),
        (
            ["--autotune", "--autotune-log-file", "a.csv", "--autotune-warmup-samples", "0"],
            {
                "HVDLITE_AUTOTUNE": "1",
                "HVDLITE_AUTOTUNE_LOG": "a.csv",
                "HVDLITE_AUTOTUNE_WARMUP_SAMPLES": "0",
            },
        ),
        (
            ["--no-autotune", "--autotune-steps-per-sample", "5"],
            {"HVDLITE_AUTOTUNE": "0", "HVDLITE_AUTOTUNE_STEPS_PER_SAMPLE": "5"},
        ),
        (
            [
                *("--autotune-bayes-opt-max-samples", "9"),
                *("--autotune-gaussian-process-noise", "0.25"),
            ],
            {
                "HVDLITE_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "9",
                "HVDLITE_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.25",
            },
        ),
        (["--thread-affinity", "0,1"], {"HVDLITE_THREAD_AFFINITY": "0,1"}),
        (["--log-level", "DEBUG"], {"HVDLITE_LOG_LEVEL": "DEBUG"}),
        (["--log-without-timestamp"], {"HVDLITE_LOG_HIDE_TIME": "1"}),
        (["--log-with-timestamp"], {"HVDLITE_LOG_HIDE_TIME": "0"}),
        (["--log-hide-timestamp"], {"HVDLITE_LOG_HIDE_TIME": "1"}),
        (["--no-log-hide-timestamp"], {"HVDLITE_LOG_HIDE_TIME": "0"}),
        (["-x", "HVDLITE_LOG_LEVEL=info"], {"HVDLITE_LOG_LEVEL": "info"}),
        (["--mpi", "--no-hierarchical-allreduce", "--no-mpi-threads-disable"], {}),
    ],
)
def test_a_flag_becomes_its_setting(flags: list[str], expected: dict[str, str]) -> None:
    assert dry(*flags) == expected


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_what_means_nothing_is_refused_with_a_reason(flag: str) -> None:
    count = {"flag": 0, "value": 1, "pair": 2}[REFUSED[flag][0]]
    result = call(flag, *["1"] * count, "-np", "2", "--dry-run", "python", "t.py")
    assert result.exit_code == 2
    assert f"{flag} is refused: {REFUSED[flag][1]}" in " ".join(result.output.split())


def test_values_that_the_ranks_would_refuse_are_refused_before_they_start() -> None:
    for flags in (["--log-level", "loud"], ["--cycle-time-ms", "-1"], ["-x", "HVDLITE_TYPO=1"]):
        result = call(*flags, "-np", "2", "--dry-run", "python", "t.py")
        assert result.exit_code == 2, flags
        assert "hvdlite run:" in result.output


def test_the_scripts_own_arguments_are_left_alone() -> None:
    result = call("-np", "2", "--dry-run", "python", "t.py", "-np", "7", "--verbose", "--", "-x")
    assert shlex.split(result.output)[-7:] == [
        sys.executable, "t.py", "-np", "7", "--verbose", "--", "-x",
    ]  # fmt: skip


def test_hosts_give_the_number_of_ranks() -> None:
    result = call("-H", "localhost:3", "--dry-run", "python", "t.py")
    assert "-np 3 -H localhost:3" in result.output
    result = call("--dry-run", "python", "t.py")
    assert result.exit_code == 2
    assert "-np 4" in result.output


def test_hosts_are_named_once(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    result = call("-hostfile", str(hostfile), "--dry-run", "python", "t.py")
    assert "-H localhost:2" in result.output
    result = call("-H", "a", "--hostfile", str(hostfile), "--dry-run", "python", "t.py")
    assert "--hosts and --hostfile both" in result.output


def test_slurm_gives_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "6")
    result = call("--dry-run", "python", "t.py")
    assert "-np 6" in result.output
    assert "-H" not in result.output  # Slurm's allocation, not this machine


def test_no_command_is_an_error() -> None:
    assert call("-np", "2").exit_code == 2


# -- configuration file -----------------------------------------------------------------------


def config(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def test_the_file_sets_what_the_command_line_does_not(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        {
            "controller": "mpi",
            "params": {"fusion_threshold_mb": 2, "cycle_time_ms": 3.5, "torus_allreduce": False},
            "stall_check": {"enabled": False, "warning_time_seconds": 7},
            "library_options": {"thread_affinity": [0, 1], "mpi_threads_disable": False},
            "logging": {"level": "INFO", "with_timestamp": False},
            "autotune": {"enabled": False},
        },
    )
    expected = {
        "HVDLITE_FUSION_THRESHOLD": "2097152",
        "HVDLITE_CYCLE_TIME": "3.5",
        "HVDLITE_STALL_CHECK": "0",
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "7",
        "HVDLITE_THREAD_AFFINITY": "0,1",
        "HVDLITE_LOG_LEVEL": "INFO",
        "HVDLITE_LOG_HIDE_TIME": "1",
        "HVDLITE_AUTOTUNE": "0",
    }
    assert dry("--config-file", path) == expected
    # The command line wins, wherever it stands.
    won = expected | {"HVDLITE_CYCLE_TIME": "9", "HVDLITE_STALL_CHECK": "1"}
    assert dry("--cycle-time-ms", "9", "--config-file", path, "--stall-check") == won


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"parms": {}}, "did you mean 'params'"),
        ({"params": {"cycle_time": 1}}, "did you mean 'cycle_time_ms'"),
        ({"controller": "gloo"}, "MPI only"),
        ({"library_options": {"num_nccl_streams": 2}}, "no NCCL"),
        ({"params": {"cycle_time_ms": "soon"}}, "cycle-time-ms"),
        ("- a\n- b\n", "sections"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: Any, complaint: str) -> None:
    result = call(
        "-np", "2", "--dry-run", "--config-file", config(tmp_path, content), "python", "t.py"
    )
    assert result.exit_code == 2
    assert complaint in result.output


def test_every_key_of_the_file_is_a_parameter() -> None:
    known = {setting.name for setting in SETTINGS} | {"hierarchical_allreduce"}
    refused = {flag[2:].replace("-", "_") for flag in REFUSED}
    for section, keys in FILE_KEYS.items():
        assert not set(keys.values()) - known - refused, section


# -- the package --------------------------------------------------------------------------


def test_version_and_help() -> None:
    import hvdlite

    assert call("--version", program=cli).output == f"hvdlite {hvdlite.__version__}\n"
    text = call("run", "--help", program=cli).output
    assert "--fusion-threshold-mb" in text
    assert "--gloo" not in text


def test_importing_hvdlite_needs_nothing_of_the_extra() -> None:
    code = """
import sys, json, hvdlite
print(json.dumps(sorted({"click", "rich", "yaml", "cloudpickle"} & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == []


def test_without_click_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['click'] = None; from hvdlite.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "pip install 'hvdlite[cli]'" in done.stderr
