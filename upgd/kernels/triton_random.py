# mypy: ignore-errors
"""The generator of :mod:`upgd.kernels.philox` for Triton kernels."""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

from upgd.caches import use_triton_cache
from upgd.kernels import philox

use_triton_cache()
HARDWARE = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") in ("", "0"))
"""Whether kernels are compiled, not interpreted: only then are special functions available."""

# Triton accepts global numbers as constants only in this form.
_ROUNDS = tl.constexpr(philox.ROUNDS)
_M0, _M1 = (tl.constexpr(m) for m in philox.MULTIPLIERS)
_W0, _W1 = (tl.constexpr(w) for w in philox.WEYL)
_ROUND_EXPONENT = tl.constexpr(philox.ROUND_EXPONENT)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7 = (tl.constexpr(c) for c in philox.LOG)
_S0, _S1, _S2 = (tl.constexpr(c) for c in philox.SIN)
_C0, _C1, _C2 = (tl.constexpr(c) for c in philox.COS)
_ROUNDING = tl.constexpr(philox.ROUNDING)
_LN2 = tl.constexpr(0.6931471805599453)
_ANGLE = tl.constexpr(6.283185307179586 / 2**32)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _special(name: tl.constexpr, x):
    """One instruction of the special function unit. Its logarithm is within 2⁻²² near 1."""
    return tl.inline_asm_elementwise(
        name + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def box_muller(radius, angle, real: tl.constexpr):
    """Two normal numbers for each pair of words; see upgd/kernels/philox.py."""
    if HARDWARE and real == tl.float32:  # the special function unit's
        u = radius.to(tl.float32) * _UNIT + 0.5 * _UNIT
        square = -2.0 * _LN2 * _special("lg2", u)
        length = _special("sqrt", tl.maximum(square, 0.0))
        a = angle.to(tl.int32, bitcast=True).to(real) * _ANGLE
        first, second = libdevice.fast_cosf(a), libdevice.fast_sinf(a)
    else:
        bits = (radius.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
        exponent = ((bits + _ROUND_EXPONENT) >> 23) - 127
        scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True).to(real)
        m = (radius.to(real) + 0.5) * scale - 1.0
        high = (((_L7 * m + _L6) * m + _L5) * m + _L4) * m + _L3
        tail = ((high * m + _L2) * m + _L1) * m + _L0
        logarithm = (exponent - 32).to(real) * _LN2 + (m + m * m * tail)
        length = tl.sqrt(tl.maximum(-2.0 * logarithm, 0.0))
        quarter = (angle + 0x20000000) >> 30
        rest = (angle - (quarter << 30)).to(tl.int32, bitcast=True)
        a = rest.to(real) * _ANGLE
        square = a * a
        sine = a + a * square * ((_S2 * square + _S1) * square + _S0)
        cosine = 1.0 + square * ((_C2 * square + _C1) * square + _C0)
        odd = (quarter & 1) == 1
        first, second = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
        first = tl.where((quarter == 1) | (quarter == 2), -first, first)
        second = tl.where(quarter >= 2, -second, second)
    return length * first, length * second


@triton.jit
def four_words(seed, c0, c1, c2, c3):
    """Philox's four words of a counter. Products are taken as 64 bits: one instruction, not two."""
    key = seed.to(tl.uint64, bitcast=True)
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    c0, c1, c2, c3 = c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        a, b = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0, c2 = (b >> 32).to(tl.uint32) ^ c1 ^ k0, (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def rounding_words(seed, draw: tl.constexpr, quad, tensor, step):
    """The words of each quad that rounding uses; see PhiloxNoise.bits."""
    low, high = (step & 0xFFFFFFFF).to(tl.uint32), (step >> 32).to(tl.uint32)
    return four_words(seed + ((_ROUNDING + draw) << 32), quad, tensor, low, high)


@triton.jit
def narrowed(x, word, half: tl.constexpr, kind: tl.constexpr):
    """Round float32 to 16 bits by half of a word; see upgd/optim/rounding.py."""
    bits = (word >> (16 * half)) & 0xFFFF
    kept: tl.constexpr = 0xFFFF0000 if kind == tl.bfloat16 else 0xFFFFE000
    largest: tl.constexpr = 0x7F7F0000 if kind == tl.bfloat16 else 0x477FE000
    infinite: tl.constexpr = 0x7F800000 if kind == tl.bfloat16 else 0x47800000
    if kind == tl.float16:
        bits = bits >> 3
        normal: tl.constexpr = 6.103515625e-05
        shift = tl.where(tl.abs(x) < normal, tl.where(x < 0, -normal, normal), 0.0)
        x = x + shift
    pattern = x.to(tl.uint32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    found = (pattern + bits) & kept
    over = (found & 0x7FFFFFFF) > largest
    found = tl.where(over, (pattern & 0x80000000) | largest, found)
    found = tl.where(magnitude < infinite, found, pattern).to(tl.float32, bitcast=True)
    if kind == tl.float16:
        found = found - shift
    return found.to(kind)


@triton.jit
def four_normals(seed, quad, tensor, step, real: tl.constexpr):
    """The four numbers of each quad."""
    low, high = (step & 0xFFFFFFFF).to(tl.uint32), (step >> 32).to(tl.uint32)
    a, b, c, d = four_words(seed, quad, tensor, low, high)
    z0, z1 = box_muller(a, b, real)
    z2, z3 = box_muller(c, d, real)
    return z0, z1, z2, z3
