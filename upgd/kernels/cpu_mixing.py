# mypy: ignore-errors
"""Probabilities from several networks, mixed by weights that are learned, compiled. Needs numba."""

from __future__ import annotations

import math

import numpy as np

from upgd.kernels.compiling import njit


@njit(error_model="numpy", nogil=True)
def mix_rows(answers, labels, weights, rate, floor, mixed):
    """What :meth:`upgd.stream.mixing.Product.mix` does, one number at a time.

    `answers` are float32 [members, T, outputs], the networks' logits; `labels` int64 [T], or empty
    where they are not known; `weights` float64 [members], changed where labels are known; `rate`
    and `floor` those of the mixture. `mixed`, float64 [T, outputs], receives logarithms of
    probabilities.
    """
    members, count, outputs = answers.shape
    z = np.zeros((members, outputs))
    for t in range(count):
        for k in range(members):
            for i in range(outputs):
                z[k, i] = answers[k, t, i]
            _logarithms(z[k])
            for i in range(outputs):
                z[k, i] = max(z[k, i], floor)
        for i in range(outputs):
            mixed[t, i] = 0
            for k in range(members):
                mixed[t, i] += weights[k] * z[k, i]
        _logarithms(mixed[t])
        if len(labels) > 0:
            for k in range(members):
                slope = -z[k, labels[t]]
                for i in range(outputs):
                    slope += math.exp(mixed[t, i]) * z[k, i]
                weights[k] = max(0.0, weights[k] - rate * slope)


@njit(error_model="numpy", nogil=True)
def _logarithms(z):
    """Logits become logarithms of probabilities; all alike where one is not finite."""
    top = -math.inf
    for i in range(len(z)):
        if not math.isfinite(z[i]):
            z[:] = 0
            top = 0.0
            break
        top = max(top, z[i])
    total = 0.0
    for i in range(len(z)):
        total += math.exp(z[i] - top)
    for i in range(len(z)):
        z[i] -= top + math.log(total)
