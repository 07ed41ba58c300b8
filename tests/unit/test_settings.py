"""hvdlite.settings: defaults, spellings, what is refused, what is warned about, and the table."""

from __future__ import annotations

import dataclasses
import math
import re
import string
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdlite.exceptions import SettingsError
from hvdlite.settings import Settings, settings_table

ROOT = Path(__file__).parents[2]
FIELDS = [field.name for field in dataclasses.fields(Settings)]

# Suffix, field, for knobs that HVDLITE_ and HOROVOD_ share.
SHARED = {
    "FUSION_THRESHOLD": "fusion_threshold",
    "CYCLE_TIME": "cycle_time",
    "CACHE_CAPACITY": "cache_capacity",
    "STALL_CHECK_TIME_SECONDS": "stall_warning_time",
    "STALL_SHUTDOWN_TIME_SECONDS": "stall_shutdown_time",
    "HOSTNAME": "hostname",
    "THREAD_AFFINITY": "thread_affinity",
    "DYNAMIC_PROCESS_SETS": "dynamic_process_sets",
    "TIMELINE": "timeline",
    "TIMELINE_MARK_CYCLES": "timeline_mark_cycles",
    "LOG_LEVEL": "log_level",
    "LOG_HIDE_TIME": "log_hide_time",
    "AUTOTUNE": "autotune",
    "AUTOTUNE_LOG": "autotune_log",
    "AUTOTUNE_WARMUP_SAMPLES": "autotune_warmup_samples",
    "AUTOTUNE_STEPS_PER_SAMPLE": "autotune_steps_per_sample",
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "autotune_bayes_opt_max_samples",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "autotune_gaussian_process_noise",
}
OURS = {
    "STALL_CHECK": "stall_check",
    "TRANSPORT": "transport",
    "BUCKET_BYTES": "bucket_bytes",
    "SEGMENT_BYTES": "segment_bytes",
    "SMALL_BYTES": "small_bytes",
    "PEER_MEMORY": "peer_memory",
    "HUGE_PAGES": "huge_pages",
    "METRICS_PORT": "metrics_port",
    "METRICS_HOST": "metrics_host",
    "ABORT_ON_EXCEPTION": "abort_on_exception",
}
SAMPLES = {
    "FUSION_THRESHOLD": ("1048576", 2**20),
    "CYCLE_TIME": ("2.5", 2.5),
    "CACHE_CAPACITY": ("0", 0),
    "STALL_CHECK_TIME_SECONDS": ("10", 10.0),
    "STALL_SHUTDOWN_TIME_SECONDS": ("90.5", 90.5),
    "HOSTNAME": ("node-7", "node-7"),
    "THREAD_AFFINITY": ("0, 2,4", (0, 2, 4)),
    "DYNAMIC_PROCESS_SETS": ("0", False),
    "TIMELINE": ("/tmp/trace.json", "/tmp/trace.json"),
    "TIMELINE_MARK_CYCLES": ("1", True),
    "LOG_LEVEL": ("Debug", "debug"),
    "LOG_HIDE_TIME": ("1", True),
    "AUTOTUNE": ("1", True),
    "AUTOTUNE_LOG": ("/tmp/log.csv", "/tmp/log.csv"),
    "AUTOTUNE_WARMUP_SAMPLES": ("0", 0),
    "AUTOTUNE_STEPS_PER_SAMPLE": ("5", 5),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": ("7", 7),
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": ("0.5", 0.5),
    "STALL_CHECK": ("off", False),
    "TRANSPORT": ("ring", "ring"),
    "BUCKET_BYTES": ("1", 1),
    "SEGMENT_BYTES": ("65536", 65536),
    "SMALL_BYTES": ("0", 0),
    "PEER_MEMORY": ("0", False),
    "HUGE_PAGES": ("0", False),
    "METRICS_PORT": ("9400", 9400),
    "METRICS_HOST": ("0.0.0.0", "0.0.0.0"),
    "ABORT_ON_EXCEPTION": ("false", False),
}
SPELLINGS = [
    (prefix + suffix, SHARED[suffix]) for prefix in ("HVDLITE_", "HOROVOD_") for suffix in SHARED
]
SPELLINGS += [("HVDLITE_" + suffix, field) for suffix, field in OURS.items()]
WHOLE_NUMBERS = [
    "FUSION_THRESHOLD",
    "CACHE_CAPACITY",
    "AUTOTUNE_WARMUP_SAMPLES",
    "BUCKET_BYTES",
    "SEGMENT_BYTES",
    "SMALL_BYTES",
]
DURATIONS = ["CYCLE_TIME", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS"]


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """A warning that a test does not expect is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def read(**environ: str) -> Settings:
    return Settings.from_environment(environ)


def test_defaults() -> None:
    assert read() == Settings()
    assert dataclasses.asdict(Settings()) == {
        "fusion_threshold": 4 * 1024 * 1024,
        "cycle_time": 1.0,
        "cache_capacity": 1024,
        "stall_check": True,
        "stall_warning_time": 60.0,
        "stall_shutdown_time": 0.0,
        "hostname": None,
        "thread_affinity": None,
        "dynamic_process_sets": True,
        "timeline": None,
        "timeline_mark_cycles": False,
        "log_level": "warning",
        "log_hide_time": False,
        "transport": "auto",
        "bucket_bytes": 4 * 1024 * 1024,
        "segment_bytes": 256 * 1024,
        "small_bytes": 16 * 1024,
        "peer_memory": True,
        "huge_pages": True,
        "autotune": False,
        "autotune_log": None,
        "autotune_warmup_samples": 3,
        "autotune_steps_per_sample": 10,
        "autotune_bayes_opt_max_samples": 20,
        "autotune_gaussian_process_noise": 0.8,
        "metrics_port": 0,
        "metrics_host": "127.0.0.1",
        "abort_on_exception": True,
    }


def test_every_field_is_tested() -> None:
    assert sorted([*SHARED.values(), *OURS.values()]) == sorted(FIELDS)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().cycle_time = 2.0  # type: ignore[misc]


def test_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_CYCLE_TIME", "7")
    assert Settings.from_environment().cycle_time == 7.0


@pytest.mark.parametrize(("variable", "field"), SPELLINGS)
def test_each_spelling_sets_its_field_alone(variable: str, field: str) -> None:
    text, value = SAMPLES[variable.split("_", 1)[1]]
    settings = read(**{variable: text})
    assert settings == dataclasses.replace(Settings(), **{field: value})
    assert type(getattr(settings, field)) is type(value)


@pytest.mark.parametrize(("variable", "field"), SPELLINGS)
@pytest.mark.parametrize("text", ["", "  "])
def test_empty_is_unset(variable: str, field: str, text: str) -> None:
    assert read(**{variable: text}) == Settings()


@pytest.mark.parametrize("suffix", SHARED)
def test_ours_wins_and_a_difference_is_told(suffix: str) -> None:
    text, value = SAMPLES[suffix]
    other = {"HOSTNAME": "x", "LOG_LEVEL": "error", "DYNAMIC_PROCESS_SETS": "1"}.get(suffix, "0")
    if suffix in ("CACHE_CAPACITY", "STALL_CHECK_TIME_SECONDS") or "SAMPLE" in suffix:
        other = "3"
    environ = {f"HOROVOD_{suffix}": other, f"HVDLITE_{suffix}": text}
    with pytest.warns(UserWarning) as caught:
        settings = Settings.from_environment(environ)
    assert getattr(settings, SHARED[suffix]) == value
    assert [str(warning.message) for warning in caught] == [
        f"HVDLITE_{suffix}={text} is in force; HOROVOD_{suffix}={other} is ignored"
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("suffix", SHARED)
def test_equal_values_of_both_spellings_are_fine(suffix: str) -> None:
    text, value = SAMPLES[suffix]
    settings = read(**{f"HOROVOD_{suffix}": text, f"HVDLITE_{suffix}": text + " "})
    assert getattr(settings, SHARED[suffix]) == value


def test_equality_is_of_values_not_of_texts() -> None:
    assert read(HVDLITE_CYCLE_TIME="1.50", HOROVOD_CYCLE_TIME="1.5").cycle_time == 1.5
    assert read(HVDLITE_STALL_CHECK="no", HOROVOD_STALL_CHECK_DISABLE="1").stall_check is False


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HVDLITE_STALL_CHECK": "0"}, False),
        ({"HVDLITE_STALL_CHECK": "1"}, True),
        ({"HVDLITE_STALL_CHECK_DISABLE": "1"}, False),
        ({"HVDLITE_STALL_CHECK_DISABLE": "0"}, True),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, False),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, True),
    ],
)
def test_stall_check_and_its_opposites(environ: dict[str, str], expected: bool) -> None:
    assert Settings.from_environment(environ).stall_check is expected


def test_contradictory_spellings_of_the_stall_check() -> None:
    with pytest.warns(UserWarning, match="HVDLITE_STALL_CHECK=1 is in force") as caught:
        settings = read(
            HVDLITE_STALL_CHECK="1",
            HVDLITE_STALL_CHECK_DISABLE="1",
            HOROVOD_STALL_CHECK_DISABLE="1",
        )
    assert settings.stall_check is True
    assert len(caught) == 1
    assert "HVDLITE_STALL_CHECK_DISABLE=1 and HOROVOD_STALL_CHECK_DISABLE=1" in str(
        caught[0].message
    )


@given(st.integers(-(10**17), 10**17))
def test_integers_as_booleans_follow_horovod(number: int) -> None:
    assert read(HOROVOD_LOG_HIDE_TIME=str(number)).log_hide_time is (number > 0)


@pytest.mark.parametrize("text", ["true", "True", "YES", "on", " On "])
def test_words_that_are_true(text: str) -> None:
    assert read(HVDLITE_LOG_HIDE_TIME=text).log_hide_time is True


@pytest.mark.parametrize("text", ["false", "False", "NO", "off", " Off "])
def test_words_that_are_false(text: str) -> None:
    assert read(HVDLITE_ABORT_ON_EXCEPTION=text).abort_on_exception is False


@pytest.mark.parametrize("suffix", WHOLE_NUMBERS)
@given(number=st.integers(16, 10**18 - 1))
def test_whole_numbers(suffix: str, number: int) -> None:
    settings = read(**{f"HVDLITE_{suffix}": f" {number}\n"})
    assert getattr(settings, {**SHARED, **OURS}[suffix]) == number


@pytest.mark.parametrize("suffix", DURATIONS)
@given(number=st.floats(1e-300, 1e300))
def test_durations(suffix: str, number: float) -> None:
    assert getattr(read(**{f"HOROVOD_{suffix}": repr(number)}), SHARED[suffix]) == number


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_core_lists(cores: list[int]) -> None:
    assert read(HOROVOD_THREAD_AFFINITY=",".join(map(str, cores))).thread_affinity == tuple(cores)


REFUSED = (
    [(suffix, text) for suffix in WHOLE_NUMBERS for text in ("-1", "1.5", "64MB", "1e6", "1_000")]
    + [
        (suffix, text)
        for suffix in WHOLE_NUMBERS
        for text in ("nan", "inf", "0x10", "٣", "9" * 5000)
    ]
    + [(suffix, text) for suffix in DURATIONS for text in ("-1", "nan", "inf", "5ms", "1e999")]
    + [(suffix, text) for suffix in DURATIONS for text in ("1_0", "٣", ".", "-0.0001", "1,5")]
    + [("STALL_CHECK_TIME_SECONDS", "0"), ("SEGMENT_BYTES", "0"), ("SEGMENT_BYTES", "15")]
    + [("BUCKET_BYTES", "0")]
    + [("THREAD_AFFINITY", text) for text in ("a", "1,", ",", "-1", "1;2", "0-3", "1.5")]
    + [("LOG_HIDE_TIME", text) for text in ("maybe", "1.0", "2x", "truee", "0x1")]
    + [("LOG_LEVEL", text) for text in ("verbose", "10", "warn ing")]
    + [("TRANSPORT", text) for text in ("gloo", "1", "ring,mpi")]
)


@pytest.mark.parametrize(("suffix", "text"), REFUSED)
def test_malformed_values_are_refused_by_name(suffix: str, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(**{f"HVDLITE_{suffix}": text})
    message = str(caught.value)
    assert message.startswith(f"HVDLITE_{suffix} is {text!r}, but it must be ")
    assert len(message.split("must be ")[1]) > 5


def test_the_spelling_that_was_used_is_named() -> None:
    with pytest.raises(SettingsError, match="^HOROVOD_CYCLE_TIME is 'fast'"):
        read(HOROVOD_CYCLE_TIME="fast", HVDLITE_CYCLE_TIME="1")
    with pytest.raises(ValueError, match="^HOROVOD_STALL_CHECK_DISABLE is 'perhaps'"):
        read(HOROVOD_STALL_CHECK_DISABLE="perhaps")


def test_what_is_accepted_is_said() -> None:
    with pytest.raises(SettingsError, match="a whole number of bytes, 16 or more"):
        read(HVDLITE_SEGMENT_BYTES="3")
    with pytest.raises(SettingsError, match="one of auto, ring, mpi, shared_memory, hierarchical"):
        read(HVDLITE_TRANSPORT="tcp")
    with pytest.raises(SettingsError, match="a number of seconds, more than 0"):
        read(HVDLITE_STALL_CHECK_TIME_SECONDS="0")


@given(st.sampled_from(SPELLINGS), st.text(st.characters(exclude_characters="\0")))
def test_any_text_is_read_or_refused_by_name(spelling: tuple[str, str], text: str) -> None:
    variable, field = spelling
    try:
        value = getattr(read(**{variable: text}), field)
    except SettingsError as error:
        assert str(error).startswith(f"{variable} is ")
    else:
        if isinstance(value, float):
            assert 0 <= value < math.inf


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("HVDLITE_FUSION_TRESHOLD", "HVDLITE_FUSION_THRESHOLD"),
        ("HVDLITE_CYCLETIME", "HVDLITE_CYCLE_TIME"),
        ("HVDLITE_TRANSPORTS", "HVDLITE_TRANSPORT"),
        ("HVDLITE_LOGLEVEL", "HVDLITE_LOG_LEVEL"),
    ],
)
def test_unknown_variables_of_ours_are_refused(variable: str, meant: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(**{variable: "1"})
    assert str(caught.value) == f"hvdlite has no setting {variable} (did you mean {meant}?)"


def test_all_unknown_variables_are_named() -> None:
    with pytest.raises(SettingsError, match="HVDLITE_QQQ, HVDLITE_ZZZ$"):
        read(HVDLITE_ZZZ="1", HVDLITE_QQQ="1")


@given(st.text(string.ascii_uppercase + "_", min_size=1))
def test_no_unknown_variable_slips_through(suffix: str) -> None:
    assume(suffix not in SHARED and suffix not in OURS and suffix != "STALL_CHECK_DISABLE")
    assume(not suffix.startswith(("TEST_", "LAUNCHER_")))
    with pytest.raises(SettingsError, match=f"HVDLITE_{suffix}"):
        read(**{f"HVDLITE_{suffix}": "1"})


def test_variables_that_are_no_knobs_are_left_alone() -> None:
    assert (
        read(HVDLITE_TEST_NP="2,4", HVDLITE_LAUNCHER_HOST="a", HVDLITES="1", PATH="/") == Settings()
    )


@pytest.mark.parametrize(
    "variable",
    [
        "HOROVOD_GPU_OPERATIONS",
        "HOROVOD_NCCL_HOME",
        "HOROVOD_WITH_PYTORCH",
        "HOROVOD_WITHOUT_GLOO",
        "HOROVOD_CONTROLLER",
        "HOROVOD_CPU_OPERATIONS",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_RANK",
        "HOROVOD_NUM_NCCL_STREAMS",
        "HOROVOD_ENABLE_XLA_OPS",
        "HOROVOD_HIERARCHICAL_ALLREDUCE",
        "HOROVOD_MPI_THREADS_DISABLE",
        "HOROVOD_SECRET_KEY",
    ],
)
def test_horovod_variables_without_meaning_here_are_silent(variable: str) -> None:
    assert read(**{variable: "anything"}) == Settings()


def test_unknown_horovod_variables_give_one_warning() -> None:
    with pytest.warns(UserWarning) as caught:
        settings = read(HOROVOD_FUSION_TRESHOLD="1", HOROVOD_QQQ="2", HOROVOD_GPU="1")
    assert settings == Settings()
    assert [str(warning.message) for warning in caught] == [
        "hvdlite does not know and ignores "
        "HOROVOD_FUSION_TRESHOLD (did you mean HOROVOD_FUSION_THRESHOLD?), HOROVOD_QQQ"
    ]
    assert caught[0].filename == __file__


def test_horovod_features_that_are_missing_give_one_warning() -> None:
    with pytest.warns(UserWarning) as caught:
        read(HOROVOD_ELASTIC="1", HOROVOD_AUTOTUNE="0")
    assert [str(warning.message) for warning in caught] == [
        "hvdlite cannot do this yet and ignores HOROVOD_ELASTIC"
    ]


def test_secrets_are_not_shown() -> None:
    with pytest.warns(UserWarning, match="HOROVOD_PASSWORD") as caught:
        read(HOROVOD_PASSWORD="hunter2")
    assert "hunter2" not in str(caught[0].message)


def test_table_has_every_variable_once() -> None:
    rows = settings_table().splitlines()[2:]
    assert len(rows) == len(FIELDS)
    variables = re.findall(r"`((?:HVDLITE|HOROVOD)_[A-Z_]+)`", settings_table())
    expected = [variable for variable, _ in SPELLINGS]
    expected += ["HVDLITE_STALL_CHECK_DISABLE", "HOROVOD_STALL_CHECK_DISABLE"]
    assert sorted(variables) == sorted(expected)
    assert all(row.count("|") == 4 for row in rows)


def test_readme_is_in_step() -> None:
    assert settings_table() in (ROOT / "README.md").read_text(encoding="utf-8"), (
        "the settings table of README.md is out of date; "
        "python -c 'from hvdlite.settings import settings_table; print(settings_table())'"
    )


@pytest.mark.parametrize("text", ["65536", "-1", "http", "8.0"])
def test_ports_have_16_bits(text: str) -> None:
    with pytest.raises(SettingsError, match="a port number, 0 to 65535"):
        read(HVDLITE_METRICS_PORT=text)


@pytest.mark.parametrize("text", ["/tmp/", ".", "a/..", "x\0y"])
def test_a_timeline_needs_the_name_of_a_file(text: str) -> None:
    with pytest.raises(SettingsError, match="the name of a file"):
        read(HVDLITE_TIMELINE=text)
