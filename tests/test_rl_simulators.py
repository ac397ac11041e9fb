"""Compiled steps of MuJoCo environments against gymnasium's own."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mujoco")
gym = pytest.importorskip("gymnasium")

from upgd.rl import (  # noqa: E402
    AgentGroup,
    Settings,
    environments,
    learner,
    simulators,
    stepping,
)
from upgd.rl.environments import Simulation  # noqa: E402
from upgd.rl.network import Network  # noqa: E402
from upgd.rl.rollouts import Actor, trajectory  # noqa: E402
from upgd.rl.simulators import Simulator, simulator  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    """MuJoCo's warnings are logged; it would write a file into the current folder."""
    environments._quieten()


ENDLESS = ("HalfCheetah-v5", "HumanoidStandup-v5")
"""End by their time limit alone."""
NAMES = (*ENDLESS, "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")


def opened(name: str, **options: Any) -> tuple[Any, Simulator]:
    env = gym.make(name, **options).unwrapped
    found = simulator(env)
    assert found is not None
    return env, found


def step(of: Simulator, action: Any, raw: Any) -> tuple[float, bool]:
    reward, terminated = stepping.advance(of.integers, of.numbers, of.arrays, action, raw)
    return float(reward), bool(terminated)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_gymnasium(name: str) -> None:
    """Over episodes with large and small actions: MuJoCo's bits, and rewards but for rounding."""
    plain = gym.make(name).unwrapped
    env, ours = opened(name)
    raw = np.zeros(env.observation_space.shape)
    rng, ends = np.random.default_rng(1), set()
    for seed in range(6):
        first, _ = plain.reset(seed=seed)
        np.testing.assert_array_equal(env.reset(seed=seed)[0], first)
        scale = (0.1, 1.0)[seed % 2]
        for _ in range(60):
            action = scale * rng.uniform(env.action_space.low, env.action_space.high)
            seen, expected, over, _, _ = plain.step(action)
            reward, terminated = step(ours, action, raw)
            np.testing.assert_array_equal(raw, seen)
            np.testing.assert_allclose(reward, expected, rtol=1e-12, atol=1e-12)
            assert terminated == over
            ends.add(terminated)
            if over:
                break
    assert ends == ({False} if name in ENDLESS else {False, True})


STATES = {
    "Hopper-v5": [(0, 1, 0.69), (0, 2, 0.3), (0, 2, -0.3), (0, 4, 101.0), (1, 3, 120.0)],
    "Walker2d-v5": [(0, 1, 0.7), (0, 1, 2.1), (0, 2, 1.2), (0, 2, -1.2), (0, 4, 101.0)],
    "Ant-v5": [(0, 2, 0.1), (0, 2, 1.5), (0, 2, 0.6), (1, 3, 120.0)],
    "Humanoid-v5": [(0, 2, 0.9), (0, 2, 2.1), (0, 2, 1.5), (1, 9, 120.0)],
    "HalfCheetah-v5": [(0, 1, 3.0), (0, 2, 3.0), (1, 3, 1e4)],
    "HumanoidStandup-v5": [(0, 2, 2.1), (1, 9, 120.0)],
}


@pytest.mark.parametrize("name", NAMES)
def test_unhealthy_states_end_episodes_as_in_gymnasium(name: str) -> None:
    plain = gym.make(name).unwrapped
    env, ours = opened(name)
    raw, seen = np.zeros(env.observation_space.shape), []
    for part, place, value in STATES[name]:
        for each in (plain, env):
            each.reset(seed=0)
            state = [each.data.qpos.copy(), each.data.qvel.copy()]
            state[part][place] = value
            each.set_state(*state)
        action = np.zeros(env.model.nu)
        expected, reward, over, _, _ = plain.step(action)
        given, terminated = step(ours, action, raw)
        np.testing.assert_array_equal(raw, expected)
        np.testing.assert_allclose(given, reward, rtol=1e-12)
        assert terminated == over
        seen.append(terminated)
    assert any(seen) == (name not in ENDLESS)


def test_numbers_are_those_of_the_environment() -> None:
    """Of one that is made with other weights and ranges, too."""
    options = {
        "forward_reward_weight": 2.5,
        "ctrl_cost_weight": 0.3,
        "healthy_reward": 0.25,
        "healthy_angle_range": (-0.05, 0.05),
        "terminate_when_unhealthy": False,
    }
    plain = gym.make("Walker2d-v5", **options).unwrapped
    env, ours = opened("Walker2d-v5", **options)
    plain.reset(seed=1), env.reset(seed=1)
    raw, rng, rewards = np.zeros(17), np.random.default_rng(0), []
    for _ in range(40):
        action = rng.uniform(-1, 1, 6)
        expected = plain.step(action)
        reward, terminated = step(ours, action, raw)
        np.testing.assert_allclose(reward, expected[1], rtol=1e-12)
        assert not terminated
        rewards.append(plain.is_healthy)
    assert set(rewards) == {False, True}


