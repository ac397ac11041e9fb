"""What the paper says the rules reduce to, and what PyTorch's own optimizers compute."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.cases import (
    PATHS,
    CounterNoise,
    assert_close,
    assert_equal,
    batches,
    every_path,
    loss_of,
    network,
    state,
    train,
    weights,
)
from upgd import UPGD
from upgd.optim.ada_upgd import AdamW
from upgd.optim.base import RuleOptimizer
from upgd.optim.ranks import Ranks
from upgd.optim.registry import METHODS

DOUBLE = torch.float64
STREAM = batches(12, dtype=DOUBLE)
weight_wise = pytest.mark.parametrize(
    "name", [n for n in METHODS if "upgd" in n and "feature" not in n]
)


def run(name: str, **arguments: Any) -> list[torch.Tensor]:
    model = network(dtype=DOUBLE)
    opt = METHODS[name].make(model, noise=CounterNoise(), seed=1, **arguments)
    train(METHODS[name], opt, model, STREAM)
    return weights(model)


def run_torch(cls: Any, **arguments: Any) -> list[torch.Tensor]:
    model = network(dtype=DOUBLE)
    train(METHODS["sgdw"], cls(model.parameters(), **arguments), model, STREAM)
    return weights(model)


def without_utility(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every utility zero, so that no weight is worth more than another."""
    trace = RuleOptimizer._eta

    def mutant(self: Any, batches: Any, name: str) -> Any:
        for batch in batches:
            for u in batch.targets[name]:
                u.fill_(0.0)
        return trace(self, batches, name)

    monkeypatch.setattr(RuleOptimizer, "_eta", mutant)


@pytest.mark.parametrize("name", ["upgd", "n-upgd"])
def test_without_utility_upgd_is_pgd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("pgd", lr=0.02, sigma=0.3)
    without_utility(monkeypatch)
    assert_close(run(name, lr=0.02, sigma=0.3), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["upgd", "n-upgd"])
def test_without_utility_and_noise_upgd_is_sgd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_torch(torch.optim.SGD, lr=0.02)
    without_utility(monkeypatch)
    assert_close(run(name, lr=0.02, sigma=0.0), expected, rtol=1e-12, atol=1e-14)


def test_without_utility_upgd_with_decay_is_shrink_and_perturb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = {"lr": 0.02, "sigma": 0.3, "weight_decay": 0.1}
    expected = run("shrink-and-perturb", **arguments)
    without_utility(monkeypatch)
    assert_close(run("upgd", **arguments), expected, rtol=1e-12, atol=1e-14)


def moves_from_zero(make: Any) -> list[torch.Tensor]:
    """The steps of weights that are 0, and so have no utility, beside some that have."""
    generator = torch.Generator().manual_seed(3)
    idle, busy = torch.nn.Parameter(torch.zeros(4, 5)), torch.nn.Parameter(torch.ones(3, 5))
    opt = make([idle, busy])
    found = []
    for _ in range(3):
        idle.data.zero_()
        for p in (idle, busy):
            p.grad = torch.randn(p.shape, generator=generator)
            p.curvature = torch.rand(p.shape, generator=generator)
        opt.step()
        found.append(idle.detach().clone())
    return found


@every_path
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("tail", ["", "-2nd", "-local", "-2nd-local"])
def test_a_weight_without_utility_takes_the_step_of_sgd(tail: str, decay: float, path: str) -> None:
    expected = moves_from_zero(lambda params: torch.optim.SGD(params, lr=0.3))
    arguments = {**PATHS[path], "lr": 0.3, "sigma": 0.0, "weight_decay": decay}
    for name in (f"upgd{tail}", f"n-upgd{tail}"):
        make = partial(UPGD, **METHODS[name].options, **arguments)
        assert_equal(moves_from_zero(make), expected)


@every_path
def test_a_weight_without_utility_takes_the_step_of_sgd_with_momentum(path: str) -> None:
    same = {"lr": 0.3, "momentum": 0.9}
    expected = moves_from_zero(lambda params: torch.optim.SGD(params, **same))
    found = moves_from_zero(lambda params: UPGD(params, sigma=0.0, **same, **PATHS[path]))
    assert_close(found, expected, rtol=1e-6, atol=1e-7)


