"""The paper's claims, judged by the runs of one study."""

from __future__ import annotations

from upgd.ledger import Ledger
from upgd.paper.claims import CLAIMS, judge_claim
from upgd.paper.evidence import shown
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.results import collect
from upgd.report.html import Judged


def judge(ledger: Ledger, problem: str = "") -> tuple[list[Judged], list[str]]:
    """The paper's claims that a study has runs for, judged by them, and what the others say."""
    results = {}
    for name, experiment in EXPERIMENTS.items():
        asked = problem in ("", experiment.problem)
        there = collect(ledger, experiment) if asked else None
        if there is not None:
            results[name] = there
    judged, others = [], []
    for claim in CLAIMS:
        if not any(name in results for name in claim.needs):
            others.append(f"{claim.number}. {claim.text}")
            continue
        found = judge_claim(claim, results)
        statements = [(each.statement, shown(each), each.verdict) for each in found.findings]
        text = f"{found.text} ({found.data})"
        judged.append(Judged(found.number, text, found.verdict, statements))
    return judged, others
