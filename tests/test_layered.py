"""Layered methods: against plain loops, and what optimizers that watch layers can get wrong."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import upgd
from tests import plain_layers
from tests.cases import CounterNoise, assert_close, assert_equal, batches, loss_of, network, weights
from upgd import lab
from upgd.engine.dense import Learner
from upgd.engine.general import unsupported
from upgd.optim.layered import LACKS, LayerOptimizer
from upgd.optim.registry import METHODS, Row
from upgd.optim.roles import roles
from upgd.rl import ppo
from upgd.rl.ppo import RLError

LAYERED = {name: row for name, row in METHODS.items() if "layers" in row.needs}
every_layered_method = pytest.mark.parametrize("row", LAYERED.values(), ids=LAYERED.keys())
DOUBLE = torch.float64
SEED = 5


def mlp(sizes: tuple[int, ...], activation: str = "relu") -> nn.Sequential:
    torch.manual_seed(3)
    act = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]
    pairs = itertools.pairwise(sizes)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(*layers[:-1]).to(DOUBLE)


def plain_copy(model: nn.Sequential, activation: str) -> plain_layers.PlainNetwork:
    linear = [m for m in model if isinstance(m, nn.Linear)]
    found = [[p.detach().numpy() for p in (m.weight, m.bias)] for m in linear]
    return plain_layers.PlainNetwork([w for w, _ in found], [b for _, b in found], activation)


def stream(steps: int, count: int, sizes: tuple[int, ...]) -> Any:
    """Inputs far from zero whose mean drifts, and what to answer; the targets change half way."""
    rng = np.random.default_rng(1)
    wanted = rng.normal(size=(2, sizes[0], sizes[-1]))
    for step in range(steps):
        x = rng.normal(size=(count, sizes[0])) + 0.5 + np.sin(step / 40)
        yield x, np.tanh(x @ wanted[2 * step // steps])


def fresh_of(model: nn.Sequential) -> plain_layers.Fresh:
    """What `CounterNoise` gives each weight matrix."""
    linear = [m for m in model if isinstance(m, nn.Linear)]
    sizes = [m.weight.numel() + m.out_features for m in linear]

    def fresh(step: int, layer: int) -> plain_layers.Array:
        shape = linear[layer].weight.shape
        rng = np.random.default_rng([SEED, step, sum(sizes[:layer])])
        return rng.standard_normal(shape.numel()).reshape(shape)

    return fresh


def squared(model: nn.Module, x: Any, y: Any) -> Tensor:
    return (model(torch.as_tensor(x)) - torch.as_tensor(y)).square().sum(1).mean()


PLAIN: dict[str, tuple[Any, dict[str, Any]]] = {
    "centred-sgd": (plain_layers.centred_sgd, {"lr": 0.02, "weight_decay": 0.05}),
    "self-tuned-sgd": (plain_layers.self_tuned_sgd, {"lr": 0.1, "pace": 0.01, "beta_slow": 0.9}),
    "continual-backprop": (
        plain_layers.continual_backprop,
        {"lr": 0.01, "weight_decay": 0.01, "replacement_rate": 0.01, "maturity": 20},
    ),
    "continual-backprop-adam": (
        plain_layers.continual_backprop,
        {"lr": 0.003, "replacement_rate": 0.02, "maturity": 10, "beta_utility": 0.9},
    ),
    "redo": (
        plain_layers.redo,
        {"lr": 0.01, "threshold": 0.8, "period": 30.5, "beta_utility": 0.9},
    ),
    "redo-adam": (plain_layers.redo, {"lr": 0.003, "threshold": 0.8, "period": 25}),
}


@pytest.mark.parametrize(
    ("sizes", "count", "activation"),
    [
        ((5, 7, 6, 3), 1, "relu"),
        ((4, 9, 2), 3, "tanh"),
        pytest.param((6, 2), 1, "relu", marks=pytest.mark.slow),
    ],
)
@every_layered_method
def test_equals_a_plain_loop(row: Row, sizes: tuple[int, ...], count: int, activation: str) -> None:
    """After every step; of methods that renew units, some are renewed."""
    loop, chosen = PLAIN[row.name]
    model = mlp(sizes, activation)
    net, hyper = plain_copy(model, activation), {**row.defaults, **chosen}
    opt = row.make(model, **chosen, seed=SEED, noise=CounterNoise())
    more = {} if row.method.recycle is None else {"fresh": fresh_of(model)}
    started = weights(model)
    for t, (x, y) in enumerate(stream(150, count, sizes), start=1):
        opt.zero_grad()
        squared(model, x, y).backward()
        opt.step()
        loop(net, x, y, t, **hyper, **more)
        ours = torch.cat([w.flatten() for w in weights(model)]).numpy()
        theirs = np.concatenate([w.ravel() for w in net.everything])
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9, err_msg=f"{t}")
    assert (
        min(float((a - b).abs().max()) for a, b in zip(started, weights(model), strict=True)) > 0.01
    )
    if row.method.recycle is not None and len(sizes) > 2:
        assert net.renewed > 3
    if row.name == "self-tuned-sgd":
        assert net.memory["gain"] != 1.0
        assert net.memory["lambda"][0] != 0.01


def test_groups_have_step_sizes_of_their_own() -> None:
    model, rates = mlp((4, 6, 2), "tanh"), [0.03, 0.004]
    net = plain_copy(model, "tanh")
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": rates[1]}]
    opt = upgd.CentredSGD(groups, lr=rates[0], layers=upgd.Layers(model))
    hyper = {**METHODS["centred-sgd"].defaults, "lr": rates}
    for t, (x, y) in enumerate(stream(30, 2, (4, 6, 2)), start=1):
        opt.zero_grad()
        squared(model, x, y).backward()
        opt.step()
        plain_layers.centred_sgd(net, x, y, t, **hyper)
    for ours, theirs in zip(weights(model), net.everything, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-12)


# -------------------------------------------------------------------------------- samples
def step(opt: Any, model: nn.Module, batch: Any) -> None:
    opt.zero_grad()
    loss_of(model, batch).backward()
    opt.step()


@every_layered_method
def test_gradients_may_be_accumulated(row: Row) -> None:
    """Two halves of a batch are the batch."""
    whole, halves = network(dtype=DOUBLE), network(dtype=DOUBLE)
    a, b = row.make(whole, seed=1), row.make(halves, seed=1)
    for x, y in batches(4, dtype=DOUBLE):
        step(a, whole, (x, y))
        b.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (loss_of(halves, (x[part], y[part])) / 2).backward()
        b.step()
    assert_close(weights(whole), weights(halves), rtol=1e-11, atol=1e-13)


@every_layered_method
@pytest.mark.parametrize("how", ["none", "zeros", "by hand"])
def test_samples_go_with_the_gradients(row: Row, how: str) -> None:
    """However gradients are reset, and whatever else passes through the model."""
    plain, other = network(dtype=DOUBLE), network(dtype=DOUBLE)
    a, b = row.make(plain, seed=1), row.make(other, seed=1)
    for batch, more in zip(batches(4, dtype=DOUBLE), batches(8, dtype=DOUBLE)[4:], strict=True):
        step(a, plain, batch)
        if how == "by hand":
            for p in other.parameters():
                p.grad = None
        else:
            other.zero_grad(set_to_none=how == "none")
        loss = loss_of(other, batch)
        with torch.no_grad():
            loss_of(other, more)
        torch.autograd.grad(loss_of(other, more), list(other.parameters()))
        loss.backward()
        torch.autograd.grad(loss_of(other, more), [next(other.parameters())])
        b.step()
    assert_equal(weights(plain), weights(other))


def test_a_second_step_without_a_backward_pass_reads_the_same_gradients() -> None:
    """As of PyTorch's optimizers."""
    model = network(dtype=DOUBLE)
    opt = upgd.ContinualBackprop(model, lr=0.1)
    loss_of(model, batches(1, dtype=DOUBLE)[0]).backward()
    expected = [p.detach() - 0.2 * p.grad for p in model.parameters()]
    opt.step()
    opt.step()
    assert_close(weights(model), expected, rtol=1e-12, atol=1e-14)


