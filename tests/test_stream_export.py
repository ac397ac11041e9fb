"""A learner's networks as PyTorch modules: they answer and learn on as the learner does."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from upgd.optim.base import RuleOptimizer
from upgd.stream import Classifier, Regressor
from upgd.stream.learner import StreamLearner
from upgd.stream.members import dense_module
from upgd.stream.mixing import FLOOR, logarithms
from upgd.stream.module import ModuleCore

pytest.importorskip("numba")
compiled_core = importlib.import_module("upgd.stream.dense").compiled_core
CALM, NOISY = {"sigma": 0.0}, {"sigma": 0.05}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("upgd", {"lr": 0.02, **CALM}),
    ("upgd", {"lr": 0.02, **NOISY}),
    ("ada-upgd", {"lr": 0.002, **CALM}),
    ("ada-upgd", {"lr": 0.002, **NOISY}),
    ("upgd-local", {"lr": 0.02, "weight_decay": 0.01, **NOISY}),
    ("upgd-2nd", {"lr": 0.01, **NOISY}),
    ("feature-upgd", {"lr": 0.02, **NOISY}),
    ("upgd-momentum", {"lr": 0.005, **CALM}),
    ("sgd", {"lr": 0.02}),
    ("adam", {"lr": 0.002}),
    ("s-rwalk", {"lr": 0.01}),
    ("self-tuned-sgd", {}),
    ("centred-sgd", {"lr": 0.02}),
    ("continual-backprop", {"lr": 0.02, "replacement_rate": 0.01, "maturity": 20}),
]


def samples(count: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.str_]]:
    random = np.random.default_rng(seed)
    rows = random.normal(3, 2, (count, 7))
    score = rows @ random.normal(size=(7, 3))
    return rows, np.array(["a", "b", "c"])[(score - score.mean(0)).argmax(1)]


def learner_of(method: str, hyper: dict[str, Any], **parameters: Any) -> Classifier:
    """One that has met a new class, a new feature and some hundred samples."""
    learner = Classifier((16, 8), optimizer=method, hyper=hyper, **parameters)
    rows, labels = samples(200)
    for row, label in zip(rows[:20, :6], labels[:20], strict=True):
        learner.learn_one(dict(enumerate(row)), label)
    for row, label in zip(rows[20:], labels[20:], strict=True):
        learner.learn_one(dict(enumerate(row)), label)
    return learner


def weights_of(learner: StreamLearner) -> list[Tensor]:
    ((module, _),) = learner.to_torch()
    return [p.detach() for p in module.parameters()]


def take_step(module: nn.Module, opt: RuleOptimizer, x: NDArray[np.float32], y: int) -> None:
    opt.zero_grad()
    opt.backward(cross_entropy(module(torch.from_numpy(x)), torch.tensor([y])))
    opt.step()


def ulps(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of float32's spacing at the largest weight."""
    return float((found - expected).abs().max() / (expected.abs().max() * 2**-23))


@pytest.mark.parametrize(("method", "hyper"), CASES)
def test_a_step_of_the_module_is_the_learners(method: str, hyper: dict[str, Any]) -> None:
    learner = learner_of(method, hyper)
    rows, labels = samples(60, seed=1)
    places = {label: place for place, label in enumerate(learner.output_classes_.tolist())}
    for row, label in zip(rows[:20], labels[:20], strict=True):
        ((module, opt),) = learner.to_torch()
        take_step(module, opt, learner.scaled_rows(row[None]), places[str(label)])
        learner.partial_fit(row[None], [label])
        for found, expected in zip(module.parameters(), weights_of(learner), strict=True):
            assert ulps(found.detach(), expected) < 8


@pytest.mark.parametrize(("method", "hyper"), CASES[:4])
def test_the_module_goes_on_as_the_learner_does(method: str, hyper: dict[str, Any]) -> None:
    learner = learner_of(method, hyper)
    rows, labels = samples(300, seed=1)
    places = {label: place for place, label in enumerate(learner.output_classes_.tolist())}
    ((module, opt),) = learner.to_torch()
    for t, (row, label) in enumerate(zip(rows, labels, strict=True)):
        take_step(module, opt, learner.scaled_rows(row[None]), places[str(label)])
        learner.partial_fit(row[None], [label])
        if t % 10 == 0 or t == len(rows) - 1:
            for found, expected in zip(module.parameters(), weights_of(learner), strict=True):
                assert ulps(found.detach(), expected) < 8 * (t + 1)
    assert int(opt.state[next(module.parameters())]["step"]) == 500


@pytest.mark.parametrize("forget", [False, True])
def test_traces_are_the_learners(forget: bool) -> None:
    """Also after utilities were forgotten, which leaves learning on exact."""
    learner = learner_of("ada-upgd", {"lr": 0.002, **NOISY})
    assert learner.committee_ is not None
    if forget:
        learner.committee_.cores[0].forget_utilities()
    ((module, opt),) = learner.to_torch()
    rows, labels = samples(100, seed=1)
    places = {label: place for place, label in enumerate(learner.output_classes_.tolist())}
    for row, label in zip(rows, labels, strict=True):
        take_step(module, opt, learner.scaled_rows(row[None]), places[str(label)])
        learner.partial_fit(row[None], [label])
    ((later, other),) = learner.to_torch()
    for p, q in zip(module.parameters(), later.parameters(), strict=True):
        for name in ("utility", "first_moment", "second_moment"):
            torch.testing.assert_close(
                opt.state[p][name], other.state[q][name], rtol=1e-3, atol=1e-6
            )
        assert int(opt.state[p]["step"]) == int(other.state[q]["step"])


