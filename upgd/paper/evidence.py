"""Statistics of runs with intervals over seeds, and judgements of them.

Definitions, in units of accuracy unless said otherwise:

* a *change* is the mean of the last 20 tasks minus that of tasks 11 to 30; with fewer than 50
  tasks, the last quarter minus the second. Where learning takes longer than ten tasks the early
  part lies on the rise, so a plateau looks like an improvement. Therefore the *late change*, the
  last 20 tasks minus the 20 around the middle of the run, is judged beside it;
* an arm *keeps improving* if the 95% intervals of both lie above 0; *decays* if that of its change
  lies below 0; *maintains* its level if its late change lies within ±1 point and its change is not
  below −1 point;
* an arm is *competitive* if it is less than 1 point behind the best other arm, seed by seed, in
  mean accuracy over the run, and *beats* another if the interval of its lead lies above 0;
* a seed that diverged has lost: an arm that has one does not maintain, improve, compete or beat
  another. It is beaten if at least half of its seeds diverged, and otherwise by its other seeds.
  Everything else uses the other seeds.

Intervals hold for the seeds at hand (``tests/test_intervals.py`` measures it): Student's for means
and differences; the jackknife's with Student's quantile for what is computed from means of all
methods, as a correlation; for ranks, Student's of all differences at once.

A statement is open if there are no runs, fewer than three seeds, runs shorter than half of the
paper's, or an interval that is too wide. Statistics are shown in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import (
    FEWEST,
    LEVEL,
    STRIDED,
    Interval,
    forgetting,
    jackknife,
    loss_of_plasticity,
    mean_interval,
    standard_error,
    student,
)
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.results import Results
from upgd.paper.sets import METHODS
from upgd.paper.verdicts import NO, NOTHING, SCALES, UNKNOWN, YES, Verdict
from upgd.report.verdict import HOLDS, Parts

Array = NDArray[np.float64]
All = Mapping[str, Results]
Judge = Callable[[float], Verdict]
"""A judgement that depends on a threshold."""

LAST = 20
"""Tasks at the end of a run that are compared."""
LONG_ENOUGH = 0.5
"""The least fraction of the paper's length for a verdict."""


# ------------------------------------------------------------------------------- extent
def length(results: Results) -> float:
    """The length of runs as a fraction of the paper's."""
    arms = (curves for by_arm in results.series.values() for curves in by_arm.values())
    windows = max((len(curve) for curves in arms for curve in curves.values()), default=0)
    return windows * results.window / EXPERIMENTS[results.name].steps


def extent(some: Sequence[Results], metrics: Sequence[str] = ()) -> str:
    """The length of runs and the number of seeds (that have all `metrics`), as text."""
    counts = []
    for each in some:
        asked = metrics or set(each.series) - set(STRIDED)
        which = min if metrics else max
        counts += [which(len(each.of(arm, metric)) for metric in asked) for arm in each.arms]
    return how_much([length(each) for each in some], counts) if any(counts) else NOTHING


def how_much(lengths: Sequence[float], seeds: Sequence[int]) -> str:
    """The same from fractions of the paper's length and numbers of seeds."""
    steps = "all steps" if min(lengths) > 0.99 else f"{_range(lengths)} of the steps"
    some = "" if max(lengths) < LONG_ENOUGH else "some "
    short = f" ({some}too short)" if min(lengths) < LONG_ENOUGH else ""
    few = " (too few)" if min(seeds) < FEWEST else ""
    return f"{steps}{short}, {_range(seeds)} seed{'s' if max(seeds) > 1 else ''}{few}"


def _range(values: Sequence[float]) -> str:
    first, last = f"{min(values):.2g}", f"{max(values):.2g}"
    return first if first == last else f"{first} to {last}"


# --------------------------------------------------------------------------- judgements
def above(found: Interval | None, threshold: float = 0.0) -> Verdict:
    """Whether a statistic is larger than a threshold."""
    return _judge(found, lambda x: x.low > threshold, lambda x: x.high <= threshold)


def below(found: Interval | None, threshold: float = 0.0) -> Verdict:
    """Whether a statistic is smaller than a threshold."""
    return _judge(found, lambda x: x.high < threshold, lambda x: x.low >= threshold)


def within(found: Interval | None, margin: float = HOLDS) -> Verdict:
    """Whether a statistic is nearly zero."""
    return _judge(
        found,
        lambda x: x.low > -margin and x.high < margin,
        lambda x: x.low >= margin or x.high <= -margin,
    )


def rising(found: Interval | None, margin: float = HOLDS) -> Verdict:
    """Whether a statistic is above 0; no if its interval reaches 0 and ends below `margin`."""
    return _judge(found, lambda x: x.low > 0, lambda x: x.low <= 0 and x.high < margin)


