"""Curvature of whole networks, of gates, and what the functions that compute it promise."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.cases import assert_equal, batches, every_device, loss_of, network, weights
from tests.exact import exact_diagonal
from upgd import UPGD, AdaUPGD, Features, FeatureUPGD, curvature
from upgd.curvature.walk import RULES, Rule

DOUBLE = torch.float64
METHODS = ("hesscale", "ggn", "hutchinson")
every_curvature = pytest.mark.parametrize("method", METHODS)
pytestmark = [  # of torch.func, which the exact side uses
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
]


def for_examples(
    count: int, check: Callable[..., None], **strategies: Callable[[Any], Any]
) -> None:
    """Run `check` on `count` drawn sets of arguments; machines with a GPU may lack hypothesis."""
    hypothesis = pytest.importorskip("hypothesis")
    drawn = {name: make(hypothesis.strategies) for name, make in strategies.items()}
    few = hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
    )
    few(hypothesis.given(**drawn)(check))()


# --------------------------------------------------------------------------- helpers
def double(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules).to(DOUBLE)


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes):
        modules += [nn.Linear(i, o), activation()]
    model = double(*modules[:-1])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int, seed: int = 2) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def exact(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """The exact Hessian diagonal of ``loss(model)`` for each parameter."""
    names = [name for name, _ in model.named_parameters()]

    class Given(nn.Module):
        def __init__(self, values: tuple[Tensor, ...]) -> None:
            super().__init__()
            self.values = values

        def forward(self, *args: Any) -> Any:
            given_ = dict(zip(names, self.values, strict=True))
            return torch.func.functional_call(model, given_, args)

    return exact_diagonal(lambda *values: loss(Given(values)), list(model.parameters()))


def off(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error, relative to 1 + the largest element; NaN counts as infinite."""
    worst = 0.0
    for h, e in zip(found, expected, strict=True):
        assert h.shape == e.shape
        h, e = h.detach(), e.detach()
        error = float((h - e).abs().max() / (1 + e.abs().max()))
        worst = max(worst, error if error == error else np.inf)
    return worst


def curvatures(model: nn.Module) -> list[Tensor]:
    return [p.curvature for p in model.parameters()]  # type: ignore[attr-defined]


def clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
        p.__dict__.pop("curvature", None)


def assert_unbiased(samples: list[list[Tensor]], expected: list[Tensor]) -> None:
    """The means lie within five standard errors of what is expected."""
    for i, e in enumerate(expected):
        drawn, e = torch.stack([sample[i] for sample in samples]), e.detach()
        error = drawn.std(0) / len(samples) ** 0.5
        assert float(((drawn.mean(0) - e).abs() - 5 * error).max()) < 1e-10
        assert 5 * float(error.max()) < float(e.abs().max())  # so that a large bias would show


# ------------------------------------------------------------- exact in the last layer
CLASSES = 4
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.0], dtype=DOUBLE)
CLASS_LABELS = labels(6, CLASSES)
SOME_LABELS = torch.where(torch.arange(6) == 1, -100, CLASS_LABELS)
SOFT = normal(6, CLASSES, seed=3).softmax(1)
REAL = normal(6, CLASSES, seed=4)
BINARY = (REAL > 0).to(DOUBLE)
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda a: F.cross_entropy(a, CLASS_LABELS),
    "cross_entropy, sum": lambda a: F.cross_entropy(a, CLASS_LABELS, reduction="sum"),
    "cross_entropy, smoothed": lambda a: F.cross_entropy(a, CLASS_LABELS, label_smoothing=0.3),
    "cross_entropy, weighted": lambda a: F.cross_entropy(a, CLASS_LABELS, CLASS_WEIGHTS),
    "cross_entropy, weighted and smoothed": lambda a: F.cross_entropy(
        a, CLASS_LABELS, CLASS_WEIGHTS, label_smoothing=0.3, reduction="sum"
    ),
    "cross_entropy, some ignored": lambda a: F.cross_entropy(a, SOME_LABELS),
    "cross_entropy, some ignored, smoothed": lambda a: F.cross_entropy(
        a, SOME_LABELS, label_smoothing=0.2
    ),
    "cross_entropy of probabilities": lambda a: F.cross_entropy(a, SOFT, label_smoothing=0.1),
    "nll_loss of log_softmax": lambda a: F.nll_loss(a.log_softmax(1), CLASS_LABELS, CLASS_WEIGHTS),
    "logsumexp, by hand": lambda a: (
        a.logsumexp(1) - a.gather(1, CLASS_LABELS[:, None]).squeeze(1)
    ).mean(),
    "kl_div": lambda a: F.kl_div(a.log_softmax(1), SOFT, reduction="batchmean"),
    "mse": lambda a: F.mse_loss(a, REAL),
    "mse, sum": lambda a: F.mse_loss(a, REAL, reduction="sum"),
    "bce_with_logits": lambda a: F.binary_cross_entropy_with_logits(a, BINARY),
    "bce_with_logits, sum": lambda a: F.binary_cross_entropy_with_logits(
        a, BINARY, reduction="sum"
    ),
    "bce_with_logits, pos_weight": lambda a: F.binary_cross_entropy_with_logits(
        a, BINARY, pos_weight=CLASS_WEIGHTS + 1
    ),
    "bce_with_logits, weight": lambda a: F.binary_cross_entropy_with_logits(
        a, SOFT, weight=CLASS_WEIGHTS
    ),
    "soft_margin": lambda a: F.soft_margin_loss(a, 2 * BINARY - 1),
    "huber": lambda a: F.huber_loss(a, REAL),
    "huber, delta 0.3, sum": lambda a: F.huber_loss(a, REAL, delta=0.3, reduction="sum"),
    "huber, delta 2": lambda a: F.huber_loss(a, REAL, delta=2.0),
    "smooth_l1": lambda a: F.smooth_l1_loss(a, REAL, beta=0.5),
}
HAND_MADE: dict[str, Callable[[Tensor], Tensor]] = {  # the network's own second derivatives count
    "bce of sigmoid": lambda a: F.binary_cross_entropy(a.sigmoid(), BINARY),
    "bce of sigmoid, sum": lambda a: F.binary_cross_entropy(a.sigmoid(), BINARY, reduction="sum"),
    "mse by hand": lambda a: (a - REAL).square().mean(),
    "l1": lambda a: F.l1_loss(a, REAL),
    "poisson": lambda a: F.poisson_nll_loss(a, REAL.abs()),
}
NO_FORWARD_MODE = {  # written out for the exact side, where torch.func lacks a formula
    "mse": lambda a: ((a - REAL) ** 2).mean(),
    "soft_margin": lambda a: (1 + (-(2 * BINARY - 1) * a).exp()).log().mean(),
    "huber": lambda a: huber(a - REAL, 1.0).mean(),
    "huber, delta 0.3, sum": lambda a: huber(a - REAL, 0.3).sum(),
    "huber, delta 2": lambda a: huber(a - REAL, 2.0).mean(),
}


def huber(error: Tensor, delta: float) -> Tensor:
    size = error.abs()
    return torch.where(size < delta, error**2 / 2, delta * (size - delta / 2))


@pytest.mark.parametrize("name", [*LOSSES, *HAND_MADE])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_last_layer_is_exact(name: str, activation: Callable[[], nn.Module]) -> None:
    loss = {**LOSSES, **HAND_MADE}[name]
    model = mlp(5, 7, CLASSES, activation=activation)
    x = normal(6, 5)
    last = list(model[-1].parameters())
    found = curvature.diagonal(loss(model(x)), last)
    plain = NO_FORWARD_MODE.get(name, loss)
    assert off(found, exact(model, lambda m: plain(m(x)))[-2:]) < 1e-8


