# mypy: ignore-errors
# fmt: off
"""What one program does with one dense network: samples, forward, backward, fresh units.

A program has a network to itself and goes through many steps, so what its threads tell each other
lies in memory (the program's scratch, which stays in the first-level cache) with barriers between.
Sizes are constants. A layer's inputs in the scratch are as long as its rows, with zeros behind:
products leave out the bias, which is added where a sum in a unit is finished (:func:`settle`).

The order of every sum depends on the sizes and on the shape of tiles alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from upgd.kernels.triton_random import box_muller, four_words
from upgd.kernels.triton_sample import activate, norms, slope


# ----------------------------------------------------------------------------- samples
@triton.jit
def fetch(
    data, index, permutations, slots, here, runs, INPUTS: tl.constexpr, PERMUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inputs of a learner's sample `here`; `index` and `permutations` are the learner's own."""
    col = tl.arange(0, BLOCK)
    source = data + tl.load(index + here).to(tl.int64) * INPUTS
    at = col
    if PERMUTED:
        at = tl.load(
            permutations + tl.load(slots + here).to(tl.int64) * runs * INPUTS + col,
            mask=col < INPUTS, other=0,
        )
    return tl.load(source + at, mask=col < INPUTS, other=0.0)


@triton.jit
def normalised(
    x, statistics, t, counts, INPUTS: tl.constexpr, DECAY: tl.constexpr, FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As upgd.networks.OnlineNorm: `x` less its mean, by its deviation, itself included.

    `t` is the number of the sample; where not `counts`, statistics stay as they are in memory.
    """
    col = tl.arange(0, BLOCK)
    inside = col < INPUTS
    mean = tl.load(statistics + col, mask=inside, other=0.0)
    variance = tl.load(statistics + INPUTS + col, mask=inside, other=0.0)
    rate = tl.maximum(1.0 / t, 1.0 - DECAY)
    apart = x - mean
    variance = (1.0 - rate) * (variance + rate * apart * apart)
    mean = mean + rate * apart
    counted = col < tl.where(counts, INPUTS, 0)
    tl.store(statistics + col, mean, mask=counted)
    tl.store(statistics + INPUTS + col, variance, mask=counted)
    return (x - mean) / tl.sqrt(tl.maximum(variance, FLOOR))


# ----------------------------------------------------------------------------- forward
@triton.jit
def products(
    W, x, y, into, other, INPUTS: tl.constexpr, UNITS: tl.constexpr, PITCH: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):
    """A layer's products with two vectors, in the order in which updates form them."""
    real: tl.constexpr = W.dtype.element_ty
    for r in range(0, UNITS, BR):
        row = r + tl.arange(0, BR)
        first = tl.zeros([BR, BC], real)
        second = tl.zeros([BR, BC], real)
        for c in tl.range(0, PITCH, BC, num_stages=STAGES):
            col = c + tl.arange(0, BC)
            inside = (row < UNITS)[:, None] & (col < PITCH)[None, :]
            w = tl.load(W + row[:, None] * PITCH + col[None, :], mask=inside, other=0.0)
            first = tl.fma(w, tl.load(x + col, mask=col < PITCH, other=0.0)[None, :], first)
            second = tl.fma(w, tl.load(y + col, mask=col < PITCH, other=0.0)[None, :], second)
        tl.store(into + row, tl.sum(first, 1), mask=row < UNITS)
        tl.store(other + row, tl.sum(second, 1), mask=row < UNITS)


@triton.jit
def sums_of(
    z, W, INPUTS: tl.constexpr, UNITS: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr
):
    """The sums in a layer's units: products and biases."""
    i = tl.arange(0, BLOCK)
    bias = tl.load(W + i * PITCH + INPUTS, mask=i < UNITS, other=0.0)
    return tl.load(z + i, mask=i < UNITS, other=0.0) + bias


@triton.jit
def layer_norm(z, UNITS: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr):
    """Sums in units, normalised, and by what they were multiplied."""
    inside = tl.arange(0, BLOCK) < UNITS
    apart = tl.where(inside, z - tl.sum(tl.where(inside, z, 0.0), 0) / UNITS, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(apart * apart, 0) / UNITS + EPSILON)
    return apart * scale, scale


@triton.jit
def settle(
    now, was, W, into, other, normal, scale, INPUTS: tl.constexpr, UNITS: tl.constexpr,
    PITCH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """From a hidden layer's products to its outputs, of two samples.

    With LayerNorm, what :func:`unsettle` needs of the first goes to `normal` and `scale`.
    """
    i = tl.arange(0, BLOCK)
    first = sums_of(now, W, INPUTS, UNITS, PITCH, BLOCK)
    second = sums_of(was, W, INPUTS, UNITS, PITCH, BLOCK)
    if NORM:
        first, by = layer_norm(first, UNITS, EPSILON, BLOCK)
        second, _by = layer_norm(second, UNITS, EPSILON, BLOCK)
        tl.store(normal + i, first, mask=i < UNITS)
        tl.store(scale, by)
    tl.store(into + i, activate(first, ACTIVATION), mask=i < UNITS)
    tl.store(other + i, activate(second, ACTIVATION), mask=i < UNITS)


# ---------------------------------------------------------------------------- backward
@triton.jit
def backward(
    W, delta, h, below, INPUTS: tl.constexpr, UNITS: tl.constexpr, PITCH: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
):
    """From a layer's deltas to those of the units `h` before it; returns the largest magnitude."""
    real: tl.constexpr = W.dtype.element_ty
    largest = tl.zeros([], real)
    for c in range(0, INPUTS, BC):
        col = c + tl.arange(0, BC)
        total = tl.zeros([BR, BC], real)
        for r in tl.range(0, UNITS, BR, num_stages=STAGES):
            row = r + tl.arange(0, BR)
            d = tl.load(delta + row, mask=row < UNITS, other=0.0)
            inside = (row < UNITS)[:, None] & (col < PITCH)[None, :]
            w = tl.load(W + row[:, None] * PITCH + col[None, :], mask=inside, other=0.0)
            total = tl.fma(w, d[:, None], total)
        back = tl.where(col < INPUTS, tl.sum(total, 0), 0.0)
        output = tl.load(h + col, mask=col < INPUTS, other=0.0)
        tl.store(below + col, back * slope(output, ACTIVATION), mask=col < INPUTS)
        largest = tl.maximum(largest, tl.max(tl.abs(back), 0))
    return largest


@triton.jit
def unsettle(delta, normal, scale, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """From derivatives by what LayerNorm gave to those by the sums in units, in place."""
    i = tl.arange(0, BLOCK)
    d = tl.load(delta + i, mask=i < UNITS, other=0.0)
    n = tl.load(normal + i, mask=i < UNITS, other=0.0)
    d = tl.load(scale) * (d - tl.sum(d, 0) / UNITS - n * (tl.sum(d * n, 0) / UNITS))
    tl.store(delta + i, d, mask=i < UNITS)


@triton.jit
def gradient_norms(
    x, delta, INPUTS: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of a layer's gradient, a product of two vectors, and how many of its inputs are zero."""
    columns = tl.arange(0, BLOCK)
    x0, x1, x2 = norms(x, INPUTS, columns, BLOCK)
    d0, d1, d2 = norms(delta, UNITS, columns, BLOCK)
    return (x0 + 1) * d0, (x1 + 1) * d1, (x2 + 1) * d2, INPUTS - x0


# -------------------------------------------------------------------- sizes of weights
@triton.jit
def row_sizes(
    W, into, INPUTS: tl.constexpr, UNITS: tl.constexpr, PITCH: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, STAGES: tl.constexpr,
):
    """The mean magnitude of each unit's weights, without its bias."""
    real: tl.constexpr = W.dtype.element_ty
    for r in range(0, UNITS, BR):
        row = r + tl.arange(0, BR)
        total = tl.zeros([BR, BC], real)
        for c in tl.range(0, PITCH, BC, num_stages=STAGES):
            col = c + tl.arange(0, BC)
            inside = (row < UNITS)[:, None] & (col < INPUTS)[None, :]
            w = tl.load(W + row[:, None] * PITCH + col[None, :], mask=inside, other=0.0)
            total += tl.abs(w)
        tl.store(into + row, tl.sum(total, 1) / INPUTS, mask=row < UNITS)


@triton.jit
def column_sizes(
    W, into, INPUTS: tl.constexpr, UNITS: tl.constexpr, PITCH: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, STAGES: tl.constexpr,
):
    """The mean magnitude of the weights that each input has in a layer."""
    real: tl.constexpr = W.dtype.element_ty
    for c in range(0, INPUTS, BC):
        col = c + tl.arange(0, BC)
        total = tl.zeros([BR, BC], real)
        for r in tl.range(0, UNITS, BR, num_stages=STAGES):
            row = r + tl.arange(0, BR)
            inside = (row < UNITS)[:, None] & (col < PITCH)[None, :]
            w = tl.load(W + row[:, None] * PITCH + col[None, :], mask=inside, other=0.0)
            total += tl.abs(w)
        tl.store(into + col, tl.sum(total, 0) / UNITS, mask=col < INPUTS)


# ------------------------------------------------------------------------- fresh units
@triton.jit
def normals_of(seed, row, quads, tensor, step, UNITS: tl.constexpr, real: tl.constexpr):
    """The normal numbers of rows `row` of a tensor whose row ``row % span`` has counters `quads`.

    Two of the counter's words make the two numbers of which one is the row's.
    """
    span: tl.constexpr = (UNITS + 3) // 4
    lane = row // span
    low, high = (step & 0xFFFFFFFF).to(tl.uint32), (step >> 32).to(tl.uint32)
    a, b, c, d = four_words(seed, quads, tensor, low, high)
    upper = lane >= 2
    z0, z1 = box_muller(tl.where(upper, c, a), tl.where(upper, d, b), real)
    return tl.where(lane % 2 == 0, z0, z1)


@triton.jit
def lowest(score, left, BLOCK: tl.constexpr):
    """The first of those that are left with the lowest score, or `BLOCK`."""
    i = tl.arange(0, BLOCK)
    least = tl.min(tl.where(left, score, float("inf")), 0)
    return tl.min(tl.where(left & (score == least), i, BLOCK), 0)


@triton.jit
def renew(
    W, S, gap, V, T, unit, mean, seed, step, scale, LAYER: tl.constexpr, INPUTS: tl.constexpr,
    UNITS: tl.constexpr, PITCH: tl.constexpr, OUT: tl.constexpr, OUT_PITCH: tl.constexpr,
    WIDE: tl.constexpr, HIGH: tl.constexpr, STATES: tl.constexpr, COPIES: tl.constexpr,
):
    """Fresh weights into a unit of a layer, `W`, and none out of it, in the next one, `V`.

    The next layer's biases take over what the unit gave on average, `mean`. `S` and `T` are the
    first states of the two layers' weights, others lie `gap` further on; bit k of `COPIES` says
    that state k begins as a copy of the weight.
    """
    real: tl.constexpr = W.dtype.element_ty
    i = tl.arange(0, HIGH)
    out = V + i * OUT_PITCH
    carried = tl.load(out + unit, mask=i < OUT, other=0.0) * mean
    tl.store(out + UNITS, tl.load(out + UNITS, mask=i < OUT, other=0.0) + carried, mask=i < OUT)
    tl.store(out + unit, tl.zeros([HIGH], real), mask=i < OUT)
    col = tl.arange(0, WIDE)
    span: tl.constexpr = (UNITS + 3) // 4
    quads = (unit % span) * INPUTS + col
    fresh = normals_of(seed, unit, quads, col * 0 + 2 * LAYER, step, UNITS, real) * scale.to(real)
    fresh = tl.where(col < INPUTS, fresh, 0.0)
    tl.store(W + unit * PITCH + col, fresh, mask=col <= INPUTS)
    for k in tl.static_range(STATES):
        begins = fresh if (COPIES >> k) & 1 else fresh * 0.0
        tl.store(S + k * gap + unit * PITCH + col, begins, mask=col <= INPUTS)
        tl.store(T + k * gap + i * OUT_PITCH + unit, tl.zeros([HIGH], real), mask=i < OUT)
