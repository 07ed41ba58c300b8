"""The course of a tuning on rank 0: measure, think in a thread of its own, propose, log."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TextIO

from ..log import logger, tell
from .meter import Meter
from .parameters import Parameters
from .tuner import Tuner

__all__ = ["CSV_HEADER", "Session"]

CSV_HEADER = (
    "sample,stage,fusion_threshold,cycle_time_ms,cache_capacity,transport,bytes_per_second,"
    "times_start"
)

_GOODBYE = 5.0
"""Seconds that the end of a job waits for a thought; a proposal takes a tenth of one."""


class Session:
    """Tunes a job from its start until the last sample.

    The engine calls `meter`, and `applied` on proposals that have come into force. The rest
    happens in a thread of the session's: to fit a model takes longer than most steps.

    Args:
        tuner: chooses.
        steps_per_sample: steps of a measurement.
        warmup_samples: measurements that are discarded at the beginning.
        clock: the engine's, seconds.
        log: gets a line for each measurement; closed at the end.
    """

    def __init__(
        self,
        tuner: Tuner,
        steps_per_sample: int,
        warmup_samples: int,
        clock: Callable[[], float],
        log: TextIO | None = None,
    ) -> None:
        self._scores: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self.meter = Meter(steps_per_sample, self._scores.put, clock)
        self._tuner = tuner
        self._warmup_samples = warmup_samples
        self._log = log
        self._propose: Callable[[Parameters, bool], object] = lambda *_: None
        self._thread = threading.Thread(target=self._run, name="hvdlite-autotune", daemon=True)
        self._over = False

    def start(self, propose: Callable[[Parameters, bool], object]) -> None:
        """Begin.

        Args:
            propose: brings parameters into force on all ranks, and says whether they are the
                final ones. May be called by any thread.
        """
        self._propose = propose
        self._write(CSV_HEADER)
        self._thread.start()

    def applied(self, parameters: Parameters, final: bool) -> None:
        """Take notice of a proposal that has come into force."""
        if not final:
            self.meter.begin()
            return
        self._over = True
        self._finish(
            f"autotune has ended after {self._tuner.samples} samples, with "
            f"{self._tuner.best()[1]:.2f} times the speed of the start: {parameters}"
        )

    def close(self) -> None:
        """End with the job, if need be before the last sample."""
        if self._over:
            return
        self._over = True
        self._scores.put(None)
        if self._thread.is_alive():
            self._thread.join(_GOODBYE)
        best, times = self._tuner.best()
        self._finish(
            "autotune was still at work when the job ended, and its best is not compared with the "
            f"start yet: {times:.2f} times the speed in {self._tuner.samples} sample(s) of {best}"
        )

    def _finish(self, text: str) -> None:
        tell(text)
        if self._log is not None:
            self._log.close()
            self._log = None

    def _run(self) -> None:
        try:
            self._tune()
        except Exception as error:  # whatever the libraries do, training goes on
            logger.warning(
                "autotune gives up and stays with the best so far: %s: %s",
                *(type(error).__name__, error),
            )
            if not self._over:
                self._propose(self._tuner.best()[0], True)

    def _tune(self) -> None:
        tuner = self._tuner
        tuner.prepare()
        parameters = tuner.ask()
        for _ in range(self._warmup_samples):
            self.meter.begin()
            score = self._scores.get()
            if score is None:
                return
            self._note("warm-up", tuner.start, score)
        self.meter.begin()
        while parameters is not None:
            score = self._scores.get()
            if score is None:
                return
            tuner.step_bytes = self.meter.step_bytes
            tuner.tell(score)
            stage = "reference" if tuner.is_reference else "sample"
            measured, parameters = parameters, tuner.ask()
            self._note(stage, measured, score)
            if parameters is not None:
                self._propose(parameters, False)
        self._note("final", tuner.best()[0])
        self._propose(tuner.best()[0], True)

    def _note(self, stage: str, parameters: Parameters, score: float | None = None) -> None:
        threshold, _, capacity, transport = parameters
        values = (
            self._tuner.samples,
            stage,
            threshold,
            f"{parameters.cycle_milliseconds:g}",
            capacity,
            transport,
            "" if score is None else f"{score:.0f}",
            f"{self._tuner.times_start(parameters):.3f}",
        )
        self._write(",".join(map(str, values)))

    def _write(self, line: str) -> None:
        log = self._log
        if log is None:
            return
        try:
            log.write(line + "\n")
            log.flush()
        except (OSError, ValueError) as error:  # a full disk, or closed meanwhile
            self._log = None
            if not self._over:
                logger.warning("autotune's log cannot be written any more: %s", error)
