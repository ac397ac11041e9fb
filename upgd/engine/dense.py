"""What a stack of learners is made of, whatever executes it: methods, hyperparameters, states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.engine.measuring import measured_steps
from upgd.kernels.layout import Layout
from upgd.kernels.rules import DUE, MOST_NUMBERS, TIMES, reduces
from upgd.networks import initial_weights
from upgd.optim.registry import Row, get
from upgd.optim.roles import bound, role
from upgd.optim.upgd import UtilityOptimizer
from upgd.rules.vocabulary import ROLES, as_numbers, split_roles

# What a stack sums up per run and window; the last counts the steps with diagnostics.
COLUMNS = (
    *("loss", "plasticity", "accuracy"),
    *("zero_activations", "gradient_l0", "gradient_l1", "gradient_l2", "measured"),
)


ACTIVATIONS = ("relu", "leaky_relu", "tanh", "linear")  # kernels know them by number


@dataclass(frozen=True)
class Learner:
    """A learner of a stack; missing hyperparameters take the registry's defaults.

    Those of one role's layers are called, for example, ``head.weight_decay``.
    """

    method: str
    hyper: Mapping[str, Any]
    seed: int

    @property
    def row(self) -> Row:
        """The registry's."""
        return get(self.method)[0]

    @property
    def has_utilities(self) -> bool:
        """Whether it has a utility per weight, scaled as UPGD's."""
        return issubclass(self.row.optimizer, UtilityOptimizer) and "gates" not in self.row.needs

    def all_hyper(self) -> dict[str, Any]:
        """All hyperparameters; raises ValueError for unknown ones."""
        _, defaults = get(self.method)
        plain, own = split_roles(self.hyper)
        if unknown := {*plain, *(name for each in own.values() for name in each)} - defaults.keys():
            raise ValueError(
                f"{self.method} has no hyperparameter {', '.join(sorted(unknown))}; "
                f"it has {', '.join(defaults)}"
            )
        return {**defaults, **self.hyper}

    def values(self, role: str | None = None) -> dict[str, float]:
        """All hyperparameters as numbers; ``betas`` are ``beta1`` and ``beta2``.

        Args:
            role: Whose layers' they are; by default what layers have that are given none.
        """
        row = self.row
        plain, own = split_roles(self.all_hyper())
        mine = own.get(role or "", {})
        for name, hyperparameter in row.hyper.items():
            if name in mine:
                hyperparameter = replace(hyperparameter, name=f"{role}.{name}")
            hyperparameter.check(row.optimizer.__name__, mine.get(name, plain[name]))
        return {name: float(value) for name, value in as_numbers({**plain, **mine}).items()}

    def by_role(self, roles: Iterable[str] = ROLES) -> dict[str, dict[str, float]]:
        """:meth:`values` of each role; all have the same unless one is given its own."""
        if split_roles(self.all_hyper())[1]:
            return {each: self.values(each) for each in set(roles)}
        return dict.fromkeys(roles, self.values())

    @property
    def is_perturbed(self) -> bool:
        """Whether it draws noise."""
        return any(map(self.row.method.is_perturbed, self.by_role().values()))

    @property
    def decays_apart(self) -> bool:
        """Whether the trace that makes η decays by another number in some layers than in others."""
        method = self.row.method
        traces = [phase.writes[0] for phase in method.phases[:1] if phase.reduce == "max"]
        decay = method.decays.get(traces[0]) if traces else None
        if decay is None:
            return False
        return len({values[decay] for values in self.by_role().values()}) > 1


@dataclass(frozen=True)
class MethodGroup:
    """Learners ``first … first + count - 1`` of a stack, all of one method.

    `noise` is whether any is perturbed, `reduce` how η is found (``"max"``, ``"row_norm"`` or
    None), `apart` whether layers' traces decay differently, `features` whether utilities are per
    feature, `second` whether the method reads curvature, and `states` what is kept per weight.
    """

    row: Row
    first: int
    count: int
    noise: bool
    apart: bool = False

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
        apart = any(learners[i].decays_apart for i in same)
        groups.append(MethodGroup(row, position, len(same), noise, apart))
        position += len(same)
    return order, groups


def tables(
    learners: Sequence[Learner], roles: Sequence[str], bounds: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Numbers [R, L, 16] in the order of each one's method, and the decays [R, L, 8] of states.

    Behind the decays there is the period (:data:`upgd.kernels.rules.DUE`), or 0 for none. A state
    without bias correction has decay 0, which corrects by 1.

    Args:
        learners: R learners.
        roles: Of L layers, or of parameters where these have numbers of their own.
        bounds: Theirs.
    """
    hyper = np.zeros((len(learners), len(roles), MOST_NUMBERS))
    decays = np.zeros((len(learners), len(roles), TIMES))
    for i, learner in enumerate(learners):
        method = learner.row.method
        by_role = learner.by_role(roles)
        for layer, (its_role, its_bound) in enumerate(zip(roles, bounds, strict=True)):
            values = by_role[its_role]
            hyper[i, layer, : len(method.numbers)] = method.number_values(values, its_bound)
            decays[i, layer, DUE] = method.every(values)
            for k, state in enumerate(method.states):
                if state in method.decays:
                    decays[i, layer, k] = values[method.decays[state]]
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


def unsupported(learner: Learner) -> str | None:
    """Why no stack of dense networks can run a learner, if none can."""
    if learner.row.eager_only:
        return learner.row.eager_only
    if "gates" in learner.row.needs and learner.decays_apart:
        return "a stack's features have one decay of utility in all layers"
    return None


class Stack:
    """Learners in lock step, those of one method beside each other; whatever executes them.

    Subclasses allocate arrays or tensors, which are used alike here: `weights` [R, size], `states`
    of each group [states, count, size], `utilities` of each group's features [count, units],
    `series` of sums by window [R, windows, columns], and `diverged`, the step at which each was not
    finite, or -1. `order` has the learners' numbers before they were sorted by method, `began` the
    step at which each was made or restarted.

    Args:
        learners: Methods, hyperparameters and seeds, in any order.
        loss: ``"cross_entropy"`` or ``"squared_error"``.
        steps: Samples of the run; series are allocated for them.
        window: Samples per window.
        stride: One of so many steps is measured (:mod:`upgd.engine.measuring`); 0 for none.
    """

    weights: Any
    states: list[Any]
    utilities: list[Any]
    corrections: Any
    began: Any
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
        self.measured = measured_steps(steps, stride)

    def _unsupported(self, learner: Learner) -> str | None:
        return unsupported(learner)

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
            self.began[run] = self.step
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
            kept = np.asarray(array)
            if name == "corrections" and kept.ndim == 1:  # of a version that had one for all layers
                views[name][:, : len(kept)] = self._put(kept)
            else:
                views[name][...] = self._put(kept)

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
        if group.row.method.period is not None:
            found["began"] = self.began[run : run + 1].reshape(())
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
        layers = self.layout.layers
        roles = [role(layer.number, len(layers)) for layer in layers]
        return tables(self.learners, roles, [bound((x.outputs, x.inputs)) for x in layers])


def replay(graphs: dict[int, Any], capture: Callable[[int], Any], steps: int, many: int) -> None:
    """Run so many steps by captured graphs of `many` steps, the rest by one of a single step.

    What is missing of `graphs`, which are kept by their numbers of steps, is captured.
    """
    for size in (many, 1):
        if steps >= size and size not in graphs:
            graphs[size] = capture(size)
        for _ in range(steps // size):
            graphs[size].replay()
        steps %= size
