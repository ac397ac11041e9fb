"""What a stack of learners is made of, whatever executes it: methods, hyperparameters, states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.engine.layout import Layout
from upgd.kernels.rules import HYPER, MOST_STATES, reduces
from upgd.networks import initial_weights
from upgd.optim.registry import Row, get

COLUMNS = (
    *("loss", "plasticity", "accuracy"),
    *("zero_activations", "gradient_l0", "gradient_l1", "gradient_l2", "measured"),
)
"""What a stack sums up per run and window; the last counts the steps with diagnostics."""


@dataclass(frozen=True)
class Learner:
    """One learner of a stack.

    Attributes:
        method: A name of the registry.
        hyper: Its hyperparameters; missing ones take the registry's defaults.
        seed: Determines its initial weights and perturbations.
    """

    method: str
    hyper: Mapping[str, Any]
    seed: int

    @property
    def row(self) -> Row:
        """The registry's."""
        return get(self.method)[0]

    def values(self) -> dict[str, float]:
        """All hyperparameters as numbers; ``betas`` are ``beta1`` and ``beta2``."""
        _, defaults = get(self.method)
        unknown = self.hyper.keys() - defaults.keys()
        if unknown:
            raise ValueError(
                f"{self.method} has no hyperparameter {', '.join(sorted(unknown))}; "
                f"it has {', '.join(defaults)}"
            )
        found = {**defaults, **self.hyper}
        for name, hyperparameter in self.row.hyper.items():
            hyperparameter.check(self.row.optimizer.__name__, found[name])
        if "betas" in found:
            found["beta1"], found["beta2"] = found.pop("betas")
        return {name: float(value) for name, value in found.items()}


@dataclass(frozen=True)
class Group:
    """Learners ``first … first + count - 1`` of a stack, all of one method.

    Attributes:
        row: The method.
        reduce: How η comes about: ``"max"``, ``"row_norm"`` or None.
        states: What is kept per weight.
        features: Whether utilities are the features', not the weights'.
        second: Whether it reads curvature.
        noise: Whether any of its learners is perturbed.
    """

    row: Row
    first: int
    count: int
    noise: bool

    @property
    def reduce(self) -> str | None:
        return reduces(self.row.method)

    @property
    def features(self) -> bool:
        return "gates" in self.row.needs

    @property
    def second(self) -> bool:
        return "curvature" in self.row.needs

    @property
    def states(self) -> tuple[str, ...]:
        return () if self.features else self.row.states


def in_groups(learners: Sequence[Learner]) -> tuple[list[int], list[Group]]:
    """An order that brings methods together, and the groups in it."""
    order = sorted(range(len(learners)), key=lambda i: learners[i].row.name)
    groups: list[Group] = []
    position = 0
    while position < len(order):
        row = learners[order[position]].row
        same = [i for i in order[position:] if learners[i].row is row]
        noise = any(learners[i].values().get("sigma", 0.0) > 0 for i in same)
        groups.append(Group(row, position, len(same), noise))
        position += len(same)
    return order, groups


def tables(learners: Sequence[Learner]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Hyperparameters [R, 10] in the kernels' order, and the decay [R, 5] of each state.

    A state without bias correction has decay 0, which corrects by 1.
    """
    hyper = np.zeros((len(learners), len(HYPER)))
    decays = np.zeros((len(learners), MOST_STATES))
    for i, learner in enumerate(learners):
        values = learner.values()
        hyper[i] = [values.get(name, 0.0) for name in HYPER]
        method = learner.row.method
        for k, state in enumerate(method.states):
            if state in method.decays:
                decays[i, k] = values[method.decays[state]]
    return hyper, decays


def initial(layout: Layout, seed: int, task: int = 0) -> NDArray[np.float32]:
    """A learner's first weights at their places."""
    shapes: list[tuple[int, ...]] = []
    for layer in layout.layers:
        shapes += [(layer.outputs, layer.inputs), (layer.outputs,)]
    numbers = np.zeros(layout.size, np.float32)
    numbers[layout.places] = np.concatenate(
        [part.ravel() for part in initial_weights(shapes, seed, task)]
    )
    return numbers
