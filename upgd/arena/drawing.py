"""Figures of the arena: scores with intervals, and how much hyperparameters matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from upgd.arena.evidence import Evidence
from upgd.arena.scores import MODES, Table, searched, versus
from upgd.metrics import Interval
from upgd.pages.colours import BLUE, EDGE, ORANGE
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
def draw_differences(evidence: Evidence, *paths: Path) -> list[Path]:
    """A panel per stream, a line per entrant: its difference from the baseline, with intervals."""
    found = versus(evidence, evidence.baseline)
    streams = list(found.best)
    names = [name for name, apart in found.others.items() if apart.streams]
    figure, panels = _by_stream(streams, names, "Points from the baseline")
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
    columns = 2 if len(streams) in (2, 4) else min(COLUMNS, max(1, len(streams)))
    rows = max(1, -(-len(streams) // columns))
    size = (1.6 + 3.1 * columns, rows * (0.9 + 0.2 * len(names)))
    figure, grid = canvas(rows, columns, size, sharey=True, sharex=True)
    for axes, stream in zip(grid.flat, streams, strict=False):
        axes.set_title(plain(stream))
        axes.set_yticks(range(len(names)), [plain(name) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="x")
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(streams) :]:
        axes.set_visible(False)
    for axes in grid.flat[max(len(streams) - columns, 0) : len(streams)]:  # lowest of each column
        axes.set_xlabel(label, fontsize=SMALL)
    return figure, list(grid.flat[: len(streams)])
