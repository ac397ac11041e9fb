"""Figures of curves over time."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.caches import use_matplotlib_cache
from upgd.ledger import Ledger, Run, StudyError, write_atomically
from upgd.ledger.queries import StoredSeries
from upgd.pages.colours import LIGHT, style
from upgd.report import tables
from upgd.text import count

MANY = 20  # lines that a legend can name
READABLE = 10  # lines in one figure


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


def draw_curves(
    curves: Mapping[str, Curve | tuple[int, NDArray[np.float32]]],
    metric: str,
    title: str,
    path: Path,
    unit: str = "Samples",
) -> None:
    """Draw means over seeds with 95% intervals, a line per name; `unit` is that of windows.

    More than :data:`MANY` lines are coloured by family, without intervals. Raises StudyError if
    matplotlib is not installed, or cannot write the format of the file's suffix.
    """
    families: dict[str, dict[str, str]] = {}
    banded = ""
    many = len(curves) > MANY
    names = {Curve(*item).family for item in curves.values()} if many else curves
    longest = max(len(name) for name in names) + (0 if many else 12)
    columns = max(1, min(3, 95 // (longest + 7)))  # what fits side by side
    below = -(-len(names) // columns) if len(names) > 6 else 0  # rows of a legend under the axes
    figure, [[axes]] = canvas(1, 1, (6.5, 4 + 0.17 * below))
    for number, (name, item) in enumerate(curves.items()):
        window, values, family = Curve(*item)
        x = window * (np.arange(values.shape[1]) + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # windows without a value are NaN
            mean = np.nanmean(values, 0)
        taken = np.isfinite(mean)  # some metrics are not measured in every window
        x, mean, values = x[taken], mean[taken], values[:, taken]
        if many:
            drawn = families.setdefault(family, look(len(families)))
            axes.plot(x, mean, **drawn, linewidth=0.6, alpha=0.6)
            continue
        drawn = look(number)
        axes.plot(x, mean, **drawn, label=plain(f"{name} ({count(len(values), 'seed')})"))
        if len(values) >= metrics.FEWEST:
            half, banded = metrics.half_width(values), f"bands: {metrics.INTERVAL} over seeds"
            axes.fill_between(x, mean - half, mean + half, alpha=0.25, color=drawn["color"], lw=0)
    for family, drawn in families.items():
        axes.plot([], [], **drawn, label=plain(family))
    axes.set(xlabel=unit, ylabel=plain(metric.replace("_", " ").capitalize()), title=plain(title))
    axes.spines[["top", "right"]].set_visible(False)
    told: dict[str, Any] = {"frameon": False, "fontsize": 8, "title_fontsize": 8}
    told |= {"title": banded} if banded else {}
    if below:
        figure.legend(**told, loc="outside lower center", ncols=columns)
    else:
        axes.legend(**told)
    save(figure, path)


def look(number: int) -> dict[str, str]:
    """The colour and the dash of a line, as on pages."""
    colour, dash = style(number)
    return {"color": LIGHT[colour], "linestyle": ("-", "--", ":", "-.")[dash]}


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files alone; a notebook keeps its own backend."""
    use_matplotlib_cache()
    try:
        import matplotlib
    except ImportError:
        raise StudyError("figures need matplotlib: pip install 'upgd[lab]'") from None
    if "ipykernel" not in sys.modules:
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def check_format(path: Path) -> None:
    """Raise StudyError unless matplotlib can draw a figure in the format of a file's suffix."""
    known = pyplot().figure().canvas.get_supported_filetypes()
    pyplot().close()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise StudyError(
            f"cannot write {path}: no figure ends in {path.suffix}; use one of {', '.join(known)}"
        )


def canvas(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure of a size in inches, and its axes [row, column]."""
    options |= {"figsize": size, "layout": "constrained", "squeeze": False}
    figure, grid = pyplot().subplots(rows, columns, **options)
    return figure, grid


def save(figure: Any, *paths: Path) -> list[Path]:
    """Write a figure atomically and reproducibly, in the formats of the suffixes, and close it.

    Text in an SVG stays text, which can be searched and edited. Raises StudyError if there is no
    such format, or a file cannot be written.
    """
    try:
        with pyplot().rc_context({"svg.fonttype": "none", "svg.hashsalt": "upgd"}):
            for path in paths:
                content, kind = io.BytesIO(), path.suffix[1:].lower() or "png"
                stamp = {"Date": None} if kind == "svg" else {}
                figure.savefig(content, dpi=150, format=kind, metadata=stamp)
                write_atomically(path, content.getvalue())
    except ValueError as error:
        raise StudyError(f"cannot write {path}: {error}") from None
    finally:
        pyplot().close(figure)
    return list(paths)


def plain(text: str) -> str:
    """Text without matplotlib's math mode."""
    return text.replace("$", r"\$")