def falling(found: Interval | None, margin: float = HOLDS) -> Verdict:
    """Whether a statistic is below zero; the mirror image of :func:`rising`."""
    return _judge(found, lambda x: x.high < 0, lambda x: x.high >= 0 and x.low > -margin)


def _judge(
    found: Interval | None, yes: Callable[[Interval], bool], no: Callable[[Interval], bool]
) -> Verdict:
    if found is None or math.isnan(found.low):
        return UNKNOWN
    return YES if yes(found) else NO if no(found) else UNKNOWN


def scaled(judge: Judge, threshold: float) -> tuple[Verdict, Verdict]:
    """The verdicts under half and twice a threshold."""
    half, twice = (judge(scale * threshold) for scale in SCALES)
    return half, twice


def opposite(verdict: Verdict) -> Verdict:
    """The verdict of the negated statement."""
    return {YES: NO, NO: YES}.get(verdict, UNKNOWN)


# --------------------------------------------------------------------------- statistics
def parts(tasks: int) -> Parts | None:
    """The tasks that a change compares; None if there are too few."""
    if tasks >= 50:
        return Parts(range(10, 30), range(tasks - LAST, tasks))
    return Parts.of(tasks) if tasks >= 4 else None


def late_parts(tasks: int) -> Parts | None:
    """The tasks that a late change compares: the middle of the run and its end."""
    size = LAST if tasks >= 50 else tasks // 4
    start = (tasks - size) // 2
    return Parts(range(start, start + size), range(tasks - size, tasks)) if size else None


def change(
    results: Results | None, arm: str, metric: str = "accuracy", *, late: bool = False
) -> Interval | None:
    """An arm's change over the run, or over its second half."""
    return over_seeds(results, arm, metric, partial(_change, late=late))


def _change(curve: Array, late: bool = False, relative: bool = False) -> float:
    chosen = (late_parts if late else parts)(len(curve))
    if chosen is None:
        return float("nan")
    before, after = (float(np.nanmean(curve[r.start : r.stop])) for r in chosen)
    return (after - before) / (before if relative else 1.0)


def mean_over(results: Results | None, arm: str, metric: str, tasks: range) -> Interval | None:
    """The mean of some tasks."""
    part = slice(tasks.start, tasks.stop)
    return over_seeds(results, arm, metric, lambda curve: float(np.nanmean(curve[part])))


def forgotten(results: Results | None, arm: str) -> Interval | None:
    """Forgetting; None if the runs are too short."""
    with suppress(ValueError):
        return over_seeds(results, arm, "accuracy", forgetting)
    return None


def plasticity_lost(results: Results | None, arm: str) -> Interval | None:
    """Loss of plasticity; None if the runs are too short."""
    with suppress(ValueError):
        window = results.task_window if results else 0
        return over_seeds(results, arm, "plasticity", partial(loss_of_plasticity, window=window))
    return None


def relative_change(
    results: Results | None, arm: str, metric: str, *, late: bool = False
) -> Interval | None:
    """The change as a fraction of the earlier value."""
    return over_seeds(results, arm, metric, partial(_change, late=late, relative=True))


def top(results: Results | None, arm: str, metric: str = "accuracy") -> Interval | None:
    """The highest level that an arm reaches: the mean of its best :data:`LAST` tasks.

    A curve's own maximum is biased upwards by its noise, so each seed is measured where the other
    seeds have their best tasks.
    """
    curves = [] if results is None else list(results.by_task(arm, metric).values())
    if len(curves) < FEWEST:
        return None
    size = min(LAST, *(map(len, curves)))
    return jackknife(_tops, np.stack([_smooth(x, size) for x in curves]))


def _tops(rows: Array) -> float:
    best = (rows.sum(0) - rows).argmax(1)
    return float(rows[np.arange(len(rows)), best].mean())


def _smooth(curve: Array, size: int) -> Array:
    return np.convolve(curve, np.ones(size) / size, "valid")


def lead(
    results: Results | None,
    arm: str,
    other: str,
    metric: str = "accuracy",
    tasks: slice = slice(None),
) -> Interval | None:
    """An arm's mean over the run, or over some tasks, minus another's, seed by seed."""
    if results is None:
        return None
    mine, theirs = (results.by_task(each, metric) for each in (arm, other))
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return None
    pairs = ((mine[s][tasks], theirs[s][tasks]) for s in common)
    return mean_interval([float(np.nanmean(a) - np.nanmean(b)) for a, b in pairs])


