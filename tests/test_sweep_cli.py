"""``upgd sweep`` and ``upgd best``: what is run, chosen, said and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from tests.test_selection import fill
from upgd.cli import app
from upgd.lab import grids
from upgd.lab.study import Study
from upgd.ledger import Ledger, Result, RunSpec, Series
from upgd.paper.grids import grid
from upgd.report.sensitivity import sensitivity, varied
from upgd.study import forecast, learners, run
from upgd.study.execution import Tally
from upgd.study.options import Options
from upgd.study.selection import best_sets

PROBLEM = "label-permuted-digits"
SMALL = ("--hidden", "8", "--task-length", "40", "--steps", "400", "--seeds", "2")
FEW = ("--set", "lr=0.1,0.01,0.001", "--set", "weight_decay=0")


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs are not run: their accuracy is a function of step size and seed. Gives their steps."""
    seen: list[int] = []

    def do(self: Study, ledger: Ledger, what: Any) -> Tally:
        specs = list(what)
        ledger.add(specs)
        keys = [spec.key for spec in specs]
        for claim in ledger.claim("me", 60, limit=10**6, where={"key": keys}):
            lr = claim.spec.hyper["lr"]
            value = 0.5 + 0.1 * np.log10(lr) + claim.spec.seed / 1000
            seen.append(claim.spec.steps)
            series = {"accuracy": Series([value], claim.spec.steps)}
            summary = {"accuracy": float(value)}
            ledger.finish(claim, Result("eager", series=series, summary=summary))
        return Tally()

    monkeypatch.setattr(Study, "_do", do)
    return seen


# --------------------------------------------------------------------------------- grids
def test_grids_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(
        "[all]\nlr = [0.1, 0.01, 0.1]\nsigma = [1, 2]\n[UPGD]\nlr = 0.5\n"
        "[adamw]\nbeta1 = [0, 0.9]  # of another command\n"
    )
    found = grids.file_grids(path, ["upgd", "sgd"])
    assert found["upgd"]["lr"] == (0.5,)
    assert found["upgd"]["sigma"] == (1.0, 2.0)
    assert found["upgd"]["weight_decay"] == (0.0,)  # the default
    assert found["sgd"] == {"lr": (0.1, 0.01), "weight_decay": (0.0,)}
    with pytest.raises(ValueError, match=r"\[adamw\] is not for adam, .* or ask for adamw"):
        grids.file_grids(path, ["upgd", "adam"])
    changed = grids.change_axes(found, {"lr": [3, 2], "sigma": 7})
    assert changed["sgd"]["lr"] == changed["upgd"]["lr"] == (3.0, 2.0)
    assert changed["upgd"]["sigma"] == (7.0,)


@pytest.mark.parametrize("order", [1, -1])
def test_a_table_is_for_the_method_of_its_name(tmp_path: Path, order: int) -> None:
    """Whatever the order of tables, [upgd] changes nothing of UPGD-W, which is UPGD with decay."""
    tables = ["[upgd]\nlr = 0.5\nsigma = 0.3\nweight_decay = 0\n", "[upgd-w]\nlr = [0.1, 0.2]\n"]
    path = tmp_path / "grid.toml"
    path.write_text("".join(tables[::order]))
    found = grids.file_grids(path, ["upgd-w", "upgd"])
    assert found["upgd-w"]["lr"] == (0.1, 0.2)
    assert found["upgd-w"]["sigma"] != (0.3,)
    assert found["upgd-w"]["weight_decay"] == (0.001,)
    assert (found["upgd"]["lr"], found["upgd"]["weight_decay"]) == ((0.5,), (0.0,))
    assert grids.file_grids(path, ["upgd-w"])["upgd-w"] == found["upgd-w"]


