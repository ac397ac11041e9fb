"""Shared helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from torch import Tensor

Utilities: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[], Tensor]
Kind: TypeAlias = Literal["second", "first", "squared_gradient", "magnitude", "random"]
Scope: TypeAlias = Literal["global", "local"]


def check_loss(loss: Any) -> None:
    """Refuse a loss that is a value and not a function."""
    if not callable(loss):
        raise TypeError(
            "the loss must be a function without arguments that runs the model, such as "
            f"lambda: F.mse_loss(model(x), y); got {type(loss).__name__}"
        )
