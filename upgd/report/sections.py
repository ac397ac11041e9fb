"""The content of a report, read from a ledger: a section per problem, length and tasks' length."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.ledger import Ledger, Run
from upgd.ledger.queries import StoredSeries
from upgd.report import tables, verdict
from upgd.report.sensitivity import by_name, varied
from upgd.report.tables import SettingKey
from upgd.streams import PROBLEMS
from upgd.study.selection import LARGER, Ranking, longest
from upgd.text import count

FIRST = ("accuracy", "return", "loss", "plasticity", "offline_accuracy", "episode_length")
"""Main metrics, in this order; the others are diagnostics."""
DRAWN = 10  # the most settings; with more, only each method's best is drawn
COMPARED = 6  # the most lines for which a sentence about trends is written


class Line(NamedTuple):
    """A metric of one arm over time."""

    window: int  # samples per value
    seeds: tuple[int, ...]
    values: NDArray[np.floating[Any]]  # a row per seed, a column per window


class Thinned(NamedTuple):
    """Means of `factor` windows each, and the sample at which each of them ends."""

    samples: NDArray[np.float64]
    values: NDArray[np.float32]
    factor: int


class Numbers(NamedTuple):
    """A metric of one arm over seeds."""

    mean: metrics.Interval
    late: float
    change: metrics.Interval | None


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone."""

    name: str
    setting: SettingKey  # what its runs have in common
    runs: Sequence[Run]
    chosen: str = ""  # the hyperparameters of the best of several sets

    def count(self, *states: str) -> int:
        """The number of its runs in one of these states."""
        return sum(run.state in states for run in self.runs)


@dataclass(frozen=True)
class Section:
    """Runs of one problem, length, length of tasks and version of the rules."""

    problem: str
    steps: int  # samples of each run
    rules: int  # the version of the rules
    task_length: int | None  # samples per task, where it is not the problem's
    arms: Sequence[Arm]  # those that are drawn, then all others
    drawn: int  # the number of arms that are drawn
    lines: Mapping[str, Mapping[int, Line]]  # by metric and number of the arm
    rankings: Mapping[str, Ranking]  # by method, those with several values of a hyperparameter

    @property
    def metric(self) -> str:
        """The metric by which methods are compared."""
        return next((metric for metric in LARGER if metric in self.lines), "loss")


def read(ledger: Ledger, runs: Iterable[Run], only: Collection[str] = ()) -> list[Section]:
    """The sections of a report on some runs of a ledger, with these metrics, or all."""
    found: dict[tuple[str, int, int, Any], list[Run]] = {}
    for run in runs:
        spec = run.spec
        key = (spec.problem, spec.steps, spec.rules, spec.options.get("task_length"))
        found.setdefault(key, []).append(run)
    return [_section(ledger, key, some, only) for key, some in found.items()]


def _section(
    ledger: Ledger, key: tuple[str, int, int, Any], runs: Sequence[Run], only: Collection[str]
) -> Section:
    groups: dict[SettingKey, list[Run]] = {each: [] for each in tables.group(runs)}
    for run in runs:
        groups.setdefault(tables.setting(run.spec), []).append(run)
    names, chosen = tables.names(groups), dict[SettingKey, str]()
    drawn = [k for k, some in groups.items() if any(run.state == "done" for run in some)]
    if len(drawn) > DRAWN:
        finished = {key: [run for run in groups[key] if run.result] for key in drawn}
        best = tables.best_settings(finished)
        drawn = [key for key in drawn if key in best]
        several = {key: number for key, number in best.items() if number > 1}
        chosen = {key: names[key].partition(" ")[2] for key in several}
        names |= {key: f"{_short(key, names, best)} (best of {n})" for key, n in several.items()}
    order = [*drawn, *(key for key in groups if key not in set(drawn))]
    arms = [Arm(names[key], key, groups[key], chosen.get(key, "")) for key in order]
    lines = _lines(ledger, arms[: len(drawn)], only)
    ranked = [ranking for ranking in longest(runs) if varied([ranking])]
    return Section(*key, arms, len(drawn), lines, by_name(ranked))


def _short(key: SettingKey, names: Mapping[SettingKey, str], among: Collection[SettingKey]) -> str:
    """The first word of a setting's name, if no other of these has it, else the whole name."""
    first = names[key].partition(" ")[0]
    alone = sum(names[other].partition(" ")[0] == first for other in among) == 1
    return first if alone else names[key]


