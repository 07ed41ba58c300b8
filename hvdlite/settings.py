"""Every knob, declared once: its name, type, default, meaning and environment variables.

A knob `X` is set by `HVDLITE_X`, and by `HOROVOD_X` where Horovod has the same knob. The first
wins; a warning says so when both are set and differ. An empty value counts as unset. What is
malformed is refused rather than guessed at, and so is an unknown `HVDLITE_` variable: a typo
in a knob must not quietly leave the default in force.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .exceptions import SettingsError
from .knobs import (
    BOOL,
    CORES,
    FILE,
    FRACTION,
    NAME,
    OURS,
    PORT,
    THEIRS,
    Knob,
    choice,
    duration,
    integer,
    knob,
    show_bytes,
)

__all__ = ["Settings", "TransportName", "settings_table"]

TransportName = Literal["auto", "ring", "mpi", "shared_memory", "hierarchical"]


@dataclass(frozen=True)
class Settings:
    """The knobs of one process. Ranks of a job should agree on them."""

    fusion_threshold: int = knob(
        4 * 2**20,
        integer("bytes", show=show_bytes),
        "FUSION_THRESHOLD",
        "Tensors are fused into one buffer up to this many bytes; 0 turns fusion off.",
    )
    cycle_time: float = knob(
        1.0,
        duration("milliseconds", zero=True),
        "CYCLE_TIME",
        "Milliseconds of the first pause after a round that finds nothing ready; it grows to 5.",
    )
    cache_capacity: int = knob(
        1024,
        integer("requests"),
        "CACHE_CAPACITY",
        "Requests that the ranks remember and announce by one bit; 0 turns the cache off.",
    )
    stall_check: bool = knob(
        True,
        BOOL,
        "STALL_CHECK",
        "Watch for tensors that some ranks never submit.",
        inverse="STALL_CHECK_DISABLE",
    )
    stall_warning_time: float = knob(
        60.0,
        duration("seconds", zero=False),
        "STALL_CHECK_TIME_SECONDS",
        "Seconds that a tensor waits for other ranks before a warning names them.",
    )
    stall_shutdown_time: float = knob(
        0.0,
        duration("seconds", zero=True),
        "STALL_SHUTDOWN_TIME_SECONDS",
        "Seconds that a tensor waits before the job is given up; 0: for ever.",
    )
    hostname: str | None = knob(
        None,
        NAME,
        "HOSTNAME",
        "Name of this host, in place of the system's: ranks of equal names share a host.",
    )
    thread_affinity: tuple[int, ...] | None = knob(
        None,
        CORES,
        "THREAD_AFFINITY",
        "Cores of the background threads, one for each local rank: `0,1`.",
    )
    dynamic_process_sets: bool = knob(
        True,
        BOOL,
        "DYNAMIC_PROCESS_SETS",
        "Accepted for compatibility: process sets can always be added and removed.",
    )
    timeline: str | None = knob(
        None,
        FILE,
        "TIMELINE",
        "File for the timeline of the whole job; DYNAMIC leaves it to `start_timeline`.",
    )
    timeline_mark_cycles: bool = knob(
        False, BOOL, "TIMELINE_MARK_CYCLES", "Show negotiation rounds in the timeline."
    )
    log_level: str = knob(
        "warning",
        choice("trace", "debug", "info", "warning", "error", "fatal"),
        "LOG_LEVEL",
        "Least severe messages shown: trace, debug, info, warning, error or fatal.",
    )
    log_hide_time: bool = knob(False, BOOL, "LOG_HIDE_TIME", "Log without the time of day.")
    # Ruff does not see that a Literal is immutable.
    transport: TransportName = knob(  # noqa: RUF009
        "auto",
        choice(*get_args(TransportName)),
        "TRANSPORT",
        "How data moves: auto, ring, mpi, shared_memory or hierarchical.",
        horovod=False,
    )
    bucket_bytes: int = knob(
        4 * 2**20,
        integer("bytes", minimum=1, show=show_bytes),
        "BUCKET_BYTES",
        "Gradients travel in buckets of about this many bytes, unless bucket_bytes= is given.",
        horovod=False,
    )
    segment_bytes: int = knob(
        256 * 2**10,
        # A segment must hold one element of the widest type.
        integer("bytes", minimum=16, show=show_bytes),
        "SEGMENT_BYTES",
        "Bytes of the pieces in which a ring sends and sums at the same time.",
        horovod=False,
    )
    small_bytes: int = knob(
        16 * 2**10,
        integer("bytes", show=show_bytes),
        "SMALL_BYTES",
        "Bytes below which MPI's own collectives are used (not for allreduce in shared memory).",
        horovod=False,
    )
    peer_memory: bool = knob(
        True,
        BOOL,
        "PEER_MEMORY",
        "Ranks of a host read and write each other's memory, where the system permits that.",
        horovod=False,
    )
    huge_pages: bool = knob(
        True,
        BOOL,
        "HUGE_PAGES",
        "Have PyTorch, and in `hvdlite run` everything, ask the system for pages of 2 MiB.",
        horovod=False,
    )
    autotune: bool = knob(
        False,
        BOOL,
        "AUTOTUNE",
        "Find fusion threshold, cycle time, cache and transport while training; those set are "
        "where it begins.",
    )
    autotune_log: str | None = knob(
        None, FILE, "AUTOTUNE_LOG", "CSV file for what autotune has tried and measured."
    )
    autotune_warmup_samples: int = knob(
        3, integer("samples"), "AUTOTUNE_WARMUP_SAMPLES", "Samples that are discarded first."
    )
    autotune_steps_per_sample: int = knob(
        10, integer("steps", minimum=1), "AUTOTUNE_STEPS_PER_SAMPLE", "Steps of each sample."
    )
    autotune_bayes_opt_max_samples: int = knob(
        20,
        integer("samples", minimum=1),
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        "Samples after which the best values stay.",
    )
    autotune_gaussian_process_noise: float = knob(
        0.8,
        FRACTION,
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "How much the scores of samples are to be distrusted, from 0 to 1.",
    )
    metrics_port: int = knob(
        0,
        PORT,
        "METRICS_PORT",
        "Serve live metrics to Prometheus on this port plus the local rank; 0: don't.",
        horovod=False,
    )
    metrics_host: str = knob(
        "127.0.0.1",
        NAME,
        "METRICS_HOST",
        "Address on which metrics are served; 0.0.0.0 lets other machines read them.",
        horovod=False,
    )
    abort_on_exception: bool = knob(
        True,
        BOOL,
        "ABORT_ON_EXCEPTION",
        "End the whole job when a rank ends with an exception or sys.exit(n), n not 0.",
        horovod=False,
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the knobs from environment variables.

        Args:
            environ: the variables; those of this process by default.

        Returns:
            The settings, with the defaults for what is not set.

        Raises:
            SettingsError: a value is malformed, or there is no such `HVDLITE_` variable.
        """
        given = {name: text.strip() for name, text in environ.items() if text.strip()}
        values: dict[str, Any] = {}
        known = []
        for name, declared in _knobs():
            known += [spelling.variable for spelling in declared.spellings]
            found = [
                (spelling.variable, declared.read(spelling, given[spelling.variable]))
                for spelling in declared.spellings
                if spelling.variable in given
            ]
            if found:
                values[name] = found[0][1]
                _warn_of_conflicts(found, given)
        _refuse_unknown(given, known)
        _warn_of_ignored(given, known)
        return cls(**values)


