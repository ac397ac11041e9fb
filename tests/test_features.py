"""Gates measured by hooks, against gates that are really there."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.waiting import PATIENCE
from upgd import Features, FeatureUPGD

DOUBLE = torch.float64


class Gate(nn.Module):
    """The paper's gate: ones that multiply a feature's output."""

    def __init__(self, size: int, dims: int = 0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(size, *[1] * dims, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate


def double(module: nn.Module) -> nn.Module:
    return module.to(DOUBLE)


def mlp(activation: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The same network, without gates and with them."""
    torch.manual_seed(0)
    a, b, c = (double(nn.Linear(i, o)) for i, o in ((5, 8), (8, 6), (6, 3)))
    other = copy.deepcopy(activation)
    plain = nn.Sequential(a, activation, b, other, c)
    gated = nn.Sequential(a, activation, Gate(8), b, other, Gate(6), c)
    return plain, gated


def gates_of(model: nn.Module) -> list[Tensor]:
    return [m.gate.grad.flatten() for m in model.modules() if isinstance(m, Gate)]


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.LeakyReLU(0.1), nn.ELU(), nn.ReLU(inplace=True)],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(4, 5), (5,), (2, 3, 5)])
def test_linear_features(activation: nn.Module, shape: tuple[int, ...]) -> None:
    plain, gated = mlp(copy.deepcopy(activation))
    x = torch.randn(shape, dtype=DOUBLE)
    gated(x).square().sum().backward()
    features = Features(plain)
    plain(x).square().sum().backward()
    assert [layer.gated for layer in features.layers] == ["1", "3"]
    for layer, expected in zip(features.layers, gates_of(gated), strict=True):
        torch.testing.assert_close(layer.first, expected)


@pytest.mark.parametrize("batch", [True, False])
def test_convolutional_features(batch: bool) -> None:
    """The paper's CIFAR-10 network has no activation after its convolutions."""
    torch.manual_seed(0)
    c1, c2 = double(nn.Conv2d(3, 6, 5)), double(nn.Conv2d(6, 16, 5))
    f1, f2 = double(nn.Linear(16 * 5 * 5, 12)), double(nn.Linear(12, 10))
    flat = nn.Flatten(1) if batch else nn.Flatten(0)
    tail = (flat, f1, nn.ReLU())
    plain = nn.Sequential(c1, nn.MaxPool2d(2), c2, nn.MaxPool2d(2), *tail, f2)
    gated = nn.Sequential(
        c1, Gate(6, 2), nn.MaxPool2d(2), c2, Gate(16, 2), nn.MaxPool2d(2), *tail, Gate(12), f2
    )
    x = torch.randn(*((2, 3, 32, 32) if batch else (3, 32, 32)), dtype=DOUBLE)
    gated(x).square().sum().backward()
    features = Features(plain)
    plain(x).square().sum().backward()
    assert [layer.size for layer in features.layers] == [6, 16, 12]
    for layer, expected in zip(features.layers, gates_of(gated), strict=True):
        torch.testing.assert_close(layer.first, expected)


def test_normalisation_belongs_to_the_features_it_feeds() -> None:
    torch.manual_seed(0)
    first, norm, last = (
        double(nn.Linear(4, 6)),
        double(nn.BatchNorm1d(6)),
        double(nn.Linear(6, 2)),
    )
    plain = nn.Sequential(first, norm, nn.Dropout(0.0), nn.Tanh(), last)
    gated = nn.Sequential(first, norm, nn.Tanh(), Gate(6), last)
    x = torch.randn(7, 4, dtype=DOUBLE)
    gated(x).square().sum().backward()
    features = Features(plain)
    plain(x).square().sum().backward()
    torch.testing.assert_close(features.layers[0].first, gates_of(gated)[0])
    assert features.layers[0].gated == "3"
    assert features.of(norm.weight) is features.layers[0] is features.of(norm.bias)
    assert features.of(last.weight) is None


