"""Functions that ``torch.compile`` does not compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

try:
    # As PyTorch's own optimizers do it. It is private; torch.compiler.disable does the same but
    # imports the compiler at once, which takes as long as all of PyTorch.
    from torch._compile import _disable_dynamo as _disable
except ImportError:
    _disable = torch.compiler.disable

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Mark a function as a graph break for ``torch.compile``."""
    return cast(F, _disable(function))
