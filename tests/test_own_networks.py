"""Users' networks: what a stack can run equals the eager engine, the rest is eager and says why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from upgd.engine import EagerRun, Setting
from upgd.engine.batched import BatchedRun, kind_of, why_eager
from upgd.engine.memory import need
from upgd.ledger import RunSpec
from upgd.ledger.errors import SpecError
from upgd.networks import NETWORKS, build, build_for, register
from upgd.streams import Problem
from upgd.streams import get as get_problem
from upgd.study.prepare import plan, prepare

PROBLEM = get_problem("label-permuted-digits")


@pytest.fixture(autouse=True)
def networks() -> Iterator[None]:
    """What a test registers is gone afterwards."""
    yield
    NETWORKS.clear()


class Residual(nn.Module):
    """Layers that are no sequence, with constants, ReLUs and a norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, outputs, bias=False)
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.full((), 0.5))
        self.register_buffer("shift", torch.linspace(0, 1, 8), persistent=False)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.act(self.first(x.flatten(1))) + self.shift
        found: Tensor = self.last(h + self.scale * self.inner(h))
        return found


class Scaled(nn.Sequential):
    """A sequence with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = 3 * super().forward(x)
        return found


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if h.sum() > 0 else -h


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Buffered(nn.Linear):
    """A buffer that is another one for each seed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("fixed", torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) * self.fixed
        return found


class Unused(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.idle = nn.Parameter(torch.zeros(3))


def frozen(inputs: int, outputs: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, outputs))
    model[0].weight.requires_grad_(False)
    return model


def convolutional(inputs: Any, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.GELU(), nn.Flatten()),
        nn.Linear(48, outputs),
    )


def dropout(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Dropout(0.5), nn.Linear(6, outputs))


def normalised(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, outputs)
    )


def plain_sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 10))


STACKED: list[Callable[..., nn.Module]] = [Residual, convolutional, plain_sequence]
STACKED += [
    lambda i, o: Scaled(nn.Linear(i, 5), nn.ReLU(), nn.Linear(5, o)),
    lambda i, o: nn.Sequential(nn.Linear(i, 5), nn.ReLU(), Twice(5, o)),
]
EAGER: list[tuple[Callable[..., nn.Module], str]] = [
    (dropout, "draws random numbers"),
    (normalised, "changes its buffers"),
    (Counting, "changes its buffers or attributes"),
    (Branching, "does not run under torch.vmap"),
    (Buffered, "gives other results"),
    (Unused, "does not run"),
    (frozen, "not trained"),
    (lambda i, o: Double(i, o), "not float32"),
]


class Double(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.double()).float()
        return found


def with_network(factory: Callable[..., nn.Module], problem: Problem = PROBLEM) -> Problem:
    register("mine", factory)
    return problem.with_network("mine")


def setting_of(method: str, seed: int, **more: Any) -> Setting:
    return Setting(method, {"lr": 0.01}, seed, window=10, stride=4, held_out=20, **more)


def eager(problem: Problem, setting: Setting, steps: int) -> EagerRun:
    run = EagerRun(problem.make(setting.seed), lambda s, t: build_for(problem, s, t), setting)
    run.advance(steps)
    return run


@pytest.mark.parametrize("factory", STACKED)
def test_a_stack_of_networks_is_many_eager_runs(factory: Callable[..., nn.Module]) -> None:
    """Metrics, diagnostics, held-out accuracy and restarts included."""
    problem = with_network(factory, replace_tasks(PROBLEM, 10))
    settings = [setting_of(m, s, restart=s == 1) for m in ("upgd", "adamw") for s in (0, 1)]
    assert [why_eager(problem, setting, "cpu") for setting in settings] == [""] * 4
    stack = BatchedRun(problem, settings, [problem.make(s.seed) for s in settings], 20)
    stack.advance(20)
    assert stack.kind == "general"
    for number, setting in enumerate(settings):
        run = eager(problem, setting, 20)
        mine = stack.series(number)
        for name, values in mine.items():
            other = run.meter.series(name)
            np.testing.assert_allclose(values, other, rtol=2e-4, atol=2e-5, err_msg=name)
        assert stack.offline[number] == pytest.approx(run.offline)


def replace_tasks(problem: Problem, length: int) -> Problem:
    return replace(problem, task_length=length)


@pytest.mark.parametrize(("factory", "words"), EAGER)
def test_what_cannot_be_stacked_runs_eagerly(factory: Callable[..., nn.Module], words: str) -> None:
    problem = with_network(factory)
    setting = setting_of("sgd", 0)
    reason = why_eager(problem, setting, "cpu")
    assert "network 'mine'" in reason
    assert words in reason
    assert "\n" not in reason
    assert kind_of(problem, setting, "cpu") is None
    run = eager(problem, setting, 20)
    assert math.isfinite(run.meter.series("loss")[-1])


