"""Rules from plain functions: equal on every executor, refused in one line where they are wrong.

The rules are in ``tests/data/own_rules.py``, as users would write them; here stands what they mean,
in plain NumPy.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.stacks import feed, numbers, small
from upgd.engine.dense import Learner
from upgd.engine.eager import EagerRun, Setting
from upgd.engine.general import GeneralStack
from upgd.kernels import philox
from upgd.kernels.layout import Layout
from upgd.kernels.rules import describe, fills_padding, gates_by_share, source, traces_utility
from upgd.networks import build, initial_weights
from upgd.optim import fused
from upgd.optim.base import RuleOptimizer
from upgd.optim.custom import rule_row
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import METHODS, Row
from upgd.rules.ops import absolute, clip, exp, log, maximum, minimum, sigmoid, sign, sqrt
from upgd.rules.vocabulary import Method, Phase

Arrays = list[Any]


def own_rules() -> dict[str, Row]:
    """The rows of a user's file."""
    path = Path(__file__).parent / "data" / "own_rules.py"
    spec = importlib.util.spec_from_file_location("own_rules", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {row.name: row for row in module.ROWS}


ROWS = own_rules()
SIZES = (16, 7, 6, 10)
STEPS, SEED = 4, 3
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS = {name: importlib.util.find_spec(name) is not None for name in ("numba", "triton")}
needs_numba = pytest.mark.skipif(not HAS["numba"], reason="needs numba")
needs_interpreter = pytest.mark.skipif(
    not (HAS["triton"] and INTERPRETED), reason="needs Triton and TRITON_INTERPRET=1"
)
every_rule = pytest.mark.parametrize("name", ROWS)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in ROWS.items():
        monkeypatch.setitem(METHODS, name, row)  # type: ignore[arg-type]


# ----------------------------------------------------------------------- the rules in NumPy
def phi(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


class Plain:
    """What the rules of the file mean, on lists of arrays; `step` changes the weights."""

    def __init__(self, name: str, weights: Arrays, seed: int) -> None:
        self.name, self.weights, self.seed, self.t = name, weights, seed, 0
        self.start = [w.copy() for w in weights]
        self.a = [np.zeros_like(w) for w in weights]
        self.b = [np.zeros_like(w) for w in weights]
        self.last = [w.copy() for w in weights]

    def noise(self) -> Arrays:
        return [
            philox.normal(w.shape, self.seed, i, self.t, dtype=torch.float64).numpy()
            for i, w in enumerate(self.weights)
        ]

    def etas(self) -> Arrays:
        if self.name.endswith("max"):
            return [abs(max(a.max() for a in self.a))] * len(self.a)
        rows = [a.reshape(len(a) if a.ndim > 1 else 1, -1) for a in self.a]
        norms = [np.maximum(np.sqrt((r**2).sum(1)), 1e-300) for r in rows]
        return [
            n.reshape((-1, *[1] * (a.ndim - 1))) if a.ndim > 1 else n[0]
            for n, a in zip(norms, self.a, strict=True)
        ]

    def step(self, gradients: Arrays) -> None:
        noise = self.noise()
        self.t += 1
        if "guarded" in self.name or "sharp" in self.name:
            for a, w, g in zip(self.a, self.weights, gradients, strict=True):
                new = -g * w if "guarded" in self.name else np.maximum(abs(g) * abs(w), 0.001)
                a[...] = 0.9 * a + 0.1 * new
        for i, (w, g) in enumerate(zip(self.weights, gradients, strict=True)):
            if self.name == "l2-start":
                w -= 0.01 * (g + 0.01 * (w - self.start[i]))
            elif self.name == "clipped":
                w[...] = np.clip(w - 0.05 * g, -0.2, 0.2)
            elif self.name == "jitter":
                w -= 0.05 * (g + 0.3 * noise[i])
            elif "guarded" in self.name:
                gate = 1 - phi(self.a[i] / self.etas()[i])
                w[...] = (1 - 0.05 * 0.01) * w - 2 * 0.05 * (g + 0.1 * noise[i]) * gate
            elif "sharp" in self.name:
                gate = 1 - phi(4 * self.a[i] / self.etas()[i])
                w -= 0.05 * (g + 0.1 * noise[i]) * gate
            else:
                self.everything(i, w, g)

    def everything(self, i: int, w: Any, g: Any) -> None:
        before, last = self.a[i].copy(), self.last[i]
        self.a[i][...] = 0.8 * before + 0.2 * g
        self.b[i][...] = 0.9 * self.b[i] + 0.1 * g * g
        size = np.sqrt(self.b[i] / (1 - 0.9**self.t)) + 0.01
        share = np.minimum(abs(self.a[i] / (1 - 0.8**self.t) / size), 1)
        step = np.clip(np.sign(self.a[i]) * share, -0.25, 0.75)
        pull = 0.1 * (np.exp(np.minimum(w, 0.75)) - np.log(1.7 + np.maximum(last, -0.25) ** 2))
        pull += 0.3 * np.maximum(g, w)
        w -= 0.02 * (step + pull)
        self.last[i] = before


# ------------------------------------------------------------------------------- optimizers
PATHS = {
    "reference": {"foreach": False},
    "foreach": {"foreach": True},
    "packed": {"foreach": True, "nonfinite": "skip"},
    "fused": {"fused": True},
    "triton": {"fused": True},
}
INTERPRETED_RULES = ("guarded-row-norm", "sharp-max", "everything")
"""Of each number of passes; Triton's interpreter is slow."""
OPTIMIZERS = [
    pytest.param(name, path, id=f"{path}-{name}", marks=() if fast else pytest.mark.slow)
    for path in PATHS
    for name in ROWS
    for fast in [path != "triton" or name in INTERPRETED_RULES]
]


@pytest.mark.parametrize(("name", "path"), OPTIMIZERS)
def test_optimizers_equal_numpy(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "fused" and not HAS["numba"]:
        pytest.skip("needs numba")
    if path == "triton":
        if not (HAS["triton"] and INTERPRETED):
            pytest.skip("needs Triton and TRITON_INTERPRET=1")
        from upgd.kernels import triton_flat
        from upgd.optim.fused_cuda import Cuda

        monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
        monkeypatch.setattr(triton_flat, "BLOCK", 32)
    rng = np.random.default_rng(0)
    shapes = [(5, 4), (5,), (3, 5)]
    weights = [rng.normal(size=shape) for shape in shapes]
    params = [nn.Parameter(torch.tensor(w)) for w in weights]
    noise = {} if "fused" in PATHS[path] else {"noise": PhiloxNoise()}
    opt = ROWS[name].optimizer(params, seed=SEED, **noise, **PATHS[path])
    plain = Plain(name, weights, SEED)
    for _ in range(STEPS):
        gradients = [rng.normal(size=shape) for shape in shapes]
        for p, g in zip(params, gradients, strict=True):
            p.grad = torch.tensor(g)
        opt.step()
        plain.step(gradients)
    for p, w in zip(params, plain.weights, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=0, atol=1e-9)


@pytest.mark.parametrize("path", ["reference", "foreach", "packed"])
def test_states_that_take_each_others_place(path: str) -> None:
    """Old values are read before any is overwritten."""

    def swap(w: Any, g: Any, one: Any, two: Any, three: Any, lr: Any) -> Any:
        return w - lr * (g + 2 * one + 4 * two), two, one, w

    row = rule_row("swap", swap, states={"one": "weight", "two": 0, "three": 0}, lr=0.1)
    p = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = row.optimizer([p], **PATHS[path])
    w, one, two, three = 1.0, 1.0, 0.0, 0.0
    for _ in range(3):
        p.grad = torch.ones_like(p)
        opt.step()
        w, one, two, three = w - 0.1 * (1 + 2 * one + 4 * two), two, one, w
        found = [p.item(), *(float(opt.state[p][name]) for name in ("one", "two", "three"))]
        assert found == pytest.approx([w, one, two, three], abs=1e-12)


# ----------------------------------------------------------------------------------- engines
def numpy_learner(name: str, seed: int, steps: int, rule: Any = Plain) -> Any:
    """The weights of a network after some steps, forward and backward written out."""
    shapes = [s for a, b in pairwise(SIZES) for s in ((b, a), (b,))]
    weights = [w.astype(np.float64) for w in initial_weights(shapes, seed)]
    plain, stream = rule(name, weights, seed), small(seed)
    for step in range(steps):
        x, y = stream.at(step)
        outputs = [x.reshape(-1).astype(np.float64)]
        for layer in range(len(SIZES) - 1):
            z = weights[2 * layer] @ outputs[-1] + weights[2 * layer + 1]
            outputs.append(np.maximum(z, 0) if layer < len(SIZES) - 2 else z)
        share = np.exp(outputs[-1] - outputs[-1].max())
        delta = share / share.sum()
        delta[int(y[0])] -= 1
        gradients: Arrays = []
        for layer in reversed(range(len(SIZES) - 1)):
            gradients = [np.outer(delta, outputs[layer]), delta, *gradients]
            delta = (weights[2 * layer].T @ delta) * (outputs[layer] > 0)
        plain.step(gradients)
    return np.concatenate([w.ravel() for w in weights])


def stack_weights(stack: Any, learners: list[Learner], steps: int) -> list[Any]:
    stack.advance(feed(learners, small).chunk(0, steps))
    places = stack.layout.places if hasattr(stack, "layout") else slice(None)
    found = dict(zip(stack.order, (numbers(w)[places] for w in stack.weights), strict=True))
    return [found[i] for i in range(len(learners))]


def dense(make: Callable[..., Any], learners: list[Learner], steps: int, **given: Any) -> Any:
    common = {"activation": "relu", "loss": "cross_entropy", "steps": steps, "window": 1}
    return make(Layout(SIZES), learners, **common, **given)


LEARNERS = [Learner(name, {}, SEED) for name in ROWS]


def check(found: list[Any], steps: int) -> None:
    for learner, weights in zip(LEARNERS, found, strict=True):
        expected = numpy_learner(learner.method, SEED, steps)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9, err_msg=learner.method)


@every_rule
def test_the_eager_engine_equals_numpy(name: str) -> None:
    class Double(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.double()

    def network(seed: int, task: int) -> nn.Module:
        return nn.Sequential(Double(), build(SIZES, seed, task=task).double())

    run = EagerRun(small(SEED), network, Setting(name, {}, SEED, window=1))
    run.advance(STEPS)
    found = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    expected = numpy_learner(name, SEED, STEPS)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-9)


def test_the_general_stack_equals_numpy() -> None:
    stack = GeneralStack(
        lambda seed, task: build(SIZES, seed, task=task),
        LEARNERS,
        loss="cross_entropy",
        steps=STEPS,
        window=1,
        shape=SIZES[:1],
        dtype=torch.float64,
    )
    check(stack_weights(stack, LEARNERS, STEPS), STEPS)


@needs_interpreter
@pytest.mark.slow
def test_the_general_stack_by_triton_equals_numpy() -> None:
    from upgd.engine.general_cuda import FusedUpdates

    stack = GeneralStack(
        lambda seed, task: build(SIZES, seed, task=task),
        LEARNERS,
        loss="cross_entropy",
        steps=2,
        window=1,
        shape=SIZES[:1],
        dtype=torch.float64,
    )
    stack._fused = FusedUpdates(stack)
    check(stack_weights(stack, LEARNERS, 2), 2)


@needs_numba
def test_the_stack_on_cpus_equals_numpy() -> None:
    from upgd.engine.dense_cpu import CpuStack

    stack = dense(CpuStack, LEARNERS, STEPS, dtype=np.float64)
    check(stack_weights(stack, LEARNERS, STEPS), STEPS)


@needs_numba
@every_rule
def test_single_precision_is_close(name: str) -> None:
    """Cheap gates near one half are taken only where a gate's argument is known to be small."""
    from upgd.engine.dense_cpu import CpuStack

    [found] = stack_weights(dense(CpuStack, [Learner(name, {}, 5)], 4), [Learner(name, {}, 5)], 4)
    np.testing.assert_allclose(found, numpy_learner(name, 5, 4), rtol=0, atol=2e-5)
    rng, w = np.random.default_rng(1), nn.Parameter(torch.rand(64, 33) - 0.5)
    plain = Plain(name, [w.detach().double().numpy()], SEED)
    opt = ROWS[name].optimizer([w], seed=SEED, fused=True)
    for _ in range(3):
        g = rng.normal(size=w.shape).astype(np.float32)
        w.grad = torch.from_numpy(g)
        opt.step()
        plain.step([g.astype(np.float64)])
    np.testing.assert_allclose(w.detach().numpy(), plain.weights[0], rtol=0, atol=2e-5)


@pytest.mark.slow
@needs_interpreter
def test_the_stack_on_cuda_equals_numpy() -> None:
    from upgd.engine.dense_cuda import CudaStack

    stack = dense(CudaStack, LEARNERS, 2, dtype=torch.float64, device="cpu")
    check(stack_weights(stack, LEARNERS, 2), 2)
    padding = np.setdiff1d(np.arange(stack.layout.size), stack.layout.places)
    assert not stack.weights[:, padding].any()
    assert not any(states[..., padding].any() for states in stack.states)


# --------------------------------------------------------------------------- without rule_row
def leak(w: Any, g: Any, charge: Any, lr: Any, leakage: Any, gain: Any) -> Any:
    charge = charge - leakage * charge + gain * g
    return w - lr * charge, charge


LEAKY = Method(("lr", "leakage", "gain"), (Phase(leak, ("w", "charge")),), ("charge",))
VALUES = {"lr": 0.03, "leakage": 0.2, "gain": -0.7}


class Leaky(RuleOptimizer):
    """Its hyperparameters have names that the vocabulary does not have."""

    def __init__(
        self, params: Any, lr: float = 0.1, leakage: float = 0.5, gain: float = 1.0, **common: Any
    ) -> None:
        hyper = {"lr": lr, "leakage": leakage, "gain": gain}
        super().__init__(params, LEAKY, hyper, **common)


class NumpyLeaky:
    """What the rule means."""

    def __init__(self, name: str, weights: Arrays, seed: int, **values: float) -> None:
        self.weights, self.values = weights, {**VALUES, **values}
        self.charges = [np.zeros_like(w) for w in weights]

    def step(self, gradients: Arrays) -> None:
        for w, g, charge in zip(self.weights, gradients, self.charges, strict=True):
            charge += self.values["gain"] * g - self.values["leakage"] * charge
            w -= self.values["lr"] * charge


@needs_numba
def test_own_hyperparameters_in_fused_steps_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape) for shape in ((5, 4), (5,))]
    params = [nn.Parameter(torch.tensor(w)) for w in weights]
    groups = [{"params": params[:1]}, {"params": params[1:], "gain": 3.0}]
    opt = Leaky(groups, **VALUES, fused=True)
    plain = [NumpyLeaky("", weights[:1], 0), NumpyLeaky("", weights[1:], 0, gain=3.0)]
    for _ in range(3):
        gradients = [rng.normal(size=w.shape) for w in weights]
        for p, g, each in zip(params, gradients, plain, strict=True):
            p.grad = torch.tensor(g)
            each.step([g])
        opt.step()
        opt.param_groups[0]["leakage"] = plain[0].values["leakage"] = 0.9
    for p, w in zip(params, weights, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=0, atol=1e-12)