def test_a_buffer_of_inputs_may_be_used_again() -> None:
    """What was recorded is a copy."""
    whole, buffered = network(dtype=DOUBLE), network(dtype=DOUBLE)
    a, b = upgd.CentredSGD(whole), upgd.CentredSGD(buffered)
    x, y = batches(1, dtype=DOUBLE)[0]
    step(a, whole, (x, y))
    buffer = torch.empty_like(x[:4])
    for part in (slice(0, 4), slice(4, 8)):
        buffer.copy_(x[part])
        (loss_of(buffered, (buffer, y[part])) / 2).backward()
    b.step()
    assert_close(weights(whole), weights(buffered), rtol=1e-12, atol=1e-14)


def test_positions_of_sequences_are_samples() -> None:
    plain, sequences = network(dtype=DOUBLE), network(dtype=DOUBLE)
    a, b = upgd.SelfTunedSGD(plain), upgd.SelfTunedSGD(sequences)
    for x, y in batches(3, dtype=DOUBLE):
        step(a, plain, (x, y))
        b.zero_grad()
        found = sequences(x.reshape(2, 4, 6)).flatten(0, 1)
        nn.functional.cross_entropy(found.float(), y).backward()
        b.step()
    assert_close(weights(plain), weights(sequences), rtol=1e-12, atol=1e-14)


