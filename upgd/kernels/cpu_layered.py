# mypy: ignore-errors
"""A stack of layered learners on CPUs: one learner, many steps, in one call.

:func:`learn` runs a learner through a chunk of samples, like :func:`upgd.kernels.cpu_dense.learn`:
it is compiled once, and what a method does comes in as a compiled function
(:mod:`upgd.kernels.cpu_phases`). Sums before activations may be normalised (LayerNorm without
weights), and so may inputs, by their running means and variances.

The order of every sum is fixed (:mod:`upgd.kernels.vectors`), so a result does not depend on where
chunks begin, on other learners or on the number of threads. Needs numba.
"""

from __future__ import annotations

import inspect
import math
from functools import cache

import numpy as np
from numba import njit

from upgd.kernels import cpu_dense, cpu_functions, cpu_recycle, layered, subnormals, vectors
from upgd.kernels.cpu_dense import (
    ACCURACY,
    BASE,
    BEGIN,
    INPUTS,
    LEAKY_RELU,
    LOSS,
    OUTPUTS,
    PITCH,
    PLASTICITY,
    RELU,
    ROW_AT,
    TANH,
    _activate,
    _as,
    _diagnose,
    _fetch,
    _loss,
    _two_products,
)
from upgd.kernels.cpu_functions import COEFFICIENTS
from upgd.kernels.cpu_recycle import products
from upgd.kernels.layered import INPUT_DECAY, INPUT_FLOOR, LAYER_NORM_EPSILON
from upgd.kernels.rules import MOST_STATES, fingerprint, load_module
from upgd.kernels.subnormals import flush_subnormals, give_back
from upgd.kernels.vectors import LANES, address, call, load, store

_HELPERS = (cpu_dense, cpu_functions, cpu_recycle, layered, subnormals, vectors)
VERSION = fingerprint(__file__, *(module.__file__ for module in _HELPERS))
"""Part of the compiled learner's source: a change of the helpers invalidates its cache."""

_compiled = njit(error_model="numpy")  # division by zero gives infinity


@_compiled
def _normalise_inputs(acts, place, count, statistics, t):
    """Count a sample, the t-th, and normalise it: :class:`upgd.networks.OnlineNorm`."""
    rate = _as(acts, max(1 - INPUT_DECAY, 1.0 / t))
    rest = _as(acts, 1) - rate
    for j in range(count):
        apart = acts[place + j] - statistics[0, j]
        statistics[1, j] = rest * (statistics[1, j] + rate * (apart * apart))
        statistics[0, j] += rate * apart
        variance = max(statistics[1, j], _as(acts, INPUT_FLOOR))
        acts[place + j] = (acts[place + j] - statistics[0, j]) / math.sqrt(variance)


@_compiled
def _normalise(values, begin, count):
    """LayerNorm in place; returns by how much values were multiplied."""
    sum_ = 0.0
    for i in range(begin, begin + count):
        sum_ += np.float64(values[i])
    mean = sum_ / count
    squares = 0.0
    for i in range(begin, begin + count):
        squares += (values[i] - mean) * (values[i] - mean)
    scale = 1.0 / math.sqrt(squares / count + LAYER_NORM_EPSILON)
    for i in range(begin, begin + count):
        values[i] = (values[i] - mean) * scale
    return scale


@_compiled
def _forward(w, acts, after, layers, pre, z, activation, layer_norm, normed, scales):
    """From the first layer's sums to outputs: of this sample, and of the last one once more.

    `normed` receives this sample's normalised sums, `scales` each layer's factor.
    """
    count = len(layers)
    for layer in range(1, count):
        begin, inputs, pitch = layers[layer, BEGIN], layers[layer, INPUTS], layers[layer, PITCH]
        if layer == 1:
            for i in range(inputs):
                acts[begin + i] = pre[1, i]
                after[begin + i] = pre[0, i]
        if layer_norm:
            scales[layer] = _normalise(acts, begin, inputs)
            _normalise(after, begin, inputs)
            for i in range(inputs):
                normed[layers[layer, ROW_AT] - inputs + i] = acts[begin + i]
        _activate(acts, begin, begin + inputs, activation)
        _activate(after, begin, begin + inputs, activation)
        for i in range(layers[layer, OUTPUTS]):
            base = layers[layer, BASE] + i * pitch
            now, was = _two_products(w, base, pitch, acts, after, begin)
            if layer < count - 1:
                acts[begin + pitch + i] = now
                after[begin + pitch + i] = was
            else:
                z[1, i] = now
                z[0, i] = was
    if count == 1:
        for i in range(layers[0, OUTPUTS]):
            z[1, i] = pre[1, i]
            z[0, i] = pre[0, i]


