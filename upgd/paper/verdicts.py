"""What a verdict on one of the paper's claims means, and how it is written.

A claim is a list of *statements*. Each is *confirmed*, *refuted* or *open* (its interval is too
wide, or there is too little data). Which statements are *central* and which are *side* is said
beside the paper's words (:mod:`upgd.paper.quotations`); :func:`verdict` makes a claim's verdict of
them. This module needs neither torch nor results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from upgd.metrics import Interval
from upgd.paper import quotations

# ---------------------------------------------------------------------------- statements
Verdict = Literal["confirmed", "refuted", "open", "not judged"]
Unit = Literal[" points", "%", ""]
YES: Verdict = "confirmed"
NO: Verdict = "refuted"
UNKNOWN: Verdict = "open"
TOLD: Verdict = "not judged"
"""The verdict of a statement that is shown but not judged."""
POINTS: Unit = " points"
PERCENT: Unit = "%"
PLAIN: Unit = ""
AHEAD, BEHIND = ("ahead by ", "behind by "), ("behind by ", "ahead by ")
"""Words for a difference that is positive and for one that is negative: where more is better, and
where less is."""
UP = ("up ", "down ")
NO_WORDS = ("", "")
SCALES = (0.5, 2.0)
"""Factors of thresholds that are ours, under which a verdict is computed once more."""


class Finding(NamedTuple):
    """A statement, its statistic and the verdict."""

    statement: str
    found: Interval | None
    verdict: Verdict
    unit: Unit = POINTS
    words: tuple[str, str] = NO_WORDS  # for a positive and for a negative statistic
    part: str = ""  # the quotation that it is a part of
    ours: tuple[Verdict, Verdict] | None = None  # where a threshold is ours, under SCALES

    def decided(self, verdict: Verdict) -> Finding:
        """The same with another verdict, whatever the threshold."""
        return self._replace(verdict=verdict, ours=self.ours and (verdict, verdict))

    def at(self, scale: int | None) -> Verdict:
        """The verdict, or that under one of :data:`SCALES` (by its place)."""
        return self.verdict if scale is None or self.ours is None else self.ours[scale]

    @classmethod
    def from_rows(cls, rows: list[list[Any]]) -> list[Finding]:
        """Findings that went through JSON, which makes lists of them."""
        return [
            cls(
                text,
                found and Interval(*found),
                verdict,
                unit,
                tuple(words),
                part,
                ours and tuple(ours),
            )
            for text, found, verdict, unit, words, part, ours in rows
        ]

    def __str__(self) -> str:
        return f"{self.statement}: {shown(self)}, {self.verdict}"


def shown(finding: Finding) -> str:
    """A statistic with its interval in words, such as "ahead by 5.2 points [4.6, 5.8]".

    Example:
        >>> shown(Finding("UPGD-W leads", Interval(-0.017, -0.018, -0.015), NO, words=AHEAD))
        'behind by 1.7 points [1.5, 1.8]'
    """
    if finding.found is None:
        return "-"
    value, low, high = finding.found
    word, other = finding.words
    if word != other and value < 0:
        word, (value, low, high) = other, (-value, -high, -low)
    text, least, most = (_number(x, finding.unit) for x in (value, low, high))
    between = "" if math.isnan(low) else f" [{least}, {most}]"
    return f"{word}{text}{finding.unit}{between}"


def _number(value: float, unit: Unit) -> str:
    text = f"{value:.3g}" if unit == PLAIN else f"{round(100 * value, 1) + 0.0:.1f}"
    return text.replace("-", "−")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of several statements together: refuted if one is, else open if one is."""
    found = [verdict for verdict in verdicts if verdict != TOLD]
    if NO in found:
        return NO
    return UNKNOWN if UNKNOWN in found or not found else YES


# -------------------------------------------------------------------------------- claims
ClaimVerdict = Literal[
    "reproduced", "mostly reproduced", "partly reproduced", "not reproduced", "undecided"
]
REPRODUCED: ClaimVerdict = "reproduced"
MOSTLY: ClaimVerdict = "mostly reproduced"
PARTLY: ClaimVerdict = "partly reproduced"
NOT: ClaimVerdict = "not reproduced"
UNDECIDED: ClaimVerdict = "undecided"
VERDICTS = (REPRODUCED, MOSTLY, PARTLY, NOT, UNDECIDED)


