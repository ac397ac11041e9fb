"""Sensitivity to a hyperparameter: the best result at each of its values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upgd.metrics import FEWEST, INTERVAL, Interval
from upgd.report.plotting import canvas, footnote, label_ends, look, plain, save, seeds, styled
from upgd.rules.vocabulary import setting
from upgd.study.selection import LARGER, Ranking
from upgd.text import pairs

FEW = 8
"""The most values of a hyperparameter that are joined by a line, and have each a tick."""
FAR = 4.0
"""Losses and returns so many times as far from the best as the median is are cut off."""
AXES = {"accuracy": "Online accuracy", "return": "Return"}


class Point(NamedTuple):
    """The best set with this value of a hyperparameter: its mean over seeds, with interval."""

    value: float
    best: Interval


class Scale(NamedTuple):
    """Where the values of a hyperparameter stand on an axis, and its ticks."""

    places: Mapping[float, float]
    ticks: Mapping[float, str]  # by place

    @property
    def limits(self) -> tuple[float, float]:
        """The ends of the axis, with some room."""
        low, high = min(self.places.values()), max(self.places.values())
        room = 0.06 * max(high - low, 1e-9)
        return low - room, high + room


def sensitivity(ranking: Ranking, name: str) -> list[Point]:
    """For each value of a hyperparameter, the best complete set without a diverged seed."""
    found: dict[float, Interval] = {}
    for one in ranking.complete:  # best first
        value = setting(dict(one.hyper), name)
        if value is not None and not one.diverged:
            found.setdefault(value, one.interval)
    return [Point(value, found[value]) for value in sorted(found)]


def lost(ranking: Ranking, name: str) -> list[float]:
    """The values of a hyperparameter with which every complete set diverged."""
    every = {setting(dict(one.hyper), name) for one in ranking.complete}
    good = {point.value for point in sensitivity(ranking, name)}
    return sorted(value for value in every - good if value is not None)


def varied(found: Sequence[Ranking]) -> list[str]:
    """Hyperparameters with several values in some method: the step size, then by name."""
    names = dict.fromkeys(n for ranking in found for one in ranking.complete for n, _ in one.hyper)
    order = sorted(names, key=lambda name: (name != "lr", name))
    return [n for n in order if any(len(sensitivity(r, n)) > 1 for r in found)]


def by_name(found: Sequence[Ranking]) -> dict[str, Ranking]:
    """Rankings by method; those of one method that differ in options have these in the name."""
    times = Counter(ranking.name for ranking in found)
    options = (pairs(dict(r.family.options)) if times[r.name] > 1 else "" for r in found)
    return {f"{r.name} {own}".strip(): r for r, own in zip(found, options, strict=True)}


def scale(name: str, values: Sequence[float]) -> Scale:
    """A logarithmic axis, of 1 - β for betas; 0 stands a decade below the smallest value.

    Values that differ by less than a factor of ten, or are negative, are drawn to scale.
    """
    positive = [value for value in values if value > 0]
    if name.rpartition(".")[2].startswith("beta") and max(values) < 1:
        places = {value: -math.log10(1 - value) for value in values}
        round_ones = [0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999]
        usual = {-math.log10(1 - value): f"{value:g}" for value in round_ones}
    elif min(values) < 0 or not positive or max(positive) < 10 * min(values):
        places = {value: value for value in values}
        usual = {float(tick): f"{tick:g}" for tick in np.linspace(min(values), max(values), 5)}
    else:
        least = math.log10(min(positive))
        places = {v: math.log10(v) if v > 0 else least - 1 for v in values}
        decades = range(math.floor(least), math.ceil(math.log10(max(positive))) + 1)
        usual = {float(n): f"{10.0**n:g}" for n in decades}
        usual |= {least - 1: "0"} if min(values) == 0 else {}
    few = len(values) <= FEW
    wanted = {places[value]: f"{value:g}" for value in values} if few else usual
    return Scale(places, _apart(wanted, *Scale(places, {}).limits))


def _apart(ticks: Mapping[float, str], low: float, high: float) -> dict[float, str]:
    """Ticks inside limits of which no two are too close for their texts."""
    kept: dict[float, str] = {}
    for place in sorted(ticks):
        near = max(kept, default=-math.inf)
        if low <= place <= high and place - near >= 0.09 * (high - low):
            kept[place] = ticks[place]
    return kept


def limits(values: Sequence[float], metric: str) -> tuple[float, float]:
    """The ends of the axis of results; what nearly diverged, far from the best, is cut off."""
    finite = [value for value in values if math.isfinite(value)]
    sign = 1 if metric in LARGER else -1
    best = sign * max(sign * value for value in finite)
    apart = sorted(abs(value - best) for value in finite)
    cut = FAR * apart[len(apart) // 2]
    reach = apart[-1] if cut == 0 or metric == "accuracy" else min(apart[-1], cut)
    worst, room = best - sign * reach, 0.12 * max(reach, 1e-3 * max(abs(best), 1e-6))
    low, high = sorted((worst, best))
    return low - room, high + room


@styled()
def draw_sensitivity(found: Mapping[str, Ranking], title: str, path: Path) -> None:
    """One panel per hyperparameter, a line per method; a star marks the method's best set.

    Rankings are by their name at the lines. Raises ValueError if no hyperparameter has several
    values, StudyError if matplotlib is not installed, or cannot write the format of the suffix.
    """
    names = varied(list(found.values()))
    if not names:
        raise ValueError(
            "no method has complete sets with several values of a hyperparameter: nothing to draw"
        )
    found = {label: ranking for label, ranking in found.items() if varied([ranking])}
    columns = 2 if len(names) in (2, 4) else min(3, len(names))
    rows = -(-len(names) // columns)
    figure, grid = canvas(rows, columns, (max(5.5, 3.7 * columns), 2.8 * rows + 0.4), sharey=True)
    metric = next(iter(found.values())).metric
    for axes, name in zip(grid.flat, names, strict=False):
        _panel(axes, name, found)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(AXES.get(metric, "Loss"))
    every = [p.best.estimate for r in found.values() for n in names for p in sensitivity(r, n)]
    grid[0, 0].set_ylim(limits(every, metric))
    what = "best over the other hyperparameters; stars: best sets"
    if any(lost(ranking, name) for ranking in found.values() for name in names):
        what += "; ×: all sets diverged"
    figure.suptitle(plain(f"{title}\n{what}"))
    label_ends(figure, *grid.flat[: len(names)])
    save(figure, path)


def _panel(axes: Any, name: str, found: Mapping[str, Ranking]) -> None:
    """One hyperparameter; few values are joined."""
    curves = {
        label: points
        for label, ranking in found.items()
        if len(points := sensitivity(ranking, name)) > 1
    }
    known = {point.value for points in curves.values() for point in points}
    values = sorted(known.union(*(lost(found[label], name) for label in curves)))
    axis = scale(name, values)
    width = axis.limits[1] - axis.limits[0]
    for order, (label, points) in enumerate(curves.items()):
        # Shifted, so that intervals do not hide each other.
        shift = 0.02 * width * ((order + 0.5) / len(curves) - 0.5)
        drawn = look(list(found).index(label)) | {"marker": "o"}
        drawn |= {"markersize": 4} if len(values) <= FEW else {"markersize": 2.5, "linestyle": ""}
        x = np.array([axis.places[p.value] for p in points]) + shift
        y = np.array([p.best.estimate for p in points])
        error = np.nan_to_num([p.best.estimate - p.best.low for p in points])
        bars = {"fmt": "none", "elinewidth": 0.8, "ecolor": drawn["color"]}
        axes.errorbar(x, y, error, **bars)
        axes.plot(x, y, **drawn, label=plain(label))
        _marks(axes, found[label], name, axis, shift, drawn["color"])
    axes.set_xticks(list(axis.ticks), list(axis.ticks.values()))
    axes.set_xlim(axis.limits)
    axes.set_xlabel(name)
    counts = [len(found[label].seeds) for label in curves]
    footnote(axes, seeds(counts) + (f"; bars: {INTERVAL}" if max(counts) >= FEWEST else ""))


def _marks(axes: Any, ranking: Ranking, name: str, axis: Scale, shift: float, colour: str) -> None:
    """A star at the best set, and crosses where all sets diverged."""
    winner = ranking.winner
    if winner is not None:
        place = axis.places[setting(dict(winner.hyper), name)] + shift
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 5}
        axes.plot(place, winner.value, "*", color=colour, markersize=11, **edge)
    at = 0.03 if ranking.metric in LARGER else 0.97  # of the height
    for value in lost(ranking, name):
        cross = {"transform": axes.get_xaxis_transform(), "markersize": 5}
        axes.plot(axis.places[value] + shift, at, "x", color=colour, **cross)
