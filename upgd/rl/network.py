"""The networks of an agent: parameters in one vector, initial values and layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from upgd.kernels import philox


@dataclass(frozen=True)
class Network:
    """A policy and a value network with tanh units, and a deviation per action.

    The parameters in order: weights and biases of the policy's layers, logarithms of the actions'
    deviations, weights and biases of the value network's layers. Both networks have the same
    `hidden` layers.
    """

    observations: int
    actions: int
    hidden: tuple[int, ...] = (64, 64)

    @cached_property
    def _sizes(self) -> tuple[list[int], list[int]]:
        body = [self.observations, *self.hidden]
        return [*body, self.actions], [*body, 1]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters, in order."""
        policy, value = (_layer_shapes(sizes) for sizes in self._sizes)
        return [*policy, (self.actions,), *value]

    @cached_property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(math.prod(shape) for shape in self.shapes)

    @cached_property
    def deviations_at(self) -> int:
        """Start of the logarithms of the deviations; the value network follows them."""
        return sum(math.prod(shape) for shape in _layer_shapes(self._sizes[0]))

    @cached_property
    def parts(self) -> dict[str, slice]:
        """The two networks' parameters; the deviations are the policy's."""
        border = self.deviations_at + self.actions
        return {"policy": slice(0, border), "value": slice(border, self.size)}

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters of agents [..., size], each in its shape."""
        counts = [math.prod(shape) for shape in self.shapes]
        parts = flat.split(counts, -1)
        shapes = zip(parts, self.shapes, strict=True)
        return [part.view(*flat.shape[:-1], *shape) for part, shape in shapes]

    def initial(self, seed: int) -> NDArray[np.float64]:
        """Initial parameters: orthogonal layers, zero biases, deviations of one.

        Hidden layers have gain √2, the policy's last 0.01 and the value network's 1.
        """
        found: list[NDArray[Any]] = []
        for sizes, gain in zip(self._sizes, (0.01, 1.0), strict=True):
            if found:
                found.append(np.zeros(self.actions))
            for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
                last = layer == len(sizes) - 2
                weight = _orthogonal(outputs, inputs, seed, len(found))
                found += [weight * (gain if last else math.sqrt(2)), np.zeros(outputs)]
        return np.concatenate([part.ravel() for part in found])

    def workspace(self, rows: int) -> tuple[NDArray[np.int64], int, int, int]:
        """The layout of layers in the parameters and in a workspace for `rows` samples.

        Returns a row per layer for :mod:`upgd.rl.kernels`, the starts of the gradient's buffer and
        of the zeros, and the size of the workspace.
        """
        from upgd.rl import kernels as k

        width = max(_padded(n) for sizes in self._sizes for n in sizes)
        table = np.zeros((2 * (len(self.hidden) + 1), k.COLUMNS), np.int64)
        used = rows * _padded(self.observations)  # the inputs come first
        weight, row = 0, 0

        def room(count: int) -> int:
            nonlocal used
            used += count
            return used - count

        for sizes in self._sizes:
            before, delta_before = 0, -1
            for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
                t, wide, tall = table[row], _padded(inputs), _padded(outputs)
                t[[k.INPUTS, k.OUTPUTS, k.IN_PITCH, k.OUT_PITCH]] = inputs, outputs, wide, tall
                t[k.WEIGHT], t[k.BIAS] = weight, weight + inputs * outputs
                weight += inputs * outputs + outputs
                t[k.ACROSS], t[k.ALONG] = room(inputs * tall), room(outputs * wide)
                t[k.OFFSET], t[k.BEFORE] = room(tall), before
                t[k.AFTER], t[k.DELTA] = room(rows * tall), room(rows * tall)
                t[k.DELTA_BEFORE] = delta_before
                t[k.HIDDEN] = layer < len(sizes) - 2
                before, delta_before = int(t[k.AFTER]), int(t[k.DELTA])
                row += 1
            weight += self.actions  # the deviations follow the policy
        scratch, zeros = room(width * width), room(width)
        return table, scratch, zeros, used


def _layer_shapes(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    pairs = itertools.pairwise(sizes)
    return [shape for inputs, outputs in pairs for shape in ((outputs, inputs), (outputs,))]


def _padded(count: int) -> int:
    """A size rounded up to whole vectors."""
    from upgd.kernels.vectors import LANES

    return -(-count // LANES) * LANES


def _orthogonal(rows: int, columns: int, seed: int, number: int) -> NDArray[np.float64]:
    """A matrix with orthonormal rows or columns, whichever are fewer; uniform among them."""
    from upgd.rl import kernels

    shape = (min(rows, columns), max(rows, columns))
    found = philox.normal(shape, seed, kernels.INITIAL, number, dtype=torch.float64).numpy()
    kernels.orthonormalise(found)
    return np.ascontiguousarray(found if rows <= columns else found.T)
