# mypy: ignore-errors
"""What layered learners do between phases: sizes of units' weights, ages, recycling. Needs numba.

Arrays are pointers as :func:`upgd.kernels.cpu_layered.learn` gives them to a method's phases; the
table of `layers` is flat.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from upgd.kernels.cpu_functions import normals
from upgd.kernels.rules import MOST_NUMBERS
from upgd.kernels.vectors import (
    LANES,
    absolute,
    choose,
    lanes,
    less,
    load,
    spread,
    store,
    total,
    zeros,
)

_compiled = njit(error_model="numpy")  # division by zero gives infinity
_U = np.uint32


@_compiled
def row_products(w, row, pitch, acts, here, following):
    """A row's products with two samples, in the order in which the update forms them."""
    was = zeros(acts)
    now = zeros(acts)
    for j in range(0, pitch, LANES):
        w_j = load(w, row + j)
        was = was + w_j * load(acts, here + j)
        now = now + w_j * load(acts, following + j)
    return total(was), total(now)


@_compiled
def products(w, layers, acts, here, following, pre):
    """The first layer's sums for this sample and for the next."""
    outputs, pitch = layers[1], layers[2]
    for i in range(outputs):
        pre[i], pre[outputs + i] = row_products(w, i * pitch, pitch, acts, here, following)


@_compiled
def sizes_of(w, layers, layer, sizes, width):
    """The mean magnitude of the weights into each unit before `layer`; `width` on, out of it."""
    outputs, pitch, base = layers[6 * layer + 1], layers[6 * layer + 2], layers[6 * layer + 3]
    units, fan_in = layers[6 * layer], layers[6 * layer - 6]
    none = zeros(w)
    for i in range(units):
        row = layers[6 * layer - 3] + i * layers[6 * layer - 4]
        found = none
        for j in range(0, fan_in, LANES):
            inside = less(lanes() + _U(j), spread(_U(fan_in)))
            found = found + choose(inside, absolute(load(w, row + j)), none)
        sizes[i] = total(found) / fan_in
    for j in range(0, pitch, LANES):
        found = none
        for i in range(outputs):
            found = found + absolute(load(w, base + i * pitch + j))
        store(sizes, width + j, found)
    for j in range(units):
        sizes[width + j] /= outputs


@_compiled
def grow_older(layers, count, kept, age):
    """Count a step of all hidden units."""
    for i in range(layers[6 * count - 1]):
        kept[age + i] += 1


@_compiled
def choose_units(score, age, owed, count, by_share, factor, old, kept, chosen):
    """Mark the units of a layer that are re-initialised; `factor` is a share or a threshold."""
    mature = 0
    sum_ = 0.0
    for i in range(count):
        chosen[i] = 0
        sum_ += np.float64(kept[score + i])
        if kept[age + i] > old:
            mature += 1
    if not by_share:
        for i in range(count):
            if kept[age + i] > old and kept[score + i] <= factor * (sum_ / count):
                chosen[i] = 1
        return
    chosen[0] = factor * mature  # rounded before it is added, as other executors do
    kept[owed] += chosen[0]
    chosen[0] = 0
    many = int(kept[owed])
    kept[owed] -= many
    for _ in range(min(many, mature)):
        best = -1
        for i in range(count):
            waits = chosen[i] == 0 and kept[age + i] > old
            if waits and (best < 0 or kept[score + i] < kept[score + best]):
                best = i
        chosen[best] = 1


@_compiled
def recycle(
    starts, features, copied, states, score, age, average, owed, share, threshold, mature, every,
    layers, count, places, w, s, gap, kept, acts, here, following, delta, hyper, c, t, step, key,
    noisy, z, bias_z, fresh, words, table, width, sizes, pre,
):  # fmt: skip
    """Re-initialise hidden units, as :class:`upgd.optim.layered.LayerOptimizer` does.

    The first arguments say with which values the states of features begin, which is their first,
    which of the `states` of weights begin as the weight; then come places of states of features and
    layers, and numbers of hyperparameters; -1 stands for nothing.
    """
    for layer in range(1, count):
        numbers = MOST_NUMBERS * layer
        if every >= 0 and t % max(1, math.floor(hyper[numbers + every] + 0.5)) != 0:
            continue
        units = layers[6 * layer]
        first = layers[6 * layer + 5] - units
        choose_units(
            places[score] + first, places[age] + first, places[owed] + layer, units, share >= 0,
            hyper[numbers + max(share, threshold)],
            hyper[numbers + mature] if mature >= 0 else -1.0, kept, sizes,
        )  # fmt: skip
        outputs, pitch, base = layers[6 * layer + 1], layers[6 * layer + 2], layers[6 * layer + 3]
        for unit in range(units):
            if sizes[unit] == 0:
                continue
            for i in range(outputs):
                at = base + i * pitch + unit
                if average >= 0:
                    w[base + i * pitch + units] += w[at] * kept[places[average] + first + unit]
                w[at] = 0
                _reset_states(w, s, gap, at, copied, states)
            _renew_row(
                copied, states, layer - 1, unit, layers, w, s, gap, step, key, fresh, words, table,
                width,
            )  # fmt: skip
            for k in range(len(starts)):
                kept[places[features + k] + first + unit] = starts[k]
            if layer == 1:
                row = unit * layers[2]
                found = row_products(w, row, layers[2], acts, here, following)
                pre[unit], pre[layers[1] + unit] = found


@_compiled
def _reset_states(w, s, gap, at, copied, states):
    """The states with which a weight begins."""
    for k in range(states):
        s[k * gap + at] = w[at]
        if not copied[k]:
            s[k * gap + at] = 0


@_compiled
def _renew_row(
    copied, states, layer, unit, layers, w, s, gap, step, key, fresh, words, table, width
):
    """Normal weights into a unit, with the variance of initial ones, and a bias of zero."""
    inputs, span = layers[6 * layer], -(-layers[6 * layer + 1] // 4)
    row = layers[6 * layer + 3] + unit * layers[6 * layer + 2]
    tensor, quad = _U(2 * layer), unit % span
    normals(fresh, words, table, width, inputs, quad * inputs, tensor, step, key)
    scale = 1.0 / math.sqrt(inputs) * 3.0**-0.5
    for j in range(inputs):
        w[row + j] = fresh[unit // span * width + j] * scale
    w[row + inputs] = 0
    for j in range(inputs + 1):
        _reset_states(w, s, gap, row + j, copied, states)
