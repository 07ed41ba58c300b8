"""horovodrun's flags: what each becomes here, or why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .problems import LaunchProblem

__all__ = ["FILE_KEYS", "REFUSED", "SETTINGS", "Setting", "settings_of"]


@dataclass(frozen=True)
class Setting:
    """A flag that becomes a variable of the ranks."""

    flags: tuple[str, ...]
    """As click wants them; `a/b` are the two sides of a switch."""
    variable: str
    kind: str
    """`switch`, `integer`, `number` or `text`."""
    doc: str
    factor: int = 1
    """Of the flag's unit, in the variable's."""
    inverted: bool = False
    """Whether the variable of a switch says the opposite."""

    @property
    def name(self) -> str:
        """The name of click's parameter: that of the first flag."""
        return self.flags[0].partition("/")[0].lstrip("-").replace("-", "_")


SETTINGS = (
    Setting(
        ("--fusion-threshold-mb",),
        "FUSION_THRESHOLD",
        "integer",
        "Fuse tensors into buffers of up to so many MiB; 0: do not fuse.",
        factor=2**20,
    ),
    Setting(("--cycle-time-ms",), "CYCLE_TIME", "number", "First pause of an idle engine."),
    Setting(("--cache-capacity",), "CACHE_CAPACITY", "integer", "Requests that are remembered."),
    Setting(
        ("--timeline-filename",), "TIMELINE", "text", "Write a Chrome trace of all ranks there."
    ),
    Setting(
        ("--timeline-mark-cycles/--no-timeline-mark-cycles",),
        "TIMELINE_MARK_CYCLES",
        "switch",
        "Mark the engine's rounds in it.",
    ),
    Setting(("--autotune/--no-autotune",), "AUTOTUNE", "switch", "Tune settings while training."),
    Setting(("--autotune-log-file",), "AUTOTUNE_LOG", "text", "Where to log what was tried."),
    Setting(
        ("--autotune-warmup-samples",), "AUTOTUNE_WARMUP_SAMPLES", "integer", "Discarded first."
    ),
    Setting(
        ("--autotune-steps-per-sample",), "AUTOTUNE_STEPS_PER_SAMPLE", "integer", "For each try."
    ),
    Setting(
        ("--autotune-bayes-opt-max-samples",),
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "integer",
        "Most tries.",
    ),
    Setting(
        ("--autotune-gaussian-process-noise",),
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "number",
        "Regularization, 0 to 1.",
    ),
    Setting(
        ("--stall-check/--no-stall-check",),
        "STALL_CHECK",
        "switch",
        "Watch for tensors that some ranks never submit.",
    ),
    Setting(
        ("--stall-check-warning-time-seconds",),
        "STALL_CHECK_TIME_SECONDS",
        "number",
        "Warn of a tensor that waits so long.",
    ),
    Setting(
        ("--stall-check-shutdown-time-seconds",),
        "STALL_SHUTDOWN_TIME_SECONDS",
        "number",
        "Give the job up when a tensor waits so long; 0: never.",
    ),
    Setting(("--thread-affinity",), "THREAD_AFFINITY", "text", "Cores of background threads: 0,1."),
    Setting(("--log-level",), "LOG_LEVEL", "text", "trace, debug, info, warning, error or fatal."),
    Setting(
        (
            "--log-with-timestamp/--log-without-timestamp",
            "--no-log-hide-timestamp/--log-hide-timestamp",
        ),
        "LOG_HIDE_TIME",
        "switch",
        "Whether log lines have the time of day.",
        inverted=True,
    ),
)
"""Flags that become settings, in the order in which the help shows them."""

_NO_GLOO = "hvdlite has no Gloo: MPI carries everything"
_NO_GPU = "hvdlite reduces in host memory and uses no NCCL"
_ELASTIC = "elastic training is not there yet"

