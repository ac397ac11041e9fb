"""Halving and search: what comes next is a function of the ledger, whatever happened on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from upgd.ledger import Ledger, Result, RunSpec, StudyError
from upgd.study import search
from upgd.study import sweeps as halving
from upgd.study.search import Axis, Space
from upgd.study.sweeps import Sweep

STEPS = 900


def sweep(count: int = 9, methods: tuple[str, ...] = ("upgd",), seeds: int = 2) -> Sweep:
    sets = [{"lr": float(n), "sigma": 1.0} for n in range(count)]
    return Sweep("digits", dict.fromkeys(methods, sets), tuple(range(seeds)), STEPS)


def work(
    ledger: Ledger, specs: list[RunSpec], value: Callable[[RunSpec], float | None], most: int = 999
) -> None:
    """Run some of these by a rule: a number, None where one diverges, NaN where one fails."""
    ledger.add(specs)
    for claim in ledger.claim("me", 60, most, where={"key": [spec.key for spec in specs]}):
        found = value(claim.spec)
        if found is None:
            ledger.finish(claim, Result("eager", diverged_at=1))
        elif math.isnan(found):
            ledger.fail(claim, "broken", retry=False)
        else:
            ledger.finish(claim, Result("eager", summary={"accuracy": found}))


def by_step_size(spec: RunSpec) -> float:
    return spec.hyper["lr"] / 10 + spec.seed / 1000


def run_halving(
    ledger: Ledger, plan: Sweep, value: Callable[[RunSpec], float | None], most: int = 999
) -> list[halving.Rung]:
    """To the end, a few runs at a time."""
    for _ in range(1000):
        rungs = halving.rungs(ledger, plan, 3, 100)
        if rungs[-1].over:
            return rungs
        work(ledger, halving.specs_of(plan, rungs[-1]), value, most)
    raise AssertionError


def alive(rung: halving.Rung, method: str = "upgd") -> list[float]:
    return [dict(hyper)["lr"] for hyper in rung.sets[method]]


def test_rungs_by_hand(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        rungs = run_halving(ledger, sweep(), by_step_size)
        assert [rung.steps for rung in rungs] == [100, 300, 900]
        assert [alive(rung) for rung in rungs] == [[*range(9)], [8, 7, 6], [8]]
        dropped = [[dict(c.hyper)["lr"] for c in rung.dropped["upgd"]] for rung in rungs]
        assert dropped == [[5, 4, 3, 2, 1, 0], [7, 6], []]
        assert ledger.counts()["done"] == 2 * (9 + 3 + 1)


@pytest.mark.parametrize("most", [1, 2, 5, 7])
def test_a_halving_in_pieces_is_the_whole_one(tmp_path: Path, most: int) -> None:
    plan = sweep(methods=("upgd", "sgd"))
    with Ledger.open(tmp_path / "whole") as whole, Ledger.open(tmp_path / "parts") as parts:
        assert run_halving(whole, plan, by_step_size) == run_halving(
            parts, plan, by_step_size, most
        )
        assert {r.key for r in whole.runs()} == {r.key for r in parts.runs()}


def test_sets_that_lack_a_seed_or_diverge_do_not_go_on(tmp_path: Path) -> None:
    def value(spec: RunSpec) -> float | None:
        if spec.hyper["lr"] == 8 and spec.seed == 1:
            return math.nan  # the best one lacks a seed
        if spec.hyper["lr"] == 7 and spec.seed == 0:
            return None
        return by_step_size(spec)

    with Ledger.open(tmp_path) as ledger:
        rungs = run_halving(ledger, sweep(), value)
    assert [alive(rung) for rung in rungs] == [[*range(9)], [6, 5, 4], [6]]
    assert dict(rungs[0].dropped["upgd"][-1].hyper)["lr"] == 8


def test_a_third_is_rounded_up(tmp_path: Path) -> None:
    """11 sets, then 4 (3 and two thirds), then 2 (1 and a third): planned so, and run so."""
    plan = sweep(count=11)
    planned = [methods["upgd"] for methods in halving.schedule(plan, 3, 100).values()]
    assert planned == [11, 4, 2]
    with Ledger.open(tmp_path) as ledger:
        rungs = run_halving(ledger, plan, by_step_size)
    assert [alive(rung) for rung in rungs] == [[*range(11)], [10, 9, 8, 7], [10, 9]]


def test_methods_with_fewer_sets_begin_on_later_rungs() -> None:
    sets = {"upgd": [{"lr": float(n)} for n in range(27)], "sgd": [{"lr": 1.0}, {"lr": 2.0}]}
    plan = Sweep("digits", sets, (0,), 9000)
    assert halving.schedule(plan, 3, 100) == {
        300: {"upgd": 27},
        1000: {"upgd": 9},
        3000: {"upgd": 3},
        9000: {"upgd": 1, "sgd": 2},
    }


def test_what_halving_leaves_when_every_set_fails(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        rungs = run_halving(ledger, sweep(), lambda spec: math.nan)
        assert [len(alive(rung)) for rung in rungs] == [9, 0, 0]


@pytest.mark.parametrize("length", range(1, 40))
def test_rungs_are_whole_windows_and_grow(length: int) -> None:
    for sets, eta in product((1, 2, 9, 50), (2, 3, 4)):
        found = halving.lengths(sets, length * 37, eta, 100)
        assert found[-1] == length * 37
        assert found == sorted(set(found))
        assert all(steps % 100 == 0 and steps >= 100 for steps in found[:-1])


# ------------------------------------------------------------------------------------ search
GRID = {
    "lr": (0.1, 0.01, 0.001),
    "sigma": (0.5,),
    "weight_decay": (0.0, 0.1, 0.001),
    "beta_utility": (0.9, 0.999),
}


def bowl(spec: RunSpec) -> float:
    """Best at lr = 0.02, β = 0.99, without decay."""
    hyper = spec.hyper
    miss = abs(math.log10(hyper["lr"] / 0.02)) + abs(math.log10((1 - hyper["beta_utility"]) / 0.01))
    return 0.9 - 0.1 * miss - hyper["weight_decay"]


def run_search(
    ledger: Ledger, count: int, value: Callable[[RunSpec], float | None] = bowl, most: int = 999
) -> None:
    plan = Sweep("digits", {"upgd": []}, (0, 1), STEPS)
    for _ in range(1000):
        sets = search.next_sets(ledger, plan, {"upgd": Space.around(GRID)}, count, 5)
        if not sets:
            return
        work(ledger, plan.specs(sets=sets), value, most)
    raise AssertionError


def test_proposals_lie_in_the_space(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    with Ledger.open(tmp_path) as ledger:
        run_search(ledger, 40)
        sets = {tuple(run.spec.hyper.items()) for run in ledger.runs()}
        assert ledger.counts()["done"] == 80
    assert len(sets) == 40
    for hyper in map(dict, sets):
        assert 0.001 <= hyper["lr"] <= 0.1
        assert hyper["sigma"] == 0.5
        assert hyper["weight_decay"] == 0 or 0.001 <= hyper["weight_decay"] <= 0.1
        assert 0.9 <= hyper["beta_utility"] <= 0.999
    assert {dict(hyper)["weight_decay"] for hyper in sets} > {0.0}


def test_a_search_learns(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    with Ledger.open(tmp_path) as ledger:
        run_search(ledger, 60)
        values = [bowl(run.spec) for run in ledger.runs() if run.spec.seed == 0]
    first, last = values[:10], values[-20:]  # ten are drawn at random first
    assert sum(last) / 20 > sum(first) / 10


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_search_in_pieces_is_the_whole_one(tmp_path: Path, most: int) -> None:
    pytest.importorskip("optuna")
    with Ledger.open(tmp_path / "whole") as whole, Ledger.open(tmp_path / "parts") as parts:
        run_search(whole, 17)
        run_search(parts, 17, most=most)
        assert [r.key for r in whole.runs()] == [r.key for r in parts.runs()]
        run_search(whole, 17)
        assert sum(whole.counts().values()) == 34
        run_search(whole, 20)
        assert sum(whole.counts().values()) == 40


def test_sets_of_the_grid_are_evidence_and_not_counted(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    plan = Sweep("digits", {"upgd": []}, (0, 1), STEPS)
    on_grid = {"lr": 0.01, "sigma": 0.5, "weight_decay": 0.1, "beta_utility": 0.9}
    outside = on_grid | {"lr": 5.0}
    with Ledger.open(tmp_path) as ledger:
        specs = [RunSpec("digits", "upgd", h, s, STEPS) for h in (on_grid, outside) for s in (0, 1)]
        work(ledger, specs, bowl)
        before = search.next_sets(ledger, plan, {"upgd": Space.around(GRID)}, 3, 5)
        assert len(before["upgd"]) == 3
        run_search(ledger, 3)
        assert ledger.counts()["done"] == 4 + 2 * 3


def test_divergence_and_failure_do_not_end_a_search(tmp_path: Path) -> None:
    pytest.importorskip("optuna")

    def value(spec: RunSpec) -> float | None:
        if spec.hyper["lr"] > 0.03:
            return None
        return math.nan if spec.hyper["lr"] < 0.003 else bowl(spec)

    with Ledger.open(tmp_path) as ledger:
        run_search(ledger, 30, value)
        assert sum(ledger.counts().values()) == 60


def test_nothing_to_search_and_no_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Sweep("digits", {"upgd": []}, (0,), STEPS)
    nothing = plan.ranking([], "upgd", [])
    with pytest.raises(StudyError, match="nothing to search"):
        search.propose(Space.around({"lr": (0.1,)}), nothing, 3, 0)
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(StudyError, match=r"pip install 'optuna"):
        search.propose(Space.around(GRID), nothing, 3, 0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr", (0.1, 0.001)),
        ("beta1", (0.0, 0.9)),
        ("kappa", (0.0, 1.0, 100.0)),
        ("sigma", (0.0, 0.1)),
    ],
)
def test_places_and_values_belong_together(name: str, values: tuple[float, ...]) -> None:
    axis = Axis.between(name, values)
    for value in values:
        place = axis.place(value)
        assert place is not None
        assert axis.start <= place <= axis.high
        assert axis.value(place) == value
    assert axis.place(1e6 if name != "beta1" else 0.99) is None


# ------------------------------------------------------------- names of one row of the registry
def test_names_of_one_row_have_their_own_sets_and_share_runs(tmp_path: Path) -> None:
    """sgd is sgdw with λ = 0: each ranks what it was asked for, and no run is done twice."""
    sets = {
        "sgd": [{"lr": float(n)} for n in range(1, 10)],
        "sgdw": [{"lr": float(n), "weight_decay": d} for n in range(1, 10) for d in (0.0, 0.5)],
    }
    plan = Sweep("digits", sets, (0, 1), STEPS)

    def value(spec: RunSpec) -> float:
        return by_step_size(spec) + spec.hyper["weight_decay"] / 100

    with Ledger.open(tmp_path) as ledger:
        rungs = run_halving(ledger, plan, value)
        hypers = {method: [dict(c.hyper) for c in rungs[-1].kept[method]] for method in sets}
        assert hypers["sgd"] == [{"lr": 9.0, "weight_decay": 0.0}]
        assert hypers["sgdw"][0] == {"lr": 9.0, "weight_decay": 0.5}
        assert [len(rungs[0].sets[method]) for method in sets] == [9, 18]
        runs = list(ledger.runs())
        assert sum(run.spec.steps == 100 for run in runs) == 2 * 18  # those of sgd are among them
        ranking = plan.ranking(runs, "sgd", plan.hypers()["sgd"], 100)
        assert len(ranking.complete) == 9
        assert ranking.name == "sgd"
        assert plan.ranking(runs, "sgdw", plan.hypers()["sgdw"], 100).name == "sgdw"


@pytest.mark.parametrize(("asked", "there"), [("sgd", "sgdw"), ("sgdw", "sgd")])
def test_nothing_waits_for_runs_that_are_there_by_another_name(
    tmp_path: Path, asked: str, there: str
) -> None:
    sets = [{"lr": float(n), "weight_decay": 0.0} for n in range(9)]
    done, plan = (Sweep("digits", {m: sets}, (0, 1), STEPS) for m in (there, asked))
    with Ledger.open(tmp_path) as ledger:
        first = run_halving(ledger, done, by_step_size)
        count = sum(ledger.counts().values())
        again = halving.rungs(ledger, plan, 3, 100)
        assert again[-1].over
        assert [alive(rung, asked) for rung in again] == [alive(rung, there) for rung in first]
        assert sum(ledger.counts().values()) == count


def test_a_set_counts_that_another_name_would_mean(tmp_path: Path) -> None:
    """Of upgd-w, one with λ = 0, which people call upgd."""
    plan = Sweep("digits", {"upgd-w": [{"weight_decay": 0.0}, {"lr": 0.5}]}, (0,), STEPS)
    with Ledger.open(tmp_path) as ledger:
        [rung] = run_halving(ledger, plan, by_step_size)
        assert [dict(c.hyper)["weight_decay"] for c in rung.kept["upgd-w"]] == [0.001, 0.0]
        assert {run.spec.name for run in ledger.runs()} == {"upgd", "upgd-w"}
