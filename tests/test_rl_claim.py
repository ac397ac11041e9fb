"""Claim 9's statistics on made-up curves, where what is true is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from upgd.metrics import mean_interval
from upgd.paper.evidence import NO, UNKNOWN, YES, falling, rising
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
    numbers,
)
from upgd.paper.results import Results
from upgd.rl.collapse import collapse, filled, over_seeds, smoothed

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
    return rising(gain(returns), HARDLY)


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


def test_nothing_learned_is_nothing_to_lose() -> None:
    sinking = noisy(-1000 * T, 5, 1, 0)
    assert fall(sinking) is None
    assert verdicts(made(adam=sinking)) == [UNKNOWN] * 3


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
    assert len(smoothed([1.0])) == 1


def test_a_page_has_a_row_for_each_arm() -> None:
    results = made(adam=noisy(COLLAPSING, 3, 10, 0), ada_upgd=noisy(RISING, 3, 10, 1))
    text = "\n".join(numbers(results))
    assert "| Adam | 3 | " in text
    assert "| AdaUPGD | 3 | " in text
    assert "−" in text


# ---------------------------------------------------------------------------- experiments
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
        assert adam["lr"] == printed["lr"] == 3e-4
        assert adam["weight_decay"] == printed["weight_decay"] == 0
        assert printed["sigma"] == authors["sigma"] == 0.001
        trace = 0.9 if environment.startswith("Humanoid") else 0.999
        assert printed["beta_utility"] == authors["beta_utility"] == trace
        assert (authors["lr"], authors["weight_decay"]) == (6e-4, 5e-4)
        assert {len(runs) for runs in constant.specs().values()} == {40}
        assert constant.specs(1 / 3)["adam"][0].steps == 1_000_000