REFUSED: Mapping[str, tuple[str, str]] = {
    "--gloo": ("flag", f"{_NO_GLOO}. Leave the flag away."),
    "--gloo-timeout-seconds": (
        "value",
        f"{_NO_GLOO}; --start-timeout and --stall-check-shutdown-time-seconds limit waiting.",
    ),
    "--jsrun": ("flag", "LSF's jsrun is not supported; in its allocations use mpirun with -H."),
    "--num-nccl-streams": ("value", f"{_NO_GPU}."),
    "--torus-allreduce": ("flag", f"{_NO_GPU}; the torus algorithm was for GPUs."),
    "--hierarchical-allgather": (
        "flag",
        "allgather has one algorithm here; hosts are told apart by themselves where it pays.",
    ),
    "--mpi-threads-disable": (
        "flag",
        "hvdlite's background thread needs MPI with threads, and checks that it has it.",
    ),
    "--disable-cache": (
        "flag",
        "there are no cached checks of hosts to disable; for the response cache, "
        "--cache-capacity 0.",
    ),
    "--min-np": ("value", f"{_ELASTIC}: a job has -np ranks from start to end."),
    "--min-num-proc": ("value", f"{_ELASTIC}: a job has -np ranks from start to end."),
    "--max-np": ("value", f"{_ELASTIC}: a job has -np ranks from start to end."),
    "--max-num-proc": ("value", f"{_ELASTIC}: a job has -np ranks from start to end."),
    "--elastic-timeout": ("value", f"{_ELASTIC}."),
    "--reset-limit": ("value", f"{_ELASTIC}."),
    "--blacklist-cooldown-range": ("pair", f"{_ELASTIC}."),
}
"""Flags that mean nothing here: how many words they take, and why they are refused."""

WITHOUT_EFFECT = (
    "--mpi",
    "--no-hierarchical-allreduce",
    "--no-hierarchical-allgather",
    "--no-torus-allreduce",
    "--no-mpi-threads-disable",
)
"""Flags that ask for what is the case anyway."""

FILE_KEYS: Mapping[str, Mapping[str, str]] = {
    "params": {
        "fusion_threshold_mb": "fusion_threshold_mb",
        "cycle_time_ms": "cycle_time_ms",
        "cache_capacity": "cache_capacity",
        "hierarchical_allreduce": "hierarchical_allreduce",
        "hierarchical_allgather": "hierarchical_allgather",
        "torus_allreduce": "torus_allreduce",
    },
    "autotune": {
        "enabled": "autotune",
        "log_file": "autotune_log_file",
        "warmup_samples": "autotune_warmup_samples",
        "steps_per_sample": "autotune_steps_per_sample",
        "bayes_opt_max_samples": "autotune_bayes_opt_max_samples",
        "gaussian_process_noise": "autotune_gaussian_process_noise",
    },
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {
        "mpi_threads_disable": "mpi_threads_disable",
        "num_nccl_streams": "num_nccl_streams",
        "thread_affinity": "thread_affinity",
        "gloo_timeout_seconds": "gloo_timeout_seconds",
    },
    "logging": {"level": "log_level", "with_timestamp": "log_with_timestamp"},
}
"""horovodrun's configuration file: the parameter that each key of each section sets."""


def settings_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a command line asks for.

    Args:
        given: values by parameter; None where the user gave none.

    Raises:
        LaunchProblem: a value is out of range.
    """
    variables = {}
    for setting in SETTINGS:
        value = given.get(setting.name)
        if value is None:
            continue
        flag = setting.flags[0].partition("/")[0]
        if not isinstance(value, (bool, str)) and value < 0:
            raise LaunchProblem(f"{flag} is {value:g}, but it must be 0 or more.")
        variable = f"HVDLITE_{setting.variable}"
        if isinstance(value, bool):
            text = str(int(value != setting.inverted))
        elif isinstance(value, str):
            text = value
        else:
            text = f"{value * setting.factor:.15g}"
        variables[variable] = text
    if given.get("hierarchical_allreduce"):
        variables["HVDLITE_TRANSPORT"] = "hierarchical"
    return variables