def _knobs() -> Iterable[tuple[str, Knob]]:
    return ((field.name, field.metadata["knob"]) for field in dataclasses.fields(Settings))


def _warn(text: str) -> None:
    # Points at the caller of from_environment, which is two calls away.
    warnings.warn(text, stacklevel=4)


def _warn_of_conflicts(found: list[tuple[str, object]], given: Mapping[str, str]) -> None:
    winner, value = found[0]
    losers = [variable for variable, other in found[1:] if other != value]
    if losers:
        others = " and ".join(f"{loser}={given[loser]}" for loser in losers)
        _warn(f"{winner}={given[winner]} is in force; {others} is ignored")


# Variables of the project's own that are no knobs.
_NO_KNOBS = ("HVDLITE_LAUNCHER_", "HVDLITE_TEST_")


def _refuse_unknown(given: Mapping[str, str], known: list[str]) -> None:
    unknown = sorted(
        name
        for name in given
        if name.startswith(OURS) and name not in known and not name.startswith(_NO_KNOBS)
    )
    if unknown:
        ours = [name for name in known if name.startswith(OURS)]
        raise SettingsError(f"hvdlite has no setting {_suggest(unknown, ours)}")


# Horovod's variables for features that hvdlite does not have yet: their users should know.
_NOT_YET = frozenset({THEIRS + "ELASTIC"})

