"""Claims are judged by numbers made up for the purpose: true ones hold, false ones do not."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("matplotlib")

from upgd.kept import keep
from upgd.ledger import Ledger, RunSpec
from upgd.ledger.records import Result, Series
from upgd.metrics import DIAGNOSTICS, FEWEST, Interval, mean_interval
from upgd.optim.registry import METHODS as REGISTRY
from upgd.paper import claims, evidence, judging
from upgd.paper.claims import CLAIMS, judge_claim
from upgd.paper.committed import load
from upgd.paper.evidence import late_parts, parts
from upgd.paper.experiments import EXPERIMENTS, ablation_arms
from upgd.paper.figures import LONG
from upgd.paper.results import TABLE, Results, collect, lacking, read, write
from upgd.paper.sets import MAIN, METHODS, TOYS
from upgd.paper.verdicts import (
    AHEAD,
    NO,
    PARTLY,
    PERCENT,
    PLAIN,
    TOLD,
    UNKNOWN,
    YES,
    Finding,
    Judged,
    shown,
    table,
    worst,
)

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


def judged(number: int, *results: Results) -> Judged:
    return judge_claim(BY_NUMBER[number], {r.name: r for r in results})


def verdict(number: int, *results: Results) -> str:
    """That of all statements together."""
    return worst(f.verdict for f in judged(number, *results).findings)


def finding(number: int, words: str, *results: Results) -> Finding:
    """The statement that has these words."""
    [found] = [f for f in judged(number, *results).findings if words in f.statement]
    return found


STORY = dict.fromkeys(METHODS, -0.1) | {"upgd": 0.0, "n-upgd": 0.0, "shrink-and-perturb": 0.0}


def test_a_true_story_holds() -> None:
    assert verdict(2, made_up("input-permuted-mnist", STORY)) == YES


@pytest.mark.parametrize(
    ("arm", "trend"),
    [("upgd", -0.1), ("upgd", 0.1), ("n-upgd", -0.05), ("s-ewc", 0.0), ("s-rwalk", 0.05)],
)
def test_a_false_story_does_not(arm: str, trend: float) -> None:
    assert verdict(2, made_up("input-permuted-mnist", {**STORY, arm: trend})) == NO


def test_s_rwalk_is_judged_by_the_set_found_here() -> None:
    """Its printed sets were tuned on other rules. Short runs do not count, nor do other methods."""
    printed = made_up("input-permuted-mnist", {**STORY, "s-rwalk": 0.1})
    best = "best-sets-input-permuted-mnist"
    assert verdict(2, printed) == NO
    assert verdict(2, printed, made_up(best, {"s-rwalk": -0.1, "upgd": -0.5})) == YES
    assert verdict(2, printed, made_up(best, {"s-rwalk": -0.1}, tasks=TASKS // 2)) == NO
    assert verdict(2, printed, made_up(best, {"upgd": 0.0})) == NO
    lost = Results(best, 5_000, {}, {"s-rwalk": range(SEEDS)})
    assert verdict(2, printed, lost) == NO  # nothing says how long it would have been
    beside = made_up(best, {"upgd": 0.0})
    assert verdict(2, printed, dataclasses.replace(beside, diverged=lost.diverged)) == UNKNOWN
    told = finding(2, "S-RWalk decays", printed, made_up(best, {"s-rwalk": -0.1}))
    assert told.found is not None
    assert told.found.estimate == pytest.approx(-0.085, abs=0.005)  # 190 against 20 of 200


def test_what_was_not_measured_of_the_set_found_is_the_printed_ones() -> None:
    printed = made_up("input-permuted-mnist", STORY)
    zeros = {"s-rwalk": {seed: np.linspace(0.1, 0.8, TASKS) for seed in range(SEEDS)}}
    printed = dataclasses.replace(printed, series={**printed.series, "zero_activations": zeros})
    best = made_up("best-sets-input-permuted-mnist", {"s-rwalk": -0.1})
    both = claims._completed({each.name: each for each in (printed, best)}, printed.name)
    assert both.of("s-rwalk", "accuracy") == best.of("s-rwalk", "accuracy")
    assert both.of("s-rwalk", "zero_activations") == zeros["s-rwalk"]


@pytest.mark.parametrize(("definition", "judged"), [(1, False), (DIAGNOSTICS, True)])
def test_diagnostics_of_an_older_definition_are_not_judged(
    definition: int, judged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "input-permuted-mnist"
    series = {each: {"sgdw": {0: np.ones(4)}} for each in ("accuracy", "zero_activations")}
    table = tmp_path / "input_permuted_mnist" / TABLE
    table.parent.mkdir()
    write(Results(name, 5_000, series), table)
    told = SimpleNamespace(diagnostics=definition)
    monkeypatch.setattr("upgd.paper.provenance.read", lambda folder: told)
    assert ("zero_activations" in load([tmp_path], older=False)[name].series) == judged
    assert "accuracy" in load([tmp_path], older=False)[name].series
    assert "zero_activations" in load([tmp_path])[name].series  # figures still draw them


def test_a_better_rival_is_noticed() -> None:
    ahead = made_up("input-permuted-mnist", STORY, {"shrink-and-perturb": 0.73})
    assert verdict(2, ahead) == NO
    near = made_up("input-permuted-mnist", STORY, {"shrink-and-perturb": 0.705})
    assert verdict(2, near) == YES


def test_every_rival_is_asked_and_not_only_the_nearest() -> None:
    """One that is behind on average, but not surely, leaves open whether it is the better one."""
    results = made_up("input-permuted-mnist", STORY, {"adamw": 0.69})
    words = "competitive with every method"
    assert finding(2, words, results).verdict == YES
    unsure = {
        seed: curve + 0.2 * (seed - 2) - 0.1
        for seed, curve in results.of("adamw", "accuracy").items()
    }
    series = {"accuracy": {**results.series["accuracy"], "adamw": unsure}}
    found = finding(2, words, dataclasses.replace(results, series=series))
    assert found.verdict == UNKNOWN
    assert found.found is not None
    assert found.found.estimate == pytest.approx(0, abs=0.002)  # the nearest one's


def test_what_is_not_seen_refutes_only_if_it_would_be_small() -> None:
    """The margin is ours, and so judged under half and twice of it."""
    flat = made_up("label-permuted-emnist", {"sgdw": 0.0}, seeds=8)
    line = np.linspace(0, 1, TASKS)
    curves = {s: c + 0.004 * (s - 3.5) * line for s, c in flat.of("sgdw", "accuracy").items()}
    flat = dataclasses.replace(flat, series={"accuracy": {"sgdw": curves}})
    found = finding(6, "SGDW decays", flat)
    assert found.found is not None
    assert 0.005 < -found.found.low < 0.01  # it may have lost half a point, and not a whole one
    assert (found.verdict, found.ours) == (NO, (UNKNOWN, NO))


def test_little_data_is_not_evidence() -> None:
    assert verdict(2) == UNKNOWN
    for seeds in range(1, FEWEST + 1):
        few = made_up("input-permuted-mnist", STORY, seeds=seeds)
        assert verdict(2, few) == (YES if seeds == FEWEST else UNKNOWN)
    assert verdict(2, made_up("input-permuted-mnist", STORY, tasks=3)) == UNKNOWN
    some = {arm: STORY[arm] for arm in ("upgd", "s-ewc")}
    assert verdict(2, made_up("input-permuted-mnist", some)) == UNKNOWN


@pytest.mark.parametrize("story", [STORY, {**STORY, "upgd": -0.2}], ids=["true", "false"])
def test_short_runs_give_statistics_and_no_verdict(story: dict[str, float]) -> None:
    whole = judged(2, made_up("input-permuted-mnist", story))
    half = judged(2, made_up("input-permuted-mnist", story, tasks=TASKS // 2))
    short = judged(2, made_up("input-permuted-mnist", story, tasks=TASKS // 2 - 1))
    assert whole.verdict == half.verdict != UNKNOWN
    assert {f.verdict for f in short.findings} == {UNKNOWN, TOLD}
    assert all(f.found is not None for f in short.findings)
    assert whole.data == f"all steps, {SEEDS} seeds"
    assert "too short" in short.data
    assert short.data in table([short])[-1]


def test_seeds_without_the_metrics_do_not_count_as_data() -> None:
    many = made_up("input-permuted-mnist", STORY)
    few = made_up("input-permuted-mnist", STORY, metric="zero_activations", seeds=3)
    diagnostics = dict.fromkeys(("zero_activations", "gradient_l0"), few.series["zero_activations"])
    some = Results(many.name, many.window, {**many.series, **diagnostics})
    assert [judged(4, many).data, judged(2, some).data] == ["-", f"all steps, {SEEDS} seeds"]
    assert judged(4, some).data == "all steps, 3 seeds"


def test_of_several_experiments_the_short_ones_do_not_count() -> None:
    trends = {method: -0.02 * i for i, method in enumerate(METHODS)}
    whole = made_up("input-permuted-mnist", trends)
    short = made_up("label-permuted-emnist", trends, tasks=20)
    found = judged(8, whole, short)
    assert found.data.startswith("2 of 4 experiments: ")
    assert finding(8, "Input-permuted MNIST: forgetting", whole, short).verdict == NO
    other = finding(8, "Label-permuted EMNIST: forgetting", whole, short)
    assert (other.verdict, other.found is None) == (UNKNOWN, False)


def test_few_seeds_have_no_interval() -> None:
    assert np.isnan(mean_interval([1.0, 2.0]).low)
    assert np.isfinite(mean_interval([1.0, 2.0, 4.0]).low)
    two = Finding("x", mean_interval([0.01, 0.03]), UNKNOWN)
    assert shown(two) == "2.0 points"


def test_short_runs_compare_quarters() -> None:
    assert parts(50) == (range(10, 30), range(30, 50))
    assert parts(12) == (range(3, 6), range(9, 12))
    assert parts(3) is None
    assert late_parts(200) == (range(90, 110), range(180, 200))
    assert late_parts(12) == (range(4, 7), range(9, 12))
    assert late_parts(3) is None


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
    assert {name: getattr(evidence, name)(found) for name in expected} == expected


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
    few = dict(zip(METHODS, [0.5, 0.9, *[0.6, 0.61] * 4], strict=True))
    level = dict(zip(METHODS, [0.5, 0.9, *[0.62, 0.6] * 4], strict=True))
    mixed = both(
        made_up("input-permuted-mnist", flat, few),
        made_up("input-permuted-mnist", flat, level, "plasticity"),
    )
    over_seeds, over_methods = judged(3, mixed).findings
    assert over_seeds.verdict == YES
    assert over_methods.found is not None
    r = over_methods.found.estimate
    expected = np.tanh(np.arctanh(r) + stats.norm.ppf([0.025, 0.975]) / np.sqrt(7))
    np.testing.assert_allclose(over_methods.found[1:], expected, rtol=1e-6)
    assert over_methods.verdict == TOLD
    assert judged(3, mixed).strict == "holds (1 of 1)"
    assert verdict(3, both(accuracy, other)) == NO
    assert verdict(3, accuracy) == UNKNOWN


def test_what_joins_all_methods_tells_how_few_seeds_all_have() -> None:
    results = made_up("label-permuted-emnist", dict.fromkeys(METHODS, 0.0), metric="plasticity")
    assert "which all have" not in finding(6, "majority", results).statement
    some = results.of("s-rwalk", "plasticity")
    fewer = {**results.series["plasticity"], "s-rwalk": {s: some[s] for s in range(3)}}
    found = finding(6, "majority", dataclasses.replace(results, series={"plasticity": fewer}))
    assert found.statement.endswith("(3 seeds, which all have)")


@pytest.mark.parametrize(
    ("last", "expected"), [(0.1, YES), (-0.1, NO), (0.0, UNKNOWN)], ids=["up", "down", "flat"]
)
def test_all_learners_improve_if_the_least_does(last: float, expected: str) -> None:
    results = made_up("label-permuted-cifar10", dict.fromkeys(METHODS, 0.2) | {"s-si": last})
    found = finding(5, "all learners improve", results)
    assert found.verdict == expected
    assert found.found is not None
    assert found.found.estimate == pytest.approx(0.85 * last, abs=0.005)
    lost = gone(results, "s-si", range(SEEDS))
    assert finding(5, "all learners improve", lost).verdict == NO


def test_rank_among_ten() -> None:
    trends = {method: -0.02 * i for i, method in enumerate(METHODS)}  # the later the more forgotten
    results = made_up("input-permuted-mnist", trends)
    rank = finding(8, "Input-permuted MNIST: forgetting", results)
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
    only = dict.fromkeys(("shrink-and-perturb", "pgd", "n-upgd"), 0.0)
    levels = dict.fromkeys(only, 0.6)
    mini = made_up("label-permuted-mini-imagenet", {**trends, **only}, levels)
    mini_lost = made_up(
        "label-permuted-mini-imagenet", dict.fromkeys(METHODS, -0.2), metric="plasticity"
    )
    assert verdict(7, both(mini, mini_lost)) == YES
    decays = made_up("label-permuted-mini-imagenet", {**trends, **only, "pgd": -0.1}, levels)
    assert finding(7, "PGD maintains", decays).verdict == NO


# ------------------------------------------------------------------------------- other claims
def test_gating_alone_is_judged_where_it_is_another_arm() -> None:
    """On EMNIST SGD+UG is UPGD-W−WP, and still not UPGD-W."""
    for name in MAIN[1:]:
        ablation = f"ablation-{name}"
        arms = EXPERIMENTS[ablation].arms
        there = [arm.name for arm in arms if arm.name not in EXPERIMENTS[ablation].twins()]
        results = made_up(ablation, dict.fromkeys(there, 0.1))
        assert finding(12, f"{LONG[name]}: SGD+UG keeps improving", results).verdict == YES
        assert finding(12, f"{LONG[name]}: decay and perturbation matter", results).verdict == YES


def test_an_ablation_takes_more_seeds_of_the_same_learners() -> None:
    """SGD+WP is PGD, which the main table has with more seeds, or with fewer, or shorter runs."""
    name = "label-permuted-emnist"
    mine = made_up(f"ablation-{name}", dict.fromkeys(("sgd", "sgd+wp", "sgd+ug"), 0.1))

    def known(**made: int) -> tuple[Results, Judged]:
        main = made_up(name, {"pgd": 0.3, "sgdw": 0.3}, **made)
        found = {each.name: each for each in (mine, main)}
        return claims._completed(found, mine.name), judged(12, *found.values())

    more, told = known(seeds=SEEDS + 3)
    assert len(more.of("sgd+wp", "accuracy")) == SEEDS + 3
    assert told.data.endswith(f"{SEEDS} to {SEEDS + 3} seeds")
    assert more.of("sgd", "accuracy") is mine.of("sgd", "accuracy")
    lead = next(f for f in told.findings if "EMNIST: SGD+WP beats SGD" in f.statement)
    assert lead.found is not None
    assert lead.found.estimate == pytest.approx(0.1, abs=0.001)  # of the seeds that both have
    for other in (known(seeds=SEEDS), known(seeds=SEEDS + 3, tasks=TASKS // 2)):
        assert other[0].of("sgd+wp", "accuracy") is mine.of("sgd+wp", "accuracy")


def test_arms_that_are_the_same_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ablation-label-permuted-emnist"
    [full] = [arm for arm in EXPERIMENTS[name].arms if arm.name == "upgd"]
    same = tuple(
        dataclasses.replace(full, name=arm.name) if arm.name == "sgd+ug" else arm
        for arm in EXPERIMENTS[name].arms
    )
    changed = dataclasses.replace(EXPERIMENTS[name], arms=same)
    before = len(judged(12).findings)
    monkeypatch.setitem(EXPERIMENTS, name, changed)  # type: ignore[arg-type]
    assert len(judged(12).findings) == before - 1


def test_toys_name_their_arms() -> None:
    texts = [f.statement for f in judged(10).findings]
    assert all(text.startswith(("changing inputs: ", "changing sign: ")) for text in texts)
    for rival in ("Reference", "SGD", "S&P", "PGD", "N-UPGD"):
        assert f"changing inputs: UPGD beats {rival} in loss" in texts
    assert "changing sign: UPGD, 2nd order beats UPGD in loss" in texts
    assert not any("-W" in text for text in texts)


def test_the_toys_losses_are_compared() -> None:
    order = ("upgd-2nd", "upgd", "n-upgd", "pgd", "shrink-and-perturb", "reference", "sgdw")
    levels = {arm: 0.1 + 0.05 * place for place, arm in enumerate(order)}
    first = dict.fromkeys(order, 0.0) | {"sgdw": 0.1, "upgd": -0.01}
    kept = made_up(TOYS[0], {"upgd": 0.0}, metric="plasticity", tasks=250)
    inputs = both(made_up(TOYS[0], first, levels, "loss", tasks=250), kept)
    second = dict.fromkeys(order, 0.0) | {"sgdw": 0.1, "upgd": -0.03}
    sign = made_up(TOYS[1], second, levels, "loss", tasks=250)
    assert verdict(10, inputs, sign) == YES
    flat = made_up(TOYS[1], {**second, "upgd": 0.0}, levels, "loss", tasks=250)
    assert finding(10, "sign: UPGD keeps improving", flat).verdict == NO
    assert judged(10, inputs, flat).verdict == PARTLY
    lost = made_up(TOYS[0], {"upgd": -0.05}, metric="plasticity", tasks=250)
    assert finding(10, "UPGD maintains its plasticity", both(inputs, lost)).verdict == NO
    levels["shrink-and-perturb"] = 0.12
    assert verdict(10, made_up(TOYS[0], first, levels, "loss", tasks=250), sign) == NO


def test_who_falls_below_is_seen_in_the_last_tasks() -> None:
    """Adam begins far above its restarts and ends below them."""
    tasks = 250
    falls = np.linspace(0.95, 0.75, tasks).repeat(100)
    curves = {"adam": falls, "adam-restarts": np.full(len(falls), 0.8), "upgd": falls[::-1]}
    rng = np.random.default_rng(0)
    noisy = {
        arm: {seed: curve + 1e-3 * rng.standard_normal(len(curve)) for seed in range(SEEDS)}
        for arm, curve in curves.items()
    }
    results = Results("figure-1", 600, {"accuracy": noisy})
    assert finding(14, "Adam is much worse", results).verdict == YES
    assert finding(14, "UPGD-W is level with Adam-Restarts or above", results).verdict == YES


# --------------------------------------------------------------------------------- divergence
def gone(results: Results, arm: str, seeds: range) -> Results:
    """The same results with seeds of an arm that diverged."""
    series = {
        metric: {
            name: {s: x for s, x in curves.items() if name != arm or s not in seeds}
            for name, curves in arms.items()
        }
        for metric, arms in results.series.items()
    }
    return dataclasses.replace(results, series=series, diverged={arm: list(seeds)})


def test_an_arm_with_seeds_that_diverged_does_not_win() -> None:
    story = made_up("input-permuted-mnist", STORY)
    for arm, name, number in (("n-upgd", "N-UPGD-W", 1), ("shrink-and-perturb", "S&P", SEEDS)):
        results = gone(story, arm, range(number))
        found = finding(2, f"{name} maintains", results)
        assert found.verdict == NO
        assert f"({name}: {number} of {SEEDS} seeds diverged)" in found.statement
    assert finding(2, "competitive", gone(story, "upgd", range(1))).verdict == NO
    rival = gone(story, "adamw", range(SEEDS))
    assert finding(2, "competitive", rival).verdict == YES  # nobody is behind who has diverged
    few = gone(made_up("input-permuted-mnist", STORY, seeds=2), "upgd", range(1))
    assert verdict(2, few) == UNKNOWN


@pytest.mark.parametrize(
    ("lost", "better", "expected"),
    [(3, False, YES), (2, True, YES), (2, False, NO), (1, False, NO), (5, False, YES)],
)
def test_an_arm_that_diverged_is_beaten(lost: int, better: bool, expected: str) -> None:
    """By half of its seeds, or else by those that are left."""
    levels = {"upgd": 0.8 if better else 0.6, "sgdw": 0.7}
    flat = dict.fromkeys(levels, 0.0)
    results = gone(made_up("stationary-mnist", flat, levels), "sgdw", range(lost))
    assert finding(11, "UPGD beats SGD", results).verdict == expected
    other = gone(made_up("stationary-mnist", flat, levels), "upgd", range(lost))
    assert finding(11, "UPGD beats SGD", other).verdict == NO


def test_tasks_longer_than_windows() -> None:
    curve = {0: np.repeat([0.1, 0.3], 100), 1: np.repeat([0.2, 0.4], 100)}
    results = Results("figure-1", 600, {"accuracy": {"adam": curve}})
    assert [x.tolist() for x in results.by_task("adam", "accuracy").values()] == [
        pytest.approx([0.1, 0.3]),
        pytest.approx([0.2, 0.4]),
    ]


# ------------------------------------------------------------------------------ experiments
def test_arms_name_every_hyperparameter() -> None:
    from upgd.optim.registry import get as get_method
    from upgd.optim.registry import scalars

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
    assert EXPERIMENTS["toy-changing-sign"].shortest == 4 * 4_000


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
    with pytest.raises(ValueError, match="not a table of results"):
        read(tmp_path / "x.gz", "x")
    header = gzip.compress(b"arm,seed,samples,accuracy\n")
    broken = {"half": first[: len(first) // 2], "plain": b"arm,seed", "empty": gzip.compress(b"")}
    broken["words"] = header + gzip.compress(b"upgd,0,5000,high\n")
    broken["flipped"] = first[:200] + bytes(b ^ 255 for b in first[200:])
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            read(tmp_path / name, results.name)


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


@pytest.mark.parametrize(
    ("options", "state", "stands_in"),
    [
        ({"stride": 10, "held_out": 5}, "done", True),
        ({"stride": 10, "held_out": 5, "task_length": 50}, "done", False),
        ({"stride": 10}, "diverged", True),
        ({"stride": 20}, "done", False),
        ({}, "done", False),
        ({"stride": 10}, "failed", False),
    ],
)
def test_a_run_that_measures_as_much_is_not_run_again(
    options: dict[str, int], state: str, stands_in: bool, tmp_path: Path
) -> None:
    def spec(seed: int, **more: int) -> RunSpec:
        return RunSpec("input-permuted-mnist", "upgd", {"lr": 1}, seed, 100, more)

    with Ledger.open(tmp_path) as ledger:
        ledger.add([spec(0, **options)])
        [claim] = ledger.claim("me", 60)
        if state == "failed":
            ledger.fail(claim, "why", retry=False)
        elif state == "diverged":
            ledger.finish(claim, Result("eager", diverged_at=7))
        else:
            ledger.finish(claim, Result("eager"))
        wanted = [spec(0, stride=10), spec(1, stride=10)]
        assert lacking(wanted, ledger.runs()) == (wanted[1:] if stands_in else wanted)
    assert lacking([spec(0), spec(0, stride=10), spec(0, held_out=5)], []) == [
        spec(0, stride=10),
        spec(0, held_out=5),
    ]


def test_which_runs_diverged_is_kept(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["input-permuted-mnist"]
    runs = [run for arm in ("sgdw", "upgd") for run in experiment.specs(seeds=3)[arm]]
    with Ledger.open(tmp_path) as ledger:
        ledger.add(runs)
        for claim in ledger.claim("me", 60, limit=len(runs)):
            result = Result("eager", "cpu", series={"accuracy": Series(np.zeros(9), 5_000)})
            if claim.spec.method == "sgdw" or claim.spec.seed == 1:
                ledger.finish(claim, dataclasses.replace(result, diverged_at=45_000))
            else:
                ledger.finish(claim, result)
        found = collect(ledger, experiment)
    assert found is not None
    assert found.arms == ("upgd",)
    assert list(found.of("upgd", "accuracy")) == [0, 2]
    assert {arm: sorted(seeds) for arm, seeds in found.diverged.items()} == {
        "sgdw": [0, 1, 2],
        "upgd": [1],
    }
    write(found, tmp_path / "x.gz")
    assert read(tmp_path / "x.gz", found.name).diverged == found.diverged
    assert evidence.diverged(found, "upgd") == (1, 3)
    assert evidence.has_lost(found, "sgdw")


def test_findings_read_well() -> None:
    found = Finding("UPGD-W holds", Interval(-0.0004, -0.001, 0.0002), YES)
    assert str(found) == "UPGD-W holds: 0.0 points [−0.1, 0.0], confirmed"
    assert str(Finding("x", None, UNKNOWN)) == "x: -, open"
    assert shown(found._replace(unit=PERCENT)) == "0.0% [−0.1, 0.0]"
    tiny = Finding("x", Interval(1.5e-16, float("nan"), float("nan")), TOLD, PLAIN)
    assert shown(tiny) == "1.5e−16"


def test_what_tables_say_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged once; again where a table changes or the kept file is broken."""
    monkeypatch.setenv("UPGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(claims, "CLAIMS", [BY_NUMBER[2], BY_NUMBER[3]])
    place = tmp_path / "results" / "input_permuted_mnist"
    place.mkdir(parents=True)
    read_by: list[str] = []

    def judged() -> tuple[str, list[str]]:
        read_by.clear()
        return str(judging.judge([tmp_path / "results"], read_by.append)), list(read_by)

    for level in (0.5, 0.6):
        curves = {
            arm: {seed: np.full(10, level + seed / 100) for seed in range(3)} for arm in METHODS
        }
        write(Results("input-permuted-mnist", 5000, {"accuracy": curves}), place / "series.csv.gz")
        first, work = judged()
        assert work[0] == f"reading {place}"
        assert work[1:] == [f"judging claim {n}" for n in (1, 2, 3)]
        assert judged() == (first, [])
    for file in (tmp_path / "cache" / "claims").iterdir():
        file.write_text("[[")
    assert judged() == (first, work)
    Ledger.open(tmp_path / "results" / "study").close()  # which may change at any time
    assert judged()[1] == judged()[1] != []


def test_findings_are_kept_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPGD_CACHE", str(tmp_path))
    made = [
        Finding("a statement", Interval(0.1, 0.05, 0.3), YES, PLAIN, AHEAD, "part", (YES, NO)),
        Finding("without an interval", Interval(0.1, float("nan"), float("nan")), TOLD),
        Finding("nothing found", None, UNKNOWN, PERCENT),
    ]
    calls: list[int] = []

    def compute() -> list[Finding]:
        calls.append(1)
        return made

    for _ in range(2):
        found = keep("findings", (), compute, Finding.from_rows)
        assert str(found) == str(made)
    assert len(calls) == 1