@pytest.mark.parametrize("name", LOSSES)
def test_gauss_newton_of_piecewise_linear_networks_leaves_nothing_out(name: str) -> None:
    model = mlp(5, 7, 6, CLASSES, activation=nn.ReLU)
    params = list(model.parameters())
    loss = LOSSES[name](model(normal(6, 5)))
    ggn = curvature.diagonal(loss, params, method="ggn")
    assert off(ggn, curvature.diagonal(loss, params)) < 1e-12
    assert max(float(h.max()) for h in ggn) > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_gauss_newton_is_never_negative(name: str) -> None:
    for seed, activation in enumerate((nn.Tanh, nn.GELU, nn.SiLU, nn.Mish)):
        model = mlp(5, 7, 6, CLASSES, activation=activation, seed=seed)
        params = list(model.parameters())
        loss = LOSSES[name](model(normal(6, 5, seed=seed)))
        ggn = curvature.diagonal(loss, params, method="ggn")
        assert min(float(h.min()) for h in ggn) >= 0
        # ... which is something to say, as the Hessian's diagonal is not.
        full = curvature.diagonal(loss, params)
        assert min(float(h.min()) for h in full) < 0


def test_gauss_newton_leaves_out_concave_losses() -> None:
    """Rewarded and punished actions: what is punished is concave in the logits."""
    model = mlp(5, 7, CLASSES)
    x, advantage = normal(6, 5), normal(6, seed=7)
    assert advantage.min() < 0 < advantage.max()
    last = list(model[-1].parameters())

    def loss(advantage: Tensor) -> Tensor:
        chosen = model(x).log_softmax(1).gather(1, CLASS_LABELS[:, None]).squeeze(1)
        return -(advantage * chosen).sum()

    ggn = curvature.diagonal(loss(advantage), last, method="ggn")
    assert min(float(h.min()) for h in ggn) >= 0
    assert off(ggn, curvature.diagonal(loss(advantage.clamp_min(0)), last)) < 1e-12


# --------------------------------------------- exact where Hessians are diagonal all along
SMOOTH: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
}
SCALAR_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda a: (a - 0.7).square().mean(),
    "bce": lambda a: F.binary_cross_entropy_with_logits(a, torch.full_like(a, 0.3)),
    "huber": lambda a: huber(a - 0.4, 0.5).sum(),
    "the output": lambda a: a.sum(),
}
OURS = {
    "mse": lambda a: F.mse_loss(a, torch.full_like(a, 0.7)),
    "huber": lambda a: F.huber_loss(a, torch.full_like(a, 0.4), delta=0.5, reduction="sum"),
}


class Elementwise(nn.Module):
    """Every element has a weight and a bias of its own, and never meets another one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.bias = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def chain(kind: str, depth: int, names: list[str], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i in range(depth):
        layers.append(nn.Linear(1, 1) if kind == "width one" else Elementwise(3))
        layers.append(SMOOTH[names[i % len(names)]]())
    return double(*layers[:-1])


@pytest.mark.parametrize("kind", ["width one", "elementwise"])
@pytest.mark.parametrize("name", SMOOTH)
def test_all_layers_are_exact_without_off_diagonals(name: str, kind: str) -> None:
    def check(depth: int, more: list[str], loss: str, batch: int, seed: int) -> None:
        model = chain(kind, depth, [name, *more], seed)
        x = normal(batch, 1 if kind == "width one" else 3, seed=seed)
        ours = OURS.get(loss, SCALAR_LOSSES[loss])
        found = curvature.diagonal(ours(model(x)), list(model.parameters()))
        assert off(found, exact(model, lambda m: SCALAR_LOSSES[loss](m(x)))) < 1e-8

    for_examples(
        4,
        check,
        depth=lambda st: st.integers(2, 4),
        more=lambda st: st.lists(st.sampled_from(sorted(SMOOTH)), max_size=2),
        loss=lambda st: st.sampled_from(sorted(SCALAR_LOSSES)),
        batch=lambda st: st.integers(1, 3),
        seed=lambda st: st.integers(0, 2**16),
    )


def test_off_diagonals_are_dropped() -> None:
    """A limit of the method, and the proof that the tests of exactness could fail."""
    model = mlp(4, 5, 3)
    x, y = normal(6, 4), labels(6, 3)
    found = curvature.diagonal(F.cross_entropy(model(x), y), list(model.parameters()))
    expected = exact(model, lambda m: F.cross_entropy(m(x), y))
    assert off(found[2:], expected[2:]) < 1e-10
    assert off(found[:2], expected[:2]) > 1e-3


# ---------------------------------------------- the paper's equations, plain and slow
Derivative = Callable[[float], float]
PLAIN: dict[str, tuple[Callable[[], nn.Module], Derivative, Derivative, Derivative]] = {
    "relu": (nn.ReLU, lambda a: max(a, 0.0), lambda a: float(a > 0), lambda a: 0.0),
    "leaky": (
        lambda: nn.LeakyReLU(0.2),
        lambda a: a if a > 0 else 0.2 * a,
        lambda a: 1.0 if a > 0 else 0.2,
        lambda a: 0.0,
    ),
    "tanh": (
        nn.Tanh,
        lambda a: float(np.tanh(a)),
        lambda a: float(1 - np.tanh(a) ** 2),
        lambda a: float(-2 * np.tanh(a) * (1 - np.tanh(a) ** 2)),
    ),
}


class Sample:
    """HesScale for one sample, element by element, as the paper's appendix writes it.

    Attributes:
        gradients, hessians: ∂L/∂W, ∂²L/∂W² and the same for b, layer by layer.
        gates: h² · ∂²L/∂h² of each hidden layer.
    """

    def __init__(self, model: nn.Sequential, name: str, x: Any, y: Any, scale: float) -> None:
        _, sigma, first, second = PLAIN[name]
        layers = [m for m in model if isinstance(m, nn.Linear)]
        W = [m.weight.detach().numpy() for m in layers]
        b = [m.bias.detach().numpy() for m in layers]
        h = [x]
        a: list[Any] = []
        for l, (w, bias) in enumerate(zip(W, b, strict=True)):
            a.append(np.array([sum(w[i] * h[l]) + bias[i] for i in range(len(bias))]))
            h.append(np.array([sigma(z) for z in a[l]]))
        # The loss: cross-entropy for a label, squared error for a vector.
        if np.ndim(y) == 0:
            q = np.exp(a[-1] - a[-1].max()) / np.exp(a[-1] - a[-1].max()).sum()
            p = np.eye(len(q))[int(y)]
            da, d2a = scale * (q - p), scale * (q - q * q)
        else:
            da, d2a = scale * 2 * (a[-1] - y), scale * 2 * np.ones_like(y)
        self.gradients: list[Any] = []
        self.hessians: list[Any] = []
        self.gates: list[Any] = []
        for l in reversed(range(len(W))):
            self.gradients[:0] = [np.outer(da, h[l]), da]
            self.hessians[:0] = [np.outer(d2a, h[l] ** 2), d2a]
            if l == 0:
                break
            below, below2, dh2 = (np.zeros(len(h[l])) for _ in range(3))
            for i in range(len(h[l])):
                for k in range(len(da)):
                    d1, d2 = first(a[l - 1][i]), second(a[l - 1][i])
                    below[i] += da[k] * W[l][k, i] * d1
                    below2[i] += d2a[k] * W[l][k, i] ** 2 * d1**2 + da[k] * W[l][k, i] * d2
                    dh2[i] += d2a[k] * W[l][k, i] ** 2
            self.gates[:0] = [h[l] ** 2 * dh2]
            da, d2a = below, below2


def slow(model: nn.Sequential, name: str, x: Tensor, y: Tensor) -> dict[str, list[Tensor]]:
    """The mean over a batch of what :class:`Sample` finds (for squared errors over elements)."""
    count = len(x) if y.dim() == 1 else y.numel()
    samples = [
        Sample(model, name, *pair, 1 / count) for pair in zip(x.numpy(), y.numpy(), strict=True)
    ]
    return {
        what: [
            torch.tensor(np.sum(parts, axis=0))
            for parts in zip(*[getattr(s, what) for s in samples], strict=True)
        ]
        for what in ("gradients", "hessians", "gates")
    }


def test_networks_follow_the_papers_equations() -> None:
    def check(name: str, sizes: list[int], batch: int, classes: bool, seed: int) -> None:
        model = mlp(*sizes, activation=PLAIN[name][0], seed=seed)
        x = normal(batch, sizes[0], seed=seed)
        y = labels(batch, sizes[-1], seed) if classes else normal(batch, sizes[-1], seed=seed + 1)
        loss = F.cross_entropy if classes else F.mse_loss
        expected = slow(model, name, x, y)
        features = Features(model) if len(sizes) > 2 else None
        curvature.backward(loss(model(x), y), features=features)
        assert off([p.grad for p in model.parameters()], expected["gradients"]) < 1e-10
        assert off(curvatures(model), expected["hessians"]) < 1e-10
        if features is not None:
            assert off([layer.second for layer in features.layers], expected["gates"]) < 1e-10

    for_examples(
        25,
        check,
        name=lambda st: st.sampled_from(sorted(PLAIN)),
        sizes=lambda st: st.lists(st.integers(1, 5), min_size=2, max_size=5),
        batch=lambda st: st.integers(1, 5),
        classes=lambda st: st.booleans(),
        seed=lambda st: st.integers(0, 2**16),
    )


# ------------------------------------------------------------------ residuals, fan-out
class Residual(nn.Module):
    """``W3·(h + tanh(W2·h))`` with ``h = tanh(W1·x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x).tanh()
        return self.three(h + self.two(h).tanh())