@needs_numba
def test_own_hyperparameters_in_a_stack_equal_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    from upgd.engine.dense_cpu import CpuStack

    monkeypatch.setitem(METHODS, "leaky", Row("leaky", "Leaky", Leaky, LEAKY))
    learners = [Learner("leaky", VALUES, SEED), Learner("leaky", {**VALUES, "gain": 2.0}, SEED)]
    found = stack_weights(dense(CpuStack, learners, STEPS, dtype=np.float64), learners, STEPS)
    for learner, weights in zip(learners, found, strict=True):
        rule = partial(NumpyLeaky, **learner.hyper)
        expected = numpy_learner("leaky", SEED, STEPS, rule)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9)


# ---------------------------------------------------------------------------------- kernels
def test_a_copy_of_upgd_gets_the_same_kernels() -> None:
    """So it is as fast: the source differs in the places of its numbers, not in its operations."""
    for name, ours in (("guarded-max", "upgd"), ("guarded-row-norm", "upgd-local")):
        mine, theirs = ROWS[name].method, METHODS[ours].method
        own = {"memory": "beta_utility", "shrink": "weight_decay"}
        order = [own.get(number, number) for number in mine.numbers]
        assert sorted(order) == sorted(theirs.numbers)
        places = {f"p{k}": f"p{theirs.numbers.index(n) - 2}" for k, n in enumerate(order[2:])}
        for stage in ("reduce", "update"):
            for target in ("torch", "numba", "triton"):
                text = source(mine, stage, target).split("\n", 1)[1]  # type: ignore[arg-type]
                same = "".join(places.get(word, word) for word in re.split(r"\b", text))
                assert same == source(theirs, stage, target).split("\n", 1)[1]  # type: ignore[arg-type]
        assert traces_utility(mine)
        assert gates_by_share(mine)
        assert not fills_padding(mine)


