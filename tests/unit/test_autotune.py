"""The parts of autotune that need no job: what is measured, what is tried, what is logged."""

from __future__ import annotations

import csv
import io
import logging
import math
import random
import time
from collections.abc import Callable, Iterator

import pytest

from hvdlite import connection
from hvdlite.autotune import CSV_HEADER, EXTRA, Meter, Parameters, Session, Tuner
from hvdlite.engine.requests import Key, Kind, Request, Response
from hvdlite.engine.submissions import Entry
from hvdlite.exceptions import HvdliteError, SettingsError
from hvdlite.log import logger
from hvdlite.settings import Settings
from hvdlite.timeline.trace import RankEvents, trace_events
from hvdlite.transport.local_communicator import LocalCommunicator
from hvdlite.transport.types import DType

MIB = 2**20
START = Parameters(32 * 1024, 1e-3, 1024, "auto")


# -- the meter --------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Source:
    """Makes up rounds: what is agreed on, and the time that it takes."""

    def __init__(self, steps: int) -> None:
        self.clock = Clock()
        self.scores: list[float] = []
        self.meter = Meter(steps, self.scores.append, self.clock)

    def round(self, keys: list[Key], elements: int, seconds: float) -> None:
        """Submit now, agree at once, and complete after so many seconds."""
        request = Request(Kind.ALLREDUCE, (DType.FLOAT32,), ((elements,),))
        agreed = []
        for key in keys:
            entry = Entry(request, [], [], None, self.clock.now)  # type: ignore[arg-type]
            agreed.append((Response(key, request), entry))
        self.meter.agreed(agreed)
        self.clock.now += seconds
        self.meter.rests()


def test_a_score_is_bytes_per_second_of_the_time_under_way() -> None:
    source = Source(steps=4)
    source.meter.begin()
    for _ in range(20):
        source.round(["a", "b"], 1000, 0.02)
        source.clock.now += 5.0  # the forward pass, in which nothing is under way
    assert source.scores == [pytest.approx(8000 / 0.02)]


def test_nothing_is_measured_unless_asked_for() -> None:
    source = Source(steps=2)
    for _ in range(20):
        source.round(["a"], 1000, 0.02)
    assert source.scores == []
    source.meter.begin()
    for _ in range(40):
        source.round(["a"], 1000, 0.02)
    assert len(source.scores) == 1


def test_the_steps_right_after_a_change_do_not_count() -> None:
    source = Source(steps=3)
    source.meter.begin()
    for _ in range(2):
        source.round(["a"], 1000, 10.0)
    for _ in range(6):
        source.round(["a"], 1000, 0.02)
    assert source.scores == [pytest.approx(4000 / 0.02)]


def test_slow_steps_and_small_steps_do_not_spoil_a_sample() -> None:
    source = Source(steps=7)
    source.meter.begin()
    for step in range(30):
        source.round(["a", "b"], 1000, 3.0 if step % 5 == 4 else 0.02)
        # A metric under one name, and an evaluation of many small steps.
        for _ in range(20 if step == 10 else 1):
            source.round(["loss"], 1, 0.5)
    assert source.scores[0] == pytest.approx(8004 / 0.52)


def test_many_equal_requests_without_names_make_one_step() -> None:
    source = Source(steps=3)
    source.meter.begin()
    for step in range(10):
        source.round(list(range(50 * step, 50 * step + 50)), 10, 0.02)
    assert source.scores == [pytest.approx(50 * 40 / 0.02)]
    assert source.meter.step_bytes == 2000


# -- the tuner --------------------------------------------------------------------------


def speed(parameters: Parameters) -> float:
    """A made-up job that moves 24 MiB: the time of each batch, of copying, of waiting."""
    nbytes = 24 * MIB
    threshold = min(max(parameters.fusion_threshold, 1), nbytes)
    seconds = 150e-6 * max(nbytes / threshold, 1) + nbytes / 3e9
    seconds += 1e-3 * max(0.0, math.log2(threshold / (4 * MIB)))
    seconds += 0.2 * parameters.cycle_time
    seconds *= {"auto": 1.0, "mpi": 1.3, "shared_memory": 0.85}[parameters.transport]
    seconds += 5e-3 * (parameters.cache_capacity == 0)
    return nbytes / seconds


def tune(tuner: Tuner, measure: Callable[[Parameters], float]) -> list[Parameters]:
    tuner.step_bytes = 24 * MIB
    asked = []
    while (parameters := tuner.ask()) is not None:
        asked.append(parameters)
        assert len(asked) < 1000
        tuner.tell(measure(parameters))
    return asked


