"""Bad input: a clear error that names the argument and its value, and nothing half done."""

from __future__ import annotations

import copy
import math
import typing
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import every_method, network, weights
from upgd import UPGD, AdaUPGD, Features, FeatureUPGD
from upgd.optim.registry import METHODS, Row, get

BAD: dict[str, list[Any]] = {
    "lr": [-0.1, math.nan, math.inf, "fast", None, True],
    "weight_decay": [-1e-9, math.nan, None],
    "sigma": [-0.5, math.inf, [0.1]],
    "beta_utility": [-0.1, 1.0, 1.5, math.nan, "0.9"],
    "output_gate": [-0.5, 2.5, math.nan, "open"],
    "momentum": [-0.1, 1.0, math.nan],
    "kappa": [-1.0, math.inf],
    "beta_importance": [1.0, -0.001],
    "beta_weight": [1.0, 2],
    "betas": [(0.9,), (0.9, 1.0), (-0.1, 0.9), 0.9, (0.9, 0.9, 0.9)],
    "eps": [-1e-8, math.nan],
    "beta_mean": [1.0, -0.1],
    "bias_share": [-1.0, "large"],
    "whitening": [1.0, -0.1, math.nan],
    "beta_slow": [1.0, math.nan],
    "pace": [-1e-9, None],
    "pace_target": [math.inf, -1.0],
    "replacement_rate": [1.5, -0.1],
    "maturity": [-1, math.inf],
    "threshold": [-0.1, math.nan],
    "meta_lr": [-0.1, math.inf],
    "clip": [-1.0, math.nan],
    "period": [0, 0.5, math.inf],
    "sharpness": [0.0, -1.0, math.inf],
    "protecting": [-0.1, 1.5],
    "undoing": [-0.1, 1.5],
}


@every_method
def test_hyperparameters_out_of_range(row: Row) -> None:
    for name in row.method.hyper:
        for value in BAD[name]:
            with pytest.raises((ValueError, TypeError)) as caught:
                row.make(network(), **{name: value})
            assert name in str(caught.value)
            assert repr(value) in str(caught.value)
            assert row.optimizer.__name__ in str(caught.value)


@every_method
def test_groups_are_checked_too(row: Row) -> None:
    model = network()
    opt = row.make(model)
    for name in row.method.hyper:
        extra = nn.Parameter(torch.zeros(2))
        with pytest.raises((ValueError, TypeError), match=name):
            opt.add_param_group({"params": [extra], name: BAD[name][0]})
        assert len(opt.param_groups) == 1  # nothing half added


@every_method
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"nonfinite": "ignore"}, ValueError, "nonfinite must be 'raise' or 'skip', got 'ignore'"),
        ({"nonfinite": "raise", "capturable": True}, ValueError, "capturable"),
        ({"seed": -1}, ValueError, "seed must be in"),
        ({"seed": 2**63}, ValueError, "seed must be in"),
        ({"seed": 0.5}, TypeError, "seed must be an int, got 0.5"),
        ({"noise": 3}, TypeError, "noise must have a method draw .*got 3"),
    ],
)
def test_common_arguments(
    row: Row, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        row.make(network(), **arguments)


@every_method
def test_unknown_arguments(row: Row) -> None:
    words = f"{row.optimizer.__name__}: unknown argument 'nesterov'; there are .*lr.*nonfinite"
    with pytest.raises(TypeError, match=words):
        row.make(network(), nesterov=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("order", 2), ("scaling", "local"), ("curvature", "ggn"), ("nonfinite", "skip"), ("seed", 4)],
)
def test_what_groups_share_is_no_groups_own(name: str, value: Any) -> None:
    first, second = network().parameters(), network().parameters()
    opt = UPGD(first, seed=3)
    words = f"UPGD: {name} is one for all groups, .* here; a group has {value!r}"
    with pytest.raises(ValueError, match=words):
        opt.add_param_group({"params": second, name: value})
    assert len(opt.param_groups) == 1
    own = opt.param_groups[0].get(name, getattr(opt, name, None))
    opt.add_param_group({"params": second, name: own})  # as those of ZeRO have it


