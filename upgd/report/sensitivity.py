"""Sensitivity to a hyperparameter: the best result at each of its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from upgd.metrics import Interval
from upgd.report.plotting import canvas, plain, pyplot, save
from upgd.rules.vocabulary import setting
from upgd.study.selection import Ranking

FEW = 8
"""The most values that are drawn at equal distances and joined; more are drawn to scale."""


class Point(NamedTuple):
    """The best set with this value of a hyperparameter: its mean over seeds, with interval."""

    value: float
    best: Interval


def sensitivity(ranking: Ranking, name: str) -> list[Point]:
    """For each value of a hyperparameter, the best complete set without a diverged seed."""
    found: dict[float, Interval] = {}
    for one in ranking.complete:  # best first
        value = setting(dict(one.hyper), name)
        if value is not None and not one.diverged:
            found.setdefault(value, one.interval)
    return [Point(value, found[value]) for value in sorted(found)]


def varied(found: Sequence[Ranking]) -> list[str]:
    """Hyperparameters with several values in some method, sorted."""
    names = dict.fromkeys(n for ranking in found for one in ranking.complete for n, _ in one.hyper)
    return [n for n in sorted(names) if any(len(sensitivity(r, n)) > 1 for r in found)]


def draw_sensitivity(found: Mapping[str, Ranking], title: str, path: Path) -> None:
    """One panel per hyperparameter, a line per method; a star marks the method's best set.

    Rankings are by their name in the legend. Raises ValueError if no hyperparameter has several
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
    below = -(-len(found) // 4)
    size = (max(4.5, 3.1 * columns), 2.7 * rows + 0.5 + 0.2 * below)
    figure, grid = canvas(rows, columns, size, sharey=True)
    metric = next(iter(found.values())).metric
    for axes, name in zip(grid.flat, names, strict=False):
        _panel(axes, name, found)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel({"accuracy": "Online accuracy", "return": "Return"}.get(metric, "Loss"))
    lines = [_line(number) for number in range(len(found))]
    handles = [
        pyplot().Line2D([], [], label=plain(n), **s) for n, s in zip(found, lines, strict=True)
    ]
    what = "best over the other hyperparameters, 95% over seeds; stars: best sets"
    figure.suptitle(plain(f"{title}\n{what}"), fontsize=9)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(4, len(found)), frameon=False
    )
    save(figure, path)


def _line(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "marker": "os^vD"[number // 10 % 5], "markersize": 4}


def _panel(axes: Any, name: str, found: Mapping[str, Ranking]) -> None:
    """One hyperparameter; few values at equal distances, many to scale."""
    every = {label: sensitivity(ranking, name) for label, ranking in found.items()}
    curves = {label: points for label, points in every.items() if len(points) > 1}
    values = sorted({point.value for points in curves.values() for point in points})
    few = len(values) <= FEW
    place = {v: float(i) for i, v in enumerate(values)} if few else _scale(name, values)
    numbers = {label: number for number, label in enumerate(found)}
    for order, (label, points) in enumerate(curves.items()):
        number = numbers[label]
        # Shifted, so that intervals do not hide each other.
        shift = 0.3 * ((order + 0.5) / len(curves) - 0.5) if few else 0.0
        x = np.array([place[p.value] for p in points]) + shift
        y = np.array([p.best.estimate for p in points])
        error = np.array([(p.best.estimate - p.best.low) for p in points])
        style = _line(number) | {"linewidth": 1.2, "linestyle": "-" if few else ""}
        style |= {} if few else {"markersize": 2.5}
        axes.errorbar(x, y, np.nan_to_num(error), elinewidth=0.8, capsize=0, **style)
        winner = found[label].winner
        if winner is not None:
            best = place[setting(dict(winner.hyper), name)] + shift
            star = {"color": f"C{number % 10}", "marker": "*", "markersize": 11}
            axes.plot(
                best, winner.value, **star, markeredgecolor="white", markeredgewidth=0.5, zorder=5
            )
    if few:
        axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_xlabel(name)
    else:
        axes.set_xscale("log")
        axes.set_xlabel(f"1 - {name}" if name.startswith("beta") else name)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(name: str, values: Sequence[float]) -> dict[float, float]:
    """Places of values on a logarithmic axis; 0 is a decade below the smallest."""
    if name.startswith("beta"):
        return {value: 1 - value for value in values}
    least = min((value for value in values if value > 0), default=1.0)
    return {v: v if v > 0 else 10 ** (math.log10(least) - 1) for v in values}