@every_path
@pytest.mark.parametrize("name", ["ada-upgd", "ada-upgd-2nd"])
def test_a_weight_without_utility_takes_the_step_of_adam(name: str, path: str) -> None:
    row, same = METHODS[name], {"lr": 0.3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.0}
    arguments = {**row.options, **PATHS[path], **same, "sigma": 0.0}
    found = moves_from_zero(lambda p: row.optimizer(p, **arguments))
    assert_close(found, moves_from_zero(lambda p: torch.optim.Adam(p, **same)), rtol=1e-6)
    if path == "plain":  # others order Adam's divisions in their own ways
        assert_equal(found, moves_from_zero(lambda p: AdamW(p, foreach=False, **same)))


@every_path
@pytest.mark.parametrize("name", ["upgd", "n-upgd", "n-upgd-local"])
def test_a_weight_without_utility_takes_the_whole_noise(name: str, path: str) -> None:
    """As PGD's weights do, of which each has it."""
    row, same = METHODS[name], {**PATHS[path], "lr": 0.3, "sigma": 0.7, "seed": 5}
    found = moves_from_zero(lambda p: row.optimizer(p, **row.options, **same))
    expected = moves_from_zero(lambda p: METHODS["pgd"].optimizer(p, **same))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)  # compiled, products may be fused with sums


@pytest.mark.parametrize("path", [path for path in PATHS if path != "fused"])
@pytest.mark.parametrize("gate", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("protect", [True, False])
def test_features_without_utility_and_output_layers(path: str, gate: float, protect: bool) -> None:
    """Weights into the former take SGD's step, those of the latter `output_gate` times as much."""
    plain, model = network(dtype=DOUBLE), network(dtype=DOUBLE)
    loss_of(plain, STREAM[0]).backward()
    steps = [0.3, 0.3, 0.3 * (gate if protect else 1.0)]
    groups = [{"params": plain[2 * i].parameters(), "lr": lr} for i, lr in enumerate(steps)]
    torch.optim.SGD(groups, lr=0.0).step()
    row = METHODS["feature-upgd"]
    arguments = {"lr": 0.3, "sigma": 0.0, "output_gate": gate, "protect": protect, **PATHS[path]}
    opt = row.make(model, **arguments)
    loss_of(model, STREAM[0]).backward()
    for layer in opt.features.layers:  # type: ignore[attr-defined]
        layer.first.zero_()
    opt.step()
    assert_close(weights(model), weights(plain), rtol=1e-14, atol=1e-15)


def test_shrink_and_perturb_has_its_two_halves() -> None:
    same = {"rtol": 1e-12, "atol": 1e-14}
    both = {"lr": 0.02, "sigma": 0.0, "weight_decay": 0.1}
    assert_close(run("shrink-and-perturb", **both), run("sgdw", lr=0.02, weight_decay=0.1), **same)
    both = {"lr": 0.02, "sigma": 0.3, "weight_decay": 0.0}
    assert_close(run("shrink-and-perturb", **both), run("pgd", lr=0.02, sigma=0.3), **same)


def test_sgdw_is_sgd_with_decoupled_decay() -> None:
    expected = run_torch(torch.optim.SGD, lr=0.02, weight_decay=0.1)
    assert_close(run("sgdw", lr=0.02, weight_decay=0.1), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99), (0.9, 0.0)])
