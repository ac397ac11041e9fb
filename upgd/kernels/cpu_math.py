# mypy: ignore-errors
"""Normal numbers and sigmoids for kernels that numba compiles.

Written so that LLVM vectorises every loop: no branches, no calls, 32-bit words multiplied into 64
bits. The normals are those of :mod:`upgd.kernels.philox`; kernels ask for a stretch of quads and
get four buffers, one per lane. All functions take float32 or float64 and compute in that type.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from upgd.kernels import philox, subnormals, vectors
from upgd.kernels.rules import fingerprint

FAST = {"contract", "nsz"}
"""Fast-math flags: fused multiply-adds, and any sign of a zero."""
OPTIONS = {"fastmath": FAST, "error_model": "numpy", "nogil": True}
"""How every kernel is compiled: division by zero gives infinity, other threads may run."""
VERSION = fingerprint(__file__, vectors.__file__, subnormals.__file__)
"""Changes with these files; part of generated kernels, to invalidate their cache."""

_M0, _M1 = (np.uint64(m) for m in philox.MULTIPLIERS)
_W0, _W1 = (np.uint32(w) for w in philox.WEYL)
_ROUNDS = philox.ROUNDS
_LOG, _SIN, _COS = philox.LOG, philox.SIN, philox.COS
_ROUND_EXPONENT = np.int32(philox.ROUND_EXPONENT)
_LN2 = math.log(2)
_LOG2E = 1 / math.log(2)
_TURN = 2 * math.pi / 2**32
LANES = 8
"""How many quads are drawn together; any number of fours, two of which keep both units busy."""
EXP2 = (
    *(1.0000000716546564, 0.6931469670638641, 0.24022119723934177),
    *(0.055507132749616384, 0.009675541330666849, 0.0013276471519282152),
)
"""``2ᶠ ≈ Σ EXP2[k]·fᵏ`` for ``|f| ≤ ½``, to 8e-8."""
NEAR = (0.24999941904765582, -0.020825409507177806, 0.002053929000402044, -0.000169423759547345)
"""``sigmoid(x) ≈ ½ + x·Σ NEAR[k]·x²ᵏ`` for ``|x| ≤ 1``, to 7e-8."""


# ------------------------------------------------------------------------- intrinsics
def _bitcast(source, target):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(target))

    return target(source), codegen


@intrinsic
def float_bits(typingctx, x):
    """A float32 as an int32 with the same bits."""
    return _bitcast(types.float32, types.int32)


@intrinsic
def bits_float(typingctx, x):
    """An int32 as a float32 with the same bits."""
    return _bitcast(types.int32, types.float32)


def _extreme(name, x):
    def codegen(context, builder, signature, args):
        kind = args[0].type
        full = f"llvm.{name}.{'f64' if isinstance(kind, ir.DoubleType) else 'f32'}"
        fn = builder.module.globals.get(full)
        if fn is None:
            fn = ir.Function(builder.module, ir.FunctionType(kind, [kind, kind]), full)
        return builder.call(fn, args)

    return x(x, x), codegen


@intrinsic
def maximum(typingctx, x, y):
    """The larger of two numbers of one type, or NaN if one is; loops with it vectorise."""
    return _extreme("maximum", x)


@intrinsic
def minimum(typingctx, x, y):
    """The smaller of two numbers of one type, or NaN if one is."""
    return _extreme("minimum", x)


@intrinsic
def pointer(typingctx, address):
    """An address, to be given to :func:`numba.carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def take_ticket(typingctx, counter):
    """Atomically increment the first element of an int64 array; returns its old value."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", array.data, one, "monotonic")

    return types.int64(counter), codegen


# ----------------------------------------------------------------------------- random
@njit(forceinline=True, **OPTIONS)
def philox_words(c0, c1, c2, c3, k0, k1, rounds):
    """Four 32-bit words for a counter and a key of 32-bit words."""
    for _ in range(rounds):
        low = _M0 * np.uint64(c0)
        high = _M1 * np.uint64(c2)
        c0 = np.uint32(np.uint32(high >> np.uint64(32)) ^ c1 ^ k0)
        c1 = np.uint32(high)
        c2 = np.uint32(np.uint32(low >> np.uint64(32)) ^ c3 ^ k1)
        c3 = np.uint32(low)
        k0 = np.uint32(k0 + _W0)
        k1 = np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@njit(forceinline=True, **OPTIONS)
def box_muller(radius, angle, real):
    """Two normal numbers for a pair of words; `real` is the type of the result."""
    bits = float_bits(np.float32(radius) + np.float32(0.5))
    exponent = np.int32(np.int32(bits + _ROUND_EXPONENT) >> np.int32(23)) - np.int32(127)
    scale = real(bits_float(np.int32(np.int32(np.int32(127) - exponent) << np.int32(23))))
    m = (real(radius) + real(0.5)) * scale - real(1)
    # The polynomial in pairs: a shorter chain of dependent operations.
    m2 = m * m
    low = (real(_LOG[3]) * m + real(_LOG[2])) * m2 + (real(_LOG[1]) * m + real(_LOG[0]))
    high = (real(_LOG[7]) * m + real(_LOG[6])) * m2 + (real(_LOG[5]) * m + real(_LOG[4]))
    logarithm = real(np.int32(exponent - np.int32(32))) * real(_LN2) + m
    logarithm = logarithm + m2 * (low + m2 * m2 * high)
    length = np.sqrt(maximum(real(-2) * logarithm, real(0)))
    quarter = np.uint32(np.uint32(angle + np.uint32(1 << 29)) >> np.uint32(30))
    rest = np.int32(np.uint32(angle - np.uint32(quarter << np.uint32(30))))
    a = real(rest) * real(_TURN)
    square = a * a
    sine = a + a * square * ((real(_SIN[2]) * square + real(_SIN[1])) * square + real(_SIN[0]))
    cosine = real(1) + square * ((real(_COS[2]) * square + real(_COS[1])) * square + real(_COS[0]))
    odd = (quarter & np.uint32(1)) != np.uint32(0)
    first = sine if odd else cosine
    second = cosine if odd else sine
    # Quarters 1 and 2 turn the first number's sign, 2 and 3 the second's.
    turned = (np.uint32(quarter + np.uint32(1)) & np.uint32(2)) != np.uint32(0)
    first = -first if turned else first
    second = -second if quarter >= np.uint32(2) else second
    return length * first, length * second


@intrinsic
def _philox_block(typingctx, a, b, c, d, place, quad, c1, c2, c3, k0, k1):
    """The words of ``LANES`` quads from `quad` on, into four uint32 arrays from `place` on.

    Explicit vectors: left to itself, LLVM keeps 32-bit words in 64-bit lanes at twice the cost.
    """

    def codegen(context, builder, signature, args):
        word, wide = ir.IntType(32), ir.IntType(64)
        row = ir.VectorType(word, LANES)
        four, pair = ir.VectorType(word, 4), ir.VectorType(wide, 2)

        def places(numbers):
            return ir.Constant(ir.VectorType(word, len(numbers)), list(numbers))

        def shuffle(x, y, numbers):
            return builder.shuffle_vector(x, y, places(numbers))

        def splat(x):
            nothing = ir.Constant(row, ir.Undefined)
            return shuffle(builder.insert_element(nothing, x, word(0)), nothing, [0] * LANES)

        def product(x, multiplier):
            """The low and the high words of x times the multiplier."""
            lows, highs = [], []
            factor = ir.Constant(pair, [multiplier] * 2)
            for first in range(0, LANES, 4):
                halves = []
                for place in (first, first + 2):
                    two = builder.zext(shuffle(x, x, [place, place + 1]), pair)
                    halves.append(builder.bitcast(builder.mul(two, factor), four))
                lows.append(shuffle(*halves, [0, 2, 4, 6]))
                highs.append(shuffle(*halves, [1, 3, 5, 7]))
            return shuffle(*lows, range(LANES)), shuffle(*highs, range(LANES))

        quads = builder.add(splat(args[5]), places(range(LANES)))
        w = [quads, splat(args[6]), splat(args[7]), splat(args[8])]
        k0, k1 = args[9], args[10]
        for _ in range(_ROUNDS):
            low, over = product(w[0], philox.MULTIPLIERS[0])
            high, above = product(w[2], philox.MULTIPLIERS[1])
            w = [
                builder.xor(builder.xor(above, w[1]), splat(k0)),
                high,
                builder.xor(builder.xor(over, w[3]), splat(k1)),
                low,
            ]
            k0 = builder.add(k0, word(philox.WEYL[0]))
            k1 = builder.add(k1, word(philox.WEYL[1]))
        for argument, kind, words in zip(args[:4], signature.args[:4], w, strict=True):
            array = context.make_array(kind)(context, builder, argument)
            spot = builder.gep(builder.bitcast(array.data, word.as_pointer()), [args[4]])
            builder.store(words, builder.bitcast(spot, row.as_pointer()), align=4)
        return context.get_dummy_value()

    words = [types.uint32] * 6
    return types.void(a, b, c, d, types.int64, *words), codegen


@njit(**OPTIONS)
def _pairs32(words, angles, first, second, count):
    for i in range(count):
        first[i], second[i] = box_muller(words[i], angles[i], np.float32)


@njit(**OPTIONS)
def normals32(z0, z1, z2, z3, count, start, tensor, step, seed):
    """Fill four float32 buffers with the normals of quads ``start … start + count``.

    `start`, `tensor`, `step` and `seed` are integers, the last two of up to 64 bits. Buffers are
    contiguous and may be longer than `count`.
    """
    c1 = np.uint32(tensor)
    c2, c3 = np.uint32(step), np.uint32(np.uint64(step) >> np.uint64(32))
    k0, k1 = np.uint32(seed), np.uint32(np.uint64(seed) >> np.uint64(32))
    words = np.empty((4, count), np.uint32)
    a, b, c, d = words[0], words[1], words[2], words[3]
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        _philox_block(a, b, c, d, i, np.uint32(start + i), c1, c2, c3, k0, k1)
    for i in range(whole, count):
        quad = np.uint32(start + i)
        a[i], b[i], c[i], d[i] = philox_words(quad, c1, c2, c3, k0, k1, _ROUNDS)
    _pairs32(a, b, z0, z1, count)
    _pairs32(c, d, z2, z3, count)


@njit(**OPTIONS)
def normals64(z0, z1, z2, z3, count, start, tensor, step, seed):
    """As :func:`normals32`, in float64."""
    c1 = np.uint32(tensor)
    c2, c3 = np.uint32(step), np.uint32(np.uint64(step) >> np.uint64(32))
    k0, k1 = np.uint32(seed), np.uint32(np.uint64(seed) >> np.uint64(32))
    first = np.uint32(start)
    for i in range(count):
        a, b, c, d = philox_words(np.uint32(first + np.uint32(i)), c1, c2, c3, k0, k1, _ROUNDS)
        z0[i], z1[i] = box_muller(a, b, np.float64)
        z2[i], z3[i] = box_muller(c, d, np.float64)


# ---------------------------------------------------------------------------- sigmoid
@njit(forceinline=True, **OPTIONS)
def sigmoid32(x):
    """The sigmoid of a float32, to about 1e-7 of its value; NaN stays NaN."""
    # e⁻ˣ = 2ⁿ·2ᶠ. Adding 1.5·2²³ rounds to an integer, which then stands in the low bits.
    y = minimum(maximum(x * np.float32(-_LOG2E), np.float32(-126)), np.float32(127))
    shifted = y + np.float32(12582912)
    f = y - (shifted - np.float32(12582912))
    p = np.float32(EXP2[5])
    p = p * f + np.float32(EXP2[4])
    p = p * f + np.float32(EXP2[3])
    p = p * f + np.float32(EXP2[2])
    p = p * f + np.float32(EXP2[1])
    p = p * f + np.float32(EXP2[0])
    e = bits_float(np.int32(float_bits(p) + np.int32(float_bits(shifted) << np.int32(23))))
    return np.float32(1) / (np.float32(1) + e)


@njit(forceinline=True, **OPTIONS)
def near_sigmoid32(x):
    """The sigmoid of a float32 in [-1, 1], to about 1e-7, without a quotient."""
    square = x * x
    p = (np.float32(NEAR[3]) * square + np.float32(NEAR[2])) * (square * square)
    p = p + (np.float32(NEAR[1]) * square + np.float32(NEAR[0]))
    return np.float32(0.5) + x * p


@njit(forceinline=True, **OPTIONS)
def sigmoid64(x):
    """The sigmoid of a float64."""
    return 1.0 / (1.0 + math.exp(-x))
