"""Layered methods for compilers: each phase as a function of scalars, and where states lie.

A layered method (:mod:`upgd.rules.vocabulary`) keeps numbers at places other than weights. A
learner's are one row: states of inputs, layer after layer, each like the layer's row of inputs;
states of units and of features, each one number per unit; states of layers; those of the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from upgd.kernels.layout import Layout, padded
from upgd.kernels.rules import Target, written_function
from upgd.rules.symbols import Symbol
from upgd.rules.vocabulary import Method, Phase, Place

LAYER_NORM_EPSILON = 1e-5
"""Is added to the variance of LayerNorm."""
INPUT_DECAY, INPUT_FLOOR = 0.99, 1e-4
"""Of the statistics of inputs, and the least variance that they are divided by."""
_ELEMENTS = frozenset({"w", "g", "noise", "x", "w_in", "w_out"})


def phase_function(method: Method, number: int, target: Target) -> str:
    """Source of phase `number` as ``def phase_<number>(<what it reads>)``.

    It returns a tuple if it has several results, those of ``writes`` before those of ``sums``.
    Hyperparameters and bias corrections are float64; everything else, ``t`` and constants included,
    has the kernel's type, which the source calls ``real``.
    """
    phase = method.phases[number]
    env = [_symbol(method, phase, name) for name in phase.reads]
    results = phase.fn(*env)
    results = list(results) if isinstance(results, tuple) else [results]
    return written_function(f"phase_{number}", results, target, phase.reads, "real")


def _symbol(method: Method, phase: Phase, name: str) -> Symbol:
    corrections = [f"c_{state}" for state in method.states]
    if name in method.numbers or name in corrections:
        return Symbol("input", name, is_list=False)
    own = (*method.states_of(phase.over), *method.states_of("inputs"), *_ELEMENTS)
    full = name in own if phase.over != "units" else name == "d" or name in own
    return Symbol("input", name, is_list=True, full=full)


PLACES: tuple[Place, ...] = ("inputs", "units", "features", "layers", "network")
"""Where a layered method keeps states besides those of weights, in their order in memory."""


def kept_names(method: Method) -> list[tuple[Place, str]]:
    """Place and name of all that a method keeps at places other than weights, in their order."""
    return [(place, name) for place in PLACES for name in method.states_of(place)]


@dataclass(frozen=True)
class KeptLayout:
    """Where a learner's states at places other than weights lie.

    >>> from upgd.optim.centred import CENTRED_SGD
    >>> kept = KeptLayout(CENTRED_SGD, Layout((4, 3, 2)))
    >>> kept.size, kept.at("inputs", "mean", layer=1), kept.at("layers", "energy", layer=0)
    (48, 16, 32)
    """

    method: Method
    layout: Layout

    @cached_property
    def _blocks(self) -> dict[tuple[Place, str], int]:
        """Where each state begins; states of one layer lie beside each other."""
        inputs = sum(padded(layer.inputs + 1) for layer in self.layout.layers)
        sizes: dict[Place, int] = {
            "inputs": inputs, "units": self.layout.units, "features": self.layout.units,
            "layers": len(self.layout.layers), "network": 1,
        }  # fmt: skip
        found: dict[tuple[Place, str], int] = {}
        start = 0
        for place, name in kept_names(self.method):
            found[place, name] = start
            start += sizes[place]
        self.__dict__["size"] = padded(start)
        return found

    @cached_property
    def size(self) -> int:
        """Numbers per learner, rounded up so that every learner's begin aligned."""
        _ = self._blocks
        return int(self.__dict__["size"])

    @cached_property
    def blocks(self) -> NDArray[np.int64]:
        """Where each state of :func:`kept_names` begins."""
        return np.array([*self._blocks.values()], np.int64)

    def at(self, place: Place, name: str, layer: int = 0) -> int:
        """Where a state's numbers for a layer begin.

        Features are those of the layer whose units they are.
        """
        start = self._blocks[place, name]
        if place == "inputs":
            return start + sum(padded(each.inputs + 1) for each in self.layout.layers[:layer])
        if place in ("units", "features"):
            return start + self.layout.layers[layer].row_at
        return start + (layer if place == "layers" else 0)

    @cached_property
    def starts(self) -> NDArray[np.float64]:
        """The values at which a learner's states begin."""
        found = np.zeros(self.size)
        ends = [*sorted(self._blocks.values()), self.size]
        for (_, name), start in self._blocks.items():
            end = next(end for end in ends if end > start)
            found[start:end] = self.method.starts.get(name, 0.0)
        return found
