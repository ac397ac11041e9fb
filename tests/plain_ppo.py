"""PPO for one agent as most people would write it: gymnasium's wrappers, autograd, an optimizer.

Written from the description of CleanRL's ``ppo_continuous_action``, to be compared with
:mod:`upgd.rl`. What is random comes from outside, since two generators would never agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from upgd.kernels import philox
from upgd.rl import Settings


class Normalised(gym.wrappers.NormalizeObservation):
    """Without rounding to float32, which makes large differences of small ones."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.obs_rms.var = self.obs_rms.var.astype(np.float64)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        super().observation(observation)
        return (observation - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + self.epsilon)


def wrapped(name: str, settings: Settings) -> Any:
    """An environment in the wrappers that CleanRL puts around it."""
    env = gym.wrappers.FlattenObservation(gym.make(name))
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.ClipAction(env)
    env = Normalised(env)
    most = settings.clip_observations
    space = gym.spaces.Box(-most, most, env.observation_space.shape, np.float32)
    env = gym.wrappers.TransformObservation(env, lambda x: np.clip(x, -most, most), space)
    env = gym.wrappers.NormalizeReward(env, gamma=settings.gamma)
    bound = settings.clip_rewards
    return gym.wrappers.TransformReward(env, lambda r: np.clip(r, -bound, bound))


def words(seed: int, purpose: int, step: int, quads: int) -> Tensor:
    """Four random words [quads, 4] for each of some counters."""
    quad = torch.arange(quads)
    zero = torch.zeros_like(quad)
    counter = [quad, zero + purpose, zero + step, zero]
    return torch.stack(philox.philox4x32(counter, (seed, 0)), 1)


