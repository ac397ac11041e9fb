"""The rule of verdicts on fabricated evidence, and the paper's words."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from upgd.metrics import Interval
from upgd.paper import quotations
from upgd.paper.claims import CLAIMS
from upgd.paper.verdicts import (
    AHEAD,
    BEHIND,
    IN_BRIEF,
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
    brief,
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
        "(2), 1 is undecided (6). Of their 5 statements, 3 are confirmed, 2 refuted, 0 open."
    )
    assert all(claim.verdict in VERDICTS for claim in some)


def test_claims_in_brief_tell_which_central_statements_fail() -> None:
    """By verdict, best first; of a claim that is not reproduced it goes without saying."""
    some = [made(2, [YES, NO]), made(1, [YES], (NO,)), made(7, [NO]), made(5, [UNKNOWN, NO])]
    assert brief(some) == [
        f"- **Mostly reproduced**: {IN_BRIEF[1]} (1).",
        f"- **Partly reproduced**: {IN_BRIEF[2]} (2; refuted: a).",
        f"- **Not reproduced**: {IN_BRIEF[7]} (7).",
        f"- **Undecided**: {IN_BRIEF[5]} (5; refuted: a).",
    ]
    assert set(IN_BRIEF) == set(quotations.QUOTED)


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