@pytest.mark.parametrize(("name", "cost"), [("Humanoid", "contact"), ("HumanoidStandup", "impact")])
def test_costs_of_contacts_are_clipped(name: str, cost: str) -> None:
    """A falling humanoid, with a weight that puts the cost below, in and above its range."""
    ends = {f"{cost}_cost_weight": 2e-4, f"{cost}_cost_range": (1.0, 10.0)}
    options = {**ends, "ctrl_cost_weight": 0.3}
    if name == "Humanoid":
        more = {
            "forward_reward_weight": 2.5,
            "healthy_reward": 0.25,
            "healthy_z_range": (1.2, 1.35),
        }
        options |= {**more, "terminate_when_unhealthy": False}
    plain = gym.make(f"{name}-v5", **options).unwrapped
    env, ours = opened(f"{name}-v5", **options)
    plain.reset(seed=1), env.reset(seed=1)
    raw, rng, costs = np.zeros(env.observation_space.shape), np.random.default_rng(0), []
    for _ in range(120):
        action = rng.uniform(-0.4, 0.4, env.model.nu)
        _, expected, _, _, told = plain.step(action)
        reward, terminated = step(ours, action, raw)
        np.testing.assert_allclose(reward, expected, rtol=1e-12)
        assert not terminated
        costs.append(-told[f"reward_{cost}"])
    assert {1.0, 10.0} < set(costs)


def test_joints_out_of_their_range_are_unhealthy() -> None:
    """Hopper's range of states holds for angles and speeds alike."""
    options: dict[str, Any] = {"healthy_state_range": (-2.4, 2.4), "healthy_z_range": (0, 9)}
    plain = gym.make("Hopper-v5", **options).unwrapped
    env, ours = opened("Hopper-v5", **options)
    raw, ends = np.zeros(11), []
    for angle, speed in ((-2.5, 0.0), (-1.0, 3.5), (-1.0, 0.0)):
        for each in (plain, env):
            each.reset(seed=0)
            position, velocity = each.data.qpos.copy(), np.zeros(6)
            position[1], position[3], velocity[0] = 5.0, angle, speed  # in the air
            each.set_state(position, velocity)
        over = plain.step(np.zeros(3))[2]
        assert step(ours, np.zeros(3), raw)[1] == over
        ends.append(over)
    assert ends == [True, True, False]


def test_a_world_of_two_trees_is_stepped_by_gymnasium(tmp_path: Path) -> None:
    """Its islands may be two, and are solved one by one."""
    usual = gym.make("Hopper-v5").unwrapped.fullpath
    ball = '<body pos="9 0 1"><freejoint/><geom size=".1"/></body></worldbody>'
    (tmp_path / "two.xml").write_text(Path(usual).read_text().replace("</worldbody>", ball))
    assert simulator(gym.make("Hopper-v5", xml_file=str(tmp_path / "two.xml")).unwrapped) is None


@pytest.mark.parametrize("name", ["Ant", "Humanoid"])
def test_a_robot_of_many_bodies_is_stepped_by_gymnasium(name: str, tmp_path: Path) -> None:
    """numpy sums more than 128 forces in another order."""
    usual = Path(gym.make(f"{name}-v5").unwrapped.fullpath).read_text()
    begin, root, end = usual.partition('<joint armature="0"')
    for count, ours in ((1, True), (12, False)):
        more = '<body><geom size=".01" mass=".001"/></body>' * count
        (tmp_path / "many.xml").write_text(begin + more + root + end)
        env = gym.make(f"{name}-v5", xml_file=str(tmp_path / "many.xml")).unwrapped
        assert (simulator(env) is not None) == ours


def test_other_environments_are_stepped_by_gymnasium() -> None:
    assert simulator(gym.make("Pendulum-v1").unwrapped) is None
    assert simulator(gym.make("Swimmer-v5").unwrapped) is None
    seen = {"exclude_current_positions_from_observation": False}
    assert simulator(gym.make("Hopper-v5", **seen).unwrapped) is None
    for name, part in (("Ant", "cfrc_ext"), ("Humanoid", "cinert"), ("HumanoidStandup", "cvel")):
        fewer = gym.make(f"{name}-v5", **{f"include_{part}_in_observation": False})
        assert simulator(fewer.unwrapped) is None

    class Other(type(gym.make("Hopper-v5").unwrapped)):  # type: ignore[misc]
        """May have rules of its own."""

    assert simulator(Other()) is None