def action_noise(seed: int, step: int, size: int) -> Tensor:
    """Standard normal numbers for one step's action."""
    a, b, c, d = words(seed, 0x80000000, step, -(-size // 4)).unbind(1)
    pairs = (*philox.box_muller(a, b, torch.float64), *philox.box_muller(c, d, torch.float64))
    return torch.stack(pairs, 1).flatten()[:size]


def shuffled(seed: int, number: int, size: int) -> list[int]:
    """A permutation by Fisher and Yates."""
    found = list(range(size))
    drawn = words(seed, 0x80000001, number, -(-size // 4)).flatten().tolist()
    for i in range(size - 1, 0, -1):
        j = drawn[i] * (i + 1) >> 32
        found[i], found[j] = found[j], found[i]
    return found


def reset_seed(seed: int, episode: int) -> int:
    """The environment's seed for an episode."""
    return int(words(seed, 0x80000002, episode, 1)[0, 0]) >> 1


class PlainAgent(nn.Module):
    """Policy and value network, with parameters in the order that the package has."""

    def __init__(self, observations: int, actions: int, hidden: int = 64) -> None:
        super().__init__()

        def mlp(outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(observations, hidden),
                nn.Tanh(),
                nn.Linear(hidden, hidden),
                nn.Tanh(),
                nn.Linear(hidden, outputs),
            )

        self.policy = mlp(actions)
        self.log_deviation = nn.Parameter(torch.zeros(actions))
        self.value = mlp(1)

    def ordered(self) -> list[nn.Parameter]:
        return [*self.policy.parameters(), self.log_deviation, *self.value.parameters()]

    def distribution(self, x: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.policy(x), self.log_deviation.exp())


class PlainPPO:
    """One agent, one environment; :meth:`iterate` is one round of rollout and updates."""

    def __init__(
        self,
        name: str,
        seed: int,
        settings: Settings,
        first: list[np.ndarray],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        dtype: torch.dtype,
    ) -> None:
        self.env, self.seed, self.settings, self.dtype = (
            wrapped(name, settings),
            seed,
            settings,
            dtype,
        )
        shape = self.env.observation_space.shape
        self.agent = PlainAgent(shape[0], self.env.action_space.shape[0]).to(dtype)
        with torch.no_grad():
            for parameter, value in zip(self.agent.ordered(), first, strict=True):
                parameter.copy_(torch.as_tensor(value))
        self.optimizer = make_optimizer(self.agent.ordered())
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.step = self.episode = self.iteration = 0
        self.observation, self.done = self._reset(), 0.0
        self.episodes: list[tuple[int, float, int]] = []

    def _reset(self) -> Tensor:
        observation, _ = self.env.reset(seed=reset_seed(self.seed, self.episode))
        self.episode += 1
        return torch.as_tensor(observation, dtype=self.dtype)

    def iterate(self, iterations: int) -> dict[str, Any]:
        s, agent = self.settings, self.agent
        if s.anneal:
            self.optimizer.param_groups[0]["lr"] = self.lr * (1 - self.iteration / iterations)
        observations, actions, log_probabilities, rewards, dones, values = [], [], [], [], [], []
        for _ in range(s.steps):
            observations.append(self.observation)
            dones.append(self.done)
            with torch.no_grad():
                normal = agent.distribution(self.observation)
                z = action_noise(self.seed, self.step, len(agent.log_deviation)).to(self.dtype)
                action = normal.mean + normal.stddev * z
                log_probabilities.append(normal.log_prob(action).sum())
                values.append(agent.value(self.observation)[0])
            actions.append(action)
            seen, reward, terminated, truncated, info = self.env.step(action.numpy())
            self.step += 1
            rewards.append(float(np.asarray(reward).item()))
            self.observation = torch.as_tensor(seen, dtype=self.dtype)
            self.done = float(terminated or truncated)
            if self.done:
                told = info["episode"]
                self.episodes.append((self.step, float(told["r"]), int(told["l"])))
                self.observation = self._reset()
        with torch.no_grad():
            last = agent.value(self.observation)[0]
        advantages, returns = plain_gae(
            rewards, [*map(float, values), float(last)], [*dones, self.done], s
        )
        x, a = torch.stack(observations), torch.stack(actions)
        old, v = torch.stack(log_probabilities), torch.stack(values)
        advantages, returns = (torch.tensor(t, dtype=self.dtype) for t in (advantages, returns))
        sums = {"policy_loss": 0.0, "value_loss": 0.0, "entropy": 0.0, "approx_kl": 0.0}
        sums["clip_fraction"] = 0.0
        for epoch in range(s.epochs):
            order = shuffled(self.seed, self.iteration * s.epochs + epoch, s.steps)
            for start in range(0, s.steps, s.minibatch):
                index = torch.tensor(order[start : start + s.minibatch])
                normal = agent.distribution(x[index])
                log_ratio = normal.log_prob(a[index]).sum(1) - old[index]
                ratio = log_ratio.exp()
                mine = advantages[index]
                if s.normalise_advantages:
                    mine = (mine - mine.mean()) / (mine.std() + 1e-8)
                bounded = torch.clamp(ratio, 1 - s.clip, 1 + s.clip)
                policy_loss = torch.max(-mine * ratio, -mine * bounded).mean()
                new = agent.value(x[index])[:, 0]
                errors = (new - returns[index]) ** 2
                if s.clip_values:
                    near = v[index] + torch.clamp(new - v[index], -s.clip, s.clip)
                    errors = torch.max(errors, (near - returns[index]) ** 2)
                value_loss = 0.5 * errors.mean()
                entropy = normal.entropy().sum(1).mean()
                loss = policy_loss - s.entropy_weight * entropy + s.value_weight * value_loss
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), s.largest_norm)
                self.optimizer.step()
                sums["policy_loss"] += policy_loss.item()
                sums["value_loss"] += value_loss.item()
                sums["entropy"] += entropy.item()
                sums["approx_kl"] += ((ratio - 1) - log_ratio).mean().item()
                sums["clip_fraction"] += ((ratio - 1).abs() > s.clip).float().mean().item()
        self.iteration += 1
        return {name: total / (s.epochs * s.minibatches) for name, total in sums.items()}

    def weights(self) -> np.ndarray:
        return torch.cat([p.detach().flatten() for p in self.agent.ordered()]).numpy()


def plain_gae(
    rewards: list[float], values: list[float], ends: list[float], settings: Settings
) -> tuple[list[float], list[float]]:
    """Advantages as the sum that defines them: every later surprise until an episode's end."""
    advantages = []
    for t in range(len(rewards)):
        total, weight = 0.0, 1.0
        for k in range(t, len(rewards)):
            goes_on = 1 - ends[k + 1]
            total += weight * (rewards[k] + settings.gamma * values[k + 1] * goes_on - values[k])
            weight *= settings.gamma * settings.gae_lambda * goes_on
        advantages.append(total)
    assert all(math.isfinite(a) for a in advantages)
    return advantages, [a + v for a, v in zip(advantages, values, strict=False)]