def verdict(central: Iterable[Verdict], side: Iterable[Verdict] = ()) -> ClaimVerdict:
    """The verdict on a claim, from those on its central and its side statements.

    * *reproduced*: every central statement is confirmed and no side statement is refuted;
    * *mostly reproduced*: every central statement is confirmed, some side statements are refuted;
    * *partly reproduced*: some central statements are refuted, and at least as many are confirmed;
    * *not reproduced*: more central statements are refuted than confirmed;
    * *undecided*: which of these it is depends on central statements that are open, or there are
      none that could be judged.

    Open side statements change nothing; they are counted. Statements that are not judged do not
    count.

    Example:
        >>> verdict([YES, YES], [YES, UNKNOWN]), verdict([YES, YES], [NO])
        ('reproduced', 'mostly reproduced')
        >>> verdict([YES, NO, UNKNOWN]), verdict([YES, UNKNOWN])
        ('undecided', 'undecided')
    """
    main, refuted = list(central), NO in list(side)
    yes, no, open_ = (main.count(each) for each in (YES, NO, UNKNOWN))
    if not yes + no + open_:
        return UNDECIDED
    best = _if_decided(yes + open_, no, refuted)
    return best if best == _if_decided(yes, no + open_, refuted) else UNDECIDED


def _if_decided(confirmed: int, refuted: int, side_refuted: bool) -> ClaimVerdict:
    if not refuted:
        return MOSTLY if side_refuted else REPRODUCED
    return PARTLY if confirmed >= refuted else NOT


class Count(NamedTuple):
    """Numbers of statements."""

    confirmed: int
    refuted: int
    open: int

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Count:
        """Of some statements; those that are not judged do not count."""
        verdicts = [finding.verdict for finding in findings]
        return cls(*(verdicts.count(each) for each in (YES, NO, UNKNOWN)))

    def __str__(self) -> str:
        return f"{self.confirmed}, {self.refuted}, {self.open}"


NOTHING = "-"
"""The amount of data where there is none."""


class Judged(NamedTuple):
    """A claim with its statements and its verdict."""

    number: int
    text: str
    data: str  # the amount of data behind it
    findings: list[Finding]

    @property
    def verdict(self) -> ClaimVerdict:
        """By :func:`verdict`."""
        return self.under(None)

    def under(self, scale: int | None) -> ClaimVerdict:
        """The verdict under one of :data:`SCALES` (by its place), or as it is."""
        central, side = (self.some(mark) for mark in (True, False))
        return verdict((f.at(scale) for f in central), (f.at(scale) for f in side))

    def some(self, central: bool) -> list[Finding]:
        """Its central or its side statements."""
        marks = {quote.part: quote.central for quote in quotations.QUOTED[self.number]}
        return [finding for finding in self.findings if marks[finding.part] == central]

    @property
    def strict(self) -> str:
        """The strict verdict and count: a claim holds if all statements do, without exception."""
        words = {YES: "holds", NO: "does not hold"}
        verdicts = [f.verdict for f in self.findings if f.verdict != TOLD]
        held = f" ({verdicts.count(YES)} of {len(verdicts)})" if verdicts else ""
        return words.get(worst(verdicts), "not enough data") + held

    @property
    def scaled(self) -> str:
        """The verdict under half and twice the thresholds that are ours."""
        half, twice = self.under(0), self.under(1)
        if not any(finding.ours for finding in self.findings):
            return "no threshold is ours"
        if half == twice == self.verdict:
            return "the same"
        return f"{half}; {twice}"


# --------------------------------------------------------------------------------- texts
def table(found: Iterable[Judged]) -> list[str]:
    """Claims as lines of Markdown."""
    lines = [
        "| | claim | verdict | central: yes, no, open | side: yes, no, open | refuted |",
        "|---:|---|---|---:|---:|---|",
    ]
    for claim in found:
        counts = (str(Count.of(claim.some(mark))) for mark in (True, False))
        text = claim.text if claim.data == NOTHING else f"{claim.text} ({claim.data})"
        cells = (str(claim.number), text, f"**{claim.verdict}**", *counts, refuted(claim))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def refuted(claim: Judged) -> str:
    """The refuted statements of a claim with their effects, central ones in bold."""
    told = []
    for mark in (True, False):
        for finding in (each for each in claim.some(mark) if each.verdict == NO):
            text = _short(finding)
            told.append(f"{f'**{text}**' if mark else text} ({shown(finding)})")
    return "; ".join(told) or "-"


def _short(finding: Finding) -> str:
    """A statement without what stands in brackets."""
    return finding.statement.partition(" (")[0]