@pytest.mark.parametrize("cls", [UPGD, AdaUPGD])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scaling": "both"}, "scaling must be 'global' or 'local', got 'both'"),
        ({"order": 3}, "order must be 1 or 2, got 3"),
        ({"protect": "yes"}, "protect must be True or False, got 'yes'"),
    ],
)
def test_utility_options(cls: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        cls(network().parameters(), **arguments)


def test_complex_parameters() -> None:
    with pytest.raises(TypeError, match=r"parameter 0 of group 0.*real floating-point"):
        UPGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])


@every_method
def test_sparse_gradients(row: Row) -> None:
    if row.needs & {"gates", "layers"}:
        pytest.skip("an embedding is no layer with units; the check is shared")
    table = nn.Embedding(4, 3, sparse=True)
    opt = row.make(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse"):
        opt.step()


def test_empty_parameter_list() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        UPGD([])


def test_parameters_without_elements_are_passed_over() -> None:
    empty, full = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(3))
    opt = UPGD([empty, full])
    empty.grad, full.grad = torch.zeros(0, 3), torch.ones(3)
    opt.step()
    assert not torch.equal(full.detach(), torch.ones(3))


def test_no_gradients_at_all_is_no_step() -> None:
    model = network()
    opt = UPGD(model.parameters())
    assert opt.step() is None
    assert not opt.state
    assert int(opt.skipped_steps) == 0


