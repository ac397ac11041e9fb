"""Rules and hyperparameters that see layers: bounds, periods, roles. Against plain loops."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import upgd
from tests.stacks import feed, numbers, small
from upgd.engine import EagerRun, Setting
from upgd.engine.dense import Learner
from upgd.engine.general import GeneralStack
from upgd.kernels import philox
from upgd.kernels.layout import Layout
from upgd.networks import build
from upgd.optim import fused
from upgd.optim.custom import rule_row
from upgd.optim.registry import METHODS, register
from upgd.optim.roles import roles
from upgd.rules.ops import clip
from upgd.rules.vocabulary import Method, Phase

HAS = {name: importlib.util.find_spec(name) is not None for name in ("numba", "triton")}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZES = (16, 7, 6, 10)
STEPS = 7
ROLES = ("input", "hidden", "head")


def clipped(w: Any, g: Any, slow: Any, lr: Any, reach: Any, bound: Any, due: Any) -> Any:
    """Weights within a multiple of their first bound, and a copy that is taken now and then."""
    w = clip(w - lr * g, -reach * bound, reach * bound)
    return w - 0.1 * lr * slow, slow + due * (w - slow)


ROW = rule_row("clipped-rule", clipped, states=["slow"], period="every", lr=0.1, reach=1.0, every=3)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(ROW)
    yield
    del METHODS[ROW.name]


# ------------------------------------------------------------------------------- plain loops
def of_role(hyper: dict[str, Any], role: str) -> dict[str, Any]:
    """The hyperparameters of a role's layers."""
    plain = {name: value for name, value in hyper.items() if "." not in name}
    own = {n.split(".")[1]: v for n, v in hyper.items() if n.startswith(f"{role}.")}
    return {**plain, **own}


def plain_step(
    name: str, params: list[Tensor], grads: list[Tensor], state: dict[str, Any], t: int, args: Any
) -> None:
    """Step number `t`, from 1, with numbers, bound and noise (a function) of each parameter."""
    if name == "sgdw":
        for p, g, (h, _, _) in zip(params, grads, args, strict=True):
            p.mul_(1 - h["lr"] * h["weight_decay"]).sub_(h["lr"] * g)
    elif name == "upgd":
        utility = state.setdefault("utility", [torch.zeros_like(p) for p in params])
        hats = []
        for p, g, u, (h, _, _) in zip(params, grads, utility, args, strict=True):
            beta = h["beta_utility"]
            u.mul_(beta).sub_((1 - beta) * g * p)
            hats.append(u / (1 - beta**t))
        eta = max(float(hat.max()) for hat in hats)
        for p, g, hat, (h, _, noise) in zip(params, grads, hats, args, strict=True):
            step = 2 * (g + h["sigma"] * noise(t - 1)) * torch.sigmoid(-hat / abs(eta))
            p.mul_(1 - h["lr"] * h["weight_decay"]).sub_(h["lr"] * step)
    elif name == "adamw":
        moments = state.setdefault(
            "m", [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        )
        for p, g, (m, v), (h, _, _) in zip(params, grads, moments, args, strict=True):
            b1, b2 = h["betas"]
            m.mul_(b1).add_((1 - b1) * g)
            v.mul_(b2).add_((1 - b2) * g * g)
            step = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + h["eps"])
            p.mul_(1 - h["lr"] * h["weight_decay"]).sub_(h["lr"] * step)
    else:
        slow = state.setdefault("slow", [torch.zeros_like(p) for p in params])
        for p, g, s, (h, bound, _) in zip(params, grads, slow, args, strict=True):
            w = (p - h["lr"] * g).clamp(-h["reach"] * bound, h["reach"] * bound)
            p.copy_(w - 0.1 * h["lr"] * s)
            if t % h["every"] == 0:
                s.copy_(w)