COLUMNS = "Central and side: statements confirmed, refuted, open."
"""What the numbers of tables are."""
MORE_COLUMNS = f"{COLUMNS} Refuted: which these are, with what was found, central ones in bold."
"""The same of the Markdown table."""


def summary(found: Sequence[Judged]) -> str:
    """How many claims have each verdict, and which; and how many statements.

    Example:
        >>> summary([Judged(11, "", "", [Finding("a", None, YES, part="over SGD")])])
        'Of 1 claim, 1 is reproduced (11). Of its 1 statement, 1 is confirmed, 0 refuted, 0 open.'
    """
    parts = []
    for each in VERDICTS:
        numbers = [str(claim.number) for claim in found if claim.verdict == each]
        if numbers:
            are = "is" if len(numbers) == 1 else "are"
            parts.append(f"{len(numbers)} {are} {each} ({', '.join(numbers)})")
    yes, no, open_ = count = Count.of(finding for claim in found for finding in claim.findings)
    whose, are = ("their", "are") if sum(count) != 1 else ("its", "is")
    return (
        f"Of {_plural(len(found), 'claim')}, {', '.join(parts)}. Of {whose} "
        f"{_plural(sum(count), 'statement')}, {yes} {are} confirmed, {no} refuted, {open_} open."
    )


IN_BRIEF: Mapping[int, str] = {
    1: "second-order utility ranks weights best",
    2: "on Input-permuted MNIST UPGD-W, N-UPGD-W and S&P keep their level (PGD is left out), and "
    "UPGD-W competes with every method",
    3: "over methods, plasticity and accuracy correlate strongly",
    4: "zero activations rise and gradient ℓ0 falls with all methods but UPGD-W, N-UPGD-W and S&P",
    5: "on Label-permuted CIFAR-10 UPGD-W improves and competes with every method",
    6: "on Label-permuted EMNIST UPGD-W improves and competes with every method",
    7: "on Label-permuted mini-ImageNet methods against forgetting are best, others keep a lower "
    "level, and UPGD-W competes with every method",
    8: "UPGD-W is among the best in forgetting and in loss of plasticity",
    9: "PPO's return falls with Adam and rises with AdaUPGD",
    10: "on the toys SGD degrades and UPGD improves",
    11: "on stationary MNIST UPGD is better than SGD",
    12: "decay, noise and gating each add to UPGD-W",
    13: "the theorems as restated here (as printed, two of three fail)",
    14: "in the long run Adam falls below its restarts, and UPGD-W does not",
}
"""What claims say, for readers in a hurry."""


def brief(found: Sequence[Judged]) -> list[str]:
    """By verdict, what claims say, and which central statements of these are refuted.

    Example:
        >>> brief([Judged(11, "", "", [Finding("a", None, YES, part="over SGD")])])
        ['- **Reproduced**: on stationary MNIST UPGD is better than SGD (11).']
    """
    lines = []
    for each in VERDICTS:
        told = []
        for claim in (claim for claim in found if claim.verdict == each):
            failed = [_short(f) for f in claim.some(central=True) if f.verdict == NO]
            but = f"; refuted: {', '.join(failed)}" if failed and each != NOT else ""
            told.append(f"{IN_BRIEF[claim.number]} ({claim.number}{but})")
        if told:
            lines.append(f"- **{each.capitalize()}**: {'; '.join(told)}.")
    return lines


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def details(claim: Judged) -> list[str]:
    """A claim with the paper's words and all statements, as lines of Markdown."""
    lines = [
        f"## {claim.number}. {claim.text}",
        "",
        f"**{claim.verdict.capitalize()}**; under half and twice our thresholds: {claim.scaled}. "
        f"Strictly, if all statements must hold: {claim.strict}. Judged by: {claim.data}.",
        "",
    ]
    for quote in quotations.QUOTED[claim.number]:
        mine = [f for f in claim.findings if f.part == quote.part]
        mark = "Central" if quote.central else "Side"
        lines += [f"*{mark}*: {quote}", ""]
        if mine:
            lines += ["| statement | found [95%] | | ours: ½, 2 × |", "|---|---:|---|---|"]
            lines += [f"| {' | '.join(row(finding))} |" for finding in mine]
            lines.append("")
    return lines


def row(finding: Finding) -> tuple[str, str, str, str]:
    """A statement, its effect, its verdict, and those under half and twice our threshold."""
    scaled = "" if finding.ours is None else ", ".join(finding.ours)
    return finding.statement, shown(finding), finding.verdict, scaled