def test_names_that_change_no_default_share_a_table(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("[AdaUPGD]\nlr = 0.5\n")
    assert grids.file_grids(path, ["ada-upgd"])["ada-upgd"]["lr"] == (0.5,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr = [0.1]", "'lr' is in no table"),
        ("[updg]\nlr = [0.1]", "unknown method 'updg'; did you mean 'upgd'"),
        ("[upgd]\nkappa = [0.1]", "upgd has no hyperparameter kappa; it has lr"),
        ("[all]\nkappa = [0.1]", "none of upgd has a hyperparameter kappa"),
        ("[upgd]\nlr = []", "lr has no value"),
        ("[upgd]\nlr = ['fast']", "lr takes finite numbers, got 'fast'"),
        ("[upgd]\nlr = [true]", "lr takes finite numbers, got True"),
        ("[upgd]\nlr = [nan]", "lr takes finite numbers, got nan"),
        ("[upgd]\nlr = [[0.1]]", "lr takes finite numbers, got [0.1]"),
        ("[upgd]\nlr = [-1]", "lr must be a finite number >= 0, got -1"),
        ("[upgd]\nbeta_utility = [1.0]", "beta_utility must be in [0, 1), got 1"),
        ("[upgd", "is not TOML"),
    ],
)
def test_mistakes_in_a_grid_file_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    result = call("sweep", PROBLEM, "upgd", "--grid", path, "--study", tmp_path / "s")
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "sigma=0.1,fast"), "--set takes name=number,number"),
        (("--set", "sigma"), "--set takes name=number,number"),
        (("--set", "sigma="), "--set takes name=number,number"),
        (("--set", "kappa=1"), "none of upgd has a hyperparameter kappa"),
        (("--set", "lr=-1,1"), "lr must be a finite number"),
        (("--best",), "prints no best set for upgd"),
        (("--best", "--paper"), "choose one of"),
        (("--halving", "3", "--search", "3"), "choose one of"),
        (("--halving", "1"), "halving"),
        (("--search", "0"), "search"),
        (("--grid", "nowhere.toml"), "nowhere.toml"),
        (("--steps", "10"), "less than one window"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: Any, said: str) -> None:
    result = call("sweep", PROBLEM, "upgd", "--study", tmp_path / "s", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "s").exists()