def plain_weights(learner: Learner, sizes: tuple[int, ...], steps: int, began: int = 0) -> Any:
    """The weights of a dense network after some steps."""
    model = build(sizes, learner.seed, task=began).double()
    params, layers = list(model.parameters()), len(sizes) - 1
    args = []
    for i, p in enumerate(params):
        role = "head" if i // 2 == layers - 1 else "input" if i // 2 == 0 else "hidden"

        def noise(step: int, i: int = i, shape: Any = p.shape) -> Tensor:
            return philox.normal(shape, learner.seed, i, began + step, dtype=torch.float64)

        args.append((of_role(dict(learner.hyper), role), 1 / math.sqrt(sizes[i // 2]), noise))
    state: dict[str, Any] = {}
    stream = small(learner.seed)
    for t in range(1, steps + 1):
        x, y = (torch.from_numpy(part) for part in stream.at(began + t - 1))
        grads = torch.autograd.grad(F.cross_entropy(model(x.double()), y), params)
        with torch.no_grad():
            plain_step(learner.method, params, list(grads), state, t, args)
    return torch.cat([p.detach().flatten() for p in params]).numpy()


ADAM = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3, "betas": (0.8, 0.9)}
UPGD = {"lr": 0.1, "weight_decay": 0.1, "sigma": 0.1, "beta_utility": 0.7}
LEARNERS = [
    Learner("sgdw", {"lr": 0.1, "weight_decay": 0.0, "head.weight_decay": 0.9}, 1),
    Learner("sgdw", {"lr": 0.1, "weight_decay": 0.5, "input.lr": 0.3, "hidden.weight_decay": 0}, 2),
    Learner("upgd", {**UPGD, "head.weight_decay": 0.9, "head.sigma": 0.0}, 3),
    Learner("upgd", {**UPGD, "head.beta_utility": 0.2, "input.beta_utility": 0.95}, 4),
    Learner("adamw", {**ADAM, "hidden.betas": (0.1, 0.6), "head.weight_decay": 2.0}, 5),
    Learner(ROW.name, {"lr": 0.3, "reach": 0.7, "every": 2, "head.every": 3}, 6),
    Learner(ROW.name, {"lr": 0.3, "reach": 0.5, "every": 3, "hidden.reach": 0.9}, 7),
]


def weights_of(stack: Any) -> list[Any]:
    places = stack.layout.places if hasattr(stack, "layout") else slice(None)
    found = dict(zip(stack.order, (numbers(w)[places] for w in stack.weights), strict=True))
    return [found[i] for i in range(len(found))]


def dense(path: str, learners: list[Learner], sizes: tuple[int, ...] = SIZES) -> Any:
    """A stack in float64 on this path; skips where it is not installed."""
    common: dict[str, Any] = {"loss": "cross_entropy", "steps": 10, "window": 1}
    if path.startswith("general"):
        common |= {"shape": sizes[:1], "dtype": torch.float64}
        stack = GeneralStack(lambda s, task: build(sizes, s, task=task), learners, **common)
        if path == "general, Triton":
            if not (HAS["triton"] and INTERPRETED):
                pytest.skip("needs Triton and TRITON_INTERPRET=1")
            from upgd.engine.general_cuda import FusedUpdates

            stack._fused = FusedUpdates(stack)
        return stack
    common["activation"] = "relu"
    if path == "numba":
        pytest.importorskip("numba")
        from upgd.engine.dense_cpu import CpuStack

        return CpuStack(Layout(sizes), learners, dtype=np.float64, **common)
    if not (HAS["triton"] and INTERPRETED):
        pytest.skip("needs Triton and TRITON_INTERPRET=1")
    from upgd.engine.dense_cuda import CudaStack

    return CudaStack(Layout(sizes), learners, dtype=torch.float64, device="cpu", **common)


def advance(stack: Any, learners: list[Learner], steps: int = STEPS) -> Any:
    samples = feed(learners, small)
    for stop in sorted({min(5, steps), steps}):  # a chunk reaches into the next task at most
        stack.advance(samples.chunk(stack.step, stop - stack.step))
    return stack


PATHS = ("numba", "Triton", "general", "general, Triton")


# ------------------------------------------------------------------------------------ stacks
@pytest.mark.parametrize("path", PATHS)
def test_stacks_know_layers(path: str) -> None:
    slow = "Triton" in path  # its interpreter
    learners, steps = (LEARNERS[:1] + LEARNERS[3:6:2], 3) if slow else (LEARNERS, STEPS)
    found = weights_of(advance(dense(path, learners), learners, steps))
    for learner, weights in zip(learners, found, strict=True):
        expected = plain_weights(learner, SIZES, steps)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9, err_msg=str(learner))


@pytest.mark.parametrize("path", ["numba", "general"])
def test_stacks_know_layers_of_aliases(path: str) -> None:
    named = Learner("sgd-head-decay", {"lr": 0.1}, 1)
    meant = Learner("sgdw", {"lr": 0.1, "weight_decay": 0.0, "head.weight_decay": 0.1}, 1)
    one, other = (weights_of(advance(dense(path, [each]), [each]))[0] for each in (named, meant))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("path", ["numba", pytest.param("Triton", marks=pytest.mark.slow)])
def test_a_learner_does_not_depend_on_its_neighbours(path: str) -> None:
    steps = 2 if path == "Triton" else STEPS
    together = advance(dense(path, LEARNERS), LEARNERS, steps)
    alone = advance(dense(path, LEARNERS[3:4]), LEARNERS[3:4], steps)
    mine = together.order.index(3)
    for name, saved in alone.state(0).items():
        np.testing.assert_array_equal(together.state(mine)[name], saved, err_msg=name)


@pytest.mark.parametrize("sizes", [(16, 10), (16, 5, 10)])
def test_few_layers(sizes: tuple[int, ...]) -> None:
    """The only layer is the head; the first of two is the input."""
    found = weights_of(advance(dense("numba", LEARNERS, sizes), LEARNERS))
    for learner, weights in zip(LEARNERS, found, strict=True):
        expected = plain_weights(learner, sizes, STEPS)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9, err_msg=str(learner))


@pytest.mark.parametrize("path", ["numba", "general"])
def test_a_restart_counts_from_one(path: str) -> None:
    """A period counts the steps of a learner, not those of the stream; a checkpoint knows it."""
    learners = LEARNERS[-2:]
    stack = advance(dense(path, learners), learners, 5)
    stack.restart(1)
    stack.advance(feed(learners, small).chunk(5, 1))
    other = dense(path, learners)
    for run in range(2):
        other.restore(run, stack.state(run))
    other.step = stack.step
    other.advance(feed(learners, small).chunk(6, 4))
    for weights, learner in zip(weights_of(other), learners, strict=True):
        model = build(SIZES, learner.seed, task=1).double()
        start = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
        expected = restarted(learner, start, 5, 5)
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9)