def test_functional_relu_gives_the_same_gates() -> None:
    class Functional(nn.Module):
        def __init__(self, layers: nn.Sequential) -> None:
            super().__init__()
            self.a, self.b = layers[0], layers[2]

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    torch.manual_seed(0)
    modules = double(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    functional = Functional(modules)
    x = torch.randn(3, 4, dtype=DOUBLE)
    measured = []
    for model in (modules, functional):
        features = Features(model)
        model(x).square().sum().backward()
        measured.append(features.layers[0].first)
        features.remove()
    torch.testing.assert_close(measured[0], measured[1])


def test_one_activation_module_may_serve_many_layers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.act(self.b(self.act(self.a(x)))))

    torch.manual_seed(0)
    model = double(Shared())
    gated = nn.Sequential(model.a, model.act, Gate(4), model.b, model.act, Gate(5), model.c)
    x = torch.randn(3, 3, dtype=DOUBLE)
    gated(x).square().sum().backward()
    features = Features(model)
    model(x).square().sum().backward()
    for layer, expected in zip(features.layers, gates_of(gated), strict=True):
        torch.testing.assert_close(layer.first, expected)


@pytest.mark.parametrize("watched", ["the model", "the compiled model"])
@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)),
        (nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)),
    ],
)
def test_compiled_models(watched: str, layers: tuple[nn.Module, ...]) -> None:
    x = torch.randn(6, 3, dtype=DOUBLE)
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = double(nn.Sequential(*copy.deepcopy(layers)))
        runs = torch.compile(model, backend="aot_eager") if compiled else model
        features = Features(model if watched == "the model" else runs)
        opt = FeatureUPGD(model.parameters(), features=features, seed=0)
        for _ in range(3):
            opt.zero_grad()
            runs(x).square().sum().backward()
            opt.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results)


def test_a_model_that_ran_compiled_before_it_was_watched() -> None:
    torch._dynamo.reset()
    model = double(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(6, 3, dtype=DOUBLE)
    compiled(x)
    opt = FeatureUPGD(model.parameters(), features=Features(model))
    compiled(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"torch\.compile.*make Features\(model\) first"):
        opt.step()


def test_two_watchers_of_one_model_do_not_meet() -> None:
    plain, gated = mlp(nn.Tanh())
    x = torch.randn(4, 5, dtype=DOUBLE)
    gated(x).square().sum().backward()
    pair = Features(plain), Features(plain)
    plain(x).square().sum().backward()
    for features in pair:
        for layer, expected in zip(features.layers, gates_of(gated), strict=True):
            torch.testing.assert_close(layer.first, expected)


def test_recorded_only_with_gradients_and_summed_over_backward_passes() -> None:
    plain, _ = mlp(nn.ReLU())
    features = Features(plain)
    x = torch.randn(4, 5, dtype=DOUBLE)
    with torch.no_grad():
        plain(x)
    plain(x)  # no backward pass
    assert all(layer.first is None for layer in features.layers)
    plain(x).sum().backward()
    once = features.layers[0].first.clone()
    plain(x).sum().backward()
    torch.testing.assert_close(features.layers[0].first, 2 * once)
    features.reset()
    assert features.layers[0].first is None
    features.remove()
    plain(x).sum().backward()
    assert features.layers[0].first is None


# ---- only the backward passes that filled .grad count


def detour(kind: str, model: nn.Module, x: Tensor) -> None:
    """A pass through the model whose gradient does not end, or does not stay, in ``.grad``."""
    params = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).pow(3).sum()

    if kind == "autograd.grad of an input":
        point = x.clone().requires_grad_()
        torch.autograd.grad(model(point).pow(3).sum(), point)
    elif kind == "autograd.grad of the weights":
        torch.autograd.grad(model(x).pow(3).sum(), list(params.values()))
    elif kind == "backward into an input":
        point = x.clone().requires_grad_()
        model(point).pow(3).sum().backward(inputs=[point])
    elif kind == "func.grad":
        torch.func.grad(loss)(params, x)
    elif kind == "vmap of grad":
        torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    elif kind == "jacrev":
        torch.func.jacrev(loss)(params, x)
    elif kind == "hessian":
        torch.func.hessian(loss, argnums=1)(params, x[:1])
    elif kind == "graph of a gradient":
        torch.autograd.grad(model(x).pow(3).sum(), list(params.values()), create_graph=True)
    else:
        factor = torch.nan if "NaN" in kind else 1.0
        (factor * model(x).pow(3).sum()).backward()
        if "in place" in kind:
            model.zero_grad(set_to_none=False)
        else:
            model.zero_grad()


DETOURS = [
    "autograd.grad of an input",
    "autograd.grad of the weights",
    "backward into an input",
    "func.grad",
    "vmap of grad",
    "jacrev",
    "hessian",
    "graph of a gradient",
    "discarded",
    "discarded in place",
    "discarded NaN",
    "discarded NaN in place",
]


