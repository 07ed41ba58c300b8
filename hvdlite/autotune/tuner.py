"""Which parameters to try next, and which were the best: ask and tell, without side effects.

Machines become faster and slower while a job runs, so each candidate is measured right after the
best so far, and only the ratio counts: all scores are relative to the start's.

Thresholds and cycle times are proposed by Bayesian optimization: a Gaussian process of the
scores so far, and the point where its upper confidence bound is largest (Srinivas et al., 2010).
Switches (transport, cache) are tried one at a time at the best point, since they hardly depend
on each other. Then come the best ones once more, because the best of many noisy scores is likely
to have been lucky, and finally the result is compared with the start directly.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any

from .parameters import Parameters

__all__ = ["EXTRA", "Tuner"]

EXTRA = "pip install 'hvdlite[autotune]'"

_LEAST_BYTES, _MOST_BYTES = 64 * 2**10, 64 * 2**20
_LEAST_RANGE = 8
_CYCLES = 1e-4, 5e-3
_SPREAD = 1 / 6, 1 / 2, 5 / 6
"""Where the first thresholds lie in their range, before there is anything to model."""

_SHARE_OF_SWITCHES = 5
_SHARE_OF_REPEATS = 5
_SHARE_OF_CHECKS = 10
_KAPPA = 1.5
_POINTS = 2000
_DOUBT = 0.1
"""How far one score may be off, as a share of it."""

_NOISE = 0.25
"""Standard deviation of the noise at a `noise` of 1, in that of the scores."""

_SWITCH_GAIN = 0.03
"""A switch must bring more than this share to be changed from what the user has."""

_USUAL_CAPACITY = 1024


class Tuner:
    """Proposes parameters by the scores of earlier ones.

    Args:
        start: the parameters in force. Nothing becomes the result that is not faster.
        transports: names that may take the place of the start's; none to keep it.
        most_samples: how many candidates it may try.
        noise: how much scores are to be distrusted, from 0 to 1.
    """

    def __init__(
        self,
        start: Parameters,
        transports: Sequence[str] = (),
        most_samples: int = 20,
        noise: float = 0.8,
    ) -> None:
        self.start = start
        self.step_bytes = 0
        """What a step moves, once that is known: larger thresholds make no difference."""
        self.samples = 0
        """Candidates that have been measured."""
        self.is_reference = False
        """Whether what is asked for is no candidate, but what the next one is compared with."""
        self._transports = [name for name in transports if name != start.transport]
        self._most_samples = most_samples
        self._noise = noise
        self._logs: defaultdict[Parameters, list[float]] = defaultdict(list)
        self._logs[start] = [0.0]
        self._plan = self._make_plan()
        self._asked: Parameters | None = None
        self._score = math.nan
        self._checked: Parameters | None = None
        self._checks: list[float] = []
        """Logarithms of how many times as fast as the start it was."""

    def prepare(self) -> None:
        """Load the libraries, which takes seconds."""
        import bayes_opt  # noqa: F401

    def ask(self) -> Parameters | None:
        """Return the parameters to measure next, None if there is nothing more to try."""
        self._asked = next(self._plan, None)
        return self._asked

    def tell(self, score: float) -> None:
        """Take in the score of what was asked for.

        Args:
            score: positive; the larger, the better.
        """
        self._score = score
        if not self.is_reference:
            self.samples += 1

    def best(self) -> tuple[Parameters, float]:
        """Return the best parameters so far, and how many times as fast as the start they are.

        Once some have been measured repeatedly, it is one of these, or the start.
        """
        if self._checked is not None and self._checks:
            slower = _mean(self._checks) < 0
            checked = self.start if slower else self._checked
            return checked, self.times_start(checked)
        proven = [p for p, logs in self._logs.items() if len(logs) > 1 or p == self.start]
        repeated = any(len(logs) > 1 for logs in self._logs.values())
        best = max(proven if repeated else self._logs, key=self._rank)
        return best, self.times_start(best)

    def times_start(self, parameters: Parameters) -> float:
        """Return how many times as fast as the start parameters are that were measured."""
        is_checked = parameters == self._checked and self._checks
        return math.exp(_mean(self._checks if is_checked else self._logs[parameters]))

    # -- the plan -----------------------------------------------------------------------

    def _make_plan(self) -> Iterator[Parameters]:
        measured = None
        for candidate in self._candidates():
            reference = max((p for p in self._logs if p != candidate), key=self._rank, default=None)
            if reference is None:
                continue
            ratio = yield from self._compare(candidate, reference, reference == measured)
            measured = candidate
            self._logs[candidate].append(_mean(self._logs[reference]) + ratio)
        best, _ = self.best()
        if best != self.start:
            # Its score comes from a chain of comparisons, of which any may have been unlucky.
            self._checked = best
            while self.samples < self._most_samples:
                self._checks.append((yield from self._compare(best, self.start)))

    def _compare(
        self, candidate: Parameters, reference: Parameters, is_known: bool = False
    ) -> Generator[Parameters, None, float]:
        """Have two measured, or the first one if the other is what was measured last."""
        if not is_known:
            self.is_reference = True
            yield reference
            self.is_reference = False
        base = self._score
        yield candidate
        return math.log(self._score / base)

    def _candidates(self) -> Iterator[Parameters]:
        switches = self._switches()[: self._most_samples // _SHARE_OF_SWITCHES]
        repeats = self._most_samples // _SHARE_OF_REPEATS
        checks = self._most_samples // _SHARE_OF_CHECKS
        for number in range(self._most_samples - len(switches) - repeats - checks):
            yield self._explore(number)
        for switch in switches:
            yield self._leader()._replace(**switch)
        for _ in range(repeats):
            yield self._leader(_DOUBT)

    def _leader(self, doubt: float = 0.0) -> Parameters:
        """Return the best so far, if in doubt rather what has been measured less often."""
        return max(self._logs, key=lambda p: self._rank(p) + doubt / len(self._logs[p]) ** 0.5)

    def _rank(self, parameters: Parameters) -> float:
        mine = parameters.transport, parameters.cache_capacity
        usual = self.start.transport, self.start.cache_capacity
        changed = sum(one != other for one, other in zip(mine, usual, strict=True))
        return _mean(self._logs[parameters]) - changed * _SWITCH_GAIN

    def _switches(self) -> list[dict[str, Any]]:
        """Return the changes of parameters that have few values."""
        other = 0 if self.start.cache_capacity else _USUAL_CAPACITY
        return [*({"transport": name} for name in self._transports), {"cache_capacity": other}]

    # -- thresholds and cycle times -----------------------------------------------------

    @property
    def _range(self) -> tuple[float, float]:
        """The logarithms of the least and the most threshold that are worth a trial."""
        least = min(max(self.start.fusion_threshold, 2**12), _LEAST_BYTES)
        most = min(self.step_bytes or _MOST_BYTES, _MOST_BYTES)
        return math.log2(least), math.log2(max(most, least * _LEAST_RANGE))

    def _explore(self, number: int) -> Parameters:
        if number < len(_SPREAD):
            least, most = self._range
            nbytes = _rounded(2 ** (least + _SPREAD[number] * (most - least)))
            return self.start._replace(fusion_threshold=nbytes)
        proposed = self._suggest()
        # Sure of its optimum, the model would have it measured over and over.
        return self._fill_gap() if proposed in self._logs else proposed

    def _fill_gap(self) -> Parameters:
        """Return the middle of the widest range of thresholds that nobody has looked at."""
        tried = sorted({0.0, 1.0, *(self._to_unit(parameters)[1] for parameters in self._logs)})
        _, low, high = max((b - a, a, b) for a, b in pairwise(tried))
        cycle, _ = self._to_unit(self._leader())
        return self._from_unit(cycle, (low + high) / 2)

    def _suggest(self) -> Parameters:
        from bayes_opt import BayesianOptimization, acquisition
        from sklearn.gaussian_process.kernels import Matern

        class Coarse(acquisition.UpperConfidenceBound):
            """Skips the search around the best random points: values are rounded anyway."""

            def suggest(self, *args: Any, **options: Any) -> Any:
                options |= {"n_random": _POINTS, "n_smart": 0}
                return super().suggest(*args, **options)

        optimizer = BayesianOptimization(
            None,
            {"cycle": (0.0, 1.0), "threshold": (0.0, 1.0)},
            acquisition_function=Coarse(kappa=_KAPPA),
            random_state=self.samples,
            verbose=0,
            allow_duplicate_points=True,
        )
        # In the order of the names. The two may matter over quite different distances.
        kernel = Matern(nu=2.5, length_scale=(1.0, 0.3), length_scale_bounds=(0.1, 100.0))
        alpha = max((self._noise * _NOISE) ** 2, 1e-6)
        optimizer.set_gp_params(kernel=kernel, alpha=alpha, n_restarts_optimizer=2)
        points: defaultdict[tuple[float, float], list[float]] = defaultdict(list)
        for parameters, logs in self._logs.items():
            points[self._to_unit(parameters)] += logs
        for (cycle, threshold), logs in points.items():
            optimizer.register({"cycle": cycle, "threshold": threshold}, _mean(logs))
        point = optimizer.suggest()
        return self._from_unit(float(point["cycle"]), float(point["threshold"]))

    def _to_unit(self, parameters: Parameters) -> tuple[float, float]:
        threshold = math.log2(max(parameters.fusion_threshold, 1))
        cycle = math.log(max(parameters.cycle_time, 1e-9))
        low, high = map(math.log, _CYCLES)
        return _share(cycle, low, high), _share(threshold, *self._range)

    def _from_unit(self, cycle: float, threshold: float) -> Parameters:
        least, most = self._range
        low, high = map(math.log, _CYCLES)
        seconds = math.exp(low + cycle * (high - low))
        return self.start._replace(
            fusion_threshold=_rounded(2 ** (least + threshold * (most - least))),
            cycle_time=float(f"{seconds:.2g}"),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share(value: float, least: float, most: float) -> float:
    return min(max((value - least) / (most - least), 0.0), 1.0)


def _rounded(nbytes: float) -> int:
    """Return a number like 2**k or 3 * 2**k that is near."""
    unit = 1 << max(int(nbytes).bit_length() - 2, 0)
    return round(nbytes / unit) * unit