@pytest.mark.parametrize("seed", [1, 2])
def test_the_result_is_within_a_tenth_of_the_best_of_a_grid(seed: int) -> None:
    pytest.importorskip("bayes_opt")
    names = ("auto", "mpi", "shared_memory")
    best = max(
        speed(Parameters(int(2 ** (k / 2)), cycle, capacity, name))
        for k in range(30, 54)
        for cycle in (1e-4, 1e-3, 5e-3)
        for capacity in (0, 1024)
        for name in names
    )
    assert speed(START) < 0.3 * best
    source = random.Random(seed)
    moment = 0

    def measure(parameters: Parameters) -> float:
        nonlocal moment
        moment += 1
        # The machine becomes slower and faster by a factor of four all the time.
        drift = 2 ** math.sin(moment / 8)
        return speed(parameters) * drift * math.exp(source.gauss(0, 0.03))

    tuner = Tuner(START, names, most_samples=20)
    asked = tune(tuner, measure)
    assert tuner.samples == 20
    assert len(asked) <= 40
    assert speed(tuner.best()[0]) >= 0.9 * best


@pytest.mark.parametrize("most_samples", [1, 2, 3, 4, 6])
def test_few_samples_and_no_choice_of_transports_do(most_samples: int) -> None:
    pytest.importorskip("bayes_opt")
    tuner = Tuner(START, (), most_samples)
    asked = tune(tuner, speed)
    assert tuner.samples == most_samples
    assert {parameters.transport for parameters in asked} == {"auto"}
    assert speed(tuner.best()[0]) >= speed(START)


def test_a_good_start_stays() -> None:
    pytest.importorskip("bayes_opt")
    start = Parameters(4 * MIB, 1e-4, 1024, "auto")
    tuner = Tuner(start, ("auto", "mpi"), 10)
    tune(tuner, lambda parameters: 1.0 if parameters == start else 0.5)
    assert tuner.best() == (start, 1.0)


def test_a_bad_measurement_of_the_start_does_not_make_the_result_worse() -> None:
    pytest.importorskip("bayes_opt")
    start = Parameters(4 * MIB, 1e-4, 1024, "auto")
    tuner = Tuner(start, (), 20)
    scores = iter([0.05])
    tune(tuner, lambda parameters: next(scores, 1.0 if parameters == start else 0.8))
    assert tuner.best() == (start, 1.0)


def test_switches_stay_where_they_make_no_difference() -> None:
    pytest.importorskip("bayes_opt")
    tuner = Tuner(START, ("auto", "mpi", "ring"), 20)
    asked = tune(tuner, lambda parameters: math.sqrt(parameters.fusion_threshold))
    assert {parameters.transport for parameters in asked} == {"auto", "mpi", "ring"}
    assert {parameters.cache_capacity for parameters in asked} == {0, 1024}
    best, _ = tuner.best()
    assert (best.transport, best.cache_capacity) == ("auto", 1024)


def test_thresholds_end_where_one_batch_holds_a_step() -> None:
    pytest.importorskip("bayes_opt")
    tuner = Tuner(START, (), 12)
    tuner.step_bytes = MIB
    thresholds = []
    while (parameters := tuner.ask()) is not None:
        thresholds.append(parameters.fusion_threshold)
        tuner.tell(1.0)
    assert max(thresholds) <= MIB
    assert min(thresholds) >= START.fusion_threshold


# -- the session ------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the logger is given to show."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


