# mypy: ignore-errors
# fmt: off
"""The passes over the weights of stacked networks whose gradients are stored.

Every parameter tensor is four spans (:mod:`upgd.kernels.philox`); a program takes a block of the
same places in all four, so that one draw serves four weights. ``items`` has a row per block of a
tensor: where the tensor begins, how many numbers it has, the length of its spans, its number, the
length of its rows, the number of its first row, and the block's first place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from upgd.kernels.triton_numbers import DUE, NUMBERS, SHARE, TIMES, load_numbers
from upgd.kernels.triton_random import four_normals


@triton.jit
def reduce_kernel(
    W, S, G, partial, items, hyper, corrections, first, P, TENSORS, RULE: tl.constexpr,
    APART: tl.constexpr, BLOCK: tl.constexpr,
):
    """The largest trace of each run, as far as one block of one tensor goes."""
    item = items + 7 * tl.program_id(0)
    own = tl.program_id(1).to(tl.int64)
    run = first + own
    real: tl.constexpr = W.dtype.element_ty
    base, count, span = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    place = tl.load(item + 6) + tl.arange(0, BLOCK)
    its = run * TENSORS + tl.load(item + 3)  # row of numbers
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(
        hyper + its * NUMBERS
    )
    largest = tl.full([BLOCK], float("-inf"), real)
    for lane in tl.static_range(4):
        e = lane * span + place
        mask = (place < span) & (e < count)
        w = tl.load(W + run * P + base + e, mask=mask, other=0.0)
        g = tl.load(G + run * P + base + e, mask=mask, other=0.0)
        u = tl.load(S + own * P + base + e, mask=mask, other=0.0)
        u = RULE(
            w, g, g, g, u, u, u, u, u, g, lr, lr, lr, lr, lr, lr,
            lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
        )
        largest = tl.maximum(largest, tl.where(mask, u, float("-inf")))
    top = tl.max(largest, 0) + 0.0  # not -0, which no integer comparison would place right
    if APART:
        top /= tl.load(corrections + its * TIMES + SHARE).to(real)
    tl.atomic_max(partial + run, top, sem="relaxed")  # in any order the same


@triton.jit
def norm_kernel(
    W, S, G, norms, rows, hyper, first, P, ROWS, TENSORS, RULE: tl.constexpr, BLOCK: tl.constexpr,
):
    """The norm of one row's traces; `rows` has where each begins, its length and its tensor."""
    row = tl.program_id(0)
    own = tl.program_id(1).to(tl.int64)
    run = first + own
    real: tl.constexpr = W.dtype.element_ty
    base, length = tl.load(rows + 3 * row), tl.load(rows + 3 * row + 1)
    its = run * TENSORS + tl.load(rows + 3 * row + 2)
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(
        hyper + its * NUMBERS
    )
    squares = tl.zeros([BLOCK], tl.float64)
    for c in range(0, length, BLOCK):
        e = c + tl.arange(0, BLOCK)
        mask = e < length
        w = tl.load(W + run * P + base + e, mask=mask, other=0.0)
        g = tl.load(G + run * P + base + e, mask=mask, other=0.0)
        u = tl.load(S + own * P + base + e, mask=mask, other=0.0)
        u = RULE(
            w, g, g, g, u, u, u, u, u, g, lr, lr, lr, lr, lr, lr,
            lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
        )
        wide = tl.where(mask, u, 0.0).to(tl.float64)
        squares += wide * wide
    tl.store(norms + run * ROWS + row, tl.sqrt(tl.sum(squares, 0)).to(real))


@triton.jit
def update_kernel(
    W, S, G, partial, norms, items, iota, hyper, corrections, seeds, clock, first, mine, P, ROWS,
    TENSORS, RULE: tl.constexpr, STATES: tl.constexpr, GLOBAL: tl.constexpr, LOCAL: tl.constexpr,
    APART: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):
    """Update the same block of places in a tensor's four spans."""
    item = items + 7 * tl.program_id(0)
    own = tl.program_id(1).to(tl.int64)
    run = first + own
    real: tl.constexpr = W.dtype.element_ty
    tiny: tl.constexpr = 1.1754943508222875e-38 if real == tl.float32 else 2.2250738585072014e-308
    base, count, span = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    tensor, width, row_at = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    place = tl.load(item + 6) + tl.load(iota + tl.arange(0, BLOCK))
    size = (own * 0 + mine) * P  # in 64 bits
    its = run * TENSORS + tensor
    corrections += its * TIMES
    eta = tl.full([], 1.0, real)
    if GLOBAL:
        eta = tl.load(partial + run)
        if APART:
            eta *= tl.load(corrections + SHARE).to(real)
        eta = tl.maximum(tl.abs(eta), tiny)
    z0, z1, z2, z3 = place.to(real), place.to(real), place.to(real), place.to(real)
    if NOISE:
        z0, z1, z2, z3 = four_normals(
            tl.load(seeds + run), place.to(tl.uint32), (tensor + place * 0).to(tl.uint32),
            tl.load(clock), real,
        )
    W += run * P + base
    G += run * P + base
    S += own * P + base
    norms += run * ROWS + row_at
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(
        hyper + its * NUMBERS
    )
    for lane in tl.static_range(4):
        z = z0
        if lane == 1:
            z = z1
        if lane == 2:
            z = z2
        if lane == 3:
            z = z3
        e = lane * span + place
        mask = (place < span) & (e < count)
        w = tl.load(W + e, mask=mask, other=0.0)
        g = tl.load(G + e, mask=mask, other=0.0)
        s0, s1, s2, s3, s4 = w, w, w, w, w
        if STATES > 0:
            s0 = tl.load(S + e, mask=mask, other=0.0)
        if STATES > 1:
            s1 = tl.load(S + size + e, mask=mask, other=0.0)
        if STATES > 2:
            s2 = tl.load(S + 2 * size + e, mask=mask, other=0.0)
        if STATES > 3:
            s3 = tl.load(S + 3 * size + e, mask=mask, other=0.0)
        if STATES > 4:
            s4 = tl.load(S + 4 * size + e, mask=mask, other=0.0)
        n = eta
        if LOCAL:
            n = tl.maximum(tl.load(norms + e // width, mask=mask, other=1.0), tiny)
        w, s0, s1, s2, s3, s4 = RULE(
            w, g, g, z, s0, s1, s2, s3, s4, n,
            tl.load(corrections), tl.load(corrections + 1), tl.load(corrections + 2),
            tl.load(corrections + 3), tl.load(corrections + 4), tl.load(corrections + DUE),
            lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
        )
        tl.store(W + e, w, mask=mask)
        if STATES > 0:
            tl.store(S + e, s0, mask=mask)
        if STATES > 1:
            tl.store(S + size + e, s1, mask=mask)
        if STATES > 2:
            tl.store(S + 2 * size + e, s2, mask=mask)
        if STATES > 3:
            tl.store(S + 3 * size + e, s3, mask=mask)
        if STATES > 4:
            tl.store(S + 4 * size + e, s4, mask=mask)
