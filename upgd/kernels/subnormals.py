# mypy: ignore-errors
"""Flush subnormal numbers to zero while a kernel runs.

A trace whose gradient has become zero decays at every step, and with β = 0.9 it is subnormal after
some 800 steps. There it stays: 0.9 times the smallest number rounds up to it. On x86-64 a product
with such numbers takes many times as long; a learner of mostly black pixels was six times slower.
The error is below 1.2e-38, or 2.3e-308 in float64.

On other processors nothing is changed; ARM has not been measured.
Needs numba.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

HAS_SWITCH = platform.machine().lower() in ("x86_64", "amd64")
"""Whether this processor's control word is supported."""
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
    """Flush subnormal numbers to zero in this thread; returns the old control word."""

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
    """Restore the control word that :func:`flush_subnormals` returned."""

    def codegen(context, builder, signature, args):
        if HAS_SWITCH:
            place = cgutils.alloca_once_value(builder, args[0])
            _access(builder, "ld", place)
        return context.get_dummy_value()

    return types.none(types.uint32), codegen