# -------------------------------------------------------------------------------- sweeps
def test_a_sweep_is_the_papers_grid(tmp_path: Path, by_hand: list[int]) -> None:
    done = call("sweep", PROBLEM, "sgdw", "pgd", *SMALL, "--study", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    facts = {row["method"]: row for row in json.loads(done.stdout)["best"]}
    assert [facts[m]["complete"] for m in ("sgdw", "pgd")] == [20, 16]
    assert facts["pgd"]["best"]["hyper"]["lr"] == 0.1
    with Ledger.open(tmp_path) as ledger:
        for method in ("sgdw", "pgd"):
            tried = [dict(run.spec.hyper) for run in ledger.runs(method=method)]
            for name, values in grid(PROBLEM, method).items():
                assert {hyper[name] for hyper in tried} == set(values)
    by_hand.clear()
    assert call("sweep", PROBLEM, "sgdw", "pgd", *SMALL, "--study", tmp_path).exit_code == 0
    assert by_hand == []


def test_best_sets_share_runs_with_upgd_run(tmp_path: Path, by_hand: list[int]) -> None:
    toy = ("toy-changing-sign", "upgd", "--best", "--steps", "4000", "--seeds", "1")
    assert call("sweep", *toy, "--study", tmp_path).exit_code == 0
    assert "0 of 1 runs" in call("run", *toy, "--study", tmp_path, "--dry-run").output
    facts = json.loads(call("best", tmp_path, "--json").stdout)["best"][0]
    assert facts["paper"]["here"] == facts["best"]
    assert facts["paper"]["set"]["sigma"] == 0.1


def test_a_sweep_of_two_names_for_one_row(tmp_path: Path, by_hand: list[int]) -> None:
    """sgd has λ = 0 and sgdw has not: each is ranked by its own sets."""
    file = tmp_path / "grid.toml"
    file.write_text("[all]\nlr = [0.1, 0.01]\n")
    arguments = ("sweep", PROBLEM, "sgd", "sgdw", *SMALL, "--grid", file, "--study", tmp_path / "s")
    done = call(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["best"]
    assert [(row["method"], row["complete"]) for row in found] == [("sgd", 2), ("sgdw", 2)]
    assert [row["best"]["hyper"] for row in found] == [
        {"lr": 0.1, "weight_decay": 0.0},
        {"lr": 0.1, "weight_decay": 0.001},
    ]
    for name, complete in {"SGD": 2, "sgdw": 4}.items():
        best = json.loads(call("best", tmp_path / "s", "--method", name, "--json").stdout)["best"]
        assert [(row["method"], row["complete"]) for row in best] == [(name.lower(), complete)]
    halved = json.loads(call(*arguments, "--halving", "2", "--dry-run", "--json").stdout)
    seeds = len(found[0]["seeds"])
    assert halved["rungs"] == {"200": {"sgd": 2, "sgdw": 2}, "400": {"sgd": 1, "sgdw": 1}}
    assert (halved["runs"], halved["to_do"]) == (6 * seeds, 4 * seeds)  # the full ones are done


def test_halving_tells_what_it_drops_and_goes_on(tmp_path: Path, by_hand: list[int]) -> None:
    arguments = ("sweep", PROBLEM, "sgdw", *SMALL, "--set", "weight_decay=0", "--halving", "2")
    done = call(*arguments, "--study", tmp_path)
    assert done.exit_code == 0, done.output
    assert by_hand == [80] * 8 + [200] * 4 + [400] * 2
    assert "rung 1 of 3: sgdw keeps 2 sets, down to 0.3005, drops 2" in done.output
    assert "dropped lr=0.0001: 0.1005" in done.output
    by_hand.clear()
    again = call(*arguments, "--study", tmp_path)
    assert by_hand == []
    assert "rung 2 of 3: sgdw keeps 1 set" in again.output
    quiet = call(*arguments, "--study", tmp_path, "--quiet")
    assert quiet.output == ""


def test_search_stays_within_the_grid(tmp_path: Path, by_hand: list[int]) -> None:
    pytest.importorskip("optuna")
    arguments = ("sweep", PROBLEM, "sgdw", *SMALL, *FEW, "--search", "6", "--study", tmp_path)
    assert call(*arguments).exit_code == 0
    with Ledger.open(tmp_path) as ledger:
        rates = {run.spec.hyper["lr"] for run in ledger.runs()}
    assert len(rates) == 6
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    assert by_hand == [400] * 12
    assert call(*arguments).exit_code == 0
    assert by_hand == [400] * 12


def test_runs_of_a_rung_are_the_beginning_of_longer_ones(tmp_path: Path) -> None:
    arguments = ("sweep", PROBLEM, "upgd", *SMALL, "--set", "lr=0.1,0.01", "--set", "sigma=0.01")
    arguments = (*arguments, "--set", "beta_utility=0.9", "--set", "weight_decay=0")
    done = call(*arguments, "--halving", "2", "--study", tmp_path)
    assert done.exit_code == 0, done.output
    with Ledger.open(tmp_path) as ledger:
        runs = list(ledger.runs())
        assert sorted(run.spec.steps for run in runs) == [200] * 4 + [400] * 2
        for run in runs[4:]:
            (short,) = (
                r
                for r in runs[:4]
                if (r.spec.hyper, r.spec.seed) == (run.spec.hyper, run.spec.seed)
            )
            longer, shorter = (ledger.series(r.key, "accuracy") for r in (run, short))
            np.testing.assert_array_equal(longer[: len(shorter)], shorter)


def test_an_engine_that_cannot_is_told(
    tmp_path: Path, by_hand: list[int], monkeypatch: Any
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(run, "run_pending", lambda *given, **more: Tally())
    result = call("sweep", PROBLEM, "sgd", *SMALL, *FEW, "--halving", "2", "--study", tmp_path)
    assert result.exit_code == 2
    assert "some runs are left pending" in result.output


# ------------------------------------------------------------------------------- outlook
def test_dry_run_counts(tmp_path: Path, by_hand: list[int], monkeypatch: Any) -> None:
    monkeypatch.setattr(learners, "SECONDS", 0.01)
    arguments = ("sweep", PROBLEM, "sgdw", *SMALL, *FEW, "--study", tmp_path / "s")
    facts = json.loads(call(*arguments, "--dry-run", "--json").stdout)
    assert (facts["sets"], facts["runs"], facts["to_do"]) == ({"sgdw": 3}, 6, 6)
    assert facts["learner_steps"] == 6 * 400
    assert facts["seconds"] == pytest.approx(2400 / facts["steps_per_second"])
    assert "timed now" in facts["pace"]
    assert not (tmp_path / "s").exists()
    rungs = json.loads(call(*arguments, "--halving", "3", "--dry-run", "--json").stdout)
    assert rungs["rungs"] == {"120": {"sgdw": 3}, "400": {"sgdw": 1}}
    assert rungs["learner_steps"] == 6 * 120 + 2 * 400
    said = call(*arguments, "--dry-run").output
    assert "6 of 6 runs to do" in said
    assert "memory:" in said
    assert call(*arguments).exit_code == 0
    assert "0 of 6 runs to do" in call(*arguments, "--dry-run").output


def test_paces_in_the_ledger_are_used(tmp_path: Path) -> None:
    specs = [RunSpec(PROBLEM, m, {"lr": 0.1}, s, 1000) for m in ("sgd", "pgd") for s in range(6)]
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs)
        for claim in ledger.claim("me", 60, limit=8):
            slow = claim.spec.method == "pgd"
            wall, host = (8.0 if slow else 2.0), {"runs_in_stack": 4}
            ledger.finish(claim, Result("batched-dense", wall=wall, host=host))
        left = [run.spec for run in ledger.runs() if run.state == "pending"]
        pace = forecast.pace(left, ledger.runs(), Options())
        assert pace.rate == pytest.approx(1000 * 4 / 8.0)
        assert pace.source == "the pace of 2 runs of this study"
        # As many of each: 2000 and 500 steps per second make 800 together.
        assert forecast.pace(specs, ledger.runs(), Options()).rate == pytest.approx(800)


def test_disk_is_what_a_ledger_takes(tmp_path: Path) -> None:
    spec = RunSpec(PROBLEM, "upgd", {"lr": 0.1}, 0, 10**6)
    few, many = (forecast.ledger_bytes(spec, windows, 3) for windows in (10, 2010))
    assert many - few == pytest.approx(2000 * 3 * 4, rel=0.2)


# ----------------------------------------------------------------------------------- best
def test_best_shows_the_papers_set_beside(tmp_path: Path) -> None:
    rows = {("sgd", lr, seed): 1 / lr + seed for lr in (0.1, 0.02) for seed in (0, 1)}
    rows |= {("sgd", 1.0, 0): 0.1}
    fill(tmp_path, rows, problem="toy-changing-sign", metric="loss").close()
    shown = call("best", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "2 of 3" in shown.output
    assert "1 set without all seeds" in shown.output
    assert "not run" in shown.output  # the printed set has another step size
    facts = json.loads(call("best", tmp_path, "--json").stdout)["best"][0]
    assert facts["best"]["mean"] == pytest.approx(10.5)
    assert (facts["complete"], facts["incomplete"]) == (2, 1)
    fewer = json.loads(call("best", tmp_path, "--seeds", "1", "--json").stdout)["best"][0]
    assert fewer["best"]["hyper"]["lr"] == 1.0
    wrong = call("best", tmp_path, "--method", "adam")
    assert wrong.exit_code == 2
    assert "there are toy-changing-sign sgd" in wrong.output


def test_sensitivity_is_the_best_over_the_rest(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        for lr, sigma in ((0.1, 1.0), (0.1, 2.0), (0.2, 1.0), (0.2, 2.0), (0.3, 1.0)):
            spec = RunSpec(PROBLEM, "upgd", {"lr": lr, "sigma": sigma, "fixed": 1.0}, 0, 40)
            ledger.add([spec])
            [claim] = ledger.claim("me", 60)
            if lr == 0.3:
                ledger.finish(claim, Result("eager", diverged_at=3))
            else:
                ledger.finish(claim, Result("eager", summary={"accuracy": lr * sigma}))
        (ranking,) = best_sets(ledger)
    assert [(p.value, p.best.estimate) for p in sensitivity(ranking, "lr")] == [
        (0.1, pytest.approx(0.2)),
        (0.2, pytest.approx(0.4)),
    ]
    assert varied([ranking]) == ["lr", "sigma"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_sensitivity_is_drawn(tmp_path: Path, suffix: str) -> None:
    rows = {(m, lr / 10, s): lr / 30 + s / 100 for m in ("upgd", "a$b") for lr in range(1, 12)
            for s in (0, 1)}  # fmt: skip
    fill(tmp_path, rows).close()
    path = tmp_path / f"figure.{suffix}"
    said = call("best", tmp_path, "--plot", path)
    assert said.exit_code == 0, said.output
    assert path.stat().st_size > 5000
    fill(tmp_path / "one", {("upgd", 0.1, 0): 0.5}).close()
    nothing = call("best", tmp_path / "one", "--plot", path)
    assert nothing.exit_code == 2
    assert "nothing to draw" in nothing.output
