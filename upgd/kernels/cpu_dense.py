# mypy: ignore-errors
"""A stack of dense learners on CPUs: one learner, many steps, in one call.

:func:`learn` runs a learner through a chunk of samples. It knows no method: what a method does to
a row of weights comes in as three compiled functions (:mod:`upgd.kernels.cpu_rows`), so it is
compiled once, and a method's part in a second or two; both are kept on disk.

A step passes over the weights once: the update reads weights and states, forms the gradient
``delta · input``, writes them back and, for the first layer, takes the products with this sample
and with the next while the weights are in registers. The pass that finds the global η is nearly
always avoided: the update records each row's largest utility and weight, and a row whose bound lies
below the largest trace found so far is not read (see :func:`_largest_trace`).

Noise is generated for four rows at a time into a buffer that stays in the first-level cache.

The order of every sum is fixed (:mod:`upgd.kernels.vectors`), so a result does not depend on where
chunks begin, on other learners or on the number of threads. Needs numba.
"""

from __future__ import annotations

import inspect
import math
from functools import cache

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from upgd.kernels import cpu_functions, philox, subnormals, vectors
from upgd.kernels.cpu_functions import COEFFICIENTS, normals
from upgd.kernels.rules import (
    DUE,
    MOST_NUMBERS,
    OUTPUT_GATE,
    SHARE,
    TIMES,
    fingerprint,
    load_module,
)
from upgd.kernels.subnormals import flush_subnormals, give_back
from upgd.kernels.vectors import (
    LANES,
    absolute,
    address,
    call,
    choose,
    lanes,
    largest,
    less,
    load,
    maximum,
    minimum,
    smallest,
    spread,
    store,
    total,
)

_HELPERS = (cpu_functions, subnormals, vectors, philox)
VERSION = fingerprint(__file__, *(module.__file__ for module in _HELPERS))
"""Part of the compiled learner's source: a change of the helpers invalidates its cache."""

_compiled = njit(error_model="numpy")  # division by zero gives infinity

# Activations by number, as in upgd.networks.
RELU, LEAKY_RELU, TANH, LINEAR = range(4)
# The columns of the metrics.
LOSS, PLASTICITY, ACCURACY, ZEROS, GRAD_L0, GRAD_L1, GRAD_L2, MEASURED, METRICS = range(9)
# How η is computed.
NO_ETA, GLOBAL, LOCAL = range(3)
ROUNDING = 1e-6
"""A bound on the rounding error of a few float32 operations."""
# The columns of a layer's row: Layout.layer_table in numbers, not units of alignment.
INPUTS, OUTPUTS, PITCH, BASE, BEGIN, ROW_AT = range(6)

_U = np.uint32


@intrinsic
def _as(typingctx, like, value):
    """A number in the type of an array."""

    def code(context, builder, sig, args):
        return context.cast(builder, args[1], value, like.dtype)

    return like.dtype(like, value), code


def _tiny(like):
    raise NotImplementedError


@overload(_tiny)
def _choose_tiny(like):
    tiny = np.finfo(np.float32 if like.dtype == types.float32 else np.float64).tiny
    return lambda like: tiny


@_compiled
def _activate(values, begin, end, kind):
    """Sums in units become their outputs; NaN stays."""
    if kind == RELU:
        for i in range(begin, end):
            values[i] = values[i] if values[i] > 0 else values[i] * _as(values, 0)
    elif kind == LEAKY_RELU:
        for i in range(begin, end):
            values[i] = values[i] if values[i] > 0 else values[i] * _as(values, 0.01)
    elif kind == TANH:
        for i in range(begin, end):
            values[i] = math.tanh(values[i])


@_compiled
def _two_products(w, base, pitch, a, b, begin):
    """A row's products with two vectors; the update forms them in the same order."""
    first = spread(_as(w, 0))
    second = spread(_as(w, 0))
    for j in range(0, pitch, LANES):
        row = load(w, base + j)
        first = first + row * load(a, begin + j)
        second = second + row * load(b, begin + j)
    return total(first), total(second)


