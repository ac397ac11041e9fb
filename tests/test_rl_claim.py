"""Claim 9's statistics on made-up curves, where what is true is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upgd.ledger import Ledger, Result, Series
from upgd.metrics import FEWEST, mean_interval
from upgd.paper.evidence import falling
from upgd.paper.experiments import ENVIRONMENTS, EXPERIMENTS, agents_name
from upgd.paper.policy_collapse import (
    HARDLY,
    LONG,
    curves,
    fall,
    falls,
    findings,
    gain,
    gains,
    has_learned,
    is_long,
    numbers,
)
from upgd.paper.results import Results, collect, read, write
from upgd.paper.verdicts import NO, UNKNOWN, YES
from upgd.rl.collapse import collapse, filled, over_seeds, tenths

WINDOWS = 146
T = np.linspace(0, 1, WINDOWS)
RISING = 3000 * T
LEVEL = np.full(WINDOWS, 1000.0)
SATURATING = 2000 * (1 - np.exp(-8 * T))
COLLAPSING = np.where(T < 0.4, 5000 * T, 2000 - 2000 * (T - 0.4))


def noisy(curve: Any, seeds: int, noise: float, seed: int) -> Any:
    """Seeds around a curve; what an agent does lasts, so neighbouring windows are alike."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(seeds, WINDOWS))
    for k in range(1, WINDOWS):
        drawn[:, k] = 0.9 * drawn[:, k - 1] + np.sqrt(1 - 0.81) * drawn[:, k]
    return curve + noise * drawn


def shares(curve: Any, noise: float, judge: Callable[[Any], str], repeats: int = 200) -> Any:
    """How often noise around a curve is judged to hold, and not to."""
    verdicts = [judge(noisy(curve, 10, noise, seed)) for seed in range(repeats)]
    return verdicts.count(YES) / repeats, verdicts.count(NO) / repeats


def falls_after_peak(returns: Any) -> str:
    return falling(fall(returns), HARDLY)


def keeps_improving(returns: Any) -> str:
    return verdicts(made(ada_upgd=returns))[1]


# ---------------------------------------------------------------------------- judgements
def test_a_collapse_is_found_and_a_rise_is_none() -> None:
    found = shares(COLLAPSING, 300, falls_after_peak, 40)
    assert found == (1, 0)
    assert shares(RISING, 300, falls_after_peak, 40)[0] == 0
    assert shares(RISING, 300, keeps_improving, 40) == (1, 0)
    assert shares(COLLAPSING, 300, keeps_improving, 40) == (0, 1)


@pytest.mark.parametrize("curve", [LEVEL, SATURATING], ids=["level", "saturating"])
def test_noise_alone_is_no_collapse(curve: Any) -> None:
    """A 95% interval lies below 0 by chance in 2.5% of cases; a few more are chance, too."""
    wrong, _ = shares(curve, 400, falls_after_peak)
    assert wrong <= 0.06
    # The obvious statistic finds one nearly always.
    drops = [
        mean_interval([collapse(c)["drop_after_peak"] for c in noisy(curve, 10, 400, seed)]).low
        for seed in range(50)
    ]
    assert np.mean(np.array(drops) > 0) > 0.9


@pytest.mark.parametrize(
    ("seeds", "repeats"), [(5, 2000), pytest.param(40, 400, marks=pytest.mark.slow)]
)
def test_intervals_of_falls_are_wide_enough(seeds: int, repeats: int) -> None:
    """Below 0 in 2.5% of cases; seeds choose each other's peaks, which Student does not know."""
    rng, jackknifed, students = np.random.default_rng(3), 0, 0
    drawn = rng.normal(size=(repeats * seeds, WINDOWS))
    for k in range(1, WINDOWS):
        drawn[:, k] = 0.9 * drawn[:, k - 1] + np.sqrt(1 - 0.81) * drawn[:, k]
    curve, ramp = 2000 * (1 - np.exp(-20 * T)), 1 - np.exp(-10 * T)
    levels = 300 * rng.normal(size=(repeats * seeds, 1))
    for returns in (curve + ramp * (400 * drawn + levels)).reshape(repeats, seeds, WINDOWS):
        found = fall(returns)
        assert found is not None
        jackknifed += found.high < 0
        students += mean_interval(falls(returns)).high < 0
    error = np.sqrt(0.025 * 0.975 / repeats)
    assert jackknifed / repeats < 0.025 + 2 * error
    assert students / repeats > 0.025 + 2 * error


