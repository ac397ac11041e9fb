"""Hessian diagonals of PyTorch graphs: HesScale, Gauss-Newton and Hutchinson."""

from upgd.curvature import layers  # registers its rules
from upgd.curvature.api import Curvature, backward, diagonal, unsupported
from upgd.curvature.freshness import stale
from upgd.curvature.rules import elementwise, scaling, selection
from upgd.curvature.walk import RULES, Op, UnsupportedOperationError, register

__all__ = [
    "RULES",
    "Curvature",
    "Op",
    "UnsupportedOperationError",
    "backward",
    "diagonal",
    "elementwise",
    "layers",
    "register",
    "scaling",
    "selection",
    "stale",
    "unsupported",
]
