"""Statements that several claims make: an arm improves, maintains its level, beats another.

Thresholds that the paper does not give are ours. They are fixed here, not fitted to results, and a
statement that has one is judged once more under half and twice of it.
"""

from __future__ import annotations

from collections.abc import Callable

from upgd.metrics import FEWEST, Interval
from upgd.paper import evidence as ev
from upgd.paper.experiments import EXPERIMENTS, title
from upgd.paper.results import Results
from upgd.paper.sets import METHODS, STATIONARY, TOYS
from upgd.paper.verdicts import (
    AHEAD,
    BEHIND,
    NO,
    PERCENT,
    PLAIN,
    POINTS,
    UNKNOWN,
    UP,
    YES,
    Finding,
    Verdict,
    shown,
    worst,
)
from upgd.report.verdict import HOLDS

STRONG = 0.7
"""The least correlation that counts as strong."""
SUBSTANTIAL = 0.05
"""The least change of a fraction that counts as substantial."""
STEADY = 0.1
"""A loss that rises by less than this fraction does not count as worse."""
BEST = 3
"""Methods that count as the best."""
UNSEEN = f"if less than {100 * HOLDS:g} point"
"""A change that is not seen refutes a statement once its interval excludes this much."""
SLIGHTLY = 0.05
"""The largest excess that counts as slightly above."""


def named(results: Results, arm: str) -> str:
    """The title of an arm in an experiment's figures."""
    titles = {each.name: each.title for each in EXPERIMENTS[results.name].arms}
    return titles.get(arm) or title(arm, decay=results.name not in (*TOYS, STATIONARY))


# ----------------------------------------------------------------------------- divergence
def with_diverged(finding: Finding, results: Results, *arms: str) -> Finding:
    """A statement with the number of diverged seeds."""
    told = ""
    for arm in dict.fromkeys(arms):
        gone, all_ = ev.diverged(results, arm)
        told += f" ({named(results, arm)}: {gone} of {all_} seeds diverged)" if gone else ""
    return finding._replace(statement=finding.statement + told)


def unless_diverged(finding: Finding, results: Results, arm: str, *others: str) -> Finding:
    """The same for a statement that is refuted if a seed diverged."""
    gone, all_ = ev.diverged(results, arm)
    if gone:
        finding = finding.decided(NO if all_ >= FEWEST else UNKNOWN)
    return with_diverged(finding, results, arm, *others)


# ------------------------------------------------------------------------------- changes
def improves(results: Results, arm: str) -> Finding:
    """The statement that an arm keeps improving."""
    found = _changes(results, arm, f"keeps improving (ours: no {UNSEEN})", _keeps_rising)
    return unless_diverged(found, results, arm)


def struggles(results: Results, arm: str) -> Finding:
    """The statement that an arm does not keep improving."""
    found = _changes(
        results,
        arm,
        f"struggles: it does not keep improving (ours: so {UNSEEN})",
        lambda whole, late, margin: ev.opposite(_keeps_rising(whole, late, margin)),
    )
    return with_diverged(found, results, arm)


def decays(results: Results, arm: str) -> Finding:
    """The statement that an arm decays."""
    found = _changes(
        results,
        arm,
        f"decays (ours: no {UNSEEN})",
        lambda whole, late, margin: ev.falling(whole, margin),
        late=False,
    )
    return with_diverged(found, results, arm)


def maintains(results: Results, arm: str) -> Finding:
    """The statement that an arm maintains its level."""

    def judge(whole: Interval | None, late: Interval | None, margin: float) -> Verdict:
        return worst([ev.within(late, margin), ev.above(whole, -margin)])

    found = _changes(results, arm, "maintains its level (ours: within ±1 point)", judge)
    return unless_diverged(found, results, arm)


def _keeps_rising(whole: Interval | None, late: Interval | None, margin: float) -> Verdict:
    return worst([ev.rising(whole, margin), ev.rising(late, margin)])