@pytest.mark.parametrize("name", NAMES)
def test_rollouts_are_bit_exact(name: str) -> None:
    """Everything that an agent sees and draws, through resets and time limits."""
    env = gym.make(name).unwrapped
    settings = Settings(steps=192, minibatches=4)
    network = Network(env.observation_space.shape[0], env.action_space.shape[0])
    rooms = [trajectory(network, settings, "float32") for _ in range(2)]
    actors = [Actor(name, 5, settings, rooms[k], compiled=bool(k)) for k in range(2)]
    assert [actor.simulator is None for actor in actors] == [True, False]
    weights = network.initial(5).astype(np.float32)
    episodes, limit = [], 20
    for _ in range(3):
        for actor in actors:
            actor.spaces = actor.simulation.spaces = replace(actor.spaces, limit=limit)
        one, other = (actor.rollout(weights) for actor in actors)
        assert one == other
        episodes += one.episodes
        for expected, found in zip(*rooms, strict=True):
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(actors[1].normalisers, actors[0].normalisers)
    lengths = [episode.length for episode in episodes]
    assert max(lengths) == limit
    assert min(lengths) < limit or name in ENDLESS


def test_states_fit_both_ways() -> None:
    """An agent that is saved while gymnasium steps it goes on by compiled steps, and back."""
    settings = Settings(steps=128, minibatches=4)
    ways = [AgentGroup("Ant", [learner("adam", 2)], settings, steps=512, workers=0,
                       compiled_steps=compiled) for compiled in (False, True, True)]  # fmt: skip
    plain, switched, whole = ways
    switched.iterate(), whole.iterate(), plain.iterate()
    plain.restore(switched.states())
    plain.iterate(), whole.iterate()
    switched.restore(plain.states())
    switched.iterate(), whole.iterate()
    np.testing.assert_array_equal(switched.weights(), whole.weights())


def test_a_broken_simulation_is_reported() -> None:
    settings = Settings(steps=64, minibatches=4)
    room = trajectory(Network(17, 6), settings, "float32")
    actor = Actor("HalfCheetah", 0, settings, room)
    assert actor.simulator is not None
    actor.simulator.numbers[stepping.SECONDS] = 0  # an infinite speed
    failure = actor.rollout(Network(17, 6).initial(0).astype("float32")).failure
    assert failure is not None
    assert "HalfCheetah-v5 gave the reward" in failure
    assert "at step 1" in failure


@pytest.mark.parametrize("name", NAMES)
def test_a_simulation_that_explodes_starts_again_as_in_gymnasium(name: str, caplog: Any) -> None:
    """MuJoCo warns, through Python, and resets itself."""
    one, (env, ours) = Simulation(name), opened(name)
    one.reset(0), env.reset(seed=0)
    one.env.data.qvel[:] = env.data.qvel[:] = 1e12
    raw, action = np.zeros(env.observation_space.shape), np.full(env.model.nu, 0.3)
    with caplog.at_level("WARNING", logger="upgd.rl.environments"):
        seen, expected, over, _ = one.step(action)
        told = len(caplog.records)
        reward, terminated = step(ours, action, raw)
    assert len(caplog.records) == 2 * told > 0
    np.testing.assert_array_equal(raw, seen)
    np.testing.assert_allclose(reward, expected, rtol=1e-12)
    assert terminated == over


def test_centres_of_mass_are_rounded_as_in_gymnasium() -> None:
    """Whichever way its numpy rounds; each way against fractions."""
    rng = np.random.default_rng(0)
    masses, centres = rng.uniform(1, 9, 20), rng.normal(size=60)
    numbers = np.zeros(stepping.NUMBERS)
    numbers[stepping.MASS] = masses.sum()
    found = []
    for once in (False, True):
        total = 0.0
        for mass, place in zip(masses, centres[::3], strict=True):
            product = Fraction(mass) * Fraction(place)
            total = float(Fraction(total) + (product if once else Fraction(float(product))))
        numbers[stepping.FUSED] = once
        found.append(stepping._centre(numbers, masses, centres))
        assert found[-1] == total / masses.sum()
    assert found[0] != found[1]

    env, ours = opened("Humanoid-v5")
    env.reset(seed=1)
    centre = sys.modules[type(env).__module__].mass_center(env.model, env.data)[0]
    arrays = ours.arrays
    assert stepping._centre(ours.numbers, arrays.masses, arrays.centres) == centre


def test_timers_are_off_only_meanwhile() -> None:
    _, ours = opened("Hopper-v5")
    callback = ctypes.c_void_p.in_dll(simulators._library(), "mjcb_time")
    before = callback.value
    assert before
    with ours.untimed():
        assert callback.value is None
    assert callback.value == before
