"""Statements about an arm or two, as :mod:`upgd.paper.evidence` defines their words.

All say how many seeds diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from upgd.metrics import Interval
from upgd.paper.evidence import (
    FEWEST,
    MOST,
    NO,
    PLAIN,
    POINTS,
    UNKNOWN,
    YES,
    Finding,
    Verdict,
    above,
    below,
    change,
    diverged,
    falling,
    has_lost,
    lead,
    rising,
    smallest_lead,
    within,
)
from upgd.paper.experiments import EXPERIMENTS, title
from upgd.paper.results import Results
from upgd.paper.sets import METHODS, STATIONARY, TOYS
from upgd.report.verdict import HOLDS


def with_diverged(finding: Finding, results: Results, *arms: str) -> Finding:
    """A statement with the number of diverged seeds."""
    told = ""
    for arm in dict.fromkeys(arms):
        gone, all_ = diverged(results, arm)
        told += f" ({named(results, arm)}: {gone} of {all_} seeds diverged)" if gone else ""
    return finding._replace(statement=finding.statement + told)


def unless_diverged(finding: Finding, results: Results, arm: str, *others: str) -> Finding:
    """The same for a statement that does not hold if a seed diverged."""
    gone, all_ = diverged(results, arm)
    if gone:
        finding = finding._replace(verdict=NO if all_ >= FEWEST else UNKNOWN)
    return with_diverged(finding, results, arm, *others)


def improves(results: Results, arm: str) -> Finding:
    """The statement that an arm improves."""
    found = change(results, arm)
    text = f"{named(results, arm)} improves"
    return unless_diverged(Finding(text, found, rising(found)), results, arm)


def decays(results: Results, arm: str) -> Finding:
    """The statement that an arm decays."""
    found = change(results, arm)
    text = f"{named(results, arm)} decays"
    return with_diverged(Finding(text, found, falling(found)), results, arm)


def holds(results: Results, arm: str) -> Finding:
    """The statement that an arm holds."""
    found = change(results, arm)
    text = f"{named(results, arm)} holds"
    return unless_diverged(Finding(text, found, within(found)), results, arm)


def competitive(results: Results, arm: str = "upgd") -> Finding:
    """The statement that no method is a point ahead of an arm."""
    found = smallest_lead(results, arm, METHODS)
    text = f"{named(results, arm)} surpasses or is competitive with every method"
    return unless_diverged(Finding(text, found, above(found, -HOLDS)), results, arm, *METHODS)


def beats(results: Results, arm: str, other: str, metric: str = "accuracy") -> Finding:
    """The statement that an arm has the higher accuracy, or the lower loss, over the run."""
    found = lead(results, arm, other, metric)
    text = f"{named(results, arm)} beats {named(results, other)}"
    judged = above(found) if metric == "accuracy" else below(found)
    if has_lost(results, other) and diverged(results, arm)[1] >= FEWEST:
        judged = YES
    finding = Finding(text, found, judged, POINTS if metric == "accuracy" else PLAIN)
    return unless_diverged(finding, results, arm, other)


def named(results: Results, arm: str) -> str:
    """The title of an arm in an experiment's figures."""
    titles = {each.name: each.title for each in EXPERIMENTS[results.name].arms}
    return titles.get(arm) or title(arm, decay=results.name not in (*TOYS, STATIONARY))


def most(
    statement: str, findings: Sequence[Interval | None], judge: Callable[..., Verdict]
) -> Finding:
    """The statement that at least :data:`MOST` of ten findings pass."""
    verdicts = [judge(found) for found in findings]
    sure, open_ = verdicts.count(YES), verdicts.count(UNKNOWN)
    verdict = YES if sure >= MOST else NO if sure + open_ < MOST else UNKNOWN
    known = (
        Interval(float(sure), float(sure), float(sure + open_)) if open_ < len(verdicts) else None
    )
    return Finding(f"{statement} (methods, of {len(verdicts)})", known, verdict, PLAIN)
