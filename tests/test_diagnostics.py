"""Diagnostics at a stride: what is measured, at which steps, and that every engine agrees."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.stacks import feed, numbers
from tests.stacks import small as digits
from upgd.engine import EagerRun, Setting, batched
from upgd.engine.batched import BatchedRun
from upgd.engine.dense import COLUMNS, Learner, replay
from upgd.engine.general import GeneralStack
from upgd.engine.measuring import is_measured, measured_steps
from upgd.kernels.layout import Layout
from upgd.metrics import UTILITIES
from upgd.networks import build
from upgd.streams import get

pytestmark = pytest.mark.filterwarnings("ignore:(invalid|overflow):RuntimeWarning")
SIZES = (16, 18, 3, 10)  # hidden layers whose shares of zeros count very differently
STEPS, STRIDE, TASK = 6, 2, 3
LEARNER = Learner("sgdw", {"lr": 0.3, "weight_decay": 0.0}, 3)
MEASURED = COLUMNS[3:7]


# ------------------------------------------------------------------------- which steps
def philox(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int = 7) -> int:
    """The first word of Philox4x32, from its authors' definition."""
    a, b, c, d = counter
    j, k = key
    for _ in range(rounds):
        one, two = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (two >> 32) ^ b ^ j, two % 2**32, (one >> 32) ^ d ^ k, one % 2**32
        j, k = (j + 0x9E3779B9) % 2**32, (k + 0xBB67AE85) % 2**32
    return a


