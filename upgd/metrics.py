"""Metrics of a learner on a stream, and statistics over seeds.

Online metrics are means over a window, kept as a running sum. A window is one task long unless a
problem sets another length. Forgetting and loss of plasticity use windows of two tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Series = NDArray[np.float64]
FLOOR = 1e-8
PLASTICITY_FROM = 500_000
STRIDED = ("zero_activations", "gradient_l0", "gradient_l1", "gradient_l2")
"""What is measured at one of every `stride` steps."""
UTILITIES = tuple(f"utility_{k}_of_9" for k in range(1, 10))
"""Shares of weights whose scaled utility lies in each ninth of [0, 1]; ½ is in the middle one."""
DIAGNOSTICS = 2
"""The version of the definition of :data:`STRIDED`; raised whenever their values change.

Runs with a stride have it in their specification as the option ``diagnostics``. Since version 2,
zeros are pooled over the outputs of all layers, where the layers' shares were averaged, and a
random step of every `stride` is measured, where it was the first: a task's first sample always.
"""


# ------------------------------------------------------------------------- per sample
def sample_plasticity(before: ArrayLike, after: ArrayLike) -> Series:
    """``clip(1 - L(W†)/max(L(W), 1e-8), 0, 1)``: the progress of one update on its sample.

    Args:
        before: The sample's loss before the update.
        after: Its loss after the update.

    Example:
        >>> sample_plasticity([2.0, 1.0, 1.0], [0.5, 1.5, 0.0])
        array([0.75, 0.  , 1.  ])
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    return np.asarray(np.clip(1 - after / np.maximum(before, FLOOR), 0, 1))


@dataclass
class Meter:
    """Means over consecutive windows of `length` samples, of any number of metrics.

    A metric that is measured at a stride is averaged over its own samples; a window without any is
    NaN.

    Example:
        >>> meter = Meter(length=2)
        >>> for correct in (1, 0, 1, 1, 0):
        ...     _ = meter.add(accuracy=correct)
        >>> meter.series("accuracy")
        array([0.5, 1. ])
    """

    length: int
    count: int = 0
    windows: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    closed: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"Meter: a window has at least one sample, got {self.length}")

    def add(self, samples: int = 1, **values: float) -> bool:
        """Add sums over `samples` samples of one window; True if the window is full."""
        if self.count + samples > self.length:
            left = self.length - self.count
            raise ValueError(f"Meter: {samples} samples do not fit into the window's last {left}")
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
            self.counts[name] = self.counts.get(name, 0) + samples
        self.count += samples
        if self.count < self.length:
            return False
        self._close()
        return True

    def _close(self) -> None:
        for name in {**self.closed, **self.sums}:
            past = self.closed.setdefault(name, [float("nan")] * self.windows)
            counted = self.counts.get(name, 0)
            past.append(self.sums[name] / counted if counted else float("nan"))
        self.windows += 1
        self.count = 0
        self.sums.clear()
        self.counts.clear()

    def series(self, name: str) -> Series:
        """The means of the closed windows."""
        return np.array(self.closed.get(name, [float("nan")] * self.windows))


# --------------------------------------------------------------------------- per run
def rewindow(series: ArrayLike, factor: int = 2) -> Series:
    """Means of `factor` consecutive windows; drops an incomplete last one.

    Example:
        >>> rewindow([1.0, 2.0, 3.0, 5.0, 9.0])
        array([1.5, 4. ])
    """
    values = np.asarray(series, np.float64)
    whole = len(values) // factor * factor
    return np.asarray(values[:whole].reshape(-1, factor).mean(1))


def forgetting(accuracy: ArrayLike) -> float:
    """``A_1 - A_T`` over windows of two tasks, from the first sample; negative means learning.

    Args:
        accuracy: Online accuracy, a value per task.

    Example:
        >>> round(forgetting([0.2, 0.4, 0.5, 0.5, 0.7, 0.7]), 3)
        -0.4
    """
    return _first_minus_last(rewindow(accuracy), "forgetting")


