"""Methods of other papers against plain loops, written from their papers' words.

The rules themselves are compared with their equations by test_rules; here are whole networks, what
the rules cannot say alone (which layer is the head, TRAC's one scale), and identities.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import upgd
from upgd.ledger.canonical import display_name
from upgd.optim.registry import METHODS, scalars
from upgd.optim.trac import DISCOUNTS, erfi

STEPS = 60
Learn = Callable[[nn.Sequential, Tensor, Tensor], None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 9), nn.LeakyReLU(), nn.Linear(9, 7), nn.LeakyReLU(), nn.Linear(7, 4)]
    return nn.Sequential(*layers).double()


def stream() -> Iterator[tuple[Tensor, Tensor]]:
    """Single samples whose labels are permuted now and then."""
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        if step % 20 == 0:
            order = torch.randperm(4, generator=generator)
        x = torch.randn(1, 6, generator=generator, dtype=torch.float64)
        yield x, order[x[:, :4].argmax(1)]


def assert_same(opt: Callable[[nn.Module], Any], learn: Learn) -> None:
    """The optimizer's weights are those of the plain loop after every step."""
    model, other = network(), network()
    made = opt(model)
    for x, y in stream():
        made.zero_grad()
        loss = F.cross_entropy(model(x), y)
        made.backward(loss) if hasattr(made, "backward") else loss.backward()
        made.step()
        learn(other, x, y)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    assert (flat(model.parameters()) - flat(network().parameters())).abs().max() > 0.01


