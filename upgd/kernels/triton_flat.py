# mypy: ignore-errors
# fmt: off
"""Optimizer steps on CUDA: all parameters in one launch per pass.

Kernels find their tensors through tables (:mod:`upgd.kernels.flat`): a program takes one item,
reads the addresses of its tensor, and updates a block of quads, which is four stretches of weights.
The first pass finds η, or the norms of rows, and whether all weights and derivatives are within
LIMIT; it stores no trace. The second computes the trace again, makes noise in registers and writes
weights and states once, unless a value exceeded LIMIT. Its last program advances the clocks and
clears what the first pass left, so neither needs a launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from upgd.kernels import flat
from upgd.kernels.triton_numbers import load_numbers
from upgd.kernels.triton_random import four_normals, narrowed, rounding_words

_W, _G, _H, _STATE = (tl.constexpr(x) for x in (flat.W, flat.G, flat.H, flat.STATE))
_TOTAL, _SPAN, _NUMBER = (tl.constexpr(x) for x in (flat.TOTAL, flat.SPAN, flat.NUMBER))
_GROUP, _LENGTH, _ROW = (tl.constexpr(x) for x in (flat.GROUP, flat.LENGTH, flat.ROW))
_ALIGNED, _COLUMNS = tl.constexpr(flat.ALIGNED), tl.constexpr(flat.COLUMNS)
_FIRST, _WHOLE_SPAN = tl.constexpr(flat.FIRST), tl.constexpr(flat.WHOLE_SPAN)
_CORRECTION, _FACTOR, _SIGN = (
    tl.constexpr(x) for x in (flat.CORRECTION, flat.FACTOR, flat.SIGN)
)
_AGE, _NUMBERS = tl.constexpr(flat.AGE), tl.constexpr(flat.NUMBERS)

BLOCK = 512
"""Quads of an item; with four warps every thread loads four neighbours at a time."""
WARPS = 4
TYPES = {
    torch.float64: tl.float64, torch.float32: tl.float32,
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
}


# ------------------------------------------------------------------------- tables
@triton.jit
def _pointers(row, column: tl.constexpr, place, kind: tl.constexpr, aligned: tl.constexpr):
    """Addresses in one of a tensor's arrays; four at a time if it is `aligned`."""
    found = tl.load(row + column).to(tl.pointer_type(kind)) + place
    if aligned:
        found = tl.max_contiguous(tl.multiple_of(found, 16), place.shape[0])
    return found


@triton.jit
def _stretch(row, start, lane: tl.constexpr, BLOCK: tl.constexpr, aligned: tl.constexpr):
    """The places of a lane's weights of this item, and which of them exist."""
    span = tl.load(row + _SPAN)
    first = lane * span
    limit = tl.minimum(span, tl.load(row + _TOTAL) - first).to(tl.int32)
    if aligned:
        limit = tl.multiple_of(limit, 4)
    quad = tl.max_contiguous(tl.multiple_of(start + tl.arange(0, BLOCK), 16), BLOCK)
    return first + quad, quad < limit


@triton.jit
def _read(row, column: tl.constexpr, place, mask, kind: tl.constexpr, real: tl.constexpr,
          aligned: tl.constexpr):
    return tl.load(_pointers(row, column, place, kind, aligned), mask=mask, other=0.0).to(real)


@triton.jit
def _correction(m, age, decay: tl.constexpr):
    """1 - decay ** age, or 1 where nothing decays."""
    c = tl.full([], 1.0, tl.float64)
    if decay >= 0:
        c = 1.0 - tl.exp(age.to(tl.float64) * tl.log(tl.load(m + decay)))
    return c


@triton.jit
def _due(m, age, period: tl.constexpr):
    """1 at multiples of the number at place `period`, rounded; 0 where there is none."""
    due = tl.full([], 0.0, tl.float64)
    if period >= 0:
        every = tl.maximum(tl.floor(tl.load(m + period) + 0.5), 1.0).to(tl.int64)
        due = (age % every == 0).to(tl.float64)
    return due


