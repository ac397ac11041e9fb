"""Curves over time, for papers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.study import StudyError, write_atomically

MANY = 20  # lines that a legend can name


class Curve(NamedTuple):
    """One line of a figure.

    Attributes:
        window: Samples per point.
        values: A row per seed, a column per point.
        family: What lines of one colour have in common where there are many.
    """

    window: int
    values: NDArray[np.float32]
    family: str = ""


def draw_curves(
    curves: Mapping[str, Curve | tuple[int, NDArray[np.float32]]],
    metric: str,
    title: str,
    path: Path,
) -> None:
    """Mean and standard error over seeds, a line per name.

    More lines than a legend can name are coloured by family, without errors.

    Args:
        curves: By name, the window in samples and the values, a row per seed.
        metric: What the values are.
        title: Above the figure.
        path: Where it is written, atomically; the suffix chooses the format.

    Raises:
        StudyError: matplotlib is not installed, or cannot write that format.
    """
    plt = pyplot()
    colours: dict[str, str] = {}
    many = len(curves) > MANY
    names = {Curve(*item).family for item in curves.values()} if many else curves
    longest = max(len(name) for name in names) + (0 if many else 12)
    columns = max(1, min(3, 95 // (longest + 7)))  # what fits side by side
    below = -(-len(names) // columns) if len(names) > 6 else 0  # rows of a legend under the axes
    size = (6.5, 4 + 0.17 * below)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for name, item in curves.items():
        window, values, family = Curve(*item)
        x = window * (np.arange(values.shape[1]) + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # windows without a value stay empty
            mean = np.nanmean(values, 0)
        if many:
            colour = colours.setdefault(family, f"C{len(colours) % 10}")
            (line,) = axes.plot(x, mean, color=colour, linewidth=0.6, alpha=0.6)
            continue
        seeds = f"{len(values)} seed" + ("s" if len(values) > 1 else "")
        (line,) = axes.plot(x, mean, label=plain(f"{name} ({seeds})"))
        if len(values) > 1:
            error = metrics.standard_error(values)
            axes.fill_between(x, mean - error, mean + error, alpha=0.25, color=line.get_color())
    for family, colour in colours.items():
        axes.plot([], [], color=colour, label=plain(family))
    ylabel = metric.replace("_", " ").capitalize()
    axes.set(xlabel="Samples", ylabel=plain(ylabel), title=plain(title))
    axes.spines[["top", "right"]].set_visible(False)
    if below:
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=columns)
    else:
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files alone.

    Raises:
        StudyError: It is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise StudyError("figures need matplotlib: pip install 'upgd[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure atomically, in the format that the suffix says, and close it.

    Raises:
        StudyError: There is no such format, or the file cannot be written.
    """
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=150, format=path.suffix[1:].lower() or "png")
    except ValueError as error:
        raise StudyError(f"cannot write {path}: {error}") from None
    finally:
        pyplot().close(figure)
    write_atomically(path, content.getvalue())


def plain(text: str) -> str:
    """Text that matplotlib does not take for mathematics."""
    return text.replace("$", r"\$")
