"""The functions a rule may use besides arithmetic.

They call the operand's own method, so that a rule runs on whatever it is given:
tensors, or the symbols from which :mod:`upgd.optim.program` builds a foreach program.
"""

from __future__ import annotations

from typing import Any


def sigmoid(x: Any) -> Any:
    """The paper's scaling function φ."""
    return x.sigmoid()


def sqrt(x: Any) -> Any:
    """Square root."""
    return x.sqrt()


def absolute(x: Any) -> Any:
    """Absolute value."""
    return x.abs()