def test_what_kernels_assume_is_true_of_our_methods_alone() -> None:
    for name in ("sharp-max", "sharp-row-norm"):
        assert not traces_utility(ROWS[name].method)
        assert not gates_by_share(ROWS[name].method)
    for name in ("upgd", "n-upgd-2nd", "upgd-2nd-local", "ada-upgd", "ada-upgd-2nd"):
        assert traces_utility(METHODS[name].method)
        assert gates_by_share(METHODS[name].method)
    kept = {name for name, row in ROWS.items() if not fills_padding(row.method)}
    assert kept == {"l2-start", "guarded-max", "guarded-row-norm"}


# ------------------------------------------------------------------------------------- rows
def test_a_row_is_like_ours() -> None:
    row = ROWS["l2-start"]
    assert row.optimizer.__name__ == "L2Start"
    assert list(inspect.signature(row.optimizer.__init__).parameters) == [
        *("self", "params", "lr", "kappa", "common"),
    ]
    assert row.defaults == {"lr": 0.01, "kappa": 0.01}
    model = nn.Linear(3, 2)
    opt = row.make(model, kappa=0.5, seed=1)
    assert opt.param_groups[0]["kappa"] == 0.5
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        opt.step()
    other = row.make(model, seed=1)
    other.load_state_dict(opt.state_dict())
    assert torch.equal(other.state[model.weight]["start"], opt.state[model.weight]["start"])
    with pytest.raises(TypeError, match="unknown argument 'kapa'; there are lr, kappa, seed"):
        row.make(model, kapa=1.0)
    with pytest.raises(ValueError, match="L2Start: kappa must be a finite number >= 0, got -1"):
        row.make(model, kappa=-1.0)
    with pytest.raises(ValueError, match=r"memory must be in \[0, 1\), got 1"):
        ROWS["guarded-max"].make(model, memory=1.0)
    with pytest.raises(ValueError, match="bound must be a finite number, got nan"):
        ROWS["clipped"].make(model, bound=math.nan)