@_compiled
def _note(w, s, offset, layers, top, low, big):
    """Each row's largest and smallest utility and largest weight, as the update notes them."""
    for layer in range(len(layers)):
        inputs, pitch = layers[layer, INPUTS], layers[layer, PITCH]
        for i in range(layers[layer, OUTPUTS]):
            at = layers[layer, BASE] + i * pitch
            upper, lower = spread(_as(w, -math.inf)), spread(_as(w, math.inf))
            weight = spread(_as(w, 0))
            for j in range(0, inputs + 1, LANES):
                u = load(s, offset + at + j)
                inside = less(lanes() + _U(j), spread(_U(inputs + 1)))
                upper = maximum(upper, choose(inside, u, spread(_as(w, -math.inf))))
                lower = minimum(lower, choose(inside, u, spread(_as(w, math.inf))))
                weight = maximum(weight, absolute(load(w, at + j)))
            row = layers[layer, ROW_AT] + i
            top[row], low[row], big[row] = largest(upper), smallest(lower), largest(weight)


@_compiled
def _fetch(acts, place, layers, rows, index, permutation, slots, here):
    """Copy one sample's inputs to where the first layer reads them."""
    source = index[here]
    if permutation.shape[1] > 0:
        slot = slots[here]
        for j in range(layers[0, INPUTS]):
            acts[place + j] = rows[source, permutation[slot, j]]
    else:
        for j in range(layers[0, INPUTS]):
            acts[place + j] = rows[source, j]


@_compiled
def _forward(w, acts, after, layers, pre, z, activation):
    """From the first layer's sums to outputs: of this sample, and of the last one once more."""
    count = len(layers)
    for layer in range(1, count):
        begin = layers[layer, BEGIN]
        inputs = layers[layer, INPUTS]
        if layer == 1:
            for i in range(inputs):
                acts[begin + i] = pre[1, i]
                after[begin + i] = pre[0, i]
        _activate(acts, begin, begin + inputs, activation)
        _activate(after, begin, begin + inputs, activation)
        pitch = layers[layer, PITCH]
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
def _loss(z, label, target, squared, first, second):
    """The loss, its derivatives by the outputs, and whether the guess is right."""
    count = len(z)
    if squared:
        loss = _as(z, 0)
        for i in range(count):
            error = z[i] - _as(z, target[i])
            loss += error * error
            first[i] = _as(z, 2) * error / _as(z, count)
            second[i] = _as(z, 2) / _as(z, count)
        return loss / _as(z, count), False
    top = z[0]
    best = 0
    for i in range(1, count):
        if z[i] > top:
            top = z[i]
            best = i
    sum_ = _as(z, 0)
    for i in range(count):
        first[i] = math.exp(z[i] - top)
        sum_ += first[i]
    loss = math.log(sum_) - (z[label] - top)
    for i in range(count):
        p = first[i] / sum_
        second[i] = p - p * p
        first[i] = p - _as(z, 1) if i == label else p
    return loss, best == label


@_compiled
def _backward(w, acts, layers, delta, hess, dh, d2h, back, curve, activation, second):
    """Compute all deltas from those of the last layer; returns whether a derivative is infinite."""
    infinite = False
    for layer in range(len(layers) - 1, 0, -1):
        inputs, pitch = layers[layer, INPUTS], layers[layer, PITCH]
        row_at, base = layers[layer, ROW_AT], layers[layer, BASE]
        for j in range(pitch):
            back[j] = 0
            curve[j] = 0
        for i in range(layers[layer, OUTPUTS]):
            d = delta[row_at + i]
            for j in range(0, pitch, LANES):
                store(back, j, load(back, j) + load(w, base + i * pitch + j) * d)
            if second:
                q = hess[row_at + i]
                for j in range(0, pitch, LANES):
                    row = load(w, base + i * pitch + j)
                    store(curve, j, load(curve, j) + row * row * q)
        for j in range(inputs):
            h = acts[layers[layer, BEGIN] + j]
            k = _as(w, 1)
            if activation == RELU:
                k = k if h > 0 else h * _as(w, 0)
            elif activation == LEAKY_RELU:
                k = k if h > 0 else _as(w, 0.01)
            elif activation == TANH:
                k = k - h * h
            place = row_at - inputs + j
            delta[place] = back[j] * k
            if second:
                bend = curve[j] * k * k
                if activation == TANH:
                    bend += _as(w, -2) * h * k * back[j]
                hess[place] = bend
            dh[place] = back[j]
            d2h[place] = curve[j]
            if abs(back[j]) == math.inf:
                infinite = True
    return infinite


@_compiled
def _norms(values, begin, count):
    """How many are not zero, the sum of magnitudes, and that of squares."""
    nonzero = 0
    l1 = 0.0
    l2 = 0.0
    for i in range(begin, begin + count):
        x = np.float64(values[i])
        if x != 0:
            nonzero += 1
        l1 += abs(x)
        l2 += x * x
    return nonzero, l1, l2