# Horovod's variables that can be ignored without loss: its launchers', its build's, and those
# of devices, libraries and algorithms that hvdlite does without.
_MEANINGLESS = frozenset(
    THEIRS + suffix
    for suffix in """
    HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE MPI_THREADS_DISABLE
    CONTROLLER CPU_OPERATIONS GLOO_TIMEOUT_SECONDS GLOO_IFACE ELASTIC_TIMEOUT START_TIMEOUT
    DISABLE_GROUP_FUSION ADASUM_MPI_CHUNK_SIZE BATCH_D2D_MEMCOPIES NUM_NCCL_STREAMS
    ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS DISABLE_NVTX_RANGES CCL_CACHE
    RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE
    SECRET_KEY GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT
    WITH_TENSORFLOW WITH_PYTORCH WITH_MXNET WITH_MPI WITH_GLOO WITH_NVTX
    WITHOUT_TENSORFLOW WITHOUT_PYTORCH WITHOUT_MXNET WITHOUT_MPI WITHOUT_GLOO WITHOUT_NVTX
    GPU GPU_OPERATIONS GPU_ALLREDUCE GPU_ALLGATHER GPU_BROADCAST GPU_ALLTOALL GPU_REDUCESCATTER
    ALLOW_MIXED_GPU_IMPL CUDA_HOME BUILD_CUDA_CC_LIST NCCL_HOME NCCL_INCLUDE NCCL_LIB NCCL_LINK
    ROCM_HOME NVTX_INCLUDE BUILD_ARCH_FLAGS CMAKE SKIP_COMPILE DEBUG LOCAL_VERSION
    """.split()
)


def _warn_of_ignored(given: Mapping[str, str], known: list[str]) -> None:
    theirs = [name for name in given if name.startswith(THEIRS) and name not in known]
    # A feature that is switched off is not missed.
    early = sorted(name for name in _NOT_YET.intersection(theirs) if given[name] != "0")
    if early:
        _warn(f"hvdlite cannot do this yet and ignores {', '.join(early)}")
    unknown = sorted(set(theirs) - _NOT_YET - _MEANINGLESS)
    if unknown:
        candidates = [name for name in known if name.startswith(THEIRS)]
        _warn(f"hvdlite does not know and ignores {_suggest(unknown, candidates)}")


def _suggest(unknown: list[str], candidates: list[str]) -> str:
    texts = []
    for name in unknown:
        # Prefixes are alike anyway: compare what comes after them.
        prefix = OURS if name.startswith(OURS) else THEIRS
        suffixes = [candidate.removeprefix(prefix) for candidate in candidates]
        close = difflib.get_close_matches(name.removeprefix(prefix), suffixes, n=1)
        texts.append(f"{name} (did you mean {prefix}{close[0]}?)" if close else name)
    return ", ".join(texts)


def settings_table() -> str:
    """Render all knobs as a Markdown table, for the documentation."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    defaults = Settings()
    for name, declared in _knobs():
        spellings = [
            f"`{spelling.variable}`" + (" (the opposite)" if spelling.inverted else "")
            for spelling in declared.spellings
        ]
        default = declared.kind.show(getattr(defaults, name))
        lines.append(f"| {', '.join(spellings)} | {default} | {declared.doc} |")
    return "\n".join(lines) + "\n"