def test_residual_branches_add_up() -> None:
    torch.manual_seed(0)
    model = Residual().to(DOUBLE)
    x, y = normal(5, 3), normal(5, 2, seed=3)
    found = curvature.diagonal(F.mse_loss(model(x), y), list(model.parameters()))
    W1, b1, W2, b2, W3, b3 = (p.detach().numpy() for p in model.parameters())
    expected = [np.zeros_like(p) for p in (W1, b1, W2, b2, W3, b3)]
    for s, t in zip(x.numpy(), y.numpy(), strict=True):
        h1 = np.tanh(W1 @ s + b1)
        h2 = np.tanh(W2 @ h1 + b2)
        out = W3 @ (h1 + h2) + b3
        g3, c3 = 2 * (out - t) / y.numel(), 2 * np.ones(2) / y.numel()
        g_sum, c_sum = g3 @ W3, c3 @ W3**2  # of h1 + h2, so of both terms
        d = 1 - h2**2
        g2, c2 = g_sum * d, c_sum * d**2 + g_sum * (-2 * h2 * d)
        g_h1, c_h1 = g_sum + g2 @ W2, c_sum + c2 @ W2**2  # the two branches add up
        d = 1 - h1**2
        c1 = c_h1 * d**2 + g_h1 * (-2 * h1 * d)
        for total, part in zip(
            expected,
            (np.outer(c1, s**2), c1, np.outer(c2, h1**2), c2, np.outer(c3, (h1 + h2) ** 2), c3),
            strict=True,
        ):
            total += part
    assert off(found, [torch.tensor(e) for e in expected]) < 1e-12


def test_branches_that_do_not_meet_are_exact() -> None:
    """Half of the outputs see x directly, the others through a layer: no cross terms."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(DOUBLE)
    keep = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=DOUBLE)
    d = normal(3, 4, seed=5)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = keep * x + (1 - keep) * F.linear(x, weight, bias)
        return (d * (y + y.square())).sum()

    tensors = [normal(3, 4).requires_grad_(), *layer.parameters()]
    found = curvature.diagonal(loss(*tensors), tensors)
    assert off(found, exact_diagonal(loss, tensors)) < 1e-10


def test_a_tied_weight_gets_the_sum_over_its_places() -> None:
    apart = mlp(4, 4, 4, 2)
    with torch.no_grad():
        apart[2].weight.copy_(apart[0].weight)
    tied = copy.deepcopy(apart)
    tied[2].weight = tied[0].weight
    x, y = normal(5, 4), labels(5, 2)
    first, second = curvature.diagonal(
        F.cross_entropy(apart(x), y), [apart[0].weight, apart[2].weight]
    )
    (both,) = curvature.diagonal(F.cross_entropy(tied(x), y), [tied[0].weight])
    assert off([both], [first + second]) < 1e-12


def test_inner_tensors_and_leaves_in_one_call() -> None:
    """What is asked for does not change what is found, and the walk goes on below it."""
    model = mlp(3, 4, 2)
    x = normal(5, 3).requires_grad_()
    a = model[0](x)
    h = model[1](a)
    out = model[2](h)
    loss = F.mse_loss(out, torch.zeros_like(out))
    asked = [out, h, a, x, model[0].weight]
    together = curvature.diagonal(loss, asked)
    for t, found in zip(asked, together, strict=True):
        (alone,) = curvature.diagonal(loss, [t])
        assert torch.equal(alone, found)
    assert off(together[:1], [torch.full_like(out, 2 / out.numel())]) < 1e-12

    def tail(h: Tensor) -> Tensor:
        return F.linear(h, model[2].weight, model[2].bias).square().mean()

    assert off(together[1:2], exact_diagonal(tail, [h])) < 1e-12  # squares are a diagonal Hessian


def test_an_inner_tensor_gets_the_sum_over_its_consumers() -> None:
    x = normal(3, 4).requires_grad_()
    W = normal(4, 5, seed=2)

    def tail(a: Tensor) -> Tensor:
        return a.tanh().sum() + (2 * a).sin().sum() + a.square().sum() + a.t().exp().sum()

    a = x @ W
    assert off(curvature.diagonal(tail(a), [a]), exact_diagonal(tail, [a])) < 1e-10


# ------------------------------------------------------------------------- hutchinson
def scrambled(x: Tensor) -> Tensor:
    """An operation that has no rule."""
    return x.logcumsumexp(-1)


def draws(loss: Tensor, tensors: list[Any], count: int = 300) -> list[list[Tensor]]:
    options: Any = {"method": "hutchinson"}
    return [curvature.diagonal(loss, tensors, seed=s, **options) for s in range(count)]


def test_hutchinson_is_unbiased() -> None:
    model = mlp(3, 4, 2)
    x, y = normal(5, 3), labels(5, 2)
    params = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    samples = draws(loss, params)
    assert_unbiased(samples, exact(model, lambda m: F.cross_entropy(m(x), y)))


def test_hutchinson_needs_no_rules() -> None:
    x = normal(4).requires_grad_()
    c = normal(4, seed=6)

    def f(x: Tensor) -> Tensor:
        return (c * scrambled(x)).square().sum()

    with pytest.raises(curvature.UnsupportedOperationError, match="Logcumsumexp"):
        curvature.diagonal(f(x), [x])
    loss = f(x)
    samples = draws(loss, [x])
    hessian = torch.autograd.functional.hessian(f, x.detach())
    assert_unbiased(samples, [hessian.diagonal()])


def test_hutchinson_of_inner_tensors_is_unbiased() -> None:
    """Signs on a tensor and on what it is made of must not disturb each other."""
    x = normal(4).requires_grad_()
    W = normal(3, 4, seed=2)

    def tail(a: Tensor) -> Tensor:
        return (a.tanh().sum() ** 2) + a.sin().sum()

    a = W @ x
    loss = tail(a)
    samples = draws(loss, [x, a])
    expected = exact_diagonal(lambda x: tail(W @ x), [x]) + exact_diagonal(tail, [a])
    assert_unbiased(samples, expected)


def test_samples_are_averaged_and_seeds_reproduce() -> None:
    model = mlp(3, 4, 2)
    loss = F.cross_entropy(model(normal(5, 3)), labels(5, 2))
    params = list(model.parameters())

    def draw(**options: Any) -> list[Tensor]:
        return curvature.diagonal(loss, params, method="hutchinson", **options)

    torch.manual_seed(0)
    single = [draw() for _ in range(4)]
    torch.manual_seed(0)
    mean = [torch.stack(parts).mean(0) for parts in zip(*single, strict=True)]
    assert off(draw(samples=4), mean) < 1e-12
    torch.manual_seed(1)
    one = draw(seed=3)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert_equal(one, draw(seed=3))
    assert torch.equal(before, torch.get_rng_state())  # a seed leaves the global generator alone
    assert off(one, draw(seed=4)) > 1e-3


# ------------------------------------------------------------------------------ gates
class Gated(nn.Module):
    """A sequential network with a real factor on the output of some of its modules."""

    def __init__(self, model: nn.Sequential, after: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.model, self.after = model, after

    def forward(self, x: Tensor, *gates: Tensor) -> Tensor:
        given_ = dict(zip(self.after, gates, strict=True))
        for name, module in self.model.named_children():
            x = module(x)
            if name in given_:
                x = x * given_[name].reshape(self.after[name])
        return x


def gate_curvature(
    model: nn.Sequential,
    after: dict[str, tuple[int, ...]],
    loss: Callable[[Tensor], Tensor],
    x: Tensor,
) -> list[Tensor]:
    """The exact second derivatives with respect to gates fixed at 1, one gate at a time."""
    gated = Gated(model, after)
    ones = [torch.ones(shape, dtype=DOUBLE).flatten() for shape in after.values()]
    return exact_diagonal(lambda *gates: loss(gated(x, *gates)), ones)


def seconds(
    model: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor, **options: Any
) -> list[Tensor]:
    features = Features(model)
    curvature.backward(loss(model(x)), features=features, **options)
    features.remove()
    found = [layer.second for layer in features.layers]
    assert all(s is not None for s in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, nn.GELU])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 3, 4)])
def test_gates_on_the_last_hidden_layer_are_exact(
    activation: Any, outputs: int, shape: tuple[int, ...]
) -> None:
    """A real gate shared by the batch: the outputs are linear in it, and MSE is diagonal."""
    model = mlp(4, 6, outputs, activation=activation)
    x, y = normal(*shape), normal(*shape[:-1], outputs, seed=4)
    expected = gate_curvature(model, {"1": (6,)}, lambda a: (a - y).square().mean(), x)
    assert off(seconds(model, lambda a: F.mse_loss(a, y), x), expected) < 1e-10


@pytest.mark.parametrize("batch", [True, False])
def test_gates_on_channels_are_exact(batch: bool) -> None:
    """A 1×1 convolution keeps positions apart, so that no cross terms arise."""
    torch.manual_seed(0)
    model = double(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 1))
    x = normal(*((3, 2, 5, 4) if batch else (2, 5, 4)))

    def loss(a: Tensor) -> Tensor:
        return (a - 0.3).square().mean()

    expected = gate_curvature(model, {"1": (4, 1, 1)}, loss, x)
    assert off(seconds(model, loss, x), expected) < 1e-10


def test_hutchinson_gates_are_exact_where_gates_do_not_meet() -> None:
    """A channel's positions and samples meet in its own output: all of that belongs to its gate."""
    torch.manual_seed(0)
    model = double(nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Conv1d(4, 4, 3, groups=4))
    x = normal(3, 2, 4)

    def loss(a: Tensor) -> Tensor:
        return a.sum(0).square().sum() + (a - 0.3).square().sum()

    expected = gate_curvature(model, {"1": (4, 1)}, loss, x)
    assert off(seconds(model, loss, x, params=(), method="hutchinson"), expected) < 1e-10


