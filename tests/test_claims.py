"""Claims are judged by numbers made up for the purpose: true ones hold, false ones do not."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from upgd.metrics import Interval
from upgd.optim.registry import METHODS as REGISTRY
from upgd.paper import claims
from upgd.paper.claims import CLAIMS
from upgd.paper.evidence import NO, UNKNOWN, YES, Finding, parts, worst
from upgd.paper.experiments import EXPERIMENTS, MAIN, ablation_arms
from upgd.paper.results import Results, collect, load, read, write
from upgd.paper.sets import METHODS
from upgd.study import Ledger, RunSpec
from upgd.study.records import Result, Series

TASKS, SEEDS = 200, 5
BY_NUMBER = {claim.number: claim for claim in CLAIMS}


def made_up(
    name: str,
    trends: dict[str, float],
    level: dict[str, float] | None = None,
    metric: str = "accuracy",
    seeds: int = SEEDS,
    tasks: int = TASKS,
) -> Results:
    """Straight lines with a little noise: each arm's change over the run, and its level."""
    rng = np.random.default_rng(0)
    curves = {}
    for arm, trend in trends.items():
        start = (level or {}).get(arm, 0.7)
        line = start + trend * np.linspace(0, 1, tasks)
        curves[arm] = {s: line + 0.001 * rng.standard_normal(tasks) for s in range(seeds)}
    return Results(name, 5_000, {metric: curves})


def verdict(number: int, *results: Results) -> str:
    return worst(f.verdict for f in BY_NUMBER[number].check({r.name: r for r in results}))


STORY = dict.fromkeys(METHODS, -0.1) | {"upgd": 0.0, "n-upgd": 0.0, "shrink-and-perturb": 0.0}


def test_a_true_story_holds() -> None:
    assert verdict(2, made_up("input-permuted-mnist", STORY)) == YES


@pytest.mark.parametrize(
    ("arm", "trend"),
    [("upgd", -0.1), ("upgd", 0.1), ("n-upgd", -0.05), ("s-ewc", 0.0), ("s-rwalk", 0.05)],
)
def test_a_false_story_does_not(arm: str, trend: float) -> None:
    assert verdict(2, made_up("input-permuted-mnist", {**STORY, arm: trend})) == NO


def test_a_better_rival_is_noticed() -> None:
    ahead = made_up("input-permuted-mnist", STORY, {"shrink-and-perturb": 0.73})
    assert verdict(2, ahead) == NO
    near = made_up("input-permuted-mnist", STORY, {"shrink-and-perturb": 0.705})
    assert verdict(2, near) == YES


def test_little_data_is_not_evidence() -> None:
    assert verdict(2) == UNKNOWN
    assert verdict(2, made_up("input-permuted-mnist", STORY, seeds=1)) == UNKNOWN
    assert verdict(2, made_up("input-permuted-mnist", STORY, tasks=3)) == UNKNOWN
    some = {arm: STORY[arm] for arm in ("upgd", "s-ewc")}
    assert verdict(2, made_up("input-permuted-mnist", some)) == UNKNOWN


def test_short_runs_compare_quarters() -> None:
    assert verdict(2, made_up("input-permuted-mnist", STORY, tasks=12)) == YES
    assert parts(50) == (range(10, 30), range(30, 50))
    assert parts(12) == (range(3, 6), range(9, 12))
    assert parts(3) is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.02, 0.04, {"rising": YES, "falling": NO, "within": NO}),
        (-0.04, -0.02, {"rising": NO, "falling": YES, "within": NO}),
        (-0.002, 0.003, {"rising": NO, "falling": NO, "within": YES}),
        (0.001, 0.003, {"rising": YES, "falling": NO, "within": YES}),
        (-0.05, 0.05, {"rising": UNKNOWN, "falling": UNKNOWN, "within": UNKNOWN}),
        (float("nan"), float("nan"), {"rising": UNKNOWN, "falling": UNKNOWN, "within": UNKNOWN}),
    ],
)
def test_judgements(low: float, high: float, expected: dict[str, str]) -> None:
    found = Interval((low + high) / 2, low, high)
    assert {name: getattr(claims, name)(found) for name in expected} == expected


def both(accuracy: Results, plasticity: Results) -> Results:
    return Results(accuracy.name, accuracy.window, {**accuracy.series, **plasticity.series})


def test_correlation_over_methods() -> None:
    levels = {method: 0.5 + 0.03 * i for i, method in enumerate(METHODS)}
    flat = dict.fromkeys(METHODS, 0.0)
    accuracy = made_up("input-permuted-mnist", flat, levels)
    same = made_up("input-permuted-mnist", flat, levels, "plasticity")
    reversed_ = dict(zip(METHODS, list(levels.values())[::-1], strict=True))
    other = made_up("input-permuted-mnist", flat, reversed_, "plasticity")
    assert verdict(3, both(accuracy, same)) == YES
    assert verdict(3, both(accuracy, other)) == NO
    assert verdict(3, accuracy) == UNKNOWN


def test_rank_among_ten() -> None:
    trends = {method: -0.02 * i for i, method in enumerate(METHODS)}  # the later the more forgotten
    findings = BY_NUMBER[8].check({"input-permuted-mnist": made_up("input-permuted-mnist", trends)})
    rank = next(
        f for f in findings if "MNIST" in f.statement.upper() and "forgetting" in f.statement
    )
    assert rank.found is not None
    assert rank.found.estimate == METHODS.index("upgd") + 1
    assert rank.verdict == NO


