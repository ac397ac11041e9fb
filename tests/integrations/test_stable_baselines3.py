"""Stable-Baselines3: the optimizer is a class in ``policy_kwargs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import upgd
from tests.integrations import plain

sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra integrations")
gymnasium = pytest.importorskip("gymnasium", reason="Stable-Baselines3 needs gymnasium")

ROLLOUT = 32


class Corridor(gymnasium.Env[Any, Any]):
    """Three numbers drift; the reward is for pushing the first one towards 0."""

    observation_space = gymnasium.spaces.Box(-10, 10, (3,))

    def __init__(self, continuous: bool = False) -> None:
        spaces = gymnasium.spaces
        self.action_space = spaces.Box(-1, 1, (1,)) if continuous else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[Any, Any]]:
        super().reset(seed=seed)
        self.x, self.t = self.np_random.normal(size=3).astype("float32"), 0
        return self.x.copy(), {}

    def step(self, action: Any) -> Any:
        push = float(action[0]) if self.action_space.shape else 2.0 * int(action) - 1
        self.x[0] += 0.3 * push
        self.t += 1
        return self.x.copy(), -abs(float(self.x[0])), False, self.t == 10, {}


def ppo(policy_kwargs: dict[str, Any], **settings: Any) -> Any:
    return sb3.PPO(
        "MlpPolicy", Corridor(), n_steps=ROLLOUT, batch_size=16, n_epochs=2, seed=5, device="cpu",
        policy_kwargs={"net_arch": [8], **policy_kwargs}, **settings,
    )  # fmt: skip


def chosen(optimizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``policy_kwargs``; the step size is the algorithm's own argument."""
    rest = {name: value for name, value in options.items() if name != "lr"}
    return {"optimizer_class": optimizer, "optimizer_kwargs": rest}