def test_hutchinson_gates_are_unbiased() -> None:
    """Also below the last layer, and with gates on several layers at once."""
    torch.manual_seed(0)
    model = double(
        nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    x, y = normal(3, 2, 4), normal(3, 2)

    def loss(a: Tensor) -> Tensor:
        return (a - y).square().sum()

    expected = gate_curvature(model, {"1": (3, 1), "4": (4,)}, loss, x)
    options: Any = {"method": "hutchinson", "params": ()}
    assert_unbiased([seconds(model, loss, x, seed=s, **options) for s in range(200)], expected)


@every_curvature
def test_a_gate_counts_once_whatever_follows_its_layer(method: str) -> None:
    """Normalisation, dropout and identity hand the gate on to the activation."""
    torch.manual_seed(0)
    model = double(
        *(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Identity(), nn.Tanh()),
        nn.Linear(6, 1),
    ).eval()
    x = normal(5, 4)

    def loss(a: Tensor) -> Tensor:
        return F.mse_loss(a, torch.full_like(a, 0.3))

    expected = gate_curvature(model, {"4": (6,)}, lambda a: (a - 0.3).square().mean(), x)
    if method == "hutchinson":
        samples = [seconds(model, loss, x, method=method, params=(), seed=s) for s in range(100)]
        assert_unbiased(samples, expected)
    else:
        assert off(seconds(model, loss, x, method=method), expected) < 1e-10


def test_a_gate_with_two_consumers_counts_once() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.act = nn.Linear(3, 4), nn.Tanh()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor, gate: Tensor | float = 1.0) -> Tensor:
            h = self.act(self.body(x)) * gate
            return torch.cat([self.actor(h), self.critic(h)], -1)

    torch.manual_seed(0)
    model = TwoHeads().to(DOUBLE)
    x = normal(5, 3)
    features = Features(model, output=["actor", "critic"])
    curvature.backward(model(x).square().sum(), features=features)
    features.remove()
    ones = torch.ones(4, dtype=DOUBLE)
    expected = exact_diagonal(lambda gate: model(x, gate).square().sum(), [ones])
    assert off([features.layers[0].second], expected) < 1e-10


def test_units_are_not_mixed() -> None:
    """The authors' code summed the curvature of a layer's gates over its units."""
    model = mlp(4, 6, 6)
    with torch.no_grad():
        model[2].weight.copy_(torch.diag(torch.arange(1.0, 7.0)))  # each unit has its own output
    x = normal(5, 4)

    def loss(a: Tensor) -> Tensor:
        return a.square().sum()

    (before,) = seconds(model, loss, x)
    assert before.shape == (6,)
    assert len(set(before.tolist())) == 6
    clear(model)
    with torch.no_grad():
        model[0].weight[2] *= 3
        model[2].weight[4, 4] = 0
    (after,) = seconds(model, loss, x)
    changed = (before - after).abs() > 1e-12
    assert changed.tolist() == [False, False, True, False, True, False]
    assert float(after[4]) == 0


@every_curvature
def test_first_derivatives_of_gates_are_those_of_backward(method: Any) -> None:
    """Other passes that an estimate needs are not counted."""
    model = mlp(4, 6, 6, 2, activation=nn.GELU)
    x, y = normal(5, 4), labels(5, 2)
    features = Features(model)
    F.cross_entropy(model(x), y).backward()
    expected = [layer.first for layer in features.layers]
    features.reset()
    curvature.backward(F.cross_entropy(model(x), y), method=method, features=features, samples=2)
    assert off([layer.first for layer in features.layers], expected) < 1e-12


def test_gates_add_up_over_backward_passes_and_are_reset() -> None:
    model = mlp(4, 6, 2)
    opt = FeatureUPGD(model.parameters(), features=Features(model), order=2)
    layer = opt.features.layers[0]
    x, y = normal(5, 4), labels(5, 2)
    opt.backward(F.cross_entropy(model(x), y))
    once = layer.second.clone()
    opt.backward(F.cross_entropy(model(x), y))
    assert off([layer.second], [2 * once]) < 1e-12
    opt.zero_grad()
    assert layer.second is None
    opt.backward(F.cross_entropy(model(x), y))
    opt.step()
    assert layer.second is None
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"order=2 needs curvature and layer '0' has none"):
        opt.step()