def _changes(
    results: Results,
    arm: str,
    how: str,
    judge: Callable[[Interval | None, Interval | None, float], Verdict],
    late: bool = True,
) -> Finding:
    """A statement on an arm's change and its late change; one is its statistic, one is told.

    `judge` has a margin in points, which is ours.
    """
    whole, end = ev.change(results, arm), ev.change(results, arm, late=True)
    first, second = (end, whole) if late else (whole, end)
    other = "since tasks 11–30" if late else "since the middle of the run"
    beside = shown(Finding("", second, UNKNOWN, words=UP))
    text = f"{named(results, arm)} {how}" + (f" ({other}: {beside})" if second else "")
    finding = Finding(text, first, UNKNOWN, words=UP)
    return ours(finding, lambda margin: judge(whole, end, margin), HOLDS)


# ------------------------------------------------------------------------------ thresholds
def ours(finding: Finding, judge: ev.Judge, threshold: float) -> Finding:
    """A statement judged with a threshold of ours."""
    verdict, scaled = judge(threshold), ev.scaled(judge, threshold)
    return finding._replace(verdict=verdict, ours=scaled)


def strongly(found: Interval | None) -> Finding:
    """The statement that a correlation is strong; of twice the threshold, half the way to 1."""
    text = f"plasticity and accuracy correlate over the ten methods (ours: r > {STRONG})"

    def judge(threshold: float) -> Verdict:
        doubled = threshold > STRONG
        return ev.above(found, 1 - (1 - STRONG) * STRONG / threshold if doubled else threshold)

    return ours(Finding(text, found, UNKNOWN, PLAIN), judge, STRONG)


def among_the_best(text: str, rank: Interval | None) -> Finding:
    """The statement that a rank is one of the best."""
    finding = Finding(f"{text} (ours: rank {BEST} or better)", rank, UNKNOWN, PLAIN, ("rank ",) * 2)
    return ours(finding, lambda best: ev.below(rank, int(best) + 0.5), BEST)


def slightly_above(text: str, found: Interval | None, level: float) -> Finding:
    """The statement that a fraction lies slightly above a level."""

    def judge(excess: float) -> Verdict:
        return worst([ev.above(found, level), ev.below(found, level + excess)])

    finding = Finding(
        f"{text} (ours: by {100 * SLIGHTLY:g} points at most)", found, UNKNOWN, PERCENT
    )
    return ours(finding, judge, SLIGHTLY)


# ------------------------------------------------------------------------------ comparisons
def competitive(results: Results, arm: str = "upgd") -> Finding:
    """The statement that no method is a point ahead of an arm; it shows the smallest lead."""
    leads = ev.leads(results, arm, METHODS)
    text = f"{named(results, arm)} surpasses or is competitive with every method"
    finding = ours(
        Finding(f"{text} (ours: within 1 point)", next(iter(leads), None), UNKNOWN, words=AHEAD),
        lambda margin: worst(ev.above(each, -margin) for each in leads),
        HOLDS,
    )
    return unless_diverged(finding, results, arm, *METHODS)


def beats_all(results: Results, arm: str, others: tuple[str, ...], whom: str) -> Finding:
    """The statement that an arm beats each of some others; it shows the smallest lead."""
    leads = ev.leads(results, arm, others)
    text = f"{named(results, arm)} beats {whom}"
    finding = Finding(text, next(iter(leads), None), worst(map(ev.above, leads)), words=AHEAD)
    return unless_diverged(finding, results, arm, *others)


def beats(results: Results, arm: str, other: str, metric: str = "accuracy") -> Finding:
    """The statement that an arm has the higher mean over the run, or the lower loss."""
    found = ev.lead(results, arm, other, metric)
    less = metric == "loss"
    judged = ev.below(found) if less else ev.above(found)
    if ev.has_lost(results, other) and ev.diverged(results, arm)[1] >= FEWEST:
        judged = YES
    in_ = "" if metric == "accuracy" else f" in {metric}"
    text = f"{named(results, arm)} beats {named(results, other)}{in_}"
    finding = Finding(text, found, judged, PLAIN if less else POINTS, BEHIND if less else AHEAD)
    return unless_diverged(finding, results, arm, other)
