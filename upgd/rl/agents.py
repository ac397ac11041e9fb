"""A group of PPO agents that run at once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from upgd.engine.dense import Learner
from upgd.engine.dense_cpu import cores
from upgd.rl.diagnostics import diagnose
from upgd.rl.environments import RLError, make
from upgd.rl.network import Network
from upgd.rl.ppo import Settings, StackedPPO
from upgd.rl.rollouts import trajectory_shapes
from upgd.rl.workers import (
    Record,
    SharedArrays,
    State,
    StatesError,
    Workers,
    WorkPlan,
    measured,
    what_is_wrong,
)


class AgentGroup:
    """S agents, each with its own environment, method, hyperparameters and seed.

    An agent does not depend on the others, on their number or on the number of workers. On CPU its
    results are bit-exact. `seconds` sums up the times of rollouts and updates over agents, and the
    wall-clock time.

    Args:
        environment: A name of gymnasium's; without a version, the newest installed.
        learners: The agents' optimizers and seeds; see :func:`upgd.rl.learner`.
        settings: PPO's.
        steps: Length of each agent's run, for annealing; rounded down to whole iterations.
        workers: Processes that environments are spread over; 0 for none, by default one per
            core, and none for a single agent. They import the main program, which must do its
            work under ``if __name__ == "__main__"``.
        device: Where agents learn. On CPU the workers do it, on CUDA all agents' updates are one
            graph.
        dtype: ``"float32"``, or ``"float64"`` for tests.
        stacked: Whether agents learn as a stack of tensors, as they do on CUDA.
        compiled_steps: Whether compiled code steps the environments that have some
            (:mod:`upgd.rl.simulators`); the numbers are those of gymnasium's steps.

    Raises:
        RLError: An argument is invalid; the message says which.

    Example:
        >>> from upgd.rl import AgentGroup, Settings, learner  # doctest: +SKIP
        >>> agents = [learner("adam", seed) for seed in range(10)]  # doctest: +SKIP
        >>> with AgentGroup("HalfCheetah", agents, steps=1_000_000) as group:  # doctest: +SKIP
        ...     while not group.done:
        ...         records = group.iterate()
    """

    def __init__(
        self,
        environment: str,
        learners: Sequence[Learner],
        settings: Settings | None = None,
        *,
        steps: int = 1_000_000,
        workers: int | None = None,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        stacked: bool | None = None,
        compiled_steps: bool = True,
    ) -> None:
        self.settings = settings or Settings()
        self.learners = list(learners)
        if not self.learners:
            raise RLError("a group has at least one agent")
        self.iterations = int(steps) // self.settings.steps
        if self.iterations < 1:
            raise RLError(f"{steps} steps are not one iteration of {self.settings.steps}")
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RLError(f"there is no device {str(device)!r} here; agents learn on 'cpu' too")
        _, spaces = make(environment)
        self.environment, self.spaces = spaces.name, spaces
        self.network = Network(spaces.observations, spaces.actions, self.settings.hidden)
        self.iteration = 0
        self.seconds = {"rollouts": 0.0, "updates": 0.0, "clock": 0.0}
        self._memory: SharedArrays | None = None
        self._stack: StackedPPO | None = None
        agents = len(self.learners)
        if stacked or (stacked is None and self.device.type != "cpu"):
            shapes = trajectory_shapes(self.network, self.settings.steps)
            shapes = {name: (agents, *shape) for name, shape in shapes.items()}
            self._memory = SharedArrays({"weights": (agents, self.network.size), **shapes}, dtype)
            parts = (self.network, self.learners, self.settings, self.device)
            self._stack = StackedPPO(*parts, getattr(torch, dtype))
            size = (agents, self.settings.epochs, self.settings.steps)
            self._permutations = np.zeros(size, np.int64)
            self._failures: list[str | None] = [None] * agents
        if workers is None:
            workers = min(cores(), agents) if agents > 1 else 0
        if workers < 0:
            raise RLError(f"workers must be at least 0, got {workers}")
        count = max(1, min(workers, agents))
        self._shares = [tuple(range(first, agents, count)) for first in range(count)]
        rest = (self.settings, self.iterations, dtype, self._memory, compiled_steps)
        plans = [
            WorkPlan(spaces, tuple(self.learners[i] for i in numbers), numbers, *rest)
            for numbers in self._shares
        ]
        self._workers = Workers(plans, processes=workers > 0)

    @property
    def step(self) -> int:
        return self.iteration * self.settings.steps

    @property
    def done(self) -> bool:
        """Whether the run is over; :meth:`iterate` does not check it."""
        return self.iteration >= self.iterations

    def iterate(self) -> list[Record]:
        """One iteration of all agents; returns a record of each, in the order of `learners`."""
        start = time.perf_counter()
        if self._stack is None:
            records = self._collect("iterate", (self.iteration,))
        else:
            records = self._iterate_stack(self._stack)
        for record in records:
            self.seconds["rollouts"] += record.seconds[0]
            self.seconds["updates"] += record.seconds[1]
        self.seconds["clock"] += time.perf_counter() - start
        self.iteration += 1
        return records

    def _collect(self, name: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """Call every share, with arguments of its own or the same ones; results by agent."""
        given = list(arguments) * len(self._shares) if len(arguments) == 1 else list(arguments)
        found: dict[int, Any] = {}
        answers = self._workers.call(name, given)
        for numbers, answer in zip(self._shares, answers, strict=True):
            found.update(zip(numbers, answer or [None] * len(numbers), strict=True))
        return [found[i] for i in range(len(self.learners))]

    def _iterate_stack(self, stack: StackedPPO) -> list[Record]:
        from upgd.rl import kernels

        assert self._memory is not None
        settings, memory = self.settings, self._memory.arrays
        back = np.argsort(stack.order)
        memory["weights"][:] = stack.weights.cpu().numpy()[back]
        told = self._collect("rollout", ())
        start = time.perf_counter()
        for own, learner in zip(self._permutations, self.learners, strict=True):
            for epoch in range(settings.epochs):
                number = self.iteration * settings.epochs + epoch
                kernels.permutation(own[epoch], learner.seed, number)
        share = settings.share_of_step_size(self.iteration, self.iterations)
        measures, plasticity = stack.learn(memory, self._permutations, share)
        parts = {"weights": stack.weights, "gradients": stack.gradients}
        parts["returns"] = stack.fed["returns"]
        host = {name: tensor.cpu().numpy()[back] for name, tensor in parts.items()}
        seconds = (time.perf_counter() - start) / len(told)
        step, records = self.step + settings.steps, []
        for i, (rollout, taken) in enumerate(told):
            record = Record(step, rollout.episodes, failure=self._failures[i] or rollout.failure)
            record.seconds = (taken, seconds)
            if record.failure is None:
                weights, values = host["weights"][i], memory["values"][i, :-1]
                record.fill(measures[i], plasticity[i], values, host["returns"][i], weights)
                if record.failure is None and measured(settings, self.iteration):
                    utility, seen = stack.utility(int(back[i])), memory["observations"][i, :-1]
                    of = (weights, host["gradients"][i], utility, seen)
                    record.values |= diagnose(self.network, *of)
            self._failures[i] = record.failure
            records.append(record)
        return records

    # ---------------------------------------------------------------------- checkpoints
    def states(self) -> list[State]:
        """Each agent's state: arrays, and values for JSON. It fits other groups, too."""
        found: list[State] = self._collect("states", ())
        if self._stack is not None:
            for i, (arrays, meta) in enumerate(found):
                arrays |= self._stack.agent_state(i)
                meta |= {"updates": self._updates, "failure": self._failures[i]}
        for _, meta in found:
            meta["iteration"] = self.iteration
        return found

    def restore(self, states: Sequence[State]) -> None:
        """Restore what :meth:`states` returned.

        Raises:
            RLError: The states are of different iterations, or not as many as agents.
            StatesError: Some do not fit; the group cannot be used any more.
        """
        if len(states) != len(self.learners):
            raise RLError(f"{len(states)} states do not fit {len(self.learners)} agents")
        iterations = {int(meta["iteration"]) for _, meta in states}
        if len(iterations) != 1:
            raise RLError(f"agents of one group are at one iteration, these at {iterations}")
        wrong = self._collect("restore", *[([states[i] for i in own],) for own in self._shares])
        if self._stack is not None:
            for i, state in enumerate(states):
                wrong[i] = wrong[i] or what_is_wrong(self._restore_stacked, i, *state)
        reasons = {i: reason for i, reason in enumerate(wrong) if reason is not None}
        if reasons:
            raise StatesError(reasons)
        self.iteration = iterations.pop()

    def _restore_stacked(
        self, number: int, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
    ) -> None:
        assert self._stack is not None
        self._stack.restore_agent(number, arrays, int(meta["updates"]))
        self._failures[number] = meta["failure"]

    @property
    def _updates(self) -> int:
        return self.iteration * self.settings.epochs * self.settings.minibatches

    def weights(self) -> NDArray[Any]:
        """All agents' parameters, [S, size]; see :class:`upgd.rl.network.Network`."""
        if self._stack is not None:
            return np.asarray(self._stack.weights.cpu().numpy()[np.argsort(self._stack.order)])
        return np.stack([arrays["weights"] for arrays, _ in self._collect("states", ())])

    # ---------------------------------------------------------------------------- the end
    def close(self) -> None:
        """Stop the workers."""
        self._workers.close()
        if self._memory is not None:
            self._memory.close()

    def __enter__(self) -> AgentGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
