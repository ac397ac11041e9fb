"""Online normalisation: running means and variances of columns that a stream may change."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.stream.pickling import OwnsArrays

try:
    from upgd.kernels.cpu_scaling import scale_rows
except ImportError:  # without numba: the same in NumPy
    scale_rows = None

STATISTICS = ("mean", "variance", "count")
CONSTANT = 1e-20
"""A variance of at most this share of the squared mean is rounding: the column is constant."""
EARLY, NEAREST = 5, 100.0
"""How many values are never outliers, and the least squared distance of one, in variances."""


class Scaler(OwnsArrays):
    """Running mean and variance of each column, over about the last `horizon` rows.

    The first `horizon` values of a column count alike; from then on an old value's weight shrinks
    by ``1 - 1/horizon`` with every new one. A value is scaled by statistics that include it, so
    that none is further from zero than ``sqrt(horizon - 1)``. Missing values (NaN) become zero and
    change nothing; so does every value of a column that has been constant.

    One value cannot spoil the statistics for long: from the sixth on, one that is further than
    ``max(10, sqrt(3·n))`` standard deviations from the mean, n being how many values count, changes
    them as one at that distance, which about doubles the standard deviation. If many follow it,
    that is doubled with each.

    Args:
        columns: How many there are; see :meth:`grow`.
        horizon: Rows; infinity for all of the past.
        clip: Scaled values are kept within ± this.
        includes: Whether a value is scaled by statistics that include it; else by those before it,
            as statistics of a scaler that was fitted elsewhere are used.

    Example:
        >>> scaler = Scaler(1, horizon=100)
        >>> scaler.learn(np.array([[1.0], [3.0]])).ravel().tolist()
        [0.0, 1.0]
        >>> scaler.mean.tolist(), scaler.variance.tolist()
        ([2.0], [1.0])
    """

    def __init__(
        self, columns: int, horizon: float = 1000, clip: float = 10.0, includes: bool = True
    ) -> None:
        self.horizon, self.clip, self.includes = float(horizon), float(clip), includes
        self.mean, self.variance, self.count = np.zeros((3, columns))

    def learn(self, rows: NDArray[np.float64]) -> NDArray[np.float32]:
        """Scale row after row, [T, columns], by statistics of it and of those before."""
        return self._scale(rows, True)

    def peek(self, rows: NDArray[np.float64]) -> NDArray[np.float32]:
        """What :meth:`learn` would return for each row if it came next; nothing is changed."""
        return self._scale(rows, False)

    def _scale(self, rows: NDArray[np.float64], learn: bool) -> NDArray[np.float32]:
        out = np.empty(rows.shape, np.float32)
        if scale_rows is not None:
            statistics = (self.mean, self.variance, self.count)
            how = self.horizon, self.clip, self.includes, learn
            scale_rows(rows, *statistics, *how, out, CONSTANT, EARLY, NEAREST)
        elif learn:
            for t, row in enumerate(rows):
                out[t], *found = self._next(row)
                known = ~np.isnan(row)
                for name, new in zip(STATISTICS, found, strict=True):
                    getattr(self, name)[known] = new[known]
        else:
            out[:] = self._next(rows)[0]
        return out

    def _next(self, x: NDArray[np.float64]) -> tuple[NDArray[Any], ...]:
        """Scaled values, and the statistics with them."""
        count = self.count + 1
        rate = 1 / np.minimum(count, self.horizon)
        far = self._limited(x - self.mean)
        mean = self.mean + rate * far
        variance = (1 - rate) * (self.variance + rate * far * far)
        at, width = (mean, variance) if self.includes else (self.mean, self.variance)
        with np.errstate(invalid="ignore", divide="ignore"):
            z = np.clip((x - at) / np.sqrt(width), -self.clip, self.clip)
            known = (width > CONSTANT * at * at) & ~np.isnan(x)
            return np.where(known, z, 0), mean, variance, count

    def _limited(self, far: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distances from the mean as they change it."""
        known = (self.count >= EARLY) & (self.variance > CONSTANT * self.mean * self.mean)
        most = self.variance * np.maximum(NEAREST, 3 * np.minimum(self.count, self.horizon))
        return np.where(known & (far * far > most), np.copysign(np.sqrt(most), far), far)

    def apply(self, rows: NDArray[np.float64]) -> NDArray[np.float32]:
        """Rows scaled by the statistics as they are; for rows that were learned before."""
        scale = self.deviation
        with np.errstate(divide="ignore", invalid="ignore"):
            z = np.clip((rows - self.mean) / scale, -self.clip, self.clip)
        return np.where(np.isnan(rows) | (scale == 0), 0, z).astype(np.float32)

    def invert(self, scaled: NDArray[Any]) -> NDArray[np.float64]:
        """Values from scaled ones."""
        return np.asarray(scaled, np.float64) * self.deviation + self.mean

    @property
    def deviation(self) -> NDArray[np.float64]:
        """Standard deviations; zero for constant columns."""
        known = self.variance > CONSTANT * self.mean * self.mean
        return np.where(known, np.sqrt(self.variance), 0)

    def grow(self, columns: int) -> None:
        """Add columns of which nothing is known, up to `columns`."""
        more = np.zeros(columns - len(self.mean))
        self.mean, self.variance, self.count = (
            np.concatenate([each, more]) for each in (self.mean, self.variance, self.count)
        )

    def forget(self) -> None:
        """Let new values count as much as at the beginning: keep the statistics as one value."""
        np.minimum(self.count, 1, out=self.count)
