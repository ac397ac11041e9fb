# mypy: ignore-errors
"""Sigmoids of numbers, and intrinsics, for kernels whose loops LLVM vectorises. Needs numba."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from upgd.kernels import cpu_functions, philox, subnormals, vectors
from upgd.kernels.rules import fingerprint
from upgd.kernels.vectors import built, maximum, minimum

FAST = {"contract", "nsz"}
"""Fast-math flags: fused multiply-adds, and any sign of a zero."""
OPTIONS = {"fastmath": FAST, "error_model": "numpy", "nogil": True}
"""How every kernel is compiled: division by zero gives infinity, other threads may run."""
_HELPERS = (cpu_functions, philox, subnormals, vectors)
VERSION = fingerprint(__file__, *(module.__file__ for module in _HELPERS))
"""Changes with these files; part of generated kernels, to invalidate their cache."""

_LOG2E = 1 / math.log(2)
EXP2 = (
    *(1.0000000716546564, 0.6931469670638641, 0.24022119723934177),
    *(0.055507132749616384, 0.009675541330666849, 0.0013276471519282152),
)
"""``2ᶠ ≈ Σ EXP2[k]·fᵏ`` for ``|f| ≤ ½``, to 8e-8."""
NEAR = (0.24999941904765582, -0.020825409507177806, 0.002053929000402044, -0.000169423759547345)
"""``sigmoid(x) ≈ ½ + x·Σ NEAR[k]·x²ᵏ`` for ``|x| ≤ 1``, to 7e-8."""


# ------------------------------------------------------------------------- intrinsics
@intrinsic
def float_bits(typingctx, x):
    """A float32 as an int32 with the same bits."""
    return built(types.int32(types.float32), lambda b, x: b.bitcast(x, ir.IntType(32)))


@intrinsic
def bits_float(typingctx, x):
    """An int32 as a float32 with the same bits."""
    return built(types.float32(types.int32), lambda b, x: b.bitcast(x, ir.FloatType()))


@intrinsic
def pointer(typingctx, address):
    """An address, to be given to :func:`numba.carray`."""
    place = ir.IntType(8).as_pointer()
    return built(types.voidptr(types.int64), lambda b, x: b.inttoptr(x, place))


@intrinsic
def numbers_at(typingctx, address, like):
    """A pointer to numbers of the type of `like` at an address."""
    place = types.CPointer(like)

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(place))

    return place(types.int64, like), codegen


@intrinsic
def take_ticket(typingctx, counter):
    """Atomically increment the first element of an int64 array; returns its old value."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", array.data, one, "monotonic")

    return types.int64(counter), codegen


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
