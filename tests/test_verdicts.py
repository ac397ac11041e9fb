"""The rule of verdicts on fabricated evidence, its thresholds, and the paper's words."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from upgd.metrics import Interval
from upgd.paper import evidence as ev
from upgd.paper import phrases, quotations
from upgd.paper.claims import CLAIMS
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.results import Results
from upgd.paper.sets import MAIN, METHODS
from upgd.paper.verdicts import (
    AHEAD,
    BEHIND,
    MOSTLY,
    NO,
    NOT,
    PARTLY,
    PERCENT,
    REPRODUCED,
    TOLD,
    UNDECIDED,
    UNKNOWN,
    VERDICTS,
    YES,
    Count,
    Finding,
    Judged,
    Verdict,
    details,
    shown,
    summary,
    table,
    verdict,
)

ROOT = Path(__file__).parents[1]
QUICK = [claim for claim in CLAIMS if claim.number != 13]
"""Claims without theorems, which take seconds; tests/test_reproduce.py has those."""
nan = float("nan")


# --------------------------------------------------------------------------- the rule
@pytest.mark.parametrize(
    ("central", "side", "expected"),
    [
        ([YES], [], REPRODUCED),
        ([YES, YES], [YES, YES], REPRODUCED),
        ([YES, YES], [UNKNOWN, YES], REPRODUCED),
        ([YES], [UNKNOWN, UNKNOWN], REPRODUCED),
        ([YES, TOLD], [TOLD], REPRODUCED),
        ([YES, YES], [NO], MOSTLY),
        ([YES], [NO, NO, NO, UNKNOWN], MOSTLY),
        ([YES, NO], [], PARTLY),
        ([YES, NO], [NO], PARTLY),
        ([YES, YES, NO, UNKNOWN], [], PARTLY),
        ([NO], [], NOT),
        ([NO, NO, YES], [YES, YES], NOT),
        ([NO, NO, UNKNOWN], [], NOT),
        ([UNKNOWN], [YES], UNDECIDED),
        ([YES, YES, UNKNOWN], [YES], UNDECIDED),
        ([YES, NO, UNKNOWN], [], UNDECIDED),
        ([NO, UNKNOWN], [], UNDECIDED),
        ([], [YES, NO], UNDECIDED),
        ([TOLD], [], UNDECIDED),
    ],
)
def test_every_verdict(central: list[Verdict], side: list[Verdict], expected: str) -> None:
    assert verdict(central, side) == expected


def test_a_verdict_is_what_holds_however_open_statements_turn_out() -> None:
    """Against the definition, written out: decide the open ones in all ways."""
    for size in range(1, 6):
        for central in product((YES, NO, UNKNOWN), repeat=size):
            for side in ((), (YES,), (NO,), (UNKNOWN,), (NO, UNKNOWN)):
                ways = set()
                for way in product((YES, NO), repeat=central.count(UNKNOWN)):
                    left = list(way)
                    decided = [left.pop() if x == UNKNOWN else x for x in central]
                    no, yes = decided.count(NO), decided.count(YES)
                    if no == 0:
                        ways.add(MOSTLY if NO in side else REPRODUCED)
                    else:
                        ways.add(NOT if no > yes else PARTLY)
                expected = ways.pop() if len(ways) == 1 else UNDECIDED
                assert verdict(central, side) == expected, (central, side)


def made(number: int, central: list[Verdict], side: tuple[Verdict, ...] = ()) -> Judged:
    """A claim with these verdicts on a central and a side part."""
    parts = {quote.central: quote.part for quote in quotations.QUOTED[number]}
    findings = [Finding("a", None, x, part=parts[True]) for x in central]
    findings += [Finding("b", None, x, part=parts[False]) for x in side]
    return Judged(number, "text", "data", findings)


def test_confirmed_refuted_and_open_are_counted_apart() -> None:
    claim = made(2, [YES, YES, NO, UNKNOWN, TOLD], (UNKNOWN, NO, NO))
    assert Count.of(claim.some(central=True)) == (2, 1, 1)
    assert Count.of(claim.some(central=False)) == (0, 2, 1)
    assert claim.verdict == PARTLY
    assert claim.strict == "does not hold (2 of 7)"
    assert made(2, [YES], (UNKNOWN,)).strict == "not enough data (1 of 2)"
    assert made(2, [YES], (YES,)).strict == "holds (2 of 2)"
    assert (
        "| **partly reproduced** | 2, 1, 1 | 0, 2, 1 | **a** (-); b (-); b (-) |"
        in table([claim])[-1]
    )


def test_the_summary_names_every_claim_once() -> None:
    some = [made(1, [YES]), made(2, [NO]), made(4, [YES], (NO,)), made(5, [YES]), made(6, [])]
    text = summary(some)
    assert text == (
        "Of 5 claims, 2 are reproduced (1, 5), 1 is mostly reproduced (4), 1 is not reproduced "
        "(2), 1 is undecided (6)."
    )
    assert all(claim.verdict in VERDICTS for claim in some)


def test_verdicts_under_half_and_twice_our_thresholds() -> None:
    mine = Finding("a", None, YES, part="competitive", ours=(NO, YES))
    other = Finding("b", None, YES, part="decay")
    claim = Judged(2, "text", "data", [mine, other])
    assert [claim.under(0), claim.verdict, claim.under(1)] == [PARTLY, REPRODUCED, REPRODUCED]
    assert claim.scaled == "partly reproduced; reproduced"
    assert Judged(2, "", "", [other]).scaled == "no threshold is ours"
    assert Judged(2, "", "", [mine._replace(ours=(YES, YES))]).scaled == "the same"
    assert mine.decided(UNKNOWN) == mine._replace(verdict=UNKNOWN, ours=(UNKNOWN, UNKNOWN))
    assert other.decided(NO).ours is None
    assert "confirmed | refuted, confirmed |" in "\n".join(details(claim))


# ------------------------------------------------------------------------ effects in words
@pytest.mark.parametrize(
    ("found", "words", "expected"),
    [
        ((0.052, 0.046, 0.058), AHEAD, "ahead by 5.2 points [4.6, 5.8]"),
        ((-0.017, -0.018, -0.015), AHEAD, "behind by 1.7 points [1.5, 1.8]"),
        ((-0.002, -0.005, 0.001), AHEAD, "behind by 0.2 points [−0.1, 0.5]"),
        ((0.1, nan, nan), BEHIND, "behind by 10.0 points"),
        ((-0.01, -0.02, 0.0), ("", ""), "−1.0 points [−2.0, 0.0]"),
        ((-0.01, -0.02, 0.0), ("median ", "median "), "median −1.0 points [−2.0, 0.0]"),
    ],
)
def test_effects_are_said_in_words(
    found: tuple[float, float, float], words: tuple[str, str], expected: str
) -> None:
    assert shown(Finding("x", Interval(*found), YES, words=words)) == expected
    assert shown(Finding("x", None, YES, words=words)) == "-"
    percent = shown(Finding("x", Interval(*found), YES, PERCENT, words))
    assert percent == expected.replace(" points", "%")


# ------------------------------------------------------------------- judgements, thresholds
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
        }

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


# -------------------------------------------------------------------------- the paper's words
def test_marks_and_words_stand_in_one_file() -> None:
    """Every statement of every claim names words that are quoted there; nothing else marks them."""
    assert [1, *(claim.number for claim in CLAIMS)] == list(quotations.QUOTED)
    used: dict[int, set[str]] = {c.number: {f.part for f in c.check({})} for c in QUICK}
    for number, quotes in quotations.QUOTED.items():
        parts = [quote.part for quote in quotes]
        assert len(set(parts)) == len(parts)
        assert any(quote.central for quote in quotes), number
        assert all(quote.words.strip() and quote.where.strip() for quote in quotes)
        assert used.get(number, set(parts)) == set(parts), number
    names = ("CENTRAL", "SIDE", "Quote")
    for path in (ROOT / "upgd" / "paper").rglob("*.py"):
        if path.name != "quotations.py":
            text = {n.id for n in ast.walk(ast.parse(path.read_text("utf-8")))
                    if isinstance(n, ast.Name)}  # fmt: skip
            assert not text.intersection(names), path


def test_statements_with_a_threshold_of_ours_say_so() -> None:
    for claim in QUICK:
        for finding in claim.check({}):
            says = "ours: " in finding.statement
            agents = claim.number == 9  # whose threshold is said in the module's text
            assert says == (finding.ours is not None) or agents, finding.statement


def test_kept_verdicts_are_read_without_torch(tmp_path: Path) -> None:
    """Importing it takes longer than everything else."""
    code = (
        "import sys; import upgd.cli.claims, upgd.paper.judging, upgd.paper.verdicts;"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0
