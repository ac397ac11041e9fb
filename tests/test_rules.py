"""Every rule against an independent NumPy transcription of the paper's equations."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.cases import CounterNoise, every_rule
from upgd import Features, FeatureUPGD
from upgd.optim.registry import METHODS, Row

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

RELATIVE = 1e-9


class GivenNoise:
    """Hands out prepared noise, so that both sides see the same."""

    def __init__(self, steps: list[list[np.ndarray]]) -> None:
        self.steps = steps
        self.now = 0

    def draw(self, sizes: Any, offsets: Any, **_: Any) -> Tensor:
        places = np.cumsum([0] + [n.size for n in self.steps[0]])
        parts = [self.steps[self.now][int(np.searchsorted(places, o))].ravel() for o in offsets]
        return torch.as_tensor(np.concatenate(parts))


def shape_strategy() -> Any:
    side = st.integers(1, 5)
    shapes = st.one_of(
        st.tuples(side), st.tuples(side, side), st.tuples(side, side, side, st.integers(1, 2))
    )
    return st.lists(shapes, min_size=1, max_size=4)


def hyper_strategy(row: Row) -> Any:
    beta = st.one_of(st.just(0.0), st.sampled_from([0.5, 0.9, 0.999, 0.9999]), st.floats(0, 0.99))
    choices = {
        "lr": st.floats(1e-4, 0.5),
        "weight_decay": st.one_of(st.just(0.0), st.floats(0, 0.5)),
        "sigma": st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
        "beta_utility": beta,
        "output_gate": st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.01, 1.99)),
        "betas": st.tuples(beta, beta),
        "momentum": beta,
        "eps": st.sampled_from([1e-4, 1e-8]),
        "kappa": st.floats(0, 10),
        "beta_importance": beta,
        "beta_weight": beta,
        "meta_lr": st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
        "clip": st.floats(0.1, 5.0),
        "period": st.integers(1, 4),
        "sharpness": st.sampled_from([0.5, 1.0, 10.0]),
        "protecting": st.sampled_from([0.0, 0.3, 1.0]),
        "undoing": st.sampled_from([0.0, 0.3, 1.0]),
    }
    chosen = {name: choices[name] for name in row.method.hyper}
    if "protect" in row.options:
        chosen["protect"] = st.booleans()
    return st.fixed_dictionaries(chosen)


@st.composite
def problem(draw: Any, row: Row) -> dict[str, Any]:
    """Random shapes, groups, hyperparameters, gradients, pauses."""
    if "gates" in row.needs:
        sizes = draw(st.lists(st.integers(1, 4), min_size=3, max_size=4))
        shapes = []
        for fan_in, fan_out in itertools.pairwise(sizes):
            shapes += [(fan_out, fan_in), (fan_out,)]
    else:
        shapes = draw(shape_strategy())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    groups = draw(st.lists(hyper_strategy(row), min_size=1, max_size=2))
    pauses = draw(st.booleans())
    layers = len(shapes) // 2 - 1
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        gradients: list[Any] = [size * rng.standard_normal(s) for s in shapes]
        if pauses:
            gradients = [None if rng.random() < 0.3 else g for g in gradients]
        dead = rng.random() < 0.2  # ReLU networks have exact zeros
        steps.append(
            {
                "g": [g if g is None else (0.0 * g if dead else g) for g in gradients],
                "noise": [rng.standard_normal(s) for s in shapes],
                "h": [size * rng.standard_normal(s) for s in shapes],
                "f": [size * rng.standard_normal(shapes[2 * i][0]) for i in range(layers)],
                "s": [size * rng.standard_normal(shapes[2 * i][0]) for i in range(layers)],
            }
        )
    return {
        "weights": [size * rng.standard_normal(s) for s in shapes],
        "steps": steps,
        "groups": groups,
        "group_of": [int(rng.integers(len(groups))) for _ in shapes],
        "maximize": draw(st.booleans()),
        "foreach": draw(st.booleans()),
        "nonfinite": draw(st.sampled_from(["raise", "skip"])),
        "layers": layers,
    }


def by_library(row: Row, case: dict[str, Any]) -> list[list[np.ndarray]]:
    """The library's weights after each step."""
    params = [torch.nn.Parameter(torch.as_tensor(w.copy())) for w in case["weights"]]
    used = sorted(set(case["group_of"]))
    groups = [
        {
            "params": [p for p, g in zip(params, case["group_of"], strict=True) if g == index],
            **case["groups"][index],
        }
        for index in used
    ]
    order = sorted(range(len(params)), key=lambda i: (case["group_of"][i], i))
    noise = GivenNoise([[step["noise"][i] for i in order] for step in case["steps"]])
    arguments = {
        **row.options,
        "noise": noise,
        "maximize": case["maximize"],
        "foreach": case["foreach"],
        "nonfinite": case["nonfinite"],
    }
    if "gates" in row.needs:
        model = torch.nn.Sequential()
        for i in range(0, len(params), 2):
            fan_out, fan_in = params[i].shape
            layer = torch.nn.Linear(fan_in, fan_out, dtype=torch.float64)
            layer.weight, layer.bias = params[i], params[i + 1]
            model.append(layer)
        arguments["features"] = Features(model)
    opt = row.optimizer(groups, **arguments)
    history = []
    for noise.now, step in enumerate(case["steps"]):
        for p, g, h in zip(params, step["g"], step["h"], strict=True):
            p.grad = None if g is None else torch.as_tensor(g.copy())
            if "curvature" in row.needs and "gates" not in row.needs and g is not None:
                p.curvature = torch.as_tensor(h.copy())
        if isinstance(opt, FeatureUPGD):
            for layer, f, s in zip(opt.features.layers, step["f"], step["s"], strict=True):
                layer.first, layer.second = torch.as_tensor(f.copy()), torch.as_tensor(s.copy())
        opt.step()
        history.append([p.detach().numpy().copy() for p in params])
    return history


