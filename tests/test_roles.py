"""Hyperparameters of roles in specifications, grids and commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from upgd.cli.app import app
from upgd.engine.batched import why_eager
from upgd.lab.grids import change_axes, file_grids, settings, table_grids
from upgd.ledger import RunSpec
from upgd.ledger.errors import SpecError
from upgd.rl.environments import RLError
from upgd.rl.ppo import learner as agent
from upgd.study.prepare import arguments, plan, prepare
from upgd.study.search import Space

PROBLEM = "label-permuted-digits"


def spec(hyper: dict[str, Any], method: str = "sgd", **options: Any) -> RunSpec:
    return RunSpec(PROBLEM, method, hyper, 0, 10, options)


# ------------------------------------------------------------------------------------- specs
def test_runs_without_roles_keep_their_keys() -> None:
    """The JSON from which a key is made has nothing new in it."""
    assert spec({"lr": 0.1}).to_json() == (
        '{"hyper":{"lr":0.1,"weight_decay":0.0},"method":"sgdw","options":{},'
        '"problem":"label-permuted-digits","rules":3,"seed":0,"steps":10}'
    )


def test_a_copy_of_the_plain_value_is_dropped() -> None:
    plain = spec({"lr": 0.1, "weight_decay": 0.2})
    assert spec({"lr": 0.1, "weight_decay": 0.2, "head.weight_decay": 0.2}).key == plain.key
    assert spec({"lr": 0.1, "head.weight_decay": 0.0}).key == spec({"lr": 0.1}).key  # the default
    other = spec({"lr": 0.1, "weight_decay": 0.2, "head.weight_decay": 0})
    assert other.key != plain.key
    assert dict(other.hyper) == {"head.weight_decay": 0.0, "lr": 0.1, "weight_decay": 0.2}
    assert RunSpec.from_json(other.to_json()) == other


def test_names_are_of_all_layers() -> None:
    assert spec({"head.weight_decay": 0.2}).name == "sgd-head-decay"
    assert spec({"weight_decay": 0.1, "head.weight_decay": 0.2}).name == "sgdw"
    assert spec({"head.weight_decay": 0.1}).name == "sgd-head-decay"
    assert spec({"input.weight_decay": 0.1}).name == "sgdw"
    assert spec({"head.lr": 0.1}).name == "sgd"
    assert spec({"weight_decay": 0.1, "head.weight_decay": 0.2}, "upgd").name == "upgd-w"


def test_pairs_of_roles() -> None:
    given = spec({"betas": (0.5, 0.6), "head.betas": (0.5, 0.7)}, "adamw")
    assert {n: v for n, v in given.hyper.items() if "beta" in n} == {
        "beta1": 0.5, "beta2": 0.6, "head.beta2": 0.7
    }  # fmt: skip
    found = arguments(given)
    assert (found["betas"], found["head.betas"]) == ((0.5, 0.6), (0.5, 0.7))
    with pytest.raises(SpecError, match=r"head\.betas besides head\.beta1 or head\.beta2"):
        spec({"head.betas": (0.5, 0.6), "head.beta1": 0.5}, "adamw")


WRONG = {
    "a role": (
        {"haed.lr": 0.1},
        r"unknown role 'haed' in 'haed.lr'; roles are input, hidden, head",
    ),
    "a name": ({"head.momentum": 0.1}, r"has no hyperparameter momentum; it has lr, weight_decay"),
    "a range": ({"head.weight_decay": -1.0}, r"weight_decay must be a finite number >= 0, got -1"),
    "a layer": ({"hidden.lr": 0.1}, r"its network has no hidden layer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    hyper, message = WRONG[case]
    with pytest.raises((SpecError, ValueError), match=message):
        prepare(spec(hyper, hidden="8" if case == "a layer" else "8-8"))


def test_features_with_decays_of_their_own_are_not_stacked() -> None:
    problem, setting = plan(spec({"head.beta_utility": 0.5}, "feature-upgd"))
    assert "one decay of utility" in why_eager(problem, setting, "cpu")
    problem, setting = plan(spec({"head.weight_decay": 0.5}, "feature-upgd"))
    assert not why_eager(problem, setting, "cpu")


def test_agents_have_no_roles() -> None:
    with pytest.raises(RLError, match=r"share one set of hyperparameters; .* has head\."):
        agent("adam", 0, **{"head.lr": 0.1})


# ------------------------------------------------------------------------------------- grids
def test_grids_have_roles(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text('[all]\nlr = [0.1, 0.01]\nhead.lr = 0.5\n[upgd]\n"hidden.sigma" = [0, 1]\n')
    found = file_grids(path, ["sgd", "upgd"])
    assert found["sgd"] == {"lr": (0.1, 0.01), "weight_decay": (0.0,), "head.lr": (0.5,)}
    assert found["upgd"]["hidden.sigma"] == (0.0, 1.0)
    assert table_grids({"head.lr": [1, 2]}, ["sgd"])["sgd"]["head.lr"] == (1.0, 2.0)
    assert settings(["sgd"], {"head.weight_decay": 0.1})["sgd"]["head.weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tail.lr": [1]}, "unknown role 'tail'"),
        ({"head.kappa": [1]}, r"none of sgd has a hyperparameter head\.kappa"),
        ({"head.lr": [-1]}, r"head\.lr must be a finite number >= 0, got -1"),
        ({"adamw": [1]}, "none of sgd has a hyperparameter adamw"),
    ],
)
def test_wrong_grids_of_roles(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        change_axes({"sgd": {"lr": (0.1,)}}, axes)


def test_a_search_knows_what_a_copy_stands_for() -> None:
    space = Space.around({"lr": (0.1,), "weight_decay": (0.0,), "head.weight_decay": (0.0, 0.1)})
    assert space.places((("lr", 0.1), ("weight_decay", 0.0))) is not None
    assert space.is_on_grid((("lr", 0.1), ("weight_decay", 0.0)))
    assert not space.is_on_grid((("head.weight_decay", 0.2), ("lr", 0.1), ("weight_decay", 0.0)))


def test_commands_have_roles(tmp_path: Path) -> None:
    common = ["--study", str(tmp_path), "--steps", "500", "--window", "250", "--seeds", "1"]
    common += ["--task-length", "250", "--hidden", "8", "--quiet"]
    given = ["--set", "head.weight_decay=0.1,0.2", "--set", "lr=0.1"]
    done = CliRunner().invoke(app, ["sweep", PROBLEM, "sgd", *common, *given])
    assert done.exit_code == 0, done.output
    best = CliRunner().invoke(app, ["best", str(tmp_path), "--json"])
    assert "head.weight_decay" in best.output
    wrong = CliRunner().invoke(app, ["run", PROBLEM, "sgd", *common, "--set", "haed.lr=1"])
    assert wrong.exit_code == 2
    assert "unknown role 'haed'" in wrong.output