@_compiled
def _diagnose(acts, delta, layers, shift, sums):
    """Zeros among all hidden outputs; norms of a rank-one gradient, products of two norms."""
    nonzero = 0.0
    l1 = 0.0
    l2 = 0.0
    weights = 0.0
    zeros = 0.0
    hidden = 0.0
    for layer in range(len(layers)):
        inputs, outputs = layers[layer, INPUTS], layers[layer, OUTPUTS]
        begin = layers[layer, BEGIN] - (shift if layer == 0 else 0)
        x0, x1, x2 = _norms(acts, begin, inputs + 1)
        d0, d1, d2 = _norms(delta, layers[layer, ROW_AT], outputs)
        nonzero += x0 * d0
        l1 += x1 * d1
        l2 += x2 * d2
        weights += (inputs + 1) * outputs
        if layer > 0:
            zeros += inputs + 1 - x0
            hidden += inputs
    sums[ZEROS] += zeros / max(1.0, hidden)
    sums[GRAD_L0] += nonzero / weights
    sums[GRAD_L1] += l1
    sums[GRAD_L2] += math.sqrt(l2)
    sums[MEASURED] += 1.0


@_compiled
def _correct(corrections, decays, layers, age):
    """The corrections of a learner's step number `age`, layer by layer, and whether it is due."""
    for layer in range(len(layers)):
        at = layer * TIMES
        for k in range(at, at + TIMES):
            corrections[k] = corrections[k] * decays[k] + (1.0 - decays[k])
        corrections[at + SHARE] = corrections[at] / corrections[0]
        period = max(1, np.int64(decays[at + DUE]))
        corrections[at + DUE] = 1.0 if age % period == 0 else 0.0


@_compiled
def _scale_features(trace, acts, dh, d2h, layers, utility, gates, decays, local, second):
    """Trace the features' utilities and scale them, for the update to read row by row."""
    top = -math.inf
    for layer in range(1, len(layers)):
        units = layers[layer, INPUTS]
        row_at = layers[layer, ROW_AT] - units
        h = address(acts, layers[layer, BEGIN])
        # Without curvature the second derivative is not read.
        bends = address(d2h if second else dh, row_at)
        beta = decays[(layer - 1) * TIMES]
        call(trace, address(dh, row_at), bends, h, address(utility, row_at), units, beta)
        squares = 0.0
        for i in range(row_at, row_at + units):
            u = np.float64(utility[i])
            squares += u * u
            if not u <= top:  # propagates NaN
                top = u
        if local:
            eta = max(_as(gates, math.sqrt(squares)), _tiny(gates))
            for i in range(row_at, row_at + units):
                gates[i] = utility[i] / eta
    if not local:
        eta = max(_as(gates, abs(top)), _tiny(gates))
        for i in range(layers[len(layers) - 1, ROW_AT]):
            gates[i] = utility[i] / eta


@_compiled
def _largest_trace(
    reduce, w, s, offset, acts, layers, parity, delta, hess, hyper, decays, corrections, bounded,
    second, top, low, big, reach, out,
):  # fmt: skip
    """The largest trace that any weight will have after this step; fills `reach`.

    Where layers' traces decay differently, it is the largest when corrected, in units of the first
    layer's.

    Where traces are those of utilities, they are `bounded`: with g and h a row's largest
    derivatives, they will lie between ``β·low - c`` and ``β·top + c``, where
    ``c = (1-β)·(½·h·big + g)·big``. Where that is less than what another row has, the row need not
    be read. `reach` is how far from zero they may lie, infinite where nothing is known.
    """
    found = -math.inf
    lead = np.argmax(top)  # is likely to lead again
    for turn in range(2):
        for layer in range(len(layers)):
            inputs, pitch = layers[layer, INPUTS], layers[layer, PITCH]
            row_at, outputs = layers[layer, ROW_AT], layers[layer, OUTPUTS]
            begin = layers[layer, BEGIN] - (parity * pitch if layer == 0 else 0)
            if turn == 0 and not row_at <= lead < row_at + outputs:
                continue
            beta, share = decays[layer * TIMES], corrections[layer * TIMES + SHARE]
            furthest = 0.0
            for j in range(begin, begin + inputs + 1):
                furthest = max(furthest, abs(np.float64(acts[j])))
            for i in range(outputs):
                row = row_at + i
                if (turn == 0) != (row == lead):
                    continue
                reach[row] = math.inf
                c = abs(np.float64(delta[row])) * furthest
                if second:
                    c += 0.5 * abs(np.float64(hess[row])) * furthest * furthest * big[row]
                c *= (1 - beta) * big[row]
                upper, lower = beta * np.float64(top[row]) + c, beta * np.float64(low[row]) - c
                if bounded:
                    reach[row] = max(abs(upper), abs(lower)) * (1 + ROUNDING)
                    if upper + ROUNDING * (abs(upper) + 2 * c) < found * share:
                        continue
                at = layers[layer, BASE] + i * pitch
                call(
                    reduce, address(w, at), address(s, offset + at), address(acts, begin), inputs,
                    delta[row], hess[row], address(hyper, layer * MOST_NUMBERS), address(out, 0),
                )  # fmt: skip
                largest_here = np.float64(out[0]) / share
                if not largest_here <= found:  # propagates NaN
                    found = largest_here
    return found