def test_noise_alone_is_no_improvement_and_no_verdict() -> None:
    yes, no = shares(LEVEL, 400, keeps_improving)
    assert yes <= 0.06
    assert no <= 0.06
    _, no = shares(LEVEL, 400, falls_after_peak)
    assert no <= 0.06


def test_the_fall_of_level_curves_is_zero_on_average() -> None:
    means = [falls(noisy(LEVEL, 5, 400, seed)).mean() for seed in range(400)]
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means)) < 3 * error


def test_a_clear_plateau_is_neither_a_fall_nor_an_improvement() -> None:
    calm = noisy(2000 * (1 - np.exp(-20 * T)), 20, 40, 0)
    assert falls_after_peak(calm) == NO
    assert keeps_improving(calm) == NO


def test_statistics_are_what_they_say() -> None:
    """Against the definition, written out seed by seed."""
    returns = noisy(COLLAPSING, 4, 300, 1)
    size = round(WINDOWS / 10)
    for i, own in enumerate(returns):
        others = np.delete(returns, i, 0).mean(0)
        starts = range(WINDOWS - size + 1)
        best = max(starts, key=lambda start: others[start : start + size].mean())
        expected = own[-size:].mean() - own[best : best + size].mean()
        assert falls(returns)[i] == pytest.approx(expected)
        middle = own[int(0.4 * WINDOWS) : int(0.6 * WINDOWS)]
        assert gains(returns)[i] == pytest.approx(own[-size:].mean() - middle.mean())
        assert collapse(own)["peak_return"] == pytest.approx(
            max(own[start : start + size].mean() for start in starts)
        )
        assert collapse(own)["final_return"] == pytest.approx(own[-size:].mean())


# ------------------------------------------------------------------------------ the claim
def made(windows: int = WINDOWS, window: int = 20480, **arms: Any) -> Results:
    series = {
        name.replace("_", "-"): {seed: curve[:windows] for seed, curve in enumerate(returns)}
        for name, returns in arms.items()
    }
    return Results(agents_name("Hopper"), window, {"return": series})


def verdicts(results: Results) -> list[str]:
    found = findings({agents_name("Hopper"): results})
    return [f.verdict for f in found if f.statement.startswith("Hopper:")]


def test_the_claim_is_judged_environment_by_environment() -> None:
    fallen, risen = noisy(COLLAPSING, 10, 300, 0), noisy(RISING, 10, 300, 1)
    good = made(adam=fallen, ada_upgd=risen, ada_upgd_authors=risen)
    assert verdicts(good) == [YES, YES, YES]
    assert verdicts(made(adam=risen, ada_upgd=fallen)) == [NO, NO, UNKNOWN]
    every = findings({agents_name("Hopper"): good})
    assert len(every) == 3 * len(ENVIRONMENTS)
    assert {f.verdict for f in every if not f.statement.startswith("Hopper:")} == {UNKNOWN}


def test_short_runs_and_single_seeds_give_no_verdict() -> None:
    fallen, risen = noisy(COLLAPSING, 10, 300, 0), noisy(RISING, 10, 300, 1)
    short = made(window=2048, adam=fallen, ada_upgd=risen, ada_upgd_authors=risen)
    assert WINDOWS * 2048 < LONG
    assert verdicts(short) == [UNKNOWN] * 3
    found = findings({agents_name("Hopper"): short})
    assert all(f.found is not None for f in found if f.statement.startswith("Hopper:"))
    one = made(adam=fallen[:1], ada_upgd=risen[:1], ada_upgd_authors=risen[:1])
    assert verdicts(one) == [UNKNOWN] * 3


def test_what_rises_and_then_falls_does_not_keep_improving() -> None:
    late = noisy(np.where(T < 0.75, 2000 * T / 0.75, 2000 - 600 * (T - 0.75) / 0.25), 10, 30, 0)
    risen = gain(late)
    assert risen is not None
    assert risen.low > 0
    found = findings({agents_name("Hopper"): made(ada_upgd=late)})
    text = "Hopper: AdaUPGD keeps improving (its fall)"
    [mine] = [f for f in found if f.statement.startswith(text)]
    assert (mine.found, mine.verdict) == (fall(late), NO)


