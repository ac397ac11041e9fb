"""Environments without wrappers do what wrapped ones do; bad input gets one clear line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="needs the extra rl")
pytest.importorskip("mujoco", reason="needs the extra rl")
pytest.importorskip("numba", reason="needs the extra rl")

import gymnasium as gym

from upgd.processes import TO_END
from upgd.rl import AgentGroup, MissingExtraError, RLError, Settings, environment_id, learner
from upgd.rl import kernels as k
from upgd.rl.diagnostics import diagnose
from upgd.rl.environments import Simulation, make
from upgd.rl.network import Network
from upgd.rl.ppo import run_network
from upgd.rl.rollouts import Actor, fresh_normalisers, trajectory
from upgd.rl.workers import StatesError, Workers

SHORT = Settings(steps=32, epochs=1, minibatches=2)


# ---------------------------------------------------------------------- against wrappers
def test_normalisers_are_gymnasiums() -> None:
    env = gym.make("Hopper-v5")
    observed = gym.wrappers.NormalizeObservation(env)
    rewarded = gym.wrappers.NormalizeReward(observed, gamma=0.9)
    plain = gym.make("Hopper-v5")
    expected, _ = rewarded.reset(seed=3)
    raw, _ = plain.reset(seed=3)
    normalisers, size = fresh_normalisers(11), 11
    out, rewards = np.zeros(size), np.zeros(1)
    k.count_observation(normalisers, raw)
    assert k.normalise_observation(normalisers, raw, 1e9, out)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    rng, ended = np.random.default_rng(0), 0
    for _ in range(400):
        action = rng.uniform(-1, 1, 3)
        expected, reward, terminated, _, _ = rewarded.step(action)
        raw, given, _, _, _ = plain.step(action)
        assert k.receive(normalisers, raw, given, terminated, 0.9, 1e9, 1e9, out, rewards, 0)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(rewards[0], np.asarray(reward).item(), rtol=1e-12)
        if terminated:
            ended += 1
            expected, _ = rewarded.reset()
            raw, _ = plain.reset(options=None)
            k.count_observation(normalisers, raw)
            k.normalise_observation(normalisers, raw, 1e9, out)
            np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)
    assert ended > 3
    mean, var = observed.obs_rms.mean, observed.obs_rms.var
    np.testing.assert_allclose(normalisers[k.NORMALISERS :][:size], mean, rtol=1e-9)
    np.testing.assert_allclose(normalisers[k.NORMALISERS + size :], var, rtol=1e-9)


def test_bounds_hold() -> None:
    normalisers = fresh_normalisers(11)
    out, rewards = np.zeros(11), np.zeros(1)
    for value in (0.0, 1.0, 0.0, 1e9):
        k.receive(normalisers, np.full(11, value), value, False, 0.99, 1.5, 0.5, out, rewards, 0)
    assert np.all(np.abs(out) <= 1.5)
    assert rewards[0] == 0.5


@pytest.mark.parametrize("name", ["Pendulum-v1", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5"])
def test_episodes_end_as_they_do_in_gymnasium(name: str) -> None:
    simulation, wrapped = Simulation(name), gym.make(name)
    first, _ = wrapped.reset(seed=4)
    assert np.array_equal(simulation.reset(4), first)
    space = wrapped.action_space
    rng = np.random.default_rng(0)
    for _ in range(1000):
        action = rng.uniform(space.low, space.high)
        seen, reward, terminated, ended = simulation.step(action)
        expected, given, over, cut, _ = wrapped.step(action)
        assert np.array_equal(seen, expected)
        assert (reward, terminated, ended) == (float(given), over, over or cut)
        if ended:
            break
    assert ended


def test_actions_are_drawn_as_they_are_scored() -> None:
    """Kept log probabilities are those of the kept actions under the acting policy."""
    settings = Settings(steps=256, minibatches=4)
    network = Network(11, 3)
    room = trajectory(network, settings, "float64")
    actor = Actor("Hopper", 1, settings, room)
    weights = network.initial(1)
    weights[network.deviations_at : network.deviations_at + 3] = [-0.5, 0.0, 0.3]
    told = actor.rollout(weights)
    assert told.failure is None
    assert all(e.length > 0 for e in told.episodes)
    views = [v.unsqueeze(0) for v in network.views(torch.from_numpy(weights))]
    x = torch.from_numpy(room.observations).unsqueeze(0)
    mean = run_network(views[:6], x[:, :-1])[0]
    normal = torch.distributions.Normal(mean, views[6][0].exp())
    expected = normal.log_prob(torch.from_numpy(room.actions)).sum(1)
    np.testing.assert_allclose(room.log_probabilities, expected, rtol=1e-10)
    np.testing.assert_allclose(room.values, run_network(views[7:], x)[0, :, 0], rtol=1e-10)
    z = (room.actions - mean.numpy()) / np.exp([-0.5, 0.0, 0.3])
    assert abs(z.mean()) < 0.15
    assert abs(z.std() - 1) < 0.1


# ------------------------------------------------------------------------------ the networks
def test_first_weights_are_orthogonal() -> None:
    network = Network(17, 6)
    parts = iter(network.shapes)
    flat, at = network.initial(2), 0
    gains = {(64, 17): 2.0, (64, 64): 2.0, (6, 64): 1e-4, (1, 64): 1.0}
    for shape in parts:
        count = int(np.prod(shape))
        values, at = flat[at : at + count].reshape(shape), at + count
        if len(shape) == 1:
            assert not values.any()
            continue
        square = values @ values.T if shape[0] <= shape[1] else values.T @ values
        np.testing.assert_allclose(square, gains[shape] * np.eye(len(square)), atol=1e-12)
    assert at == network.size
    assert not np.array_equal(flat, network.initial(3))


def test_the_written_tanh_is_one() -> None:
    x = np.linspace(-15, 15, 40_001).astype(np.float32)
    found = x.copy()
    k._squash(found, 0, len(found))
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), rtol=4e-7)
    extremes = np.array([np.inf, -np.inf, np.nan, 0.0], np.float32)
    k._squash(extremes, 0, 4)
    np.testing.assert_array_equal(extremes, [1, -1, np.nan, 0])


def test_diagnostics_are_what_their_names_say() -> None:
    network, rng = Network(5, 2), np.random.default_rng(0)
    weights = rng.normal(size=network.size)
    views = network.views(torch.from_numpy(weights))
    views[0][:8] = 0.0  # units that see nothing
    observations = rng.normal(size=(512, 5))
    found = diagnose(network, weights, weights, None, observations)
    border = network.deviations_at + 2
    np.testing.assert_allclose(found["policy_weight_l2"], np.linalg.norm(weights[:border]))
    np.testing.assert_allclose(found["value_gradient_l1"], np.abs(weights[border:]).sum())
    for part, layers in (("policy", views[:6]), ("value", views[7:])):
        x, outputs = torch.from_numpy(observations[::2].copy()), []
        for weight, bias in zip(layers[:4:2], layers[1:4:2], strict=True):
            x = torch.tanh(x @ weight.T + bias)
            outputs.append(x)
        units = torch.cat(outputs, 1)
        assert found[f"{part}_saturated"] == pytest.approx((units.abs() > 0.99).double().mean())
        dead = float((units.std(0) < 0.01).double().mean())
        assert found[f"{part}_dead_units"] == dead
        assert (dead > 0) == (part == "policy")
    assert "policy_utility_l1" not in found
    assert "policy_utility_l1" in diagnose(network, weights, weights, weights, observations)


# --------------------------------------------------------------------------------- bad input
class Broken(gym.Env):
    """Gives a reward or an observation that is not a number at its fifth step."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, what: str) -> None:
        self.what, self.state = what, np.zeros(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.state = np.zeros(1)
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.state = self.state + 1
        bad = np.nan if self.state[0] == 5 else 0.0
        reward = bad if self.what == "reward" else 0.0
        return np.full(2, bad if self.what == "observation" else 0.0), reward, False, False, {}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("what", ["reward", "observation"])
def test_an_environment_that_gives_nan_stops_its_agent(what: str, stacked: bool) -> None:
    name = f"upgd/Broken-{what}-v0"
    if name not in gym.registry:
        gym.register(name, entry_point=lambda: Broken(what))
    agents = [learner("adam", 0)]
    with AgentGroup(name, agents, SHORT, steps=320, workers=0, stacked=stacked) as group:
        record = group.iterate()[0]
        words = "the reward nan" if what == "reward" else "an observation"
        assert record.failure == f"{name} gave {words} that is not finite at step 5"
        assert record.values == {}
        assert group.iterate()[0].failure == record.failure


class Keeps(gym.Env):
    """Has a state, or nothing, and keeps a number beside it if asked to."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, has_state: bool, hides: bool) -> None:
        self.has_state, self.hides = has_state, hides

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.hidden = 0
        if self.has_state:
            self.state = np.zeros(2)
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.hidden += self.hides
        drawn = self.np_random.normal(size=2)
        if self.has_state:
            self.state = self.state + drawn
            drawn = self.state
        return drawn, float(self.hidden), False, False, {}


class Doubled(gym.RewardWrapper):  # type: ignore[type-arg]
    def reward(self, reward: Any) -> Any:
        return 2 * reward


def registered(name: str, make_it: Any) -> str:
    gym.registry.pop(name, None)
    gym.register(name, entry_point=make_it, max_episode_steps=12)
    return name


def test_environments_that_keep_more_than_is_saved_are_refused() -> None:
    sound = registered("upgd/Sound-v0", lambda: Keeps(True, False))
    assert make(sound)[1].limit == 12
    for name, make_it, words in (
        ("upgd/Stateless-v0", lambda: Keeps(False, False), "it has no 'state'"),
        ("upgd/Hiding-v0", lambda: Keeps(True, True), "its episodes go on differently"),
        ("upgd/Wrapped-v0", lambda: Doubled(Keeps(True, False)), "is wrapped in Doubled"),
    ):
        with pytest.raises(RLError) as caught:
            AgentGroup(registered(name, make_it), [learner("adam", 0)])
        assert words in one_line(caught.value)
        assert name in one_line(caught.value)


def test_wrappers_of_a_specification_are_refused() -> None:
    name = registered("upgd/Added-v0", lambda **given: Keeps(True, False))
    wrapper = gym.envs.registration.WrapperSpec("Doubled", f"{__name__}:Doubled", kwargs={})
    gym.registry[name].additional_wrappers = (wrapper,)
    with pytest.raises(RLError, match="is wrapped in Doubled"):
        make(name)


def test_a_module_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = f"from {__name__} import Keeps, registered\n"
    code += "registered('Mine-v0', lambda: Keeps(True, False))\n"
    (tmp_path / "of_mine.py").write_text(code)
    assert make("of_mine:Mine")[1].name == "of_mine:Mine-v0"
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(RLError, match="module 'broken' cannot be imported: division by zero"):
        make("broken:Mine")
    with pytest.raises(RLError, match="module 'nowhere' cannot be imported"):
        make("nowhere:Mine")


def test_old_versions_are_made_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    make("Hopper-v4")
    with pytest.raises(RLError):
        make("Hopper-v3")
    assert not [w for w in recwarn if "out of date" in str(w.message)]


def test_what_is_missing_is_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(what: str) -> Any:
        def make_it(**_: Any) -> Any:
            raise gym.error.DependencyNotInstalled(f"{what} is not installed, get it")

        return make_it

    with pytest.raises(RLError, match="cannot be made: Box2D is not installed, get it"):
        make(registered("upgd/Lander-v0", lacks("Box2D")))
    with pytest.raises(MissingExtraError, match="needs mujoco"):
        make(registered("upgd/Ant-v0", lacks("MuJoCo")))


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("HalfCheeta", "unknown environment 'HalfCheeta'; did you mean 'HalfCheetah'?"),
        ("halfcheetah-v5", "did you mean 'HalfCheetah'?"),
        ("HalfCheetah-v99", "unknown environment 'HalfCheetah-v99'"),
        ("CartPole-v1", "'CartPole-v1' has actions Discrete(2); PPO here is for continuous"),
        ("Hopper-v2", "'Hopper-v2' cannot be made"),
    ],
)
def test_environments_that_will_not_do(name: str, words: str) -> None:
    with pytest.raises(RLError) as caught:
        AgentGroup(name, [learner("adam", 0)])
    assert words in one_line(caught.value)


def test_the_newest_version_is_taken() -> None:
    assert environment_id("HalfCheetah") == "HalfCheetah-v5"
    assert environment_id("HalfCheetah-v4") == "HalfCheetah-v4"
    assert make("HalfCheetah")[1].name == "HalfCheetah-v5"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("adamm", 0), "unknown method 'adamm'; did you mean 'adam'?"),
        (("upgd-2nd", 0), "only gradients, and upgd-2nd needs curvature"),
        (("feature-upgd", 0), "feature-upgd needs gates"),
        (("adam", -1), "a seed is an integer in [0, 2**63), got -1"),
        (("adam", 0.5), "a seed is an integer"),
    ],
)
def test_learners_that_will_not_do(arguments: Any, words: str) -> None:
    with pytest.raises(RLError) as caught:
        learner(*arguments)
    assert words in one_line(caught.value)
    with pytest.raises(RLError, match=r"share one set.*; adam has head\.lr"):
        learner("adam", 0, **{"head.lr": 0.1})
    with pytest.raises(RLError, match=r"sgd-head-decay has head\.weight_decay"):
        learner("sgd-head-decay", 0)
    with pytest.raises(RLError, match="adam has no hyperparameter momentum"):
        learner("adam", 0, momentum=0.9)
    with pytest.raises(RLError, match="lr must be"):
        learner("adam", 0, lr=-1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 100, "minibatches": 32}, "100 steps do not make 32 minibatches"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"gamma": 1.5}, "gamma must be in [0, 1], got 1.5"),
        ({"clip": float("nan")}, "clip must be a finite number >= 0, got nan"),
    ],
)
def test_settings_that_will_not_do(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RLError) as caught:
        Settings(**change)
    assert words in one_line(caught.value)


def test_groups_that_will_not_do() -> None:
    with pytest.raises(RLError, match="at least one agent"):
        AgentGroup("Hopper", [])
    with pytest.raises(RLError, match="1000 steps are not one iteration of 2048"):
        AgentGroup("Hopper", [learner("adam", 0)], steps=1000)
    if not torch.cuda.is_available():
        with pytest.raises(RLError, match="there is no device 'cuda' here"):
            AgentGroup("Hopper", [learner("adam", 0)], device="cuda")
    group = AgentGroup("Pendulum", [learner("adam", 0)], SHORT, steps=320)
    with group, pytest.raises(RLError, match="2 states do not fit 1 agents"):
        group.restore(group.states() * 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_young_workers_do_not_hear_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are so far as to ignore it themselves, they would tell where they were."""
    deaf: list[int] = []

    def look(workers: Workers) -> list[Any]:
        for process in workers._processes:
            status = Path(f"/proc/{process.pid}/status").read_text()
            [blocked, ignored] = re.findall(r"Sig(?:Blk|Ign):\s*(\w+)", status)
            deaf.append(int(blocked, 16) | int(ignored, 16))
        return []

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Workers, "_receive", look)
    AgentGroup("Pendulum", [learner("adam", 0)], SHORT, steps=320, workers=1).close()
    [signals] = deaf
    assert all(signals >> (number - 1) & 1 for number in TO_END)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("stacked", [False, True])
def test_states_that_will_not_do_are_told_one_by_one(stacked: bool) -> None:
    agents = [learner("adam", seed) for seed in range(4)]
    with AgentGroup("Pendulum", agents, SHORT, steps=320, workers=0, stacked=stacked) as group:
        states = group.states()
        states[1][0]["weights"] = states[1][0]["weights"][:1]
        del states[2][1]["random"]
        with pytest.raises(StatesError) as caught:
            group.restore(states)
        assert caught.value.reasons.keys() == {1, 2}
        assert "no 'random'" in caught.value.reasons[2]
        assert "agent 1 cannot go on" in one_line(caught.value)


def test_everything_else_works_without_the_extra() -> None:
    code = """
import sys
for name in ("gymnasium", "mujoco", "numba"):
    sys.modules[name] = None
import upgd, upgd.rl
try:
    upgd.rl.AgentGroup("Hopper", [upgd.rl.learner("adam", 0)])
except upgd.rl.RLError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("reinforcement learning needs gymnasium: pip install 'gymnasium")
    assert issubclass(MissingExtraError, ImportError)