def expected_steps(steps: int, stride: int) -> list[int]:
    """One step of each block, by the definition in upgd.engine.measuring."""
    places = [
        block * stride + philox((block, 0, 0, 0), (0x5A3B1E5, 0xD1A6)) * stride // 2**32
        for block in range(-(-steps // stride))
    ]
    return [step for step in places if step < steps]


@pytest.mark.parametrize(("steps", "stride"), [(12, 1), (5000, 3), (10_007, 100), (7, 10**12)])
def test_one_step_of_each_block_is_measured(steps: int, stride: int) -> None:
    flags = measured_steps(steps, stride)
    assert len(flags) == steps
    assert np.flatnonzero(flags).tolist() == expected_steps(steps, stride)
    assert [is_measured(step, stride) for step in range(steps)] == flags.astype(bool).tolist()
    assert not measured_steps(steps, 0).size
    assert not is_measured(0, 0)


@pytest.mark.parametrize("task", [200, 2_500, 5_000])
def test_no_place_of_a_task_is_preferred(task: int) -> None:
    """With the paper's stride, which divides the lengths of all its tasks."""
    flags = measured_steps(1_000_000, 100).reshape(-1, task)
    share = flags.mean(0)  # of tasks in which each place is measured
    tasks = len(flags)
    assert abs(share - 0.01).max() < 6 * np.sqrt(0.01 * 0.99 / tasks)
    assert 0.7 < share.var() / (0.01 * 0.99 / tasks) < 1.3  # as of independent draws
    assert (flags.sum(1) == task // 100).all()  # each task is measured as often


def test_blocks_are_independent_of_each_other() -> None:
    places = np.flatnonzero(measured_steps(1_000_000, 100)) % 100
    counts = np.bincount(places, minlength=100)
    statistic = ((counts - 100) ** 2 / 100).sum()  # chi-squared with 99 degrees of freedom
    assert 60 < statistic < 150
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.04


# --------------------------------------------------------------------- what is measured
def convolutional(seed: int = 3) -> nn.Sequential:
    """64 outputs after the filters, 3 after the hidden layer."""
    torch.manual_seed(seed)
    layers = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(3, 10)).double()


def dense(seed: int = 3) -> nn.Sequential:
    return build(SIZES, seed).double()


def plain(model: nn.Sequential, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Diagnostics [STEPS, 4] of plain gradient descent, counted layer by layer."""
    parameters, found = list(model.parameters()), []
    for step in range(STEPS):
        x, y = (torch.from_numpy(part) for part in digits(LEARNER.seed, TASK).at(step))
        h, zeros, outputs = x.double().view(1, *shape), 0, 0
        for layer in model:
            h = layer(h)
            if isinstance(layer, nn.ReLU):
                zeros, outputs = zeros + int((h == 0).sum()), outputs + h.numel()
        gradients = torch.autograd.grad(F.cross_entropy(h, y), parameters)
        flat = np.concatenate([g.numpy().ravel() for g in gradients])
        row = [zeros / outputs, (flat != 0).mean(), np.abs(flat).sum(), np.sqrt((flat**2).sum())]
        found.append(row)
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p -= LEARNER.hyper["lr"] * g
    return np.array(found)


class Doubles(NamedTuple):
    """A stream in double precision, for the eager engine."""

    stream: Any
    loss: str = "cross_entropy"
    task_length: int = TASK

    def at(self, step: int, batch: int = 1) -> tuple[Any, Any]:
        x, y = self.stream.at(step, batch)
        return x.astype(np.float64), y


def eager(model: nn.Module) -> np.ndarray[Any, Any]:
    setting = Setting("sgdw", LEARNER.hyper, LEARNER.seed, window=1, stride=STRIDE)
    run = EagerRun(Doubles(digits(LEARNER.seed, TASK)), lambda seed, task: model, setting)
    run.advance(STEPS)
    return np.array([run.meter.series(name) for name in MEASURED]).T


def stacked(stack: Any) -> np.ndarray[Any, Any]:
    """The last learner's, in chunks of several lengths."""
    samples = feed(stack.learners, partial(digits, task_length=TASK))
    for stop in (1, 3, 5, STEPS):
        stack.advance(samples.chunk(stack.step, stop - stack.step))
    sums = numbers(stack.series[-1])[:, 3:]
    with np.errstate(invalid="ignore"):
        return np.asarray(sums[:, :4] / sums[:, 4:])


OTHER = Learner("sgdw", {}, 8)
COMMON: dict[str, Any] = {"loss": "cross_entropy", "steps": STEPS, "window": 1, "stride": STRIDE}


def general(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    more = {"shape": shape, "dtype": torch.float64, **COMMON}
    return stacked(GeneralStack(lambda seed, task: make(), [OTHER, LEARNER], **more))


def with_module(name: str, needs: str, **options: Any) -> np.ndarray[Any, Any]:
    """A stack of dense networks, by the name of its class."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    module, _, called = name.partition(":")
    make = getattr(importlib.import_module(f"upgd.engine.{module}"), called)
    common = {"activation": "relu", "dtype": torch.float64, **COMMON, **options}
    return stacked(make(Layout(SIZES), [LEARNER], **common))


DEVICE = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
ENGINES: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "eager": lambda: eager(dense()),
    "general": lambda: general(dense, (16,)),
    "general, vmap": lambda: general(lambda: nn.Sequential(nn.Sequential(*dense())), (16,)),
    "dense, numba": lambda: with_module("dense_cpu:CpuStack", "numba"),
    "layered, numba": lambda: with_module("layered_cpu:LayeredCpuStack", "numba"),
    "dense, Triton": lambda: with_module("dense_cuda:CudaStack", "triton", **DEVICE),
    "layered, Triton": lambda: with_module("layered_cuda:LayeredCudaStack", "triton", **DEVICE),
    "eager, convolutional": lambda: eager(
        nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *convolutional())
    ),
    "general, convolutional": lambda: general(convolutional, (1, 4, 4)),
    "general, convolutional, vmap": lambda: general(
        lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *convolutional()), (16,)
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_measures_the_same_at_the_same_steps(engine: str) -> None:
    """Zeros are pooled over layers; norms are those of the stacked gradient."""
    filters = "convolutional" in engine
    expected = plain(convolutional(), (1, 4, 4)) if filters else plain(dense(), (16,))
    found = ENGINES[engine]()
    steps = expected_steps(STEPS, STRIDE)
    assert 0 < len(steps) < STEPS
    assert np.flatnonzero(~np.isnan(found[:, 0])).tolist() == steps
    np.testing.assert_allclose(found[steps], expected[steps], rtol=1e-9, atol=1e-9)


def test_the_layers_shares_differ_from_the_pooled_one() -> None:
    """Otherwise the test above could not tell a mean of shares from the pooled share."""
    h, shares = torch.from_numpy(digits(LEARNER.seed, TASK).at(0)[0]).double(), []
    for layer in dense():
        h = layer(h)
        if isinstance(layer, nn.ReLU):
            shares.append(float((h == 0).double().mean()))
    wide, narrow = shares
    pooled = (18 * wide + 3 * narrow) / 21
    assert plain(dense(), (16,))[0, 0] == pytest.approx(pooled)
    assert abs(pooled - (wide + narrow) / 2) > 0.01


# -------------------------------------------------------------------------- interruptions
def settings(method: str, count: int = 2) -> list[Setting]:
    return [Setting(method, {}, seed, window=8, stride=4) for seed in range(count)]


KINDS = {"dense": ("upgd", True), "layered": ("centred-sgd", True), "general": ("upgd", False)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_that_is_resumed_measures_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does one learner of a stack, and alone."""
    pytest.importorskip("numba")
    method, compiled = KINDS[kind]
    monkeypatch.setattr(batched, "has_dense_path", lambda device: compiled)
    problem = replace(get("label-permuted-digits"), network=(64, 20, 5, 10))

    def make(count: int = 2) -> BatchedRun:
        streams = [problem.make(seed) for seed in range(count)]
        return BatchedRun(problem, settings(method, count), streams, steps=48)

    whole, first, second, alone = make(), make(), make(), make(1)
    assert whole.kind == kind
    whole.advance(48)
    first.advance(24)
    second.restore([first.state(run) for run in range(2)])
    second.advance(24)
    alone.advance(48)
    for name in MEASURED:
        assert np.isfinite(whole.series(1)[name]).all()
        np.testing.assert_array_equal(whole.series(1)[name], second.series(1)[name])
        np.testing.assert_allclose(whole.series(0)[name], alone.series(0)[name], rtol=1e-4)


def test_an_eager_run_that_is_resumed_measures_the_same() -> None:
    problem = replace(get("label-permuted-digits"), network=(64, 20, 5, 10))

    def make() -> EagerRun:
        network = partial(build, (64, 7, 5, 10))
        return EagerRun(problem.make(1), lambda seed, task: network(seed), settings("upgd")[1])

    whole, first, second = make(), make(), make()
    whole.advance(48)
    first.advance(21)
    second.restore(*first.state())
    second.advance(27)
    for name in MEASURED:
        assert np.isfinite(whole.meter.series(name)).all()
        np.testing.assert_array_equal(whole.meter.series(name), second.meter.series(name))


# ------------------------------------------------------------------------------- scaling
def test_negative_utilities_keep_their_order_in_a_general_stack() -> None:
    """All utilities are negative, so η is, too; Û is divided by its magnitude."""

    def make(seed: int, task: int) -> nn.Module:
        layer = nn.Linear(16, 1).double()
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 2.0, 16, dtype=torch.float64))
            layer.bias.fill_(0.7)
        return nn.Sequential(layer)

    class Rising:
        """Positive inputs, and targets far below every prediction: all gradients are positive."""

        loss, shape, task_length = "squared_error", (16,), None

        def at(self, step: int, batch: int = 1) -> tuple[Any, Any]:
            x = np.linspace(1, 2, 16, dtype=np.float32)[None]
            return x, np.full((1, 1), -100, np.float32)

    learner = Learner("upgd", {"lr": 1e-4, "sigma": 0.0, "weight_decay": 0.0}, 0)
    common = {"loss": "squared_error", "steps": 1, "window": 1, "dtype": torch.float64}
    stack = GeneralStack(make, [learner], shape=(16,), **common)
    stack.advance(feed([learner], lambda seed: Rising()).chunk(0, 1))
    w = np.append(np.linspace(0.5, 2.0, 16), 0.7)
    x = np.append(np.linspace(1, 2, 16, dtype=np.float32).astype(np.float64), 1)
    g = 2 * (w @ x + 100) * x
    utility = -g * w
    assert (utility < 0).all()
    scaled = 1 / (1 + np.exp(-utility / abs(utility.max())))
    expected = w - 2 * 1e-4 * g * (1 - scaled)
    np.testing.assert_allclose(numbers(stack.weights[0]), expected, rtol=1e-9)


# ----------------------------------------------------------------------------- utilities
def plain_histogram(method: str, steps: int, sizes: tuple[int, ...]) -> list[float]:
    """Shares of first-order utilities in ninths of [0, 1], traced and scaled by hand."""
    problem = get("label-permuted-digits")
    setting = Setting(method, {"sigma": 0.0}, 1, window=steps)
    run = EagerRun(problem.make(1), lambda seed, task: build(sizes, seed), setting)
    traces = [np.zeros(tuple(p.shape)) for p in run.model.parameters()]
    beta = 0.99
    for step in range(steps):
        x, y = (torch.from_numpy(part) for part in problem.make(1).at(step))
        weights = list(run.model.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(run.model(x), y), weights)
        for n, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            utility = -(w.detach().double() * g.double()).numpy()
            traces[n] = beta * traces[n] + (1 - beta) * utility
        run.advance(1)
    flat = np.concatenate([u.ravel() for u in traces])
    if method.endswith("local"):
        rows = [u.reshape(len(u) if u.ndim > 1 else 1, -1) for u in traces]
        norms = [np.maximum(np.linalg.norm(u, axis=1, keepdims=True), 1e-300) for u in rows]
        scaled = [u / norm for u, norm in zip(rows, norms, strict=True)]
        flat = np.concatenate([u.ravel() for u in scaled])
    else:
        flat = flat / abs(flat.max())
    counts, _ = np.histogram(1 / (1 + np.exp(-flat)), bins=9, range=(0, 1))
    return list(counts / len(flat))


@pytest.mark.parametrize("engine", ["eager", "general", "dense"])
@pytest.mark.parametrize("method", ["upgd", "upgd-local"])
def test_the_histogram_of_utilities(
    engine: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, steps = (64, 12, 5, 10), 30
    problem = replace(get("label-permuted-digits"), network=sizes)
    setting = Setting(method, {"sigma": 0.0}, 1, window=steps, stride=10)
    if engine == "eager":
        alone = EagerRun(problem.make(1), lambda seed, task: build(sizes, seed), setting)
        alone.advance(steps)
        found = {name: alone.meter.series(name) for name in UTILITIES}
    else:
        if engine == "dense":
            pytest.importorskip("numba")
        monkeypatch.setattr(batched, "has_dense_path", lambda device: engine == "dense")
        others = [replace(setting, method="sgdw", hyper={}), setting]
        stack = BatchedRun(problem, others, [problem.make(1) for _ in others], steps)
        stack.advance(steps)
        assert stack.kind == engine
        assert not set(UTILITIES) & set(stack.series(0))
        found = stack.series(1)
    shares = [float(found[name][0]) for name in UTILITIES]
    assert sum(shares) == pytest.approx(1)
    expected = plain_histogram(method, steps, sizes)
    assert sum(share > 0 for share in expected) > 2
    np.testing.assert_allclose(shares, expected, atol=2e-3)  # a weight or two at the edges


@pytest.mark.parametrize("steps", [0, 3, 10, 37])
def test_graphs_of_many_steps_and_of_one_do_all_steps_and_no_more(steps: int) -> None:
    done: list[int] = []
    captured: list[int] = []

    def capture(size: int) -> Any:
        captured.append(size)
        return SimpleNamespace(replay=lambda: done.append(size))

    graphs: dict[int, Any] = {}
    for _ in range(2):
        replay(graphs, capture, steps, 10)
    assert sum(done) == 2 * steps
    assert len(captured) == len(set(captured))  # each once
