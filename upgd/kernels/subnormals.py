# mypy: ignore-errors
"""Numbers too small for float32's full precision, taken for zero while a kernel runs.

A trace whose gradient has become zero fades by its decay at every step, and with β = 0.9 it is
subnormal after some 800 of them. There it stays: 0.9 times the least number is rounded up to it.
x86-64 takes many times as long for a product with such numbers; a learner of mostly black pixels
was six times slower by them. What is lost is below 1.2e-38, or 2.3e-308 in float64.

On other processors nothing is switched; whether ARM's cores lose by them has not been measured.
Needs numba.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

HAS_SWITCH = platform.machine().lower() in ("x86_64", "amd64")
"""Whether this processor's control word is known here."""
_WORD = ir.IntType(32)
_BITS = 0x8000 | 0x0040  # results, and operands


def _access(builder, name, place):
    """Store the control word of this thread, or load it."""
    anything = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [anything])
    fn = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{name}mxcsr")
    builder.call(fn, [builder.bitcast(place, anything)])


@intrinsic
def flush_subnormals(typingctx):
    """From here on this thread takes subnormal numbers for zero; returns what to give back."""

    def codegen(context, builder, signature, args):
        if not HAS_SWITCH:
            return ir.Constant(_WORD, 0)
        place = cgutils.alloca_once(builder, _WORD)
        _access(builder, "st", place)
        before = builder.load(place)
        builder.store(builder.or_(before, ir.Constant(_WORD, _BITS)), place)
        _access(builder, "ld", place)
        return before

    return types.uint32(), codegen


@intrinsic
def give_back(typingctx, before):
    """As :func:`flush_subnormals` found it."""

    def codegen(context, builder, signature, args):
        if HAS_SWITCH:
            place = cgutils.alloca_once_value(builder, args[0])
            _access(builder, "ld", place)
        return context.get_dummy_value()

    return types.none(types.uint32), codegen
