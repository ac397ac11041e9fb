"""A method's rules as Triton functions."""

from __future__ import annotations

from types import ModuleType

from upgd.kernels.rules import Stage, load_module, source
from upgd.kernels.triton_random import HARDWARE
from upgd.rules.vocabulary import Method

_HELPERS = """
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def sigmoid(x):
    {sigmoid}


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def absolute(x):
    return tl.abs(x)


@triton.jit
def fused(a, b, c):
    return tl.fma(a, b, c)
"""
_PLAIN = "return 1.0 / (1.0 + tl.exp(-x))"
# Two calls of the special function unit; the quotient's error is 2 ulp, and 1/inf is 0.
_HARDWARE = "return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))"


def compile_rules(method: Method, real: str) -> ModuleType:
    """``update`` and, where the method has them, ``reduce`` and ``trace`` (of features).

    Args:
        method: Whose rules.
        real: ``"float32"`` or ``"float64"``.
    """
    hardware = HARDWARE.value and real == "float32"
    parts = [_HELPERS.format(sigmoid=_HARDWARE if hardware else _PLAIN)]
    stages: list[Stage] = ["update"]
    if method.phases[0].over == "features":
        stages.append("features")
    elif method.phases[0].reduce is not None:
        stages.append("reduce")
    parts += ["@triton.jit\n" + source(method, stage, "triton") for stage in stages]
    return load_module("\n\n".join(parts), f"rules_{real}")
