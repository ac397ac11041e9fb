# mypy: ignore-errors
"""The generator of :mod:`upgd.kernels.philox`, and sigmoids, for vectors. Needs numba."""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.extending import overload

from upgd.kernels import philox
from upgd.kernels.vectors import (
    LANES,
    Vector,
    bits,
    choose,
    converted,
    converted_signed,
    equal,
    exp,
    lanes,
    less,
    load,
    maximum,
    minimum,
    number,
    product,
    shifted,
    spread,
    sqrt,
    store,
    widened,
)

_compiled = njit(error_model="numpy")  # division by zero gives infinity
_inlined = njit(error_model="numpy", forceinline=True)
_U = np.uint32
_M0, _M1 = (_U(m) for m in philox.MULTIPLIERS)
_W0, _W1 = (_U(w) for w in philox.WEYL)
_LN2 = math.log(2)


# ------------------------------------------------------------------------------- noise
# float32 numbers need fewer operations than the reference: sin(πz/2)/z and cos(πz/2) for a whole
# half turn |z| ≤ 1, to 4e-9, so that nothing is exchanged, and -2·log in one piece.
_F = np.float32
_SINE = (
    *(1.5707962900215509, -0.6459633598620473, 0.07968848052533081),
    *(-0.00467222789502284, 0.0001508205479364101),
)
_COSINE = (
    *(0.9999999997806697, -1.233700534307058, 0.253669322770962),
    *(-0.020862688383931075, 0.0009177248372199373, -2.3824917182523026e-05),
)
COEFFICIENTS = np.repeat(
    np.array([-2.0, *(-2.0 * c for c in philox.LOG), *_SINE, *_COSINE], np.float32), LANES
)
"""What :func:`normals` reads, each number LANES times.

Loading from memory is faster: a number in a register must be copied before a product can be added
to it, and a copy costs as much as the product.
"""
_S, _C = LANES * (1 + len(philox.LOG)), LANES * (1 + len(philox.LOG) + len(_SINE))
_HALF, _ONE, _LENGTH, _HALF_TURN = _F(0.5), _F(1.0), _F(-2 * _LN2), _F(2.0**-31)
_EXPONENT = _U((philox.ROUND_EXPONENT - (159 << 23)) & 0xFFFFFFFF)
_MANTISSA, _ROOT_HALF = _U(0x7FFFFF), _U(0x3F800000 - philox.ROUND_EXPONENT)
_QUARTER_TURN, _SIGN = _U(1 << 30), _U(1 << 31)
_1, _23, _30 = _U(1), _U(23), _U(30)


@_inlined
def philox_words(quad, tensor, low, high, k0, k1):
    """Four words for each counter ``(quad, tensor, low, high)``."""
    c0, c1, c2, c3 = quad, spread(tensor), spread(low), spread(high)
    for i in range(philox.ROUNDS):
        if i > 0:
            k0 = _U(k0 + _W0)
            k1 = _U(k1 + _W1)
        high0, low0 = product(c0, _M0)
        high1, low1 = product(c2, _M1)
        c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
    return c0, c1, c2, c3


@_inlined
def _box_muller32(radius, angle, table):
    x = converted(radius, _HALF) + _HALF
    e = bits(x) + _EXPONENT  # its upper bits: the exponent of u = m·2ᵉ with √½ ≤ m < √2
    m = number((e & _MANTISSA) + _ROOT_HALF) - _ONE
    # In pairs: shorter chains of dependent operations.
    m2 = m * m
    m4 = m2 * m2
    a = load(table, LANES) * m + load(table, 0)
    b = load(table, 3 * LANES) * m + load(table, 2 * LANES)
    c = load(table, 5 * LANES) * m + load(table, 4 * LANES)
    d = load(table, 7 * LANES) * m + load(table, 6 * LANES)
    t = a + b * m2 + (c + d * m2 + load(table, 8 * LANES) * m4) * m4
    length = sqrt(t * m + converted_signed(shifted(e, _23), _HALF) * _LENGTH)
    # A half turn changes the sign of both numbers, so of the length.
    length = number(bits(length) ^ ((angle + _QUARTER_TURN) & _SIGN))
    z = converted_signed(angle << _1, _HALF) * _HALF_TURN
    q = z * z
    s = load(table, _S + 4 * LANES) * q + load(table, _S + 3 * LANES)
    s = s * q + load(table, _S + 2 * LANES)
    s = s * q + load(table, _S + LANES)
    s = s * q + load(table, _S)
    c = load(table, _C + 5 * LANES) * q + load(table, _C + 4 * LANES)
    c = c * q + load(table, _C + 3 * LANES)
    c = c * q + load(table, _C + 2 * LANES)
    c = c * q + load(table, _C + LANES)
    c = c * q + load(table, _C)
    return length * c, (length * z) * s


_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = philox.LOG
_S0, _S1, _S2 = philox.SIN
_C0, _C1, _C2 = philox.COS
_ROUND_EXPONENT = _U(philox.ROUND_EXPONENT)
_EXPONENT_BITS, _SCALE, _BIAS = _U(0xFF800000), _U(0x7F000000), _U(-159 & 0xFFFFFFFF)
_EIGHTH, _TWO, _LOWEST = _U(1 << 29), _U(2), _U(0x3FFFFFFF)
_ANGLE = 2 * math.pi / 2**34  # of a word whose two highest bits are shifted out