@triton.jit
def _age(m, clocks):
    """The count that this step will have if it is not skipped."""
    clock = tl.load(m + _AGE).to(tl.int64)
    return tl.load(tl.load(clocks + 2 * clock).to(tl.pointer_type(tl.int64))) + 1


# -------------------------------------------------------------------- the first pass
@triton.jit
def _trace(row, m, start, lane: tl.constexpr, RULE: tl.constexpr, SECOND: tl.constexpr,
           KIND: tl.constexpr, TRACE: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr,
           aligned: tl.constexpr):
    """A lane's traces after this step, and the magnitudes that it reads."""
    place, mask = _stretch(row, start, lane, BLOCK, aligned)
    w = _read(row, _W, place, mask, KIND, REAL, aligned)
    g = _read(row, _G, place, mask, KIND, REAL, aligned) * tl.load(m + _FACTOR).to(REAL)
    u = _read(row, _STATE, place, mask, TRACE, REAL, aligned)
    h = g
    if SECOND:
        h = _read(row, _H, place, mask, KIND, REAL, aligned) * tl.load(m + _SIGN).to(REAL)
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(m)
    t = RULE(
        w, g, h, g, u, u, u, u, u, u, lr, lr, lr, lr, lr, lr,
        lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
    )
    t = tl.where(t == t, t, float("inf"))  # so that NaN reaches no other weight through η
    t = tl.where(mask, t, float("-inf"))
    return t, _magnitude(w, g, h, SECOND)


@triton.jit
def _magnitude(w, g, h, SECOND: tl.constexpr):
    """The largest magnitude of a weight and its derivatives; infinite where one is NaN."""
    d = tl.maximum(
        tl.where(w == w, tl.abs(w), float("inf")), tl.where(g == g, tl.abs(g), float("inf"))
    )
    if SECOND:
        d = tl.maximum(d, tl.where(h == h, tl.abs(h), float("inf")))
    return d


