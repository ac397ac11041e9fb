"""Layered stacks by Triton kernels: on CUDA where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")

from tests import layered_methods
from tests.stacks import feed, numbers, plain, regress, small
from tests.waiting import PATIENCE
from upgd.engine import layered_cuda
from upgd.engine.dense import Learner
from upgd.engine.layered_cuda import LayeredCudaStack
from upgd.kernels.layered import kept_names
from upgd.kernels.layout import Layout
from upgd.kernels.rules import load_module
from upgd.kernels.triton_layered import written
from upgd.kernels.triton_program import Program, Tiles
from upgd.networks import build

# The interpreter computes padding, too, and what diverges.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid|overflow):RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, TASK = (200, 100) if DEVICE == "cuda" else (4, 3)
SIZES = (16, 7, 6, 10)
SMALL = Tiles(rows=4, columns=16, back_rows=8, back_columns=4, warps=1)
"""Smaller than the layers, so that there are several tiles."""


@pytest.fixture(autouse=True)
def methods() -> None:
    layered_methods.add()


def digits(seed: int) -> Any:
    return small(seed, TASK)


def make(learners: Sequence[Learner], sizes: Sequence[int] = SIZES, **options: Any) -> Any:
    common: dict[str, Any] = {"activation": "relu", "loss": "cross_entropy", "window": 1}
    common |= {"steps": STEPS, "device": DEVICE, "dtype": torch.float64}
    return LayeredCudaStack(Layout(tuple(sizes)), learners, **{**common, **options})


def run(stack: Any, samples: Any, *stops: int) -> None:
    for stop in stops:
        stack.advance(samples.chunk(stack.step, stop - stack.step))


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-9, atol=1e-9)


# --------------------------------------------------------------------- the plain version
RECYCLING = {"rate": 0.2, "maturity": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "centred-sgd, small tiles": {"tiles": SMALL, "sizes": (16, 5, 10)},
    "centred-sgd": {},
    "biases-after, one layer": {"sizes": (16, 10)},
    "everywhere, both norms": {
        "activation": "tanh", "layer_norm": True, "input_norm": True, "sizes": (16, 5, 10),
    },
    "biases-after, regression": {"loss": "squared_error", "sizes": (16, 6, 5, 1)},
    "anchored": {"activation": "tanh"},
    "recycled": {"hyper": RECYCLING, "tiles": SMALL},
    "dormant": {"hyper": {"period": 2.5}},
    "dormant, every other step": {"hyper": {"period": 2}},
    "upgd, layer norm": {"layer_norm": True, "hyper": {"head.beta_utility": 0.5}},
    "adamw, input norm": {"input_norm": True},
}  # fmt: skip
SLOW = ("recycled", "everywhere, both norms")


def compare(case: str, steps: int = STEPS) -> Any:
    """A stack of one, in chunks, with the plain optimizer; returns the optimizer's states."""
    options = dict(CASES[case])
    sizes = options.pop("sizes", SIZES)
    learner = Learner(case.split(",")[0], options.pop("hyper", {}), 3)
    stream = regress if "regression" in case else digits
    stack = make([learner], sizes, **options)
    run(stack, feed([learner], stream), 1, *range(TASK, steps, TASK), steps)
    norms = {k: options.get(k, False) for k in ("layer_norm", "input_norm")}
    model = build(sizes, 3, options.get("activation", "relu"), **norms)
    kept: list[Any] = []
    trace = plain(learner, stream(3), steps, sizes, model=model, kept=kept)
    weights = numbers(stack.weights[0])
    close(weights[stack.layout.places], trace.weights)
    padding = np.setdiff1d(np.arange(stack.layout.size), stack.layout.places)
    assert not weights[padding].any()
    for column, values in enumerate((trace.losses, trace.plasticity, trace.right)):
        close(stack.series[0, :steps, column], values)
    compare_states(stack, kept[0])
    assert int(stack.diverged[0]) == -1
    return kept[0].state


