"""A method's rules as Triton functions."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from upgd.kernels.rules import Stage, load_module, reduces, source
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
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)).to(x.dtype)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def maximum(x, y):
    return tl.where((x > y) | (x != x), x, y)  # NaN if either is


@triton.jit
def minimum(x, y):
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def fused(a, b, c):
    return tl.fma(a, b, c)
"""
_PLAIN = "return 1.0 / (1.0 + tl.exp(-x))"
# Two calls of the special function unit; the quotient's error is 2 ulp, and 1/inf is 0.
_HARDWARE = "return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))"


def compile_rules(method: Method, real: str) -> ModuleType:
    """``update`` and, where the method has one, ``reduce``.

    Args:
        method: Whose rules.
        real: ``"float32"`` or ``"float64"``.
    """
    stages: list[Stage] = ["update", "reduce"] if reduces(method) else ["update"]
    return _load([source(method, stage, "triton") for stage in stages], real)


def compile_traces(methods: Sequence[Method], real: str) -> tuple[Any, list[int]]:
    """``trace(kind, f, s, utility, beta)`` of features, and each method's kind.

    Learners of several methods go back together, so the trace is chosen learner by learner.
    Methods whose traces are written alike have the same kind.
    """
    if not methods:
        return None, []
    sources = [source(method, "features", "triton") for method in methods]
    unique = list(dict.fromkeys(sources))
    parts = [text.replace("def trace(", f"def trace{i}(") for i, text in enumerate(unique)]
    lines = ["def trace(kind, f, s, w, beta):", "    u = trace0(f, s, w, beta)"]
    for i in range(1, len(unique)):
        lines.append(f"    u = tl.where(kind == {i}, trace{i}(f, s, w, beta), u)")
    parts.append("\n".join([*lines, "    return u", ""]))
    return _load(parts, real).trace, [unique.index(text) for text in sources]


def helpers(real: str) -> str:
    """Source of the functions that rules call."""
    hardware = HARDWARE.value and real == "float32"
    return _HELPERS.format(sigmoid=_HARDWARE if hardware else _PLAIN)


def _load(functions: list[str], real: str) -> ModuleType:
    text = "\n\n".join([helpers(real), *(f"@triton.jit\n{function}" for function in functions)])
    return load_module(text, f"rules_{real}")