@triton.jit
def _traces(row, m, start, RULE: tl.constexpr, SECOND: tl.constexpr, KIND: tl.constexpr,
            TRACE: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr, aligned: tl.constexpr):
    t0, d0 = _trace(row, m, start, 0, RULE, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    t1, d1 = _trace(row, m, start, 1, RULE, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    t2, d2 = _trace(row, m, start, 2, RULE, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    t3, d3 = _trace(row, m, start, 3, RULE, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    t = tl.maximum(tl.maximum(t0, t1), tl.maximum(t2, t3))
    d = tl.maximum(tl.maximum(d0, d1), tl.maximum(d2, d3))
    return tl.max(t, 0), tl.max(d, 0)


@triton.jit
def reduce_kernel(tensors, items, numbers, slots, clocks,
                  RULE: tl.constexpr, SECOND: tl.constexpr, DECAY: tl.constexpr,
                  LIMIT: tl.constexpr, KIND: tl.constexpr, TRACE: tl.constexpr,
                  REAL: tl.constexpr, BLOCK: tl.constexpr):
    """Leave the largest corrected trace in slot 0; 1 in slot 1 if something exceeds LIMIT."""
    item = items + 2 * tl.program_id(0)
    row = tensors + tl.load(item).to(tl.int64) * _COLUMNS
    start = tl.load(item + 1)
    m = numbers + tl.load(row + _GROUP) * _NUMBERS
    if tl.load(row + _ALIGNED) != 0:
        t, d = _traces(row, m, start, RULE, SECOND, KIND, TRACE, REAL, BLOCK, True)
    else:
        t, d = _traces(row, m, start, RULE, SECOND, KIND, TRACE, REAL, BLOCK, False)
    t = t.to(tl.float64)
    if DECAY >= 0:
        t = t / _correction(m, _age(m, clocks), DECAY)
    tl.atomic_max(slots, t, sem="relaxed")  # in any order the same
    if d > LIMIT:
        tl.store(slots + 1, 1.0)


@triton.jit
def _largest_read(row, m, start, SECOND: tl.constexpr, KIND: tl.constexpr,
                  REAL: tl.constexpr, BLOCK: tl.constexpr, aligned: tl.constexpr):
    largest = tl.zeros([BLOCK], REAL)
    for lane in tl.static_range(4):
        place, mask = _stretch(row, start, lane, BLOCK, aligned)
        w = _read(row, _W, place, mask, KIND, REAL, aligned)
        g = _read(row, _G, place, mask, KIND, REAL, aligned) * tl.load(m + _FACTOR).to(REAL)
        h = g
        if SECOND:
            h = _read(row, _H, place, mask, KIND, REAL, aligned)
        largest = tl.maximum(largest, _magnitude(w, g, h, SECOND))
    return tl.max(largest, 0)


@triton.jit
def check_kernel(tensors, items, numbers, slots, SECOND: tl.constexpr, LIMIT: tl.constexpr,
                 KIND: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr):
    """Leave 1 in slot 1 if a weight or derivative exceeds LIMIT."""
    item = items + 2 * tl.program_id(0)
    row = tensors + tl.load(item).to(tl.int64) * _COLUMNS
    start = tl.load(item + 1)
    m = numbers + tl.load(row + _GROUP) * _NUMBERS
    if tl.load(row + _ALIGNED) != 0:
        d = _largest_read(row, m, start, SECOND, KIND, REAL, BLOCK, True)
    else:
        d = _largest_read(row, m, start, SECOND, KIND, REAL, BLOCK, False)
    if d > LIMIT:
        tl.store(slots + 1, 1.0)


@triton.jit
def norms_kernel(tensors, rows, numbers, slots, norms, RULE: tl.constexpr, SECOND: tl.constexpr,
                 LIMIT: tl.constexpr, KIND: tl.constexpr, TRACE: tl.constexpr,
                 REAL: tl.constexpr, BLOCK: tl.constexpr):
    """The norm of one row of the trace, and whether what it reads is within LIMIT."""
    item = rows + 2 * tl.program_id(0)
    row = tensors + tl.load(item).to(tl.int64) * _COLUMNS
    number = tl.load(item + 1)
    m = numbers + tl.load(row + _GROUP) * _NUMBERS
    length = tl.load(row + _LENGTH)
    first = number * length
    largest = tl.zeros([BLOCK], REAL)
    scale = tl.full([], 1.0, tl.float64)
    double: tl.constexpr = REAL.primitive_bitwidth == 64
    tiny: tl.constexpr = 2.2250738585072014e-308 if double else 1.1754943508222875e-38
    if double:  # squares of small utilities would underflow
        for k in range(0, length, BLOCK):
            t, d = _row_trace(row, m, first, k, length, RULE, SECOND, KIND, TRACE, REAL, BLOCK)
            largest = tl.maximum(largest, tl.abs(t))
        scale = tl.maximum(tl.max(largest, 0), tiny)
    squares = tl.zeros([BLOCK], tl.float64)
    read = tl.zeros([BLOCK], REAL)
    for k in range(0, length, BLOCK):
        t, d = _row_trace(row, m, first, k, length, RULE, SECOND, KIND, TRACE, REAL, BLOCK)
        t = t.to(tl.float64) / scale
        squares += t * t
        read = tl.maximum(read, d)
    norm = (tl.sqrt(tl.sum(squares, 0)) * scale).to(REAL)
    norm = tl.where(norm == norm, tl.maximum(norm, tiny), norm)
    tl.store(norms + tl.load(row + _ROW) + number, norm)
    if tl.max(read, 0) > LIMIT:
        tl.store(slots + 1, 1.0)


@triton.jit
def _row_trace(row, m, first, k, length, RULE: tl.constexpr, SECOND: tl.constexpr,
               KIND: tl.constexpr, TRACE: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr):
    col = k + tl.arange(0, BLOCK)
    mask = col < length
    place = first + col
    w = _read(row, _W, place, mask, KIND, REAL, False)
    g = _read(row, _G, place, mask, KIND, REAL, False) * tl.load(m + _FACTOR).to(REAL)
    u = _read(row, _STATE, place, mask, TRACE, REAL, False)
    h = g
    if SECOND:
        h = _read(row, _H, place, mask, KIND, REAL, False) * tl.load(m + _SIGN).to(REAL)
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(m)
    t = RULE(
        w, g, h, g, u, u, u, u, u, u, lr, lr, lr, lr, lr, lr,
        lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
    )
    return tl.where(mask, t, 0.0), _magnitude(w, g, h, SECOND)


# ------------------------------------------------------------------- the second pass
@triton.jit
def _address(row, column: tl.constexpr, exists: tl.constexpr):
    """One of a tensor's addresses, read before anything is written."""
    address = tl.full([], 0, tl.int64)
    if exists:
        address = tl.load(row + column)
    return address


@triton.jit
def _at(address, place, kind: tl.constexpr, aligned: tl.constexpr):
    found = address.to(tl.pointer_type(kind)) + place
    if aligned:
        found = tl.max_contiguous(tl.multiple_of(found, 16), place.shape[0])
    return found


@triton.jit
def _value(address, exists: tl.constexpr, place, mask, other, kind: tl.constexpr,
           aligned: tl.constexpr):
    if exists:
        found = tl.load(_at(address, place, kind, aligned), mask=mask, other=0.0)
        other = found.to(other.dtype)
    return other


@triton.jit
def _values(row, start, factor, sign, aw, ag, ah, a0, a1, a2, a3, a4, lane: tl.constexpr,
            STATES: tl.constexpr, SECOND: tl.constexpr, KIND: tl.constexpr, TRACE: tl.constexpr,
            REAL: tl.constexpr, BLOCK: tl.constexpr, aligned: tl.constexpr):
    """The values that a lane reads."""
    place, mask = _stretch(row, start, lane, BLOCK, aligned)
    w = tl.load(_at(aw, place, KIND, aligned), mask=mask, other=0.0).to(REAL)
    g = tl.load(_at(ag, place, KIND, aligned), mask=mask, other=0.0).to(REAL) * factor
    h = _value(ah, SECOND, place, mask, g, KIND, aligned) * sign
    s0 = _value(a0, STATES > 0, place, mask, w, TRACE, aligned)
    s1 = _value(a1, STATES > 1, place, mask, w, TRACE, aligned)
    s2 = _value(a2, STATES > 2, place, mask, w, TRACE, aligned)
    s3 = _value(a3, STATES > 3, place, mask, w, TRACE, aligned)
    s4 = _value(a4, STATES > 4, place, mask, w, TRACE, aligned)
    return place, mask, w, g, h, s0, s1, s2, s3, s4


@triton.jit
def _store(address, exists: tl.constexpr, place, mask, x, word, half: tl.constexpr,
           kind: tl.constexpr, rounds: tl.constexpr, aligned: tl.constexpr):
    """Write values in their type, rounded by `half` of a word of random bits, or to the nearest."""
    if exists:
        if rounds:
            x = narrowed(x, word, half, kind)
        tl.store(_at(address, place, kind, aligned), x.to(kind), mask=mask)


@triton.jit
def _advance(row, start, lane: tl.constexpr, norms, eta, place, mask, w, g, h, z, s0, s1, s2, s3,
             s4, aw, a0, a1, a2, a3, a4, c0, c1, c2, c3, c4, due, lr, sigma, p0, p1, p2, p3, p4, p5,
             p6, p7, p8, p9, p10, p11, p12, p13, q0, q1, q2, RULE: tl.constexpr,
             STATES: tl.constexpr, LOCAL: tl.constexpr, KIND: tl.constexpr, TRACE: tl.constexpr,
             ROUND: tl.constexpr, aligned: tl.constexpr):
    """Apply the rule to a lane, and write."""
    if LOCAL:
        length = tl.minimum(tl.load(row + _LENGTH), 0x7FFFFFFF).to(tl.int32)
        first = lane * tl.load(row + _SPAN) // length  # spans are whole rows, or within one
        number = first + (start + tl.arange(0, place.shape[0])) // length
        eta = tl.load(norms + tl.load(row + _ROW) + number, mask=mask, other=1.0)
    w, s0, s1, s2, s3, s4 = RULE(
        w, g, h, z, s0, s1, s2, s3, s4, eta, c0, c1, c2, c3, c4, due, lr, sigma, p0, p1,
        p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13,
    )
    narrow: tl.constexpr = TRACE.primitive_bitwidth == 16
    _store(aw, True, place, mask, w, q0, 0, KIND, ROUND, aligned)
    _store(a0, STATES > 0, place, mask, s0, q0, 1, TRACE, narrow, aligned)
    _store(a1, STATES > 1, place, mask, s1, q1, 0, TRACE, narrow, aligned)
    _store(a2, STATES > 2, place, mask, s2, q1, 1, TRACE, narrow, aligned)
    _store(a3, STATES > 3, place, mask, s3, q2, 0, TRACE, narrow, aligned)
    _store(a4, STATES > 4, place, mask, s4, q2, 1, TRACE, narrow, aligned)


@triton.jit
def _own_normal(seed, place, span, tensor, step, REAL: tl.constexpr):
    """The normal number of each weight by its place in the whole parameter.

    The four of a quad lie on several processes, so that three of four numbers are not used.
    """
    z0, z1, z2, z3 = four_normals(seed, (place % span).to(tl.uint32), tensor, step, REAL)
    lane = place // span
    return tl.where(lane < 2, tl.where(lane == 0, z0, z1), tl.where(lane == 2, z2, z3))


@triton.jit
def _own_word(seed, draw: tl.constexpr, place, span, tensor, step):
    """The word of random bits of each weight by its place in the whole parameter."""
    q0, q1, q2, q3 = rounding_words(seed, draw, (place % span).to(tl.uint32), tensor, step)
    lane = place // span
    return tl.where(lane < 2, tl.where(lane == 0, q0, q1), tl.where(lane == 2, q2, q3))


@triton.jit
def _words(row, seed, draw: tl.constexpr, quad, tensor, step, i0, i1, i2, i3, CUT: tl.constexpr):
    """Words of random bits for the weights of the four lanes."""
    q0, q1, q2, q3 = rounding_words(seed, draw, quad, tensor, step)
    if CUT:
        first, span = tl.load(row + _FIRST), tl.load(row + _WHOLE_SPAN)
        if first >= 0:
            q0 = _own_word(seed, draw, first + i0, span, tensor, step)
            q1 = _own_word(seed, draw, first + i1, span, tensor, step)
            q2 = _own_word(seed, draw, first + i2, span, tensor, step)
            q3 = _own_word(seed, draw, first + i3, span, tensor, step)
    return q0, q1, q2, q3


@triton.jit
def _update(row, m, start, iota, norms, eta, seed, step, c0, c1, c2, c3, c4, due,
            RULE: tl.constexpr, STATES: tl.constexpr, SECOND: tl.constexpr, NOISE: tl.constexpr,
            CUT: tl.constexpr, LOCAL: tl.constexpr, KIND: tl.constexpr, TRACE: tl.constexpr,
            ROUND: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr, aligned: tl.constexpr):
    aw, ag, ah = _address(row, _W, True), _address(row, _G, True), _address(row, _H, SECOND)
    a0, a1 = _address(row, _STATE, STATES > 0), _address(row, _STATE + 1, STATES > 1)
    a2, a3 = _address(row, _STATE + 2, STATES > 2), _address(row, _STATE + 3, STATES > 3)
    a4 = _address(row, _STATE + 4, STATES > 4)
    factor, sign = tl.load(m + _FACTOR).to(REAL), tl.load(m + _SIGN).to(REAL)
    lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13 = load_numbers(m)
    # All lanes are read before one is written: so they are on their way together.
    i0, k0, w0, g0, h0, x00, x01, x02, x03, x04 = _values(
        row, start, factor, sign, aw, ag, ah, a0, a1, a2, a3, a4, 0,
        STATES, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    i1, k1, w1, g1, h1, x10, x11, x12, x13, x14 = _values(
        row, start, factor, sign, aw, ag, ah, a0, a1, a2, a3, a4, 1,
        STATES, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    i2, k2, w2, g2, h2, x20, x21, x22, x23, x24 = _values(
        row, start, factor, sign, aw, ag, ah, a0, a1, a2, a3, a4, 2,
        STATES, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    i3, k3, w3, g3, h3, x30, x31, x32, x33, x34 = _values(
        row, start, factor, sign, aw, ag, ah, a0, a1, a2, a3, a4, 3,
        STATES, SECOND, KIND, TRACE, REAL, BLOCK, aligned)
    z0, z1, z2, z3 = w0, w1, w2, w3
    narrow: tl.constexpr = TRACE.primitive_bitwidth == 16
    if NOISE or ROUND or narrow:
        # Quad numbers from memory: so the noise gets the weights' layout, not one of its own that
        # would have to be carried over through shared memory.
        quad = (start + tl.load(iota + tl.arange(0, BLOCK))).to(tl.uint32)
        tensor = quad * 0 + tl.load(row + _NUMBER).to(tl.uint32)
    if NOISE:
        if CUT:
            first, span = tl.load(row + _FIRST), tl.load(row + _WHOLE_SPAN)
            if first >= 0:
                z0 = _own_normal(seed, first + i0, span, tensor, step, REAL)
                z1 = _own_normal(seed, first + i1, span, tensor, step, REAL)
                z2 = _own_normal(seed, first + i2, span, tensor, step, REAL)
                z3 = _own_normal(seed, first + i3, span, tensor, step, REAL)
            else:
                z0, z1, z2, z3 = four_normals(seed, quad, tensor, step, REAL)
        else:
            z0, z1, z2, z3 = four_normals(seed, quad, tensor, step, REAL)
    q00, q10, q20, q30 = w0, w1, w2, w3  # of each lane, words for rounding
    q01, q11, q21, q31 = w0, w1, w2, w3
    q02, q12, q22, q32 = w0, w1, w2, w3
    if ROUND or (narrow and STATES > 0):
        q00, q10, q20, q30 = _words(row, seed, 0, quad, tensor, step, i0, i1, i2, i3, CUT)
    if narrow and STATES > 1:
        q01, q11, q21, q31 = _words(row, seed, 1, quad, tensor, step, i0, i1, i2, i3, CUT)
    if narrow and STATES > 3:
        q02, q12, q22, q32 = _words(row, seed, 2, quad, tensor, step, i0, i1, i2, i3, CUT)
    _advance(
        row, start, 0, norms, eta, i0, k0, w0, g0, h0, z0, x00, x01, x02, x03, x04, aw, a0, a1,
        a2, a3, a4, c0, c1, c2, c3, c4, due, lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10,
        p11, p12, p13, q00, q01, q02, RULE, STATES, LOCAL, KIND, TRACE, ROUND, aligned)
    _advance(
        row, start, 1, norms, eta, i1, k1, w1, g1, h1, z1, x10, x11, x12, x13, x14, aw, a0, a1,
        a2, a3, a4, c0, c1, c2, c3, c4, due, lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10,
        p11, p12, p13, q10, q11, q12, RULE, STATES, LOCAL, KIND, TRACE, ROUND, aligned)
    _advance(
        row, start, 2, norms, eta, i2, k2, w2, g2, h2, z2, x20, x21, x22, x23, x24, aw, a0, a1,
        a2, a3, a4, c0, c1, c2, c3, c4, due, lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10,
        p11, p12, p13, q20, q21, q22, RULE, STATES, LOCAL, KIND, TRACE, ROUND, aligned)
    _advance(
        row, start, 3, norms, eta, i3, k3, w3, g3, h3, z3, x30, x31, x32, x33, x34, aw, a0, a1,
        a2, a3, a4, c0, c1, c2, c3, c4, due, lr, sigma, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10,
        p11, p12, p13, q30, q31, q32, RULE, STATES, LOCAL, KIND, TRACE, ROUND, aligned)


@triton.jit(do_not_specialize=["finishing"])
def update_kernel(tensors, items, numbers, slots, norms, clocks, done, iota, draw, finishing,
                  RULE: tl.constexpr, STATES: tl.constexpr, SECOND: tl.constexpr,
                  NOISE: tl.constexpr, CUT: tl.constexpr, GLOBAL: tl.constexpr, LOCAL: tl.constexpr,
                  DECAY: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
                  D3: tl.constexpr, D4: tl.constexpr, PERIOD: tl.constexpr, KIND: tl.constexpr,
                  TRACE: tl.constexpr, ROUND: tl.constexpr, REAL: tl.constexpr,
                  BLOCK: tl.constexpr):
    """Write weights and states unless something exceeded its limit; count the step.

    `draw` holds the number of this draw, and the seed. With `finishing` clocks, the last program
    advances them and the draw, and clears the slots.
    """
    double: tl.constexpr = REAL.primitive_bitwidth == 64
    tiny: tl.constexpr = 2.2250738585072014e-308 if double else 1.1754943508222875e-38
    # Backwards: what the first pass read last is still in the cache.
    item = items + 2 * (tl.num_programs(0) - 1 - tl.program_id(0))
    row = tensors + tl.load(item).to(tl.int64) * _COLUMNS
    start = tl.load(item + 1)
    m = numbers + tl.load(row + _GROUP) * _NUMBERS
    ok = tl.load(slots + 1) == 0.0
    if ok:
        age = _age(m, clocks)
        c0, c1, c2 = _correction(m, age, D0), _correction(m, age, D1), _correction(m, age, D2)
        c3, c4 = _correction(m, age, D3), _correction(m, age, D4)
        due = _due(m, age, PERIOD)
        eta = tl.full([], 1.0, REAL)
        if GLOBAL:
            eta = tl.load(slots)
            if DECAY >= 0:
                eta = eta * _correction(m, age, DECAY)
            eta = tl.maximum(tl.abs(eta.to(REAL)), tiny)
        number, seed = tl.load(draw), tl.load(draw + 1)
        if tl.load(row + _ALIGNED) != 0:
            _update(row, m, start, iota, norms, eta, seed, number, c0, c1, c2, c3, c4, due, RULE,
                    STATES, SECOND, NOISE, CUT, LOCAL, KIND, TRACE, ROUND, REAL, BLOCK, True)
        else:
            _update(row, m, start, iota, norms, eta, seed, number, c0, c1, c2, c3, c4, due, RULE,
                    STATES, SECOND, NOISE, CUT, LOCAL, KIND, TRACE, ROUND, REAL, BLOCK, False)
    if finishing > 0:
        before = tl.atomic_add(done, 1)
        if before == tl.num_programs(0) - 1:
            tl.store(done, 0)
            tl.store(draw, tl.load(draw) + 1)
            for clock in range(finishing):
                taken = tl.load(clocks + 2 * clock).to(tl.pointer_type(tl.int64))
                tried = tl.load(clocks + 2 * clock + 1).to(tl.pointer_type(tl.int64))
                tl.store(taken, tl.load(taken) + ok.to(tl.int64))
                tl.store(tried, tl.load(tried) + 1)
            tl.store(slots, float("-inf"))
            tl.store(slots + 1, 0.0)