@_compiled
def _backward(w, acts, layers, delta, back, activation, layer_norm, normed, scales):
    """Compute all deltas from those of the last layer; returns whether a derivative is infinite."""
    infinite = False
    for layer in range(len(layers) - 1, 0, -1):
        inputs, pitch = layers[layer, INPUTS], layers[layer, PITCH]
        row_at, base = layers[layer, ROW_AT], layers[layer, BASE]
        for j in range(pitch):
            back[j] = 0
        for i in range(layers[layer, OUTPUTS]):
            d = delta[row_at + i]
            for j in range(0, pitch, LANES):
                store(back, j, load(back, j) + load(w, base + i * pitch + j) * d)
        for j in range(inputs):
            h = acts[layers[layer, BEGIN] + j]
            k = _as(w, 1)
            if activation == RELU:
                k = k if h > 0 else h * _as(w, 0)
            elif activation == LEAKY_RELU:
                k = k if h > 0 else _as(w, 0.01)
            elif activation == TANH:
                k = k - h * h
            delta[row_at - inputs + j] = back[j] * k
            if abs(back[j]) == math.inf:
                infinite = True
        if layer_norm:
            _backward_norm(delta, normed, row_at - inputs, inputs, scales[layer])
    return infinite


@_compiled
def _backward_norm(delta, normed, begin, count, scale):
    """Derivatives by normalised sums become those by the sums."""
    plain = 0.0
    along = 0.0
    for i in range(begin, begin + count):
        plain += np.float64(delta[i])
        along += np.float64(delta[i]) * normed[i]
    plain /= count
    along /= count
    for i in range(begin, begin + count):
        delta[i] = scale * (delta[i] - plain - normed[i] * along)


