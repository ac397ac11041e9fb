"""The perturbations of the eager engine, numbered as the batched engine's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from upgd.kernels import philox


class PhiloxNoise:
    """The written generator (:mod:`upgd.kernels.philox`) as an optimizer's noise source.

    Args:
        shapes: Of the optimizer's parameters, in their order.
        first: The run's step at which the optimizer begins.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], first: int = 0) -> None:
        self.first = first
        self._at: dict[int, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for number, shape in enumerate(shapes):
            self._at[offset] = number, shape
            offset += math.prod(shape)

    def draw(
        self,
        sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        seed: int,
        step: int | Tensor,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Tensor:
        """See :meth:`upgd.optim.noise.NoiseSource.draw`."""
        parts = []
        for offset in offsets:
            number, shape = self._at[offset]
            numbers = philox.normal(shape, seed, number, self.first + step, device, dtype)
            parts.append(numbers.flatten())
        return torch.cat(parts)
