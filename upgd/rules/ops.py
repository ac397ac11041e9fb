"""The functions a rule may use besides arithmetic.

They call the operand's own method, so that a rule runs on whatever it is given: tensors, the
symbols from which :mod:`upgd.optim.program` and :mod:`upgd.kernels.rules` write programs, or a
number where a perturbation is absent.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def sigmoid(x: Any) -> Any:
    """The paper's scaling function φ."""
    return 1 / (1 + math.exp(-x)) if _plain(x) else x.sigmoid()


def sqrt(x: Any) -> Any:
    """Square root."""
    return math.sqrt(x) if _plain(x) else x.sqrt()


def absolute(x: Any) -> Any:
    """Absolute value."""
    return abs(x)


def sign(x: Any) -> Any:
    """-1, 0 or 1."""
    return float((x > 0) - (x < 0)) if _plain(x) else x.sign()


def exp(x: Any) -> Any:
    """Power of e."""
    return math.exp(x) if _plain(x) else x.exp()


def log(x: Any) -> Any:
    """Natural logarithm."""
    if _plain(x):
        return math.log(x) if x > 0 else -math.inf
    return x.log()


def maximum(x: Any, y: Any) -> Any:
    """The larger of two values."""
    if _plain(x):
        return max(x, y) if _plain(y) else y.clamp_min(x)
    return x.clamp_min(y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two values."""
    if _plain(x):
        return min(x, y) if _plain(y) else y.clamp_max(x)
    return x.clamp_max(y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """`x` where it lies between `low` and `high`, else the bound that it exceeds."""
    return minimum(maximum(x, low), high)


def mean(x: Any) -> Any:
    """Over samples; for phases over the network of methods for several samples alone."""
    return x if _plain(x) else x.mean()


def _plain(x: Any) -> bool:
    return isinstance(x, Real)


FUNCTIONS = {f.__name__: f for f in (sigmoid, sqrt, absolute, sign, exp, log, maximum, minimum)}
"""What executors must provide, by the name that written-out rules call."""
