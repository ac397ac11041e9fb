"""Time calls in alternating rounds, so that a slow moment affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]


def seconds(
    call: Call, repeats: int, device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds per call, with the device synchronised.

    Example:
        >>> seconds(lambda: None, 3, "cpu") >= 0
        True
    """
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize(device)
    start = clock()
    for _ in range(repeats):
        call()
    if cuda:
        torch.cuda.synchronize(device)
    return (clock() - start) / repeats


def measure(
    calls: Mapping[str, Call],
    device: str,
    rounds: int,
    target: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call, for each call and round; compare within a round.

    Args:
        calls: By name.
        device: The device they use.
        rounds: The number of rounds.
        target: Seconds per call and round.
        clock: The clock, in seconds.
    """
    repeats = {}
    for name, call in calls.items():
        seconds(call, 3, device, clock)
        once = max(seconds(call, 3, device, clock), 1e-9)
        repeats[name] = max(1, min(200, round(target / once)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name], device, clock))
    return times
