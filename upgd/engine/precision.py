"""Sums and products in float32 proper, whatever a user allows elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.backends import cudnn


@contextmanager
def full_float32() -> Iterator[None]:
    """No TensorFloat32 in here: PyTorch allows it for convolutions, and users may for the rest.

    With ten bits of mantissa, runs would differ from those of other devices by more than rounding.
    The setting is the process's and not the thread's; what it was comes back at the end.

    Example:
        >>> with full_float32():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    products, convolutions, newer = "highest", True, _newer()
    with suppress(RuntimeError):  # set in the newer way alone: then these have PyTorch's defaults
        products = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolutions = cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        cudnn.allow_tf32 = convolutions
        for settings, value in newer:
            settings.fp32_precision = value


def _newer() -> list[tuple[Any, str]]:
    """Settings that PyTorch has since 2.9, with their values."""
    places: tuple[Any, ...] = (
        torch.backends.cuda.matmul,
        getattr(cudnn, "conv", None),
        getattr(cudnn, "rnn", None),
    )
    return [(place, place.fp32_precision) for place in places if hasattr(place, "fp32_precision")]
