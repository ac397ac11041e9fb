# mypy: ignore-errors
"""Sums, means and maxima over samples and weights, for compiled layered steps. Needs numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from upgd.kernels.compiling import njit as kept
from upgd.kernels.cpu_math import OPTIONS, numbers_at
from upgd.kernels.vectors import LANES, absolute, largest, load, maximum, total, zeros


@kept(**OPTIONS)
def largest_read(addresses, sizes, like):
    """The largest magnitude in stretches of memory of the type of `like`, a zero; NaN stays."""
    found = abs(like)
    for place in range(len(addresses)):
        n = sizes[place]
        read = numbers_at(addresses[place], like)
        most = zeros(read)
        whole = n - n % LANES
        for i in range(0, whole, LANES):
            most = maximum(most, absolute(load(read, i)))
        found = maximum(found, largest(most))
        for i in range(whole, n):
            found = maximum(found, abs(read[i]))
    return found


@njit(**OPTIONS)
def average(values):
    """The mean over samples; exactly the value if all are equal."""
    beyond = 0.0
    for k in range(len(values)):
        beyond += np.float64(values[k]) - np.float64(values[0])
    return np.float64(values[0]) + beyond / len(values)


@njit(**OPTIONS)
def clear(scratch):
    """Set all but the first two rows to zero."""
    for row in range(2, scratch.shape[0]):
        for j in range(scratch.shape[1]):
            scratch[row, j] = 0


@njit(**OPTIONS)
def take(values, found):
    """Put a value for each sample into a row."""
    for k in range(len(values)):
        values[k] = found[k]


@njit(**OPTIONS)
def means(samples, count, size, factor, found):
    """The mean of `count` rows of samples."""
    for j in range(size):
        found[j] = 0
    for n in range(count):
        for j in range(size):
            found[j] += factor * samples[n * size + j]
    for j in range(size):
        found[j] /= count


@njit(**OPTIONS)
def sizes_of(before, into, after, outputs, inputs, w_in, w_out):
    """The mean magnitude of the weights into and out of each of `inputs` hidden units."""
    whole = into - into % LANES
    for i in range(inputs):
        sums = zeros(before)
        for j in range(0, whole, LANES):
            sums = sums + absolute(load(before, i * into + j))
        found = np.float64(total(sums))
        for j in range(whole, into):
            found += np.float64(abs(before[i * into + j]))
        w_in[i] = found / max(1, into)
        w_out[i] = 0
    for i in range(outputs):
        for j in range(inputs):
            w_out[j] += abs(after[i * inputs + j])
    for j in range(inputs):
        w_out[j] /= max(1, outputs)