def test_gates_need_no_rules_below_the_first_layer() -> None:
    model = double(nn.Linear(4, 4), nn.GLU(), nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    for name in ("2", "0"):
        features = Features(model, layers=[name])
        loss = model(normal(3, 4)).square().mean()
        if name == "2":
            curvature.backward(loss, params=(), features=features)
            assert features.layers[0].second is not None
        else:
            with pytest.raises(curvature.UnsupportedOperationError, match="Glu"):
                curvature.backward(loss, params=(), features=features)


def test_two_watchers_get_the_same_gates() -> None:
    model = mlp(4, 6, 2)
    pair = Features(model), Features(model)
    found = []
    for features in pair:
        curvature.backward(model(normal(5, 4)).square().mean(), features=features)
        found.append(features.layers[0].second)
        features.remove()
    assert torch.equal(*found)


# ------------------------------------------------------------------------- .grad & co.
@every_device
@every_curvature
def test_gradients_are_those_of_backward(method: Any, device: str) -> None:
    model = network(device)
    twin = copy.deepcopy(model)
    for batch in batches(2, device):  # they accumulate alike, too
        loss_of(twin, batch).backward()
        curvature.backward(loss_of(model, batch), method=method)
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert [p.grad.stride() for p in model.parameters()] == [
        p.grad.stride() for p in twin.parameters()
    ]


@every_curvature
def test_terms_of_a_sum_share_no_memory(method: Any) -> None:
    """They get equal gradients and curvatures, and one of them may be changed in place."""
    a, b = (normal(3, seed=s).requires_grad_() for s in (1, 2))
    zero = torch.zeros_like(a)
    for times in (1, 2):
        curvature.backward(F.mse_loss(a + b, zero, reduction="sum"), method=method)
        expected = times * 2 * (a + b).detach()
        assert_equal([a.grad, b.grad], [expected, expected])
        if method != "hutchinson":
            assert_equal([a.curvature, b.curvature], [zero + 2 * times, zero + 2 * times])
    others = [b.grad.clone(), b.curvature.clone()]
    for t in (a.grad, a.curvature):
        t.zero_()
    assert_equal([b.grad, b.curvature], others)


@every_curvature
def test_curvature_may_be_changed_in_place(method: Any) -> None:
    """As in ``p.curvature.clamp_(min=0)``; one number expanded would refuse."""
    p = normal(3).requires_grad_()
    curvature.backward(F.mse_loss(p, torch.zeros_like(p), reduction="sum"), method=method)
    p.curvature.clamp_(max=1)
    assert torch.equal(p.curvature, torch.ones(3, dtype=DOUBLE))


@every_curvature
def test_terms_of_a_sum_can_take_a_step(method: Any) -> None:
    """One tensor of curvature for two parameters must not be taken for the other's."""
    a, b = (nn.Parameter(normal(3, seed=s)) for s in (1, 2))
    opt = UPGD([a, b], order=2, curvature=method)
    opt.backward(F.mse_loss(a + b, torch.zeros_like(a)))
    assert curvature.stale(a) is None
    assert curvature.stale(b) is None
    opt.step()


@every_curvature
def test_broadcast_gradients_accumulate(method: Any) -> None:
    """The gradient of a sum is one number, expanded; it must become the parameter's own."""
    x = normal(3).requires_grad_()
    for _ in range(2):
        curvature.backward(x.sum(), method=method)
    assert torch.equal(x.grad, torch.full((3,), 2.0, dtype=DOUBLE))
    assert torch.equal(x.curvature, torch.zeros(3, dtype=DOUBLE))


@pytest.mark.parametrize("method", ["hesscale", "ggn"])
def test_hooks_see_one_gradient(method: Any) -> None:
    """Backward passes inside a rule belong to nobody else's hooks."""
    for function in (torch.exp, F.gelu, torch.tanh, torch.square):
        w = normal(3).requires_grad_()

        def run(backward: Callable[[Tensor], None], w: Tensor = w, f: Any = function) -> list[Any]:
            seen: list[Tensor] = []
            w.grad = None
            x = w * 2
            y = f(x)
            z = f(w)
            handles = [t.register_hook(lambda g: seen.append(g.clone())) for t in (w, x, y)]
            x.retain_grad()
            y.retain_grad()
            backward(y.square().sum() + z.sum())
            for handle in handles:
                handle.remove()
            return [w.grad, x.grad, y.grad, *seen]

        plain = run(lambda loss: loss.backward())
        ours = run(lambda loss: curvature.backward(loss, method=method))
        assert len(ours) == len(plain), f"hooks of {function.__name__} ran more than once"
        assert_equal(ours, plain)


@every_curvature
def test_hooks_after_accumulation_run(method: Any) -> None:
    """``loss.backward()`` calls them, and replicas that average gradients rely on it."""
    w = normal(3).requires_grad_()
    seen: list[Tensor] = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    curvature.backward(w.square().sum(), method=method)
    assert_equal(seen, [2 * w.detach()])


@every_curvature
def test_hooks_of_parameters_act_once(method: Any) -> None:
    w = normal(3).requires_grad_()
    seen: list[Tensor] = []
    w.register_hook(lambda g: 2 * g)
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        curvature.backward(w.square().sum(), method=method)
    assert torch.equal(w.grad, 8 * w.detach())
    assert_equal(seen, [4 * w.detach(), 8 * w.detach()])


@every_curvature
def test_curvatures_add_up_as_gradients_do(method: Any) -> None:
    model = mlp(4, 5, 3)
    (x, y), (u, v) = ((normal(6, 4, seed=s), labels(6, 3, s)) for s in (1, 2))
    parts = []
    for pair in ((x, y), (u, v)):
        curvature.backward(F.cross_entropy(model(pair[0]), pair[1]), method=method, seed=5)
        parts.append(curvatures(model))
        clear(model)
    curvature.backward(F.cross_entropy(model(x), y), method=method, seed=5)
    curvature.backward(F.cross_entropy(model(u), v), method=method, seed=5)
    assert off(curvatures(model), [a + b for a, b in zip(*parts, strict=True)]) < 1e-12
    model.zero_grad()  # not the optimizer's: curvature whose gradient is gone is replaced
    curvature.backward(F.cross_entropy(model(x), y), method=method, seed=5)
    assert off(curvatures(model), parts[0]) < 1e-12


def test_a_loss_is_the_sum_of_its_samples() -> None:
    model = mlp(4, 5, 3)
    x, y = normal(7, 4), labels(7, 3)
    curvature.backward(F.cross_entropy(model(x), y, reduction="sum"))
    whole = curvatures(model)
    clear(model)
    for i in range(7):
        curvature.backward(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]))
    assert off(curvatures(model), whole) < 1e-12


def test_diagonal_changes_nothing() -> None:
    model = mlp(4, 5, 3)
    features = Features(model)
    loss = F.cross_entropy(model(normal(6, 4)), labels(6, 3))
    for method in METHODS:
        curvature.diagonal(loss, list(model.parameters()), method=method)
    assert all(p.grad is None and not hasattr(p, "curvature") for p in model.parameters())
    assert features.layers[0].first is None
    assert features.layers[0].second is None
    loss.backward()  # the graph is still there


@pytest.mark.parametrize("method", ["hesscale", "ggn"])
def test_diagonal_runs_no_hooks(method: Any) -> None:
    w = normal(3).requires_grad_()
    x = w * 2
    y = x.exp()
    seen: list[Tensor] = []
    for t in (w, x, y):
        t.register_hook(seen.append)
    y.retain_grad()
    curvature.diagonal(y.sin().sum(), [w, x], method=method)
    assert not seen
    assert y.grad is None