@_compiled
def _row_norms(
    reduce, w, s, offset, acts, layers, parity, delta, hess, hyper, etas, bias_etas, out
):
    """Each row's norm of what utilities will be after this step; a layer's biases are one row."""
    for layer in range(len(layers)):
        inputs, pitch = layers[layer, INPUTS], layers[layer, PITCH]
        begin = layers[layer, BEGIN] - (parity * pitch if layer == 0 else 0)
        squares = 0.0
        for i in range(layers[layer, OUTPUTS]):
            row = layers[layer, ROW_AT] + i
            at = layers[layer, BASE] + i * pitch
            call(
                reduce, address(w, at), address(s, offset + at), address(acts, begin), inputs,
                delta[row], hess[row], address(hyper, layer * MOST_NUMBERS), address(out, 0),
            )  # fmt: skip
            etas[row] = max(out[0], _tiny(etas))
            squares += np.float64(out[1]) * np.float64(out[1])
        bias_etas[layer] = max(_as(etas, math.sqrt(squares)), _tiny(etas))


@_compiled
def _update(
    update, near, w, s, gap, offset, acts, layers, parity, delta, hess, etas, bias_etas, reach,
    hyper, c, noisy, spare_last, key, step, z, bias_z, words, table, pre, top, low, big, out,
):  # fmt: skip
    """Update all weights of a learner, four rows of a layer at a time."""
    for layer in range(len(layers)):
        inputs, pitch = layers[layer, INPUTS], layers[layer, PITCH]
        row_at, outputs = layers[layer, ROW_AT], layers[layer, OUTPUTS]
        begin = layers[layer, BEGIN] - (parity * pitch if layer == 0 else 0)
        following = layers[layer, BEGIN] - ((1 - parity) * pitch if layer == 0 else 0)
        span = -(-outputs // 4)
        drawn = noisy
        if spare_last and layer == len(layers) - 1:
            drawn = False
            z[:] = 0
        if drawn:
            normals(bias_z, words, table, len(bias_z) // 4, span, 0, _U(2 * layer + 1), step, key)
        for i in range(span):
            if drawn:
                normals(z, words, table, len(z) // 4, inputs, i * inputs, _U(2 * layer), step, key)
            for lane in range(4):
                unit = i + lane * span
                if unit >= outputs:
                    break
                numbers = lane * (len(z) // 4)
                if drawn:
                    z[numbers + inputs] = bias_z[lane * (len(bias_z) // 4) + i]
                row = row_at + unit
                at = layers[layer, BASE] + unit * pitch
                call(
                    near if reach[row] <= etas[row] else update, address(w, at),
                    address(s, offset + at), gap, address(acts, begin), address(acts, following),
                    address(z, numbers), inputs, delta[row], hess[row], etas[row],
                    bias_etas[layer], address(hyper, layer * MOST_NUMBERS),
                    address(c, layer * TIMES), address(out, 0),
                )  # fmt: skip
                if layer == 0:
                    pre[0, unit] = out[0]
                    pre[1, unit] = out[1]
                top[row], low[row], big[row] = out[2], out[3], out[4]


@_compiled
def learn(
    update, near, reduce, trace, eta_kind, bounded, features, local_features, second, noisy,
    activation, squared, layers, activations, w, s, gap, offset, utility, hyper, decays,
    corrections, began, key,
    rows, index, permutation, slots, labels, targets, importance,
    start, steps, window, measured, progress, series, diverged, bounds, answers,
):  # fmt: skip
    """Run one learner through a chunk.

    Arguments, several to a line:
        update, near, reduce, trace: Of :func:`row_functions`.
        eta_kind, bounded: NO_ETA, GLOBAL or LOCAL; whether :func:`_largest_trace` knows bounds.
        features, local_features, second, noisy: Whether utilities are features', whether those are
            scaled layer by layer, whether curvature is read, whether weights are perturbed.
        activation, squared: Of the network and of the loss.
        layers: The layout's table, in numbers.
        activations: How many numbers hold layers' inputs.
        w: The learner's weights.
        s, gap, offset: The method's states; the learner's first begins at `offset`, the next one
            `gap` further on.
        utility: The features'.
        hyper, decays, corrections: The learner's, layer after layer.
        began, key: The step at which the learner began, and its seed.
        rows, index, permutation, slots, labels, targets: The chunk, see upgd.engine.feed.
        importance: By which the loss of each sample is multiplied; empty for 1.
        start, steps: The chunk's position in the run.
        window, measured, progress: Of the metrics; which of the run's steps are measured, empty for
            none; whether the loss after each step is computed.
        series, diverged: The results.
        bounds: [3, units], each row's largest and smallest utility and largest weight for the
            next call; ``bounds[2, 0]`` is negative where they are not known.
        answers: Receives the outputs for each sample before it is learned; empty for none.
    """
    count = len(layers)
    last = layers[count - 1]
    units = last[ROW_AT] + last[OUTPUTS]
    widest = 0
    for layer in range(count):
        widest = max(widest, layers[layer, PITCH], layers[layer, OUTPUTS] + LANES)
    acts = np.zeros(activations, w.dtype)
    after = np.zeros(activations, w.dtype)
    for layer in range(count):
        one = layers[layer, BEGIN] + layers[layer, INPUTS]
        acts[one] = 1
        after[one] = 1
        if layer == 0:
            acts[one - layers[0, PITCH]] = 1
    delta = np.zeros(units, w.dtype)
    hess = np.zeros(units, w.dtype)
    dh = np.zeros(units, w.dtype)
    d2h = np.zeros(units, w.dtype)
    etas = np.ones(units, w.dtype)
    bias_etas = np.ones(count, w.dtype)
    top = bounds[0]
    low = bounds[1]
    big = bounds[2]
    reach = np.zeros(units)
    back = np.zeros(widest, w.dtype)
    curve = np.zeros(widest, w.dtype)
    pre = np.zeros((2, layers[0, OUTPUTS]), w.dtype)
    outputs = np.zeros((2, last[OUTPUTS]), w.dtype)
    first_by = np.zeros((2, last[OUTPUTS]), w.dtype)
    second_by = np.zeros((2, last[OUTPUTS]), w.dtype)
    z = np.zeros(4 * widest, w.dtype)
    bias_z = np.zeros(4 * widest, w.dtype)
    words = np.zeros(4 * widest, np.uint32)
    table = COEFFICIENTS.copy()
    out = np.zeros(5, w.dtype)
    before = flush_subnormals()  # from here on nothing is allocated, so nothing raises
    first_pitch, first_begin = layers[0, PITCH], layers[0, BEGIN]
    if eta_kind == GLOBAL and big[0] < 0:
        _note(w, s, offset, layers, top, low, big)
    loss_before = 0.0

    parity = start % 2
    place = first_begin - parity * first_pitch
    _fetch(acts, place, layers, rows, index, permutation, slots, 0)
    for i in range(layers[0, OUTPUTS]):
        at = i * first_pitch
        pre[1, i], _ = _two_products(
            w[at : at + first_pitch], 0, first_pitch, acts[place:], acts[place:], 0
        )

    for here in range(steps + 1):
        step = start + here
        parity = step % 2
        if here == steps and not progress:
            break
        _forward(w, acts, after, layers, pre, outputs, activation)
        if here > 0 and progress:
            late, _ = _loss(
                outputs[0], labels[here - 1], targets[here - 1], squared, first_by[0], second_by[0]
            )
            gained = 1.0 - np.float64(late) / max(loss_before, 1e-8)
            gained = min(max(gained, 0.0), 1.0)
            if late == late:
                series[(step - 1) // window, PLASTICITY] += gained
        if here == steps:
            break
        _fetch(
            acts, first_begin - (1 - parity) * first_pitch,
            layers, rows, index, permutation, slots, here + 1,
        )  # fmt: skip
        loss, right = _loss(
            outputs[1], labels[here], targets[here], squared, first_by[1], second_by[1]
        )
        loss_before = np.float64(loss)
        if len(answers) > 0:
            for i in range(last[OUTPUTS]):
                answers[here, i] = outputs[1, i]
        sums = series[step // window]
        sums[LOSS] += loss_before
        if right:
            sums[ACCURACY] += 1.0
        _correct(corrections, decays, layers, step - began[0] + 1)
        for i in range(last[OUTPUTS]):
            delta[last[ROW_AT] + i] = first_by[1, i]
            hess[last[ROW_AT] + i] = second_by[1, i]
        if len(importance) > 0:
            for i in range(last[ROW_AT], units):
                delta[i] *= importance[here]
                hess[i] *= importance[here]
        infinite = _backward(w, acts, layers, delta, hess, dh, d2h, back, curve, activation, second)
        if diverged[0] < 0 and (infinite or not math.isfinite(loss)):
            diverged[0] = step
        if len(measured) > 0 and measured[step]:
            _diagnose(acts, delta, layers, parity * first_pitch, sums)
        if features:
            _scale_features(
                trace, acts, dh, d2h, layers, utility, etas, decays, local_features, second
            )
            # As upgd.optim.feature_upgd.output_utility; a gate of 2 gives minus infinity.
            gate = hyper[(count - 1) * MOST_NUMBERS + OUTPUT_GATE]
            etas[last[ROW_AT] :] = math.log(2.0 / gate - 1.0)
        elif eta_kind == GLOBAL:
            found = _largest_trace(
                reduce, w, s, offset, acts, layers, parity, delta, hess,
                hyper, decays, corrections, bounded, second, top, low, big, reach, out,
            )  # fmt: skip
            for layer in range(count):
                row_at, share = layers[layer, ROW_AT], corrections[layer * TIMES + SHARE]
                own = max(_as(w, abs(found * share)), _tiny(w))
                etas[row_at : row_at + layers[layer, OUTPUTS]] = own
        elif eta_kind == LOCAL:
            _row_norms(
                reduce, w, s, offset, acts, layers, parity, delta, hess,
                hyper, etas, bias_etas, out,
            )  # fmt: skip
        _update(
            update, near, w, s, gap, offset, acts, layers, parity, delta, hess, etas, bias_etas,
            reach, hyper, corrections, noisy, features, key, step, z, bias_z, words, table, pre,
            top, low, big, out,
        )  # fmt: skip
    give_back(before)


@_compiled
def answer(activation, layers, activations, w, rows, answers):
    """The outputs for each row of inputs, two at a time, as :func:`learn` computes them.

    `rows` are [N, inputs]; `answers`, [N, outputs], receives the outputs; the rest is as there.
    """
    acts = np.zeros(activations, w.dtype)
    after = np.zeros(activations, w.dtype)
    for layer in range(len(layers)):
        one = layers[layer, BEGIN] + layers[layer, INPUTS]
        acts[one] = 1
        after[one] = 1
    pre = np.zeros((2, layers[0, OUTPUTS]), w.dtype)
    outputs = np.zeros((2, answers.shape[1]), w.dtype)
    before = flush_subnormals()
    begin, pitch = layers[0, BEGIN], layers[0, PITCH]
    for here in range(0, len(rows), 2):
        other = min(here + 1, len(rows) - 1)
        for j in range(layers[0, INPUTS]):
            acts[begin + j] = rows[here, j]
            after[begin + j] = rows[other, j]
        for i in range(layers[0, OUTPUTS]):
            pre[1, i], pre[0, i] = _two_products(w, i * pitch, pitch, acts, after, begin)
        _forward(w, acts, after, layers, pre, outputs, activation)
        for i in range(answers.shape[1]):
            answers[other, i] = outputs[0, i]
            answers[here, i] = outputs[1, i]
    give_back(before)


@cache
def compiled(name):
    """:func:`learn` or :func:`answer`, with its machine code kept beside its caller's source."""
    arguments = ", ".join(inspect.signature(globals()[name].py_func).parameters)
    text = (
        f'"""upgd.kernels.cpu_dense.{name} {VERSION}."""\n\n'
        "from upgd.kernels import cpu_dense\nfrom upgd.kernels.compiling import njit\n\n\n"
        '@njit(error_model="numpy", nogil=True)\n'
        f"def {name}({arguments}):\n    cpu_dense.{name}({arguments})\n"
    )
    return getattr(load_module(text, f"cpu_{name}"), name)