def by_reference(row: Row, case: dict[str, Any]) -> list[list[np.ndarray]]:
    into = None
    if "gates" in row.needs:
        into = [i // 2 if i // 2 < case["layers"] else None for i in range(len(case["weights"]))]
    return reference.simulate(
        row.name,
        case["weights"],
        case["steps"],
        [case["groups"][g] for g in case["group_of"]],
        into=into,
        maximize=case["maximize"],
    )


def assert_same(ours: list[list[np.ndarray]], theirs: list[list[np.ndarray]], scale: float) -> None:
    """Equal to `RELATIVE`; `scale` is the size of the terms of which small weights are sums."""
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            tolerance = RELATIVE * np.maximum(np.abs(y), scale)
            assert np.all(np.abs(x - y) <= tolerance), (step, i, x, y)


@every_rule
@pytest.mark.parametrize("examples", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_equals_the_equations(row: Row, examples: int) -> None:
    check_equations(row, examples)


def check_equations(row: Row, examples: int, **settings: Any) -> None:
    """Hundreds of steps over random shapes, groups, hyperparameters and pauses."""

    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, **settings
    )
    @hypothesis.given(problem(row))
    def check(case: dict[str, Any]) -> None:
        theirs = by_reference(row, case)
        finite = all(np.isfinite(w).all() for step in theirs for w in step)
        growth = max(np.abs(w).max() for step in theirs for w in step) if finite else np.inf
        hypothesis.assume(growth < 1e6)  # beyond, only rounding would be tested
        assert_same(by_library(row, case), theirs, 1e-3 * growth)

    check()


@pytest.mark.parametrize("name", ["upgd", "upgd-local", "feature-upgd", "ada-upgd"])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("utilities", ["negative", "zero", "largest is zero", "single"])
def test_order_is_kept_whatever_the_sign(
    name: str, foreach: bool, nonfinite: Any, utilities: str
) -> None:
    """A more useful weight is never gated less, and nothing becomes NaN."""
    row = METHODS[name]
    values = {
        "negative": [-4.0, -3.0, -2.0, -1.0],
        "zero": [0.0] * 4,
        "largest is zero": [-2.0, -1.0, 0.0, 0.0],
        "single": [-1.0],
    }[utilities]
    u = torch.tensor(values)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, len(u), bias=False), torch.nn.Linear(len(u), 1, bias=False)
    )
    torch.nn.init.ones_(model[0].weight)
    opt = row.make(model, foreach=foreach, nonfinite=nonfinite, sigma=0.0)
    for _ in range(3):
        before = model[0].weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        # First-order utility is -g·w (weights) or -f (features): choose it to be u.
        model[0].weight.grad = -u.reshape(-1, 1) / before
        if isinstance(opt, FeatureUPGD):
            opt.features.layers[0].first = -u
        opt.step()
        assert torch.isfinite(model[0].weight).all()
    scaled = opt.scaled_utility(model[0].weight).flatten()
    assert torch.isfinite(scaled).all()
    assert ((scaled >= 0) & (scaled <= 1)).all()
    order = torch.argsort(opt.utility(model[0].weight).flatten())
    assert (scaled[order].diff() >= 0).all()
    if utilities == "zero":
        assert torch.equal(scaled, torch.full_like(scaled, 0.5))
    if utilities == "largest is zero" and row.options.get("scaling") != "local":
        assert scaled[-1] == 0.5
        assert scaled[0] == 0.0


def test_reference_noise_is_a_function_of_its_key() -> None:
    key = {"seed": 1, "device": "cpu", "dtype": torch.float32}
    a = CounterNoise().draw([3], [0], step=1, **key)
    assert torch.equal(a, CounterNoise().draw([3], [0], step=1, **key))
    assert not torch.equal(a, CounterNoise().draw([3], [0], step=2, **key))