@every_curvature
def test_chosen_frozen_and_unused_parameters(method: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(4, 5, 5, 3)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    model = Model().to(DOUBLE)
    x, y = normal(6, 4), labels(6, 3)
    curvature.backward(F.cross_entropy(model(x), y), method=method, seed=1)
    everything = [p.curvature for p in model.body.parameters()]
    assert model.unused.weight.grad is None
    assert not hasattr(model.unused.weight, "curvature")
    clear(model)
    chosen = [model.body[2].weight, model.unused.weight]
    curvature.backward(F.cross_entropy(model(x), y), chosen, method=method, seed=1)
    assert all(p.grad is not None for p in model.body.parameters())
    assert [hasattr(p, "curvature") for p in model.body.parameters()] == [i == 2 for i in range(6)]
    if method != "hutchinson":  # whose signs depend on what is asked for
        assert torch.equal(model.body[2].weight.curvature, everything[2])
    clear(model)
    model.body[0].requires_grad_(False)
    model.body[2].bias.requires_grad_(False)
    curvature.backward(F.cross_entropy(model(x), y), method=method, seed=1)
    assert [hasattr(p, "curvature") for p in model.body.parameters()] == [
        p.requires_grad for p in model.body.parameters()
    ]
    if method != "hutchinson":
        found = [p.curvature for p in model.body.parameters() if p.requires_grad]
        assert off(found, [everything[i] for i in (2, 4, 5)]) < 1e-12


@every_curvature
def test_unused_tensors_have_zero_curvature(method: Any) -> None:
    x, y = normal(3).requires_grad_(), normal(2).requires_grad_()
    found = curvature.diagonal(x.square().sum(), [y, x], method=method)
    assert torch.equal(found[0], torch.zeros(2, dtype=DOUBLE))


@every_curvature
def test_retained_graphs(method: Any) -> None:
    model = mlp(4, 5, 3)
    loss = F.cross_entropy(model(normal(6, 4)), labels(6, 3))
    curvature.backward(loss, method=method, retain_graph=True, seed=0)
    once = [h.clone() for h in curvatures(model)]
    curvature.backward(loss, method=method, seed=0)
    assert off(curvatures(model), [2 * h for h in once]) < 1e-12
    with pytest.raises(RuntimeError, match="second time"):
        curvature.backward(loss, method=method, seed=0)


@pytest.mark.parametrize("size", [1, 2, 257])
def test_batch_sizes(size: int) -> None:
    model = mlp(4, 5, 3)
    x, y = normal(size, 4), labels(size, 3)
    found = curvature.diagonal(F.cross_entropy(model(x), y), list(model.parameters()))
    each = [
        curvature.diagonal(F.cross_entropy(model(x[i][None]), y[i][None]), list(model.parameters()))
        for i in range(size)
    ]
    mean = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
    assert off(found, mean) < 1e-12


# -------------------------------------------------------------------------- precision
@every_device
@every_curvature
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision(dtype: torch.dtype, method: Any, device: str) -> None:
    """Curvature has the parameter's dtype, and is that of double precision to a few digits."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.GELU(), nn.Flatten(), nn.Linear(12, 6), nn.LayerNorm(6)),
        *(nn.Tanh(), nn.Linear(6, 3)),
    ).to(device)
    x = torch.randn(5, 1, 4, 4).to(device)
    y = labels(5, 3).to(device)
    found = {}
    for precision in (dtype, DOUBLE):
        twin = copy.deepcopy(model).to(precision)
        loss = F.cross_entropy(twin(x.to(precision)).to(DOUBLE), y)
        curvature.backward(loss, method=method, samples=1, seed=0)
        assert all(p.curvature.dtype == precision for p in twin.parameters())
        found[precision] = [h.to(DOUBLE) for h in curvatures(twin)]
    assert all(bool(h.isfinite().all()) for h in found[dtype])
    if method != "hutchinson":  # whose signs depend on the dtype's generator
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-5}[dtype]
        scale = max(float(h.abs().max()) for h in found[DOUBLE])
        error = max(
            float((h - e).abs().max()) for h, e in zip(found[dtype], found[DOUBLE], strict=True)
        )
        assert error < tolerance * scale


@every_device
@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize(
    "norm",
    [nn.Identity, lambda: nn.BatchNorm1d(6), lambda: nn.LayerNorm(6), lambda: nn.GroupNorm(2, 6)],
    ids=["none", "batch", "layer", "group"],
)
def test_autocast(norm: Callable[[], nn.Module], evaluate: bool, device: str) -> None:
    """Layers in half precision, parameters and curvature in single."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), norm(), nn.ReLU(), nn.Linear(6, 3)).to(device)
    model.train(not evaluate)
    x, y = normal(8, 4).float().to(device), labels(8, 3).to(device)
    twin = copy.deepcopy(model)
    curvature.backward(F.cross_entropy(twin(x), y))
    expected = curvatures(twin)
    with torch.autocast(device, torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    curvature.backward(loss)
    assert all(h.dtype == torch.float32 for h in curvatures(model))
    scale = max(float(h.abs().max()) for h in expected)
    for h, e in zip(curvatures(model), expected, strict=True):
        assert float((h - e).abs().max()) < 0.05 * scale


@every_curvature
def test_scaler(method: Any) -> None:
    """Gradients stay scaled for the scaler to undo; curvature is the loss's own."""
    model, twin = mlp(4, 5, 3), mlp(4, 5, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    features, others = Features(model), Features(twin)
    x, y = normal(6, 4), labels(6, 3)
    options: Any = {"method": method, "seed": 3}
    curvature.backward(F.cross_entropy(model(x), y), scaler=scaler, features=features, **options)
    curvature.backward(F.cross_entropy(twin(x), y), features=others, **options)
    assert off([p.grad / 1024 for p in model.parameters()], [p.grad for p in twin.parameters()]) < (
        1e-12
    )
    assert off(curvatures(model), curvatures(twin)) < 1e-12
    layer, other = features.layers[0], others.layers[0]
    assert off([layer.second, layer.first / 1024], [other.second, other.first]) < 1e-12


@pytest.mark.parametrize("order", [1, 2])
def test_a_scaled_step_is_the_plain_step(order: int) -> None:
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = mlp(4, 5, 3)
        opt = UPGD(model.parameters(), order=order, seed=0)
        opt.backward(F.cross_entropy(model(normal(6, 4)), labels(6, 3)), scaler=scaler)
        if scaler is None:
            opt.step()
        else:
            scaler.step(opt)
            scaler.update()
        ends.append(weights(model))
    assert off(*ends) < 1e-12


# ------------------------------------------------------------------------ stale, wrong
def changed_in_place(model: nn.Module, loss: Tensor) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)


def loaded(model: nn.Module, loss: Tensor) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def reset_elsewhere(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed_in_place, "computed for other weights"),
        (loaded, "computed for other weights"),
        (reset_elsewhere, "computed with another gradient"),
    ],
)
def test_stale_curvature_is_an_error(change: Any, words: str) -> None:
    model = mlp(4, 5, 3)
    opt = UPGD(model.named_parameters(), order=2)
    loss = F.cross_entropy(model(normal(6, 4)), labels(6, 3))
    opt.backward(loss, retain_graph=True)
    change(model, loss)
    before = weights(model)
    with pytest.raises(ValueError, match=rf"curvature of parameter '0.weight'.* {words}"):
        opt.step()
    assert_equal(before, weights(model))
    opt.zero_grad()
    opt.backward(F.cross_entropy(model(normal(6, 4)), labels(6, 3)))
    opt.step()


@pytest.mark.parametrize("factor", [1.0, torch.nan])
def test_curvature_of_a_gradient_that_was_zeroed_in_place_is_not_added_to(factor: float) -> None:
    model = mlp(4, 5, 3, activation=nn.GELU)
    x, y = normal(6, 4), labels(6, 3)
    curvature.backward(F.cross_entropy(model(x), y))
    expected = [h.clone() for h in curvatures(model)]
    clear(model)
    curvature.backward(factor * F.cross_entropy(model(2 * x), y))
    model.zero_grad(set_to_none=False)
    curvature.backward(F.cross_entropy(model(x), y))
    assert_equal(curvatures(model), expected)


def test_stale_curvature_is_not_added_to() -> None:
    """New weights, old gradient and curvature: the gradient adds up, as PyTorch's does."""
    model = mlp(4, 5, 3)
    x, y = normal(6, 4), labels(6, 3)
    curvature.backward(F.cross_entropy(model(x), y))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    curvature.backward(F.cross_entropy(model(x), y))
    fresh = curvature.diagonal(F.cross_entropy(model(x), y), list(model.parameters()))
    assert off(curvatures(model), fresh) < 1e-12


def test_own_curvature_is_never_stale() -> None:
    p = nn.Parameter(torch.ones(2))
    assert curvature.stale(p) is None
    p.curvature = torch.ones(2)
    with torch.no_grad():
        p.add_(1)
    assert curvature.stale(p) is None


@pytest.mark.parametrize("ending", ["step", "zero_grad"])
@every_curvature
def test_step_and_zero_grad_clear_curvature(ending: str, method: Any) -> None:
    model = mlp(4, 5, 3)
    opt = UPGD(model.parameters(), order=2, curvature=method)
    opt.backward(F.cross_entropy(model(normal(6, 4)), labels(6, 3)))
    assert len(curvatures(model)) == 4
    getattr(opt, ending)()
    assert not any(hasattr(p, "curvature") for p in model.parameters())


@pytest.mark.parametrize("call", ["backward", "diagonal"])
@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda x: x * 2, {}, r"one element, got \(3,\)"),
        (lambda x: 3.0, {}, "one element, got float"),
        (lambda x: torch.ones(()), {}, "has no graph"),
        (lambda x: x.detach().sum(), {}, "has no graph"),
        (lambda x: x.sum(), {"method": "newton"}, "'hutchinson'; got 'newton'"),
        (lambda x: x.sum(), {"samples": 0}, "at least 1, got 0"),
        (lambda x: x.sum(), {"samples": -2, "method": "hutchinson"}, "at least 1, got -2"),
    ],
)
def test_bad_arguments(call: str, make: Any, options: dict[str, Any], words: str) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=words):
        getattr(curvature, call)(make(x), [x], **options)
    assert x.grad is None


