"""Statistics of runs with intervals over seeds, and the verdicts that follow from them.

Thresholds are fixed here, not fitted to results. Definitions, in units of accuracy unless said
otherwise:

* a *change* is the mean of the last 20 tasks less that of tasks 11 to 30; of fewer than 50 tasks,
  of the last quarter less the second;
* an arm *improves* (*decays*) if the 95% interval of its change lies above (below) 0, and *holds*
  if it lies within ±1 point;
* an arm is *competitive* if it is less than 1 point behind the best other arm, seed by seed, in
  mean accuracy over the run.

A statement holds, does not hold, or there is not enough data: no runs, a single seed, or an
interval too wide to tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import Interval, forgetting, loss_of_plasticity
from upgd.paper.experiments import EXPERIMENTS, title
from upgd.paper.results import Results
from upgd.paper.sets import METHODS
from upgd.report.verdict import HOLDS, Parts, interval

Array = NDArray[np.float64]
All = Mapping[str, Results]
Verdict = Literal["holds", "does not hold", "not enough data"]
YES: Verdict = "holds"
NO: Verdict = "does not hold"
UNKNOWN: Verdict = "not enough data"

MOST = 6
"""Of ten methods."""
RESAMPLES = 2000


class Finding(NamedTuple):
    """A statement, its statistic and the verdict."""

    statement: str
    found: Interval | None
    verdict: Verdict
    points: bool = True

    def __str__(self) -> str:
        return f"{self.statement}: {shown(self)}, {self.verdict}"


def shown(finding: Finding) -> str:
    """A statistic with its interval, for people.

    Example:
        >>> shown(Finding("UPGD-W holds", Interval(-0.001, -0.002, 0.0), YES))
        '−0.1 points [−0.2, 0.0]'
    """
    if finding.found is None:
        return "-"
    factor, digits, unit = (100, 1, " points") if finding.points else (1, 2, "")
    value, low, high = (_number(factor * x, digits) for x in finding.found)
    return f"{value}{unit} [{low}, {high}]"


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """What a claim is worth: one statement that does not hold decides, then one that is open.

    Example:
        >>> worst([YES, UNKNOWN]), worst([YES, UNKNOWN, NO]), worst([])
        ('not enough data', 'does not hold', 'not enough data')
    """
    found = list(verdicts)
    if NO in found:
        return NO
    return UNKNOWN if UNKNOWN in found or not found else YES


# --------------------------------------------------------------------------- judgements
def above(found: Interval | None, threshold: float = 0.0) -> Verdict:
    """Whether a statistic is larger than a threshold."""
    return _judge(found, lambda x: x.low > threshold, lambda x: x.high <= threshold)


def below(found: Interval | None, threshold: float = 0.0) -> Verdict:
    """Whether it is smaller."""
    return _judge(found, lambda x: x.high < threshold, lambda x: x.low >= threshold)


def within(found: Interval | None, margin: float = HOLDS) -> Verdict:
    """Whether it is nearly zero."""
    return _judge(
        found,
        lambda x: x.low > -margin and x.high < margin,
        lambda x: x.low >= margin or x.high <= -margin,
    )


def rising(found: Interval | None, margin: float = HOLDS) -> Verdict:
    """Whether it is above zero; if it is hardly, by an interval that reaches zero, it is not."""
    return _judge(found, lambda x: x.low > 0, lambda x: x.low <= 0 and x.high < margin)


def falling(found: Interval | None, margin: float = HOLDS) -> Verdict:
    """The same below zero."""
    return _judge(found, lambda x: x.high < 0, lambda x: x.high >= 0 and x.low > -margin)


def _judge(
    found: Interval | None, yes: Callable[[Interval], bool], no: Callable[[Interval], bool]
) -> Verdict:
    if found is None or math.isnan(found.low):
        return UNKNOWN
    return YES if yes(found) else NO if no(found) else UNKNOWN


def opposite(verdict: Verdict) -> Verdict:
    """That a statement does not hold."""
    return {YES: NO, NO: YES}.get(verdict, UNKNOWN)


# --------------------------------------------------------------------------- statistics
def parts(tasks: int) -> Parts | None:
    """Which tasks a change compares; None if there are too few."""
    if tasks >= 50:
        return Parts(range(10, 30), range(tasks - 20, tasks))
    return Parts.of(tasks) if tasks >= 4 else None


def change(results: Results | None, arm: str, metric: str = "accuracy") -> Interval | None:
    """An arm's change over the run."""
    return over_seeds(results, arm, metric, _change)


def _change(curve: Array) -> float:
    chosen = parts(len(curve))
    if chosen is None:
        return float("nan")
    early, late = (curve[r.start : r.stop] for r in chosen)
    return float(np.nanmean(late) - np.nanmean(early))


def mean_over(results: Results | None, arm: str, metric: str, tasks: range) -> Interval | None:
    """The mean of some tasks."""
    part = slice(tasks.start, tasks.stop)
    return over_seeds(results, arm, metric, lambda curve: float(np.nanmean(curve[part])))


def forgotten(results: Results | None, arm: str) -> Interval | None:
    """Forgetting; None if the runs are too short."""
    try:
        return over_seeds(results, arm, "accuracy", forgetting)
    except ValueError:
        return None