def assert_same(policy: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, p), q in zip(policy.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@plain.choices
def test_learn_is_the_plain_loop(choice: tuple[Any, dict[str, Any]]) -> None:
    """The gradients that PPO clipped, and its schedule of step sizes, in a loop of our own."""
    optimizer, options = choice
    agent = ppo(chosen(optimizer, options), learning_rate=lambda left: 0.01 * left)
    other = ppo({}).policy
    other.load_state_dict(agent.policy.state_dict())
    seen: list[tuple[float, list[torch.Tensor | None]]] = []

    def look(opt: torch.optim.Optimizer, *_: Any) -> None:
        grads = [None if p.grad is None else p.grad.clone() for p in agent.policy.parameters()]
        seen.append((opt.param_groups[0]["lr"], grads))

    agent.policy.optimizer.register_step_pre_hook(look)
    agent.learn(2 * ROLLOUT)
    assert len(seen) == 2 * 2 * ROLLOUT // 16
    assert len({lr for lr, _ in seen}) == 2

    opt = optimizer(other.parameters(), **options)
    for lr, grads in seen:
        opt.param_groups[0]["lr"] = lr
        for p, g in zip(other.parameters(), grads, strict=True):
            p.grad = g
        opt.step()
    assert_same(agent.policy, other)


@plain.choices
def test_saved_and_loaded_is_never_stopped(
    choice: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    """Both go on in a new environment, as Stable-Baselines3 saves none."""
    first = ppo(chosen(*choice)).learn(ROLLOUT)
    before = [p.clone() for p in first.policy.parameters()]
    first.save(tmp_path / "agent.zip")
    second = sb3.PPO.load(tmp_path / "agent.zip", device="cpu")
    for agent in (first, second):
        agent.set_env(Corridor(), force_reset=True)
        agent.set_random_seed(6)
        agent.learn(ROLLOUT, reset_num_timesteps=False)
    assert_same(first.policy, second.policy)
    assert not any(map(torch.equal, before, first.policy.parameters()))


def test_features() -> None:
    """Only parameters arrive where a class is chosen, so the policy is watched afterwards."""
    agent = ppo(chosen(upgd.FeatureUPGD, plain.FEATURES), learning_rate=0.05)
    outputs = ("action_net", "value_net")
    agent.policy.optimizer.watch(agent.policy, output=outputs)
    agent.learn(2 * ROLLOUT)
    hidden = agent.policy.mlp_extractor.policy_net[0].weight
    assert agent.policy.optimizer.scaled_utility(hidden).shape == (8,)
    assert agent.policy.optimizer.utility(hidden).abs().max() > 0


@pytest.mark.parametrize("name", ["DQN", "SAC"])
def test_other_agents(name: str) -> None:
    """With a replay buffer; SAC has an optimizer for the actor and one for the critics."""
    policy_kwargs = {"net_arch": [8], **chosen(*plain.CHOICES["AdaUPGD"])}
    env = Corridor(continuous=name == "SAC")
    agent = getattr(sb3, name)(
        "MlpPolicy", env, learning_starts=8, batch_size=8, seed=5, device="cpu",
        train_freq=4, policy_kwargs=policy_kwargs,
    )  # fmt: skip
    owners = [agent.actor, agent.critic] if name == "SAC" else [agent.policy]
    before = [p.clone() for owner in owners for p in owner.optimizer.param_groups[0]["params"]]
    agent.learn(ROLLOUT)
    after = [p for owner in owners for p in owner.optimizer.param_groups[0]["params"]]
    assert all(isinstance(owner.optimizer, upgd.AdaUPGD) for owner in owners)
    assert not any(map(torch.equal, before, after))


def hidden(scalars: dict[str, float]) -> set[str]:
    """The layers whose units were looked at."""
    return {name.removeprefix("dormant/") for name in scalars if name.startswith("dormant/")}


def test_the_callback_writes_to_the_logger(tmp_path: Path) -> None:
    from upgd.integrations.stable_baselines3 import MonitorCallback

    chose = chosen(*plain.CHOICES["AdaUPGD"])
    callback = MonitorCallback(every=3)
    agent = ppo(chose)
    agent.set_logger(sb3.common.logger.configure(str(tmp_path), ["json", "log"]))
    agent.learn(3 * ROLLOUT, callback=callback)
    assert_same(agent.policy, ppo(chose).learn(3 * ROLLOUT).policy)  # looking changes nothing

    # 2 epochs of 2 batches after each rollout; what is measured then is written with the next one.
    rows = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    history = dict(callback.monitor.history)
    assert list(history) == [3, 6, 9, 12]
    written = [{n: x for n, x in row.items() if n.startswith("monitor/")} for row in rows]
    named = [{f"monitor/{n}": x for n, x in history[step].items()} for step in (3, 6)]
    assert written[0] == {}
    assert written[1:] == [pytest.approx(each, nan_ok=True) for each in named]
    assert hidden(history[12]) == {f"mlp_extractor.{net}_net.0" for net in ("policy", "value")}
    assert "dormant/mlp" not in (tmp_path / "log.txt").read_text()

    agent.learn(ROLLOUT, callback=callback, reset_num_timesteps=False)
    assert [step for step, _ in callback.monitor.history] == [3, 6, 9, 12, 15]


@pytest.mark.parametrize(
    ("name", "heads"), [("DQN", {"q_net.q_net.2"}), ("TD3", {"actor.mu.2", "critic.qf0.2"})]
)
def test_the_callback_watches_what_is_trained(name: str, heads: set[str]) -> None:
    """Neither targets nor heads; steps of the critics count, which step more often than actors."""
    from upgd.integrations.stable_baselines3 import MonitorCallback

    callback = MonitorCallback(every=8)
    agent = getattr(sb3, name)(
        "MlpPolicy", Corridor(continuous=name == "TD3"), learning_starts=8, batch_size=8, seed=5,
        device="cpu", train_freq=1, policy_kwargs={"net_arch": [8]},
    )  # fmt: skip
    agent.learn(25, callback=callback)
    steps = [step for step, _ in callback.monitor.history]
    assert steps == [8, 16]
    found = callback.monitor.scalars()
    norms = {n.removeprefix("weight_norm/") for n in found if n.startswith("weight_norm/")}
    assert heads <= norms
    assert hidden(found) == {head[:-1] + "0" for head in norms if head.endswith(".2")}
    assert not any("_target" in each for each in norms)