@pytest.mark.parametrize("factory", [dropout, normalised, Counting, Residual])
def test_resuming_goes_on_bit_for_bit(factory: Callable[..., nn.Module]) -> None:
    problem, setting = with_network(factory), setting_of("upgd", 5)
    whole, first, second = (eager(problem, setting, steps) for steps in (20, 7, 0))
    second.restore(*first.state())
    second.advance(13)
    for name, array in whole.state()[0].items():
        np.testing.assert_array_equal(array, second.state()[0][name], err_msg=name)


def test_weights_are_a_function_of_seed_and_task() -> None:
    problem = with_network(Residual)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    a, b, c, d = (build_for(problem, *key) for key in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(a.first.weight, b.first.weight)
    assert not torch.equal(a.first.weight, c.first.weight)
    assert not torch.equal(a.first.weight, d.first.weight)


def test_statistics_count_a_sample_once() -> None:
    problem = with_network(normalised)
    run = eager(problem, Setting("sgd", {"lr": 0.0}, 0, window=5), 5)
    assert int(run.model[1].num_batches_tracked) == 5


def test_ranks_without_matrices_are_not_a_number() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((10,), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :10] * self.weight

    problem, setting = with_network(Vector), setting_of("sgd", 0)
    stack = BatchedRun(problem, [setting], [problem.make(0)], 20)
    stack.advance(20)
    run = eager(problem, setting, 20)
    for name in ("effective_rank", "zero_activations"):
        assert np.isnan(stack.series(0)[name]).all()
        assert np.isnan(run.meter.series(name)).all()


def test_memory_is_estimated() -> None:
    problem = with_network(Residual)
    found = need(problem, [setting_of("upgd", 0)], problem.make(0), 100, "cpu")
    assert found.each[0] > 4 * sum(p.numel() for p in build_for(problem, 0).parameters())


# ---------------------------------------------------------------------- specifications
def spec(**options: Any) -> RunSpec:
    return RunSpec("label-permuted-digits", "upgd", {"lr": 0.01}, 0, 10, {"window": 5, **options})


def test_the_option_network() -> None:
    register("mine", Residual)
    run = prepare(spec(network="mine"))
    assert isinstance(run.model, Residual)
    run.advance(10)
    assert plan(spec(network="mine"))[0].network == "mine"


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (nn.Identity, "has no parameters: there is nothing to learn"),
        (lambda: nn.Linear(64, 10).requires_grad_(False), "that require a gradient"),
        (lambda: nn.Linear(64, 9), "outputs of shape (1, 9) for 1 inputs; (1, 10) expected"),
        (lambda: nn.Linear(65, 10), "cannot take inputs of shape (1, 64)"),
        (lambda: 3, "is a int, not a nn.Module"),
        (lambda inputs, outputs: 1 / 0, "cannot be made for inputs 64 and 10 outputs"),
        (lambda: nn.LSTM(64, 10), "returns a tuple"),
        (lambda i, o: nn.BatchNorm1d(i), "cannot take inputs"),
    ],
)
def test_what_is_wrong_with_a_network_is_said_at_preparation(
    factory: Callable[..., nn.Module], words: str
) -> None:
    register("mine", factory)
    with pytest.raises(SpecError) as caught:
        plan(spec(network="mine"))
    assert words in str(caught.value)
    assert "network 'mine'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_and_options_that_do_not_fit() -> None:
    register("mine", Residual)
    for name in ("cnn", "none", "3", "a b", ""):
        with pytest.raises(ValueError, match="a network's name"):
            register(name, Residual)
    with pytest.raises(ValueError, match="a function that makes a module expected"):
        register("other", nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="requires a, b, c"):
        register("other", lambda a, b, c: nn.Linear(a, b))
    with pytest.raises(SpecError, match="exclude each other"):
        plan(spec(network="mine", hidden="3"))
    with pytest.raises(SpecError, match="did you mean 'mine'"):
        plan(spec(network="mime"))


def test_the_source_of_a_network_changes_with_its_code() -> None:
    first = register("mine", lambda: nn.Linear(64, 10))
    second = register("mine", lambda: nn.Linear(64, 10, bias=False))
    assert NETWORKS["mine"] is second
    assert first.source != second.source
    assert build("mine", 0, shape=(64,), outputs=10).bias is None


def test_results_of_the_dry_run_follow_the_code() -> None:
    problem, setting = with_network(dropout), setting_of("sgd", 0)
    assert why_eager(problem, setting, "cpu")
    with_network(Residual)
    assert why_eager(problem, setting, "cpu") == ""
