"""The registry knows every method, by one vocabulary."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

import upgd
from tests.cases import every_method, network
from upgd.optim.registry import METHODS, Row, get
from upgd.rules.vocabulary import HYPERPARAMETERS, Place, split_roles


def test_the_papers_methods_are_there() -> None:
    eight = [f"{n}upgd{o}{s}" for n in ("", "n-") for o in ("", "-2nd") for s in ("", "-local")]
    others = ["ada-upgd", "sgdw", "pgd", "shrink-and-perturb", "adamw"]
    streaming = ["s-ewc", "s-mas", "s-si", "s-rwalk"]
    wanted = {*eight, *(f"feature-{name}" for name in eight), *others, *streaming}
    assert wanted <= METHODS.keys()


def test_names_and_aliases_are_unique() -> None:
    names = [n for row in METHODS.values() for n in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


def test_adams_steps_are_small_by_default() -> None:
    """They do not shrink with the gradient: 0.01 is right for SGD and too much for them."""
    found = {row.name: row.defaults["lr"] for row in METHODS.values() if "betas" in row.hyper}
    assert {"adamw", "continual-backprop-adam", "redo-adam"} <= found.keys()
    assert max(found.values()) <= 1e-3


@pytest.mark.parametrize(
    ("alias", "name", "decay"),
    [
        ("UPGD-W", "upgd", 0.001),
        ("n-upgd-w", "n-upgd", 0.001),
        ("sgd", "sgdw", 0.0),
        ("adam", "adamw", 0.0),
        ("s&p", "shrink-and-perturb", 0.001),
    ],
)
def test_aliases(alias: str, name: str, decay: float) -> None:
    row, defaults = get(alias)
    assert row.name == name
    assert defaults["weight_decay"] == decay


@every_method
def test_one_vocabulary(row: Row) -> None:
    """Constructor arguments, registry and rules use the same names."""
    assert set(row.method.hyper) <= HYPERPARAMETERS.keys()
    arguments = inspect.signature(row.optimizer.__init__).parameters
    assert set(row.method.hyper) <= arguments.keys()
    assert row.defaults.keys() == row.hyper.keys()
    for name, value in row.defaults.items():
        HYPERPARAMETERS[name].check(row.name, value)


@every_method
def test_rules_read_what_exists(row: Row) -> None:
    """Every argument of a rule is a state, a hyperparameter or something the base provides."""
    method = row.method
    hyper = set(method.hyper) - {"betas"} | (
        {"beta1", "beta2"} if "betas" in method.hyper else set()
    )
    corrections = {f"c_{trace}" for trace in method.decays}
    provided = {"w", "g", "h", "f", "s", "noise", "eta", "bound", "due"}
    states = set(method.states)
    if "layers" in row.needs:
        provided = {"w", "g", "noise", "x", "d", "w_in", "w_out", "t", "head", "first", "bound"}
        states.update(*(method.states_of(place) for place in get_args(Place)))
    for phase in method.phases:
        assert set(phase.reads) <= provided | states | hyper | corrections
        assert set(phase.writes) <= {"w", *states}
        assert (phase.fn.__doc__ or "").strip()
    assert set(method.decays) <= set(method.states)


@every_method
def test_documented_and_public(row: Row) -> None:
    doc = row.optimizer.__doc__ or ""
    assert ".. math::" in doc
    if row.name != "adamw":  # users keep torch.optim.AdamW
        assert getattr(upgd, row.optimizer.__name__) is row.optimizer
        assert ">>>" in doc


@pytest.mark.parametrize("name", [n for row in METHODS.values() for n in (row.name, *row.aliases)])
def test_create_makes_what_the_name_says(name: str) -> None:
    row, defaults = get(name)
    model = network()
    plain, own = split_roles(defaults)
    if own:
        with pytest.raises(ValueError, match="pass the model itself"):
            upgd.create(name, model.parameters())
    for given in (model,) if own else (model, model.named_parameters()):
        opt = upgd.create(name.upper(), given, lr=0.5)
        assert type(opt) is row.optimizer
        assert opt.method == row.method
        first, last = opt.param_groups[0], opt.param_groups[-1]
        assert {k: first[k] for k in plain} == {**plain, "lr": 0.5}
        assert {k: last[k] for k in plain} == {**plain, **own.get("head", {}), "lr": 0.5}
    with pytest.raises(KeyError, match=r"unknown method 'ada-upgdd'; did you mean 'ada-upgd'"):
        upgd.create("ada-upgdd", model)


@pytest.mark.parametrize("name", ["centred-sgd", "feature-upgd"])
def test_create_leaves_no_hooks_behind(name: str) -> None:
    model = network()

    def hooks() -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    with pytest.raises(ValueError, match="lr must be"):
        upgd.create(name, model, lr=-1.0)
    assert hooks() == 0
    seen = upgd.Layers(model) if name == "centred-sgd" else upgd.Features(model)
    once = hooks()
    upgd.create(name, model, **{"layers" if name == "centred-sgd" else "features": seen})
    assert once == hooks() > 0