def test_single_vectors_are_samples() -> None:
    model, other = network(dtype=DOUBLE), network(dtype=DOUBLE)
    for m, x in ((model, torch.ones(6, dtype=DOUBLE)), (other, torch.ones(1, 6, dtype=DOUBLE))):
        opt = upgd.CentredSGD(m)
        m(x).sum().backward()
        opt.step()
    assert_close(weights(model), weights(other), rtol=1e-12, atol=1e-14)


# --------------------------------------------------------------------------------- models
@every_layered_method
def test_a_frozen_layer_stays(row: Row) -> None:
    """Also where its units would be renewed."""
    model = network(dtype=DOUBLE)
    model[0].requires_grad_(False)
    hyper = {"threshold": 1.0, "period": 1, "replacement_rate": 1.0, "maturity": 0}
    opt = row.make(model, **{k: v for k, v in hyper.items() if k in row.method.hyper})
    before = weights(model)
    for batch in batches(3, dtype=DOUBLE):
        step(opt, model, batch)
    assert_equal(weights(model)[:2], before[:2])
    assert not torch.equal(weights(model)[2], before[2])


def test_a_frozen_weight_under_a_trained_bias() -> None:
    """The bias moves as it does where the weight would move by a step size of 0."""
    frozen, still = mlp((4, 3, 2)), mlp((4, 3, 2))
    frozen[0].weight.requires_grad_(False)
    a = upgd.CentredSGD(frozen, lr=0.05)
    first, *others = still.parameters()
    groups = [{"params": [first], "lr": 0.0}, {"params": others}]
    b = upgd.CentredSGD(groups, lr=0.05, layers=upgd.Layers(still))
    for x, y in stream(5, 2, (4, 3, 2)):
        for opt, model in ((a, frozen), (b, still)):
            opt.zero_grad()
            squared(model, x, y).backward()
            opt.step()
    assert_close(weights(frozen), weights(still), rtol=1e-12, atol=1e-14)
    saved = a.state_dict()
    upgd.CentredSGD(frozen, lr=0.05).load_state_dict(saved)


@every_layered_method
def test_layers_without_bias(row: Row) -> None:
    """They learn, up or down, and what is saved loads."""
    for maximize in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False))
        opt = row.make(model, maximize=maximize, lr=0.02)
        batch = batches(1)[0]
        first = float(loss_of(model, batch).detach())
        for _ in range(20):
            step(opt, model, batch)
        last = float(loss_of(model, batch).detach())
        assert last > first if maximize else last < first
        row.make(model).load_state_dict(opt.state_dict())