def _lines(
    ledger: Ledger, arms: Sequence[Arm], only: Collection[str]
) -> dict[str, dict[int, Line]]:
    """By metric, main metrics first, and number of the arm."""
    place = {
        run.key: (number, run.spec.seed)
        for number, arm in enumerate(arms)
        for run in arm.runs
        if run.state == "done"
    }
    kept: dict[str, dict[int, list[tuple[int, StoredSeries]]]] = {}
    for series in ledger.each_series(only or None, place):
        number, seed = place[series.key]
        if len(series.values):
            kept.setdefault(series.metric, {}).setdefault(number, []).append((seed, series))
    order = [*(m for m in FIRST if m in kept), *sorted(kept.keys() - set(FIRST))]
    return {
        metric: {number: _line(kept[metric][number]) for number in sorted(kept[metric])}
        for metric in order
    }


def _line(found: Sequence[tuple[int, StoredSeries]]) -> Line:
    shortest = min(len(series.values) for _, series in found)
    ordered = sorted(found, key=lambda pair: pair[0])
    values = np.stack([series.values[:shortest] for _, series in ordered])
    return Line(found[0][1].window, tuple(seed for seed, _ in ordered), values)


def thin(line: Line, most: int) -> Thinned:
    """A line with `most` points or fewer: means of consecutive windows."""
    windows = line.values.shape[1]
    factor = -(-windows // most)
    ends = np.minimum(factor * np.arange(1, -(-windows // factor) + 1), windows)
    samples = (ends * line.window).astype(np.float64)
    if factor == 1:
        return Thinned(samples, line.values, 1)
    filled = np.full((len(line.values), factor * len(ends)), np.nan)
    filled[:, :windows] = line.values
    means = mean(filled.reshape(len(filled), -1, factor), 2)
    return Thinned(samples, means.astype(np.float32), factor)


def mean(values: NDArray[np.floating], axis: int) -> NDArray[np.float64]:
    """The mean without NaN; NaN where there is no number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmean(np.asarray(values, np.float64), axis))


def numbers(line: Line) -> Numbers:
    """A line in numbers: mean over the run, last part, and change."""
    tasks = line.values.shape[1]
    early, late = (line.values[:, part.start : part.stop] for part in verdict.Parts.of(tasks))
    over, first, last = (mean(values, 1) for values in (line.values, early, late))
    with np.errstate(invalid="ignore"):  # a series may hold infinities
        whole = metrics.mean_interval(over)
        change = metrics.mean_interval(last - first) if tasks > 1 else None
    return Numbers(whole, float(last.mean()), change)


# ------------------------------------------------------------------------------ sentences
def sentences(section: Section) -> Iterator[str]:
    """Sentences about a section: which method ends ahead, and which improved."""
    found = section.lines.get(section.metric, {})
    if not found:
        yield "No run is done, so there is nothing to compare."
        return
    if not _comparable(section, found):
        yield _by_mean(section, found)
        return
    unit = _unit(section, next(iter(found.values())).window)
    curves = {
        section.arms[number].name: dict(zip(line.seeds, line.values.astype(float), strict=True))
        for number, line in found.items()
    }
    tasks = min(line.values.shape[1] for line in found.values())
    late = verdict.Parts.of(tasks).late
    ends = {name: verdict.accuracy(seeds, late).estimate for name, seeds in curves.items()}
    two = sorted(curves, key=lambda name: -ends[name])[:2]
    yield verdict.headline({name: curves[name] for name in two}, two[0], unit)
    if len(curves) <= COMPARED and tasks > 1:
        yield verdict.trends(curves, unit)


def _comparable(section: Section, found: Mapping[int, Line]) -> bool:
    """Whether these are accuracies of the same windows, without a gap."""
    whole = all(np.isfinite(line.values).all() for line in found.values())
    return section.metric == "accuracy" and whole and len({x.window for x in found.values()}) == 1


def _unit(section: Section, window: int) -> str:
    """The name of a window: task or window."""
    spec = section.arms[0].setting
    known = PROBLEMS.get(section.problem)
    length = dict(spec.options).get("task_length", known.task_length if known else None)
    return "task" if length == window else "window"


def _by_mean(section: Section, found: Mapping[int, Line]) -> str:
    means = {n: numbers(line).mean.estimate for n, line in found.items()}
    sign = -1 if section.metric in LARGER else 1
    order = sorted((n for n in means if np.isfinite(means[n])), key=lambda n: sign * means[n])
    if not order:
        return f"No run has a finite {section.metric}."
    first, *rest = (f"{section.arms[n].name} ({means[n]:.4g})" for n in order[:2])
    what = "highest" if sign < 0 else "lowest"
    after = f", before {rest[0]}" if rest else ""
    return f"{first} has the {what} mean {section.metric} over the run{after}."


def tally(runs: Iterable[Run]) -> str:
    """The number of runs, by state."""
    counts = Counter(run.state for run in runs)
    total = sum(counts.values())
    if not total:
        return "no runs"
    told = count(total, "run")
    if set(counts) == {"done"}:
        return f"{told}, all done"
    states = ("done", "diverged", "failed", "running", "pending")
    return told + ": " + ", ".join(f"{counts[s]} {s}" for s in states if counts[s])