@_compiled
def learn(
    advance, activation, squared, layer_norm, input_norm, noisy, layers, activations, places,
    w, s, gap, offset, kept, statistics, hyper, decays, corrections, began, key,
    rows, index, permutation, slots, labels, targets, importance,
    start, steps, window, measured, series, diverged, answers,
):  # fmt: skip
    """Run one learner through a chunk.

    Arguments, several to a line:
        advance: Of :func:`upgd.kernels.cpu_phases.advance_function`.
        activation, squared, layer_norm, input_norm, noisy: Of the network and of the loss; whether
            weights are perturbed.
        layers: The layout's table, in numbers.
        activations: How many numbers hold layers' inputs.
        places: Where the learner's states at places other than weights begin in `kept`.
        w: The learner's weights.
        s, gap, offset: The method's states; the learner's first begins at `offset`, the next one
            `gap` further on.
        kept, statistics: The learner's, see :class:`upgd.engine.layered.LayeredStack`.
        hyper, decays, corrections, began, key: The learner's, layer by layer; the step at which it
            began; its seed.
        rows, index, permutation, slots, labels, targets: The chunk, see upgd.engine.feed.
        importance: By which the loss of each sample is multiplied; empty for 1.
        start, steps: The chunk's position in the run.
        window, measured: Of the metrics; which of the run's steps are measured, empty for none.
        series, diverged: The results.
        answers: Receives the outputs for each sample before it is learned; empty for none.
    """
    count = len(layers)
    last = layers[count - 1]
    units = last[ROW_AT] + last[OUTPUTS]
    width = 0
    for layer in range(count):
        width = max(width, layers[layer, PITCH], layers[layer, OUTPUTS] + LANES)
    acts = np.zeros(activations, w.dtype)
    after = np.zeros(activations, w.dtype)
    for layer in range(count):
        one = layers[layer, BEGIN] + layers[layer, INPUTS]
        acts[one] = 1
        after[one] = 1
        if layer == 0:
            acts[one - layers[0, PITCH]] = 1
    delta = np.zeros(units, w.dtype)
    normed = np.zeros(units, w.dtype)
    scales = np.ones(count)
    back = np.zeros(width, w.dtype)
    pre = np.zeros((2, layers[0, OUTPUTS]), w.dtype)
    outputs = np.zeros((2, last[OUTPUTS]), w.dtype)
    first_by = np.zeros((2, last[OUTPUTS]), w.dtype)
    second_by = np.zeros(last[OUTPUTS], w.dtype)
    z = np.zeros(4 * width, w.dtype)
    bias_z = np.zeros(4 * width, w.dtype)
    fresh = np.zeros(4 * width, w.dtype)
    sizes = np.zeros(2 * width, w.dtype)
    words = np.zeros(4 * width, np.uint32)
    table = COEFFICIENTS.copy()
    before = flush_subnormals()  # from here on nothing is allocated, so nothing raises
    pitch, begin, inputs = layers[0, PITCH], layers[0, BEGIN], layers[0, INPUTS]
    flat, sums_of_first = layers.reshape(-1), pre.reshape(-1)
    loss_before = 0.0

    here = begin - start % 2 * pitch
    _fetch(acts, here, layers, rows, index, permutation, slots, 0)
    if input_norm:
        _normalise_inputs(acts, here, inputs, statistics, start - began[0] + 1)
    products(w, flat, acts, here, here, sums_of_first)

    for turn in range(steps + 1):
        step = start + turn
        here = begin - step % 2 * pitch
        following = begin - (step + 1) % 2 * pitch
        _forward(w, acts, after, layers, pre, outputs, activation, layer_norm, normed, scales)
        if turn > 0:
            late, _ = _loss(
                outputs[0], labels[turn - 1], targets[turn - 1], squared, first_by[0], second_by
            )
            gained = 1.0 - np.float64(late) / max(loss_before, 1e-8)
            gained = min(max(gained, 0.0), 1.0)
            if late == late:
                series[(step - 1) // window, PLASTICITY] += gained
        if turn == steps:
            break
        if turn + 1 < steps:  # the next chunk fetches its own first sample, and counts it
            _fetch(acts, following, layers, rows, index, permutation, slots, turn + 1)
            if input_norm:
                _normalise_inputs(acts, following, inputs, statistics, step - began[0] + 2)
        loss, right = _loss(
            outputs[1], labels[turn], targets[turn], squared, first_by[1], second_by
        )
        loss_before = np.float64(loss)
        if len(answers) > 0:
            for i in range(last[OUTPUTS]):
                answers[turn, i] = outputs[1, i]
        sums = series[step // window]
        sums[LOSS] += loss_before
        if right:
            sums[ACCURACY] += 1.0
        for layer in range(count):
            for k in range(MOST_STATES):
                decay = decays[layer, k]
                corrections[layer, k] = corrections[layer, k] * decay + (1.0 - decay)
        for i in range(last[OUTPUTS]):
            delta[last[ROW_AT] + i] = first_by[1, i]
        if len(importance) > 0:
            for i in range(last[ROW_AT], units):
                delta[i] *= importance[turn]
        infinite = _backward(w, acts, layers, delta, back, activation, layer_norm, normed, scales)
        if diverged[0] < 0 and (infinite or not math.isfinite(loss)):
            diverged[0] = step
        if len(measured) > 0 and measured[step]:
            _diagnose(acts, delta, layers, step % 2 * pitch, sums)
        call(
            advance, address(flat, 0), count, address(places, 0), address(w, 0),
            address(s, offset), gap, address(kept, 0), address(acts, 0), here, following,
            address(delta, 0), address(hyper, 0), address(corrections.reshape(-1), 0),
            step - began[0] + 1, step, key, noisy, address(z, 0), address(bias_z, 0),
            address(fresh, 0), address(words, 0), address(table, 0), width, address(sizes, 0),
            address(sums_of_first, 0),
        )  # fmt: skip
    give_back(before)


@cache
def compiled():
    """:func:`learn`, with its machine code kept beside its caller's source."""
    arguments = ", ".join(inspect.signature(learn.py_func).parameters)
    text = (
        f'"""upgd.kernels.cpu_layered.learn {VERSION}."""\n\n'
        "from upgd.kernels import cpu_layered\nfrom upgd.kernels.compiling import njit\n\n\n"
        '@njit(error_model="numpy", nogil=True)\n'
        f"def learn({arguments}):\n    cpu_layered.learn({arguments})\n"
    )
    return load_module(text, "cpu_layered_learn").learn
