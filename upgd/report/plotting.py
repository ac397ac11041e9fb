"""The one style of all figures: canvas, lines, names at the lines, notes, files.

A function that draws is decorated with :func:`styled`, takes its axes from :func:`canvas` and
ends with :func:`save`. The palette is :mod:`upgd.pages.colours`.
"""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.caches import use_matplotlib_cache
from upgd.extras import install
from upgd.ledger import StudyError, write_atomically
from upgd.metrics import half_width
from upgd.pages.colours import EDGE, INK, LIGHT, RULE, SOFT, style
from upgd.text import count

NORMAL, SMALL, TINY = 9, 8, 7
"""Font sizes: axis labels, ticks and legends, notes and names at lines."""
DASHES = ("-", (0, (3, 1.8)), (0, (1, 1.2)), (0, (4, 1.5, 1, 1.5)))
"""Of lines, in the order of :data:`upgd.pages.colours.DASHES`."""
STYLE: Mapping[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": NORMAL, "mathtext.fontset": "dejavusans",
    "figure.facecolor": "white", "savefig.facecolor": "white", "axes.facecolor": "white",
    "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "axes.titlesize": NORMAL, "figure.titlesize": NORMAL, "axes.labelsize": NORMAL,
    "axes.titleweight": "bold",
    "axes.edgecolor": EDGE, "axes.linewidth": 0.6, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": RULE, "grid.linewidth": 0.6,
    "xtick.color": EDGE, "ytick.color": EDGE, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "xtick.labelsize": SMALL, "ytick.labelsize": SMALL,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 3,
    "ytick.major.size": 3, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "lines.linewidth": 1.3, "lines.solid_capstyle": "round", "lines.dash_capstyle": "butt",
    "lines.scale_dashes": True, "legend.frameon": False, "legend.fontsize": SMALL,
    "legend.handlelength": 2.4, "svg.fonttype": "none", "svg.hashsalt": "upgd", "pdf.fonttype": 42,
}  # fmt: skip
"""matplotlib's settings for every figure; text in files stays text."""
AWAY = 11
"""Points from the end of a line to its name."""
LONG_NAME = 14
"""Characters of a name beyond which it may take two lines."""
THOUSANDS = 10_000
"""Axes that reach as far count in thousands or millions."""
BAND = "standard error"
"""What bands of the paper's figures are; others have Student's intervals."""


@contextmanager
def styled() -> Iterator[None]:
    """The style of all figures, for the time of a function or a block."""
    with pyplot().rc_context(STYLE):
        yield


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files alone; a notebook keeps its own backend."""
    use_matplotlib_cache()
    try:
        import matplotlib
    except ImportError:
        raise StudyError(f"figures need matplotlib: {install('demo')}") from None
    if "ipykernel" not in sys.modules:
        matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


# -------------------------------------------------------------------------------- files
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


def save(figure: Any, *paths: Path, dpi: int = 150) -> list[Path]:
    """Write a figure atomically and reproducibly, in the formats of the suffixes, and close it.

    A PNG has `dpi` points per inch. Text in an SVG stays text, which can be searched and edited.
    Raises StudyError if there is no such format, or a file cannot be written.
    """
    try:
        with styled():
            for path in paths:
                content, kind = io.BytesIO(), path.suffix[1:].lower() or "png"
                stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
                figure.savefig(content, dpi=dpi, format=kind, metadata=stamp)
                written = content.getvalue()
                write_atomically(path, _shortened(written) if kind == "svg" else written)
    except ValueError as error:
        raise StudyError(f"cannot write {path}: {error}") from None
    finally:
        pyplot().close(figure)
    return list(paths)


def _shortened(svg: bytes) -> bytes:
    """A picture whose places have two decimals of a point: half as large, and looks the same."""
    places = re.compile(rb'(?<= [dxy]=")[^"]*')
    return places.sub(lambda found: re.sub(rb"(\.\d\d)\d+", rb"\1", found[0]), svg)


# -------------------------------------------------------------------------------- lines
def look(number: int) -> dict[str, Any]:
    """The colour and the dash of a line, as on pages."""
    colour, dash = style(number)
    return made_look(LIGHT[colour], dash)


def made_look(colour: str, dash: int = 0) -> dict[str, Any]:
    """A line's colour and dash; dashed lines lie over solid ones, so that both are seen."""
    return {"color": colour, "linestyle": DASHES[dash], "zorder": 2 + 0.1 * dash}


