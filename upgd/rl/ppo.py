"""PPO for continuous control, for a stack of agents that learn in lock step.

An *iteration* is: every agent takes ``steps`` steps in its environment with its current policy
(:mod:`upgd.rl.rollouts`); advantages are estimated from the rewards; then, for some epochs, the
steps are shuffled, cut into minibatches, and each minibatch makes one update of all parameters.

This file has the settings, and the algorithm for tensors with a leading dimension of agents, on any
device. It is the reference, and runs on CUDA, where the whole update phase is one graph. On CPU
agents run :mod:`upgd.rl.compiled`, the same algorithm for one agent on one core; tests compare the
two. Updates use the rules of any method of the registry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from upgd.engine.dense import Learner
from upgd.engine.general import GeneralStack, unsupported
from upgd.engine.precision import full_float32
from upgd.kernels.rules import DUE, LR
from upgd.optim.registry import get
from upgd.rl.environments import RLError
from upgd.rl.network import Network
from upgd.rl.rollouts import trajectory_shapes
from upgd.threads import no_garbage


@dataclass(frozen=True)
class Settings:
    """PPO's settings; the defaults are those of CleanRL's ``ppo_continuous_action``."""

    steps: int = 2048
    """Steps of an iteration."""
    epochs: int = 10
    """Passes over them."""
    minibatches: int = 32
    """Updates in each pass."""
    gamma: float = 0.99
    """Discount of future rewards."""
    gae_lambda: float = 0.95
    """Decay of the weight of later steps in an advantage (λ)."""
    clip: float = 0.2
    """Clipping range of probability ratios, and of value changes."""
    clip_values: bool = True
    """Whether values are clipped."""
    normalise_advantages: bool = True
    """Whether each minibatch's advantages are normalised to mean 0 and deviation 1."""
    value_weight: float = 0.5
    """Weight of the value network's loss."""
    entropy_weight: float = 0.0
    """Weight of the policy's entropy."""
    largest_norm: float = 0.5
    """Maximum norm of a gradient; longer ones are clipped."""
    anneal: bool = True
    """Whether the step size falls linearly to zero over the run; long runs keep it constant."""
    hidden: tuple[int, ...] = (64, 64)
    """Units in the hidden layers of both networks."""
    clip_observations: float = 10.0
    """Bound of normalised observations."""
    clip_rewards: float = 10.0
    """Bound of normalised rewards."""
    measure_every: int = 1
    """Iterations between measurements of weights, units and utilities; 0 for never."""

    def __post_init__(self) -> None:
        least = {"steps": 2, "epochs": 1, "minibatches": 1, "measure_every": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise RLError(f"{name} must be at least {low}, got {getattr(self, name)!r}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise RLError(f"{name} must be in [0, 1], got {getattr(self, name)!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (0 <= value < math.inf):
                raise RLError(f"{field.name} must be a finite number >= 0, got {value!r}")
        if self.steps % self.minibatches or self.steps < 2 * self.minibatches:
            wrong = f"{self.steps} steps do not make {self.minibatches} minibatches"
            raise RLError(f"{wrong} of equal size, at least 2 each")

    @property
    def minibatch(self) -> int:
        """Steps in a minibatch."""
        return self.steps // self.minibatches

    def share_of_step_size(self, iteration: int, iterations: int) -> float:
        """The factor that annealing applies to the step size in an iteration, counted from 0."""
        return 1 - iteration / iterations if self.anneal and iterations else 1.0


DEFAULTS = {"lr": 3e-4, "eps": 1e-5}
"""CleanRL's for Adam; all methods have them here unless they are given others."""


def learner(method: str, seed: int, **hyper: Any) -> Learner:
    """An agent's optimizer and seed, with PPO's step size and ε where none are given.

    Raises:
        RLError: There is no such method, or it needs more than gradients.

    Example:
        >>> learner("adam", seed=1).hyper["lr"], learner("ada-upgd", 1, lr=1e-3).hyper["eps"]
        (0.0003, 1e-05)
    """
    try:
        row, _ = get(method)
    except KeyError as error:
        raise RLError(error.args[0]) from error
    fitting = {name: value for name, value in DEFAULTS.items() if name in row.method.hyper}
    found = Learner(method, {**fitting, **hyper}, seed)
    if reason := unsupported(found):
        raise RLError(f"PPO gives optimizers only gradients, and {reason}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise RLError(f"a seed is an integer in [0, 2**63), got {seed!r}")
    try:
        given = [name for name in found.all_hyper() if "." in name]
        found.values()
    except (TypeError, ValueError) as error:
        raise RLError(str(error)) from error
    if given:
        raise RLError(
            f"PPO's networks share one set of hyperparameters; {method} has {', '.join(given)}"
        )
    return found


# ------------------------------------------------------------------------ mathematics
def advantages_and_returns(
    rewards: NDArray[Any], values: NDArray[Any], ends: NDArray[Any], gamma: float, gae_lambda: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Generalised advantage estimates of agents' steps [S, T], and the value targets.

    `values` [S, T + 1] are those of the observations, `ends` [S, T + 1] whether an episode ended
    just before. A time limit ends an episode like a termination, as in CleanRL.
    """
    # Time first: the values of one step are contiguous.
    rewards, values, ends = (np.array(a.T, np.float64, order="C") for a in (rewards, values, ends))
    found = np.zeros_like(rewards)
    last = np.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        goes_on = 1 - ends[t + 1]
        delta = rewards[t] + gamma * values[t + 1] * goes_on - values[t]
        found[t] = last = delta + gamma * gae_lambda * goes_on * last
    return found.T, (found + values[:-1]).T


def run_network(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    """Outputs [S, B, outputs] of S networks for their own inputs [S, B, inputs]."""
    pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
    for layer, (weight, bias) in enumerate(pairs):
        x = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
        x = x.tanh() if layer < len(pairs) - 1 else x
    return x


class Losses(NamedTuple):
    """The parts of the loss, and the distance between old and new policy; [S] each."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor
    total: Tensor


class Minibatch(NamedTuple):
    """B steps of each agent, [S, B, …]."""

    observations: Tensor
    actions: Tensor
    log_probabilities: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor


def ppo_losses(parameters: Sequence[Tensor], batch: Minibatch, settings: Settings) -> Losses:
    """The clipped loss of each agent on its minibatch.

    Parameters are in the order of :class:`~upgd.rl.network.Network`, with a leading dimension.
    """
    border = len(parameters) // 2
    policy, deviations, value = parameters[:border], parameters[border], parameters[border + 1 :]
    mean = run_network(policy, batch.observations)
    z = (batch.actions - mean) * (-deviations).exp().unsqueeze(1)
    constant = (deviations + 0.5 * math.log(2 * math.pi)).sum(1)
    log_ratio = -0.5 * z.square().sum(2) - constant.unsqueeze(1) - batch.log_probabilities
    ratio = log_ratio.exp()

    advantages = batch.advantages
    if settings.normalise_advantages:
        deviation = advantages.std(1, keepdim=True)
        advantages = (advantages - advantages.mean(1, keepdim=True)) / (deviation + 1e-8)
    bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    policy_loss = torch.maximum(-advantages * ratio, -advantages * bounded).mean(1)

    new = run_network(value, batch.observations).squeeze(2)
    errors = (new - batch.returns).square()
    if settings.clip_values:
        moved = (new - batch.values).clamp(-settings.clip, settings.clip)
        errors = torch.maximum(errors, (batch.values + moved - batch.returns).square())
    value_loss = 0.5 * errors.mean(1)

    entropy = constant + 0.5 * deviations.shape[1]
    total = policy_loss - settings.entropy_weight * entropy + settings.value_weight * value_loss
    with torch.no_grad():
        approx_kl = (ratio - 1 - log_ratio).mean(1)
        clip_fraction = ((ratio - 1).abs() > settings.clip).to(total.dtype).mean(1)
    return Losses(policy_loss, value_loss, entropy, approx_kl, clip_fraction, total)


# --------------------------------------------------------------------------- updates
# Measures of a minibatch; reported as means over an iteration.
MEASURES = (
    *("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"),
    *("policy_gradient_norm", "value_gradient_norm"),
)


class StackedPPO(GeneralStack):
    """The update phase of S agents with stacked tensors; their methods may differ.

    Weights, states of optimizers and rules are those of the laboratory's general stack.
    """

    def __init__(
        self,
        network: Network,
        learners: Sequence[Learner],
        settings: Settings,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def build(seed: int, task: int) -> nn.Module:
            parts = network.views(torch.from_numpy(network.initial(seed)))
            return nn.ParameterList([nn.Parameter(part) for part in parts])

        where: Any = {"shape": (network.observations,), "device": device, "dtype": dtype}
        super().__init__(build, learners, loss="squared_error", steps=1, window=1, **where)
        self.network, self.settings = network, settings
        self._step_sizes = self.hyper[..., LR].clone()
        runs, here = len(self.learners), self.device
        shapes = trajectory_shapes(network, settings.steps)
        shapes |= dict.fromkeys(("advantages", "returns"), shapes["rewards"])
        self.fed = {
            name: torch.zeros(runs, *shapes[name], dtype=dtype, device=here)
            for name in Minibatch._fields
        }
        size = (runs, settings.epochs, settings.steps)
        self.index = torch.zeros(size, dtype=torch.int64, device=here)
        self.sums = torch.zeros(runs, len(MEASURES), dtype=torch.float64, device=here)
        self.plasticity = torch.zeros(runs, dtype=torch.float64, device=here)
        self._graph: torch.cuda.CUDAGraph | None = None

    @full_float32()
    def learn(
        self, trajectories: Mapping[str, NDArray[Any]], permutations: NDArray[Any], share: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Update all agents from their rollouts.

        Args:
            trajectories: Arrays [S, …] by name, in the order in which learners were given.
            permutations: The order of steps in each epoch, [S, epochs, T].
            share: The factor on the step size.

        Returns:
            :data:`MEASURES` [S, …] as means over the minibatches, and plasticity [S] as a mean
            over the last minibatch of each epoch.
        """
        settings = self.settings
        rewards, values, ends = (trajectories[name] for name in ("rewards", "values", "ends"))
        discounts = (settings.gamma, settings.gae_lambda)
        estimates = advantages_and_returns(rewards, values, ends, *discounts)
        given = {**trajectories, "advantages": estimates[0], "returns": estimates[1]}
        for name, target in self.fed.items():
            target.copy_(torch.from_numpy(self._ordered(given[name])))
        self.index.copy_(torch.from_numpy(self._ordered(permutations)))
        self.hyper[..., LR] = self._step_sizes * share
        if self.device.type == "cuda":
            self._graph = self._graph or self._recorded()
            self._graph.replay()
        else:
            self._phase()
        updates = settings.epochs * settings.minibatches
        back = np.argsort(self.order)
        measures = (self.sums / updates).cpu().numpy()[back]
        return measures, (self.plasticity / settings.epochs).cpu().numpy()[back]

    def _ordered(self, array: NDArray[Any]) -> NDArray[Any]:
        """Reorder from the order of the agents to that of the stack."""
        same = self.order == list(range(len(array)))
        return np.ascontiguousarray(array if same else array[self.order])

    def utility(self, run: int) -> NDArray[Any] | None:
        """The bias-corrected utility of every weight of a run, where its method has one."""
        number, mine = self._group(run)
        states = self.groups[number].states
        if "utility" not in states:
            return None
        k = states.index("utility")
        correction = self.corrections[run, 0, k].clamp_min(1e-12)
        return np.asarray((self.states[number][k, mine] / correction).cpu().numpy())

    def agent_state(self, agent: int) -> dict[str, NDArray[Any]]:
        """Parameters and optimizer state of agent number `agent`."""
        saved = self.state(self.order.index(agent))
        return {name: saved[name].copy() for name in ("weights", "states", "corrections")}

    def restore_agent(self, agent: int, arrays: Mapping[str, NDArray[Any]], updates: int) -> None:
        """Restore :meth:`agent_state`, or the state of a compiled agent."""
        run = self.order.index(agent)
        decays = self.decays[run].cpu().numpy()
        decays[:, DUE] = 0
        saved = {name: arrays[name] for name in ("weights", "states")}
        corrections = arrays.get("corrections")
        if corrections is None or corrections.ndim == 1:  # of a version with one for all layers
            corrections = 1 - decays**updates
        saved["corrections"] = corrections
        for name, there in self.state(run).items():
            if name in saved and saved[name].shape != there.shape:
                raise ValueError(f"{name} are {saved[name].shape} and should be {there.shape}")
        self.restore(run, saved)
        self.clock.fill_(updates)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        """The update phase as a CUDA graph: no synchronisation, fixed memory."""
        changing = [self.weights, *self.states, self.corrections, self.clock]
        saved = [tensor.clone() for tensor in changing]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # libraries allocate and compile at their first calls
            for last in (False, True):
                self._minibatch(0, 0, measured=last)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with no_garbage(), torch.cuda.graph(graph):
            self._phase()
        for tensor, old in zip(changing, saved, strict=True):
            tensor.copy_(old)
        return graph

    def _phase(self) -> None:
        self.sums.zero_()
        self.plasticity.zero_()
        last = self.settings.minibatches - 1
        for epoch in range(self.settings.epochs):
            for number in range(self.settings.minibatches):
                self._minibatch(epoch, number, measured=number == last)

    def _minibatch(self, epoch: int, number: int, measured: bool) -> None:
        """One update of all agents."""
        batch = self._gather(epoch, number)
        losses = ppo_losses(self.params, batch, self.settings)
        found = torch.autograd.grad(losses.total.sum(), self.params)
        with torch.no_grad():
            torch._foreach_copy_(self._gradient_views, list(found))
            squares = self.gradients.double().square()
            parts = [squares[:, part].sum(1) for part in self.network.parts.values()]
            norm = (parts[0] + parts[1]).sqrt()
            factor = (self.settings.largest_norm / (norm + 1e-6)).clamp_max(1)
            self.gradients.mul_(factor.to(self.dtype).unsqueeze(1))
            kept = [part.detach().double() for part in losses[:5]]
            self.sums.add_(torch.stack([*kept, *(part.sqrt() for part in parts)], 1))
            before = self._value_error(batch) if measured else None
            self._correct()
            if self._fused is not None:
                self._fused()
            else:
                for group, states in zip(self.groups, self.states, strict=True):
                    self._update(group, states)
            self.clock[:1] += 1
            if before is not None:
                progress = 1 - self._value_error(batch) / before.clamp_min(1e-8)
                self.plasticity.add_(progress.clamp(0, 1))

    def _gather(self, epoch: int, number: int) -> Minibatch:
        size = self.settings.minibatch
        index = self.index[:, epoch, number * size : (number + 1) * size]

        def rows(of: Tensor) -> Tensor:
            wide = index if of.dim() == 2 else index.unsqueeze(2).expand(-1, -1, of.shape[2])
            return of.gather(1, wide)

        return Minibatch(**{name: rows(of) for name, of in self.fed.items()})

    def _value_error(self, batch: Minibatch) -> Tensor:
        value = self.params[len(self.params) // 2 + 1 :]
        new = run_network(value, batch.observations).squeeze(2)
        return (new - batch.returns).double().square().mean(1)
