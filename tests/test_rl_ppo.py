"""Groups of PPO agents against a plain one, against themselves alone, and against each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium", reason="needs the extra rl")
pytest.importorskip("mujoco", reason="needs the extra rl")
pytest.importorskip("numba", reason="needs the extra rl")

import gymnasium as gym
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plain_ppo import PlainPPO, plain_gae, shuffled
from upgd import AdaUPGD
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import METHODS
from upgd.rl import AgentGroup, Record, Settings, kernels, learner
from upgd.rl.network import Network
from upgd.rl.ppo import StackedPPO, advantages_and_returns

SHORT = Settings(steps=64, epochs=2, minibatches=4, entropy_weight=0.01)
PENDULUM = "InvertedPendulum-v5"
CUT_OFF = "upgd/CutOff-v0"
"""An environment whose time limit comes before most episodes' own end."""
if CUT_OFF not in gym.registry:
    gym.register(CUT_OFF, gym.spec(PENDULUM).entry_point, max_episode_steps=6)


def run(group: AgentGroup, iterations: int) -> list[list[Record]]:
    with group:
        return [group.iterate() for _ in range(iterations)]


def adam(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)


def ada_upgd(parameters: list[Any]) -> torch.optim.Optimizer:
    noise = PhiloxNoise([tuple(p.shape) for p in parameters], 0)
    return AdaUPGD(parameters, lr=3e-4, eps=1e-5, sigma=0.01, seed=5, noise=noise)


# ------------------------------------------------------------------- against a plain one
@pytest.mark.parametrize("stacked", [False, True], ids=["compiled", "stacked"])
@pytest.mark.parametrize(
    ("environment", "method", "hyper", "optimizer", "dtype"),
    [
        (PENDULUM, "adam", {}, adam, "float64"),
        (PENDULUM, "ada-upgd", {"sigma": 0.01}, ada_upgd, "float64"),
        ("Hopper", "adam", {}, adam, "float64"),
        (CUT_OFF, "adam", {}, adam, "float64"),
        ("Hopper", "adam", {}, adam, "float32"),
    ],
)
def test_an_agent_is_a_plain_ppo_agent(
    environment: str,
    method: str,
    hyper: dict[str, float],
    optimizer: Callable[[list[Any]], torch.optim.Optimizer],
    dtype: str,
    stacked: bool,
) -> None:
    one = learner(method, 5, **hyper)
    group = AgentGroup(
        environment, [one], SHORT, steps=640, workers=0, dtype=dtype, stacked=stacked
    )
    first = group.network.views(torch.from_numpy(group.network.initial(5)))
    kind = getattr(torch, dtype)
    plain = PlainPPO(group.environment, 5, SHORT, [p.numpy() for p in first], optimizer, kind)
    exact = {"rtol": 1e-9, "atol": 1e-9} if dtype == "float64" else {"rtol": 2e-3, "atol": 2e-4}
    episodes: list[Any] = []
    for _ in range(3):
        expected, record = plain.iterate(group.iterations), group.iterate()[0]
        assert record.failure is None
        for name, value in expected.items():
            np.testing.assert_allclose(record.values[name], value, err_msg=name, **exact)
        np.testing.assert_allclose(group.weights()[0], plain.weights(), **exact)
        episodes += record.episodes
    assert [(e.step, e.length) for e in episodes] == [(s, n) for s, _, n in plain.episodes]
    returns = [r for _, r, _ in plain.episodes]
    np.testing.assert_allclose([e.reward for e in episodes], returns, rtol=1e-5)
    assert episodes
    if environment == CUT_OFF:
        lengths = {e.length for e in episodes}
        assert max(lengths) == 6 > min(lengths)


@pytest.mark.parametrize("change", [{"clip_values": False}, {"normalise_advantages": False}])
def test_settings_mean_what_they_say(change: dict[str, Any]) -> None:
    settings = dataclasses.replace(SHORT, anneal=False, largest_norm=10.0, **change)
    group = AgentGroup(
        PENDULUM, [learner("adam", 1)], settings, steps=640, workers=0, dtype="float64"
    )
    first = [p.numpy() for p in group.network.views(torch.from_numpy(group.network.initial(1)))]
    plain = PlainPPO(PENDULUM, 1, settings, first, adam, torch.float64)
    for _ in range(2):
        plain.iterate(10)
        group.iterate()
    np.testing.assert_allclose(group.weights()[0], plain.weights(), rtol=1e-9, atol=1e-9)


