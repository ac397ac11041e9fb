"""Layered stacks by Triton kernels: on CUDA where there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("triton")

from tests.stacks import feed, numbers
from tests.waiting import PATIENCE
from upgd.engine.dense import Learner
from upgd.engine.layered_cuda import LayeredCudaStack
from upgd.kernels.layout import Layout
from upgd.kernels.triton_program import Tiles
from upgd.metrics import sample_plasticity
from upgd.networks import OnlineNorm, build
from upgd.optim.layered import LayerOptimizer
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import METHODS, Row
from upgd.rules.ops import absolute, maximum
from upgd.rules.vocabulary import Method, Phase, Recycle
from upgd.streams.stream import Sample

# The interpreter computes padding, too, and what diverges.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid|overflow):RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 200 if DEVICE == "cuda" else 5
SIZES = (5, 7, 6, 3)
SMALL = Tiles(rows=4, columns=8, back_rows=2, back_columns=4, warps=1)
"""Smaller than the layers, so that there are several tiles."""


class Tiny:
    """Inputs with a mean that is not zero; `loss` decides what is to be learned from them."""

    def __init__(self, seed: int, loss: str = "cross_entropy") -> None:
        self.seed, self.loss, self.shape = seed, loss, SIZES[:1]
        rng = np.random.default_rng(seed)
        self.x = (rng.normal(size=(STEPS + 2, SIZES[0])) + 0.5).astype(np.float32)
        self.y = rng.integers(0, SIZES[-1], STEPS + 2)
        if loss == "squared_error":
            self.y = rng.normal(size=(STEPS + 2, SIZES[-1])).astype(np.float32)

    def at(self, step: int, batch: int = 1) -> Sample:
        """One sample."""
        return Sample(self.x[step : step + batch], self.y[step : step + batch])


def register(
    monkeypatch: pytest.MonkeyPatch, name: str, method: Method, **defaults: float
) -> Learner:
    """A learner with a method that the registry does not have."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in defaults.items())
    given = ", ".join(f"{key}={key}" for key in defaults)
    scope: dict[str, Any] = {"LayerOptimizer": LayerOptimizer, "METHOD": method}
    exec(
        "class Own(LayerOptimizer):\n"
        f"    def __init__(self, params, {arguments}, **common):\n"
        f"        super().__init__(params, METHOD, dict({given}), **common)\n",
        scope,
    )
    monkeypatch.setitem(METHODS, name, Row(name, name, scope["Own"], method))
    return Learner(name, {}, 3)


def plain(
    learner: Learner, stream: Tiny, steps: int, sizes: tuple[int, ...], **network: Any
) -> Any:
    """Weights, metrics of each step and the optimizer of a loop with autograd."""
    model = build(sizes, learner.seed, **network).to(torch.float64)
    noise = PhiloxNoise([tuple(p.shape) for p in model.parameters()])
    optimizer = learner.row.make(model, **learner.all_hyper(), seed=learner.seed, noise=noise)
    found = []
    for step in range(steps):
        x, y = (torch.from_numpy(part) for part in stream.at(step))
        x, y = x.double(), y.double() if y.is_floating_point() else y
        loss_of: Callable[..., Any] = F.mse_loss if y.is_floating_point() else F.cross_entropy
        output = model(x)
        loss = loss_of(output, y)
        optimizer.zero_grad()
        optimizer.backward(loss) if hasattr(optimizer, "backward") else loss.backward()
        optimizer.step()
        for part in model.modules():
            part.train(not isinstance(part, OnlineNorm))
        with torch.no_grad():
            after = float(loss_of(model(x), y))
        model.train()
        right = float((output.argmax(1) == y).sum()) if y.dim() == 1 else 0.0
        found.append((loss.item(), sample_plasticity([loss.item()], [after]).item(), right))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    return weights, np.array(found), optimizer


def make(learners: list[Learner], sizes: tuple[int, ...] = SIZES, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        **{"activation": "relu", "loss": "cross_entropy", "steps": STEPS, "window": 1},
        **{"device": DEVICE, "dtype": torch.float64},
        **changes,
    }
    return LayeredCudaStack(Layout(sizes), learners, **settings)


def run(stack: Any, learners: list[Learner], *stops: int, loss: str = "cross_entropy") -> None:
    samples = feed(learners, lambda seed: Tiny(seed, loss))
    for stop in stops:
        stack.advance(samples.chunk(stack.step, stop - stack.step))


