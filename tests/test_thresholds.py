"""Judgements of intervals, thresholds that are ours, and statistics behind statements."""

from __future__ import annotations

import numpy as np
import pytest

from upgd.metrics import Interval
from upgd.paper import evidence as ev
from upgd.paper import phrases, policy_collapse, utility_claim
from upgd.paper.claims import CLAIMS
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.results import Results
from upgd.paper.sets import MAIN, METHODS
from upgd.paper.verdicts import NO, UNKNOWN, YES, Finding, Verdict

nan = float("nan")


def test_the_interval_decides_and_not_the_estimate() -> None:
    for judge, sign in ((ev.above, 1), (ev.below, -1)):
        reaches = sorted((-0.1 * sign, 0.3 * sign))
        assert judge(Interval(0.1 * sign, *reaches)) == UNKNOWN
        assert judge(Interval(0.1 * sign, *sorted((0.01 * sign, 0.3 * sign)))) == YES
        assert judge(Interval(-0.1 * sign, *sorted((-0.01 * sign, -0.3 * sign)))) == NO
        assert judge(Interval(-0.1 * sign, *reaches)) == UNKNOWN
        assert judge(Interval(0.1, nan, nan)) == UNKNOWN


def around(value: float, half: float = 0.001) -> Interval:
    return Interval(value, value - half, value + half)


def flat(level: float, seeds: int = 5, name: str = MAIN[0], **arms: float) -> Results:
    """Level curves of all methods, with named ones elsewhere."""
    rng = np.random.default_rng(0)
    curves = {
        m: {s: arms.get(m, level) + 1e-4 * rng.standard_normal(200) for s in range(seeds)}
        for m in METHODS
    }
    return Results(name, 5_000, {"accuracy": curves})


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (phrases.strongly(around(0.69)), (YES, NO, NO)),
        (phrases.strongly(around(0.71)), (YES, YES, NO)),
        (phrases.strongly(around(0.34)), (NO, NO, NO)),
        (phrases.strongly(around(0.36)), (YES, NO, NO)),
        (phrases.strongly(around(0.86)), (YES, YES, YES)),  # 0.85 is half the way from 0.7 to 1
        (phrases.strongly(around(0.84)), (YES, YES, NO)),
        (phrases.among_the_best("x", Interval(3, 3, 3)), (NO, YES, YES)),
        (phrases.among_the_best("x", Interval(4, 4, 4)), (NO, NO, YES)),
        (phrases.among_the_best("x", Interval(1, 1, 1)), (YES, YES, YES)),
        (phrases.among_the_best("x", Interval(2, 2, 2)), (NO, YES, YES)),
        (phrases.among_the_best("x", Interval(6, 6, 6)), (NO, NO, YES)),
        (phrases.among_the_best("x", Interval(7, 7, 7)), (NO, NO, NO)),
        (phrases.among_the_best("x", Interval(3, 2, 4)), (NO, UNKNOWN, YES)),
        (phrases.slightly_above("x", around(0.424), 0.4), (YES, YES, YES)),
        (phrases.slightly_above("x", around(0.448), 0.4), (NO, YES, YES)),
        (phrases.slightly_above("x", around(0.452), 0.4), (NO, NO, YES)),
        (phrases.slightly_above("x", around(0.502), 0.4), (NO, NO, NO)),
        (phrases.slightly_above("x", around(0.398), 0.4), (NO, NO, NO)),
        (phrases.competitive(flat(0.7, upgd=0.696)), (YES, YES, YES)),
        (phrases.competitive(flat(0.7, upgd=0.694)), (NO, YES, YES)),
        (phrases.competitive(flat(0.7, upgd=0.685)), (NO, NO, YES)),
        (phrases.competitive(flat(0.7, upgd=0.675)), (NO, NO, NO)),
    ],
)
def test_thresholds_of_ours(finding: Finding, expected: tuple[Verdict, Verdict, Verdict]) -> None:
    """Under half of it, as it is, and under twice of it."""
    assert finding.ours is not None
    assert (finding.ours[0], finding.verdict, finding.ours[1]) == expected


