"""Which steps are measured: one of every `stride` steps, at a random place among them.

Steps ``b·stride`` to ``(b+1)·stride - 1`` are block ``b``. Its measured step is a number of Philox
(:mod:`upgd.kernels.philox`) at counter ``b``, under a key of its own: a function of the block and
the stride, whatever the engine, the chunks, the stack and the interruptions.

Every step has the same chance, ``1 / stride``, so a window's mean is unbiased however the loss
varies within a task. Multiples of the stride would not do: where the stride divides the length of
tasks, they always contain a task's first sample, whose gradients are the largest.

All runs measure the same steps. They need not differ: the places do not depend on the samples,
methods are compared at the same places, and a stack in lock step measures all its runs in one step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from upgd.kernels.philox import philox4x32

KEY = (0x5A3B1E5, 0xD1A6)
"""Of the generator; runs' perturbations have their seeds as keys."""
AT_ONCE = 1024  # blocks whose numbers are drawn together


def measured_steps(steps: int, stride: int) -> NDArray[np.uint8]:
    """1 for each of a run's steps that is measured, otherwise 0; empty without a stride.

    Example:
        >>> measured_steps(12, 4).reshape(3, 4).sum(1)
        array([1, 1, 1], dtype=uint64)
        >>> measured_steps(12, 0).size
        0
    """
    if stride == 0 or steps == 0:
        return np.zeros(0, np.uint8)
    blocks = -(-steps // stride)
    places = [_places(first, stride) for first in range(0, blocks, AT_ONCE)]
    found = np.arange(blocks) * stride + np.concatenate(places)[:blocks]
    flags = np.zeros(steps, np.uint8)
    flags[found[found < steps]] = 1
    return flags


def is_measured(step: int, stride: int) -> bool:
    """Whether one step is measured; see :func:`measured_steps`."""
    if stride == 0:
        return False
    block, place = divmod(step, stride)
    return bool(_places(block // AT_ONCE * AT_ONCE, stride)[block % AT_ONCE] == place)


@lru_cache(maxsize=64)
def _places(first: int, stride: int) -> NDArray[np.int64]:
    """The places of the measured steps within the :data:`AT_ONCE` blocks from `first` on."""
    blocks = torch.arange(first, first + AT_ONCE)
    zero = torch.zeros_like(blocks)
    word = philox4x32([blocks & 0xFFFFFFFF, blocks >> 32, zero, zero], KEY)[0]
    found: NDArray[np.int64] = (word * min(stride, 1 << 31) >> 32).numpy()
    return found