@_inlined
def _box_muller64(radius, angle):
    """As in the reference."""
    e = bits(converted(radius, _HALF) + _HALF) + _ROUND_EXPONENT
    scale = widened(number(spread(_SCALE) - (e & _EXPONENT_BITS)))
    m = (converted(radius, 0.5) + 0.5) * scale - 1.0
    t = (((_L7 * m + _L6) * m + _L5) * m + _L4) * m + _L3
    t = ((t * m + _L2) * m + _L1) * m + _L0
    logarithm = converted_signed(shifted(e, _23) + _BIAS, 0.5) * _LN2 + (m + m * m * t)
    length = sqrt(maximum(logarithm * -2.0, spread(0.0)))
    a = converted_signed(angle << _TWO, 0.5) * _ANGLE
    q = a * a
    s = a + a * q * ((_S2 * q + _S1) * q + _S0)
    c = 1.0 + q * ((_C2 * q + _C1) * q + _C0)
    quarter = (angle + _EIGHTH) >> _30
    odd = equal(quarter & _1, spread(_1))
    first, second = choose(odd, s, c), choose(odd, c, s)
    middle = equal((quarter + _1) & _TWO, spread(_TWO))  # quarters 1 and 2
    first = choose(middle, -first, first)
    second = choose(less(quarter, spread(_TWO)), second, -second)
    return length * first, length * second


def box_muller(radius, angle, like, table):
    """Two normal numbers for each pair of words, of the type of an array `like`."""
    raise NotImplementedError


@overload(box_muller)
def _choose_box_muller(radius, angle, like, table):
    if like.dtype == types.float32:
        return lambda radius, angle, like, table: _box_muller32(radius, angle, table)
    return lambda radius, angle, like, table: _box_muller64(radius, angle)


@_compiled
def draw_words(words, pitch, count, first, tensor, step, seed):
    """Words 0 … 3 of quads ``first … first + count - 1``, each `pitch` behind the one before.

    Writes whole vectors, so up to LANES - 1 words too many.
    """
    low, high = _U(step), _U(step >> 32)
    k0, k1 = _U(seed), _U(np.uint64(seed) >> np.uint64(32))
    for j in range(0, count, LANES):
        quad = lanes() + _U(first + j)
        a, b, c, d = philox_words(quad, tensor, low, high, k0, k1)
        store(words, j, a)
        store(words, pitch + j, b)
        store(words, 2 * pitch + j, c)
        store(words, 3 * pitch + j, d)


@_compiled
def normals(z, words, table, pitch, count, first, tensor, step, seed):
    """As :func:`draw_words`, normal numbers; `table` is a copy of COEFFICIENTS."""
    draw_words(words, pitch, count, first, tensor, step, seed)
    for i in range(0, 4 * pitch, 2 * pitch):
        for j in range(i, i + count, LANES):
            x, y = box_muller(load(words, j), load(words, pitch + j), z, table)
            store(z, j, x)
            store(z, pitch + j, y)


# ---------------------------------------------------------------------------- sigmoids
# 2ᶠ for |f| ≤ ½, to 7.5e-8 of it.
_EXP0, _EXP1, _EXP2, _EXP3, _EXP4, _EXP5 = (
    *(_F(1.0000000716546564), _F(0.6931469670638641), _F(0.24022119723934177)),
    *(_F(0.055507132749616384), _F(0.009675541330666849), _F(0.0013276471519282152)),
)
_MAGIC = _F(1.5 * 2**23)  # pushes a fraction out of a float32
_LOG2E, _MOST = _F(-1 / _LN2), _F(126)


@_inlined
def _sigmoid32(x):
    t = minimum(maximum(x * _LOG2E, spread(-_MOST)), spread(_MOST))
    rounded = t + _MAGIC
    f = t - (rounded - _MAGIC)
    f2 = f * f
    p = (_EXP1 * f + _EXP0) + ((_EXP3 * f + _EXP2) + (_EXP5 * f + _EXP4) * f2) * f2
    return _ONE / (_ONE + number(bits(p) + (bits(rounded) << _23)))


# sigmoid(x) = ½ + x·Σ cₖx²ᵏ for |x| ≤ 1, to 2e-9.
_NEAR0, _NEAR1, _NEAR2, _NEAR3, _NEAR4 = (
    *(_F(0.2499999829063567), _F(-0.020832985118547663), _F(0.002081339191865097)),
    *(_F(-0.0002061021001812089), _F(1.634529054727168e-05)),
)


@_inlined
def _near_sigmoid32(x):
    q = x * x
    q2 = q * q
    p = (_NEAR1 * q + _NEAR0) + ((_NEAR3 * q + _NEAR2) + _NEAR4 * q2) * q2
    return x * p + _HALF


def sigmoid(x):
    """1/(1+e⁻ˣ) of a vector or of one number."""
    raise NotImplementedError


@overload(sigmoid)
def _choose_sigmoid(x):
    if isinstance(x, Vector):
        if x.dtype == types.float32:
            return lambda x: _sigmoid32(x)
        return lambda x: 1.0 / (1.0 + exp(-x))
    one = np.float32(1) if x == types.float32 else 1.0
    return lambda x: one / (one + exp(-x))


def near_sigmoid(x):
    """The same where ``|x| ≤ 1``, in a third of the time."""
    raise NotImplementedError


@overload(near_sigmoid)
def _choose_near_sigmoid(x):
    if isinstance(x, Vector) and x.dtype == types.float32:
        return lambda x: _near_sigmoid32(x)
    return lambda x: sigmoid(x)
