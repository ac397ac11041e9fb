"""Sums and products in float32 proper, whatever a user allows elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.backends import cudnn

_LOCK = threading.Lock()
_inside = 0
_give_back: Callable[[], None] = lambda: None  # noqa: E731


@contextmanager
def full_float32() -> Iterator[None]:
    """Disable TensorFloat32: PyTorch allows it for convolutions, and users may for the rest.

    With ten bits of mantissa, runs would differ from those of other devices by more than rounding.
    The settings are the process's: the first to enter changes them, the last to leave restores
    them. Since PyTorch 2.9 a setting may follow a more general one; such a one is restored as a
    value.
    """
    global _inside, _give_back
    with _LOCK:
        if _inside == 0:
            _give_back = _switch_off()
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                _give_back()


def _switch_off() -> Callable[[], None]:
    """Change all settings; returns what gives them back."""
    places = _places()
    values = [place.fp32_precision for place in places]
    products, convolutions = "highest", True  # PyTorch's defaults
    with suppress(RuntimeError):  # they were set in the newer way alone, and have the defaults
        products = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        convolutions = cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    for place in places:
        place.fp32_precision = "ieee"

    def give_back() -> None:
        torch.set_float32_matmul_precision(products)
        cudnn.allow_tf32 = convolutions
        for place, value in zip(places, values, strict=True):
            place.fp32_precision = value

    return give_back


def _places() -> list[Any]:
    """Where PyTorch keeps such settings since 2.9."""
    found: list[Any] = [torch.backends.cuda.matmul]
    for backend in (cudnn, torch.backends.mkldnn):
        found += [getattr(backend, name, None) for name in ("matmul", "conv", "rnn")]
    return [place for place in found if hasattr(place, "fp32_precision")]
