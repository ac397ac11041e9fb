"""SelfTunedSGD with several samples a step: what must hold of its step size and of its step."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import upgd
from tests.cases import assert_equal, weights
from upgd.optim.layered import LayerOptimizer
from upgd.optim.registry import METHODS
from upgd.optim.self_tuned import SELF_TUNED_SGD
from upgd.streams import load

DOUBLE = torch.float64
CHAMPION = METHODS["self-tuned-sgd"]


def mlp(*sizes: int, dtype: torch.dtype = DOUBLE, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    pairs = itertools.pairwise(sizes)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Positions(nn.Module):
    """A layer sees three positions of each element, the next their mean; a scale of no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(2, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.reshape(-1, 3, 2)).tanh() * self.scale
        return self.last(hidden.mean(1))


class Scaled(nn.Module):
    """A scale that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = mlp(6, 9, 3), nn.Parameter(torch.full((3,), 2.0, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body[2](self.body[:2](x) * self.scale.repeat(3))
        return found


MODELS = {"layers": lambda: mlp(6, 9, 7, 3), "scaled": Scaled, "positions": Positions}


def step(opt: Any, model: nn.Module, x: Tensor, y: Tensor) -> float:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    return loss.item()


def samples(count: int, seed: int = 0, inputs: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator, dtype=DOUBLE) + 1
    return x, torch.randint(3, (count,), generator=generator)


def state(opt: Any) -> dict[str, Tensor]:
    """What is kept with the first parameter, which has all that is kept of the network."""
    found: dict[str, Tensor] = opt.state[opt.param_groups[0]["params"][0]]
    return found


# -------------------------------------------------------------------------- exact relations
@pytest.mark.parametrize("model", ["layers", "scaled"])
def test_equal_samples_are_one(model: str) -> None:
    one, many = MODELS[model](), MODELS[model]()
    a, b = upgd.SelfTunedSGD(one), upgd.SelfTunedSGD(many)
    for t in range(40):
        x, y = samples(1, t)
        step(a, one, x, y)
        step(b, many, x.repeat(1 + t % 5, 1), y.repeat(1 + t % 5))
    torch.testing.assert_close(weights(many), weights(one), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state(b)["network.step"], state(a)["network.step"])


def test_single_samples_run_the_rule_for_them() -> None:
    """To the bit, also after a batch."""
    ours, plain = mlp(6, 9, 3, dtype=torch.float32), mlp(6, 9, 3, dtype=torch.float32)
    alone = replace(SELF_TUNED_SGD, several=None)
    a = upgd.SelfTunedSGD(ours)
    b = LayerOptimizer(plain, alone, CHAMPION.defaults)
    for t in range(20):
        for opt, model in ((a, ours), (b, plain)):
            x, y = samples(1, t)
            step(opt, model, x.float(), y)
    assert_equal(weights(ours), weights(plain))
    x, y = samples(4)
    step(a, ours, x.float(), y)
    step(b, plain, x.float(), y)
    assert not torch.equal(weights(ours)[0], weights(plain)[0])


def gradients(model: nn.Module, x: Tensor, y: Tensor, opt: Any) -> tuple[Tensor, Tensor]:
    """Each element's gradient where the metric is the identity, and of what is no layer."""
    inside, outside = [], []
    for n in range(len(x)):
        loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        found = dict(
            zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True)
        )
        own = []
        for layer in opt.layers.all:
            kept, slope = opt.state[layer.weight], found[layer.bias]
            centred = found[layer.weight] - torch.outer(slope, kept["inputs.mean"])
            own += [centred * kept["inputs.scale"].sqrt(), slope * kept["layers.factor"].sqrt()]
        inside.append(torch.cat([g.flatten() for g in own]))
        rest = [g.flatten() for p, g in found.items() if opt.layers.of(p) is None]
        outside.append(torch.cat([torch.zeros(1, dtype=DOUBLE), *rest]))
    return torch.stack(inside), torch.stack(outside)


@pytest.mark.parametrize("model", MODELS)
def test_the_step_size_is_of_the_samples_gradients(model: str) -> None:
    """Q of the first step, by autograd: mean of ⟨g_n, ḡ⟩²/‖δ_n‖² over ‖ḡ‖²."""
    net = MODELS[model]()
    before = copy.deepcopy(net.state_dict())
    opt = upgd.SelfTunedSGD(net, lr=3.0)
    x, y = samples(8)
    step(opt, net, x, y)
    net.load_state_dict(before)
    inside, outside = gradients(net, x, y, opt)
    errors = net(x).softmax(1).detach() - F.one_hot(y, 3)
    along = inside @ inside.mean(0)
    demand = (along**2 / (errors**2).sum(1)).mean() / along.mean()
    demand *= 1 + (outside.mean(0) ** 2).sum() / along.mean()
    torch.testing.assert_close(state(opt)["network.typical"], demand)
    torch.testing.assert_close(state(opt)["network.step"], 3.0 / demand)


