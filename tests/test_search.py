"""From a search to a figure: stages, the file of sets, arms, and the whole way at a small scale."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from tests import searched
from upgd.cli import app
from upgd.ledger import Ledger, RunSpec
from upgd.ledger.records import Result, Series
from upgd.paper import found as sets_found
from upgd.paper.experiments import EXPERIMENTS, declare
from upgd.paper.figures import FIGURES
from upgd.paper.found import Found, Tried
from upgd.paper.results import collect
from upgd.paper.searches import SEARCHES, Search, Stage, course, outcome, upcoming
from upgd.paper.sets import BEST, MAIN, METHODS, TOYS, Set, best, from_paper, to_paper
from upgd.paper.tables import found_table, learner_steps, search_table
from upgd.streams import PROBLEMS

TOY = "toy-changing-sign"
Losses = Mapping[float, Mapping[int, float | None]]
"""By the paper's step size and steps, the loss of all seeds; None diverges."""


# --------------------------------------------------------------------------------- plans
def test_sizes_counted_by_hand() -> None:
    """α has four values, σ four and on toys a fifth, β_u four, S&P's λ four."""
    toy, mnist = SEARCHES[TOY], SEARCHES["stationary-mnist"]
    sizes = {arm: len(toy.sets(arm)) for arm in toy.arms}
    assert sizes["reference"] == sizes["sgdw"] == 4
    assert sizes["pgd"] == 4 * 5
    assert sizes["shrink-and-perturb"] == sizes["feature-n-upgd-2nd-local"] == 4 * 5 * 4
    assert len(toy.arms) == 4 + 2 * 2 * 2 * 2
    assert len(mnist.arms) == 3 + 2 * 2 * 2
    assert len(mnist.sets("upgd-local")) == 4 * 4 * 4
    assert toy.runs(toy.stages[1]) == 3 * (2 * 4 + 18 * 5 * 4)
    assert toy.runs(toy.stages[2]) == 3 * (2 * 4 + 18 * 5)
    assert mnist.runs(mnist.stages[1]) == 2 * (4 + 10 * 6)
    for problem in MAIN:
        main = SEARCHES[problem]
        feature_wise = 0 if problem == "label-permuted-cifar10" else 2 * 2
        assert len(main.arms) == 10 + 2 + feature_wise
        noise = 5 if problem == "label-permuted-cifar10" else 4
        assert len(main.sets("n-upgd-local")) == 4 * noise * 4 * 5  # λ has five there
        assert len(main.sets("sgdw")) == 4 * 5
        assert main.runs(main.stages[2]) == main.seeds * 4 * len(main.arms)
    emnist = SEARCHES["label-permuted-emnist"]
    few = 16 + 20 + 80  # PGD, SGDW, S&P
    assert emnist.runs(emnist.stages[1]) == 2 * (few + 160 * 13)
    assert len(emnist.sets("upgd")) == 320
    assert len(SEARCHES["label-permuted-cifar10"].sets("upgd")) == 4 * 5 * 4 * 5  # σ = 0, too
    assert len(SEARCHES["input-permuted-mnist"].sets("s-ewc")) == 240 + 1  # κ is not on the grid


def test_fewer_sets_may_go_on() -> None:
    emnist = SEARCHES["label-permuted-emnist"]
    few = emnist.keeping([12, 2])
    assert [stage.steps for stage in few.stages] == [stage.steps for stage in emnist.stages]
    assert [few.runs(stage) for stage in few.stages[1:]] == [2 * 16 * 12, 2 * 16 * 2]
    assert SEARCHES[TOY].keeping([4, 1]) == SEARCHES[TOY]  # still at every σ
    for wrong in ([12], [12, 2, 1], [12, 0]):
        with pytest.raises(ValueError, match="1 or more: 2, not"):
            emnist.keeping(wrong)


def test_printed_sets_are_tried() -> None:
    for problem in (*TOYS, *MAIN):
        for method in BEST[problem]:
            assert best(problem, method) in SEARCHES[problem].sets(method)
            few = replace(SEARCHES[problem], axes={"lr": (0.5,)})
            assert few.sets(method)[-1] == best(problem, method)