def test_noise_without_sigma_is_always_drawn() -> None:
    method = ROWS["jitter"].method
    assert method.is_perturbed({"lr": 0.1, "spread": 0.0})
    assert not METHODS["pgd"].method.is_perturbed({"lr": 0.1, "sigma": 0.0})


def test_a_tensor_step_size() -> None:
    found = []
    for lr in (0.03, torch.tensor(0.03, dtype=torch.float64)):
        p = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        p.grad = torch.ones_like(p)

        def capped(w: Any, g: Any, lr: Any) -> Any:
            return w - maximum(minimum(g * w, lr), -lr)

        rule_row("capped", capped, lr=0.1).optimizer([p], lr=lr).step()
        found.append(p.detach())
    assert torch.allclose(*found, rtol=0, atol=1e-12)


def test_the_source_is_that_of_the_arithmetic() -> None:
    def rule(w: Any, g: Any, lr: Any, pull: Any) -> Any:
        return w - lr * (g + pull * w)

    def same(w: Any, g: Any, pull: Any, lr: Any) -> Any:
        """Other words."""
        sum_ = g + pull * w  # other words
        return w - lr * sum_

    def other(w: Any, g: Any, lr: Any, pull: Any) -> Any:
        return w - lr * (g - pull * w)

    rows = [
        rule_row("mine", rule, lr=0.1, pull=0.1),
        rule_row("mine", same, pull=0.5, lr=0.2),
        rule_row("mine", other, lr=0.1, pull=0.1),
    ]
    digests = [row.source for row in rows]
    assert digests[0] == digests[1] != digests[2]
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)
    assert describe(rows[0].method) == describe(rows[1].method)
    assert all(row.source == "" for name, row in METHODS.items() if name not in ROWS)


