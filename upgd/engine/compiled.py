"""A method's rules as Triton functions."""

from __future__ import annotations

from typing import Any

import torch

from upgd.engine.dense import Group
from upgd.kernels.rules import Stage, load_module, source
from upgd.kernels.triton_random import HARDWARE

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
"""
_PLAIN = "return 1.0 / (1.0 + tl.exp(-x))"
# Two calls of the special function unit; the quotient's error is 2 ulp, and 1/inf is 0.
_HARDWARE = "return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))"


def compile_rules(group: Group, dtype: torch.dtype) -> Any:
    """The group's rules as Triton functions."""
    method = group.row.method
    hardware = HARDWARE.value and dtype == torch.float32
    parts = [_HELPERS.format(sigmoid=_HARDWARE if hardware else _PLAIN)]
    stages: list[Stage] = ["update"]
    if group.reduce is not None:
        stages.append("reduce")
    if group.features:
        stages.append("features")
    parts += ["@triton.jit\n" + source(method, stage, "triton") for stage in stages]
    return load_module("\n\n".join(parts), group.row.name.replace("-", "_"))