@pytest.mark.parametrize(
    ("windows", "window", "long"),
    [(146, 20480, True), (145, 20480, False), (1, 2_048_000, False), (1464, 2048, True)],
)
def test_long_runs_are_not_short(windows: int, window: int, long: bool) -> None:
    assert is_long(made(window=window), np.zeros((3, windows))) == long


def test_nothing_learned_is_nothing_to_lose() -> None:
    sinking = noisy(-1000 * T, 5, 1, 0)
    assert fall(sinking) is None
    assert verdicts(made(adam=sinking)) == [UNKNOWN] * 3


@pytest.mark.parametrize("best", [[2000, 2500], [500, 1000, 5000]])
def test_few_seeds_that_all_rise_have_learned(best: list[int]) -> None:
    returns = np.outer(best, np.minimum(T / 0.2, 1)) + noisy(0, len(best), 5, 0)
    assert has_learned(returns)
    assert (fall(returns) is None) == (len(best) < FEWEST)
    alone = [has_learned(noisy(LEVEL, 5, 400, seed)) for seed in range(200)]
    assert sum(alone) / 200 < 0.1


# -------------------------------------------------------------------------------- divergence
def test_agents_that_diverged_count_as_collapsed() -> None:
    risen = noisy(RISING, 10, 300, 1)
    some = {seed: curve if seed > 8 else curve[:73] for seed, curve in enumerate(risen)}
    results = Results(
        agents_name("Hopper"),
        20480,
        {"return": {"ada-upgd": some, "adam": dict(enumerate(risen))}},
        {"ada-upgd": range(10)},  # the last of them in its last window, which is not whole
    )
    returns = curves(results, "ada-upgd")
    assert returns is not None
    np.testing.assert_array_equal(returns[:9, 73:], np.repeat(risen[:9, :1], 73, axis=1))
    np.testing.assert_array_equal(returns[9:], risen[9:])
    found = findings({results.name: results})
    [mine] = [f for f in found if f.statement.startswith("Hopper: AdaUPGD keeps")]
    assert "(10 of 10 agents diverged)" in mine.statement
    assert mine.verdict == NO
    text = "\n".join(numbers(results))
    assert "| AdaUPGD | 10 (10 diverged) | " in text
    assert "back where it began" in text


def test_an_agent_that_diverged_at_once_began_as_the_others() -> None:
    risen = noisy(RISING, 3, 10, 1)
    known = {"adam": {0: risen[0], 1: risen[1], 2: np.zeros(0)}}
    results = Results(agents_name("Hopper"), 20480, {"return": known}, {"adam": [2]})
    returns = curves(results, "adam")
    assert returns is not None
    np.testing.assert_allclose(returns[2], risen[:2, 0].mean())


def test_a_table_keeps_who_diverged(tmp_path: Path) -> None:
    series = {"return": {"adam": {0: np.arange(4.0), 1: np.arange(2.0)}}}
    known = Results(agents_name("Hopper"), 20480, series, {"adam": [1, 2], "ada-upgd": [0]})
    write(known, tmp_path / "x.csv.gz")
    found = read(tmp_path / "x.csv.gz", known.name)
    assert found.diverged == known.diverged
    assert found.arms == known.arms
    for seed, curve in series["return"]["adam"].items():
        np.testing.assert_array_equal(found.of("adam", "return")[seed], curve)