# -------------------------------------------------------------------------------- stages
def play(
    ledger: Ledger, search: Search, losses: Losses, failing: Collection[float] = ()
) -> list[tuple[int, list[float]]]:
    """Do what a search wants until it wants nothing; tells each time's steps and the paper's αs.

    Long runs with some step sizes fail.
    """
    told = []
    while specs := upcoming(ledger, search):
        ledger.add(specs)
        told.append((specs[0].steps, list(dict.fromkeys(map(alpha, specs)))))
        for claim in ledger.claim("me", 60, limit=len(specs)):
            loss = losses[alpha(claim.spec)][claim.spec.steps]
            if alpha(claim.spec) in failing and claim.spec.steps > 100:
                ledger.fail(claim, "it failed", retry=False)
                continue
            finish(ledger, claim, loss, claim.spec.seed)
    return told


def alpha(spec: RunSpec) -> float:
    return to_paper(spec.method, spec.hyper)["lr"]


def finish(ledger: Ledger, claim: Any, loss: float | None, seed: int) -> None:
    if loss is None:
        ledger.finish(claim, Result("eager", "cpu", diverged_at=3))
        return
    values = np.full(4, loss + 0.001 * (seed % 10), np.float32)
    summary = {"loss": float(values.mean())}
    series = {"loss": Series(values, claim.spec.steps // 4)}
    ledger.finish(claim, Result("eager", "cpu", series=series, summary=summary))


STAGED = Search(
    TOY, ("sgdw",), (Stage(100), Stage(1000, 2)), seeds=2, axes={"lr": (0.1, 0.2, 0.3, 0.4, 0.5)}
)
FIVE = {0.1: 0.5, 0.2: 0.4, 0.3: 0.3, 0.4: 0.2, 0.5: None, 0.01: 0.6}


def test_the_best_go_on_and_the_longest_runs_decide(tmp_path: Path) -> None:
    losses = {lr: {100: loss, 1000: loss} for lr, loss in FIVE.items()}
    losses[0.3][1000] = 0.1
    with Ledger.open(tmp_path) as ledger:
        told = play(ledger, STAGED, losses)
        found, _ = outcome(ledger, STAGED)
    assert told == [(100, [0.1, 0.2, 0.3, 0.4, 0.5, 0.01]), (1000, [0.4, 0.3, 0.01])]
    assert found["sgdw"] == Found(
        "sgdw",
        {"lr": 0.3, "weight_decay": 0.0},
        "loss",
        pytest.approx(0.1005),
        None,  # two seeds have no interval
        None,
        (1000, 1001),
        1000,
        sets=6,
        diverged=1,
        runner_up=Tried({"lr": 0.4, "weight_decay": 0.0}, 1000, pytest.approx(0.2005)),
        printed=Tried({"lr": 0.01, "weight_decay": 0.0}, 1000, pytest.approx(0.6005)),
        rules=found["sgdw"].rules,
        devices=("cpu",),
        stages=(6, 3),
    )


def test_for_sets_that_diverge_the_next_are_tried(tmp_path: Path) -> None:
    losses = {lr: {100: loss, 1000: loss} for lr, loss in FIVE.items()}
    losses[0.4][1000] = losses[0.2][1000] = None
    with Ledger.open(tmp_path) as ledger:
        told = play(ledger, STAGED, losses)
        found, _ = outcome(ledger, STAGED)
    assert [lrs for _, lrs in told[1:]] == [[0.4, 0.3, 0.01], [0.2], [0.1]]
    assert found["sgdw"].hyper["lr"] == 0.3
    assert found["sgdw"].diverged == 3
    assert found["sgdw"].runner_up == Tried(
        {"lr": 0.1, "weight_decay": 0.0}, 1000, pytest.approx(0.5005)
    )


def test_sets_that_fail_are_replaced_too(tmp_path: Path) -> None:
    losses: dict[float, dict[int, float | None]] = {
        lr: {100: loss, 1000: loss} for lr, loss in FIVE.items()
    }
    with Ledger.open(tmp_path) as ledger:
        told = play(ledger, STAGED, losses, failing=(0.4, 0.3, 0.01))
        found, _ = outcome(ledger, STAGED)
    assert [lrs for _, lrs in told[1:]] == [[0.4, 0.3, 0.01], [0.2, 0.1]]
    assert found["sgdw"].hyper["lr"] == 0.2
    assert found["sgdw"].printed == Tried(
        {"lr": 0.01, "weight_decay": 0.0}, 100, pytest.approx(0.6005)
    )


@pytest.mark.parametrize("steps", [100, 1000])
def test_a_printed_set_that_diverges_is_told(tmp_path: Path, steps: int) -> None:
    losses = {lr: {100: loss, 1000: loss} for lr, loss in FIVE.items()}
    losses[0.01][steps] = None
    with Ledger.open(tmp_path) as ledger:
        told = play(ledger, STAGED, losses)
        found, _ = outcome(ledger, STAGED)
    assert (0.01 in told[1][1]) == (steps == 1000)
    assert found["sgdw"].printed == Tried({"lr": 0.01, "weight_decay": 0.0}, steps, None, 2)


@pytest.mark.parametrize(
    ("arm", "plain"),
    [
        ("upgd", "upgd"),
        ("feature-upgd-local", "upgd"),
        ("n-upgd-local", "n-upgd"),
        ("feature-n-upgd-2nd", "n-upgd"),
        ("ada-upgd", ""),
    ],
)
def test_other_kinds_of_utility_keep_the_printed_set_of_the_plain_one(
    tmp_path: Path, arm: str, plain: str
) -> None:
    """Which is the worst in the first stage, and the best in the last."""
    axes = {"lr": (0.1, 0.2), "sigma": (0.0,), "beta_utility": (0.5,)}
    search = Search(TOY, (arm,), (Stage(100), Stage(1000, 1)), seeds=1, axes=axes)
    losses = {0.1: {100: 0.1, 1000: 0.9}, 0.2: {100: 0.2, 1000: 0.8}, 0.01: {100: 0.9, 1000: 0.1}}
    with Ledger.open(tmp_path) as ledger:
        told = play(ledger, search, losses)
        found, _ = outcome(ledger, search)
    assert told[-1] == (1000, [0.1, 0.01] if plain else [0.1])
    if plain:
        assert found[arm].hyper == from_paper(arm, BEST[TOY][plain])
    assert (found[arm].printed is None) is (arm != "upgd")


def test_the_best_at_every_value_go_on() -> None:
    pool = [(("lr", float(i)), ("sigma", sigma)) for i, sigma in enumerate((1, 1, 1, 0.1, 1, 0.1))]
    stage = Stage(10, 1, "sigma")
    out = ([], [pool[0]], [pool[0], pool[1], pool[3], pool[5]])
    chosen = [[dict(one)["lr"] for one in stage.choose(pool, some)] for some in out]
    assert chosen == [[0, 3], [0, 1, 3], [0, 1, 2, 3, 5]]
    assert [dict(one)["lr"] for one in stage.choose(pool, kept=pool[4])] == [0, 3, 4]
    assert stage.choose(pool, kept=pool[0]) == stage.choose(pool)
    assert stage.choose([(("lr", 1.0),), (("lr", 2.0),)]) == [(("lr", 1.0),), (("lr", 2.0),)]


def test_nothing_is_found_where_nothing_survives(tmp_path: Path) -> None:
    losses = {lr: {100: loss, 1000: None} for lr, loss in FIVE.items()}
    with Ledger.open(tmp_path) as ledger:
        told = play(ledger, STAGED, losses)
        assert [len(lrs) for _, lrs in told] == [6, 3, 2]  # the sixth diverged at once
        found, [ranking] = outcome(ledger, STAGED)
        assert found == {}
        assert ranking.winner is None
        entrant, *_ = STAGED.entrants()
        assert course(list(ledger.runs()), entrant, STAGED.stages).todo == []


def test_seeds_of_a_search_are_no_evidence(tmp_path: Path) -> None:
    experiment = declare({})[TOY]
    arm = next(a for a in experiment.arms if a.name == "sgdw")
    with Ledger.open(tmp_path) as ledger:
        ledger.add(RunSpec(TOY, "sgdw", arm.hyper, seed, 400) for seed in (0, 1, 1000))
        for claim in ledger.claim("me", 60, limit=3):
            finish(ledger, claim, 0.5, claim.spec.seed)
        results = collect(ledger, experiment)
    assert results is not None
    assert sorted(results.of("sgdw", "loss")) == [0, 1]


# ---------------------------------------------------------------------------------- arms
def all_printed(problem: str) -> dict[str, Set]:
    return {method: best(problem, method) for method in BEST[problem]}


def test_arms_have_the_set_found_and_the_printed_one_beside_it() -> None:
    some = searched.made_up()
    toy = declare(some)[TOY]
    names = [arm.name for arm in toy.arms]
    assert names[:4] == ["reference", "sgdw", "sgdw-printed", "pgd"]
    both = {arm.name: arm for arm in toy.arms}
    assert both["upgd"].hyper == some[TOY]["upgd"].hyper
    assert both["upgd-printed"].hyper == best(TOY, "upgd")
    assert both["upgd-printed"].title == "UPGD (printed set)"
    assert both["reference"].options == {"hidden": "none"}
    assert "upgd-2nd-printed" not in both  # the paper prints none
    same = {TOY: {"upgd": replace(some[TOY]["upgd"], hyper=best(TOY, "upgd"))}}
    assert "upgd-printed" not in [arm.name for arm in declare(same)[TOY].arms]


def test_main_problems_keep_the_printed_sets_and_show_what_else_was_found() -> None:
    problem = MAIN[0]
    some = searched.made_up()
    same = {**some[problem], "pgd": replace(some[problem]["pgd"], hyper=best(problem, "pgd"))}
    few = {name: one for name, one in same.items() if name != "adamw"}
    experiments = declare({**some, problem: few})
    assert {arm.name: arm.hyper for arm in experiments[problem].arms} == all_printed(problem)
    others = experiments[f"best-sets-{problem}"]
    assert {arm.name: arm.hyper for arm in others.arms} == {
        name: few[name].hyper
        for name in METHODS
        if name not in ("pgd", "adamw", "s-ewc")  # whose last set is the printed one
    }
    assert others.awaited == ("adamw",)
    assert learner_steps(others) == (7 + 1) * 20 * 1_000_000


def test_without_sets_arms_are_the_printed_ones() -> None:
    experiments = declare({})
    toy = {arm.name: arm.hyper for arm in experiments[TOY].arms}
    assert toy == {**all_printed(TOY), "reference": best(TOY, "sgdw")}
    assert experiments["stationary-mnist"].arms == ()
    assert experiments["variants-label-permuted-emnist"].arms == ()


def test_seeds_as_in_the_paper() -> None:
    experiments = declare(searched.made_up())
    assert experiments["stationary-mnist"].seeds == experiments[TOY].seeds == 20
    assert experiments["variants-input-permuted-mnist"].seeds == 10


def test_the_file_keeps_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert sets_found.read(path) == {}
    some = searched.made_up()
    whole = {TOY: {"upgd": replace(some[TOY]["upgd"], printed=Tried({"lr": 0.1}, 40, None, 2))}}
    sets_found.write(whole, path)
    sets_found.write({TOY: {"pgd": some[TOY]["pgd"]}}, path)
    assert sets_found.read(path) == {TOY: {**whole[TOY], "pgd": some[TOY]["pgd"]}}
    json.loads(path.read_text())
    before = path.read_bytes()
    sets_found.write(whole, path)
    assert path.read_bytes() == before
    path.write_text('{"x": {"y": {"lr": 1}}}')
    with pytest.raises(ValueError, match="no sets that were found"):
        sets_found.read(path)


def test_committed_sets_are_on_the_grids_of_the_searches() -> None:
    for problem, arms in sets_found.read().items():
        for arm, one in arms.items():
            assert one.hyper in SEARCHES[problem].sets(arm), (problem, arm)
            assert one.printed is not None or arm not in BEST.get(problem, {})


@pytest.mark.slow
def test_tables_tell_of_every_set() -> None:
    some = searched.made_up()
    text = "\n".join(found_table(some))
    assert text.count("\n| ") == sum(map(len, some.values())) + len(some)
    assert "| Feature-wise UPGD-W, local |" in text
    assert len(search_table()) == 2 + len(SEARCHES)


# ----------------------------------------------------------------------------- the whole way
@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys with networks of 6 and 5 units and tasks of two samples."""
    for name in ("toy-changing-inputs", TOY):
        small = replace(PROBLEMS[name], network=(16, 6, 5, 1), task_length=2, window=20)
        monkeypatch.setitem(PROBLEMS, name, small)


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output.replace("\n", " ")


@pytest.mark.usefixtures("tiny")
@pytest.mark.slow
def test_from_a_search_to_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, study = tmp_path / "found.json", str(tmp_path / "search")
    arms = "reference,sgdw,upgd,upgd-2nd,feature-upgd-local"
    narrow = ("--set", "lr=0.01,0.1", "--set", "sigma=0.001", "--set", "beta_utility=0.9")
    small = ("--scale", "0.001", "--seeds", "2", "--study", study, "--arms", arms, *narrow)
    assert "next are" in run("search", TOY, *small, "--dry-run")
    first = run("search", TOY, *small, "--save", str(file))
    assert "wrote" in first
    assert "0 sets" in run("search", TOY, *small, "--no-run", "--seeds", "3", "--save", str(file))
    kept = sets_found.read(file)[TOY]
    assert list(kept) == sorted(arms.split(","))
    with Ledger.open(study, create=False, read_only=True) as ledger:
        runs = list(ledger.runs(method="upgd-2nd"))
        values: dict[float, list[float]] = {}
        for each in runs:
            if each.spec.steps == kept["upgd-2nd"].steps:
                values.setdefault(each.spec.hyper["lr"], []).append(
                    float(ledger.series(each.key, "loss").mean())
                )
    best = min(values, key=lambda lr: sum(values[lr]))
    assert {run.spec.steps for run in runs} == {20, 100, 1000}
    assert kept["upgd-2nd"].hyper["lr"] == best
    assert kept["upgd-2nd"].mean == pytest.approx(np.mean(values[best]), rel=1e-5)

    searched.take(sets_found.read(file), monkeypatch)
    assert "upgd-2nd" in {arm.name for arm in EXPERIMENTS[TOY].arms}
    figure = replace(FIGURES["toys"], panels=FIGURES["toys"].panels[4:])
    monkeypatch.setitem(FIGURES, "toys", figure)  # type: ignore[arg-type]
    paper = tmp_path / "paper"
    drawn = run("reproduce", "toys", "--scale", "0.0004", "--seeds", "2", "--study", str(paper))
    assert f"toys lacks {TOY}: sets of 12 arms" in drawn
    text = (paper / "toys.svg").read_text()
    for label in ("Reference", "2nd order", "Changing sign: Feature Local Utility"):
        assert label in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("toy-changing",), "did you mean 'toy-changing-"),
        ((TOY, "--arms", "adam"), "'adam' is not searched on toy-changing-sign"),
        ((TOY, "--set", "kappa=1"), "has a hyperparameter kappa"),
        ((TOY, "--keep", "4,best"), "'4,best' is not a list of numbers"),
        ((TOY, "--keep", "4"), "needs so many numbers of sets, 1 or more: 2, not 4"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = CliRunner().invoke(app, ["search", *arguments])
    assert done.exit_code == 2
    assert says in done.output.replace("\n", " ")


def test_the_list_names_all() -> None:
    shown = run("search", "list")
    assert all(problem in shown for problem in SEARCHES)
