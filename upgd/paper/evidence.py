"""Statistics of runs with intervals over seeds, and verdicts.

Thresholds are fixed here, not fitted to results. Definitions, in units of accuracy unless said
otherwise:

* a *change* is the mean of the last 20 tasks minus that of tasks 11 to 30; with fewer than 50
  tasks, the last quarter minus the second;
* an arm *improves* (*decays*) if the 95% interval of its change lies above (below) 0, and *holds*
  if it lies within ±1 point;
* an arm is *competitive* if it is less than 1 point behind the best other arm, seed by seed, in
  mean accuracy over the run, and *beats* another if the interval of its lead lies above 0;
* a seed that diverged has lost: an arm that has one does not hold, improve, compete or beat
  another. It is beaten if at least half of its seeds diverged, and otherwise by its other seeds.
  Everything else uses the other seeds.

A statement holds, does not hold, or there is not enough data: no runs, fewer than three seeds
(five where seeds are resampled), runs shorter than half of the paper's, or an interval that is too
wide. Statistics are shown in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import FEWEST, Interval, forgetting, loss_of_plasticity, mean_interval
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.results import Results
from upgd.paper.sets import METHODS
from upgd.report.verdict import HOLDS, Parts

Array = NDArray[np.float64]
All = Mapping[str, Results]
Verdict = Literal["holds", "does not hold", "not enough data", "not judged"]
Unit = Literal[" points", "%", ""]
YES: Verdict = "holds"
NO: Verdict = "does not hold"
UNKNOWN: Verdict = "not enough data"
TOLD: Verdict = "not judged"
"""The verdict of a statement that is shown but not judged."""
POINTS: Unit = " points"
PERCENT: Unit = "%"
PLAIN: Unit = ""

MOST = 6
"""Of ten methods."""
RESAMPLES = 2000
FEWEST_RESAMPLED = 5
"""The fewest seeds that are resampled: fewer give too few distinct resamples."""
NOTHING = "-"
"""The amount of data where there is none."""
LAST = 20
"""Tasks at the end of a run that are compared."""
LONG_ENOUGH = 0.5
"""The least fraction of the paper's length for a verdict."""


class Finding(NamedTuple):
    """A statement, its statistic and the verdict."""

    statement: str
    found: Interval | None
    verdict: Verdict
    unit: Unit = POINTS

    def __str__(self) -> str:
        return f"{self.statement}: {shown(self)}, {self.verdict}"


def shown(finding: Finding) -> str:
    """A statistic with its interval, as text."""
    if finding.found is None:
        return "-"
    value, low, high = (_number(x, finding.unit) for x in finding.found)
    return f"{value}{finding.unit}" + ("" if math.isnan(finding.found.low) else f" [{low}, {high}]")


def _number(value: float, unit: Unit) -> str:
    text = f"{value:.3g}" if unit == PLAIN else f"{round(100 * value, 1) + 0.0:.1f}"
    return text.replace("-", "−")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of a claim: "does not hold" if any statement does not, then "not enough data"."""
    found = [verdict for verdict in verdicts if verdict != TOLD]
    if NO in found:
        return NO
    return UNKNOWN if UNKNOWN in found or not found else YES


# ------------------------------------------------------------------------------- extent
def length(results: Results) -> float:
    """The length of runs as a fraction of the paper's."""
    arms = (curves for by_arm in results.series.values() for curves in by_arm.values())
    windows = max((len(curve) for curves in arms for curve in curves.values()), default=0)
    return windows * results.window / EXPERIMENTS[results.name].steps


def extent(some: Sequence[Results], metrics: Sequence[str] = ()) -> str:
    """The length of runs and the number of seeds (that have all `metrics`), as text."""
    arms = [(each, arm) for each in some for arm in each.arms]
    which = min if metrics else max
    counts = [which(len(e.of(arm, metric)) for metric in metrics or e.series) for e, arm in arms]
    return how_much([length(each) for each in some], counts) if any(counts) else NOTHING