def test_what_a_study_has_of_agents(tmp_path: Path) -> None:
    """Those that diverged, up to there; of several lengths the longest that most arms have."""
    experiment = EXPERIMENTS[agents_name("Hopper")]
    runs = [spec for specs in experiment.specs(seeds=4).values() for spec in specs]
    longer = dataclasses.replace(runs[0], steps=10_000_000)
    shorter = [spec for specs in experiment.specs(0.5, seeds=6).values() for spec in specs]
    with Ledger.open(tmp_path) as ledger:
        ledger.add([*runs, longer, *shorter])
        for claim in ledger.claim("me", 60, limit=100):
            series = {"return": Series(RISING, 20480)}
            if claim.spec.hyper == experiment.arms[0].hyper and claim.spec.seed == 1:
                series = {"return": Series(RISING[:74], 20480)}
                ledger.finish(
                    claim, Result("ppo-cpu", series=series, wall=1.0, diverged_at=74 * 20480)
                )
            else:
                ledger.finish(claim, Result("ppo-cpu", series=series, wall=1.0))
        results = collect(ledger, experiment)
    assert results is not None
    assert {arm: len(results.of(arm, "return")) for arm in results.arms} == {
        arm.name: 4 for arm in experiment.arms
    }
    assert results.diverged == {"adam": [1]}
    assert len(results.of("adam", "return")[1]) == 73  # it diverged in the last of them


def test_windows_without_an_episode_are_filled() -> None:
    np.testing.assert_array_equal(filled([np.nan, 1, np.nan, 3]), [1, 1, 1, 3])
    gap = noisy(RISING, 3, 100, 0)
    gap[1, 10:12] = np.nan
    empty = np.full(WINDOWS, np.nan)
    found = curves(made(adam=np.vstack([gap, empty])), "adam")
    assert found is not None
    assert found.shape == (3, WINDOWS)
    assert np.isfinite(found).all()
    assert collapse(empty) == {}
    assert over_seeds([{}]) == {}
    assert len(tenths(np.ones(1))) == 1


def test_a_page_has_a_row_for_each_arm() -> None:
    results = made(adam=noisy(COLLAPSING, 3, 10, 0), ada_upgd=noisy(RISING, 3, 10, 1))
    text = "\n".join(numbers(results))
    assert "| Adam | 3 | " in text
    assert "| AdaUPGD | 3 | " in text
    assert "−" in text


def test_two_seeds_are_shown_by_themselves() -> None:
    two = made(adam=np.outer([1000, 2000], np.minimum(T / 0.2, 1)), ada_upgd=[SATURATING])
    rows = numbers(two)
    assert "| Adam | 2 | 1000, 2000 | 1000, 2000 | 0, 0 | +0.0, +0.0 | +0.0, +0.0 |" in rows
    [one] = [row for row in rows if row.startswith("| AdaUPGD |")]
    assert one.startswith("| AdaUPGD | 1 | 1999 | 1999 |")
    assert one.endswith("| - | - |")


# ---------------------------------------------------------------------------- experiments
RIVALS = {
    "adam-99": {"beta1": 0.99, "beta2": 0.99},
    "adam-half": {"lr": 1.5e-4},
    "adam+wd": {"weight_decay": 0.01},
}


def test_the_experiments_are_the_papers() -> None:
    assert {"Humanoid", "HumanoidStandup"} < set(ENVIRONMENTS)
    for environment in ENVIRONMENTS:
        constant, annealed = (EXPERIMENTS[agents_name(environment, a)] for a in (False, True))
        assert constant.options == {"anneal": False}
        assert annealed.options == {}
        arms = {arm.name: arm for arm in constant.arms}
        adam, printed, authors = (
            arms[name].hyper for name in ("adam", "ada-upgd", "ada-upgd-authors")
        )
        for hyper in (adam, printed, authors):
            assert (hyper["beta1"], hyper["beta2"], hyper["eps"]) == (0.9, 0.999, 1e-5)
        assert adam["lr"] == 2 * printed["lr"] == 3e-4  # the paper's α is twice the lr
        assert adam["weight_decay"] == printed["weight_decay"] == 0
        assert printed["sigma"] == authors["sigma"] == 0.001
        trace = 0.9 if environment.startswith("Humanoid") else 0.999
        assert printed["beta_utility"] == authors["beta_utility"] == trace
        assert (authors["lr"], authors["weight_decay"]) == (3e-4, 1e-3)
        for name, changed in RIVALS.items():
            assert arms[name].hyper == {**adam, **changed}
        assert not RIVALS.keys() & {arm.name for arm in annealed.arms}
        assert {len(runs) for runs in constant.specs().values()} == {40}
        assert constant.specs(1 / 3)["adam"][0].steps == 1_000_000
