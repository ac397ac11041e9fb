"""What a kernel of layered learners is written from, and how text is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import triton

from upgd.kernels.layered import KeptLayout
from upgd.kernels.layout import Layer, Layout, padded
from upgd.kernels.rules import TIMES
from upgd.rules.vocabulary import Method, Phase


@dataclass(frozen=True)
class Tiles:
    """Shapes of a kernel. They fix the order of sums, so they may not depend on the stack.

    Attributes:
        rows, columns: Weights at a time, of passes along rows.
        back_rows, back_columns: The same of passes down columns.
        warps: Of a program.
        stages: Tiles of weights that are on their way at a time; 0 for as many as a method's
            states leave room for, see :attr:`Program.stages`.
        registers: Of a thread at most: so four programs share a multiprocessor.
    """

    rows: int = 16
    columns: int = 128
    back_rows: int = 8
    back_columns: int = 256
    warps: int = 4
    stages: int = 0
    registers: int = 128


@dataclass(frozen=True)
class Program:
    """What the source of a kernel depends on.

    Attributes:
        method: Whose phases.
        layout: Of the network.
        real: ``"float32"`` or ``"float64"``.
        activation: Its number in :mod:`upgd.kernels.triton_sample`.
        squared: Whether the loss is the mean squared error.
        layer_norm: Whether LayerNorm precedes activations.
        input_norm: Whether inputs are normalised online.
        noisy: Whether weights are perturbed.
        permuted: Whether inputs are.
        diagnosed: Whether there are steps with diagnostics.
        slots: Numbers per layer in the tables of decays and corrections.
        tiles: Shapes.
    """

    method: Method
    layout: Layout
    real: str
    activation: int = 0
    squared: bool = False
    layer_norm: bool = False
    input_norm: bool = False
    noisy: bool = True
    permuted: bool = False
    diagnosed: bool = False
    slots: int = TIMES
    tiles: Tiles = Tiles()

    @property
    def stages(self) -> int:
        """Four without states, three with one, two with more.

        Each takes shared memory for a tile of weights and of every state. Four programs share a
        multiprocessor, and what they leave is its cache, for inputs and activations.
        """
        return self.tiles.stages or max(2, 4 - len(self.method.states))

    @cached_property
    def kept(self) -> KeptLayout:
        return KeptLayout(self.method, self.layout)

    @cached_property
    def scratch(self) -> dict[str, int]:
        """Where each vector begins in a program's scratch; ``"size"`` is the number of all."""
        layers, units = self.layout.layers, padded(self.layout.units)
        sizes = {"even": layers[0].stride, "odd": layers[0].stride}
        for layer in layers[1:]:
            sizes |= {f"act{layer.number}": layer.stride, f"after{layer.number}": layer.stride}
        sizes |= dict.fromkeys(("z_now", "z_was", "normal", "delta", "w_in", "w_out"), units)
        sizes["scale"] = padded(len(layers))
        found, at = {}, 0
        for name, size in sizes.items():
            found[name] = at
            at += size
        return {**found, "size": at}


def block(count: int) -> int:
    """The number of a vector's elements, as Triton wants it."""
    return int(triton.next_power_of_2(count))


def moves(phase: Phase) -> bool:
    """Whether a phase changes weights other than biases."""
    return phase.over == "weights" and "w" in phase.writes


class Writer:
    """Writes one kernel; `lines` is its text so far."""

    def __init__(self, program: Program) -> None:
        self.p, self.method, self.layers = program, program.method, program.layout.layers
        self.tiles = program.tiles
        self.lines: list[str] = []
        self.depth = 1
        phases = self.method.phases
        self.own_biases = any(phase.over == "biases" for phase in phases)
        moving = [k for k, phase in enumerate(phases) if moves(phase)]
        self.last_move = moving[-1] if moving else -1
        measures = [k for k, p in enumerate(phases) if p.over == "features" and "w_in" in p.reads]
        self.sizes_in_passing = bool(measures) and min(measures) > self.last_move >= 0

    # ------------------------------------------------------------------------- writing
    def __call__(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    @contextmanager
    def inside(self, header: str) -> Iterator[None]:
        """Lines within a loop or a condition."""
        self(header)
        self.depth += 1
        yield
        self.depth -= 1

    def barrier(self) -> None:
        self("tl.debug_barrier()")

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    @staticmethod
    def sizes(layer: Layer) -> str:
        return f"{layer.inputs}, {layer.outputs}, {layer.stride}"

    def tile(self, layer: Layer, lanes: int | None = None) -> tuple[int, int, int]:
        """Rows and columns at a time of passes along a layer's rows, and how often so many.

        With noise, four times: rows that share their counters are updated together.
        """
        lanes = lanes or (4 if self.draws() else 1)
        rows = min(self.tiles.rows, max(4, block(layer.outputs))) // lanes
        return max(1, rows), min(self.tiles.columns, block(layer.stride)), lanes

    def back_tile(self, layer: Layer) -> str:
        rows = min(self.tiles.back_rows, block(layer.outputs))
        columns = min(self.tiles.back_columns, block(layer.stride))
        return f"{rows}, {columns}, {self.p.stages}"

    def draws(self) -> bool:
        """Whether a phase over weights draws noise."""
        over = [phase for phase in self.method.phases if phase.over == "weights"]
        return self.p.noisy and any("noise" in phase.reads for phase in over)

    def input_of(self, layer: Layer) -> str:
        return f"act{layer.number}" if layer.number else "x_now"
