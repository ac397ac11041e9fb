"""``fused=True`` of layered methods equals the plain path, which is compared with plain loops."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba")

import upgd
from tests import layered_methods
from tests.cases import CounterNoise, assert_close, assert_equal, is_repetition, weights
from upgd.kernels import cpu_layer
from upgd.optim import fused_layers
from upgd.optim.layer_step import Layer
from upgd.optim.layered import LayerOptimizer
from upgd.optim.registry import METHODS
from upgd.rules.vocabulary import Method, Phase

DOUBLE = torch.float64
SIZES = (19, 34, 7, 3)  # a vector and a rest, two and a rest, less than one
HYPER: dict[str, dict[str, Any]] = {
    "self-tuned-sgd": {"lr": 0.1, "pace": 0.01, "beta_slow": 0.9},
    "continual-backprop": {"replacement_rate": 0.01, "maturity": 5},
    "continual-backprop-adam": {"replacement_rate": 0.01, "maturity": 5, "lr": 0.003},
    "redo": {"threshold": 0.8, "period": 20},
    "redo-adam": {"threshold": 0.8, "period": 20, "lr": 0.003},
}
OWN = {"lr": 0.03, "sigma": 0.05, "rate": 0.1, "maturity": 5.0, "period": 7.0, "tau": 0.6}
LAYERED = [
    pytest.param(name, marks=[pytest.mark.slow] * is_repetition(name))
    for name, row in METHODS.items()
    if row.method.layered
]


def make(name: str, model: nn.Module, params: Any = None, **given: Any) -> LayerOptimizer:
    """A method of the registry or of the tests."""
    given = {"seed": 5, "noise": CounterNoise(), **given}
    if params is not None:
        given["layers"] = upgd.Layers(model)
    if name in METHODS:
        row = METHODS[name]
        hyper = {**row.options, **HYPER.get(name, {}), **given}
        return row.optimizer(model if params is None else params, **hyper)  # type: ignore[return-value]
    method = layered_methods.METHODS[name]
    return LayerOptimizer(
        model if params is None else params, method, {n: OWN[n] for n in method.hyper}, **given
    )


def mlp(sizes: tuple[int, ...] = SIZES, bias: bool = True, dtype: torch.dtype = DOUBLE) -> Any:
    torch.manual_seed(3)
    pairs = itertools.pairwise(sizes)
    layers = [layer for pair in pairs for layer in (nn.Linear(*pair, bias=bias), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def learn(opt: Any, model: nn.Module, steps: int, count: int = 3, inputs: int = SIZES[0]) -> None:
    """Inputs far from zero, and targets that change half way."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    wanted = torch.randn(2, inputs, 3, generator=generator, dtype=DOUBLE)
    for step in range(steps):
        x = torch.randn(count, inputs, generator=generator, dtype=DOUBLE) + 0.5
        y = torch.tanh(x @ wanted[2 * step // steps])
        opt.zero_grad()
        (model(x.to(dtype)) - y.to(dtype)).square().sum(-1).mean().backward()
        opt.step()


def everything(opt: Any, model: nn.Module) -> dict[str, Tensor]:
    """Weights and all states that have numbers, by name."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        kept = {f"{name} {key}": value for key, value in opt.state.get(p, {}).items()}
        found |= {key: value for key, value in kept.items() if value.numel()}
    return found


def compare(
    name: str,
    build: Callable[[], nn.Module] = mlp,
    steps: int = 100,
    groups: Callable[[nn.Module], Any] | None = None,
    count: int = 3,
    rtol: float = 1e-12,
    **given: Any,
) -> tuple[Any, nn.Module]:
    """Train two models, one of them fused; returns that."""
    plain, fused = build(), build()
    started, found = weights(plain), []
    for model, path in ((plain, False), (fused, True)):
        opt = make(name, model, groups and groups(model), fused=path, **given)
        learn(opt, model, steps, count)
        found.append(everything(opt, model))
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        torch.testing.assert_close(
            found[1][key], value, rtol=rtol, atol=rtol, msg=lambda m, key=key: f"{key}: {m}"
        )
    moved = [not torch.equal(a, b) for a, b in zip(started, weights(fused), strict=True)]
    trained = [p.requires_grad for p in fused.parameters()]
    assert moved == trained
    return opt, fused


# ------------------------------------------------------------------------------- equality
@pytest.mark.parametrize(
    "name", [*LAYERED, "everywhere", pytest.param("biases-after", marks=pytest.mark.slow)]
)
def test_equals_the_plain_path(name: str) -> None:
    """Of methods that renew units, some are renewed."""
    opt, model = compare(name)
    if opt.method.recycle is not None:
        ages = opt.state[model[2].weight]["features.age"]
        assert ages.min() < 100


@pytest.mark.parametrize("name", ["self-tuned-sgd", "continual-backprop-adam", "everywhere"])
def test_single_samples(name: str) -> None:
    compare(name, steps=20, count=1)


def frozen(*places: str) -> nn.Module:
    model = mlp()
    for place in places:
        model.get_submodule(place.partition(".")[0]).get_parameter(
            place.partition(".")[2]
        ).requires_grad_(False)
    return model


class Scaled(nn.Module):
    """A network with a parameter outside of linear layers; layers have different samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(19, 12), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.full((2, 2), 0.5))
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh().reshape(len(x), 3, 2, 2) * self.scale
        return self.last(hidden.flatten(2)).mean(1)


class Positions(nn.Module):
    """The last layer sees three times as many samples as the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(19, 12), nn.Linear(4, 3)
        self.to(DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh().reshape(len(x), 3, 4)).mean(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "no bias": lambda: mlp(bias=False),
    "a frozen layer": lambda: frozen("2.weight", "2.bias"),
    "a frozen first layer": lambda: frozen("0.weight", "0.bias"),
    "a frozen weight": lambda: frozen("2.weight"),
    "a frozen bias": lambda: frozen("0.bias", "4.bias"),
    "an only layer": lambda: mlp((19, 3)),
    "other parameters": Scaled,
    "positions": Positions,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["self-tuned-sgd", "continual-backprop", "everywhere"])
def test_models(name: str, model: str) -> None:
    compare(name, MODELS[model], 15)


@pytest.mark.parametrize("name", ["self-tuned-sgd", "redo-adam"])
def test_ascends(name: str) -> None:
    compare(name, steps=20, maximize=True)
    compare(name, Scaled, steps=20, maximize=True)


def by_role(model: Any) -> Any:
    """Each with its own step size; a head that ascends."""
    head = {"lr": 0.001, "maximize": True}
    biases = {"params": [model[0].bias, model[2].bias], "lr": 0.2}
    body = {"params": [model[0].weight, model[2].weight]}
    return [body, biases, {"params": model[4].parameters(), **head}]


@pytest.mark.parametrize("name", ["centred-sgd", "continual-backprop-adam", "everywhere"])
def test_groups_have_hyperparameters_of_their_own(name: str) -> None:
    compare(name, steps=20, groups=by_role)


# A phase over inputs that reads what the network has found in the same step.
def reach(d: Any) -> Any:
    return d**2


def all_of(energy: Any) -> Any:
    return 2 * energy


def total_of(load: Any) -> Any:
    return load / (1 + load)


def towards(x: Any, mean: Any, whole: Any) -> Any:
    return mean + 0.1 * whole * (x - mean)


def descend(w: Any, g: Any, d: Any, mean: Any, lr: Any) -> Any:
    return w - lr * (g - d * mean)


def descend_bias(w: Any, g: Any, lr: Any) -> Any:
    return w - lr * g


NETWORK_FIRST = Method(
    hyper=("lr",),
    phases=(
        Phase(reach, over="units", sums=("energy",)),
        Phase(all_of, over="layers", sums=("load",)),
        Phase(total_of, writes=("whole",), over="network"),
        Phase(towards, writes=("mean",), over="inputs"),
        Phase(descend, writes=("w",)),
        Phase(descend_bias, writes=("w",), over="biases"),
    ),
    kept={"network": ("whole",), "inputs": ("mean",)},
)


def test_inputs_read_the_network_of_their_own_sample() -> None:
    """Against a loop over samples."""
    model, twin = mlp((5, 2)), mlp((5, 2))
    x, y = torch.randn(4, 5, dtype=DOUBLE), torch.randn(4, 2, dtype=DOUBLE)
    d = 2 * (model(x) - y).detach()
    load = 2 * d.square().sum(1)
    mean = sum(0.1 * a / (1 + a) * row for a, row in zip(load, x, strict=True)) / 4
    expected = model[0].weight.detach() - 0.1 * (d.T @ x / 4 - torch.outer(d.mean(0), mean))
    for net, path in ((model, False), (twin, True)):
        opt = LayerOptimizer(net, NETWORK_FIRST, {"lr": 0.1}, fused=path)
        (net(x) - y).square().sum(1).mean().backward()
        opt.step()
        torch.testing.assert_close(net[0].weight.detach(), expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------ precision
@pytest.mark.parametrize("name", ["self-tuned-sgd", "continual-backprop-adam"])
def test_single_precision(name: str) -> None:
    compare(name, lambda: mlp(dtype=torch.float32), 30, rtol=1e-4)


def test_weights_of_16_bits() -> None:
    """They are computed in float32 and rounded to the nearest, as on the plain path."""
    compare("self-tuned-sgd", lambda: mlp(dtype=torch.bfloat16), 3, rtol=1e-2)


def test_weights_that_are_not_contiguous() -> None:
    def build() -> nn.Module:
        model = mlp()
        for layer in model[::2]:
            layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
        return model

    _, model = compare("continual-backprop", build, 20)
    assert not model[0].weight.is_contiguous()


# --------------------------------------------------------------------------------- states
@pytest.mark.parametrize("name", ["self-tuned-sgd", "continual-backprop-adam"])
def test_state_dicts_do_not_depend_on_the_path(name: str) -> None:
    opt, model = compare(name, steps=20)
    twins = [mlp(), mlp()]
    for twin, path in zip(twins, (False, True), strict=True):
        twin.load_state_dict(model.state_dict())
        other = make(name, twin, fused=path)
        other.load_state_dict(opt.state_dict())
        learn(other, twin, 20)
    assert_close(weights(twins[0]), weights(twins[1]), rtol=1e-12, atol=1e-12)


def test_copies_go_on_by_themselves() -> None:
    model = mlp()
    opt = make("self-tuned-sgd", model, fused=True)
    learn(opt, model, 3)
    twin, other = copy.deepcopy((model, opt))
    learn(opt, model, 3)
    learn(other, twin, 3)
    assert other.fused
    assert_equal(weights(model), weights(twin))


def test_a_model_may_be_cast_between_steps() -> None:
    model = mlp(dtype=torch.float32)
    opt = make("self-tuned-sgd", model, fused=True)
    learn(opt, model, 2)
    model.double()
    learn(opt, model, 2)
    assert opt.state[model[0].weight]["inputs.mean"].dtype == DOUBLE


# ------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("what", ["weight", "gradient", "input"])
@pytest.mark.parametrize("value", [float("nan"), 1e100])
def test_what_is_not_finite_changes_nothing(what: str, value: float) -> None:
    model = mlp()
    opt = make("self-tuned-sgd", model, fused=True)
    learn(opt, model, 2)
    x = torch.ones(1, SIZES[0], dtype=DOUBLE)
    if what == "input":
        x[0, -1] = value
    opt.zero_grad()
    model(x).sum().backward()
    if what != "input":
        with torch.no_grad():
            (model[4].weight if what == "weight" else model[4].weight.grad)[-1, -1] = value
    before = everything(opt, model)
    with pytest.raises(FloatingPointError, match=r"limit|not finite"):
        opt.step()
    after = everything(opt, model)
    torch.testing.assert_close(list(after.values()), list(before.values()), equal_nan=True)
    opt.nonfinite = "skip"
    opt.step()
    assert int(opt.skipped_steps) == 1
    assert_equal(
        weights(model)[:4], [before[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    )


def test_two_precisions_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4).double(), nn.Linear(4, 2))
    opt = upgd.CentredSGD(model, fused=True)
    model[1](model[0](torch.ones(1, 3, dtype=DOUBLE)).float()).sum().backward()
    with pytest.raises(ValueError, match=r"CentredSGD: .* one precision; these are torch.float32"):
        opt.step()


def test_other_devices_are_refused() -> None:
    opt, p = upgd.CentredSGD(mlp(), fused=True), nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"CentredSGD: there is no fused=True on meta: .* CPU"):
        fused_layers.refuse(opt, [Layer(p, [p])])


@pytest.mark.parametrize("what", ["samples", "state"])
def test_tensors_of_another_size_are_refused(what: str) -> None:
    """Kernels would read beyond their end. States of a frozen weight are its trained layer's."""
    model = frozen("0.weight")
    opt = make("self-tuned-sgd", model, fused=True)
    learn(opt, model, 2)
    if what == "samples":
        layer = opt.layers.all[1]
        layer._records = [(x[:, :-1], d) for x, d in layer._records]
    else:
        opt.state[model[0].weight]["inputs.mean"] = torch.ones(3, dtype=DOUBLE)
    before = everything(opt, model)
    with pytest.raises(ValueError, match=r"layer '2' was replaced or resized|'inputs.mean'"):
        opt.step()
    assert_equal(list(everything(opt, model).values()), list(before.values()))


def test_a_compiler_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "numba" else found(name)
    )
    with pytest.raises(ImportError, match=r"CentredSGD: fused=True on cpu needs numba \(pip"):
        upgd.CentredSGD(mlp(), fused=True)