def gradients(model: nn.Sequential, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


# ---------------------------------------------------------------------------- decay and copies
def test_head_decay_shrinks_the_last_layer_alone() -> None:
    def learn(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        for layer, p, g in zip("001122", model.parameters(), gradients(model, x, y), strict=True):
            p.data = p.data * (1 - 0.05 * 0.3 * (layer == "2")) - 0.05 * g

    given = {"lr": 0.05, "head.weight_decay": 0.3}
    assert_same(lambda m: upgd.create("sgd-head-decay", m, **given), learn)


def test_l2_init_is_sgd_on_a_penalty() -> None:
    first = [p.detach() for p in network().parameters()]

    def learn(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        pairs = zip(model.parameters(), first, strict=True)
        penalty = sum((p - q).square().sum() for p, q in pairs)
        loss = F.cross_entropy(model(x), y) + 0.05 * penalty
        found = torch.autograd.grad(loss, list(model.parameters()))
        for p, g in zip(model.parameters(), found, strict=True):
            p.data = p.data - 0.05 * g

    assert_same(lambda m: upgd.L2Init(m.parameters(), lr=0.05, weight_decay=0.1), learn)


@pytest.mark.parametrize("adam", [False, True])
def test_weight_clipping_follows_pytorchs_optimizer(adam: bool) -> None:
    held: dict[str, Any] = {}
    kind, lr = (torch.optim.Adam, 0.02) if adam else (torch.optim.SGD, 0.1)

    def learn(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        opt = held.setdefault("opt", kind(model.parameters(), lr=lr))
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        with torch.no_grad():
            for layer in (model[0], model[2], model[4]):
                most = 0.9 / math.sqrt(layer.in_features)
                layer.weight.clamp_(-most, most)
                layer.bias.clamp_(-most, most)
        held["cut"] = held.get("cut", False) or bool((model[4].weight.abs() == most).any())

    ours = upgd.WeightClippingAdam if adam else upgd.WeightClipping
    assert_same(lambda m: ours(m.parameters(), lr=lr, clip=0.9), learn)
    assert held["cut"]


def test_the_hare_returns_to_the_tortoise() -> None:
    held: dict[str, Any] = {"step": 0}

    def learn(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        slow = held.setdefault("slow", copy.deepcopy(model))
        held["step"] += 1
        for p, q, g in zip(
            model.parameters(), slow.parameters(), gradients(model, x, y), strict=True
        ):
            p.data = p.data - 0.1 * g
            q.data = 0.9 * q.data + 0.1 * p.data
            if held["step"] % 25 == 0:
                p.data = q.data.clone()

    def make(model: nn.Module) -> Any:
        return upgd.HareTortoise(model.parameters(), lr=0.1, beta_weight=0.9, period=25)

    assert_same(make, learn)


# -------------------------------------------------------------------------------------- FADE
def test_fade_learns_the_decay_of_the_head() -> None:
    """Decays grow from ln ρ = -1 by the product of gradient and trace, with p(1-p)·x² as h."""
    lr, theta, first = 0.2, 3.0, -1.0
    held: dict[str, Any] = {}

    def learn(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        found = gradients(model, x, y)
        with torch.no_grad():
            below = model[:4](x)[0]
            p = model(x)[0].softmax(0)
            curvature = [torch.outer(p * (1 - p), below.square()), p * (1 - p)]
            for q, g in zip(list(model.parameters())[:4], found, strict=False):
                q.sub_(lr * g)
            for i, (q, g) in enumerate(zip(model[4].parameters(), found[4:], strict=True)):
                log, trace = held.get(i, (torch.full_like(q, first), torch.zeros_like(q)))
                log = (log - theta * g * trace).clamp(max=0)
                rho = log.exp()
                held[i] = log, (1 - rho - lr * curvature[i]).clamp(min=0) * trace - rho * q
                q.copy_(q - rho * q - lr * g)

    def make(model: nn.Module) -> Any:
        given = {"lr": lr, "meta_lr": theta, "head.weight_decay": math.exp(first) / lr}
        return upgd.create("fade-head", model, **given)

    assert_same(make, learn)
    assert held[0][0].max() > first + 0.02
    assert held[0][0].min() < first - 0.02


def test_fade_without_decay_is_sgd() -> None:
    def learn(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        for p, g in zip(model.parameters(), gradients(model, x, y), strict=True):
            p.data = p.data - 0.1 * g

    assert_same(lambda m: upgd.FADE(m.parameters(), lr=0.1, weight_decay=0.0), learn)


# -------------------------------------------------------------------------------------- gates
def run(name: str, **given: Any) -> list[Tensor]:
    model = network()
    opt = upgd.create(name, model, **{"lr": 0.1, "sigma": 0.0, "beta_utility": 0.9, **given})
    for x, y in stream():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


def test_the_whole_gate_is_upgds_and_no_gate_is_sgd() -> None:
    for p, q in zip(run("gated-upgd"), run("upgd"), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in stream():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    for p, q in zip(run("upgd-ungated"), model.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-9, atol=1e-11)


def test_each_part_of_the_gate_is_another_method() -> None:
    names = ["gated-upgd", *METHODS["gated-upgd"].aliases]
    found = torch.stack([torch.cat([p.flatten() for p in run(name)]) for name in names])
    apart = (found[:, None] - found).abs().amax(-1) + torch.eye(len(names))
    assert len(names) == 10
    assert apart.min() > 1e-6


@pytest.mark.parametrize("name", ["gated-upgd", *METHODS["gated-upgd"].aliases])
def test_gates_have_the_halves_and_layers_that_their_names_say(name: str) -> None:
    """The gate is read off the first step, where Û = -g·w: steps are g times it."""
    model, k = network(), 3.0
    before = [p.detach().clone() for p in model.parameters()]
    opt = upgd.create(name, model, lr=0.1, sigma=0.0, sharpness=k)
    x, y = next(stream())
    F.cross_entropy(model(x), y).backward()
    opt.step()
    params = list(model.parameters())
    grads = [p.grad for p in params if p.grad is not None]
    utilities = [-g * w for g, w in zip(grads, before, strict=True)]
    eta = max(float(u.max()) for u in utilities)
    assert eta > 0 > min(float(u.min()) for u in utilities)
    for number, (w, p, g, u) in enumerate(zip(before, params, grads, utilities, strict=True)):
        gate = 2 * torch.sigmoid(-k * u / eta)
        here = "-body" not in name if number >= 4 else "-head" not in name
        useful = here and "undoing" not in name and "ungated" not in name
        harmful = here and "protecting" not in name and "ungated" not in name
        expected = torch.where(u > 0, gate if useful else torch.ones_like(gate), 1.0)
        expected = torch.where(u < 0, gate if harmful else torch.ones_like(gate), expected)
        torch.testing.assert_close(w - p.detach(), 0.1 * g * expected, rtol=1e-9, atol=1e-13)


RENAMED = ["sgd-head-decay", "adam-head-decay", "adam-equal-betas", "fade-head"]


@pytest.mark.parametrize("name", [*RENAMED, *METHODS["gated-upgd"].aliases])
def test_names_are_found_again(name: str) -> None:
    """A run knows the alias under which it was asked for."""
    row = next(row for row in METHODS.values() if name in row.aliases)
    assert display_name(row.name, scalars(name)) == name


# --------------------------------------------------------------------------------------- TRAC
def test_erfi_is_the_integral() -> None:
    """Gauss-Legendre on each of many short intervals."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    for x in (1e-9, 0.3, 0.7071, 1.0, 3.0, 9.0):
        edges = np.linspace(0, x, 201)
        middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
        values = np.exp((middle[:, None] + half[:, None] * nodes) ** 2)
        exact = 2 / math.sqrt(math.pi) * float((values * weights * half[:, None]).sum())
        both = erfi(torch.tensor([x, -x], dtype=torch.float64))
        assert both[0].item() == pytest.approx(exact, rel=1e-12)
        assert both[1] == -both[0]


class PlainTRAC:
    """Its algorithm for a flat vector of weights, around SGD."""

    def __init__(self, weights: Tensor) -> None:
        self.start, self.scale = weights.clone(), 0.0
        self.tuners = [(beta, 0.0, 1e-8) for beta in DISCOUNTS]

    def step(self, w: Tensor, g: Tensor, lr: float) -> Tensor:
        theta = (w - self.start) / (self.scale + 1e-8)
        h = float(g @ theta)
        self.tuners = [(b, b * b * v + h * h, b * s - h) for b, v, s in self.tuners]
        ratios = [s / (math.sqrt(2 * v) + 1e-8) for _, v, s in self.tuners]
        values = erfi(torch.tensor([math.sqrt(0.5), *ratios], dtype=torch.float64)).tolist()
        self.scale = 1e-8 * sum(values[1:]) / values[0]
        return self.start + max(self.scale, 0.0) * (theta - lr * g)


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def test_trac_scales_the_whole_way_from_the_start() -> None:
    model = network()
    plain, weights = PlainTRAC(flat(model.parameters())), flat(model.parameters())
    opt = upgd.TRAC(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(100, 8, 6, generator=torch.Generator().manual_seed(1)).double()
    for x in inputs:  # of one task, so that there is a way to go
        opt.zero_grad()
        F.cross_entropy(model(x), (x[:, 1] > 0).long()).backward()
        weights = plain.step(weights, flat(p.grad for p in model.parameters()), 0.1)
        opt.step()
        torch.testing.assert_close(flat(model.parameters()), weights, rtol=1e-8, atol=1e-10)
        assert opt.scale == pytest.approx(plain.scale, rel=1e-8)
    assert opt.scale > 0.1


def test_trac_goes_on_where_it_was_saved() -> None:
    def advance(model: nn.Module, opt: Any, samples: list[Any]) -> None:
        for x, y in samples:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()

    model, samples = network(), list(stream())
    opt = upgd.TRAC(torch.optim.Adam(model.parameters(), lr=0.05))
    advance(model, opt, samples[:30])
    other = copy.deepcopy(model)
    fresh = upgd.TRAC(torch.optim.Adam(other.parameters(), lr=0.01))
    saved = opt.state_dict()
    sums = saved["state"]["tuner"]["sums"].clone()
    fresh.load_state_dict(saved)
    advance(model, opt, samples[30:])
    advance(other, fresh, samples[30:])
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))
    assert torch.equal(saved["state"]["tuner"]["sums"], sums)  # stepping does not change it
    assert not torch.equal(fresh.state["tuner"]["sums"], sums)
    assert fresh.param_groups[0]["lr"] == 0.05
    scheduler = torch.optim.lr_scheduler.StepLR(fresh, 1, 0.5)
    fresh.step()
    scheduler.step()
    assert fresh.base.param_groups[0]["lr"] == 0.025


def test_trac_refuses_what_is_wrong() -> None:
    model = network()
    with pytest.raises(TypeError, match="base must be an optimizer"):
        upgd.TRAC(model.parameters())
    opt = upgd.TRAC(torch.optim.SGD(model.parameters(), lr=0.1))
    before = flat(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        opt.step()
    assert torch.equal(flat(model.parameters()), before)
    with pytest.raises(ValueError, match="discounts"):
        upgd.TRAC(torch.optim.SGD(model.parameters(), lr=0.1), discounts=(1.0,))