@pytest.mark.parametrize("kind", DETOURS)
def test_other_passes_leave_gates_alone(kind: str) -> None:
    plain, gated = mlp(nn.Tanh())
    x, other = torch.randn(2, 4, 5, dtype=DOUBLE)
    gated(x).square().sum().backward()
    expected = gates_of(gated)
    plain.zero_grad()
    features = Features(plain)
    detour(kind, plain, other)
    plain(x).square().sum().backward()
    if "discarded" not in kind:
        detour(kind, plain, other)
    for layer, gate in zip(features.layers, expected, strict=True):
        torch.testing.assert_close(layer.first, gate)


@pytest.mark.parametrize("curvature", ["hesscale", "hutchinson"])
@pytest.mark.parametrize("kind", DETOURS)
def test_other_passes_leave_second_derivatives_alone(kind: str, curvature: Any) -> None:
    plain, _ = mlp(nn.Tanh())
    x, other = torch.randn(2, 4, 5, dtype=DOUBLE)
    results = []
    for detours in (False, True):
        model = copy.deepcopy(plain)
        opt = FeatureUPGD(
            model.parameters(), features=Features(model), order=2, curvature=curvature, seed=3
        )
        if detours:
            detour(kind, model, other)
            if "discarded" in kind:
                opt.backward((torch.nan if "NaN" in kind else 1.0) * model(other).pow(3).sum())
                model.zero_grad(set_to_none="in place" not in kind)
        opt.backward(model(x).square().sum())
        results.append([(layer.first, layer.second) for layer in opt.features.layers])
        opt.step()
        results[-1].append(tuple(p.detach() for p in model.parameters()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("in_place", [False, True])
def test_training_goes_on_after_a_step_that_was_not_finite(in_place: bool) -> None:
    plain, _ = mlp(nn.Tanh())
    x = torch.randn(4, 5, dtype=DOUBLE)
    results = []
    for broken in (False, True):
        model = copy.deepcopy(plain)
        opt = FeatureUPGD(model.parameters(), features=Features(model), seed=0)
        for step in range(3):
            if broken and step == 1:
                (torch.nan * model(x).sum()).backward()
                with pytest.raises(FloatingPointError):
                    opt.step()
                model.zero_grad(set_to_none=not in_place)
            model(x).square().sum().backward()
            opt.step()
            model.zero_grad(set_to_none=not in_place)
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Identity()], ids=repr)
def test_a_gradient_penalty_has_the_gates_of_the_whole_loss(activation: nn.Module) -> None:
    """The gates also multiply the gradients that the penalty is made of."""
    plain, gated = mlp(activation)
    x = torch.randn(4, 5, dtype=DOUBLE)

    def penalised(model: nn.Module) -> Tensor:
        point = x.clone().requires_grad_()
        value = model(point).pow(3).sum()
        (slope,) = torch.autograd.grad(value, point, create_graph=True)
        return value + slope.square().sum()

    penalised(gated).backward()
    expected = gates_of(gated)
    plain.zero_grad()
    features = Features(plain)
    penalised(plain).backward()
    for layer, gate in zip(features.layers, expected, strict=True):
        torch.testing.assert_close(layer.first, gate)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    plain, gated = mlp(nn.Tanh())
    x = torch.randn(4, 5, dtype=DOUBLE, requires_grad=True)
    gated(x).square().sum().backward()
    expected = gates_of(gated)
    plain.zero_grad()
    features = Features(plain)
    checkpoint(plain, x, use_reentrant=reentrant).square().sum().backward()
    for layer, gate in zip(features.layers, expected, strict=True):
        torch.testing.assert_close(layer.first, gate)


def test_frozen_and_unfrozen_layers() -> None:
    plain, gated = mlp(nn.Tanh())
    x = torch.randn(4, 5, dtype=DOUBLE)
    features = Features(plain)
    for frozen in (plain[2].weight, plain[2], None):
        plain.requires_grad_(True)
        if frozen is not None:
            frozen.requires_grad_(False)
        gated.zero_grad()
        gated(x).square().sum().backward()
        expected = gates_of(gated)
        plain.zero_grad()
        plain(x).square().sum().backward()
        for layer, gate in zip(features.layers, expected, strict=True):
            torch.testing.assert_close(layer.first, gate)


