"""Figures of the arena: scores, curves, differences, and how much hyperparameters matter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from upgd.arena.evidence import Evidence
from upgd.arena.scores import MODES, Table, chosen, searched, versus
from upgd.metrics import Interval
from upgd.pages.colours import BLUE, EDGE, LIGHT, ORANGE
from upgd.report.plotting import SMALL, TINY, canvas, footnote, plain, pyplot, save, seeds, styled

COLUMNS = 3


@styled()
def draw_scores(tables: Sequence[Table], *paths: Path) -> list[Path]:
    """A panel per table: worst case and mean of each entrant with their intervals."""
    most = max(len(table.rows) for table in tables)
    size = (5.2 * len(tables), 1.5 + 0.26 * most)
    figure, [panels] = canvas(1, len(tables), size, sharex=True)
    for axes, table in zip(panels, tables, strict=True):
        rows = [row for row in table.rows if row.worst is not None and row.mean is not None]
        for place, row in enumerate(rows):
            for shift, interval, filled in ((-0.13, row.worst, True), (0.13, row.mean, False)):
                assert interval is not None
                _interval(axes, place + shift, interval, BLUE if filled else ORANGE, filled)
        axes.set_yticks(range(len(rows)), [plain(row.entrant) for row in rows])
        axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
        axes.set(xlabel="Accuracy relative to the best, per cent", title=MODES[table.mode])
        axes.axvline(100, color=EDGE, linewidth=0.8, zorder=0)
        axes.grid(axis="x")
        counts = [len(entry.ratios) for row in rows for entry in row.entries.values()]
        footnote(axes, f"{seeds(counts)}; 95% intervals" if counts else "no results")
    shown = [x for table in tables for row in table.rows for x in (row.worst, row.mean) if x]
    if shown:  # no accuracy is below 0, as wide intervals may be
        panels[0].set_xlim(
            left=max(0, 100 * min(np.nanmin([x.low, x.estimate]) for x in shown)) - 4
        )
    marks = {"worst case over streams": (BLUE, BLUE), "mean": (ORANGE, "white")}
    handles = [
        pyplot().Line2D([], [], color=c, marker="o", markerfacecolor=face, markersize=5, label=name)
        for name, (c, face) in marks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return save(figure, *paths)


def _interval(axes: Any, place: float, interval: Any, colour: str, filled: bool) -> None:
    face = colour if filled else "white"
    if math.isfinite(interval.low):
        axes.plot([100 * interval.low, 100 * interval.high], [place] * 2, color=colour, linewidth=1)
    axes.plot(100 * interval.estimate, place, "o", color=colour, markerfacecolor=face, markersize=5)


@styled()
def draw_curves(
    evidence: Evidence,
    table: Table,
    *paths: Path,
    names: Mapping[str, str] | None = None,
    streams: Mapping[str, str] | None = None,
) -> list[Path]:
    """A panel per stream: the accuracy of entrants over the run.

    Args:
        evidence: Of the arena.
        table: Whose sets are shown.
        paths: Of the figure.
        names: Labels by entrant; by default the best six.
        streams: Titles by stream; by default all that are scored.
    """
    names = names or {row.entrant: row.entrant for row in table.rows[: len(LIGHT)]}
    streams = streams or {name: name for name in evidence.streams if name in table.best}
    height = 2.2 if len(streams) > COLUMNS else 2.8  # with the legend
    figure, panels = _panels(len(streams), height)
    for axes, (stream, title) in zip(panels, streams.items(), strict=True):
        thousands = evidence.streams[stream].steps / 1000
        for colour, (name, label) in zip(LIGHT, names.items(), strict=False):
            number = chosen(evidence, name, stream, table.mode)
            found = [] if number is None else evidence.curves.get((name, stream, number), ())
            times = (np.arange(len(found)) + 0.5) / max(len(found), 1) * thousands
            axes.plot(times, 100 * np.array(found), color=colour, label=plain(label))
        axes.set_title(plain(title))
        axes.set_ylabel("Accuracy, per cent", fontsize=SMALL)
        axes.set_xlabel("Thousand steps", fontsize=SMALL)
        footnote(axes, seeds([len(evidence.streams[stream].seeds)]))
    handles, labels = panels[0].get_legend_handles_labels() if panels else ([], [])
    columns = len(names) if len(names) <= 4 else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=SMALL)
    return save(figure, *paths)


@styled()
def draw_differences(evidence: Evidence, *paths: Path) -> list[Path]:
    """A panel per stream, a line per entrant: its difference from the baseline, with intervals."""
    found = versus(evidence, evidence.baseline)
    streams = list(found.best)
    names = [name for name, apart in found.others.items() if apart.streams]
    label = f"Points from {plain(evidence.baseline)}"
    figure, panels = _by_stream(streams, names, label)
    ticks, limits = _reach([x for name in names for x in found.others[name].streams.values()])
    for axes, stream in zip(panels, streams, strict=True):
        for place, name in enumerate(names):
            apart = found.others[name].streams.get(stream)
            if apart is not None:
                _interval(axes, place, apart, BLUE, filled=True)
        axes.axvline(0, color=EDGE, linewidth=0.8, zorder=0)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks], fontsize=TINY)
        axes.set_xlim(*limits)
        footnote(axes, f"{seeds([len(evidence.streams[stream].seeds)])}; 95% intervals")
    return save(figure, *paths)


def _reach(found: Sequence[Interval]) -> tuple[list[int], tuple[float, float]]:
    """Ticks in points, and the limits of an axis on which all differences and 0 are seen.

    Intervals may be cut off: those of few seeds are wide.
    """
    ends = [100 * one.estimate for one in found if math.isfinite(one.estimate)]
    low, high = 1.5 * min([*ends, -1.0]), 1.5 * max([*ends, 1.0])
    return [tick for tick in (-30, -10, -3, -1, 0, 1, 3, 10, 30) if low <= tick <= high], (
        low,
        high,
    )


@styled()
def draw_sensitivity(evidence: Evidence, *paths: Path) -> list[Path]:
    """A panel per stream, a strip per entrant: a dot for every set of the search."""
    streams = list(evidence.streams)
    names = [name for name, entrant in evidence.entrants.items() if len(entrant.sets) > 1]
    label = "Accuracy in the search, per cent of the best"
    figure, panels = _by_stream(streams, names, label)
    for axes, stream in zip(panels, streams, strict=True):
        values = {name: searched(evidence, name, stream) for name in names}
        finite = [v for some in values.values() for v in some if math.isfinite(v)]
        best = max(finite, default=1.0) or 1.0
        for place, name in enumerate(names):
            mine = 100 * np.array([v for v in values[name] if math.isfinite(v)]) / best
            x = np.repeat(mine, 3)  # a stroke per set, all of them one line with gaps
            x[2::3] = np.nan
            y = np.tile([place - 0.32, place + 0.32, np.nan], len(mine))
            axes.plot(x, y, color=BLUE, linewidth=0.8, alpha=0.7)
            if len(mine):
                axes.plot(mine.max(), place, "o", color=ORANGE, markersize=4)
        footnote(
            axes, seeds([len(evidence.streams[stream].search_seeds)]) + "; a dot: the best set"
        )
    return save(figure, *paths)


def _by_stream(streams: Sequence[str], names: Sequence[str], label: str) -> tuple[Any, list[Any]]:
    """A figure with a panel per stream and a line per entrant in each."""
    figure, panels = _panels(len(streams), 0.9 + 0.2 * len(names), sharey=True, sharex=True)
    for axes, stream in zip(panels, streams, strict=True):
        axes.set_title(plain(stream))
        axes.set_yticks(range(len(names)), [plain(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.tick_params(labelbottom=True)
    for axes in panels[-_columns(len(streams)) :]:  # the lowest of each column
        axes.set_xlabel(label, fontsize=SMALL)
    return figure, panels


def _columns(count: int) -> int:
    return 2 if count in (2, 4) else min(COLUMNS, max(1, count))


def _panels(count: int, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """A figure with so many panels, each of a height in inches."""
    columns = _columns(count)
    rows = max(1, -(-count // columns))
    figure, grid = canvas(rows, columns, (1.6 + 3.1 * columns, rows * height), **options)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, list(grid.flat[:count])