class Loop:
    """Applies what a session proposes at once, and measures `speed`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.current = START
        self.proposals: list[tuple[Parameters, bool]] = []
        session.start(lambda parameters, final: self.proposals.append((parameters, final)))

    def run(self) -> None:
        deadline = time.monotonic() + 60
        request = Request(Kind.ALLREDUCE, (DType.FLOAT32,), ((6 * MIB,),))
        clock = self.session.meter._clock
        assert isinstance(clock, Clock)
        final = False
        while not final:
            assert time.monotonic() < deadline
            while self.proposals:
                self.current, final = self.proposals.pop(0)
                self.session.applied(self.current, final)
            entry = Entry(request, [], [], None, clock.now)  # type: ignore[arg-type]
            self.session.meter.agreed([(Response("w", request), entry)])
            clock.now += 24 * MIB / speed(self.current)
            self.session.meter.rests()
            time.sleep(0)


def test_a_session_logs_what_it_measures_and_says_how_it_ends(told, tmp_path) -> None:
    pytest.importorskip("bayes_opt")
    path = tmp_path / "log.csv"
    tuner = Tuner(START, ("auto", "mpi"), 6)
    session = Session(tuner, 2, 2, Clock(), path.open("w"))
    loop = Loop(session)
    loop.run()
    session.close()
    text = path.read_text()
    assert text.splitlines()[0] == CSV_HEADER
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["stage"] for row in rows[:3]] == ["warm-up", "warm-up", "reference"]
    assert [row["sample"] for row in rows if row["stage"] == "sample"] == list("123456")
    for row in rows[:-1]:
        parameters = Parameters(
            int(row["fusion_threshold"]),
            float(row["cycle_time_ms"]) / 1e3,
            int(row["cache_capacity"]),
            row["transport"],
        )
        assert float(row["bytes_per_second"]) == pytest.approx(speed(parameters), rel=1e-3)
    final = rows[-1]
    assert (final["stage"], final["bytes_per_second"]) == ("final", "")
    assert int(final["fusion_threshold"]) == loop.current.fusion_threshold
    assert float(final["times_start"]) == pytest.approx(
        speed(loop.current) / speed(START), rel=0.01
    )
    (message,) = told
    assert message.endswith(
        f"HVDLITE_FUSION_THRESHOLD={final['fusion_threshold']} "
        f"HVDLITE_CYCLE_TIME={final['cycle_time_ms']} "
        f"HVDLITE_CACHE_CAPACITY={final['cache_capacity']} "
        f"HVDLITE_TRANSPORT={final['transport']}"
    )


def test_the_variables_that_are_printed_give_the_same_values_back() -> None:
    parameters = Parameters(1572864, 0.00026, 0, "shared_memory")
    settings = Settings.from_environment(dict(word.split("=") for word in str(parameters).split()))
    assert (settings.fusion_threshold, settings.cycle_time) == (1572864, 0.26)
    assert (settings.cache_capacity, settings.transport) == (0, "shared_memory")


def test_a_tuner_that_breaks_ends_the_tuning_and_not_the_job(told) -> None:
    pytest.importorskip("bayes_opt")

    class Broken(Tuner):
        def tell(self, score: float) -> None:
            raise ZeroDivisionError("of all things")

    loop = Loop(Session(Broken(START), 2, 0, Clock()))
    loop.run()
    assert loop.current == START
    assert "ZeroDivisionError: of all things" in told[0]


def test_a_session_that_is_closed_early_says_what_was_best(told) -> None:
    pytest.importorskip("bayes_opt")
    session = Session(Tuner(START), 2, 1, Clock())
    session.start(lambda *_: None)
    session.close()
    session.close()
    (message,) = told
    assert "still at work" in message
    assert str(START) in message


# -- settings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("STEPS_PER_SAMPLE", "0"),
        ("BAYES_OPT_MAX_SAMPLES", "0"),
        ("WARMUP_SAMPLES", "-1"),
        ("GAUSSIAN_PROCESS_NOISE", "1.5"),
        ("GAUSSIAN_PROCESS_NOISE", "nan"),
        ("LOG", "/tmp/"),
    ],
)
def test_what_makes_no_sense_is_refused(variable: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"HVDLITE_AUTOTUNE_{variable}"):
        Settings.from_environment({f"HVDLITE_AUTOTUNE_{variable}": text})


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bayes_opt", None)
    with pytest.raises(HvdliteError, match="bayesian-optimization") as caught:
        connection._prepare_autotune(LocalCommunicator(), Settings(autotune=True))
    assert EXTRA in str(caught.value)
    assert "pip install 'hvdlite[autotune]'" in str(caught.value)


def test_a_log_that_cannot_be_written_is_an_error(tmp_path) -> None:
    pytest.importorskip("bayes_opt")
    settings = Settings(autotune=True, autotune_log=str(tmp_path / "none" / "log.csv"))
    with pytest.raises(HvdliteError, match="HVDLITE_AUTOTUNE_LOG cannot be written"):
        connection._prepare_autotune(LocalCommunicator(), settings)


def test_a_score_is_a_median_whatever_the_order_of_steps() -> None:
    scores = set()
    for seed in range(5):
        source = Source(steps=9)
        source.meter.begin()
        seconds = [0.01 * k for k in range(1, 10)]
        random.Random(seed).shuffle(seconds)
        for length in [0.05, 0.05, *seconds, 0.05]:
            source.round(["a"], 1000, length)
        scores.add(round(source.scores[0], 6))
    assert scores == {round(4000 / 0.05, 6)}


# -- the timeline -----------------------------------------------------------------------


def test_a_timeline_shows_when_values_changed() -> None:
    events = [
        ("negotiate", "w", 1.0, 1.5, 1, 0, "allreduce", 8),
        ("mark", "autotune: other values", 2.0),
    ]
    trace = list(trace_events([RankEvents(0, 0.0, events, 0)], 1))
    (mark,) = [event for event in trace if event["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["pid"]) == ("autotune: other values", 1e6, 0)