def test_one_thread_explains_while_another_trains() -> None:
    plain, gated = mlp(nn.Tanh())
    x = torch.randn(4, 5, dtype=DOUBLE)
    gated(x).square().sum().backward()
    expected = gates_of(gated)
    plain.zero_grad()
    features = Features(plain)
    inside, done = threading.Event(), threading.Event()

    def wait(gradient: Tensor) -> None:
        inside.set()
        done.wait(PATIENCE)

    def explain() -> None:  # stops in the middle of its pass
        point = torch.randn(3, 5, dtype=DOUBLE, requires_grad=True)
        plain[0].register_forward_hook(lambda _, args, out: out.register_hook(wait) and None)
        torch.autograd.grad(plain(point).pow(3).sum(), point)

    value = plain(x).square().sum()
    thread = threading.Thread(target=explain)
    thread.start()
    try:
        assert inside.wait(PATIENCE)
        value.backward()
    finally:
        done.set()
        thread.join()
    for layer, gate in zip(features.layers, expected, strict=True):
        torch.testing.assert_close(layer.first, gate)
        assert not layer._passes


def test_gates_stay_and_go_with_the_gradient() -> None:
    plain, _ = mlp(nn.ReLU())
    opt = FeatureUPGD(plain.parameters(), features=Features(plain), lr=0.0)
    x = torch.randn(4, 5, dtype=DOUBLE)
    first = opt.features.layers[0]
    plain(x).sum().backward()
    once = first.first.clone()
    opt.step()
    plain(x).sum().backward()  # nobody called zero_grad: .grad is the sum, too
    torch.testing.assert_close(first.first, 2 * once)
    plain.zero_grad()
    plain(x).sum().backward()
    torch.testing.assert_close(first.first, once)
    opt.zero_grad()
    assert all(layer.first is None for layer in opt.features.layers)


def test_curvature_of_a_discarded_pass_is_not_used() -> None:
    plain, _ = mlp(nn.Tanh())
    opt = FeatureUPGD(plain.parameters(), features=Features(plain), order=2)
    x = torch.randn(4, 5, dtype=DOUBLE)
    opt.backward(plain(x).square().sum())
    plain.zero_grad()
    plain(x).square().sum().backward()
    with pytest.raises(ValueError, match=r"layer '0' was computed with another gradient"):
        opt.step()


def test_the_output_layer_takes_plain_gradient_descent() -> None:
    plain, _ = mlp(nn.ReLU())
    opt = FeatureUPGD(
        plain.parameters(), features=Features(plain), lr=0.1, sigma=1.0, weight_decay=0.5
    )
    before = plain[4].weight.detach().clone()
    plain(torch.randn(4, 5, dtype=DOUBLE)).square().sum().backward()
    expected = (1 - 0.1 * 0.5) * before - 0.1 * plain[4].weight.grad
    opt.step()
    torch.testing.assert_close(plain[4].weight.detach(), expected)


def test_weights_into_one_feature_share_its_gate() -> None:
    plain, _ = mlp(nn.Tanh())
    opt = FeatureUPGD(plain.parameters(), features=Features(plain), lr=0.1, sigma=0.0)
    before = [p.detach().clone() for p in plain.parameters()]
    plain(torch.randn(4, 5, dtype=DOUBLE)).square().sum().backward()
    opt.step()
    for layer, old in ((plain[0], before[0:2]), (plain[2], before[2:4])):
        gate = 2 * (1 - opt.scaled_utility(layer.weight))
        assert gate.shape == (layer.out_features,)
        torch.testing.assert_close(old[0] - layer.weight, 0.1 * layer.weight.grad * gate[:, None])
        torch.testing.assert_close(old[1] - layer.bias, 0.1 * layer.bias.grad * gate)


def test_several_outputs_and_chosen_layers() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.act = nn.Linear(3, 4), nn.Tanh()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.body(x))
            return torch.cat([self.actor(h), self.critic(h)], -1)

    model = TwoHeads()
    features = Features(model, output=["actor", "critic"])
    assert [layer.name for layer in features.layers] == ["body"]
    model(torch.ones(1, 3)).sum().backward()
    assert "gates on the output of act" in repr(features)
    assert "output: actor, critic" in repr(features)
    assert [layer.name for layer in Features(model, layers=["actor"]).layers] == ["actor"]


def test_changing_a_recorded_output_in_place_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 1))
    Features(model)
    h = model[1](model[0](torch.ones(2, 3)))
    h.mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place"):
        model[2](h).sum().backward()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"output": "nope"}, "'nope' is not a linear or convolutional layer"),
        ({"layers": ["1"]}, "'1' is not a linear or convolutional layer"),
        ({"output": "0", "layers": ["0"]}, "both feature and output"),
    ],
)
def test_bad_names(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Features(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), **arguments)