def loss_of_plasticity(plasticity: ArrayLike, window: int) -> float:
    """``p̄_1 - p̄_T`` over windows of two tasks, from sample 0.5 M on.

    In runs of less than 1 M samples, from the middle of the run on.

    Args:
        plasticity: Mean sample plasticity, a value per task.
        window: The number of samples in a task.

    Example:
        >>> round(loss_of_plasticity([0.9, 0.9, 0.9, 0.9, 0.5, 0.5, 0.3, 0.3], 100), 3)
        0.2
    """
    values = np.asarray(plasticity, np.float64)
    start = min(PLASTICITY_FROM, len(values) * window // 2)
    first = -(-start // window)  # the first whole window after it
    return _first_minus_last(rewindow(values[first:]), "loss of plasticity")


def _first_minus_last(windows: Series, what: str) -> float:
    if len(windows) < 2:
        wrong = f"it takes two windows of two tasks each, found {len(windows)}"
        raise ValueError(f"{what}: the run is too short; {wrong}")
    return float(windows[0] - windows[-1])


# -------------------------------------------------------------------------- over seeds
class Interval(NamedTuple):
    """An estimate with a 95% interval; the bounds are NaN where there is none."""

    estimate: float
    low: float
    high: float


def standard_error(values: ArrayLike, axis: int = 0) -> Series:
    """The standard error of the mean over seeds."""
    array = np.asarray(values, np.float64)
    return np.asarray(array.std(axis, ddof=1) / np.sqrt(array.shape[axis]))


FEWEST = 3
"""The fewest seeds for an interval: that of two is six times as wide as their distance."""
INTERVAL = "Student's 95%"
"""The kind of every interval over seeds, as headers have it."""
LEVEL = 0.95
"""The coverage of intervals."""


@cache
def student(freedom: int, level: float = LEVEL) -> float:
    """Student's quantile: |t| stays below it with probability `level`.

    By bisection of the distribution's closed form for whole degrees of freedom.

    Example:
        >>> round(student(4), 4), round(student(19), 4)
        (2.7764, 2.093)
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The probability that Student's |t| is smaller."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def half_width(values: ArrayLike, axis: int = 0) -> Series:
    """Half of Student's 95% interval of the mean over seeds; NaN for fewer than :data:`FEWEST`.

    Example:
        >>> half_width([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]]).round(3)
        array([2.484, 0.   ])
    """
    array = np.asarray(values, np.float64)
    freedom = array.shape[axis] - 1
    if freedom + 1 < FEWEST:
        return np.full_like(array.sum(axis), np.nan)
    return np.asarray(student(freedom) * standard_error(array, axis))


def mean_interval(values: ArrayLike) -> Interval:
    """The mean over seeds with Student's 95% interval, of :data:`FEWEST` values or more.

    Example:
        >>> mean, low, high = mean_interval([1.0, 2.0, 3.0])
        >>> round(mean, 3), round(low, 3), round(high, 3)
        (2.0, -0.484, 4.484)
    """
    array = np.asarray(values, np.float64)
    mean, half = float(array.mean()), float(half_width(array))
    return Interval(mean, mean - half, mean + half)


def jackknife(statistic: Callable[[Series], float], rows: ArrayLike) -> Interval:
    """A smooth statistic of rows (one per seed) with a 95% interval: Student's of pseudo-values.

    NaN bounds for fewer than :data:`FEWEST` rows. Of a mean it is :func:`mean_interval`.

    Example:
        >>> jackknife(np.mean, [1.0, 2.0, 3.0]) == mean_interval([1.0, 2.0, 3.0])
        True
    """
    array = np.asarray(rows, np.float64)
    whole, count = float(statistic(array)), len(array)
    if count < FEWEST:
        return Interval(whole, math.nan, math.nan)
    without = np.array([statistic(np.delete(array, i, 0)) for i in range(count)])
    half = float(half_width(count * whole - (count - 1) * without))
    return Interval(whole, whole - half, whole + half)


def interquartile_mean(values: ArrayLike, axis: int = -1) -> Series:
    """The mean of the middle half; fractional quarters weight the values at the ends.

    Example:
        >>> float(interquartile_mean([0.0, 1.0, 2.0, 100.0]))
        1.5
    """
    ordered = np.sort(np.asarray(values, np.float64), axis=axis)
    ordered = np.moveaxis(ordered, axis, -1)
    n = ordered.shape[-1]
    edges = np.arange(n + 1)
    low, high = n / 4, 3 * n / 4
    weights = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None)
    return np.asarray((ordered * weights).sum(-1) / weights.sum())


def bootstrap(
    groups: Mapping[str, ArrayLike] | ArrayLike, resamples: int = 2000, seed: int = 0
) -> Interval:
    """The interquartile mean with a stratified 95% interval.

    `groups` are the values of all seeds; or, for several problems, values by problem: seeds are
    resampled within each problem, then pooled. The interval is Student's quantile times the
    bootstrap's standard error, not the bootstrap's percentiles: of five, ten and twenty normal
    values these cover 90%, 92% and 95%, and this interval 97%, 96% and 95%.

    Example:
        >>> interval = bootstrap([0.70, 0.71, 0.72, 0.73, 0.74, 0.75])
        >>> interval.low < interval.estimate < interval.high
        True
    """
    strata = list(groups.values()) if isinstance(groups, Mapping) else [groups]
    arrays = [np.asarray(values, np.float64).ravel() for values in strata]
    if not arrays or any(len(values) == 0 for values in arrays):
        raise ValueError("bootstrap: no values")
    generator = np.random.default_rng(seed)
    drawn = [v[generator.integers(len(v), size=(resamples, len(v)))] for v in arrays]
    means = interquartile_mean(np.concatenate(drawn, axis=1))
    estimate, count = float(interquartile_mean(np.concatenate(arrays))), sum(map(len, arrays))
    freedom = count - len(arrays)
    if count < FEWEST or freedom < 1:
        return Interval(estimate, math.nan, math.nan)
    half = student(freedom) * float(means.std(ddof=1)) * math.sqrt(count / freedom)
    return Interval(estimate, estimate - half, estimate + half)