@pytest.mark.parametrize("name", [n for n, r in METHODS.items() if "curvature" in r.needs])
def test_second_order_without_curvature(name: str) -> None:
    row = METHODS[name]
    model = network()
    opt = row.make(model)
    model(torch.ones(2, 6)).sum().backward()
    before = weights(model)
    with pytest.raises(ValueError, match=r"order=2 needs curvature"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_curvature_is_good_for_one_step() -> None:
    model = nn.Linear(2, 1)
    opt = UPGD(model.named_parameters(), order=2)

    def provide() -> None:
        for p in model.parameters():
            p.grad, p.curvature = torch.ones_like(p), torch.ones_like(p)

    provide()
    opt.step()
    with pytest.raises(ValueError, match="parameter 'weight'"):
        opt.step()
    provide()
    opt.zero_grad()
    assert not hasattr(model.weight, "curvature")
    provide()
    model.weight.curvature = torch.ones(3)
    with pytest.raises(ValueError, match=r"curvature of parameter 'weight'.*shape \(3,\)"):
        opt.step()


def test_nonfinite_curvature_is_caught() -> None:
    model = nn.Linear(2, 1)
    opt = UPGD(model.named_parameters(), order=2)
    for p in model.parameters():
        p.grad, p.curvature = torch.ones_like(p), torch.full_like(p, torch.nan)
    with pytest.raises(FloatingPointError, match="curvature of parameter 'weight'"):
        opt.step()


def test_nonfinite_gates_are_caught() -> None:
    model = network()
    opt = FeatureUPGD(model.parameters(), features=Features(model))
    model(torch.ones(2, 6)).sum().backward()
    opt.features.layers[1].first[0] = torch.inf
    with pytest.raises(FloatingPointError, match="layer '2'"):
        opt.step()


def test_features_must_be_features() -> None:
    with pytest.raises(TypeError, match=r"features must be upgd\.Features"):
        FeatureUPGD(network().parameters(), features=network())  # type: ignore[arg-type]


def test_features_must_be_those_of_the_parameters() -> None:
    model = network()
    for other in (network(), copy.deepcopy(model)):
        with pytest.raises(ValueError, match="no parameter leads into a feature"):
            FeatureUPGD(model.parameters(), features=Features(other))


def test_looking_at_a_stranger() -> None:
    opt = UPGD(network().parameters())
    with pytest.raises(KeyError, match="not a parameter of this optimizer"):
        opt.scaled_utility(torch.zeros(3))


def test_tensor_lr_must_be_a_scalar() -> None:
    with pytest.raises(ValueError, match="1-element"):
        UPGD(network().parameters(), lr=torch.ones(2))


def test_unknown_method() -> None:
    with pytest.raises(KeyError, match="did you mean 'upgd-w'"):
        get("upgdw")


@pytest.mark.parametrize("name", ["ada-upgd", "s-ewc"])
def test_another_optimizers_state_is_refused(name: str) -> None:
    ours = METHODS[name].make(network())
    before = repr(ours)
    for other in (torch.optim.Adam(network().parameters()), METHODS["upgd"].make(network())):
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        other.step()
        with pytest.raises(ValueError, match="another optimizer's"):
            ours.load_state_dict(other.state_dict())
    assert repr(ours) == before
    ours.load_state_dict(ours.state_dict())  # a refusal leaves nothing behind


@pytest.mark.parametrize(
    ("saved", "loads"),
    [
        ("ada-upgd", "upgd"),
        ("upgd", "pgd"),
        ("upgd", "feature-upgd"),
        ("feature-upgd", "upgd"),
        ("s-rwalk", "s-ewc"),
    ],
)
def test_a_state_that_holds_more_is_refused_too(saved: str, loads: str) -> None:
    model = network()
    other, ours = METHODS[saved].make(model), METHODS[loads].make(network())
    model(torch.ones(1, 6)).sum().backward()
    other.step()
    with pytest.raises(ValueError, match=r"another (model's or )?optimizer's"):
        ours.load_state_dict(other.state_dict())
    assert not ours.state


def test_another_models_state_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    opt = UPGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    with pytest.raises(ValueError, match=r"utility of shape \(2, 2\) .* where \(3, 2\) is kept"):
        UPGD(nn.Linear(2, 3, bias=False).parameters()).load_state_dict(opt.state_dict())


def test_loading_hooks_are_honoured() -> None:
    model = nn.Linear(2, 1)
    opt = UPGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    seen: list[float] = []

    def exchange(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        states = {k: {**s, "utility": s["utility"] * 0 + 42} for k, s in given["state"].items()}
        return {**given, "state": states}

    opt.register_load_state_dict_pre_hook(exchange)
    opt.register_load_state_dict_post_hook(
        lambda o: seen.append(float(o.state[model.bias]["utility"]))
    )
    opt.load_state_dict(opt.state_dict())
    assert seen == [42.0]
    assert float(opt.state[model.bias]["utility"]) == 42.0


def test_subclasses_keep_their_attributes() -> None:
    class Sharded(UPGD):
        def __init__(self, params: Any) -> None:
            self._rank = 3
            super().__init__(params)

    assert copy.deepcopy(Sharded(network().parameters()))._rank == 3


def test_numpy_numbers_are_numbers() -> None:
    UPGD(network().parameters(), lr=np.float32(0.1), sigma=np.float64(0.0))


@pytest.mark.parametrize("name", ["maximize", "foreach", "capturable"])
def test_switches_are_booleans(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        UPGD(network().parameters(), **{name: "no"})


def test_curvature_is_consumed_only_when_all_is_there() -> None:
    model = nn.Linear(2, 1)
    opt = UPGD(model.named_parameters(), order=2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.weight.curvature = torch.ones(1, 2)
    with pytest.raises(ValueError, match="parameter 'bias'"):
        opt.step()
    model.bias.curvature = 1.0
    with pytest.raises(ValueError, match="type float"):
        opt.step()
    model.bias.curvature = torch.ones(1)
    opt.step()


def test_first_order_methods_leave_curvature_alone() -> None:
    model = nn.Linear(2, 1)
    opt = UPGD(model.parameters())
    model.weight.curvature = torch.full((1, 2), torch.nan)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    opt.zero_grad()
    assert hasattr(model.weight, "curvature")


def test_constructor_hints_can_be_resolved() -> None:
    for row in METHODS.values():
        assert "lr" in typing.get_type_hints(row.optimizer.__init__)