@pytest.mark.parametrize(
    ("fall", "sgdw_falls", "upgd_does_not"),
    [
        (0.02, (NO, NO, NO), (YES, YES, YES)),
        (0.04, (YES, NO, NO), (NO, YES, YES)),
        (0.06, (YES, YES, NO), (NO, NO, YES)),
        (0.11, (YES, YES, YES), (NO, NO, NO)),
    ],
)
def test_what_is_substantial(
    fall: float, sgdw_falls: tuple[Verdict, ...], upgd_does_not: tuple[Verdict, ...]
) -> None:
    """Five points; half of it, itself and twice."""
    curve = 0.5 - fall * (np.arange(200) >= 100)
    arms = {m: {s: curve + 1e-4 * s for s in range(3)} for m in METHODS}
    table_ = {"gradient_l0": arms, "zero_activations": {m: {} for m in METHODS}}
    [claim] = [c for c in CLAIMS if c.number == 4]
    found = claim.check({MAIN[0]: Results(MAIN[0], 5_000, table_)})
    for words, expected in (
        ("UPGD-W: gradient ℓ0 does not fall", upgd_does_not),
        ("SGDW: gradient ℓ0 falls", sgdw_falls),
    ):
        [one] = [f for f in found if f.statement.startswith(words)]
        assert one.ours is not None
        assert (one.ours[0], one.verdict, one.ours[1]) == expected


@pytest.mark.parametrize(
    ("rise", "expected"),
    [(0.04, (YES, YES, YES)), (0.08, (NO, YES, YES)), (0.15, (NO, NO, YES)), (0.3, (NO, NO, NO))],
)
def test_what_gets_worse(rise: float, expected: tuple[Verdict, ...]) -> None:
    """A loss that rises by a tenth."""
    curve = 1 + rise * (np.arange(250) >= 125)
    name = "toy-changing-sign"
    results = Results(name, 4_000, {"loss": {"pgd": {s: curve * (1 + 1e-4 * s) for s in range(3)}}})
    [claim] = [c for c in CLAIMS if c.number == 10]
    [one] = [f for f in claim.check({name: results}) if "PGD does not get worse" in f.statement
             and "N-UPGD" not in f.statement]  # fmt: skip
    assert one.ours is not None
    assert (one.ours[0], one.verdict, one.ours[1]) == expected


@pytest.mark.parametrize(
    ("kind", "level", "expected"),
    [
        ("magnitude", 0.14, (YES, YES, YES)),
        ("magnitude", 0.28, (NO, YES, YES)),
        ("magnitude", 0.32, (NO, NO, YES)),
        ("magnitude", 0.62, (NO, NO, NO)),
        ("random", 0.004, (YES, YES, YES)),
        ("random", 0.008, (NO, YES, YES)),
        ("random", 0.012, (NO, NO, YES)),
        ("random", 0.022, (NO, NO, NO)),
    ],
)
def test_what_is_small_and_what_is_zero(
    kind: str, level: float, expected: tuple[Verdict, ...]
) -> None:
    data = {k: np.full((3, 20), 0.5) + 1e-4 * np.arange(3)[:, None] for k in utility_claim.LABELS}
    data[kind] = np.full((3, 20), level) + 1e-4 * np.arange(3)[:, None]
    start = {"magnitude": "weight magnitude is small", "random": "random is zero"}[kind]
    [one] = [f for f in utility_claim.claim(data, 1.0) if f.statement.startswith(start)]
    assert one.ours is not None
    assert (one.ours[0], one.verdict, one.ours[1]) == expected


def test_what_is_hardly_a_gain() -> None:
    """Five percent of what was learned: an interval that reaches 0 and ends below is none."""
    for high, expected in ((0.049, NO), (0.051, UNKNOWN)):
        assert ev.rising(Interval(0.01, -0.02, high), policy_collapse.HARDLY) == expected
        assert ev.falling(Interval(-0.01, -high, 0.02), policy_collapse.HARDLY) == expected


def lines(change: float, late: float, tasks: int = 200) -> np.ndarray:
    """A curve that changes in its first half and in its second half."""
    places = [0, 0.4 * tasks, 0.55 * tasks, tasks]
    return 0.5 + np.interp(np.arange(tasks), places, [0, change - late, change - late, change])


