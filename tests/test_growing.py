"""Models that change: parameters replaced, traces forgotten, optimizers taken over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import (
    assert_close,
    assert_equal,
    batches,
    loss_of,
    network,
    state,
    train,
    weights,
)
from upgd import UPGD, AdaUPGD, Features, FeatureUPGD
from upgd.optim.registry import METHODS, Row

PATHS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "skip": {"nonfinite": "skip"},
    "fused": {"fused": True},
}
every_path = pytest.mark.parametrize("path", PATHS)


def options(path: str) -> dict[str, Any]:
    if path == "fused":
        pytest.importorskip("numba")
    return PATHS[path]


def enlarged(layer: nn.Linear, outputs: int, inputs: int | None = None) -> nn.Linear:
    """A layer with more units, which begins with the weights of the other."""
    torch.manual_seed(9)
    inputs = layer.in_features if inputs is None else inputs
    new = nn.Linear(inputs, outputs, dtype=layer.weight.dtype)
    with torch.no_grad():
        new.weight[: layer.out_features, : layer.in_features] = layer.weight
        new.bias[: layer.out_features] = layer.bias
    return new


def padded(old: Tensor, new: Tensor, name: str, row: Row) -> Tensor:
    """A state for `new`, written without slices: element by element."""
    grown = new.detach().clone() if name in row.method.starts_as_weight else torch.zeros_like(new)
    for index in torch.cartesian_prod(*[torch.arange(n) for n in old.shape]).reshape(-1, old.dim()):
        grown[tuple(index)] = old[tuple(index)]
    return grown


GROWN = ["upgd", "upgd-momentum", "upgd-local", "ada-upgd", "ada-upgd-2nd", "s-ewc", "s-rwalk"]


@pytest.mark.parametrize("name", [*GROWN, "pgd"])
@every_path
def test_an_enlarged_head_keeps_its_traces(name: str, path: str) -> None:
    """As an optimizer that was made for the larger model and loaded padded traces."""
    row, stream = METHODS[name], batches(6)
    model = network()
    opt = row.make(model, seed=4, **options(path))
    train(row, opt, model, stream[:3])
    head = model[4]
    model[4] = enlarged(head, 5)
    before = {p: dict(s) for p, s in opt.state.items()}
    opt.zero_grad()
    opt.replace(head.weight, model[4].weight)
    opt.replace(head.bias, model[4].bias)

    other = copy.deepcopy(model)
    peer = row.make(other, seed=4, **options(path))
    saved = copy.deepcopy(opt.state_dict())
    saved["state"] = {}
    for i, p in enumerate([*list(model.parameters())[:-2], head.weight, head.bias]):
        new = list(model.parameters())[i]
        traces = {k: padded(before[p][k], new, k, row) for k in row.states}
        clock = {k: before[p][k].clone() for k in ("step", "attempts")}
        saved["state"][i] = {**clock, **traces}
    peer.load_state_dict(saved)
    assert_equal(state(opt), state(peer))
    train(row, opt, model, stream[3:])
    train(row, peer, other, stream[3:])
    assert_equal(weights(model), weights(other))

    again = copy.deepcopy(model)  # and a checkpoint goes on
    resumed = row.make(again, **options(path))
    resumed.load_state_dict(opt.state_dict())
    train(row, opt, model, stream[:2])
    train(row, resumed, again, stream[:2])
    assert_equal(weights(model), weights(again))


@pytest.mark.parametrize("how", ["in the module", "another module"])
@pytest.mark.parametrize("path", ["foreach", "single", "skip"])
def test_features_may_grow(how: str, path: str) -> None:
    row, stream = METHODS["feature-upgd"], batches(6)
    model = network()
    opt = row.make(model, seed=4, **options(path))
    train(row, opt, model, stream[:3])
    utility = opt.state[model[0].weight]["utility"].clone()
    old = [model[0].weight, model[0].bias, model[2].weight]
    wider, after = enlarged(model[0], 12), enlarged(model[2], 7, inputs=12)
    if how == "another module":
        model[0] = wider
    else:
        model[0].weight, model[0].bias = wider.weight, wider.bias
    model[2].weight = after.weight
    opt.zero_grad()
    for p, new in zip(old, [model[0].weight, model[0].bias, model[2].weight], strict=True):
        opt.replace(p, new)
    grown = torch.cat([utility, torch.zeros(3)])
    assert torch.equal(opt.state[model[0].weight]["utility"], grown)

    other = copy.deepcopy(model)
    for module in other:  # a copy has the hooks of the original
        module._forward_hooks.clear()
    peer = FeatureUPGD(other.parameters(), features=Features(other), **options(path))
    peer.load_state_dict(opt.state_dict())
    train(row, opt, model, stream[3:])
    train(row, peer, other, stream[3:])
    assert_equal(weights(model), weights(other))
    assert opt.utility(model[0].bias).shape == (12,)
    assert bool((opt.utility(model[0].weight)[9:] != 0).all())  # the new ones have learnt


@pytest.mark.parametrize("name", ["self-tuned-sgd", "centred-sgd", "continual-backprop"])
@pytest.mark.parametrize("fused", [False, True])
def test_layers_may_grow(name: str, fused: bool) -> None:
    """States of inputs grow with the layer; those of the layer and of the network stay."""
    row, stream = METHODS[name], batches(6)
    model = network()
    opt = row.make(model, seed=4, fused=fused)
    train(row, opt, model, stream[:3])
    kept = {key: value.clone() for key, value in opt.state[model[0].weight].items()}
    wider = enlarged(model[0], model[0].out_features, inputs=model[0].in_features + 2)
    old = [model[0].weight, model[0].bias]
    with pytest.raises(ValueError, match=r"set layer\.weight and layer\.bias first"):
        opt.replace(old[0], wider.weight)
    model[0].weight, model[0].bias = wider.weight, wider.bias
    opt.zero_grad()
    for p, new in zip(old, (wider.weight, wider.bias), strict=True):
        opt.replace(p, new)
    for key, value in opt.state[model[0].weight].items():
        if key.startswith("inputs."):
            assert torch.equal(value, torch.cat([kept[key], value.new_zeros(2)]))
        elif "." in key or key in ("step", "attempts"):
            assert torch.equal(value, kept[key])
    opt.load_state_dict(opt.state_dict())  # shapes are those of the layers
    wide = [(torch.cat([x, x[:, :2]], 1), y) for x, y in stream[3:]]
    before = weights(model)
    train(row, opt, model, wide)
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_traces_of_other_shapes_and_types() -> None:
    weight = nn.Parameter(torch.ones(3, 4, 2))
    opt = UPGD([("kernel", weight)])
    weight.grad = torch.arange(24.0).reshape(3, 4, 2)
    opt.step()
    old = opt.state[weight]["utility"].clone()
    smaller = nn.Parameter(torch.ones(2, 6, 2, dtype=torch.float64))
    opt.replace(weight, smaller)
    found = opt.state[smaller]["utility"]
    assert found.dtype == torch.float64
    assert torch.equal(found[:, :4], old[:2].double())
    assert not found[:, 4:].any()
    assert opt.param_groups[0]["param_names"] == ["kernel"]
    assert weight not in opt.state


def test_what_cannot_replace() -> None:
    model = network()
    opt = UPGD(model.named_parameters())
    head = model[4]
    for new, words in (
        (torch.ones(3), r"'4.weight' of shape \(3, 7\) has 1 dimensions; only as many, 2,"),
        (head.bias, "is a parameter of this optimizer already"),
        (head.weight * 1, "must be a leaf tensor"),
        (torch.ones(3, 7, dtype=torch.complex64, requires_grad=True), "is torch.complex64"),
    ):
        with pytest.raises(ValueError, match=words):
            opt.replace(head.weight, new)
    with pytest.raises(ValueError, match=r"shape \(2,\) is not a parameter of this optimizer"):
        opt.replace(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="not a parameter"):
        opt.reset([torch.ones(2)])
    features = FeatureUPGD(model.parameters(), features=Features(model))
    with pytest.raises(ValueError, match=r"not in the model that is watched; put it there first"):
        features.replace(head.weight, nn.Parameter(torch.ones(4, 7)))
    assert features.param_groups[0]["params"] == list(model.parameters())


# ------------------------------------------------------------------------- forgetting
@pytest.mark.parametrize("name", [*GROWN, "feature-upgd"])
@pytest.mark.parametrize("path", ["foreach", "skip"])
def test_forgotten_rows_begin_again(name: str, path: str) -> None:
    row, stream = METHODS[name], batches(4)
    model = network()
    opt = row.make(model, seed=4, **options(path))
    train(row, opt, model, stream[:2])
    other = copy.deepcopy(model)
    saved = copy.deepcopy(opt.state_dict())
    for index, entry in saved["state"].items():
        for trace in row.states:
            if index == 0 and trace in entry:
                fresh = trace in row.method.starts_as_weight
                entry[trace][torch.tensor([1, 5])] = model[0].weight[[1, 5]] if fresh else 0.0
    opt.reset(model[0].weight, rows=[1, 5])
    for module in other:
        module._forward_hooks.clear()
    peer = row.make(other, **options(path))
    peer.load_state_dict(saved)
    assert_equal(state(opt), state(peer))
    train(row, opt, model, stream[2:])
    train(row, peer, other, stream[2:])
    assert_equal(weights(model), weights(other))


@every_path
def test_a_forgotten_parameter_begins_again(path: str) -> None:
    row, stream = METHODS["ada-upgd"], batches(4)
    model = network()
    opt = row.make(model, seed=4, **options(path))
    train(row, opt, model, stream[:2])
    opt.reset(model[4].parameters())
    opt.zero_grad()
    loss_of(model, stream[2]).backward()
    w, g = model[4].weight.detach().clone(), model[4].weight.grad.clone()
    opt.step()
    assert int(opt.state[model[4].weight]["step"]) == 1
    assert int(opt.state[model[0].weight]["step"]) == 3
    torch.testing.assert_close(opt.utility(model[4].weight), -g * w)  # of this step alone
    opt.load_state_dict(opt.state_dict())


def test_rows_that_do_not_exist_change_nothing() -> None:
    model = network()
    opt = UPGD(model.parameters())
    train(METHODS["upgd"], opt, model, batches(1))
    before = state(opt)
    with pytest.raises(IndexError):
        opt.reset(model.parameters(), rows=[8])  # the first layer has it, the others do not
    assert_equal(state(opt), before)


# ---------------------------------------------------------------------------- looking
def test_utilities_by_name() -> None:
    model = network()
    opt = UPGD(model.named_parameters())
    assert opt.utilities() == opt.scaled_utilities() == {}
    train(METHODS["upgd"], opt, model, batches(2))
    found, scaled = opt.utilities(), opt.scaled_utilities()
    assert list(found) == list(scaled) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert torch.equal(found[name], opt.utility(p))
        assert torch.equal(scaled[name], opt.scaled_utility(p))
    assert list(UPGD(network().parameters()).utilities()) == []
    groups = [{"params": [p]} for p in model.parameters()]
    unnamed = AdaUPGD(groups, scaling="local")
    train(METHODS["ada-upgd"], unnamed, model, batches(1))
    assert list(unnamed.utilities()) == [f"{i}.0" for i in range(6)]
    assert torch.equal(unnamed.scaled_utilities()["2.0"], unnamed.scaled_utility(model[2].weight))


def test_utilities_of_features_by_name() -> None:
    model = network()
    opt = FeatureUPGD(model.named_parameters(), features=Features(model))
    train(METHODS["feature-upgd"], opt, model, batches(2))
    shapes = {name: tuple(u.shape) for name, u in opt.utilities().items()}
    assert shapes == {"0.weight": (9,), "0.bias": (9,), "2.weight": (7,), "2.bias": (7,)}
    assert opt.scaled_utilities().keys() == shapes.keys()


# ----------------------------------------------------------------- other optimizers
ADAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "adam, foreach": (torch.optim.Adam, {"foreach": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw, maximize": (torch.optim.AdamW, {"maximize": True}),
    "adamw, fused": (torch.optim.AdamW, {"fused": True}),
}


@pytest.mark.parametrize("kind", ADAMS)
@every_path
def test_adaupgd_goes_on_from_adam(kind: str, path: str) -> None:
    """The next step is Adam's times the gate of this step's utility alone."""
    cls, given = ADAMS[kind]
    model = network(dtype=torch.float64)
    some = list(model.named_parameters())
    groups = [{"params": some[:3], "lr": 0.01}, {"params": some[3:], "lr": 0.02}]
    adam = cls(groups, betas=(0.8, 0.99), eps=1e-6, **given)
    train(METHODS["upgd"], adam, model, batches(3, dtype=torch.float64))
    opt = AdaUPGD.from_optimizer(adam, sigma=0.0, **options(path))
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.02]
    assert opt.param_groups[1]["param_names"] == [name for name, _ in some[3:]]

    start, batch = weights(model), batches(4, dtype=torch.float64)[3]
    train(METHODS["upgd"], adam, model, [batch])
    moved = weights(model)
    sign = -1.0 if given.get("maximize") else 1.0
    gradients = [sign * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, w in zip(model.parameters(), start, strict=True):
            p.copy_(w)
    train(METHODS["ada-upgd"], opt, model, [batch])
    utilities = [-g * w for g, w in zip(gradients, start, strict=True)]
    eta = max(u.max() for u in utilities).abs()
    for i, (w, after, u) in enumerate(zip(start, moved, utilities, strict=True)):
        decay = 1 - adam.param_groups[i // 3]["lr"] * adam.param_groups[i // 3]["weight_decay"]
        expected = decay * w + (after - decay * w) * 2 * torch.sigmoid(-u / eta)
        torch.testing.assert_close(weights(model)[i], expected, rtol=1e-9, atol=1e-12)
    assert int(opt.state[model[0].weight]["step"]) == 4
    opt.load_state_dict(opt.state_dict())


def test_what_adaupgd_does_not_take_over() -> None:
    def adam(cls: Any = torch.optim.Adam, **given: Any) -> Any:
        return cls(network().parameters(), **given)

    for opt, words in (
        (adam(amsgrad=True), "has no maximum of second moments, that of amsgrad=True"),
        (adam(weight_decay=0.1), r"Adam's weight_decay=0.1 is part of its moments.*Set it to 0"),
        (torch.optim.SGD(network().parameters()), "Adam or AdamW, not SGD"),
    ):
        with pytest.raises(ValueError, match=f"AdaUPGD.from_optimizer: .*{words}"):
            AdaUPGD.from_optimizer(opt)
    taken = AdaUPGD.from_optimizer(adam(torch.optim.AdamW, lr=0.5), lr=0.25, seed=3)
    assert taken.param_groups[0]["lr"] == 0.25
    assert taken.param_groups[0]["weight_decay"] == 0.01
    assert not taken.state


def test_schedulers_find_their_keys() -> None:
    adam = torch.optim.AdamW(network().parameters(), lr=0.5)
    torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
    taken = AdaUPGD.from_optimizer(adam)
    assert taken.param_groups[0]["initial_lr"] == 0.5


@every_path
@pytest.mark.parametrize(
    "given", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "maximize": True}]
)
def test_upgd_goes_on_from_sgd(path: str, given: dict[str, Any]) -> None:
    """Without noise and gates it is SGD itself."""
    stream, models = batches(6, dtype=torch.float64), []
    for switch in (False, True):
        model = network(dtype=torch.float64)
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.1, **given)
        train(METHODS["upgd"], opt, model, stream[:3])
        if switch:
            opt = UPGD.from_optimizer(opt, sigma=0.0, protect=False, **options(path))
        train(METHODS["upgd"], opt, model, stream[3:])
        models.append(model)
    assert_close(*map(weights, models), rtol=1e-10, atol=1e-12)


def test_what_upgd_does_not_take_over() -> None:
    for given, words in (
        ({"momentum": 0.9, "nesterov": True}, "has no counterpart of nesterov=True"),
        ({"momentum": 0.9, "dampening": 0.1}, "has no counterpart of dampening=0.1"),
        ({"momentum": 0.9, "weight_decay": 0.1}, r"weight_decay=0.1 is part of it where there is"),
    ):
        sgd = torch.optim.SGD(network().parameters(), lr=0.1, **given)
        with pytest.raises(ValueError, match=f"UPGD.from_optimizer: .*{words}"):
            UPGD.from_optimizer(sgd)
    with pytest.raises(ValueError, match=r"torch.optim.SGD, not Adam"):
        UPGD.from_optimizer(torch.optim.Adam(network().parameters()))  # type: ignore[arg-type]


# ------------------------------------------------------- features of parameters alone
class Conv1D(nn.Module):
    """As Transformers has it: a linear layer with a weight of [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def turned(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """Two models that compute the same; the first layer of one has its weight transposed."""
    plain = network(dtype=dtype)
    other = copy.deepcopy(plain)
    for place in (0, 2):
        linear = plain[place]
        conv = Conv1D(linear.out_features, linear.in_features).to(dtype)
        with torch.no_grad():
            conv.weight.copy_(linear.weight.t())
            conv.bias.copy_(linear.bias)
        other[place] = conv
    return plain, other


@pytest.mark.parametrize("name", [n for n in METHODS if n.startswith("feature-")])
@pytest.mark.parametrize("path", ["foreach", "single", "skip"])
def test_transposed_weights(name: str, path: str) -> None:
    """A feature's weights are a column there; the updates are those of a linear layer."""
    row, models = METHODS[name], turned()
    for model in models:
        opt = row.make(model, sigma=0.0, weight_decay=0.1, lr=0.1, **options(path))
        assert [layer.size for layer in opt.features.layers] == [9, 7]
        train(row, opt, model, batches(4, dtype=torch.float64))
        if model is models[1]:  # the data of a parameter may be moved elsewhere
            model[0].weight.data = model[0].weight.data.clone()
        train(row, opt, model, batches(2, dtype=torch.float64))
    for place in (0, 2):
        models[1][place].weight.data = models[1][place].weight.data.t()
    assert_close(*map(weights, models), rtol=1e-9, atol=1e-11)


def test_noise_reaches_transposed_weights() -> None:
    _, model = turned()
    opt = METHODS["feature-upgd"].make(model, sigma=0.5, lr=0.1, seed=1)
    quiet = copy.deepcopy(model)
    for module in quiet:
        module._forward_hooks.clear()
    train(METHODS["feature-upgd"], opt, model, batches(1, dtype=torch.float64))
    other = METHODS["feature-upgd"].make(quiet, sigma=0.0, lr=0.1, seed=1)
    train(METHODS["feature-upgd"], other, quiet, batches(1, dtype=torch.float64))
    moved = (model[0].weight - quiet[0].weight).abs()
    assert bool((moved > 0).all())
    assert torch.equal(model[4].weight, quiet[4].weight)  # the output layer has none


@pytest.mark.parametrize("order", [1, 2])
def test_watching_later_is_watching_from_the_start(order: int) -> None:
    models = [network(), network()]
    for model in models:
        features = Features(model) if model is models[0] else None
        opt = FeatureUPGD(model.parameters(), features, 0.1, order=order, seed=3)
        if features is None:
            opt.watch(model)
        for batch in batches(3):
            opt.zero_grad()
            opt.backward(loss_of(model, batch))
            opt.step()
    assert_equal(*map(weights, models))


def test_a_step_without_a_model_says_what_to_do() -> None:
    model = network()
    opt = FeatureUPGD(model.parameters())
    opt.zero_grad()
    loss_of(model, batches(1)[0]).backward()
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"call opt.watch\(model\) before the first forward"):
        opt.step()
    opt.watch(model, output="2", layers=["0"])
    assert [layer.name for layer in opt.features.layers] == ["0"]
    with pytest.raises(RuntimeError, match="gates were not measured"):  # they came too late
        opt.step()
    assert_equal(weights(model), before)
    train(METHODS["feature-upgd"], opt, model, batches(1))
    with pytest.raises(ValueError, match="not another one or a copy"):
        opt.watch(copy.deepcopy(model))


def test_a_state_dict_may_come_before_the_model() -> None:
    row, stream = METHODS["feature-upgd"], batches(4)
    model = network()
    opt = row.make(model, seed=3)
    train(row, opt, model, stream[:2])
    other = copy.deepcopy(model)
    for module in other:
        module._forward_hooks.clear()
    resumed = FeatureUPGD(other.parameters())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    with pytest.raises(ValueError, match=r"utilities of 7 features .* the model has none"):
        resumed.watch(other, output="2")
    assert not any(module._forward_hooks for module in other)
    resumed.watch(other)
    train(row, opt, model, stream[2:])
    train(row, resumed, other, stream[2:])
    assert_equal(weights(model), weights(other))


def test_watching_again_replaces_the_hooks() -> None:
    model = network()
    opt = FeatureUPGD(model.parameters(), seed=1)
    for _ in range(3):
        opt.watch(model)
    hooks = [len(module._forward_hooks) for module in model]
    assert hooks == [1, 1, 1, 1, 0]
    train(METHODS["feature-upgd"], opt, model, batches(2))


def test_gpt2_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=6, n_inner=12
    )
    model = transformers.GPT2LMHeadModel(config)
    opt = FeatureUPGD(model.parameters(), lr=0.1, weight_decay=0.01)
    features = opt.watch(model)
    assert features.output == ("lm_head",)  # tied to the embedding, which leads into no feature
    sizes = {layer.name.split(".", 3)[3]: layer.size for layer in features.layers}
    assert sizes == {"attn.c_attn": 24, "attn.c_proj": 8, "mlp.c_fc": 12, "mlp.c_proj": 8}
    words = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = model(words, labels=words).loss
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    gated = {layer.name: layer.gated for layer in features.layers}
    assert gated["transformer.h.0.mlp.c_fc"] == "transformer.h.0.mlp.act"
