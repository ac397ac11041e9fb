"""The update phase of one agent on one core, compiled; :class:`StackedPPO` is the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from upgd.engine.dense import Learner
from upgd.kernels import flat
from upgd.kernels.rules import LR
from upgd.metrics import sample_plasticity
from upgd.optim.roles import bounds
from upgd.rl.network import Network
from upgd.rl.rollouts import Trajectory

if TYPE_CHECKING:
    from upgd.rl.ppo import Settings


class CompiledPPO:
    """One agent's parameters, optimizer and updates; steps are the kernels of ``fused=True``."""

    def __init__(
        self, network: Network, learner: Learner, settings: Settings, dtype: Any = np.float32
    ) -> None:
        from upgd.kernels import cpu_flat
        from upgd.rl import kernels

        self.network, self.settings, self.seed = network, settings, learner.seed
        self.kernels, self.dtype = kernels, np.dtype(dtype)
        hyper, method = learner.values(), learner.row.method
        if not method.is_perturbed(hyper):
            method = flat.without_noise(method)
        self.method, self.lr, self.updates = method, hyper["lr"], 0
        self.decays = [hyper[d] if (d := method.decays.get(s)) else 0.0 for s in method.states]
        self.weights = network.initial(learner.seed).astype(self.dtype)
        self.gradients = np.zeros_like(self.weights)
        self.states = np.zeros((len(method.states), network.size), self.dtype)
        for k, name in enumerate(method.states):
            if name in method.starts_as_weight:
                self.states[k] = self.weights
        self._every = method.every(hyper)
        bounded = bounds(network.shapes)  # numbers are those of a parameter
        self._numbers = np.zeros((len(bounded), flat.NUMBERS))
        values = [method.number_values(hyper, bound) for bound in bounded]
        self._numbers[:, : len(method.numbers)] = values
        self._numbers[:, [flat.FACTOR, flat.SIGN]] = 1
        self._reduction = method.phases[0].reduce if flat.uses_eta(method) else None
        self._rule = cpu_flat.kernels(method, self.dtype.name)
        self._lay_out(cpu_flat.quads(network.size))
        self._layers, self._scratch, self._zeros, size = network.workspace(settings.minibatch)
        self._work = np.zeros(size, self.dtype)
        self.advantages = np.zeros(settings.steps, self.dtype)
        self.returns = np.zeros(settings.steps, self.dtype)
        self._index = np.zeros(settings.steps, np.int64)

    def _lay_out(self, quads: int) -> None:
        """Tables of addresses; see :mod:`upgd.kernels.flat`."""
        shapes, item = self.network.shapes, self.dtype.itemsize
        self._table = np.zeros((len(shapes), flat.COLUMNS), np.int64)
        items, rows, at, lines = [], [], 0, 0
        for number, (row, shape) in enumerate(zip(self._table, shapes, strict=True)):
            total, height = math.prod(shape), shape[0] if len(shape) > 1 else 1
            arrays = [self.weights, self.gradients]
            row[[flat.W, flat.G]] = [array.ctypes.data + at * item for array in arrays]
            for k, state in enumerate(self.states):
                row[flat.STATE + k] = state.ctypes.data + at * item
            span = -(-shape[0] // 4) * (total // shape[0])
            row[[flat.TOTAL, flat.SPAN, flat.NUMBER, flat.GROUP]] = total, span, number, number
            row[[flat.LENGTH, flat.ROW]] = total // height, lines
            items += [(number, start) for start in range(0, span, quads)]
            rows.append((number, 0, height))
            at, lines = at + total, lines + height
        self._items, self._rows = np.array(items, np.int64), np.array(rows, np.int64)
        self._partial = np.zeros((max(len(items), len(rows)), 3))
        self._norms = np.ones(lines, self.dtype)
        self._todo, self._quads = np.zeros(1, np.int64), quads

    def learn(
        self, trajectory: Trajectory, iteration: int, share: float
    ) -> tuple[NDArray[np.float64], float]:
        """Update from a rollout.

        `iteration` determines how steps are shuffled, `share` is the factor on the step size.
        Returns :data:`upgd.rl.ppo.MEASURES` as means over the minibatches, and plasticity as a mean
        over the last minibatch of each epoch.
        """
        kernels, settings, index = self.kernels, self.settings, self._index
        seen, actions, log_probabilities, rewards, values, ends = trajectory
        kernels.advantages_and_returns(
            *(rewards, values, ends, settings.gamma, settings.gae_lambda),
            *(self.advantages, self.returns),
        )
        self._numbers[:, LR] = self.lr * share
        found, plasticity = np.zeros(kernels.FOUND), []
        for epoch in range(settings.epochs):
            kernels.permutation(index, self.seed, iteration * settings.epochs + epoch)
            for start in range(0, settings.steps, settings.minibatch):
                some = index[start : start + settings.minibatch]
                kernels.gradient(
                    *(self._layers, self._work, self._scratch, self._zeros),
                    *(self.weights, self.network.deviations_at, self.gradients),
                    *(seen, actions, log_probabilities, self.advantages, self.returns, values),
                    *(some, settings.clip, settings.value_weight, settings.entropy_weight),
                    *(settings.largest_norm, settings.normalise_advantages, settings.clip_values),
                    found,
                )
                if start + settings.minibatch < settings.steps:
                    self._step()
            errors = (self._layers, self._work, self.weights, seen, self.returns, some)
            before = kernels.value_error(*errors)
            self._step()
            plasticity.append(float(sample_plasticity(before, kernels.value_error(*errors))))
        updates = settings.epochs * settings.minibatches
        return found[: kernels.MEASURES] / updates, float(np.mean(plasticity))

    def _step(self) -> None:
        """One step of the optimizer with the current gradient."""
        rows, todo, table, quads = self._numbers, self._todo, self._table, self._quads
        for k, decay in enumerate(self.decays):
            rows[:, flat.CORRECTION + k] = 1 - decay ** (self.updates + 1)
        if self._every:
            rows[:, flat.DUE] = (self.updates + 1) % self._every == 0
        if self._reduction == "max":
            todo[0] = 0
            self._rule.first(todo, self._items, table, self._numbers, self._partial, quads)
            eta = abs(float(self._partial[: len(self._items), 0].max()))
            rows[:, flat.ETA] = math.inf if math.isnan(eta) else eta
        elif self._reduction == "row_norm":
            todo[0] = 0
            tables = (self._rows, table, self._numbers, self._partial, self._norms)
            self._rule.first(todo, *tables)
        todo[0] = 0
        self._rule.update(
            *(todo, self._items, table, self._numbers, self._partial, self._norms),
            *(self.seed, self.updates, quads),
        )
        self.updates += 1

    @property
    def utility(self) -> NDArray[Any] | None:
        """The bias-corrected utility of every weight, where the method has one."""
        if "utility" not in self.method.states:
            return None
        k = self.method.states.index("utility")
        correction = 1 - self.decays[k] ** max(1, self.updates)
        return np.asarray(self.states[k] / correction)