def curve(
    axes: Any,
    x: NDArray[Any],
    values: NDArray[Any],
    drawn: Mapping[str, Any],
    label: str = "",
    half: Callable[[NDArray[Any]], NDArray[Any]] = half_width,
) -> None:
    """Mean over seeds (a row each), with a band: Student's interval, or another half width."""
    mean = nan_mean(values)
    there = np.isfinite(mean)  # some metrics are not measured in every window
    x, mean, values = x[there], mean[there], values[:, there]
    axes.plot(x, mean, **drawn, label=plain(label) or None)
    error = half(values)
    if np.isfinite(error).any():
        band = {"color": drawn["color"], "alpha": 0.2, "linewidth": 0, "zorder": 1.5}
        axes.fill_between(x, mean - error, mean + error, **band)


def nan_mean(values: NDArray[Any]) -> NDArray[Any]:
    """The mean over rows of the numbers that there are; NaN where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmean(values, 0))


def standard_error(values: NDArray[Any]) -> NDArray[Any]:
    """The standard error over rows, of the numbers that there are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        deviation = np.nanstd(np.asarray(values, np.float64), 0, ddof=1)
        return np.asarray(deviation / np.sqrt(np.isfinite(values).sum(0)))


def plain(text: str) -> str:
    """Text without matplotlib's math mode."""
    return text.replace("$", r"\$")


# ------------------------------------------------------------------------ names and notes
class Named(NamedTuple):
    """A line, or several identical ones, by name."""

    name: str
    x: float  # where it ends
    y: float
    line: Any  # the uppermost


def named(axes: Any) -> list[Named]:
    """The lines of axes that have a name and a point, those that end highest first.

    Identical lines are one, called such as "SGDW = N-UPGD-W".
    """
    same: dict[bytes, list[Any]] = {}
    for line in axes.get_lines():
        data = np.asarray(line.get_xydata(), float)
        if not str(line.get_label()).startswith("_") and len(data):
            same.setdefault(data.tobytes(), []).append(line)
    found = []
    for lines in same.values():
        top = max(lines, key=lambda line: line.get_zorder())
        name = " = ".join(str(line.get_label()) for line in lines)
        x, y = (float(value) for value in top.get_xydata()[-1])
        found.append(Named(name, x, y, top))
    return sorted(found, key=lambda each: -each.y)


def label_ends(figure: Any, *panels: Any) -> None:
    """Write the names of lines beside their ends, those that end higher above.

    Call it when all else is drawn: limits of the axes are kept from here on.
    """
    written = [(axes, _write_names(axes)) for axes in panels or figure.axes if named(axes)]
    figure.draw_without_rendering()  # lays out
    for axes, texts in written:
        _space(axes, texts)


def _write_names(axes: Any) -> list[tuple[Named, Any]]:
    lines = named(axes)
    last = max(each.x for each in lines)
    axes.set_xlim(axes.get_xlim()[0], max(axes.get_xlim()[1], last))
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    look = {"va": "center", "fontsize": TINY, "linespacing": 1.05, "annotation_clip": False}
    found = []
    for each in lines:
        is_point = len(each.line.get_xdata()) == 1
        place = (each.x if is_point else last, min(max(each.y, low), high))
        aside = {"xytext": (AWAY, 0), "textcoords": "offset points"}
        text = axes.annotate(_broken(each.name), place, **aside, **look)
        text.set_color(each.line.get_color())
        found.append((each, text))
    return found


def _broken(name: str) -> str:
    """A long name on several lines: one for each of the names of identical lines."""
    if len(name) <= LONG_NAME:
        return name
    return name.replace(" = ", "\n= ").replace(", ", ",\n", 1).replace(" (", "\n(", 1)


