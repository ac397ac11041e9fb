"""Curves over time, for papers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.study import StudyError


def draw_curves(
    curves: Mapping[str, tuple[int, NDArray[np.float32]]], metric: str, title: str, path: Path
) -> None:
    """Mean and standard error over seeds, a line per name.

    Args:
        curves: By name, the window in samples and the values, a row per seed.
        metric: What the values are.
        title: Above the figure.
        path: Where it is written; the suffix chooses the format.

    Raises:
        StudyError: matplotlib is not installed, or cannot write that format.
    """
    try:
        import matplotlib
    except ImportError:
        raise StudyError("figures need matplotlib: pip install 'upgd[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for name, (window, values) in curves.items():
        x = window * (np.arange(values.shape[1]) + 1)
        mean = np.nanmean(values, 0)
        seeds = f"{len(values)} seed" + ("s" if len(values) > 1 else "")
        (line,) = axes.plot(x, mean, label=f"{name} ({seeds})")
        if len(values) > 1:
            error = metrics.standard_error(values)
            axes.fill_between(x, mean - error, mean + error, alpha=0.25, color=line.get_color())
    axes.set(xlabel="Samples", ylabel=metric.replace("_", " ").capitalize(), title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise StudyError(f"cannot write {path}: {error}") from None
    finally:
        plt.close(figure)
