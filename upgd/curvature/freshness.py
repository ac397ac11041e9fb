"""Whether a stored derivative still belongs to the gradient beside it.

Curvatures and the derivatives of gates are summed over backward passes, as ``.grad`` is. Users
reset ``.grad`` in many ways: by an optimizer's or a model's ``zero_grad()``, by assigning None,
by zeroing it in place. What is stored beside it must be dropped with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Stamp(NamedTuple):
    """What a curvature belongs to."""

    version: int
    gradient: Tensor | None


def stamp(curvature: Tensor, p: Tensor) -> None:
    """Note that `curvature` belongs to the weights and the gradient that `p` has now."""
    curvature._upgd_stamp = Stamp(p._version, p.grad)  # type: ignore[attr-defined]


def stale(p: Tensor, curvature: Tensor | None = None) -> str | None:
    """Why a curvature does not belong to `p`'s gradient; None if it may.

    Args:
        p: A parameter.
        curvature: By default the one on the parameter.
    """
    curvature = getattr(p, "curvature", None) if curvature is None else curvature
    mark: Stamp | None = getattr(curvature, "_upgd_stamp", None)
    if mark is None:  # set by the user, who is responsible for it
        return None
    if mark.version != p._version:
        return "was computed for other weights: they have changed since"
    if mark.gradient is not p.grad:
        return "was computed with another gradient, which has been reset or replaced since"
    return None


def is_reset(params: Iterable[Tensor]) -> bool | Tensor:
    """Whether there is no gradient, or only zeros; the latter as a flag on the device.

    >>> p = torch.ones(2, requires_grad=True)
    >>> is_reset([p])
    True
    >>> p.sum().backward()
    >>> is_reset([p])
    tensor(False)
    """
    found = [p.grad for p in params if p.grad is not None]
    if not found:
        return True
    if any(hasattr(gradient, "placements") for gradient in found):
        return False  # a DTensor's zeros here say nothing about its other parts
    return ~torch.stack([gradient.any() for gradient in found]).any()


def drop_reset(values: Tensor | None, reset: bool | Tensor) -> Tensor | None:
    """`values`, or zeros if the gradient beside them was reset; NaN becomes zero, too.

    >>> drop_reset(torch.tensor([1.0, torch.nan]), torch.tensor(True))
    tensor([0., 0.])
    """
    if values is None or reset is True:
        return None
    return values.masked_fill(torch.as_tensor(reset, device=values.device), 0.0)
