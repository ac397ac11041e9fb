"""What a stack of learners is made of, whatever executes it: methods, hyperparameters, states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.kernels.layout import Layout
from upgd.kernels.rules import MOST_NUMBERS, MOST_STATES, reduces
from upgd.networks import initial_weights
from upgd.optim.registry import Row, get
from upgd.rules.vocabulary import as_numbers

# What a stack sums up per run and window; the last counts the steps with diagnostics.
COLUMNS = (
    *("loss", "plasticity", "accuracy"),
    *("zero_activations", "gradient_l0", "gradient_l1", "gradient_l2", "measured"),
)


ACTIVATIONS = ("relu", "leaky_relu", "tanh", "linear")  # kernels know them by number


@dataclass(frozen=True)
class Learner:
    """A learner of a stack; missing hyperparameters take the registry's defaults."""

    method: str
    hyper: Mapping[str, Any]
    seed: int

    @property
    def row(self) -> Row:
        """The registry's."""
        return get(self.method)[0]

    def all_hyper(self) -> dict[str, Any]:
        """All hyperparameters; raises ValueError for unknown ones."""
        _, defaults = get(self.method)
        if unknown := self.hyper.keys() - defaults.keys():
            raise ValueError(
                f"{self.method} has no hyperparameter {', '.join(sorted(unknown))}; "
                f"it has {', '.join(defaults)}"
            )
        return {**defaults, **self.hyper}

    def values(self) -> dict[str, float]:
        """All hyperparameters as numbers; ``betas`` are ``beta1`` and ``beta2``."""
        found = self.all_hyper()
        for name, hyperparameter in self.row.hyper.items():
            hyperparameter.check(self.row.optimizer.__name__, found[name])
        return {name: float(value) for name, value in as_numbers(found).items()}

    @property
    def is_perturbed(self) -> bool:
        """Whether it draws noise."""
        return self.row.method.is_perturbed(self.values())


@dataclass(frozen=True)
class MethodGroup:
    """Learners ``first … first + count - 1`` of a stack, all of one method.

    `noise` is whether any is perturbed, `reduce` how η is found (``"max"``, ``"row_norm"`` or
    None), `features` whether utilities are per feature, `second` whether the method reads
    curvature, and `states` what is kept per weight.
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


def in_groups(learners: Sequence[Learner]) -> tuple[list[int], list[MethodGroup]]:
    """An order that brings methods together, and the groups in it."""
    order = sorted(range(len(learners)), key=lambda i: learners[i].row.name)
    groups: list[MethodGroup] = []
    position = 0
    while position < len(order):
        row = learners[order[position]].row
        same = [i for i in order[position:] if learners[i].row is row]
        noise = any(learners[i].is_perturbed for i in same)
        groups.append(MethodGroup(row, position, len(same), noise))
        position += len(same)
    return order, groups


def tables(learners: Sequence[Learner]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Numbers [R, 16] in the order of each one's method, and the decay [R, 5] of each state.

    A state without bias correction has decay 0, which corrects by 1.
    """
    hyper = np.zeros((len(learners), MOST_NUMBERS))
    decays = np.zeros((len(learners), MOST_STATES))
    for i, learner in enumerate(learners):
        values, method = learner.values(), learner.row.method
        hyper[i, : len(method.numbers)] = method.number_values(values)
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


class Stack:
    """Learners in lock step, those of one method beside each other; whatever executes them.

    Subclasses allocate arrays or tensors, which are used alike here: `weights` [R, size], `states`
    of each group [states, count, size], `utilities` of each group's features [count, units],
    `series` of sums by window [R, windows, columns], and `diverged`, the step at which each was not
    finite, or -1. `order` has the learners' numbers before they were sorted by method.

    Args:
        learners: Methods, hyperparameters and seeds, in any order.
        loss: ``"cross_entropy"`` or ``"squared_error"``.
        steps: Samples of the run; series are allocated for them.
        window: Samples per window.
        stride: Steps between diagnostics; 0 for none.
    """

    weights: Any
    states: list[Any]
    utilities: list[Any]
    corrections: Any
    series: Any
    diverged: Any

    def __init__(
        self, learners: Sequence[Learner], *, loss: str, steps: int, window: int, stride: int = 0
    ) -> None:
        for learner in learners:
            if reason := self._unsupported(learner):
                raise ValueError(f"a stack cannot run this learner: {reason}")
        self.order, self.groups = in_groups(learners)
        self.learners = [learners[i] for i in self.order]
        self.squared, self.step = loss == "squared_error", 0
        self.window, self.stride, self.windows = window, stride, -(-steps // window)

    def _unsupported(self, learner: Learner) -> str | None:
        return learner.row.eager_only

    def _initial(self, seed: int, task: int) -> Any:
        """A learner's first weights as the stack keeps them."""
        raise NotImplementedError

    def _put(self, array: NDArray[Any]) -> Any:
        """An array as the stack keeps it, to be copied from."""
        return array

    def _get(self, kept: Any) -> NDArray[Any]:
        """What the stack keeps, as an array."""
        raise NotImplementedError

    def restart(self, task: int, runs: Sequence[int] | None = None) -> None:
        """Fresh weights and states for all, or for those with these numbers in `learners`."""
        for run in range(len(self.learners)) if runs is None else runs:
            views, group = self._views(run), self.groups[self._group(run)[0]]
            views["weights"][...] = self._initial(self.learners[run].seed, task)
            for name in ("states", "utility", "corrections"):
                if name in views:
                    views[name][...] = 0
            for k, name in enumerate(group.states):
                if name in group.row.method.starts_as_weight:
                    views["states"][k] = views["weights"]

    def state(self, run: int) -> dict[str, NDArray[Any]]:
        """The complete state of run number `run`, in the order of `learners`."""
        return {name: self._get(kept) for name, kept in self._views(run).items()}

    def restore(self, run: int, saved: Mapping[str, NDArray[Any]]) -> None:
        """Continue run number `run` from what :meth:`state` returned."""
        views = self._views(run)
        for name, array in saved.items():
            views[name][...] = self._put(np.asarray(array))

    def _group(self, run: int) -> tuple[int, int]:
        """The number of a run's group, and its number in there."""
        for number, group in enumerate(self.groups):
            if run < group.first + group.count:
                return number, run - group.first
        raise IndexError(f"there are {len(self.learners)} runs, none has number {run}")

    def _views(self, run: int) -> dict[str, Any]:
        number, mine = self._group(run)
        group, states = self.groups[number], self.states[number]
        found = {
            "weights": self.weights[run],
            "corrections": self.corrections[run],
            "series": self.series[run],
            "diverged": self.diverged[run : run + 1].reshape(()),
        }
        if len(states) == len(group.states):  # kernels need an array even without states
            found["states"] = states[:, mine]
        if group.features:
            found["utility"] = self.utilities[number][mine]
        return found


class DenseStack(Stack):
    """A stack of dense networks with this layout; weights are in its order."""

    def __init__(
        self, layout: Layout, learners: Sequence[Learner], *, activation: str, **common: Any
    ) -> None:
        super().__init__(learners, **common)
        self.layout, self.activation = layout, ACTIVATIONS.index(activation)

    def _initial(self, seed: int, task: int) -> Any:
        return self._put(initial(self.layout, seed, task))

    def _tables(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return tables(self.learners)