def test_groups_share_the_path() -> None:
    opt = upgd.CentredSGD(mlp(), fused=True)
    with pytest.raises(ValueError, match="fused is one for all groups, True here"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "fused": False})
    with pytest.raises(TypeError, match="fused must be True or False"):
        upgd.CentredSGD(mlp(), fused=1)


# -------------------------------------------------------------------------------- mutants
MUTANTS = {
    "the rest of a row": ("for j in range(whole, inputs):", "for j in range(whole + 1, inputs):"),
    "the last row's sum": ("sum_0 += np.float64(total(", "sum_0 = np.float64(total("),
    "no sign": ("factor * load(g_in", "load(g_in"),
    "biases have no part in sums": (
        "sum_0 += np.float64(r_2)\n        if not",
        "pass\n        if not",
    ),
}


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[pytest.mark.slow] * (k % 2)) for k, m in enumerate(MUTANTS)],
)
def test_errors_in_kernels_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTANTS[mutant]
    load, written = cpu_layer.compiled, []

    def mutated(text: str, real: str) -> Any:
        assert text.count(old) == 1, text
        written.append(text)
        return load(text.replace(old, new), real)

    monkeypatch.setattr(cpu_layer, "compiled", mutated)
    with pytest.raises(AssertionError, match="Mismatched"):
        compare("anchored", steps=5, maximize=True)
    assert written