def test_a_loss_may_have_dimensions() -> None:
    x = normal(1, 1).requires_grad_()
    curvature.backward(x**3)
    assert off([x.grad, x.curvature], [3 * x.detach() ** 2, 6 * x.detach()]) < 1e-12


def test_no_grad_is_said_so() -> None:
    model = mlp(4, 5, 3)
    with torch.no_grad():
        loss = F.cross_entropy(model(normal(6, 4)), labels(6, 3))
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\)"):
        curvature.backward(loss)


# ----------------------------------------------------------------- operations unknown
class Scrambled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scrambled(x)


@pytest.mark.parametrize("method", ["hesscale", "ggn"])
def test_unsupported_operations_change_nothing(method: Any) -> None:
    model = double(nn.Linear(4, 5), Scrambled(), nn.Linear(5, 2))
    features = Features(model)
    with pytest.raises(curvature.UnsupportedOperationError) as caught:
        curvature.backward(model(normal(3, 4)).sum(), method=method, features=features)
    for words in (
        "'Logcumsumexp'",
        "LogcumsumexpBackward0",
        "shape (5,",
        "register",
        "'hutchinson'",
    ):
        assert words in str(caught.value)
    assert str(caught.value).index("'hutchinson'") < str(caught.value).index("register")
    assert isinstance(caught.value, NotImplementedError)
    assert all(p.grad is None and not hasattr(p, "curvature") for p in model.parameters())
    assert features.layers[0].second is None
    curvature.backward(model(normal(3, 4)).sum(), params=model[2].parameters(), method=method)
    assert curvature.unsupported(model, normal(3, 4)) == {"1 (Scrambled)": ["Logcumsumexp"]}


def test_operations_off_the_way_need_no_rule() -> None:
    """Below frozen parameters, and above nothing."""
    model = double(nn.Linear(4, 5), Scrambled(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    curvature.backward(model(normal(3, 4)).sum())
    assert hasattr(model[2].weight, "curvature")


def test_the_owner_of_an_operation_is_found() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Scrambled())

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.first(x).var(-1, keepdim=True) * x).logcumsumexp(-1)

    found = curvature.unsupported(Outer(), torch.ones(2, 4))
    assert found["block.1 (Scrambled)"] == ["Logcumsumexp"]
    rest = {owner: names for owner, names in found.items() if owner != "block.1 (Scrambled)"}
    assert list(rest.values()) == [["Logcumsumexp", "Var"]]
    assert not curvature.unsupported(mlp(4, 5, 3), normal(2, 4))


def test_anomaly_mode_names_the_line() -> None:
    model = double(nn.Linear(4, 5), Scrambled(), nn.Linear(5, 2))
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=False),
        pytest.raises(curvature.UnsupportedOperationError, match=r"(?s)made here.*logcumsumexp"),
    ):
        curvature.backward(model(normal(3, 4)).sum())


def test_a_rule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """cosh⁻¹ has none; its derivatives are two lines."""
    assert "Acosh" not in RULES
    monkeypatch.setitem(RULES, "Acosh", Rule(lambda op: None))  # restored afterwards

    @curvature.register("AcoshBackward0")
    def acosh(op: curvature.Op) -> Tensor | None:
        x = op.node._saved_self
        first = (x * x - 1) ** -0.5
        inherited = 0 if op.h is None else op.h * first**2
        own = 0 if op.g is None else op.g * -x * first**3
        return inherited + own

    x = (1.5 + normal(4).abs()).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return (x.acosh() ** 3).sum() + x.acosh().sum()

    assert off(curvature.diagonal(f(x), [x]), exact_diagonal(f, [x])) < 1e-10
    curvature.register("Acosh")(curvature.elementwise)  # as the error message suggests
    assert off(curvature.diagonal(f(x), [x]), exact_diagonal(f, [x])) < 1e-10


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def check_cube() -> None:
    x = normal(4).requires_grad_()
    found = curvature.diagonal(Cube.apply(2 * x).square().sum(), [x])
    assert off(found, exact_diagonal(lambda x: ((2 * x) ** 6).sum(), [x])) < 1e-10


def test_custom_functions_with_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(curvature.UnsupportedOperationError, match="'Cube'"):
        check_cube()
    monkeypatch.setitem(RULES, "Cube", Rule(lambda op: None))

    @curvature.register("Cube")
    def cube(op: curvature.Op) -> Any:
        (x,) = op.node.saved_tensors
        own = op.g * 6 * x
        return own if op.h is None else own + op.h * (3 * x**2) ** 2

    check_cube()


def test_custom_functions_with_the_elementwise_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error message says that an elementwise operation needs one line."""
    monkeypatch.setitem(RULES, "Cube", Rule(lambda op: None))
    curvature.register("Cube")(curvature.elementwise)
    check_cube()


@pytest.mark.parametrize("width", [2, 4])
def test_shapes_tell_what_is_not_elementwise(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "Glu", Rule(lambda op: None))
    curvature.register("Glu")(curvature.elementwise)
    model = double(nn.Linear(3, width), nn.GLU())
    words = rf"'Glu' is registered as elementwise .*\(5, {width // 2}\) .*\(5, {width}\)"
    with pytest.raises(curvature.UnsupportedOperationError, match=words):
        curvature.backward(model(normal(5, 3)).square().sum())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("method", ["hesscale", "ggn"])
def test_compiled_models_are_told_so(method: Any) -> None:
    model = double(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = UPGD(model.parameters(), order=2, curvature=method)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(curvature.UnsupportedOperationError, match=r"before torch\.compile"):
        opt.backward(compiled(normal(5, 3)).square().sum())


class TwoAndThree(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, two: Tensor, three: Tensor) -> Tensor:
        return 2 * two + 3 * three  # PyTorch makes zeros of what is not used


def test_custom_functions_with_several_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "TwoAndThree", Rule(lambda op: None))

    @curvature.register("TwoAndThree", linear=True)
    def rule(op: curvature.Op) -> Any:
        parts = [f * h for f, h in zip((4, 9), op.hs, strict=True) if h is not None]
        return sum(parts)

    for used, factor in ((slice(0, 1), 4), (slice(1, 2), 9), (slice(0, 2), 13)):
        x = normal(4).requires_grad_()
        loss = torch.cat(TwoAndThree.apply(x.exp())[used]).square().sum()
        expected = exact_diagonal(lambda x, f=factor: f * x.exp().square().sum(), [x])
        assert off(curvature.diagonal(loss, [x]), expected) < 1e-10
        curvature.backward(loss)
        assert off([x.curvature], expected) < 1e-10


# ------------------------------------------------------------ graphs made in other ways
def test_in_place_activations() -> None:
    found = []
    for inplace in (False, True):
        model = mlp(4, 6, 3, activation=lambda i=inplace: nn.ReLU(inplace=i))
        features = Features(model)
        curvature.backward(F.mse_loss(model(normal(5, 4)), normal(5, 3)), features=features)
        found.append([*curvatures(model), features.layers[0].second])
    assert_equal(*found)


@pytest.mark.parametrize("method", ["hesscale", "ggn"])
def test_checkpointed_blocks(method: Any) -> None:
    """Activations that are computed anew in the backward pass."""
    block, last = mlp(4, 6, 6, 5), nn.Linear(5, 2, dtype=DOUBLE)
    params = [*block.parameters(), *last.parameters()]
    x, y = normal(5, 4), normal(5, 2)
    plain = curvature.diagonal(F.mse_loss(last(block(x).tanh()), y), params, method=method)
    h = checkpoint(block, x, use_reentrant=False)
    found = curvature.diagonal(F.mse_loss(last(h.tanh()), y), params, method=method)
    assert off(found, plain) < 1e-12
    loss = F.mse_loss(last(checkpoint(block, x, use_reentrant=False).tanh()), y)
    with pytest.raises(RuntimeError, match="provide their activations once"):
        curvature.backward(loss, method=method)


def test_saved_tensors_kept_elsewhere() -> None:
    model = mlp(4, 6, 3)
    x, y = normal(5, 4), labels(5, 3)
    plain = curvature.diagonal(F.cross_entropy(model(x), y), list(model.parameters()))
    with torch.autograd.graph.save_on_cpu():
        loss = F.cross_entropy(model(x), y)
    assert_equal(curvature.diagonal(loss, list(model.parameters())), plain)


def test_threads_find_what_they_find_alone() -> None:
    models = {s: mlp(8, 16, 16, 4, activation=nn.GELU, seed=s) for s in (1, 2, 3)}
    watchers = {s: Features(model) for s, model in models.items()}

    def work(seed: int) -> list[Tensor]:
        model, features = models[seed], watchers[seed]
        clear(model)
        features.reset()
        loss = F.cross_entropy(model(normal(8, 8, seed=seed)), labels(8, 4, seed))
        method: Any = "hutchinson" if seed == 2 else "hesscale"
        curvature.backward(loss, features=features, method=method, seed=seed)
        gates = [t for layer in features.layers for t in (layer.first, layer.second)]
        return [*curvatures(model), *[p.grad for p in model.parameters()], *gates]

    alone = {seed: work(seed) for seed in models}
    wrong: list[int] = []

    def repeat(seed: int) -> None:
        for _ in range(15):
            try:
                found = work(seed)
            except Exception:
                wrong.append(seed)
                raise
            if not all(torch.equal(a, b) for a, b in zip(found, alone[seed], strict=True)):
                wrong.append(seed)

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_in_a_rule_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are gone and later passes work."""

    def broken(op: curvature.Op) -> None:
        raise ZeroDivisionError

    model = mlp(4, 6, 3)
    loss = F.cross_entropy(model(normal(5, 4)), labels(5, 3))
    params = list(model.parameters())
    expected = curvature.diagonal(loss, params)
    with monkeypatch.context() as patch:
        patch.setitem(RULES, "Tanh", Rule(broken))
        for run in (curvature.diagonal, curvature.backward):
            with pytest.raises(ZeroDivisionError):
                run(loss, params)
    loss = F.cross_entropy(model(normal(5, 4)), labels(5, 3))
    assert_equal(curvature.diagonal(loss, params), expected)
    model.zero_grad()
    curvature.backward(loss)
    assert off(curvatures(model), expected) < 1e-12


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Token:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@every_curvature
@pytest.mark.parametrize("watched", [False, True])
def test_graphs_are_freed_without_the_garbage_collector(method: Any, watched: bool) -> None:
    model = mlp(4, 6, 6, 3, activation=nn.GELU)
    features = Features(model) if watched else None
    saved: list[weakref.ref[Token]] = []

    def pack(t: Tensor) -> Token:
        token = Token(t.detach())  # a result that is saved would lead back to its own graph
        saved.append(weakref.ref(token))
        return token

    with without_collector():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.tensor):
            loss = F.cross_entropy(model(normal(5, 4)), labels(5, 3))
        curvature.backward(loss, method=method, features=features, retain_graph=True)
        assert any(ref() is not None for ref in saved)
        del loss
        assert [ref() for ref in saved if ref() is not None] == []