def leads(results: Results | None, arm: str, others: Sequence[str]) -> list[Interval]:
    """The leads over the others, the smallest first; none unless all have results or have lost."""
    rivals = [other for other in others if other != arm and not has_lost(results, other)]
    found = [lead(results, arm, other, "accuracy") for other in rivals]
    known = [each for each in found if each is not None]
    return sorted(known, key=lambda each: each.estimate) if len(known) == len(found) else []


def over_seeds(
    results: Results | None, arm: str, metric: str, statistic: Callable[[Array], float]
) -> Interval | None:
    """A statistic of an arm's curve over tasks; None if a run is too short for it."""
    if results is None or not results.of(arm, metric):
        return None
    values = [statistic(curve) for curve in results.by_task(arm, metric).values()]
    return None if np.isnan(values).any() else mean_interval(values)


Values = Mapping[str, Mapping[int, float]]
"""By method and seed."""


def together(statistic: Callable[[Array], float], *values: Values) -> Interval | None:
    """A statistic of all methods' means with the jackknife's interval over seeds that all have.

    `statistic` takes an array [value, method] of means, a row for each of `values`.
    """
    seeds = seeds_of_all(*values)
    if not seeds:
        return None
    rows = np.array([[[x[seed] for x in some.values()] for some in values] for seed in seeds])
    return jackknife(lambda chosen: statistic(chosen.mean(0)), rows)


def middle(values: Values) -> Interval | None:
    """The median over methods, seed by seed: it is negative if the majority is."""
    rows = [[by_seed[seed] for by_seed in values.values()] for seed in seeds_of_all(values)]
    return mean_interval(np.median(rows, axis=1)) if rows else None


def seeds_of_all(*values: Values) -> list[int]:
    """The seeds that all methods have."""
    seeds = [set(by_seed) for some in values for by_seed in some.values()]
    return sorted(set.intersection(*seeds)) if seeds and all(values) else []


def rank(values: Values, arm: str) -> Interval | None:
    """An arm's rank by its mean, the lowest is 1, with the ranks that differences leave possible.

    Seed by seed, another method is surely lower (or higher) if Student's interval of the difference
    excludes 0. Its level is such that all are right at once in 95% of cases (Bonferroni's; each can
    be wrong on one side only).
    """
    if arm not in values or len(values) < 2:
        return None
    level, means = 1 - 2 * (1 - LEVEL) / (len(values) - 1), {}
    lower = higher = 0
    for other in (name for name in values if name != arm):
        common = sorted(values[arm].keys() & values[other].keys())
        less = np.array([values[other][seed] - values[arm][seed] for seed in common])
        if not common:
            return None
        means[other] = float(less.mean())
        if len(common) >= FEWEST:
            half = student(len(common) - 1, level) * float(standard_error(less))
            lower, higher = lower + (means[other] < -half), higher + (means[other] > half)
    place = 1.0 + sum(mean < 0 for mean in means.values())
    if min(map(len, values.values())) < FEWEST:
        return Interval(place, math.nan, math.nan)
    return Interval(place, 1.0 + lower, float(len(values) - higher))


def means_of_all(
    results: Results | None, metric: str, statistic: Callable[[Array], float]
) -> dict[str, dict[int, float]]:
    """A statistic by learner and seed; empty unless all that have not lost have it."""
    if results is None:
        return {}
    there = {m: results.of(m, metric) for m in learners(results.name) if not has_lost(results, m)}
    if not all(there.values()):
        return {}
    return {m: {seed: statistic(x) for seed, x in curves.items()} for m, curves in there.items()}


def learners(name: str) -> tuple[str, ...]:
    """The paper's methods, each learner once: without noise, N-UPGD-W is SGDW."""
    hyper = {arm.name: arm.hyper for arm in EXPERIMENTS[name].arms}
    mine, theirs = hyper.get("n-upgd", {}), hyper.get("sgdw", {})
    same = mine.get("sigma") == 0 and all(mine.get(key) == theirs[key] for key in theirs)
    return tuple(method for method in METHODS if not (same and method == "n-upgd"))


# ------------------------------------------------------------------------------ divergence
def diverged(results: Results | None, arm: str) -> tuple[int, int]:
    """The numbers of an arm's diverged seeds and of all its seeds."""
    if results is None:
        return 0, 0
    gone = set(results.diverged.get(arm, ()))
    there = {seed for by_arm in results.series.values() for seed in by_arm.get(arm, {})}
    return len(gone), len(gone | there)


def has_lost(results: Results | None, arm: str) -> bool:
    """Whether at least half of an arm's seeds diverged."""
    gone, all_ = diverged(results, arm)
    return all_ >= FEWEST and 2 * gone >= all_
