# mypy: ignore-errors
"""Running means and variances of a stream's columns, compiled. Needs numba."""

from __future__ import annotations

import math

from upgd.kernels.compiling import njit


@njit(error_model="numpy", nogil=True)
def scale_rows(
    rows, mean, variance, count, horizon, clip, includes, learn, out, constant, early, nearest
):
    """What :meth:`upgd.stream.scaling.Scaler.learn` and ``peek`` do, one number at a time.

    `rows` are float64 [T, columns] with NaN for what is missing; `mean`, `variance` and `count`
    float64 [columns], changed if `learn`; `horizon`, `clip` and `includes` the scaler's. `out`,
    float32 [T, columns], receives the scaled rows. `constant`, `early` and `nearest` are that
    module's.
    """
    for t in range(len(rows)):
        for j in range(rows.shape[1]):
            x = rows[t, j]
            if math.isnan(x):
                out[t, j] = 0
                continue
            seen = count[j] + 1
            rate = 1 / min(seen, horizon)
            far = x - mean[j]
            if count[j] >= early and variance[j] > constant * mean[j] * mean[j]:
                most = variance[j] * max(nearest, 3 * min(count[j], horizon))
                if far * far > most:
                    far = math.copysign(math.sqrt(most), far)
            centre = mean[j] + rate * far
            spread = (1 - rate) * (variance[j] + rate * far * far)
            at, width = (centre, spread) if includes else (mean[j], variance[j])
            if width > constant * at * at:
                out[t, j] = min(max((x - at) / math.sqrt(width), -clip), clip)
            else:
                out[t, j] = 0
            if learn:
                mean[j], variance[j], count[j] = centre, spread, seen