# ----------------------------------------------------------------------------------- refusals
def few(w: Any, g: Any, m: Any, lr: Any) -> Any:
    return w - lr * (g + m)


def many(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g, g


def unknown(w: Any, g: Any, momentun: Any, lr: Any) -> Any:
    return w - lr * (g + momentun), g


def compares(w: Any, g: Any, lr: Any) -> Any:
    return max(w - lr * g, 0.0)


def branches(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g if g else w


def equals(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * (g == 0)


def mathematical(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * math.sqrt(g)


def numerical(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * np.maximum(g, 0.0)


def rooted(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g**0.5


def torchy(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * torch.tanh(g)


def scalar_root(w: Any, g: Any, lr: Any) -> Any:
    return w - sqrt(lr) * g


def constant(w: Any, g: Any, lr: Any) -> Any:
    return lr


def nothing(w: Any, g: Any, lr: Any) -> None:
    return None


def starred(w: Any, *others: Any) -> Any:
    return w


def plain(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g


def mistaken(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * misspelt  # type: ignore[name-defined]  # noqa: F821


def noisy_trace(w: Any, g: Any, noise: Any, u: Any) -> Any:
    return u + g * noise


def gated(w: Any, g: Any, u: Any, eta: Any, lr: Any) -> Any:
    return w - lr * g * sigmoid(u / eta)


def reads_eta(w: Any, g: Any, eta: Any, lr: Any) -> Any:
    return w - lr * g / eta


FIVE = ("a", "b", "c", "d", "e", "k")
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too few": (few, {"states": ["m"]}, r"few returns too few values, 1 where w, m are written"),
    "too many": (many, {}, r"many returns too many values, 2 where w is written"),
    "unknown argument": (
        unknown,
        {"states": ["momentum"]},
        r"unknown reads 'momentun'; it may read w, g, h, noise, momentum, lr, bound; did you mean",
    ),
    "no default": (few, {}, r"few reads 'm'.*A hyperparameter needs a default, m=0.1"),
    "max": (compares, {}, r"compares, line \d+ cannot.*maximum, minimum, clip or sign of upgd.lab"),
    "if": (branches, {}, r"a value cannot be a condition.*maximum, minimum, clip"),
    "==": (equals, {}, r"values cannot be compared \(if, max, min, <, ==\)"),
    "math": (mathematical, {}, r"math and numpy cannot be used; use sigmoid, sqrt"),
    "numpy": (numerical, {}, r"numerical, line \d+ cannot be a rule.*maximum, minimum or clip"),
    "power": (rooted, {}, r"whole powers from 1 to 8, not 0.5; use sqrt"),
    "torch": (torchy, {}, r"torchy, line \d+ cannot be a rule: TypeError"),
    "function of a scalar": (scalar_root, {}, r"sqrt is taken of hyperparameters alone"),
    "constant": (constant, {}, r"constant returns a hyperparameter for w; it must be something"),
    "nothing": (nothing, {}, r"nothing returns None for w"),
    "stars": (starred, {}, r"starred must name its arguments one by one"),
    "name error": (mistaken, {}, r"mistaken, line \d+ cannot be a rule: NameError"),
    "not a function": (3, {}, r"a rule must be a function, got 3"),
    "unread hyperparameter": (plain, {"kapa": 1.0}, r"no rule reads the hyperparameter kapa"),
    "unread state": (plain, {"states": {"start": "weight"}}, r"no rule reads the state start"),
    "start": (plain, {"states": {"start": "ones"}}, r"'start' must start as 'weight' or 'zero'"),
    "reserved": (plain, {"states": ["noise"]}, r"'noise' has a meaning of its own"),
    "taken": (plain, {"seed": 1.0}, r"'seed' has a meaning of its own"),
    "both": (plain, {"states": ["lr"]}, r"'lr' is the name of two things"),
    "decay of nothing": (plain, {"decays": {"m": "lr"}}, r"decays names 'm', which is no state"),
    "no such decay": (
        few, {"states": {"m": "weight"}, "decays": {"m": "b"}}, r"m decays by 'b', which is no"
    ),
    "writes": (many, {"writes": ("w", "v")}, r"writes names 'v'; there are w"),
    "text": (plain, {"kappa": "much"}, r"no rule reads the hyperparameter kappa"),
    "default": (plain, {"lr": -1.0}, r"lr must be a finite number >= 0, got -1"),
    "power of the rule": (plain, {"power": 1}, r"power must be a whole number, 2 or more, got 1"),
    "reduce alone": (plain, {"reduce": "max"}, r"reduce='max' needs two rules"),
    "no reduce": ((plain, plain), {}, r"two rules need reduce='max' or 'row_norm', got None"),
    "eta of one": (reads_eta, {}, r"reads_eta reads 'eta'; it may read w, g, h, noise, lr"),
    "trace of noise": (
        (noisy_trace, gated), {"states": ["u"], "reduce": "max"}, r"makes eta from 'noise'; the tra"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_refused_in_one_line(case: str) -> None:
    rule, given, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        rule_row("mine", rule, **{"lr": 0.1, **given})
    assert str(caught.value).startswith("mine: ")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="no hyperparameter is called lr"):
        rule_row("mine", plain, step=0.1)
    with pytest.raises(ValueError, match=r"lower-case letters and digits.*got 'L2 Init'"):
        rule_row("L2 Init", plain, lr=0.1)


def test_too_many_names() -> None:
    names = [f"h{i}" for i in range(15)]
    text = f"def rule(w, g, lr, {', '.join(names)}): return w - lr * (g + {' + '.join(names)})"
    found: dict[str, Any] = {}
    exec(text, found)
    with pytest.raises(ValueError, match=r"mine: it has 17 hyperparameters, .* room for 16"):
        rule_row("mine", found["rule"], lr=0.1, **dict.fromkeys(names, 0.1))
    text = f"def rule(w, g, lr, {', '.join(FIVE)}): return w - lr * g, {', '.join(FIVE)}"
    exec(text, found)
    with pytest.raises(ValueError, match=r"mine: it has 6 states, a, b, c, d, e, k; .* room for 5"):
        rule_row("mine", found["rule"], states=FIVE, lr=0.1)


@needs_numba
def test_as_many_names_as_there_is_room_for() -> None:
    names = [f"h{i}" for i in range(14)]
    found: dict[str, Any] = {}
    sum_ = " + ".join(f"{i + 1} * {name}" for i, name in enumerate(names))
    exec(f"def rule(w, g, lr, {', '.join(names)}): return w - lr * (g + {sum_})", found)
    row = rule_row("mine", found["rule"], lr=0.5, **{n: 10.0**-i for i, n in enumerate(names)})
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    p.grad = torch.zeros_like(p)
    row.optimizer([p], fused=True).step()
    expected = 1 - 0.5 * sum((i + 1) * 10.0**-i for i in range(14))
    assert p.tolist() == pytest.approx([expected] * 3, abs=1e-12)


def test_functions_of_an_absent_perturbation() -> None:
    """Where sigma is 0 a rule reads the number 0 as noise, on every path."""

    def rough(w: Any, g: Any, noise: Any, lr: Any, sigma: Any) -> Any:
        bump = absolute(noise) + sign(noise) + clip(noise, -1, 1) + sqrt(noise * noise)
        return w - lr * (g + sigma * (bump + exp(noise) * log(exp(noise)) + sigmoid(noise)))

    row = rule_row("rough", rough, lr=0.1, sigma=0.5)
    for path in PATHS:
        if path != "triton" and (path != "fused" or HAS["numba"]):
            p = nn.Parameter(torch.ones(2, dtype=torch.float64))
            p.grad = torch.full_like(p, 2.0)
            row.optimizer([p], sigma=0.0, **PATHS[path]).step()
            assert p.tolist() == pytest.approx([0.8, 0.8], abs=1e-12)