def test_label_permuted_story() -> None:
    better = ("upgd", "s-ewc", "s-mas")
    trends = {method: 0.1 if method in better else -0.1 for method in METHODS}
    emnist = made_up("label-permuted-emnist", trends)
    lost = made_up("label-permuted-emnist", dict.fromkeys(METHODS, -0.2), metric="plasticity")
    assert verdict(6, both(emnist, lost)) == YES
    kept = made_up("label-permuted-emnist", dict.fromkeys(METHODS, 0.2), metric="plasticity")
    assert verdict(6, both(emnist, kept)) == NO
    mini = made_up("label-permuted-mini-imagenet", {**trends, "shrink-and-perturb": 0.0})
    mini_lost = made_up(
        "label-permuted-mini-imagenet", dict.fromkeys(METHODS, -0.2), metric="plasticity"
    )
    assert verdict(7, both(mini, mini_lost)) == YES


def test_tasks_longer_than_windows() -> None:
    curve = {0: np.repeat([0.1, 0.3], 100), 1: np.repeat([0.2, 0.4], 100)}
    results = Results("figure-1", 600, {"accuracy": {"adam": curve}})
    assert [x.tolist() for x in results.by_task("adam", "accuracy").values()] == [
        pytest.approx([0.1, 0.3]),
        pytest.approx([0.2, 0.4]),
    ]


# ------------------------------------------------------------------------------ experiments
def test_arms_name_every_hyperparameter() -> None:
    from upgd.cli.arguments import get_method, scalars

    for experiment in EXPERIMENTS.values():
        for arm in experiment.arms:
            assert arm.hyper.keys() == scalars(arm.method).keys(), (experiment.name, arm.name)
            assert get_method(arm.method)[0].name in REGISTRY


def test_arms_that_are_the_same_learner_are_marked() -> None:
    assert EXPERIMENTS["ablation-input-permuted-mnist"].twins() == {}
    assert EXPERIMENTS["ablation-label-permuted-emnist"].twins() == {
        "upgd-wd": "upgd",  # its printed decay is 0
        "sgd+ug": "upgd-wp",
    }
    assert EXPERIMENTS["ablation-label-permuted-cifar10"].twins() == {
        "upgd-wp": "upgd",  # its printed noise is 0
        "sgd+ug": "upgd-wd",
    }
    assert {arm.name for arm in ablation_arms(MAIN[0])} >= {"sgd", "sgd+ug", "upgd-ug"}


def test_scales_are_whole_windows() -> None:
    figure = EXPERIMENTS["figure-1"]
    assert figure.length(1.0) == 15_000_000
    assert figure.length(0.01) % 600 == 0
    assert EXPERIMENTS["toy-changing-sign"].length(1e-9) == 4 * 4_000


# ---------------------------------------------------------------------------------- tables
def test_tables_keep_what_they_are_given(tmp_path: Path) -> None:
    results = made_up("input-permuted-mnist", STORY, seeds=2, tasks=6)
    folder = tmp_path / "input_permuted_mnist"
    folder.mkdir()
    write(results, folder / "series.csv.gz")
    first = (folder / "series.csv.gz").read_bytes()
    again = read(folder / "series.csv.gz", results.name)
    assert again.window == results.window
    for arm in STORY:
        for seed, curve in results.of(arm, "accuracy").items():
            np.testing.assert_allclose(again.of(arm, "accuracy")[seed], curve, rtol=1e-4)
    write(results, folder / "series.csv.gz")
    assert (folder / "series.csv.gz").read_bytes() == first
    assert load([tmp_path]).keys() == {"input-permuted-mnist"}
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"a,b\n"))
    with pytest.raises(ValueError, match="no table of results"):
        read(tmp_path / "x.gz", "x")


def test_a_ledgers_longest_runs_count(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["input-permuted-mnist"]
    arm = next(a for a in experiment.arms if a.name == "upgd")
    specs = [
        RunSpec(experiment.problem, "upgd", arm.hyper, 0, 20_000),
        RunSpec(experiment.problem, "upgd", arm.hyper, 0, 50_000, {"stride": 100}),
        RunSpec(experiment.problem, "upgd", arm.hyper, 1, 50_000, {"restart": True}),
        RunSpec(experiment.problem, "upgd", {**arm.hyper, "lr": 0.5}, 2, 50_000),
    ]
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs)
        for claim in ledger.claim("me", 60, limit=4):
            values = np.full(4, claim.spec.steps, np.float32)
            ledger.finish(claim, Result("eager", "cpu", series={"accuracy": Series(values, 5_000)}))
        results = collect(ledger, experiment)
    assert results is not None
    assert results.arms == ("upgd",)
    assert list(results.of("upgd", "accuracy")) == [0]
    assert results.of("upgd", "accuracy")[0][0] == 50_000
    assert load([tmp_path])["input-permuted-mnist"].arms == ("upgd",)


def test_findings_read_well() -> None:
    finding = Finding("UPGD-W holds", Interval(-0.0004, -0.001, 0.0002), YES)
    assert str(finding) == "UPGD-W holds: 0.0 points [−0.1, 0.0], holds"
    assert str(Finding("x", None, UNKNOWN)) == "x: -, not enough data"