def test_models_without_features() -> None:
    with pytest.raises(ValueError, match="no linear or convolutional"):
        Features(nn.ReLU())
    with pytest.raises(ValueError, match="no hidden features"):
        Features(nn.Linear(2, 2))


def test_gradients_without_gates_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    opt = FeatureUPGD(model.parameters(), features=Features(model))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=r"layer '0'.*not measured"):
        opt.step()


def test_a_feature_with_two_consumers_has_two_gates() -> None:
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(3, 4, dtype=DOUBLE)
            self.one, self.two = nn.Tanh(), nn.Tanh()
            self.actor = nn.Linear(4, 2, dtype=DOUBLE)
            self.critic = nn.Linear(4, 1, dtype=DOUBLE)
            self.gate = torch.ones(4, dtype=DOUBLE, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.trunk(x)
            a, c = self.gate * self.one(h), self.gate * self.two(h)
            return self.actor(a).square().sum() + self.critic(c).sum()

    torch.manual_seed(0)
    model = ActorCritic()
    features = Features(model, output=["actor", "critic"])
    model(torch.randn(5, 3, dtype=DOUBLE)).backward()
    torch.testing.assert_close(features.layers[0].first, model.gate.grad)


def test_a_frozen_feature_with_two_consumers() -> None:
    torch.manual_seed(0)
    trunk, one, two = (nn.Linear(*size, dtype=DOUBLE) for size in ((3, 4), (4, 2), (4, 1)))
    model = nn.ModuleDict({"trunk": trunk, "one": one, "two": two})
    acts = nn.Tanh(), nn.Tanh()
    model["acts"] = nn.ModuleList(acts)
    trunk.requires_grad_(False)
    features = Features(model, output=["one", "two"])
    gate = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    h = trunk(torch.randn(5, 3, dtype=DOUBLE, requires_grad=True))
    a, c = gate * acts[0](h), gate * acts[1](h)
    (one(a).square().sum() + two(c).sum()).backward()
    torch.testing.assert_close(features.layers[0].first, gate.grad)


def test_identity_is_passed_through() -> None:
    plain, gated = mlp(nn.Tanh())
    longer = nn.Sequential(plain[0], nn.Identity(), *list(plain)[1:])
    x = torch.randn(4, 5, dtype=DOUBLE)
    gated(x).square().sum().backward()
    features = Features(longer)
    longer(x).square().sum().backward()
    torch.testing.assert_close(features.layers[0].first, gates_of(gated)[0])


def test_a_residual_ends_the_search_for_the_activation() -> None:
    """Out of place the gate stays on the layer; in place it cannot be measured."""

    class Residual(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.body, self.act, self.out = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
            self.in_place = in_place

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            if self.in_place:
                h += x
            else:
                h = h + x
            return self.out(self.act(h))

    model = Residual(in_place=False)
    features = Features(model)
    model(torch.randn(2, 4)).sum().backward()
    assert features.layers[0].gated == "body"
    model = Residual(in_place=True)
    Features(model)
    with pytest.raises(RuntimeError, match="changed in place"):
        model(torch.randn(2, 4)).sum().backward()


def test_half_precision_gates_do_not_overflow() -> None:
    """Products of large activations and scaled gradients exceed float16; gradients do not."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).to(torch.float16)
    with torch.no_grad():
        model[0].bias.fill_(200.0)
        model[2].weight.fill_(1.0)
    features = Features(model)
    (model(torch.zeros(1, 2, dtype=torch.float16)).sum() * 1000).backward()
    assert torch.isfinite(model[0].weight.grad).all()
    torch.testing.assert_close(features.layers[0].first, torch.full((3,), 200_000.0))


def test_shared_and_computed_weights_are_refused() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="layers '0' and '1' share"):
        Features(tied)
    tied[1].weight = nn.Parameter(torch.ones(3, 3))
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match="output layer '2' and layer '0' share"):
        Features(tied)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear(2, 1))
    with pytest.raises(ValueError, match="parametrization"):
        Features(normed)


def test_attention_and_single_names() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 2))
    opt = FeatureUPGD(model.parameters(), features=Features(model))
    model(torch.randn(2, 3, 8)).sum().backward()
    opt.step()
    assert [f.name for f in Features(model, layers="0.linear1").layers] == ["0.linear1"]
