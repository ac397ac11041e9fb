"""Figures of curves over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.ledger import Ledger, Run, StudyError
from upgd.ledger.queries import StoredSeries
from upgd.metrics import FEWEST, INTERVAL
from upgd.report import tables
from upgd.report.plotting import (
    canvas,
    curve,
    footnote,
    in_thousands,
    label_ends,
    legend,
    look,
    nan_mean,
    plain,
    save,
    seeds,
    styled,
)
from upgd.text import count

MANY = 20  # lines that a legend can name
READABLE = 10  # lines in one figure
SHORT = 24  # characters of a name that fits beside its line


class Curve(NamedTuple):
    """One line of a figure."""

    window: int  # samples per point
    values: NDArray[np.float32]  # a row per seed, a column per point
    family: str = ""  # its group; with many lines, each group has one colour


class Drawing(NamedTuple):
    """What there is to draw of a study."""

    problem: str
    metric: str
    curves: dict[str, Curve]
    among: int = 0  # of how many settings these are each method's best; 0 where all are drawn


def gather(
    ledger: Ledger,
    metric: str = "",
    problem: str | None = None,
    method: str | None = None,
    every: bool = False,
) -> Drawing:
    """The curves of a study's settings; of more than ten only each method's best.

    Raises StudyError without a finished run, ValueError for several problems or no such metric.
    """
    folder = ledger.path.parent
    groups = tables.group(tables.chosen(ledger, problem, method))
    if not any(run.state == "done" for runs in groups.values() for run in runs):
        raise StudyError(f"{folder} has no finished run to draw")
    problems = list(dict.fromkeys(key.problem for key in groups))
    if len(problems) > 1:
        raise ValueError(f"{folder} has several problems; choose one, such as {problems[0]}")
    chosen = metric or tables.main_metric(run for runs in groups.values() for run in runs)
    best = tables.best_settings(groups) if len(groups) > READABLE and not every else None
    curves = _curves(ledger, groups, chosen, best)
    if not curves:
        there = ", ".join(ledger.all_metrics()) or "none"
        raise ValueError(f"no metric {chosen!r} in {folder}; there are {there}")
    return Drawing(problems[0], chosen, curves, 0 if best is None else len(groups))


def _curves(
    ledger: Ledger,
    groups: dict[tables.SettingKey, list[Run]],
    metric: str,
    best: dict[tables.SettingKey, int] | None,
) -> dict[str, Curve]:
    """By name, the curves of each group."""
    names = {}
    for key, name in tables.names(groups).items():
        if best is None or key in best:
            among = 1 if best is None else best[key]
            names[key] = f"{name}, best of {among}" if among > 1 else name
    where = {run.key: key for key in names for run in groups[key] if run.state == "done"}
    found: dict[tables.SettingKey, list[StoredSeries]] = {}
    for series in ledger.each_series([metric], where):
        found.setdefault(where[series.key], []).append(series)
    curves = {}
    for key in names:
        if key in found:
            shortest = min(len(series.values) for series in found[key])
            values = np.stack([series.values[:shortest] for series in found[key]])
            curves[names[key]] = Curve(found[key][0].window, values, key.method)
    return curves


@styled()
def draw_curves(
    curves: Mapping[str, Curve | tuple[int, NDArray[np.float32]]],
    metric: str,
    title: str,
    path: Path,
    unit: str = "Samples",
) -> None:
    """Draw means over seeds with 95% intervals, a line per name; `unit` is that of windows.

    Short names stand at the lines, long ones in a legend in the order of the lines' ends. More
    than :data:`MANY` lines are coloured by family, without intervals. Raises StudyError if
    matplotlib is not installed, or cannot write the format of the file's suffix.
    """
    many = len(curves) > MANY
    counts = [len(Curve(*item).values) for item in curves.values()]
    names = list(curves) if not many else sorted({Curve(*item).family for item in curves.values()})
    at_lines = not many and max(map(len, names)) <= SHORT
    rows = 0 if at_lines else -(-len(names) // max(1, 95 // (max(map(len, names)) + 7)))
    figure, [[axes]] = canvas(1, 1, (6.5, 3.8 + 0.17 * rows))
    if many:
        _draw_families(axes, curves)
    else:
        for number, (name, item) in enumerate(curves.items()):
            window, values, _ = Curve(*item)
            x = window * (np.arange(values.shape[1]) + 1)
            told = f" ({count(len(values), 'seed')})" if len(set(counts)) > 1 else ""
            curve(axes, x, values, look(number), name + told)
    axes.set(xlabel=unit, ylabel=plain(metric.replace("_", " ").capitalize()), title=plain(title))
    in_thousands(axes.xaxis)
    band = f"; bands: {INTERVAL}" if not many and max(counts) >= FEWEST else ""
    footnote(axes, f"{seeds(counts)}{band}")
    if at_lines:
        label_ends(figure)
    elif many:
        figure.legend(loc="outside lower center", ncols=4)
    else:
        legend(figure, [axes])
    save(figure, path)


def _draw_families(axes: Any, curves: Mapping[str, Curve | tuple[int, NDArray[Any]]]) -> None:
    """Thin lines, one colour for each family; the legend's order is that of their mean ends."""
    looks: dict[str, dict[str, Any]] = {}
    ends: dict[str, list[float]] = {}
    for item in curves.values():
        window, values, family = Curve(*item)
        drawn = looks.setdefault(family, look(len(looks)))
        x, mean = window * (np.arange(values.shape[1]) + 1), nan_mean(values)
        there = np.isfinite(mean)
        axes.plot(x[there], mean[there], **drawn, linewidth=0.6, alpha=0.6)
        ends.setdefault(family, []).extend(mean[there][-1:])
    for family in sorted(looks, key=lambda name: -float(np.mean(ends[name] or [-np.inf]))):
        axes.plot([], [], **looks[family], label=plain(family))
