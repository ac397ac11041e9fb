# mypy: ignore-errors
"""A method's numbers in Triton kernels; those that a rule does not read are not loaded."""

from __future__ import annotations

import triton
import triton.language as tl

from upgd.kernels import rules

NUMBERS = tl.constexpr(rules.MOST_NUMBERS)
"""The length of a layer's row of numbers."""
DUE, SHARE, TIMES = (tl.constexpr(x) for x in (rules.DUE, rules.SHARE, rules.TIMES))
"""Columns of a layer's decays and corrections."""


@triton.jit
def load_numbers(row):
    """``lr, sigma, p0, …, p13``."""
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3),
        tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7),
        tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
        tl.load(row + 12), tl.load(row + 13), tl.load(row + 14), tl.load(row + 15),
    )  # fmt: skip