def plasticity_lost(results: Results | None, arm: str) -> Interval | None:
    """Loss of plasticity; None if the runs are too short."""
    if results is None:
        return None
    lost = partial(loss_of_plasticity, window=results.task_window)
    try:
        return over_seeds(results, arm, "plasticity", lost)
    except ValueError:
        return None


def relative_change(results: Results | None, arm: str, metric: str) -> Interval | None:
    """The same as a share of what it was."""

    def share(curve: Array) -> float:
        chosen = parts(len(curve))
        return (
            float("nan")
            if chosen is None
            else _change(curve) / float(np.mean(curve[chosen.early.start : chosen.early.stop]))
        )

    return over_seeds(results, arm, metric, share)


def lead(
    results: Results | None, arm: str, other: str, metric: str = "accuracy"
) -> Interval | None:
    """An arm's mean over the run less another's, seed by seed."""
    if results is None:
        return None
    mine, theirs = results.of(arm, metric), results.of(other, metric)
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return None
    return interval([float(np.nanmean(mine[s]) - np.nanmean(theirs[s])) for s in common])


def smallest_lead(
    results: Results | None, arm: str, others: Sequence[str], metric: str = "accuracy"
) -> Interval | None:
    """The lead over the best of others; None unless all are there."""
    leads = [lead(results, arm, other, metric) for other in others if other != arm]
    if not leads or any(found is None for found in leads):
        return None
    return min((found for found in leads if found is not None), key=lambda found: found.estimate)


def over_seeds(
    results: Results | None, arm: str, metric: str, statistic: Callable[[Array], float]
) -> Interval | None:
    """A statistic of an arm's curve over tasks; None if a run is too short for it."""
    if results is None or not results.of(arm, metric):
        return None
    values = [statistic(curve) for curve in results.by_task(arm, metric).values()]
    return None if np.isnan(values).any() else interval(values)


def resampled(
    curves: Mapping[str, Mapping[int, float]], statistic: Callable[[Array], float]
) -> Interval | None:
    """A statistic of all arms' means, with a bootstrap interval over the seeds they share.

    Args:
        curves: By arm and seed, a number.
        statistic: Takes the means, in the order of the arms.
    """
    if not curves:
        return None
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in curves.values())))
    if not seeds:
        return None
    table = np.array([[by_seed[s] for s in seeds] for by_seed in curves.values()])
    if len(seeds) == 1:
        return Interval(statistic(table.mean(1)), float("nan"), float("nan"))
    rng = np.random.default_rng(0)
    draws = rng.integers(len(seeds), size=(RESAMPLES, len(seeds)))
    values = [statistic(table[:, draw].mean(1)) for draw in draws]
    low, high = np.percentile(values, (2.5, 97.5))
    return Interval(statistic(table.mean(1)), float(low), float(high))


def means_of_all(
    results: Results | None, metric: str, statistic: Callable[[Array], float]
) -> dict[str, dict[int, float]]:
    """By method of the paper and seed, a statistic; empty unless all methods have it."""
    if results is None or not all(results.of(method, metric) for method in METHODS):
        return {}
    return {
        method: {seed: statistic(curve) for seed, curve in results.of(method, metric).items()}
        for method in METHODS
    }


# ----------------------------------------------------------------------------- statements
def improves(results: Results | None, arm: str) -> Finding:
    """That an arm improves."""
    found = change(results, arm)
    return Finding(f"{named(arm)} improves", found, rising(found))


def decays(results: Results | None, arm: str) -> Finding:
    """That it decays."""
    found = change(results, arm)
    return Finding(f"{named(arm)} decays", found, falling(found))


def holds(results: Results | None, arm: str) -> Finding:
    """That it holds."""
    found = change(results, arm)
    return Finding(f"{named(arm)} holds", found, within(found))


def competitive(results: Results | None, arm: str = "upgd") -> Finding:
    """That no method is a point ahead of it."""
    found = smallest_lead(results, arm, METHODS)
    text = f"{named(arm)} surpasses or is competitive with every method"
    return Finding(text, found, above(found, -HOLDS))


def beats(results: Results | None, arm: str, other: str, metric: str = "accuracy") -> Finding:
    """That it has the higher accuracy, or the lower loss, over the run."""
    found = lead(results, arm, other, metric)
    judged = above(found) if metric == "accuracy" else below(found)
    return Finding(f"{named(arm)} beats {named(other)}", found, judged, metric == "accuracy")


def named(arm: str) -> str:
    """What figures call an arm."""
    for experiment in EXPERIMENTS.values():
        for each in experiment.arms:
            if each.name == arm:
                return each.title
    return title(arm) if arm in METHODS else arm


def most(
    statement: str, findings: Sequence[Interval | None], judge: Callable[..., Verdict]
) -> Finding:
    """That at least :data:`MOST` of ten intervals are judged to be so."""
    verdicts = [judge(found) for found in findings]
    sure, open_ = verdicts.count(YES), verdicts.count(UNKNOWN)
    verdict = YES if sure >= MOST else NO if sure + open_ < MOST else UNKNOWN
    known = (
        Interval(float(sure), float(sure), float(sure + open_)) if open_ < len(verdicts) else None
    )
    return Finding(f"{statement} (methods, of {len(verdicts)})", known, verdict, points=False)