# -------------------------------------------------------------------------- optimizers
def optimizers(model: nn.Module, **options: Any) -> dict[str, Any]:
    return {
        "UPGD": lambda: UPGD(model.parameters(), **options),
        "AdaUPGD": lambda: AdaUPGD(model.parameters(), **options),
        "FeatureUPGD": lambda: FeatureUPGD(model.parameters(), Features(model), **options),
    }


every_optimizer = pytest.mark.parametrize("name", optimizers(nn.Identity()))


@every_device
@every_optimizer
@every_curvature
def test_steps_are_determined_by_the_seed(name: str, method: Any, device: str) -> None:
    ends = []
    for seed, world in ((0, 1), (0, 2), (1, 1)):
        model = network(device)
        opt = optimizers(model, order=2, curvature=method, seed=seed, lr=0.1, sigma=0.0)[name]()
        torch.manual_seed(world)
        start = weights(model)
        for batch in batches(3, device):
            opt.zero_grad()
            opt.backward(loss_of(model, batch))
            opt.step()
        assert all(bool(w.isfinite().all()) for w in weights(model))
        assert any(not torch.equal(a, b) for a, b in zip(start, weights(model), strict=True))
        ends.append(weights(model))
    assert_equal(ends[0], ends[1])  # whatever the global generator does
    same = all(torch.equal(a, b) for a, b in zip(ends[0], ends[2], strict=True))
    assert same == (method != "hutchinson")  # without noise, only its signs are random


@every_optimizer
def test_first_order_backward_is_plain(name: str) -> None:
    ends = []
    for plain in (True, False):
        model = network()
        opt = optimizers(model, seed=0)[name]()
        for batch in batches(2):
            opt.zero_grad()
            loss = loss_of(model, batch)
            if plain:
                loss.backward()
            else:
                opt.backward(loss, retain_graph=True)
            opt.step()
            assert not any(hasattr(p, "curvature") for p in model.parameters())
        ends.append(weights(model))
    assert_equal(*ends)


@every_optimizer
def test_unknown_curvature(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: curvature must be .*, got 'exact'"):
        optimizers(network(), order=2, curvature="exact")[name]()


@pytest.mark.parametrize("cls", [UPGD, AdaUPGD])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_step_with_exact_curvature(cls: Any, maximize: bool) -> None:
    """Where HesScale is exact, ``opt.backward`` is as good as a Hessian put there by hand."""
    ends = []
    x = normal(5, 1)

    def loss(m: nn.Module) -> Tensor:
        return (m(x) - 0.7).square().mean()

    for by_hand in (False, True):
        model = chain("width one", 3, ["tanh", "softplus"], seed=3)
        opt = cls(
            model.parameters(), order=2, sigma=0.0, lr=0.1, beta_utility=0.9, maximize=maximize
        )
        for _ in range(3):
            opt.zero_grad()
            if by_hand:
                loss(model).backward()
                for p, h in zip(model.parameters(), exact(model, loss), strict=True):
                    p.curvature = h
            else:
                opt.backward(loss(model))
            opt.step()
        ends.append(weights(model))
    assert off(*ends) < 1e-10


def test_a_feature_step_with_exact_gates() -> None:
    ends = []
    x, y = normal(5, 4), normal(5, 1, seed=3)

    def loss(a: Tensor) -> Tensor:
        return (a - y).square().mean()

    for by_hand in (False, True):
        model = mlp(4, 6, 1)
        opt = FeatureUPGD(model.parameters(), Features(model), order=2, sigma=0.0, lr=0.1)
        if by_hand:
            (second,) = gate_curvature(model, {"1": (6,)}, loss, x)
            opt.features.reset()
            loss(model(x)).backward()
            opt.features.layers[0].second = second
        else:
            opt.backward(loss(model(x)))
        opt.step()
        ends.append(weights(model))
    assert off(*ends) < 1e-10


def test_feature_optimizers_leave_the_parameters_alone() -> None:
    model = mlp(4, 6, 2)
    opt = FeatureUPGD(model.parameters(), Features(model), order=2)
    opt.backward(F.cross_entropy(model(normal(5, 4)), labels(5, 2)))
    assert all(p.grad is not None for p in model.parameters())
    assert not any(hasattr(p, "curvature") for p in model.parameters())
    assert opt.features.layers[0].second.shape == (6,)


def test_the_utility_is_the_second_order_one() -> None:
    """Û = ½·h·w² - g·w with the h of ``diagonal``."""
    model = mlp(4, 6, 2)
    x, y = normal(5, 4), labels(5, 2)
    params = list(model.parameters())
    found = curvature.diagonal(F.cross_entropy(model(x), y), params)
    opt = UPGD(params, order=2, lr=0.0)
    opt.backward(F.cross_entropy(model(x), y))
    expected = [
        0.5 * h * p.detach() ** 2 - p.grad * p.detach() for h, p in zip(found, params, strict=True)
    ]
    opt.step()
    assert off([opt.utility(p) for p in params], expected) < 1e-12