def restarted(learner: Learner, start: Any, first: int, steps: int) -> Any:
    """The weights of the rule with period, from `start` on at sample `first`."""
    model = build(SIZES, learner.seed).double()
    params, at = list(model.parameters()), 0
    with torch.no_grad():
        for p in params:
            p.copy_(torch.from_numpy(start[at : at + p.numel()]).view(p.shape))
            at += p.numel()
    hyper, stream, state = dict(learner.hyper), small(learner.seed), {}
    args = [(of_role(hyper, ROLES[i // 2]), 1 / math.sqrt(SIZES[i // 2]), None) for i in range(6)]
    for t in range(1, steps + 1):
        x, y = (torch.from_numpy(part) for part in stream.at(first + t - 1))
        grads = torch.autograd.grad(F.cross_entropy(model(x.double()), y), params)
        with torch.no_grad():
            plain_step(learner.method, params, list(grads), state, t, args)
    return torch.cat([p.detach().flatten() for p in params]).numpy()


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda each: f"{each.method}-{each.seed}")
def test_the_eager_engine_knows_layers(learner: Learner) -> None:
    class Double(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.double()

    def network(seed: int, task: int) -> nn.Module:
        return nn.Sequential(Double(), build(SIZES, seed, task=task).double())

    setting = Setting(learner.method, learner.hyper, learner.seed, window=1)
    run = EagerRun(small(learner.seed), network, setting)
    run.advance(STEPS)
    found = torch.cat([p.detach().flatten() for p in run.model.parameters()]).numpy()
    np.testing.assert_allclose(found, plain_weights(learner, SIZES, STEPS), rtol=0, atol=1e-9)


def test_a_checkpoint_of_one_correction_for_all_layers_is_read() -> None:
    stack = advance(dense("numba", LEARNERS[4:5]), LEARNERS[4:5])
    saved = stack.state(0)
    stack.restore(0, {**saved, "corrections": saved["corrections"][0, :5]})
    np.testing.assert_array_equal(stack.corrections[0, :, 0], saved["corrections"][0, 0])


# -------------------------------------------------------------------------------- optimizers
def network() -> nn.Sequential:
    """Layers of which no two have the same number of inputs, and a normalisation."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 4, 3), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 5), nn.Linear(5, 2)]
    return nn.Sequential(*layers).double()


OPTIONS = {
    "reference": {"foreach": False},
    "foreach": {"foreach": True},
    "packed": {"foreach": True, "nonfinite": "skip"},
    "fused": {"fused": True},
    "Triton": {"fused": True},
}


@pytest.mark.parametrize("path", OPTIONS)
def test_optimizers_know_bounds_and_periods(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "fused":
        pytest.importorskip("numba")
    if path == "Triton":
        if not (HAS["triton"] and INTERPRETED):
            pytest.skip("needs Triton and TRITON_INTERPRET=1")
        from upgd.kernels import triton_flat
        from upgd.optim.fused_cuda import Cuda

        monkeypatch.setattr(fused, "_backend", lambda kind: Cuda)
        monkeypatch.setattr(triton_flat, "BLOCK", 32)
    model, other = network(), network()
    generator = torch.Generator().manual_seed(1)
    opt = ROW.optimizer(model.parameters(), lr=0.2, reach=0.8, every=3.2, **OPTIONS[path])
    params, state = list(other.parameters()), {}
    hyper = {"lr": 0.2, "reach": 0.8, "every": 3}
    args = [(hyper, 1 / math.sqrt(fan_in), None) for fan_in in (6, 6, 1, 1, 8, 8, 5, 5)]
    for t in range(1, STEPS + 1):
        x, y = (torch.randn(*s, generator=generator).double() for s in ((3, 2, 4), (3, 2)))
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
        grads = torch.autograd.grad((other(x) - y).square().mean(), params)
        with torch.no_grad():
            plain_step(ROW.name, params, list(grads), state, t, args)
    for p, q, s in zip(model.parameters(), params, state["slow"], strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-9)
        torch.testing.assert_close(opt.state[p]["slow"], s, rtol=0, atol=1e-9)


def test_a_rule_that_reads_due_needs_a_period() -> None:
    phases = (Phase(clipped, writes=("w", "slow")),)
    with pytest.raises(ValueError, match="no period"):
        Method(hyper=("lr", "reach"), states=("slow",), phases=phases)
    with pytest.raises(ValueError, match="no hyperparameter"):
        Method(hyper=("lr",), phases=(), period="every")
    with pytest.raises(ValueError, match="period='every' beside every=1000; got 1000"):
        rule_row("mine", clipped, states=["slow"], period=1000, lr=0.1, reach=1.0)
    with pytest.raises(ValueError, match="clipped reads 'due'"):
        rule_row("mine", clipped, states=["slow"], lr=0.1, reach=1.0)


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))


ROLE_CASES: list[tuple[Callable[[], nn.Module], list[str]]] = [
    (lambda: nn.Linear(2, 2), ["head"] * 2),
    (network, ["input"] * 4 + ["hidden"] * 2 + ["head"] * 2),
    (embedded, ["hidden"] + ["input"] * 4 + ["head"] * 2),
    (Tied, ["head", *["input"] * 4, *["hidden"] * 2]),
]


@pytest.mark.parametrize(("make", "expected"), ROLE_CASES)
def test_roles(make: Callable[[], nn.Module], expected: list[str]) -> None:
    model = make()
    assert roles(model) == expected
    groups = upgd.layer_groups(model, head={"lr": 0.5})
    assert sorted(n for g in groups for n in g["param_names"]) == sorted(
        name for name, _ in model.named_parameters()
    )
    in_head = [p for group in groups if group.get("lr") == 0.5 for p in group["params"]]
    params = [p for p, role in zip(model.parameters(), expected, strict=True) if role == "head"]
    assert [id(p) for p in in_head] == [id(p) for p in params]


def test_layer_groups_of_named_heads() -> None:
    groups = upgd.layer_groups(network(), output=["3", "4"], lr=0.1, hidden=None)
    assert [group["param_names"][0] for group in groups] == ["0.weight", "3.weight"]
    with pytest.raises(ValueError, match="'5' is not a linear or convolutional layer"):
        upgd.layer_groups(network(), output="5")
    with pytest.raises(ValueError, match=r"hidden=.*Linear has no such layer"):
        upgd.layer_groups(nn.Linear(2, 2), hidden={"lr": 0.1})
    with pytest.raises(ValueError, match="no linear or convolutional layer"):
        upgd.layer_groups(nn.LayerNorm(3))


@pytest.mark.parametrize("optimizer", [upgd.UPGD, torch.optim.AdamW])
def test_layer_groups_are_for_any_optimizer(optimizer: Any) -> None:
    model = network()
    groups = upgd.layer_groups(model, head={"weight_decay": 0.5}, weight_decay=0.0)
    opt = optimizer(groups, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if optimizer is upgd.UPGD:
        for group in opt.param_groups:
            group["sigma"] = 0.0
    opt.step()
    for i, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
        factor = 0.95 if i >= 6 else 1.0
        torch.testing.assert_close(p.detach(), factor * old)