def test_adamw_is_torch_adamw(betas: tuple[float, float]) -> None:
    arguments = {"lr": 0.01, "weight_decay": 0.1, "betas": betas, "eps": 1e-6}
    expected = run_torch(torch.optim.AdamW, **arguments)
    assert_close(run("adamw", **arguments), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_local_scaling_needs_no_bias_correction(beta: float) -> None:
    """Û/‖Û‖ = U/‖U‖: the trace of a constant utility gives the same gates at every age."""
    model = torch.nn.Linear(3, 2, bias=False, dtype=DOUBLE)
    opt = UPGD(model.parameters(), lr=0.0, beta_utility=beta, sigma=0.0, scaling="local")
    gates = []
    for _ in range(3):
        model.weight.grad = torch.arange(6.0, dtype=DOUBLE).reshape(2, 3)
        opt.step()
        gates.append(opt.scaled_utility(model.weight))
    assert_close(gates[:1] * 2, gates[1:], rtol=1e-12)


def test_zero_decay_is_the_utility_of_this_step() -> None:
    model = torch.nn.Linear(3, 2, dtype=DOUBLE)
    opt = UPGD(model.parameters(), lr=0.1, beta_utility=0.0, sigma=0.0)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        expected = [-p.grad * p.detach() for p in model.parameters()]
        opt.step()
        assert_close([opt.utility(p) for p in model.parameters()], expected, rtol=1e-14)


def test_consolidation_starts_as_gradient_descent() -> None:
    """At t = 1, w̄ = w and Δ = 0: all four take a plain step."""
    for name in ("s-ewc", "s-mas", "s-si", "s-rwalk"):
        model, plain = network(dtype=DOUBLE), network(dtype=DOUBLE)
        train(METHODS[name], METHODS[name].make(model, lr=0.1, kappa=100.0), model, STREAM[:1])
        train(METHODS["sgdw"], torch.optim.SGD(plain.parameters(), lr=0.1), plain, STREAM[:1])
        assert_close(weights(model), weights(plain), rtol=1e-10, atol=1e-12)


def test_tiny_utilities_keep_their_proportions() -> None:
    """Squares of 1e-25 underflow in single precision; local gates must not notice."""
    model = torch.nn.Linear(4, 2, bias=False)
    gates = []
    for scale in (1.0, 1e-25):
        opt = UPGD(model.parameters(), lr=0.0, sigma=0.0, scaling="local")
        model.weight.grad = scale * torch.tensor([[1.0, -2.0, 3.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
        opt.step()
        gates.append(opt.scaled_utility(model.weight))
    assert_close(gates[:1], gates[1:], rtol=1e-5)
    assert torch.equal(gates[0][1], torch.full((4,), 0.5))


@pytest.mark.parametrize("scaling", ["global", "local"])
def test_scaled_utility_is_what_the_step_used(scaling: Any) -> None:
    """From w' = w - 2α·g·(1-Ū): the gate can be read off the update."""
    model = network(dtype=DOUBLE)
    opt = UPGD(model.parameters(), lr=0.1, sigma=0.0, scaling=scaling, beta_utility=0.9)
    for batch in STREAM:
        before = weights(model)
        train(METHODS["upgd"], opt, model, [batch])
        for old, p in zip(before, model.parameters(), strict=True):
            expected = 2 * 0.1 * p.grad * (1 - opt.scaled_utility(p))
            torch.testing.assert_close(old - p.detach(), expected, rtol=1e-9, atol=1e-13)


def test_eta_spans_groups_and_passes_the_seam() -> None:
    """A sharded model sees one maximum: a larger η elsewhere loosens every gate here."""

    class Others(Ranks):
        def maximum(self, values: torch.Tensor) -> torch.Tensor:
            seen.append(float(values))
            return values * 10

    seen: list[float] = []
    model = network(dtype=DOUBLE)
    opt = UPGD(model.parameters(), sigma=0.0, beta_utility=0.9)
    opt._meeting = Others(opt._ranks.params, opt._ranks.parts, sharded=True)
    train(METHODS["upgd"], opt, model, STREAM[:3])
    assert len(seen) == 3
    largest = max(float(opt.utility(p).max()) for p in model.parameters())
    assert seen[-1] == pytest.approx(largest)  # bias-corrected
    loose = opt.scaled_utility(model[0].weight)
    expected = torch.sigmoid(opt.utility(model[0].weight) / (10 * largest))
    torch.testing.assert_close(loose, expected)


def test_parameters_that_step_together_share_a_clock() -> None:
    model = network()
    opt = UPGD(model.parameters())
    train(METHODS["upgd"], opt, model, batches(2))
    clocks = {id(s["step"]) for s in opt.state.values()}
    assert len(clocks) == 1
    opt.load_state_dict(opt.state_dict())
    train(METHODS["upgd"], opt, model, batches(1))
    assert len({id(s["step"]) for s in opt.state.values()}) == 1
    assert all(int(t) == 3 for t in state(opt) if t.dtype == torch.int64)


def moved(groups: list[dict[str, Any]], change: Any) -> list[float]:
    """Where weights of 1 with gradients of 1 are after a step, a change, and another step."""
    opt = METHODS["sgdw"].optimizer(groups, weight_decay=0.0)
    params = [p for group in groups for p in group["params"]]
    for after in (change, lambda opt: None):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        after(opt)
    return [float(p.detach()) for p in params]


def test_a_parameter_may_change_its_group() -> None:
    def change(opt: Any) -> None:
        first, second = opt.param_groups
        first["params"], second["params"] = [], [*first["params"], *second["params"]]

    a, b = (torch.nn.Parameter(torch.ones((), dtype=DOUBLE)) for _ in range(2))
    groups = [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 1.0}]
    assert moved(groups, change) == pytest.approx([1 - 0.1 - 1.0, 1 - 1.0 - 1.0])


def test_a_group_may_be_replaced() -> None:
    def change(opt: Any) -> None:
        opt.param_groups[0] = {**opt.param_groups[0], "lr": 1.0}

    a = torch.nn.Parameter(torch.ones((), dtype=DOUBLE))
    assert moved([{"params": [a], "lr": 0.1}], change) == pytest.approx([1 - 0.1 - 1.0])


@weight_wise
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_model_may_be_cast_between_steps(name: str, nonfinite: Any) -> None:
    results = []
    for foreach in (True, False):
        model = network()
        row = METHODS[name]
        opt = row.make(model, noise=CounterNoise(), seed=1, foreach=foreach, nonfinite=nonfinite)
        train(row, opt, model, batches(3))
        model.double()
        train(row, opt, model, STREAM[:3])
        assert opt.state[next(model.parameters())]["utility"].dtype == DOUBLE
        results.append(weights(model))
    assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["upgd", "upgd-local", "ada-upgd", "s-rwalk"])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_scalar_parameters(name: str, foreach: bool, nonfinite: Any) -> None:
    scale, vector = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.ones(3))
    opt = METHODS[name].optimizer([scale, vector], foreach=foreach, nonfinite=nonfinite)
    for _ in range(2):
        scale.grad, vector.grad = torch.tensor(1.0), torch.ones(3)
        opt.step()
    assert float(scale.detach()) < 2.0


def test_an_infinite_weight_is_no_parameter() -> None:
    """A weight of -inf, as in a mask, would have the utility NaN and become NaN itself."""
    mask = torch.nn.Parameter(torch.tensor([-torch.inf, 0.0]))
    other = torch.nn.Parameter(torch.ones(3))
    mask.grad, other.grad = torch.zeros(2), torch.ones(3)
    with pytest.raises(FloatingPointError, match=r"weight of parameter 0 .* mask .* buffer"):
        UPGD([mask, other], sigma=0.0, nonfinite="raise").step()
    opt = UPGD([mask, other], sigma=0.0, nonfinite="skip")
    opt.step()
    assert int(opt.skipped_steps) == 1
    assert torch.equal(mask.detach(), torch.tensor([-torch.inf, 0.0]))
    assert torch.equal(other.detach(), torch.ones(3))


def test_a_first_step_that_was_skipped_leaves_no_utility() -> None:
    model = torch.nn.Linear(2, 1)
    opt = UPGD(model.parameters(), nonfinite="skip")
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    opt.step()
    assert torch.equal(opt.utility(model.weight), torch.zeros(1, 2))
    assert torch.equal(opt.scaled_utility(model.weight), torch.full((1, 2), 0.5))


def test_a_group_without_momentum_beside_others() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    opt = UPGD([{"params": [weight], "momentum": 0.0}], momentum=0.9, sigma=0.0)
    for _ in range(2):
        weight.grad = torch.zeros(2) if opt.state else torch.full((2,), 0.5)
        opt.step()
    plain = 1 - 0.01 * 2 * 0.5 / (1 + math.exp(-1))  # of utility -g·w, the largest: η its size
    assert weight.tolist() == pytest.approx([plain] * 2)