@pytest.mark.parametrize(
    ("change", "late", "improves", "maintains", "decays"),
    [
        (0.2, 0.05, YES, NO, NO),
        (0.2, 0.0, NO, YES, NO),  # a plateau after initial learning
        (0.0, 0.0, NO, YES, NO),
        (-0.2, 0.0, NO, NO, YES),
        (-0.2, -0.1, NO, NO, YES),
        (0.2, -0.05, NO, NO, NO),
    ],
)
def test_a_plateau_is_no_improvement(
    change: float, late: float, improves: str, maintains: str, decays: str
) -> None:
    curve = lines(change, late)
    arm = {"upgd": {s: curve + 1e-4 * s for s in range(5)}}
    results = Results(MAIN[0], 5_000, {"accuracy": arm})
    found = {
        say: getattr(phrases, say)(results, "upgd").verdict
        for say in ("improves", "maintains", "decays", "struggles")
    }
    struggles = {YES: NO, NO: YES}[improves]  # type: ignore[index]
    assert found == {
        "improves": improves, "maintains": maintains, "decays": decays, "struggles": struggles
    }  # fmt: skip


@pytest.mark.parametrize(("seeds", "lost", "expected"), [(4, 2, True), (4, 1, False), (5, 2, False),
                                                         (2, 2, False), (3, 2, True)])  # fmt: skip
def test_half_of_the_seeds_are_enough_to_lose(seeds: int, lost: int, expected: bool) -> None:
    curves = {s: np.zeros(5) for s in range(lost, seeds)}
    results = Results(MAIN[0], 5_000, {"accuracy": {"pgd": curves}}, {"pgd": range(lost)})
    assert ev.has_lost(results, "pgd") == expected


def test_the_majority_is_judged_by_the_median() -> None:
    def values(negative: int) -> dict[str, dict[int, float]]:
        return {
            m: {s: (-0.1 if i < negative else 0.1) + 0.001 * s for s in range(5)}
            for i, m in enumerate(METHODS[:9])
        } | {METHODS[0]: dict.fromkeys(range(5), -9.0), METHODS[8]: dict.fromkeys(range(5), 20.0)}

    for negative, judge in ((5, YES), (4, NO)):
        assert ev.below(ev.middle(values(negative))) == judge
    assert ev.middle({}) is None


def test_one_learner_counts_once() -> None:
    """On CIFAR-10 the printed noise of N-UPGD-W is 0, which makes it SGDW."""
    assert ev.learners(MAIN[2]) == tuple(m for m in METHODS if m != "n-upgd")
    assert all(ev.learners(name) == METHODS for name in (MAIN[0], MAIN[1], MAIN[3]))
    cifar = EXPERIMENTS[MAIN[2]]
    curves = {m: {s: np.full(400, 0.1 * s) for s in range(3)} for m in METHODS}
    some = Results(cifar.name, 2_500, {"accuracy": curves})
    assert "n-upgd" not in ev.means_of_all(some, "accuracy", np.mean)


def test_a_top_is_not_raised_by_noise() -> None:
    """Level curves at 0.4: their own maxima lie above it, what is measured does not."""
    rng, tops, own = np.random.default_rng(0), [], []
    for _ in range(40):
        curves = 0.4 + 0.02 * rng.standard_normal((5, 200))
        results = Results(MAIN[0], 5_000, {"accuracy": {"adamw": dict(enumerate(curves))}})
        found = ev.top(results, "adamw")
        assert found is not None
        tops.append(found.estimate)
        own.append(np.mean([np.convolve(c, np.ones(20) / 20, "valid").max() for c in curves]))
    error = np.std(tops) / np.sqrt(len(tops))
    assert abs(np.mean(tops) - 0.4) < 3 * error
    assert np.mean(own) > 0.4 + 6 * error
    peak = np.where(abs(np.arange(200) - 60) <= 15, 0.45, 0.4)
    high = Results(MAIN[0], 5_000, {"accuracy": {"adamw": dict.fromkeys(range(3), peak)}})
    found = ev.top(high, "adamw")
    assert found is not None
    assert found.estimate == pytest.approx(0.45)
