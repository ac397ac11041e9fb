"""Parts of a step that a GPU may do at the same time."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Branches:
    """Does parts of the work beside each other; a CUDA graph that is captured has them as branches.

    Args:
        count: How many parts.
        device: Where. Without CUDA they come one after the other.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        many = device.type == "cuda" and count > 1
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if many else []

    def each(self, part: Callable[[int], None]) -> None:
        """Call ``part(0)``, ``part(1)`` …; none of them may need what another one makes."""
        if not self._streams:
            for number in range(self._count):
                part(number)
            return
        main = torch.cuda.current_stream(self._device)
        for number, stream in enumerate(self._streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                part(number)
        for stream in self._streams:
            main.wait_stream(stream)
