"""Where the numbers of a stack of dense learners lie in memory.

A learner's weights are one row of ``P`` numbers: layer after layer, a row per unit, its bias as
the last column, rows padded to 16 numbers so that vector loads are aligned. So the gradient of a
layer at batch size 1 is the outer product of ``delta`` and of the layer's inputs with a one behind
them, and is never stored.

Kernels work on *row groups*: the (at most) four rows ``i``, ``i + q``, ``i + 2q``, ``i + 3q`` of a
layer, ``q`` a quarter of its rows, which share one draw of four normal numbers (see
:mod:`upgd.kernels.philox`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

ALIGN = 16


def padded(count: int) -> int:
    """`count` rounded up to whole units of alignment."""
    return -(-count // ALIGN) * ALIGN


@dataclass(frozen=True)
class Layer:
    """One dense layer: `inputs` without the bias, and where its numbers begin.

    Rows are `stride` numbers apart; its weights begin at `base`, its inputs among a learner's
    activations at `input_at`, its units among a learner's at `row_at`.
    """

    number: int
    inputs: int
    outputs: int
    stride: int
    base: int
    input_at: int
    row_at: int

    @property
    def span(self) -> int:
        """Rows per span of the generator: a quarter, rounded up."""
        return -(-self.outputs // 4)


@dataclass(frozen=True)
class Layout:
    """The layout of a dense network with so many units per layer, inputs first.

    >>> layout = Layout((784, 300, 150, 10))
    >>> layout.parameters, layout.size
    (282160, 287200)
    """

    sizes: tuple[int, ...]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layer after layer; the first one's inputs have two places, for even and odd steps."""
        found = []
        base = row = 0
        inputs = padded(self.sizes[0] + 1)  # the odd place comes first
        for number, (i, o) in enumerate(zip(self.sizes[:-1], self.sizes[1:], strict=True)):
            stride = padded(i + 1)
            found.append(Layer(number, i, o, stride, base, inputs, row))
            base += stride * o
            inputs += stride
            row += o
        return tuple(found)

    @property
    def parameters(self) -> int:
        return sum((layer.inputs + 1) * layer.outputs for layer in self.layers)

    @property
    def size(self) -> int:
        """Numbers per learner and state, padding included."""
        last = self.layers[-1]
        return last.base + last.stride * last.outputs

    @property
    def activations(self) -> int:
        """Numbers per learner that hold layers' inputs."""
        last = self.layers[-1]
        return last.input_at + last.stride

    @property
    def units(self) -> int:
        """Outputs of all layers together."""
        return sum(layer.outputs for layer in self.layers)

    @cached_property
    def layer_table(self) -> NDArray[np.int32]:
        """A row per layer: inputs, outputs, stride/16, base/16, input_at/16, row_at."""
        rows = [
            (x.inputs, x.outputs, x.stride // ALIGN, x.base // ALIGN, x.input_at // ALIGN, x.row_at)
            for x in self.layers
        ]
        return np.array(rows, np.int32)

    @cached_property
    def group_table(self) -> NDArray[np.int32]:
        """A row per row group: its layer's row, the layer's number, first row, rows per span.

        The last layer's come before the first one's, for :attr:`launches`.
        """
        order = [*self.layers[1:][-1:], *self._forward]
        rows = [
            (*self.layer_table[x.number], x.number, i, x.span) for x in order for i in range(x.span)
        ]
        return np.array(rows, np.int32)

    @property
    def _forward(self) -> tuple[Layer, ...]:
        """Layers that go forward while they are updated: all but the last of several."""
        return self.layers[:-1] or self.layers

    @cached_property
    def forward(self) -> tuple[tuple[int, int], ...]:
        """For each layer that goes forward, its first row group and how many there are."""
        start = sum(layer.span for layer in self.layers[1:][-1:])
        found = []
        for layer in self._forward:
            found.append((start, layer.span))
            start += layer.span
        return tuple(found)

    @cached_property
    def launches(self) -> tuple[tuple[int, int], ...]:
        """The same for row groups that are updated together: the last layer with the first."""
        (start, count), *others = self.forward
        return (0, start + count), *others

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Where each parameter, in the order of a module's, lies in a learner's numbers."""
        found = []
        for layer in self.layers:
            rows = layer.base + layer.stride * np.arange(layer.outputs)
            found += [(rows[:, None] + np.arange(layer.inputs)).ravel(), rows + layer.inputs]
        return np.concatenate(found)
