"""Functions that ``torch.compile`` leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

try:
    # What PyTorch's own optimizers have. It is private; torch.compiler.disable does the same and
    # imports the compiler at once, which takes as long as all of PyTorch.
    from torch._compile import _disable_dynamo as _disable
except ImportError:
    _disable = torch.compiler.disable

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A function that a compiled one leaves its graph for."""
    return cast(F, _disable(function))
