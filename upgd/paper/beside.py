"""What was found beside the claims, in sentences made of the tables.

Who is ahead of UPGD-W, of how many weights its gate changes the step, where agents with AdaUPGD
end, and what the slips of the authors' code change. Each sentence is there only if its runs are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import UTILITIES
from upgd.pages import grouped
from upgd.paper import evidence as ev
from upgd.paper import policy_collapse, utility_quality
from upgd.paper.claims import RETUNED
from upgd.paper.evidence import All
from upgd.paper.experiments import BEST_SETS, ENVIRONMENTS, agents_name, title
from upgd.paper.figures import LONG
from upgd.paper.results import Results
from upgd.paper.sets import MAIN
from upgd.paper.verdicts import UP, YES, Finding, shown

NO_UTILITY = UTILITIES[len(UTILITIES) // 2]
"""The share of weights with Ū between 4/9 and 5/9: the gate is within a ninth of 1."""


def sentences(results: All, root: Path) -> list[str]:
    """All findings as items of a Markdown list; `root` is the folder of tables."""
    of_runs = [*_ahead(results), *_gated(results), *_agents(results), *_retuned(results)]
    return [f"- {each}" for each in (*of_runs, *_ranks(root))]


def _ahead(results: All) -> Iterator[str]:
    """Which methods are ahead of UPGD-W over the run, by problem."""
    for name in MAIN:
        rivals = [m for m in ev.learners(name) if m != "upgd"]
        leads = {m: ev.lead(results.get(name), m, "upgd") for m in rivals}
        known = {m: lead for m, lead in leads.items() if lead is not None}
        ahead = [m for m, lead in known.items() if ev.above(lead) == YES]
        ahead.sort(key=lambda m: -known[m].estimate)
        if ahead:
            told = [f"{title(m)} by {shown(Finding('', known[m], YES))}" for m in ahead]
            yield f"{LONG[name]}: ahead of UPGD-W {_are(ahead)} {' and '.join(told)}."
        elif known and all(ev.below(lead) == YES for lead in known.values()):
            rival = max(known, key=lambda m: known[m].estimate)
            by = shown(Finding("", ev.lead(results.get(name), "upgd", rival), YES))
            yield f"{LONG[name]}: UPGD-W is ahead of all; of {title(rival)}, the next, by {by}."


def _are(some: Sequence[object]) -> str:
    return "is" if len(some) == 1 else "are"


def _gated(results: All) -> Iterator[str]:
    """Of how many of UPGD-W's weights the gate changes the step much."""
    told = []
    for name in MAIN:
        found = ev.over_seeds(results.get(name), "upgd", NO_UTILITY, _share_at_the_end)
        if found is not None and found.estimate < 1:
            told.append(f"{_rounded(1 / (1 - found.estimate))} ({LONG[name]})")
    if told:
        yield (
            f"UPGD-W's gate hardly changes most steps: in the last {ev.LAST} tasks by more than a "
            f"ninth for one weight in {', '.join(told)}."
        )


def _share_at_the_end(shares: NDArray[np.float64]) -> float:
    return float(np.nanmean(shares[-ev.LAST :]))


def _rounded(number: float) -> str:
    """A number with two digits that count."""
    return grouped(int(round(number, 1 - math.floor(math.log10(number)))))


def _agents(results: All) -> Iterator[str]:
    """Where agents with AdaUPGD end, beside those with Adam."""
    told = []
    for environment in ENVIRONMENTS:
        some = results.get(agents_name(environment))
        found = None if some is None else policy_collapse.final_lead(some, "ada-upgd", "adam")
        if found is not None:
            mine, theirs, lead = found
            more, low, high = (f"{x:+,.0f}".replace(",", "\u202f").replace("-", "−") for x in lead)
            told.append(f"{environment} {mine:.0f} and {theirs:.0f} ({more} [{low}, {high}])")
    if told:
        length = grouped(policy_collapse.LONG)
        yield (
            f"PPO, mean return in the last tenth of {length} steps, AdaUPGD as printed and Adam "
            f"(seeds that both have): {'; '.join(told)}."
        )


def _retuned(results: All) -> Iterator[str]:
    """What another set changes for methods that were tuned on slips."""
    for method in RETUNED:
        told = [text for name in MAIN for text in _other_set(results, name, method)]
        if told:
            yield (
                f"{title(method)}'s printed sets were tuned with code of the authors that computes "
                "something else (`docs/from_the_authors_code.md` says what, and what its "
                "start at zero changes). Sets found for the paper's rule, in mean accuracy: "
                f"{'; '.join(told)}."
            )


def _other_set(results: All, name: str, method: str) -> Iterator[str]:
    printed, found = results.get(name), results.get(f"{BEST_SETS}{name}")
    if printed is None or found is None:
        return
    both = {"printed": printed.of(method, "accuracy"), "found": found.of(method, "accuracy")}
    gain = ev.lead(Results(name, printed.window, {"accuracy": both}), "found", "printed")
    if gain is not None:
        more = shown(Finding("", gain, YES, words=("gain ", "lose ")))
        before, after = (
            shown(Finding("", ev.change(some, method), YES, words=UP)) for some in (printed, found)
        )
        since = f"from tasks 11–30 to the last {ev.LAST}: {after}, printed sets {before}"
        yield f"on {LONG[name]} they {more} ({since})"


def _ranks(root: Path) -> Iterator[str]:
    """Whether claim 1 stands with the ranks of the authors' code."""
    for path in sorted(root.rglob(utility_quality.TABLE))[-1:]:
        known = utility_quality.Results.load(path)
        ours, theirs = (utility_quality.claim(known, scope=x) for x in ("global", "argsort"))
        changed = [
            f"“{a.statement}” is {b.verdict} instead of {a.verdict}"
            for a, b in zip(ours, theirs, strict=True)
            if a.verdict != b.verdict
        ]
        rest = "; ".join(changed) or "no statement of claim 1 changes"
        yield (
            "The authors' code correlates the results of one `argsort`, which are not ranks. With "
            f"it, second-order utility is {shown(theirs[0])} than the next, and {rest}."
        )