def test_a_permutation_is_one_and_the_written_one() -> None:
    for size, number in ((64, 0), (2048, 12), (10, 5)):
        out = np.zeros(size, np.int64)
        kernels.permutation(out, 7, number)
        assert out.tolist() == shuffled(7, number, size)
        assert sorted(out) == list(range(size))


def test_advantages_are_their_definition() -> None:
    rng = np.random.default_rng(0)
    settings = Settings()
    rewards, values = rng.normal(size=50), rng.normal(size=51)
    ends = (rng.random(51) < 0.1).astype(float)
    expected = plain_gae(list(rewards), list(values), list(ends), settings)
    out = np.zeros((2, 50))
    kernels.advantages_and_returns(rewards, values, ends, 0.99, 0.95, *out)
    stacked = advantages_and_returns(*(a[None] for a in (rewards, values, ends)), 0.99, 0.95)
    for k in range(2):
        np.testing.assert_allclose(out[k], expected[k], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(stacked[k][0], expected[k], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- against themselves
FOUR = [
    learner("adam", 0),
    learner("ada-upgd", 1, beta_utility=0.9),
    learner("upgd", 2, lr=0.01),
    learner("adam", 3, lr=1e-3),
]


def alike(a: Record, b: Record) -> bool:
    return (a.step, a.episodes, a.values, a.failure) == (b.step, b.episodes, b.values, b.failure)


def test_four_agents_are_four_agents_alone_on_any_number_of_workers() -> None:
    def make(learners: list[Any], workers: int) -> AgentGroup:
        return AgentGroup("Hopper", learners, SHORT, steps=640, workers=workers)

    with make(FOUR, 0) as group, make(FOUR, 2) as other:
        together, spread = [group.iterate()], [other.iterate()]
        other.restore(group.states())  # which must change nothing
        together += [group.iterate(), group.iterate()]
        spread += [other.iterate(), other.iterate()]
        weights = group.weights()
        assert np.array_equal(weights, other.weights())
        other._workers._processes[1].kill()
        with pytest.raises(RuntimeError, match="a worker of this group of agents has died"):
            other.iterate()
    for i, one in enumerate(FOUR):
        with make([one], 0) as single:
            alone = [single.iterate() for _ in range(3)]
            assert np.array_equal(single.weights()[0], weights[i])
        for records, others, more in zip(alone, together, spread, strict=True):
            assert alike(records[0], others[i])
            assert alike(records[0], more[i])


FIRST_ORDER = [
    name for name, row in METHODS.items() if not row.needs & {"curvature", "gates", "layers"}
]


def test_a_stack_learns_what_compiled_agents_learn() -> None:
    learners = [learner(name, 3 + i) for i, name in enumerate(FIRST_ORDER)]
    found = []
    for stacked in (False, True):
        group = AgentGroup(
            PENDULUM, learners, SHORT, steps=640, workers=0, dtype="float64", stacked=stacked
        )
        with group:
            records = [group.iterate() for _ in range(2)][-1]
            found.append((group.weights(), records))
    # The written sigmoids and square roots of compiled rules are exact to 1e-8 or so.
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6, atol=1e-7)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one.values.keys() == other.values.keys()
        for name, value in one.values.items():
            assert other.values[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_stack_is_the_same_for_any_number_of_agents() -> None:
    weights = []
    for learners in (FOUR, FOUR[1:2]):
        group = AgentGroup(
            PENDULUM, learners, SHORT, steps=640, workers=0, dtype="float64", stacked=True
        )
        run(group, 2)
        weights.append(group.weights())
    np.testing.assert_allclose(weights[0][1], weights[1][0], rtol=1e-9, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_the_update_phase_is_one_graph_and_the_same() -> None:
    learners = [learner(name, 3 + i) for i, name in enumerate(FIRST_ORDER)]
    found = []
    for device in ("cpu", "cuda"):
        group = AgentGroup(
            *(PENDULUM, learners, SHORT),
            steps=640,
            workers=0,
            device=device,
            dtype="float64",
            stacked=True,
        )
        with group:
            records = [group.iterate() for _ in range(3)]
            group.restore(group.states())
            records.append(group.iterate())
            found.append((group.weights(), records))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    for ours, others in zip(found[0][1], found[1][1], strict=True):
        for one, other in zip(ours, others, strict=True):
            assert other.values == pytest.approx(one.values, rel=1e-3, abs=1e-5)
            assert [e.step for e in one.episodes] == [e.step for e in other.episodes]


# ----------------------------------------------------------------------------- resuming
@pytest.mark.parametrize(
    ("environment", "stacked"),
    [("Hopper", False), ("Ant", False), ("Humanoid", False), ("Pendulum", False), ("Hopper", True)],
)
def test_resuming_is_exact(environment: str, stacked: bool) -> None:
    settings = dataclasses.replace(SHORT, steps=24, minibatches=2)

    def make() -> AgentGroup:
        return AgentGroup(environment, FOUR[:2], settings, steps=240, workers=0, stacked=stacked)

    with make() as group:
        for _ in range(2):
            group.iterate()
        states = [
            ({name: array.copy() for name, array in arrays.items()}, json.loads(json.dumps(meta)))
            for arrays, meta in group.states()
        ]
        expected = [group.iterate() for _ in range(3)]
        weights = group.weights()
    with make() as other:
        other.restore(states)
        assert other.iteration == 2
        assert other.step == 48
        found = [other.iterate() for _ in range(3)]
        assert np.array_equal(other.weights(), weights)
    for a, b in zip(expected, found, strict=True):
        assert all(alike(x, y) for x, y in zip(a, b, strict=True))
    for arrays, _ in states:
        assert all(array.dtype != object for array in arrays.values())


def test_compiled_states_go_on_as_a_stack() -> None:
    def make(stacked: bool) -> AgentGroup:
        return AgentGroup(
            PENDULUM, FOUR, SHORT, steps=640, workers=0, dtype="float64", stacked=stacked
        )

    with make(False) as one, make(True) as other:
        one.iterate()
        other.restore(one.states())
        one.iterate()
        other.iterate()
        np.testing.assert_allclose(one.weights(), other.weights(), rtol=1e-6, atol=1e-7)


# -------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("stacked", [False, True], ids=["compiled", "stacked"])
def test_an_agent_that_diverges_leaves_its_neighbours_alone(stacked: bool) -> None:
    wild = learner("sgd", 9, lr=1e30)
    found = []
    for learners in ([FOUR[0], wild, FOUR[1]], [FOUR[0], FOUR[3], FOUR[1]]):
        group = AgentGroup(PENDULUM, learners, SHORT, steps=640, workers=0, stacked=stacked)
        with group:
            records = [group.iterate() for _ in range(3)]
            found.append((records, group.weights()))
    (records, weights), (others, healthy) = found
    assert np.array_equal(weights[[0, 2]], healthy[[0, 2]])
    for i in (0, 2):
        assert all(alike(a[i], b[i]) for a, b in zip(records, others, strict=True))
    failure = records[-1][1].failure
    assert failure is not None
    assert "diverged at step 64" in failure
    assert records[-1][1].values == {}


# -------------------------------------------------------------------------------- learning
def test_agents_learn_to_balance_a_pole() -> None:
    settings = Settings(steps=512, minibatches=8, epochs=6, anneal=False, measure_every=0)
    learners = [learner("adam", 1), learner("ada-upgd", 1, lr=1e-3)]
    records = run(AgentGroup("InvertedPendulum", learners, settings, steps=20_480, workers=0), 40)
    for i in range(len(learners)):
        episodes = [e.reward for iteration in records for e in iteration[i].episodes]
        assert np.mean(episodes[:20]) < 30
        assert np.mean(episodes[-5:]) > 150


class NothingToWaitFor(TorchDispatchMode):
    """Raises where the host would wait for numbers of a device."""

    def __torch_dispatch__(self, call: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        name = call.__name__.split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero", "equal", "lift_fresh"), name
        return call(*given, **(named or {}))


def test_an_update_phase_could_be_recorded() -> None:
    stack = StackedPPO(Network(5, 3), FOUR, SHORT)
    stack._fused = lambda: None  # as on CUDA, where kernels make the updates
    with NothingToWaitFor():
        stack._phase()


def test_a_stack_keeps_still_in_memory() -> None:
    """What a graph on CUDA would remember must be where it was."""
    group = AgentGroup(PENDULUM, FOUR, SHORT, steps=640, workers=0, stacked=True)
    stack = group._stack
    assert isinstance(stack, StackedPPO)

    def places() -> list[int]:
        tensors = [stack.weights, stack.gradients, stack.hyper, stack.corrections, stack.clock]
        tensors += [*stack.states, *stack.params, *stack.fed.values(), stack.index]
        tensors += [stack.sums, stack.plasticity]
        return [tensor.data_ptr() for tensor in tensors]

    with group:
        before = places()
        group.iterate()
        group.restore(group.states())
        group.iterate()
        assert places() == before
