"""What results say: scores by learner and seed at equal numbers of samples, intervals, leads."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prequential.learners import LEARNERS
from prequential.runs import Result, Run
from prequential.streams import STREAMS

DRAWS = 10_000
ENOUGH = 3
"""Seeds with which a longer run replaces a shorter one in comparisons."""
Interval = tuple[float, float]
Scores = dict[int, float]


@dataclass(frozen=True)
class Evidence:
    """The results of the streams, for networks of one size."""

    results: Mapping[Run, Result]

    @staticmethod
    def of(results: Mapping[Run, Result], hidden: tuple[int, ...]) -> Evidence:
        return Evidence({run: r for run, r in results.items() if run.hidden in ((), hidden)})

    @functools.cached_property
    def streams(self) -> list[str]:
        """Those with results, in the order of the table of streams."""
        found = {run.stream for run in self.results}
        return [name for name in STREAMS if name in found]

    def learners(self, stream: str) -> list[str]:
        found = {run.learner for run in self.results if run.stream == stream}
        return [name for name in LEARNERS if name in found]

    def lengths(self, stream: str, learner: str) -> dict[int, list[int]]:
        """Seeds by the number of samples of their runs."""
        found: dict[int, list[int]] = {}
        for run in sorted(self.results):
            if (run.stream, run.learner) == (stream, learner):
                found.setdefault(run.samples, []).append(run.seed)
        return found

    def reach(self, stream: str, learner: str) -> int:
        """The most samples with enough seeds, or with as many as there are."""
        lengths = self.lengths(stream, learner)
        most = max(map(len, lengths.values()))
        return max(n for n, seeds in lengths.items() if len(seeds) >= min(ENOUGH, most))

    def scores(self, stream: str, learner: str, samples: int) -> Scores:
        """Accuracy, or R², over the first `samples`, by seed; NaN of a run that diverged."""
        found: Scores = {}
        for run, result in self.results.items():
            if (run.stream, run.learner) == (stream, learner) and run.samples >= samples:
                found[run.seed] = score_at(run, result, samples)
        return dict(sorted(found.items()))

    def common_seeds(self, stream: str, samples: int) -> set[int] | None:
        """Seeds that all learners of a stream have; None for a file, where seeds are their own."""
        if STREAMS[stream].fixed:
            return None
        sets = [self.scores(stream, name, samples).keys() for name in self.learners(stream)]
        return set.intersection(*map(set, sets))

    def mean(self, stream: str, learner: str, samples: int, seeds: set[int] | None = None) -> float:
        """Over all seeds of a learner, or over `seeds`."""
        scores = self.scores(stream, learner, samples)
        chosen = [score for seed, score in scores.items() if seeds is None or seed in seeds]
        return float(np.mean(chosen)) if chosen else math.nan

    def best(
        self, stream: str, family: str, samples: int, seeds: set[int] | None = None
    ) -> list[str]:
        """The learners of a family by their means, best first."""
        known = [
            name
            for name in self.learners(stream)
            if LEARNERS[name].family == family and self.reach(stream, name) >= samples
        ]
        means = {name: self.mean(stream, name, samples, seeds) for name in known}
        ranked = sorted(known, key=lambda n: -math.inf if math.isnan(means[n]) else means[n])
        return ranked[::-1]

    def can_compare(self, stream: str, learner: str, rival: str) -> bool:
        """Whether both have seen the same samples: a file, or a seed in common."""
        samples = min(self.reach(stream, learner), self.reach(stream, rival))
        a, b = (self.scores(stream, name, samples) for name in (learner, rival))
        return STREAMS[stream].fixed or bool(a.keys() & b.keys())

    def lead(self, stream: str, learner: str, rival: str) -> tuple[float, Interval | None, int]:
        """How much higher the mean of `learner` is, its interval, and at how many samples.

        Paired by seed where a seed decides the samples; else the two are resampled apart.
        """
        samples = min(self.reach(stream, learner), self.reach(stream, rival))
        a, b = (self.scores(stream, name, samples) for name in (learner, rival))
        if not STREAMS[stream].fixed:
            common = sorted(a.keys() & b.keys())
            pairs = np.array([a[seed] - b[seed] for seed in common])
            return _mean(pairs), interval(pairs), samples
        first, second = np.array(list(a.values())), np.array(list(b.values()))
        difference = _mean(first) - _mean(second)
        if len(first) < 2 and len(second) < 2:
            return difference, None, samples
        drawn = resampled(first, 0) - resampled(second, 1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return difference, (float(low), float(high)), samples


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def score_at(run: Run, result: Result, samples: int) -> float:
    """Of the first `samples`, which are whole windows or all of a run."""
    kind = STREAMS[run.stream]
    if result.scores is None:
        return math.nan
    if samples == run.samples:
        return result.scores["accuracy" if kind.classes else "r2"]
    windows = samples // kind.window
    if kind.classes:
        return float(sum(result.windows[:windows]) / (windows * kind.window))
    squared, reference = (
        sum(pair[0] for pair in rows[:windows]) for rows in (result.windows, result.reference)
    )
    return 1 - squared / reference


def resampled(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Means of as many values drawn from `values` with replacement."""
    chosen = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    return np.asarray(values[chosen].mean(1))


def interval(values: NDArray[np.float64]) -> Interval | None:
    """95% bootstrap interval of the mean; None for fewer than two values."""
    if len(values) < 2 or not np.isfinite(values).all():
        return None
    low, high = np.quantile(resampled(values, 0), [0.025, 0.975])
    return float(low), float(high)


def verdict(lead: float, between: Interval | None, diverged: bool) -> str:
    """Whether a learner is ahead of its rival; `diverged`: the learner itself did."""
    if math.isnan(lead):
        return "behind" if diverged else "ahead"
    low, high = between or (lead, lead)
    return "ahead" if low > 0 else "behind" if high < 0 else "level"
