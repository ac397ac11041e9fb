"""How near a stack of learners is to the limit of the memory that it works in.

A step of one sample does so little with each weight that reading and writing weights takes the
time. The floor of a learner-step is what every implementation moves: a method reads and writes its
weights and states once, and where it divides by a maximum or a norm (η) it reads weights and traces
once more before. At the speed of a plain copy on the same device that is the roofline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from upgd.kernels.rules import reduces
from upgd.optim.registry import get

LARGEST_COPY = 1 << 28
"""Bytes of an array that a GPU copies: many times its cache, and a fraction of a millisecond."""
SMALLEST_COPY = 1 << 16
"""Bytes of an array that a core copies: beside less, the time of the call itself would count."""
SECONDS = 0.005


# ------------------------------------------------------------------------------ the floor
@cache
def kept(method: str) -> int:
    """Numbers that a learner keeps per weight: the weight itself and the method's states.

    >>> kept("sgd"), kept("upgd"), kept("feature-upgd")  # the last has its utilities per unit
    (1, 2, 1)
    """
    row = get(method)[0]
    return 1 if "gates" in row.needs else 1 + len(row.states)


@cache
def passes(method: str) -> int:
    """Reads and writes of a number per weight that a step cannot do without.

    >>> passes("sgd"), passes("upgd")
    (2, 6)
    """
    for_eta = 2 if reduces(get(method)[0].method) else 0  # weight and trace
    return 2 * kept(method) + for_eta


def floor(methods: Sequence[str], parameters: int, itemsize: int = 4) -> float:
    """The least bytes that a learner-step moves, as a mean over learners with these methods."""
    return itemsize * parameters * sum(passes(m) for m in methods) / len(methods)


def share(rate: float, moved: float, speed: float) -> float:
    """The share of the roofline, from learner-steps/s, :func:`floor` and :func:`bandwidth`."""
    return rate * moved / speed


# --------------------------------------------------------------------------- the roofline
@cache
def bandwidth(device: str, size: int = LARGEST_COPY, threads: int = 1) -> float | None:
    """Bytes per second of a plain copy, read and written; None where it cannot be measured.

    It is measured at the first call, within milliseconds. A GPU copies an array far larger than its
    cache. On the CPU each of `threads` threads copies an array of a learner's `size`, in the cache
    if it fits there.
    """
    where = torch.device(device)
    try:
        if where.type == "cuda":
            found = _of_gpu(where)
            torch.cuda.empty_cache()  # the arrays would stay in PyTorch's hands
            return found
        return threads * _of_core(max(size, SMALLEST_COPY)) if where.type == "cpu" else None
    except (RuntimeError, MemoryError):  # no room for a copy
        return None


def _of_gpu(device: torch.device) -> float:
    size = min(LARGEST_COPY, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(5):
            target.copy_(source)
        torch.cuda.synchronize(device)

    copy()
    return 5 * 2 * size / _fastest(copy)


def _of_core(size: int) -> float:
    source, target = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    source[:] = 1  # memory that was never written to does not exist yet
    return 2 * size / _fastest(lambda: np.copyto(target, source))


def _fastest(do: Callable[[], None]) -> float:
    """Seconds of the fastest call among those of a few milliseconds, three at least."""
    found: list[float] = []
    while len(found) < 3 or sum(found) < SECONDS:
        start = time.perf_counter()
        do()
        found.append(time.perf_counter() - start)
    return min(found)