def how_much(lengths: Sequence[float], seeds: Sequence[int]) -> str:
    """The same from fractions of the paper's length and numbers of seeds."""
    steps = "all steps" if min(lengths) > 0.99 else f"{_range(lengths)} of the steps"
    short = " (too short)" if min(lengths) < LONG_ENOUGH else ""
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


def opposite(verdict: Verdict) -> Verdict:
    """The verdict of the negated statement."""
    return {YES: NO, NO: YES}.get(verdict, UNKNOWN)


# --------------------------------------------------------------------------- statistics
def parts(tasks: int) -> Parts | None:
    """The tasks that a change compares; None if there are too few."""
    if tasks >= 50:
        return Parts(range(10, 30), range(tasks - LAST, tasks))
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
    with suppress(ValueError):
        return over_seeds(results, arm, "accuracy", forgetting)
    return None


def plasticity_lost(results: Results | None, arm: str) -> Interval | None:
    """Loss of plasticity; None if the runs are too short."""
    with suppress(ValueError):
        window = results.task_window if results else 0
        return over_seeds(results, arm, "plasticity", partial(loss_of_plasticity, window=window))
    return None


def relative_change(results: Results | None, arm: str, metric: str) -> Interval | None:
    """The change as a fraction of the early value."""

    def share(curve: Array) -> float:
        chosen = parts(len(curve))
        early = curve[chosen.early.start : chosen.early.stop] if chosen else curve
        return _change(curve) / float(np.mean(early))

    return over_seeds(results, arm, metric, share)


def lead(
    results: Results | None, arm: str, other: str, metric: str = "accuracy", last: int = 0
) -> Interval | None:
    """An arm's mean over the run, or its last tasks, minus another's, seed by seed."""
    if results is None:
        return None
    mine, theirs = (results.by_task(each, metric) for each in (arm, other))
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return None
    pairs = ((mine[s][-last:], theirs[s][-last:]) for s in common)  # [-0:] is all
    return mean_interval([float(np.nanmean(a) - np.nanmean(b)) for a, b in pairs])


def smallest_lead(results: Results | None, arm: str, others: Sequence[str]) -> Interval | None:
    """The lead over the best of the others; None unless all have results or have lost."""
    rivals = [other for other in others if other != arm and not has_lost(results, other)]
    leads = [lead(results, arm, other, "accuracy") for other in rivals]
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
    return None if np.isnan(values).any() else mean_interval(values)


def resampled(
    values: Mapping[str, Mapping[int, Any]],
    statistic: Callable[[Array], float],
    arms_too: bool = False,
) -> Interval | None:
    """A statistic of all arms' means, with a bootstrap interval over the seeds they share.

    Values are by arm and seed, a number or several. With `arms_too` arms are resampled as well, as
    a sample of all methods.
    """
    common = sorted(set.intersection(*map(set, values.values()))) if values else []
    if not common:
        return None
    table = np.array([[by_seed[s] for s in common] for by_seed in values.values()])
    estimate = statistic(table.mean(1))
    if len(common) < FEWEST_RESAMPLED:
        return Interval(estimate, math.nan, math.nan)
    rng = np.random.default_rng(0)
    arms, count = len(table), len(common)
    found = []
    for seeds in rng.integers(count, size=(RESAMPLES, count)):
        chosen = rng.integers(arms, size=arms) if arms_too else np.arange(arms)
        found.append(statistic(table[chosen][:, seeds].mean(1)))
    low, high = np.nanpercentile(found, (2.5, 97.5))
    return Interval(estimate, float(low), float(high))


def means_of_all(
    results: Results | None, metric: str, statistic: Callable[[Array], float]
) -> dict[str, dict[int, float]]:
    """A statistic by method of the paper and seed; empty unless all that have not lost have it."""
    if results is None:
        return {}
    there = {m: results.of(m, metric) for m in METHODS if not has_lost(results, m)}
    if not all(there.values()):
        return {}
    return {m: {seed: statistic(x) for seed, x in curves.items()} for m, curves in there.items()}


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
