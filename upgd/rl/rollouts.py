"""An actor: an environment, its normalisers, and the steps that a policy takes in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.rl.environments import Simulation
from upgd.rl.network import Network
from upgd.rl.simulators import simulator

if TYPE_CHECKING:
    from upgd.rl.ppo import Settings


class Episode(NamedTuple):
    """An episode that ended: after which step of the agent, its return and length."""

    step: int
    reward: float
    length: int


class Trajectory(NamedTuple):
    """T steps of an agent; entry T of observations, values and ends is the next iteration's first.

    Observations [T + 1, observations] and rewards [T] are normalised, actions [T, actions] as
    drawn, before clipping. `ends` [T + 1] is whether an episode ended just before the observation.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    log_probabilities: NDArray[Any]
    rewards: NDArray[Any]
    values: NDArray[Any]
    ends: NDArray[Any]


def trajectory_shapes(network: Network, steps: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a trajectory's arrays."""
    return {
        "observations": (steps + 1, network.observations),
        "actions": (steps, network.actions),
        "log_probabilities": (steps,),
        "rewards": (steps,),
        "values": (steps + 1,),
        "ends": (steps + 1,),
    }


def trajectory(network: Network, settings: Settings, dtype: Any) -> Trajectory:
    """Arrays for one agent's rollout."""
    shapes = trajectory_shapes(network, settings.steps)
    return Trajectory(**{name: np.zeros(shape, dtype) for name, shape in shapes.items()})


@dataclass
class Rollout:
    """The result of one iteration: episodes, and why the agent must stop, if it must."""

    episodes: list[Episode]
    failure: str | None = None


def fresh_normalisers(observations: int) -> NDArray[np.float64]:
    """Initial running means and variances of returns and observations."""
    from upgd.rl import kernels

    found = np.zeros(kernels.NORMALISERS + 2 * observations)
    found[[kernels.COUNT, kernels.RETURN_COUNT]] = 1e-4  # avoids a division by zero
    found[kernels.RETURN_VAR] = 1
    found[kernels.NORMALISERS + observations :] = 1
    return found


def put(there: NDArray[Any], values: NDArray[Any]) -> None:
    """Fill an array with saved values; raises ValueError if they are of another shape."""
    if there.shape != np.shape(values):
        raise ValueError(f"an array is {np.shape(values)} and should be {there.shape}")
    there[...] = values


class Actor:
    """An environment with its normalisers, kept between iterations.

    `seed` determines actions and the start of episodes; `trajectory` receives the steps. Unless
    `compiled` is False, compiled code steps the environment where there is some
    (:mod:`upgd.rl.simulators`); the numbers are the same.
    """

    def __init__(
        self,
        environment: str,
        seed: int,
        settings: Settings,
        trajectory: Trajectory,
        compiled: bool = True,
    ) -> None:
        from upgd.rl import kernels

        self.kernels, self.settings, self.seed = kernels, settings, seed
        self.simulation = Simulation(environment)
        self.simulator = simulator(self.simulation.env) if compiled else None
        self.spaces = self.simulation.spaces
        self.network = Network(self.spaces.observations, self.spaces.actions, settings.hidden)
        self.trajectory = trajectory
        table, _, _, size = self.network.workspace(1)
        self._layers, self._work = table, np.zeros(size, trajectory.actions.dtype)
        self.normalisers = fresh_normalisers(self.spaces.observations)
        self.step, self.episode, self.reward = 0, 0, 0.0
        self._begin(-1)
        trajectory.ends[-1] = 0

    def _begin(self, row: int) -> None:
        """Start an episode and store its first observation in a row of the trajectory."""
        kernels = self.kernels
        raw = self.simulation.reset(int(kernels.reset_seed(self.seed, self.episode)))
        self.episode += 1
        self.reward = 0.0
        kernels.count_observation(self.normalisers, raw)
        out = self.trajectory.observations[row]
        clip = self.settings.clip_observations
        kernels.normalise_observation(self.normalisers, raw, clip, out)

    def rollout(self, weights: NDArray[Any]) -> Rollout:
        """Act for an iteration's steps with a policy."""
        kernels, network = self.kernels, self.network
        observations, *_, values, ends = self.trajectory
        deviations = weights[network.deviations_at : network.deviations_at + network.actions]
        kernels.pack(self._layers, weights, self._work)
        observations[0], ends[0] = observations[-1], ends[-1]
        told = Rollout([])
        act = self._act_compiled if self.simulator else self._act
        act(deviations, told)
        if told.failure is None:
            values[-1] = kernels.value(self._layers, self._work, observations[-1])
        return told

    def _act(self, deviations: NDArray[Any], told: Rollout) -> None:
        """The steps of an iteration, one by one, by gymnasium."""
        kernels, settings, simulation = self.kernels, self.settings, self.simulation
        observations, actions, log_probabilities, rewards, values, ends = self.trajectory
        clipped = np.zeros(self.network.actions)
        for t in range(len(rewards)):
            log_probabilities[t], values[t] = kernels.act(
                *(self._layers, self._work, deviations, observations[t]),
                *(self.spaces.low, self.spaces.high, self.seed, self.step, actions[t], clipped),
            )
            raw, reward, terminated, ended = simulation.step(clipped)
            self.step += 1
            self.reward += reward
            sound = kernels.receive(
                *(self.normalisers, raw, reward, terminated, settings.gamma),
                *(settings.clip_observations, settings.clip_rewards),
                *(observations[t + 1], rewards, t),
            )
            if not sound:
                return self._break(told, reward)
            ends[t + 1] = ended
            if ended:
                self._end(told, t + 1)

    def _act_compiled(self, deviations: NDArray[Any], told: Rollout) -> None:
        """The steps of an iteration, in one call per episode."""
        from upgd.rl import stepping

        settings, simulation, simulator = self.settings, self.simulation, self.simulator
        assert simulator is not None
        clipped, raw = np.zeros(self.network.actions), np.zeros(self.network.observations)
        first, t, steps = self.step, 0, len(self.trajectory.rewards)
        with simulator.untimed():
            while t < steps:
                t, why, simulation.elapsed, self.reward, reward = stepping.roll(
                    *(t, first, self._layers, self._work, deviations),
                    *(self.spaces.low, self.spaces.high, self.seed, clipped, raw),
                    *(self.normalisers, *self.trajectory, settings.gamma),
                    *(settings.clip_observations, settings.clip_rewards),
                    *(simulator.integers, simulator.numbers, simulator.arrays),
                    *(self.spaces.limit, simulation.elapsed, self.reward),
                )
                self.step = first + t
                if why == stepping.BROKEN:
                    return self._break(told, reward)
                if why == stepping.ENDED:
                    self._end(told, t)

    def _break(self, told: Rollout, reward: float) -> None:
        what = "an observation" if math.isfinite(reward) else f"the reward {reward}"
        told.failure = f"{self.spaces.name} gave {what} that is not finite at step {self.step}"

    def _end(self, told: Rollout, row: int) -> None:
        """Note an episode that has ended and start the next one."""
        told.episodes.append(Episode(self.step, self.reward, self.simulation.elapsed))
        self._begin(row)

    # ---------------------------------------------------------------------- checkpoints
    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The complete state: arrays, and values for JSON."""
        arrays, meta = self.simulation.state()
        found = {f"environment/{name}": array for name, array in arrays.items()}
        found["normalisers"] = self.normalisers.copy()
        found["observation"] = self.trajectory.observations[-1].copy()
        meta |= {"step": self.step, "episode": self.episode, "reward": self.reward}
        return found, meta | {"ended": float(self.trajectory.ends[-1])}

    def restore(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        own = {k.partition("/")[2]: v for k, v in arrays.items() if k.startswith("environment/")}
        self.simulation.restore(own, meta)
        put(self.normalisers, arrays["normalisers"])
        put(self.trajectory.observations[-1], arrays["observation"])
        self.trajectory.ends[-1] = meta["ended"]
        self.step, self.episode = int(meta["step"]), int(meta["episode"])
        self.reward = float(meta["reward"])
