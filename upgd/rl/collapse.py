"""Policy collapse in numbers: an agent's peak return and its final return.

A return's curve is noisy, so both are means over a tenth of the run: the *peak* is the highest mean
of consecutive windows of that length, the *final* return that of the last tenth, and the *drop*
their difference. The highest of many noisy means lies above the last one even where nothing falls,
so a drop above 0 alone is no evidence of collapse: compare it with another optimizer's, or see
:mod:`upgd.paper.policy_collapse`, whose statistic has no such bias.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from upgd.metrics import Interval, mean_interval

TENTH = 0.1
NAMES = ("peak_return", "final_return", "drop_after_peak")
Array = NDArray[np.float64]


def filled(returns: ArrayLike) -> Array:
    """Mean returns of windows; a window in which no episode ended repeats the value before."""
    curve: Array = np.asarray(returns, np.float64).copy()
    known = np.flatnonzero(np.isfinite(curve))
    if not len(known):
        return curve
    before = np.searchsorted(known, np.arange(len(curve)), "right") - 1
    return np.asarray(curve[known[np.maximum(before, 0)]])


def width(windows: int) -> int:
    """The number of windows in a tenth of a run; at least one."""
    return max(1, round(TENTH * windows))


def tenths(curves: Array) -> Array:
    """Means of every tenth of runs [..., windows], by the window at which it begins."""
    size = width(curves.shape[-1])
    sums = np.cumsum(np.concatenate([np.zeros((*curves.shape[:-1], 1)), curves], -1), -1)
    return np.asarray((sums[..., size:] - sums[..., :-size]) / size)


def collapse(returns: ArrayLike) -> dict[str, float]:
    """The peak, final return and drop of a run; nothing where no episode ended."""
    curve = np.asarray(returns, np.float64)
    if not np.isfinite(curve).any():
        return {}
    means = tenths(filled(curve))
    peak, final = float(means.max()), float(means[-1])
    return dict(zip(NAMES, (peak, final, peak - final), strict=True))


def over_seeds(found: Sequence[dict[str, float]]) -> dict[str, Interval]:
    """Means over seeds with Student's 95% interval, by name."""
    intervals = {}
    for name in NAMES:
        values = [run[name] for run in found if name in run]
        if values:
            intervals[name] = mean_interval(values)
    return intervals