def _space(axes: Any, texts: Sequence[tuple[Named, Any]]) -> None:
    """Move names apart, and lead from each line's end to its name."""
    points = 72 / axes.figure.dpi
    box = axes.get_window_extent()
    to_data = axes.transData.inverted()
    rising = list(reversed(texts))
    wanted = [axes.transData.transform(text.xy)[1] for _, text in rising]
    heights = [
        (TINY * 1.2 * text.get_text().count("\n") + TINY + 1.5) / points for _, text in rising
    ]
    places = spread(wanted, heights, box.y0, box.y1)
    for (each, text), start, place in zip(rising, wanted, places, strict=True):
        text.set_position((AWAY, (place - start) * points))
        edge = axes.transData.transform(text.xy)[0]
        ends = [(edge + 2 / points, start), (edge + (AWAY - 2) / points, place)]
        way = [tuple(pair) for pair in to_data.transform(ends)]
        ends_early = each.x < text.xy[0]
        if ends_early:
            way.insert(0, (each.x, text.xy[1]))
        leader = {"color": each.line.get_color(), "linewidth": 0.6, "clip_on": False, "zorder": 1}
        leader["linestyle"] = ":" if ends_early else "-"
        axes.plot(*zip(*way, strict=True), **leader, scalex=False, scaley=False)


def spread(
    wanted: Sequence[float], heights: Sequence[float], low: float, high: float
) -> NDArray[Any]:
    """Places of texts that do not overlap, nearest to rising wanted ones by least squares.

    The middles lie between `low` and `high`, unless there are too many; then they begin at `low`.
    """
    sizes = np.asarray(heights, float)
    steps = np.concatenate([[0.0], np.cumsum((sizes[1:] + sizes[:-1]) / 2)])
    blocks: list[list[float]] = []  # neighbours that touch, as places without the texts between
    for value in np.asarray(wanted, float) - steps:
        blocks.append([float(value)])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    free = np.array([np.mean(block) for block in blocks for _ in block])
    return np.asarray(np.clip(free, low, max(low, high - float(steps[-1]))) + steps)


def legend(figure: Any, panels: Collection[Any]) -> None:
    """One legend below all panels, in the order of the lines' ends (of their mean rank).

    Lines without a point come last.
    """
    lines: dict[str, Any] = {}
    ranks: dict[str, list[float]] = {}
    for axes in panels:
        mine = named(axes)
        for rank, each in enumerate(mine):
            lines.setdefault(each.name, each.line)
            ranks.setdefault(each.name, []).append((rank + 0.5) / len(mine))
        for line in axes.get_lines():
            if not str(line.get_label()).startswith("_") and not len(line.get_xdata()):
                lines.setdefault(str(line.get_label()), line)
                ranks.setdefault(str(line.get_label()), []).append(1.0)
    order = sorted(lines, key=lambda name: float(np.mean(ranks[name])))
    if order:
        width = 0.5 + 0.065 * max(map(len, order))  # inches of an entry
        columns = max(1, min(len(order), int(figure.get_figwidth() / width)))
        below = {"loc": "outside lower center", "ncols": columns}
        figure.legend([lines[name] for name in order], order, **below)


def seeds(counts: Collection[int]) -> str:
    """A number of seeds, or from how many to how many: "3 to 5 seeds"."""
    low, high = min(counts), max(counts)
    return count(high, "seed") if low == high else f"{low} to {high} seeds"


def in_thousands(axis: Any) -> None:
    """Ticks such as 20k and 1.5M in place of 20000 and 1.5 beside a 1e6."""
    from matplotlib.ticker import EngFormatter

    if max(map(abs, axis.get_view_interval())) >= THOUSANDS:
        axis.set_major_formatter(EngFormatter(sep=""))


def footnote(axes: Any, text: str) -> None:
    """A note under the label of the horizontal axis."""
    below = {"xycoords": axes.xaxis.label, "textcoords": "offset points"}
    look = {"ha": "center", "va": "top", "fontsize": TINY, "color": SOFT}
    axes.annotate(plain(text), (0.5, 0), (0, -2), **look, **below)
