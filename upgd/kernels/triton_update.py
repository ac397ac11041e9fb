# mypy: ignore-errors
# fmt: off
"""A stack of dense learners on CUDA: the passes over the weights.

One program per row group and learner. The gradient is ``delta · input`` and never stored. For η
the first pass reads weights and traces and keeps one number per learner; the second reads them
again, makes noise in registers and writes weights and states once. While the new weights are in
registers it also forms their products with this sample and with the next, so that no other pass
over the weights is needed for either. For this a layer is updated when the layer before it is done.

The order of programs is that in which memory and cache serve best: learner by learner, and what one
pass reads or writes last, the next one reads first. Where there is no first pass, the first launch
of the second goes through the learners forwards and backwards in turn.

With ``EARLY`` a kernel is launched while the one before it ends; see
:func:`~upgd.kernels.triton_sample.take_over`.

No sum's order depends on how many learners there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from upgd.kernels.triton_numbers import DUE, NUMBERS, SHARE, TIMES, load_numbers
from upgd.kernels.triton_random import four_normals
from upgd.kernels.triton_sample import LARGEST, both_inputs, take_over


# ------------------------------------------------------------ one per row group and learner
@triton.jit
def _state(S, k: tl.constexpr, STATES: tl.constexpr, size, place, mask, other, KEEP: tl.constexpr):
    if k < STATES:
        other = tl.load(S + k * size + place, mask=mask, other=0.0, eviction_policy=KEEP)
    return other


@triton.jit
def _read_ahead(W, S, row, span, units, pitch, size, STATES: tl.constexpr, EARLY: tl.constexpr):
    """The first programs prefetch what they will read while the previous kernel ends."""
    if tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) < EARLY:
        for lane in tl.static_range(4):
            place = tl.minimum(row + lane * span, units - 1) * pitch
            _prefetch(W + place, pitch)
            for k in tl.static_range(STATES):
                _prefetch(S + k * size + place, pitch)


@triton.jit
def _prefetch(row, pitch):
    """Prefetch a row into the second-level cache, in lines of 128 bytes."""
    line: tl.constexpr = 1024 // row.dtype.element_ty.primitive_bitwidth
    for k in range(0, pitch, 32 * line):
        place = row + tl.minimum(k + tl.arange(0, 32) * line, pitch - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [place.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["offset", "first", "UNITS"])
def reduce_kernel(
    W, S, acts, delta, hess, partial, norms, biases, hyper, corrections, group_table, clock, offset,
    first, P, A, UNITS, RULE: tl.constexpr, LOCAL: tl.constexpr, APART: tl.constexpr,
    SECOND: tl.constexpr, LAYERS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The parts of η: the largest trace of a row group, or the norms of its rows."""
    group = tl.program_id(0)
    # Backwards: the update begins where this ends.
    own = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    run = first + own
    real: tl.constexpr = W.dtype.element_ty
    inputs = tl.load(group_table + 9 * group)
    units = tl.load(group_table + 9 * group + 1)
    pitch = tl.load(group_table + 9 * group + 2) * 16
    base = tl.load(group_table + 9 * group + 3) * 16
    begin = tl.load(group_table + 9 * group + 4) * 16
    row_at = tl.load(group_table + 9 * group + 5)
    layer = tl.load(group_table + 9 * group + 6)
    row = tl.load(group_table + 9 * group + 7)
    span = tl.load(group_table + 9 * group + 8)
    W += run * P
    S += own * P
    if EARLY:
        _read_ahead(W + base, S + base, row, span, units, pitch, 0, 1, EARLY)
        take_over()
    step = tl.load(clock) + offset
    if layer == 0:
        begin -= (step % 2).to(tl.int32) * pitch
    acts += run * A + begin
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(
        hyper + (run * LAYERS + layer) * NUMBERS
    )
    columns = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), real)
    delta += run * UNITS + row_at
    hess += run * UNITS + row_at
    r0, r1, r2, r3 = row, row + span, row + 2 * span, row + 3 * span
    d0 = tl.load(delta + r0)
    d1 = tl.load(delta + r1, mask=r1 < units, other=0.0)
    d2 = tl.load(delta + r2, mask=r2 < units, other=0.0)
    d3 = tl.load(delta + r3, mask=r3 < units, other=0.0)
    q0, q1, q2, q3 = d0, d1, d2, d3
    if SECOND:
        q0 = tl.load(hess + r0)
        q1 = tl.load(hess + r1, mask=r1 < units, other=0.0)
        q2 = tl.load(hess + r2, mask=r2 < units, other=0.0)
        q3 = tl.load(hess + r3, mask=r3 < units, other=0.0)
    squares0 = tl.zeros([BLOCK], tl.float64)
    squares1 = tl.zeros([BLOCK], tl.float64)
    squares2 = tl.zeros([BLOCK], tl.float64)
    squares3 = tl.zeros([BLOCK], tl.float64)
    biases += run * UNITS + row_at
    norms += run * UNITS + row_at
    for c in tl.range(0, pitch, BLOCK, num_stages=STAGES):
        col = c + columns
        x = tl.load(acts + col, mask=col < pitch, other=0.0)
        u0 = _trace(
            W, S, base + r0 * pitch + col, col, pitch, r0, units, x, d0, q0,
            lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, RULE,
        )
        u1 = _trace(
            W, S, base + r1 * pitch + col, col, pitch, r1, units, x, d1, q1,
            lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, RULE,
        )
        u2 = _trace(
            W, S, base + r2 * pitch + col, col, pitch, r2, units, x, d2, q2,
            lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, RULE,
        )
        u3 = _trace(
            W, S, base + r3 * pitch + col, col, pitch, r3, units, x, d3, q3,
            lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, RULE,
        )
        if LOCAL:
            squares0 += _square(u0, col < inputs)
            squares1 += _square(u1, col < inputs)
            squares2 += _square(u2, col < inputs)
            squares3 += _square(u3, col < inputs)
            bias = col == inputs
            tl.store(biases + r0 + col * 0, u0, mask=bias)
            tl.store(biases + r1 + col * 0, u1, mask=bias & (r1 + col * 0 < units))
            tl.store(biases + r2 + col * 0, u2, mask=bias & (r2 + col * 0 < units))
            tl.store(biases + r3 + col * 0, u3, mask=bias & (r3 + col * 0 < units))
        else:
            none = float("-inf")
            u0 = tl.maximum(u0, tl.where(r1 < units, u1, none))
            u2 = tl.maximum(tl.where(r2 < units, u2, none), tl.where(r3 < units, u3, none))
            largest = tl.maximum(largest, tl.where(col <= inputs, tl.maximum(u0, u2), none))
    if LOCAL:
        tl.store(norms + r0, tl.sqrt(tl.sum(squares0, 0)).to(real))
        tl.store(norms + r1, tl.sqrt(tl.sum(squares1, 0)).to(real), mask=r1 < units)
        tl.store(norms + r2, tl.sqrt(tl.sum(squares2, 0)).to(real), mask=r2 < units)
        tl.store(norms + r3, tl.sqrt(tl.sum(squares3, 0)).to(real), mask=r3 < units)
    else:
        top = tl.max(largest, 0) + 0.0  # not -0, which no integer comparison would place right
        if APART:
            top /= tl.load(corrections + (run * LAYERS + layer) * TIMES + SHARE).to(real)
        tl.atomic_max(partial + run, top, sem="relaxed")  # in any order the same