def tolerance(method: str) -> float:
    """Steps of SelfTunedSGD move outputs by nats, and rounding with them."""
    return 1e-4 if method == "self-tuned-sgd" else 1e-5


@pytest.mark.parametrize(("method", "hyper"), CASES)
def test_both_kinds_of_networks_learn_alike(method: str, hyper: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(50, 3)).astype(np.float32)
    labels = random.integers(0, 2, 50)
    compiled = compiled_core((3, 5, 2), method, hyper, 0, False)
    module = ModuleCore(dense_module((3, 5, 2), 0), 3, 2, method, hyper, 0, False)
    found, expected = compiled.learn(rows, labels), module.learn(rows, labels)
    np.testing.assert_allclose(found, expected, atol=tolerance(method))


@pytest.mark.parametrize("method", ["upgd", "feature-upgd", "self-tuned-sgd", "centred-sgd"])
def test_both_kinds_of_networks_grow_alike(method: str) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(60, 5)).astype(np.float32)
    labels = random.integers(0, 2, 60)
    compiled = compiled_core((3, 5, 2), method, {}, 0, False)
    module = ModuleCore(dense_module((3, 5, 2), 0), 3, 2, method, {}, 0, False)
    for core in (compiled, module):
        core.learn(np.ascontiguousarray(rows[:30, :3]), labels[:30])
        core.grow(5, 4)
    found, expected = compiled.learn(rows[30:], labels[30:]), module.learn(rows[30:], labels[30:])
    np.testing.assert_allclose(found, expected, atol=tolerance(method))


def test_a_regressor_goes_on() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(300, 4))
    targets = 5 + 3 * rows[:, :2] @ [[1.0, 0.5], [2.0, -1.0]]
    learner = Regressor((12,), hyper={"lr": 0.02}).partial_fit(rows[:200], targets[:200])
    for row, target in zip(rows[200:], targets[200:], strict=True):
        ((module, opt),) = learner.to_torch()
        x = torch.from_numpy(learner.scaled_rows(row[None]))
        learner.partial_fit(row[None], target[None])
        y = torch.from_numpy(learner._target_scaler.apply(target[None]))
        mse_loss(module(x), y).backward()
        opt.step()
        for found, expected in zip(module.parameters(), weights_of(learner), strict=True):
            assert ulps(found.detach(), expected) < 8


@pytest.mark.parametrize("batch_size", [1, 4])
def test_modules_answer_as_the_learner_predicts(batch_size: int) -> None:
    rows, labels = samples(200)
    learner = Classifier("small" if batch_size == 1 else (16,), batch_size=batch_size)
    learner.partial_fit(rows, labels)
    assert learner.committee_ is not None
    x = torch.from_numpy(learner.scaled_rows(rows))
    mixed = np.zeros((len(rows), 3))
    weights = learner.committee_.mixture.weights
    for weight, (module, _) in zip(weights, learner.to_torch(), strict=True):
        mixed += weight * np.maximum(logarithms(module(x).detach().double().numpy()), FLOOR)
    np.testing.assert_allclose(learner.predict_log_proba(rows), logarithms(mixed), atol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "leaky_relu", "linear"])
def test_other_activations(activation: str) -> None:
    rows, labels = samples(100)
    compiled = Classifier((9,), activation=activation).partial_fit(rows, labels)
    plain = Classifier((9,), activation=activation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("upgd.stream.members.has_compiled_core", lambda: False)
        plain.partial_fit(rows, labels)
    ((module, _),) = compiled.to_torch()
    assert type(module[2]).__name__.lower() in (activation.replace("_", ""), "identity")  # type: ignore[index]
    np.testing.assert_allclose(compiled.predict_proba(rows), plain.predict_proba(rows), atol=1e-4)


def test_activations_that_cannot_be() -> None:
    rows, labels = samples(10)
    with pytest.raises(ValueError, match="activation is one of relu, leaky_relu, tanh, linear"):
        Classifier((9,), activation="logistic").partial_fit(rows, labels)
    with pytest.raises(ValueError, match="is for one network that is given by its hidden units"):
        Classifier("small", activation="tanh").partial_fit(rows, labels)


def test_a_copy_shares_nothing_with_the_learner() -> None:
    rows, labels = samples(100)
    for parameters in ({}, {"batch_size": 2}):
        learner = Classifier((16,), **parameters).partial_fit(rows, labels)
        before = learner.predict_proba(rows)
        ((module, opt),) = learner.to_torch()
        for _ in range(3):
            take_step(module, opt, learner.scaled_rows(rows[:1]), 0)
        np.testing.assert_array_equal(learner.predict_proba(rows), before)


def test_a_module_of_the_users_is_copied_with_its_optimizer() -> None:
    rows, labels = samples(64)
    net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    learner = Classifier(net, optimizer="ada-upgd").partial_fit(rows, labels)
    ((module, opt),) = learner.to_torch()
    place = learner.output_classes_.tolist().index("b")
    x = learner.scaled_rows(rows[:1])
    take_step(module, opt, x, place)
    learner.partial_fit(rows[:1], ["b"])
    for found, expected in zip(module.parameters(), weights_of(learner), strict=True):
        assert torch.equal(found, expected)


def test_steps_that_became_smaller_stay_so() -> None:
    rows, labels = samples(100)
    learner = Classifier((9,)).partial_fit(rows, labels)
    assert learner.committee_ is not None
    learner.committee_.cores[0].lr = 0.00123
    ((_, opt),) = learner.to_torch()
    assert opt.param_groups[0]["lr"] == 0.00123


def test_nothing_is_exported_before_something_was_learned() -> None:
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        Classifier().to_torch()