class Scaled(nn.Module):
    """A linear network with a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((2, 3), 0.5))
        self.body = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).reshape(-1, 2, 3).mul(self.scale).sum(1)


def test_parameters_outside_of_layers_take_steps_of_gradient_descent() -> None:
    model = Scaled().to(DOUBLE)
    opt = upgd.CentredSGD(model, lr=0.05, weight_decay=0.1)
    for batch in batches(3, dtype=DOUBLE):
        before = model.scale.detach().clone()
        step(opt, model, batch)
        expected = (1 - 0.05 * 0.1) * before - 0.05 * model.scale.grad
        torch.testing.assert_close(model.scale.detach(), expected, rtol=1e-12, atol=1e-14)


@every_layered_method
def test_models_with_other_parameters(row: Row) -> None:
    """They learn, and resume."""
    model = Scaled()
    opt = row.make(model, seed=2)
    batch = batches(1)[0]
    first = float(loss_of(model, batch).detach())
    for _ in range(50):
        step(opt, model, batch)
    assert float(loss_of(model, batch).detach()) < first
    twin = Scaled()
    twin.load_state_dict(model.state_dict())
    other = row.make(twin, seed=9)
    other.load_state_dict(opt.state_dict())
    step(opt, model, batch)
    step(other, twin, batch)
    assert_equal(weights(model), weights(twin))


def test_layers_that_share_a_parameter_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"layers '0' and '2' share a parameter"):
        upgd.CentredSGD(model)


@every_layered_method
def test_a_model_may_be_cast_between_steps(row: Row) -> None:
    model = network()
    opt = row.make(model)
    step(opt, model, batches(1)[0])
    model.double()
    step(opt, model, batches(1, dtype=DOUBLE)[0])
    kept = [t for s in opt.state.values() for t in s.values() if t.is_floating_point()]
    assert all(t.dtype == DOUBLE for t in kept)


@every_layered_method
def test_states_load_into_another_precision(row: Row) -> None:
    """And a run goes on there as it would have here."""
    model, wide = network(), network(dtype=DOUBLE)
    opt, other = row.make(model, seed=1), row.make(wide, seed=1)
    for batch in batches(3):
        step(opt, model, batch)
    wide.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    step(opt, model, batches(1)[0])
    step(other, wide, batches(1, dtype=DOUBLE)[0])
    assert_close(weights(model), [w.float() for w in weights(wide)], rtol=1e-5, atol=1e-6)


def test_a_copy_of_a_model_is_not_watched_in_its_stead() -> None:
    model = network(dtype=DOUBLE)
    opt = upgd.CentredSGD(model)
    twin = copy.deepcopy(model)
    loss_of(twin, batches(1, dtype=DOUBLE)[0]).backward()
    assert all(layer.samples() is None for layer in opt.layers.all)
    for layer in opt.layers.all:
        assert layer.weight.grad is None


def test_renewed_units_do_not_disturb_the_output() -> None:
    """The weights out of them are zero, and the next bias takes over their mean output."""
    model = mlp((4, 8, 2))
    opt = upgd.ContinualBackprop(model, lr=0.0, replacement_rate=0.01, maturity=30)
    samples = list(stream(60, 1, (4, 8, 2)))
    x = torch.as_tensor(np.concatenate([x for x, _ in samples]))
    trace, correction, beta = torch.zeros(8, dtype=DOUBLE), 1.0, 0.99
    for one, y in samples:
        before, hidden = copy.deepcopy(model), model[:2](torch.as_tensor(one)).detach()[0]
        trace, correction = beta * trace + (1 - beta) * hidden, correction * beta
        opt.zero_grad()
        squared(model, one, y).backward()
        opt.step()
        gone = (model[2].weight == 0).all(0)
        if bool(gone.any()):
            break
    assert int(gone.sum()) == 1
    constant = before[:2](x).detach()
    constant[:, gone] = (trace / (1 - correction))[gone]
    expected = before[2](constant).detach()
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------- the optimizer
@every_layered_method
def test_parameters_first_and_the_model_later(row: Row) -> None:
    """`create` from parameters, a loaded state, then `watch`: as if made from the model."""
    model = network(dtype=DOUBLE)
    opt = upgd.create(row.name, model, seed=1)
    stream_ = batches(4, dtype=DOUBLE)
    for batch in stream_[:2]:
        step(opt, model, batch)
    later = copy.deepcopy(network(dtype=DOUBLE))
    later.load_state_dict(model.state_dict())
    other = upgd.create(row.name, later.parameters(), seed=7)
    loss_of(later, stream_[2]).backward()
    with pytest.raises(RuntimeError, match=r"no model is watched.*opt\.watch\(model\)"):
        other.step()
    other.load_state_dict(opt.state_dict())
    other.watch(later)
    for batch in stream_[2:]:
        step(opt, model, batch)
        step(other, later, batch)
    assert_equal(weights(model), weights(later))


def test_another_model_is_refused() -> None:
    model = network()
    for act in (
        lambda: upgd.CentredSGD(model.parameters(), layers=upgd.Layers(network())),
        lambda: upgd.CentredSGD(model.parameters()).watch(network()),
    ):
        with pytest.raises(ValueError, match="none of the parameters is of a layer"):
            act()
    with pytest.raises(TypeError, match=r"layers must be upgd\.Layers"):
        upgd.CentredSGD(model.parameters(), layers=model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no linear layer"):
        upgd.Layers(nn.Conv2d(1, 1, 1))
    with pytest.raises(ValueError, match="'5' is no linear layer of the model; these are: 0, 2, 4"):
        upgd.Layers(network(), output="5")


def test_layers_that_no_hook_saw() -> None:
    model = network()
    opt = upgd.CentredSGD(model)
    nn.functional.linear(torch.ones(1, 6), model[0].weight, model[0].bias).sum().backward()
    with pytest.raises(RuntimeError, match="layer '0' has a gradient, but its input was not seen"):
        opt.step()


@every_layered_method
def test_what_it_lacks_is_refused_with_the_reason(row: Row) -> None:
    assert row.unsupported == LACKS
    for name in ("foreach", "capturable"):
        with pytest.raises(ValueError, match=f"{row.optimizer.__name__}: there is no {name}: "):
            row.make(network(), **{name: True})
        opt = row.make(network(), **{name: False})
        with pytest.raises(ValueError, match=f"there is no {name}: "):
            opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: True})
        assert len(opt.param_groups) == 1
    for name, value in {"rounding": "stochastic", "master_weights": True}.items():
        with pytest.raises(TypeError, match=f"there is no {name}: {LACKS[name]}"):
            row.make(network(), **{name: value})


def test_states_of_another_size_are_refused() -> None:
    model, other = mlp((4, 6, 2)), mlp((4, 6, 2))
    opt = upgd.ContinualBackprop(model)
    squared(model, *next(iter(stream(1, 1, (4, 6, 2))))).backward()
    opt.step()
    saved = opt.state_dict()
    key = next(k for k in saved["state"][2] if k.startswith("features."))
    saved["state"][2][key] = saved["state"][2][key][:3]
    with pytest.raises(ValueError, match=r"of shape \(3,\) for a parameter where \(6,\) is kept"):
        upgd.ContinualBackprop(other).load_state_dict(saved)


@pytest.mark.parametrize("output", [None, "0", "2", "4", ["0", "4"]])
def test_layers_have_the_roles_that_groups_have(output: str | list[str] | None) -> None:
    model = network()
    watched = [layer.role for layer in upgd.Layers(model, output).all for _ in layer.own]
    assert watched == roles(model, output)


@every_layered_method
def test_a_compiled_step_is_the_step(row: Row) -> None:
    torch._dynamo.reset()
    model, eager = network(), network()
    opt, reference = row.make(model, seed=1), row.make(eager, seed=1)
    compiled = torch.compile(opt.step, backend="eager")
    for batch in batches(3):
        opt.zero_grad()
        loss_of(model, batch).backward()
        compiled()
        step(reference, eager, batch)
    assert_equal(weights(model), weights(eager))


# ------------------------------------------------------------------------- the laboratory
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "continual-backprop-adam" else pytest.mark.slow)
        for name in LAYERED
    ],
)
def test_the_laboratory_checks_it(name: str) -> None:
    found = lab.check(name)
    assert found.ok, str(found)
    assert {"state_dict", "NaN gradient", "run resumed"} <= {each.check for each in found}


@every_layered_method
def test_what_cannot_run_it_says_why(row: Row) -> None:
    needs = f"{row.name} needs layers"
    assert unsupported(Learner(row.name, {}, 0)) == needs
    with pytest.raises(RLError, match=f"only gradients, and {needs}"):
        ppo.learner(row.name, 0)


def test_rows_are_run_by_the_layers_optimizer() -> None:
    assert len(LAYERED) >= 6
    for row in METHODS.values():
        assert issubclass(row.optimizer, LayerOptimizer) == row.method.layered
        assert PLAIN.keys() >= {row.name} or not row.method.layered