def compare_states(stack: Any, optimizer: Any) -> None:
    """All that the optimizer keeps, at weights and at other places."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    method = stack.groups[0].row.method
    for k, name in enumerate(method.states if method.layered else ()):
        states = torch.cat([optimizer.state[p][name].flatten() for p in params])
        close(stack.states[0][k, 0][stack.layout.places], states)
    for place, name in kept_names(method):
        for layer in stack.layout.layers:
            owner = params[2 * layer.number + (2 if place == "features" else 0) :][:1]
            if place == "network":
                owner = params[:1]
            if owner:
                expected = optimizer.state[owner[0]][f"{place}.{name}"].reshape(-1)
                at = stack.layouts[0].at(place, name, layer.number)
                close(stack.kept[0][0, at : at + len(expected)], expected)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES]
)
def test_equals_the_plain_optimizer(case: str) -> None:
    states = compare(case)
    ages = [state["features.age"] for state in states.values() if "features.age" in state]
    recycles = case.split(",")[0] in ("recycled", "dormant")
    assert recycles == any((age < STEPS).any() for age in ages)  # else nothing was compared


# ---------------------------------------------------------------------------------- bits
def test_bits_depend_neither_on_others_nor_on_chunks() -> None:
    """Also after a run was interrupted, and where another one is restarted."""
    learners = [Learner("centred-sgd", {"lr": 0.1}, seed) for seed in (1, 2)]
    learners.insert(1, Learner("sgdw", {}, 3))
    options: dict[str, Any] = {"dtype": torch.float32, "input_norm": True, "layer_norm": True}
    together, alone, resumed = make(learners, **options), *(
        make(learners[2:], **options) for _ in range(2)
    )  # fmt: skip
    samples, own = feed(learners, digits), feed(learners[2:], digits)
    run(together, samples, 1, 2)
    place = together.order.index(2)
    resumed.restore(0, together.state(place))
    resumed.step = 2
    together.restart(1, [together.order.index(0)])
    run(together, samples, 3)
    run(alone, own, 3)
    run(resumed, own, 3)
    for name, expected in alone.state(0).items():
        np.testing.assert_array_equal(together.state(place)[name], expected, err_msg=name)
        np.testing.assert_array_equal(resumed.state(0)[name], expected, err_msg=name)


def test_a_restarted_learner_counts_from_one() -> None:
    """Its steps and its inputs' statistics: it is a new one that begins later in the stream."""
    learner = Learner("centred-sgd", {"lr": 0.1}, 1)
    restarted, late = (make([learner], input_norm=True) for _ in range(2))
    samples = feed([learner], digits)
    run(restarted, samples, 1)
    restarted.restart(0)
    late.step = 1
    late.restart(0)
    for stack in (restarted, late):
        run(stack, samples, 3)
    for name in ("weights", "kept", "statistics", "began"):
        np.testing.assert_array_equal(restarted.state(0)[name], late.state(0)[name])
    assert late.state(0)["began"] == 1


# ------------------------------------------------------------------------------- metrics
def test_divergence_is_noticed_and_diagnostics_are_measured() -> None:
    learner = Learner("sgdw", {"lr": 1e200, "weight_decay": 0.0}, 1)
    stack = make([learner], stride=1)
    run(stack, feed([learner], digits), TASK)
    assert 0 < int(stack.diverged[0]) < TASK
    model = build(SIZES, 1).to(torch.float64)
    x, y = (torch.from_numpy(part) for part in digits(1).at(0))
    zeros: list[torch.Tensor] = []
    for layer in model:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(lambda *a: zeros.append(a[2].detach()[0] == 0))
    F.cross_entropy(model(x.double()), y).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    expected = [float(torch.cat(zeros).double().mean()), float((gradient != 0).double().mean())]
    expected += [float(gradient.norm(1)), float(gradient.norm()), 1.0]
    close(stack.series[0, 0, 3:], expected)


# ------------------------------------------------------------------------------- mutants
MUTANTS = {
    "t begins at 2": ("centred-sgd", "t = (step - born + 1)", "t = (step - born + 2)"),
    "the last sample twice": ("centred-sgd", "tl.fma(w0, y[", "tl.fma(w0, x["),
    "biases move twice": ("centred-sgd", "owned = (cols < 16)", "owned = (cols <= 16)"),
    "the next one counts twice": ("adamw, input norm", "here + 1 < steps", "here + 1 <= steps"),
    "not back through LayerNorm": ("upgd, layer norm", "unsettle(delta + 0", "unsettle(delta + 7"),
    "eta of one layer": ("upgd, layer norm", "tl.maximum(eta0, top2", "tl.maximum(eta0, top0"),
    "too few units go": ("dormant", "for _ in range(count)", "for _ in range(count - 1)"),
    "old products": ("dormant, every other step", "if renewed > 0", "if renewed > 99"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_errors_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = MUTANTS[name]

    def compile_mutant(program: Program) -> Any:
        text = written(program)
        assert old in text
        return load_module(text.replace(old, new), "layered_mutant").learn

    monkeypatch.setattr(layered_cuda, "compile_program", compile_mutant)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(case)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_hopper() -> None:
    """They become machine code for sm_90 on a machine without a GPU."""
    script = [sys.executable, "-m", "tests.compile_layered"]
    plain = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        script, capture_output=True, text=True, timeout=PATIENCE, check=False, env=plain
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "adamw" in done.stdout