@triton.jit
def _trace(
    W, S, place, col, pitch, row, units, x, d, q,
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, RULE: tl.constexpr,
):
    """The utilities that these weights will have after this step."""
    mask = (col < pitch) & (row + col * 0 < units)
    w = tl.load(W + place, mask=mask, other=0.0)
    u = tl.load(S + place, mask=mask, other=0.0)
    return RULE(
        w, d * x, q * x * x, x, u, u, u, u, u, x, lr, lr, lr, lr, lr, lr,
        lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
    )  # fmt: skip


@triton.jit
def _square(u, inside):
    wide = tl.where(inside, u, 0.0).to(tl.float64)
    return wide * wide


@triton.jit(do_not_specialize=["first_group", "offset", "first", "mine", "runs", "UNITS"])
def update_kernel(
    W, S, acts, delta, hess, utility, squares, partial, norms, biases, pre, hyper, corrections,
    seeds, group_table, first_group, iota, clock, offset, first, mine, runs, P, A, UNITS,
    RULE: tl.constexpr, STATES: tl.constexpr, GLOBAL: tl.constexpr, LOCAL: tl.constexpr,
    APART: tl.constexpr, FEATURES: tl.constexpr, PART: tl.constexpr, FILLS: tl.constexpr,
    SECOND: tl.constexpr, NOISE: tl.constexpr,
    LAYERS: tl.constexpr, HIDDEN: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):
    """Update four rows of one learner, and form their products with this sample and the next."""
    # The backward pass goes through hidden layers next: what it reads should stay in the cache.
    keep: tl.constexpr = "evict_last" if HIDDEN else ""
    group = first_group + tl.program_id(0)
    own = tl.program_id(1).to(tl.int64)
    if not (HIDDEN or GLOBAL or LOCAL):  # begin where the step before ended
        back = (tl.load(clock) + offset) % 2 == 1
        own = tl.where(back, tl.num_programs(1) - 1 - own, own)
    run = first + own
    real: tl.constexpr = W.dtype.element_ty
    tiny: tl.constexpr = 1.1754943508222875e-38 if real == tl.float32 else 2.2250738585072014e-308
    inputs = tl.load(group_table + 9 * group)
    units = tl.load(group_table + 9 * group + 1)
    pitch = tl.load(group_table + 9 * group + 2) * 16
    base = tl.load(group_table + 9 * group + 3) * 16
    begin = tl.load(group_table + 9 * group + 4) * 16
    row_at = tl.load(group_table + 9 * group + 5)
    layer = tl.load(group_table + 9 * group + 6)
    row = tl.load(group_table + 9 * group + 7)
    span = tl.load(group_table + 9 * group + 8)
    W += run * P
    S += own * P
    size = (own * 0 + mine) * P  # in 64 bits
    if EARLY:
        if not (GLOBAL or LOCAL):
            _read_ahead(W + base, S + base, row, span, units, pitch, size, STATES, EARLY)
        take_over()
    step = tl.load(clock) + offset
    following = begin
    if layer == 0:
        parity = (step % 2).to(tl.int32)
        following = begin - (1 - parity) * pitch
        begin = begin - parity * pitch
    acts += run * A
    columns = tl.arange(0, BLOCK)
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(
        hyper + (run * LAYERS + layer) * NUMBERS
    )
    seed = tl.load(seeds + run)
    c = corrections + (run * LAYERS + layer) * TIMES
    c0, c1, c2 = tl.load(c), tl.load(c + 1), tl.load(c + 2)
    c3, c4, due = tl.load(c + 3), tl.load(c + 4), tl.load(c + DUE)
    if FEATURES:  # the output layer is not perturbed
        sigma = tl.where(layer == LAYERS - 1, 0.0, sigma)

    eta = tl.full([], 1.0, real)
    eta_bias = eta
    if GLOBAL:
        eta = tl.load(partial + run)
        if APART:
            eta *= tl.load(c + SHARE).to(real)
        eta = tl.maximum(tl.abs(eta), tiny)
        eta_bias = eta
    if LOCAL:
        squares = tl.zeros([BLOCK], tl.float64)
        for k in range(0, units, BLOCK):
            col = k + columns
            b = tl.load(biases + run * UNITS + row_at + col, mask=col < units, other=0.0)
            squares += b.to(tl.float64) * b.to(tl.float64)
        eta_bias = tl.maximum(tl.sqrt(tl.sum(squares, 0)).to(real), tiny)

    r0, r1, r2, r3 = row, row + span, row + 2 * span, row + 3 * span
    d0 = tl.load(delta + run * UNITS + row_at + r0)
    d1 = tl.load(delta + run * UNITS + row_at + r1, mask=r1 < units, other=0.0)
    d2 = tl.load(delta + run * UNITS + row_at + r2, mask=r2 < units, other=0.0)
    d3 = tl.load(delta + run * UNITS + row_at + r3, mask=r3 < units, other=0.0)
    q0, q1, q2, q3 = d0, d1, d2, d3
    if SECOND:
        q0 = tl.load(hess + run * UNITS + row_at + r0)
        q1 = tl.load(hess + run * UNITS + row_at + r1, mask=r1 < units, other=0.0)
        q2 = tl.load(hess + run * UNITS + row_at + r2, mask=r2 < units, other=0.0)
        q3 = tl.load(hess + run * UNITS + row_at + r3, mask=r3 < units, other=0.0)
    n0, n1, n2, n3 = eta, eta, eta, eta
    if LOCAL:
        n0 = tl.maximum(tl.load(norms + run * UNITS + row_at + r0), tiny)
        n1 = tl.maximum(tl.load(norms + run * UNITS + row_at + r1, mask=r1 < units), tiny)
        n2 = tl.maximum(tl.load(norms + run * UNITS + row_at + r2, mask=r2 < units), tiny)
        n3 = tl.maximum(tl.load(norms + run * UNITS + row_at + r3, mask=r3 < units), tiny)
    if FEATURES:
        utility += run * UNITS + row_at
        n0 = tl.load(utility + r0)
        n1 = tl.load(utility + r1, mask=r1 < units, other=0.0)
        n2 = tl.load(utility + r2, mask=r2 < units, other=0.0)
        n3 = tl.load(utility + r3, mask=r3 < units, other=0.0)
        if FEATURES == LARGEST:
            scale = tl.abs(tl.load(partial + run))
        else:
            scale = _norm(squares + run * UNITS + row_at, tl.cdiv(units, PART)).to(real)
        free = layer == LAYERS - 1
        scale = 1.0 / tl.maximum(scale, tiny)
        output = tl.log(2.0 / p0 - 1.0).to(real)  # p0 is the output layer's gate
        n0 = tl.where(free, output, n0 * scale)
        n1 = tl.where(free, output, n1 * scale)
        n2 = tl.where(free, output, n2 * scale)
        n3 = tl.where(free, output, n3 * scale)

    was0 = tl.zeros([BLOCK // 4], real)
    was1 = tl.zeros([BLOCK // 4], real)
    was2 = tl.zeros([BLOCK // 4], real)
    was3 = tl.zeros([BLOCK // 4], real)
    now0 = tl.zeros([BLOCK // 4], real)
    now1 = tl.zeros([BLOCK // 4], real)
    now2 = tl.zeros([BLOCK // 4], real)
    now3 = tl.zeros([BLOCK // 4], real)
    for k in tl.range(0, pitch, BLOCK, num_stages=STAGES):
        col = k + columns
        bias = col == inputs
        x = tl.load(acts + begin + col, mask=col < pitch, other=0.0)
        if HIDDEN:
            y, v = both_inputs(pre, run, runs, UNITS, row_at - inputs, col, inputs, ACTIVATION)
        else:
            y = x
            v = tl.load(acts + following + col, mask=col < pitch, other=0.0)
        z0, z1, z2, z3 = x, x, x, x
        amount = sigma
        if NOISE:
            # Column numbers from memory: so the noise gets the weights' layout, not one of its own
            # that would have to be carried over through shared memory.
            here = k + tl.load(iota + columns)
            quad = tl.where(here == inputs, row, row * inputs + here).to(tl.uint32)
            tensor = tl.where(here == inputs, 2 * layer + 1, 2 * layer).to(tl.uint32)
            z0, z1, z2, z3 = four_normals(seed, quad, tensor, step, real)
            # Behind the bias weights, inputs and states are zero. Without noise they stay so, but
            # for rules that fill them (upgd.kernels.rules.fills_padding).
            amount = tl.where(here <= inputs, sigma.to(real), 0.0)
        w = _advance(
            W, S, base + r0 * pitch + col, size, col, pitch, inputs, r0, units, x, d0, q0, z0, n0,
            eta_bias, bias, c0, c1, c2, c3, c4, due, lr, amount, p0, p1, p2, p3, p4, p5, p6, p7, p8,
            p9, p10, p11, p12, p13, RULE, STATES, LOCAL, FEATURES, FILLS, keep,
        )
        was0 += _fold(w * y)
        now0 += _fold(w * v)
        w = _advance(
            W, S, base + r1 * pitch + col, size, col, pitch, inputs, r1, units, x, d1, q1, z1, n1,
            eta_bias, bias, c0, c1, c2, c3, c4, due, lr, amount, p0, p1, p2, p3, p4, p5, p6, p7, p8,
            p9, p10, p11, p12, p13, RULE, STATES, LOCAL, FEATURES, FILLS, keep,
        )
        was1 += _fold(w * y)
        now1 += _fold(w * v)
        w = _advance(
            W, S, base + r2 * pitch + col, size, col, pitch, inputs, r2, units, x, d2, q2, z2, n2,
            eta_bias, bias, c0, c1, c2, c3, c4, due, lr, amount, p0, p1, p2, p3, p4, p5, p6, p7, p8,
            p9, p10, p11, p12, p13, RULE, STATES, LOCAL, FEATURES, FILLS, keep,
        )
        was2 += _fold(w * y)
        now2 += _fold(w * v)
        w = _advance(
            W, S, base + r3 * pitch + col, size, col, pitch, inputs, r3, units, x, d3, q3, z3, n3,
            eta_bias, bias, c0, c1, c2, c3, c4, due, lr, amount, p0, p1, p2, p3, p4, p5, p6, p7, p8,
            p9, p10, p11, p12, p13, RULE, STATES, LOCAL, FEATURES, FILLS, keep,
        )
        was3 += _fold(w * y)
        now3 += _fold(w * v)
    if (layer < LAYERS - 1) | (LAYERS == 1):
        last = pre + run * UNITS + row_at
        next_ = pre + (runs + run) * UNITS + row_at
        tl.store(last + r0, tl.sum(was0, 0))
        tl.store(last + r1, tl.sum(was1, 0), mask=r1 < units)
        tl.store(last + r2, tl.sum(was2, 0), mask=r2 < units)
        tl.store(last + r3, tl.sum(was3, 0), mask=r3 < units)
        tl.store(next_ + r0, tl.sum(now0, 0))
        tl.store(next_ + r1, tl.sum(now1, 0), mask=r1 < units)
        tl.store(next_ + r2, tl.sum(now2, 0), mask=r2 < units)
        tl.store(next_ + r3, tl.sum(now3, 0), mask=r3 < units)


@triton.jit
def _norm(squares, count):
    """The root of a sum of what lies at `squares`."""
    lanes = tl.arange(0, 32)
    total = tl.load(squares + lanes, mask=lanes < count, other=0.0)  # usually the only iteration
    for k in range(32, count, 32):
        total += tl.load(squares + k + lanes, mask=k + lanes < count, other=0.0)
    return tl.sqrt(tl.sum(total, 0))


@triton.jit
def _fold(products):
    """Sums of four neighbours, which one thread holds."""
    return tl.sum(tl.reshape(products, [products.shape[0] // 4, 4]), 1)


@triton.jit
def _advance(
    W, S, place, size, col, pitch, inputs, row, units, x, d, q, z, n, eta_bias, bias, c0, c1, c2,
    c3, c4, due, lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
    RULE: tl.constexpr, STATES: tl.constexpr, LOCAL: tl.constexpr, FEATURES: tl.constexpr,
    FILLS: tl.constexpr, KEEP: tl.constexpr,
):
    """Read, apply the rule, write; returns the new weights."""
    mask = (col < pitch) & (row + col * 0 < units)
    w = tl.load(W + place, mask=mask, other=0.0, eviction_policy=KEEP)
    s0 = _state(S, 0, STATES, size, place, mask, w, KEEP)
    s1 = _state(S, 1, STATES, size, place, mask, w, KEEP)
    s2 = _state(S, 2, STATES, size, place, mask, w, KEEP)
    s3 = _state(S, 3, STATES, size, place, mask, w, KEEP)
    s4 = _state(S, 4, STATES, size, place, mask, w, KEEP)
    eta = n
    if LOCAL:
        eta = tl.where(bias, eta_bias, n)
    if FEATURES:
        s0 = n  # one number for the row, so its sigmoid is taken once
        eta = eta_bias
    w, s0, s1, s2, s3, s4 = RULE(
        w, d * x, q * x * x, z, s0, s1, s2, s3, s4, eta, c0, c1, c2, c3, c4, due, lr, sigma,
        p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
    )
    if FILLS:
        padding = col > inputs
        w = tl.where(padding, 0.0, w)
        s0, s1 = tl.where(padding, 0.0, s0), tl.where(padding, 0.0, s1)
        s2, s3 = tl.where(padding, 0.0, s2), tl.where(padding, 0.0, s3)
        s4 = tl.where(padding, 0.0, s4)
    tl.store(W + place, w, mask=mask, eviction_policy=KEEP)
    if STATES > 0:
        tl.store(S + place, s0, mask=mask, eviction_policy=KEEP)
    if STATES > 1:
        tl.store(S + size + place, s1, mask=mask, eviction_policy=KEEP)
    if STATES > 2:
        tl.store(S + 2 * size + place, s2, mask=mask, eviction_policy=KEEP)
    if STATES > 3:
        tl.store(S + 3 * size + place, s3, mask=mask, eviction_policy=KEEP)
    if STATES > 4:
        tl.store(S + 4 * size + place, s4, mask=mask, eviction_policy=KEEP)
    return w


@triton.jit(do_not_specialize=["first_group", "runs", "UNITS"])
def product_kernel(
    W, acts, pre, group_table, first_group, clock, runs, P, A, UNITS, HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):
    """A layer's products with the sample that comes next, as the update forms them."""
    group = first_group + tl.program_id(1)
    run = tl.program_id(0).to(tl.int64)
    step = tl.load(clock)
    inputs = tl.load(group_table + 9 * group)
    units = tl.load(group_table + 9 * group + 1)
    pitch = tl.load(group_table + 9 * group + 2) * 16
    base = tl.load(group_table + 9 * group + 3) * 16
    row_at = tl.load(group_table + 9 * group + 5)
    row = tl.load(group_table + 9 * group + 7)
    span = tl.load(group_table + 9 * group + 8)
    begin = tl.load(group_table + 9 * group + 4) * 16 - (step % 2).to(tl.int32) * pitch
    columns = tl.arange(0, BLOCK)
    for lane in tl.static_range(4):
        r = row + lane * span
        if r < units:
            total = tl.zeros([BLOCK // 4], W.dtype.element_ty)
            for k in range(0, pitch, BLOCK):
                col = k + columns
                if HIDDEN:
                    _y, x = both_inputs(
                        pre, run, runs, UNITS, row_at - inputs, col, inputs, ACTIVATION
                    )
                else:
                    x = tl.load(acts + run * A + begin + col, mask=col < pitch, other=0.0)
                w = tl.load(W + run * P + base + r * pitch + col, mask=col < pitch, other=0.0)
                total += _fold(w * x)
            tl.store(pre + (runs + run) * UNITS + row_at + r, tl.sum(total, 0))