def check(
    learner: Learner, sizes: tuple[int, ...] = SIZES, loss: str = "cross_entropy", **network: Any
) -> Any:
    """Compare a stack of one with the plain loop; returns both, for more."""
    tiles = network.pop("tiles", Tiles())
    stack = make([learner], sizes, loss=loss, tiles=tiles, **{"activation": "relu", **network})
    run(stack, [learner], 2, STEPS, loss=loss)
    weights, metrics, optimizer = plain(learner, Tiny(learner.seed, loss), STEPS, sizes, **network)
    found = numbers(stack.weights[0])
    np.testing.assert_allclose(found[stack.layout.places], weights, rtol=1e-9, atol=1e-11)
    series = numbers(stack.series[0])
    np.testing.assert_allclose(series[:, :3], metrics, rtol=1e-9, atol=1e-9)
    padding = np.setdiff1d(np.arange(stack.layout.size), stack.layout.places)
    assert not found[padding].any()
    assert int(stack.diverged[0]) == -1
    return stack, optimizer


def check_kept(stack: Any, optimizer: Any) -> None:
    """Compare the states at places other than weights."""
    layout, kept = stack.layouts[0], numbers(stack.kept[0][0])
    count = len(stack.layout.layers)
    for number, watched in enumerate(optimizer.layers.all):
        for key, value in optimizer.state[watched.weight].items():
            place, _, name = key.partition(".")
            if not name or (place == "features" and number == 0):
                continue
            at = layout.at(place, name, number - (place == "features"))
            found = kept[at : at + value.numel()]
            np.testing.assert_allclose(found, value.flatten().numpy(), rtol=1e-9, atol=1e-12)
    assert count == len(optimizer.layers.all)


# -------------------------------------------------------------------------- methods
# fmt: off
EVERYTHING = Method(
    hyper=("lr", "rate"),
    phases=(
        Phase(lambda x, mean, size, rate: (mean + rate * (x - mean), x * x - 0.1 * size),
              writes=("mean",), over="inputs", sums=("size",)),
        Phase(lambda d, push, rate: (push + rate * (absolute(d) - push), d * d),
              writes=("push",), over="units", sums=("force",)),
        Phase(lambda size, force, level, t, head, first, bound: (
                  level + (size + force - level) / t, force * (1 + head) + first * bound),
              writes=("level",), over="layers", sums=("all_force",)),
        Phase(lambda all_force, pace, t, lr: lr * (0.5 * pace + 0.5 / (1 + all_force)) + 0.01 / t,
              writes=("pace",), over="network"),
        Phase(lambda w, g, slow, mean, push, pace, level: (
                  w - pace * (g - 0.1 * push * mean), 0.9 * slow + 0.1 * w,
                  g * slow / (1 + absolute(level))),
              writes=("w", "slow"), sums=("drift",)),
        Phase(lambda w, d, pace, head: (w - pace * d * (2 - head), d * w), writes=("w",),
              over="biases", sums=("bias_drift",)),
        Phase(lambda x, w_in, w_out, use, bound: use + 0.1 * (absolute(x) * w_out / w_in + bound),
              writes=("use",), over="features"),
        Phase(lambda drift, bias_drift, pull: (0.9 * pull + drift - bias_drift, drift),
              writes=("pull",), over="layers", sums=("drifts",)),
        Phase(lambda drifts, pace: maximum(pace - 0.001 * drifts, 0.0), writes=("pace",),
              over="network"),
    ),
    states=("slow",),
    starts_as_weight=frozenset({"slow"}),
    kept={"inputs": ("mean",), "units": ("push",), "features": ("use",),
          "layers": ("level", "pull"), "network": ("pace",)},
    starts={"mean": 0.25, "use": 1.5, "pace": 0.2, "size": 1.0},
)
MOVE = Phase(lambda w, g, noise, slow, lr: (w - lr * (g + 0.01 * noise), 0.9 * slow + 0.1 * w),
             writes=("w", "slow"))
USE = Phase(lambda x, use, mean, w_out: (0.5 * use + absolute(x) * w_out, mean + 0.2 * (x - mean)),
            writes=("use", "mean"), over="features")
RECYCLERS = {
    "share": Recycle("use", share="rate", mature="old", average="mean"),
    "threshold": Recycle("use", threshold="rate", every="old"),
}
# fmt: on


# ---------------------------------------------------------------------------- tests
def test_it_equals_the_plain_optimizer() -> None:
    """Weights, what is kept and metrics, over several chunks."""
    check_kept(*check(Learner("centred-sgd", {"lr": 0.1}, 1), tiles=SMALL))


