"""Environment steps a second of PPO agents, as ratios to a plain loop in the same run.

    python benchmarks/rl_speed.py [--rounds 5] [--output docs/benchmarks/rl_speed.md]
    python benchmarks/rl_speed.py --environment Hopper-v5 --rounds 1 --workers 16  # 16 cores

1, 8 and 40 agents are measured twice: as they run, where compiled code steps the environment
(:mod:`upgd.rl.simulators`), and with ``compiled_steps=False``, where gymnasium does, one Python
call per step. The agents' numbers are the same, bit by bit.

The plain loop has the structure of CleanRL's ``ppo_continuous_action``: one environment in seven
wrappers in a ``SyncVectorEnv``, PyTorch for acting, autograd and ``torch.optim.Adam`` for learning;
one thread, which is the fastest for networks as small, and oneDNN only where it is faster than
without: on some ARM processors a product of 64 rows takes it twelve times as long. Settings are the
defaults everywhere: 2048 steps, 10 epochs of 32 minibatches, 64-64 tanh. Ours do the same and
measure networks too.

Everything takes turns, for several rounds. Where other programs use the cores, only processor time
means anything: then the aggregate of many seeds is what two free cores would do, since agents wait
for nothing but the slowest of an iteration.

The floor: MuJoCo's own ``mj_step``, five times per step of HalfCheetah, takes 52 µs on a Neoverse
N1 core, 45 without its timers and its search for islands. One update on a minibatch has 64 · 3 · 2
· 11 000 = 4.3 million operations, at 31 GFLOP/s (what the product of two 64 × 64 matrices reaches)
140 µs, and 320 of them for 2048 steps are 22 µs per step. Together 67 µs: 15 000 steps a second on
a core.

A batched simulator on a GPU does not help these agents. A run is three million steps one after the
other: in twenty minutes a step may take 400 µs, for however many agents. With four substeps of a
Runge-Kutta integrator, as Hopper has, a step is 16 evaluations of the dynamics, each a graph of
some fifty dependent kernels; at 3 µs each that is 2.4 ms. ``rl_gpu_simulator.py`` measures
3.5 ms on an H200.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import mujoco
import numpy as np
import torch
from batched_cpu import processor_name
from torch import Tensor, nn

from upgd.rl import AgentGroup, Settings, learner
from upgd.timing import seconds

SEEDS = (1, 8, 40)
GOALS = {"one": 2.0, "many": 4.0}
WAYS = {"": True, ", gymnasium's steps": False}


# ----------------------------------------------------------------------- the plain loop
def make_env(name: str, gamma: float) -> Callable[[], Any]:
    def make() -> Any:
        env = gym.wrappers.FlattenObservation(gym.make(name))
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.ClipAction(env)
        env = gym.wrappers.NormalizeObservation(env)
        space = env.observation_space
        env = gym.wrappers.TransformObservation(env, lambda x: np.clip(x, -10, 10), space)
        env = gym.wrappers.NormalizeReward(env, gamma=gamma)
        return gym.wrappers.TransformReward(env, lambda r: np.clip(r, -10, 10))

    return make


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class PlainAgent(nn.Module):
    """Policy and value network."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()

        def body(outputs: int, gain: float) -> nn.Sequential:
            first, second = layer(observations, 64, 2**0.5), layer(64, 64, 2**0.5)
            return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), layer(64, outputs, gain))

        self.critic, self.mean = body(1, 1.0), body(actions, 0.01)
        self.log_deviation = nn.Parameter(torch.zeros(1, actions))

    def act(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        mean = self.mean(x)
        normal = torch.distributions.Normal(mean, self.log_deviation.expand_as(mean).exp())
        action = normal.sample() if action is None else action
        return action, normal.log_prob(action).sum(1), normal.entropy().sum(1), self.critic(x)


class PlainLoop:
    """PPO as most people would write it; times are summed up for rollouts and updates."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.s = settings
        mode = gym.vector.AutoresetMode.SAME_STEP
        self.envs = gym.vector.SyncVectorEnv([make_env(name, settings.gamma)], autoreset_mode=mode)
        self.space = (
            self.envs.single_observation_space.shape,
            self.envs.single_action_space.shape,
        )
        self.agent = PlainAgent(self.space[0][0], self.space[1][0])
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=3e-4, eps=1e-5)
        observation, _ = self.envs.reset(seed=0)
        self.next, self.done = torch.Tensor(observation), torch.zeros(1)
        self.seconds = [0.0, 0.0]

    def iterate(self) -> None:
        begin = time.process_time()
        s, agent, steps = self.s, self.agent, self.s.steps
        seen = torch.zeros((steps, 1, *self.space[0]))
        actions = torch.zeros((steps, 1, *self.space[1]))
        log_probabilities, rewards, dones, values = (torch.zeros((steps, 1)) for _ in range(4))
        for t in range(steps):
            seen[t], dones[t] = self.next, self.done
            with torch.no_grad():
                action, log_probability, _, value = agent.act(self.next)
                values[t] = value.flatten()
            actions[t], log_probabilities[t] = action, log_probability
            observation, reward, over, cut, _ = self.envs.step(action.numpy())
            rewards[t] = torch.tensor(reward).view(-1)
            self.next, self.done = torch.Tensor(observation), torch.Tensor(np.logical_or(over, cut))
        with torch.no_grad():
            after = agent.critic(self.next).reshape(1, -1)
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(steps)):
                goes_on = 1.0 - (self.done if t == steps - 1 else dones[t + 1])
                later = after if t == steps - 1 else values[t + 1]
                delta = rewards[t] + s.gamma * later * goes_on - values[t]
                advantages[t] = last = delta + s.gamma * s.gae_lambda * goes_on * last
            returns = advantages + values
        middle = time.process_time()
        self._update(
            *(seen.reshape(-1, *self.space[0]), actions.reshape(-1, *self.space[1])),
            *(a.reshape(-1) for a in (log_probabilities, advantages, returns, values)),
        )
        self.seconds[0] += middle - begin
        self.seconds[1] += time.process_time() - middle

    def _update(
        self, x: Tensor, a: Tensor, old: Tensor, advantages: Tensor, returns: Tensor, v: Tensor
    ) -> None:
        s, agent, clipped = self.s, self.agent, []
        order = np.arange(s.steps)
        for _ in range(s.epochs):
            np.random.shuffle(order)
            for start in range(0, s.steps, s.minibatch):
                i = order[start : start + s.minibatch]
                _, new, entropy, value = agent.act(x[i], a[i])
                log_ratio = new - old[i]
                ratio = log_ratio.exp()
                with torch.no_grad():
                    clipped.append(((ratio - 1.0).abs() > s.clip).float().mean().item())
                mine = advantages[i]
                mine = (mine - mine.mean()) / (mine.std() + 1e-8)
                bounded = torch.clamp(ratio, 1 - s.clip, 1 + s.clip)
                policy_loss = torch.max(-mine * ratio, -mine * bounded).mean()
                value = value.view(-1)
                near = v[i] + torch.clamp(value - v[i], -s.clip, s.clip)
                errors = torch.max((value - returns[i]) ** 2, (near - returns[i]) ** 2)
                loss = policy_loss - s.entropy_weight * entropy.mean() + 0.25 * errors.mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), s.largest_norm)
                self.optimizer.step()


# --------------------------------------------------------------------------- measuring
class Times(NamedTuple):
    """Seconds per environment step, the best of all rounds: clock, processor and its parts."""

    clock: float
    processor: float
    rollouts: float
    updates: float


def best(a: Times | None, b: Times) -> Times:
    if a is None:
        return b
    # The parts are those of the round with the least processor time.
    least = min((a, b), key=lambda times: times.processor)
    return least._replace(clock=min(a.clock, b.clock))


def of_group(group: AgentGroup) -> Times:
    start, before = time.perf_counter(), dict(group.seconds)
    group.iterate()
    clock = time.perf_counter() - start
    steps = group.settings.steps * len(group.learners)
    parts = [(group.seconds[k] - before[k]) / steps for k in ("rollouts", "updates")]
    return Times(clock / steps, sum(parts), *parts)


def of_plain(loop: PlainLoop, one_dnn: bool) -> Times:
    start, loop.seconds = time.perf_counter(), [0.0, 0.0]
    with torch.backends.mkldnn.flags(enabled=one_dnn):
        loop.iterate()
    parts = [s / loop.s.steps for s in loop.seconds]
    return Times((time.perf_counter() - start) / loop.s.steps, sum(parts), *parts)


def floors(name: str, steps: int = 1000) -> dict[str, float]:
    """Processor seconds per step of the simulation alone, and of the environment as it is."""
    env = gym.make(name).unwrapped
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    actions = rng.uniform(env.action_space.low, env.action_space.high, (steps, len(env.data.ctrl)))
    found = {}
    start = time.process_time()
    for action in actions:
        env.data.ctrl[:] = action
        mujoco.mj_step(env.model, env.data, nstep=env.frame_skip)
    found["mj_step alone"] = (time.process_time() - start) / steps
    env.reset(seed=0)
    start = time.process_time()
    for action in actions:
        if env.step(action)[2]:
            env.reset()
    found["env.step without wrappers"] = (time.process_time() - start) / steps
    return found


def linear_seconds(rows: int, one_dnn: bool) -> float:
    module, x = nn.Linear(64, 64), torch.zeros(rows, 64)
    with torch.backends.mkldnn.flags(enabled=one_dnn), torch.no_grad():
        return min(seconds(lambda: module(x), 100, "cpu", time.process_time) for _ in range(5))


def label(seeds: int, workers: int, way: str = "") -> str:
    """A row of the table: Adam with so many seeds."""
    if seeds == 1:
        return f"one seed, Adam{way}"
    return f"{seeds} seeds, Adam, {workers} processes{way}"


def _against_gymnasium(times: dict[str, Times], seeds: int, workers: int) -> str:
    ours, theirs = (times[label(seeds, workers, way)] for way in WAYS)
    return (
        f"- {seeds} {'agent' if seeds == 1 else 'agents'}: {1 / ours.clock:.0f} steps a second by "
        f"the clock, {1 / theirs.clock:.0f} with gymnasium's steps; ÷ "
        f"{theirs.clock / ours.clock:.2f} by the clock, {theirs.processor / ours.processor:.2f} by "
        f"processor time, of rollouts alone {theirs.rollouts / ours.rollouts:.2f}."
    )


def page(
    name: str,
    floor: dict[str, float],
    times: dict[str, Times],
    rounds: int,
    workers: int,
    one_dnn: bool,
) -> str:
    plain = times["plain loop, Adam"]
    lines = [
        f"# PPO agents on CPU: {platform.machine()}, {processor_name()}",
        "",
        f"`python benchmarks/rl_speed.py --environment {name} --rounds {rounds}`, torch "
        f"{torch.__version__}, gymnasium {gym.__version__}, mujoco {mujoco.__version__}; {name}, "
        "2048 steps, 10 epochs of 32 minibatches, 64-64 tanh. The best of all rounds.",
        "",
        "| what | steps/s, clock | steps/s of a core | ÷ plain loop, per core | rollout | update |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for what, t in times.items():
        lines.append(
            f"| {what} | {1 / t.clock:.0f} | {1 / t.processor:.0f} | "
            f"{plain.processor / t.processor:.2f} | {t.rollouts * 1e6:.0f} µs | "
            f"{t.updates * 1e6:.0f} µs |"
        )
    for what, least in floor.items():
        lines.append(f"| floor: {what} | | {1 / least:.0f} | | {least * 1e6:.0f} µs | |")
    most = max(SEEDS)
    one, many = times[label(1, 0)], times[label(most, workers)]
    by_clock = plain.clock / many.clock
    ideal = workers * plain.processor / many.processor
    lines += [
        "",
        "Rollout and update are processor time per environment step.",
        "",
        f"- One seed ÷ plain loop: {plain.clock / one.clock:.2f} by the clock, "
        f"{plain.processor / one.processor:.2f} by processor time; to be at least "
        f"{GOALS['one']:.0f}.",
        f"- {most} seeds on {workers} cores ÷ plain loop, in aggregate: {by_clock:.2f} by the "
        f"clock, {ideal:.2f} by processor time; to be at least {GOALS['many']:.0f}.",
        *(_against_gymnasium(times, seeds, workers) for seeds in SEEDS),
        f"- The simulation alone is {floor['mj_step alone'] / one.processor:.0%} of what a step of "
        f"ours costs, and {floor['mj_step alone'] / plain.processor:.0%} of the plain loop's.",
        f"- One `nn.Linear(64, 64)` takes {linear_seconds(1, one_dnn) * 1e6:.0f} µs for one row, "
        f"{linear_seconds(64, one_dnn) * 1e6:.0f} µs for 64 (the plain loop: "
        f"{'with' if one_dnn else 'without'} oneDNN; the other way "
        f"{linear_seconds(64, not one_dnn) * 1e6:.0f} µs). Where PyTorch's small calls cost less, "
        "the ratios are smaller.",
    ]
    if one.clock > 1.1 * one.processor or many.clock * workers > 1.2 * many.processor:
        lines.append(
            "- **Other programs used the cores meanwhile: only processor time means anything.**"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", default="HalfCheetah-v5")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write a Markdown page here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    name, settings = args.environment, Settings()
    total = 1_000_000

    def group(method: str, seeds: int, compiled: bool = True) -> AgentGroup:
        agents, workers = [learner(method, seed) for seed in range(seeds)], args.workers
        how: dict[str, Any] = {"workers": workers if seeds > 1 else 0, "compiled_steps": compiled}
        return AgentGroup(name, agents, settings, steps=total, **how)

    groups = {
        label(seeds, args.workers, way): group("adam", seeds, compiled)
        for seeds in SEEDS
        for way, compiled in WAYS.items()
    }
    groups["one seed, AdaUPGD"] = group("ada-upgd", 1)
    plain = PlainLoop(name, settings)
    one_dnn = linear_seconds(64, True) < linear_seconds(64, False)
    times: dict[str, Times] = {}
    floor: dict[str, float] = {}
    for each in groups.values():  # compiled at the first call
        each.iterate()
    for _ in range(args.rounds):
        for what, taken in floors(name).items():
            floor[what] = min(taken, floor.get(what, taken))
        times["plain loop, Adam"] = best(times.get("plain loop, Adam"), of_plain(plain, one_dnn))
        for what, each in groups.items():
            times[what] = best(times.get(what), of_group(each))
    for each in groups.values():
        each.close()
    text = page(name, floor, times, args.rounds, args.workers, one_dnn)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text)


if __name__ == "__main__":
    main()