def test_outputs_do_not_see_where_inputs_lie() -> None:
    """A first step moves the outputs alike if all inputs are shifted and biases make up for it."""
    plain, shifted = mlp(6, 9, 3), mlp(6, 9, 3)
    x, y = samples(5)
    shift = torch.arange(6, dtype=DOUBLE) * 10
    with torch.no_grad():
        shifted[0].bias -= shifted[0].weight @ shift
    for model, inputs in ((plain, x), (shifted, x + shift)):
        step(upgd.SelfTunedSGD(model), model, inputs, y)
    torch.testing.assert_close(shifted(x + shift), plain(x), rtol=1e-9, atol=1e-9)


def test_a_batch_takes_at_most_as_many_times_a_samples_step() -> None:
    """As many as it has samples, where their gradients cancel."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(DOUBLE)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    opt = upgd.SelfTunedSGD(model)
    step(opt, model, torch.ones(2, 4, dtype=DOUBLE), torch.tensor([0, 1]))  # δ and -δ
    own = 1.0  # x is its mean, and a bias has a factor of 1
    torch.testing.assert_close(state(opt)["network.step"].item(), 4.0 / (own / 2))


# ------------------------------------------------------------------------------ hard cases
def digits(count: int) -> tuple[Tensor, Tensor]:
    data = load("digits")
    x = torch.from_numpy(data.scaled(slice(count))).flatten(1)
    return x, torch.tensor(data.labels[:count])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("steps", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_network_too_small_for_its_batch(seed: int, steps: int) -> None:
    model = mlp(64, 7, 6, 10, dtype=torch.float32, seed=seed)
    opt = upgd.SelfTunedSGD(model)
    x, y = digits(8)
    losses = [step(opt, model, x, y) for _ in range(steps)]
    assert max(losses[steps // 2 :]) < 1.2
    assert max(w.abs().max().item() for w in weights(model)) < 30


def test_labels_that_contradict_each_other() -> None:
    """The gradient vanishes at the best answer, the error does not."""
    model = mlp(64, 7, 6, 10, dtype=torch.float32)
    opt = upgd.SelfTunedSGD(model)
    x, y = digits(1)[0].expand(8, -1), torch.arange(8)
    losses = [step(opt, model, x, y) for _ in range(150)]
    assert math.log(8) <= min(losses)
    assert max(losses[75:]) < math.log(8) + 0.6


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_constant_input_with_squared_error(dtype: torch.dtype) -> None:
    """The outputs become the targets' mean; a gradient of rounding errors stops no later step."""
    model = mlp(5, 8, 3, dtype=dtype)
    x, y = torch.ones(4, 5, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    opt = upgd.SelfTunedSGD(model, lr=0.25)
    for _ in range(200):
        opt.zero_grad()
        (model(x) - y).square().sum(1).mean().backward()
        opt.step()
    torch.testing.assert_close(model(x)[0], y.mean(0), rtol=0, atol=0.02)
    assert 0.01 < state(opt)["network.step"].item() < 5


@pytest.mark.parametrize("count", [2, 64, 512])
def test_batches_of_any_size_learn(count: int) -> None:
    model = mlp(64, 32, 10, dtype=torch.float32)
    opt = upgd.SelfTunedSGD(model)
    x, y = digits(512)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        chosen = torch.randint(512, (count,), generator=generator)
        step(opt, model, x[chosen], y[chosen])
    right = (model(x).argmax(1) == y).float().mean().item()
    assert right > (0.6 if count == 2 else 0.95)


class Uneven(nn.Module):
    """Three inputs, of which the last layer sees two sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(torch.stack([hidden[0] + hidden[1], hidden[2]]))


def test_layers_whose_samples_do_not_belong_together() -> None:
    """All are one element."""
    model = Uneven()
    opt = upgd.SelfTunedSGD(model)
    x, _ = samples(3)
    y = torch.tensor([0, 1])
    losses = [step(opt, model, x, y) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]


# ----------------------------------------------------------------------------- states, paths
def test_states_load_before_and_after_the_first_batch() -> None:
    model, twin = mlp(6, 9, 3), mlp(6, 9, 3)
    opt = upgd.SelfTunedSGD(model)
    for count in (1, 4):
        step(opt, model, *samples(count))
        twin.load_state_dict(model.state_dict())
        other = upgd.SelfTunedSGD(twin)
        other.load_state_dict(opt.state_dict())
        step(opt, model, *samples(3, 1))
        step(other, twin, *samples(3, 1))
        assert_equal(weights(twin), weights(model))


def test_fused_may_change_between_single_samples_and_batches() -> None:
    pytest.importorskip("numba")
    plain, fused = mlp(6, 9, 3), mlp(6, 9, 3)
    a, b = upgd.SelfTunedSGD(plain), upgd.SelfTunedSGD(fused, fused=True)
    for t in range(30):
        for opt, model in ((a, plain), (b, fused)):
            step(opt, model, *samples(1 + 3 * (t % 2), t))
    torch.testing.assert_close(weights(fused), weights(plain), rtol=1e-9, atol=1e-10)