@pytest.mark.parametrize("sizes", [SIZES[:1] + SIZES[-1:], (5, 9, 3)], ids=str)
def test_networks_of_one_and_of_two_layers(sizes: tuple[int, ...]) -> None:
    check(Learner("centred-sgd", {"lr": 0.1}, 2), sizes, "squared_error", activation="tanh")


def test_every_place_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = register(monkeypatch, "everything", EVERYTHING, lr=0.3, rate=0.2)
    check_kept(*check(learner, activation="tanh"))


@pytest.mark.parametrize("kind", RECYCLERS)
def test_units_are_renewed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method(
        hyper=("lr", "rate", "old"),
        phases=(MOVE, USE),
        states=("slow",),
        starts_as_weight=frozenset({"slow"}),
        kept={"features": ("use", "mean")},
        recycle=RECYCLERS[kind],
    )
    rate, old = (0.1, 1.0) if kind == "share" else (0.6, 2.0)
    learner = register(monkeypatch, kind, method, lr=0.05, rate=rate, old=old)
    stack, optimizer = check(learner)
    check_kept(stack, optimizer)
    ages = [s["features.age"] for s in optimizer.state.values() if "features.age" in s]
    assert all((age < STEPS).any() for age in ages[1:])  # else nothing was renewed


@pytest.mark.parametrize(
    ("method", "network"),
    [("upgd", {"layer_norm": True}), ("adamw", {"input_norm": True, "activation": "tanh"})],
)
def test_elementwise_methods_with_norms(method: str, network: dict[str, Any]) -> None:
    hyper = {"sigma": 0.1} if method == "upgd" else {}
    check(Learner(method, {"lr": 0.05, **hyper}, 4), **network)


def test_results_depend_neither_on_chunks_nor_on_neighbours() -> None:
    """Bit for bit, also after a run was interrupted and where another one is restarted."""
    learners = [Learner("centred-sgd", {"lr": 0.1}, 1), Learner("sgdw", {}, 2)]
    learners.append(Learner("centred-sgd", {"lr": 0.2}, 3))
    options: dict[str, Any] = {"dtype": torch.float32, "input_norm": True, "layer_norm": True}
    together, alone = make(learners, **options), make(learners[2:], **options)
    run(together, learners, 1, 2)
    place = together.order.index(2)
    saved = together.state(place)
    together.restart(1, [together.order.index(0)])
    run(together, learners, 4)
    run(alone, learners[2:], 4)
    resumed = make(learners[2:], **options)
    resumed.step = 2
    resumed.restore(0, saved)
    run(resumed, learners[2:], 4)
    for name, expected in alone.state(0).items():
        np.testing.assert_array_equal(together.state(place)[name], expected, err_msg=name)
        np.testing.assert_array_equal(resumed.state(0)[name], expected, err_msg=name)


def test_a_restarted_learner_is_a_new_one() -> None:
    """Its steps and its statistics count from one again."""
    learner = Learner("centred-sgd", {"lr": 0.1}, 1)
    stack = make([learner], input_norm=True)
    run(stack, [learner], 2)
    stack.restart(0)
    stream = Tiny(learner.seed)
    run(stack, [learner], 5)
    stream.x, stream.y = stream.x[2:], stream.y[2:]
    weights, _, _ = plain(learner, stream, 3, SIZES, input_norm=True)
    found = numbers(stack.weights[0])[stack.layout.places]
    np.testing.assert_allclose(found, weights, rtol=1e-9, atol=1e-11)


def test_divergence_is_noticed_and_diagnostics_are_measured() -> None:
    learner = Learner("sgdw", {"lr": 1e200, "weight_decay": 0.0}, 1)
    stack = make([learner], stride=1)
    run(stack, [learner], 4)
    assert 0 < int(stack.diverged[0]) < 4
    model = build(SIZES, 1).to(torch.float64)
    x, y = (torch.from_numpy(part) for part in Tiny(1).at(0))
    zeros = []
    for layer in model:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(lambda *a: zeros.append(float((a[2] == 0).double().mean())))
    F.cross_entropy(model(x.double()), y).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    expected = [np.mean(zeros), float((gradient != 0).double().mean())]
    expected += [float(gradient.norm(1)), float(gradient.norm()), 1.0]
    np.testing.assert_allclose(numbers(stack.series[0])[0, 3:], expected, rtol=1e-9)


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
