"""The paper's claims, judged by results.

A claim is a list of statements (:mod:`upgd.paper.statements`) and as good as its worst one.
Verdicts come from experiments that have at least half of the paper's steps
(:data:`upgd.paper.evidence.LONG_ENOUGH`); shorter ones only give statistics. Methods have the sets
that the paper prints, except :data:`RETUNED`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from upgd.ledger import Ledger
from upgd.metrics import FEWEST
from upgd.pages import grouped
from upgd.paper import evidence as ev
from upgd.paper import policy_collapse, statements, theorems, utility_quality
from upgd.paper.evidence import All, Finding
from upgd.paper.experiments import BEST_SETS, ENVIRONMENTS, EXPERIMENTS, agents_name
from upgd.paper.kept import keep, pack_findings, unpack_findings
from upgd.paper.results import LEDGER, TABLE, Results, collect, load
from upgd.paper.sets import MAIN, STATIONARY, TOYS
from upgd.report import html

RETUNED = "s-rwalk"
"""Its printed sets were tuned with code of the authors that computes something else. The sets found
here judge it, where these differ and ran as long."""


@dataclass(frozen=True)
class Claim:
    """One of the paper's claims."""

    number: int
    text: str
    needs: tuple[str, ...]  # the experiments it uses
    check: Callable[[All], list[Finding]]
    metrics: tuple[str, ...] = ()  # metrics it needs that not all runs record


MNIST, EMNIST, CIFAR, MINI = MAIN
CLAIMS: Sequence[Claim] = (
    Claim(2, "Input-permuted MNIST: UPGD-W, N-UPGD-W and S&P hold, methods against forgetting "
          "decay", (MNIST,), statements.input_permuted),
    Claim(3, "Over methods, plasticity and accuracy correlate strongly",
          (MNIST,), statements.plasticity_and_accuracy),
    Claim(4, "Zero activations rise and gradient ℓ0 falls for all but UPGD-W, N-UPGD-W and S&P",
          (MNIST,), statements.diagnostics, ("zero_activations", "gradient_l0")),
    Claim(5, "Label-permuted CIFAR-10: methods against forgetting keep improving, UPGD-W is "
          "competitive", (CIFAR,), statements.cifar),
    Claim(6, "Label-permuted EMNIST: UPGD-W, S-EWC and S-MAS keep improving, the rest deteriorates",
          (EMNIST,), statements.label_permuted(EMNIST, statements.decays)),
    Claim(7, "Label-permuted mini-ImageNet: the same; S&P holds at a lower level",
          (MINI,), statements.label_permuted(MINI, statements.holds)),
    Claim(8, "UPGD-W's forgetting and loss of plasticity are among the best on all four problems",
          MAIN, statements.among_the_best),
    Claim(9, "PPO: Adam's return falls with long training, AdaUPGD's improves",
          tuple(map(agents_name, ENVIRONMENTS)), policy_collapse.findings),
    Claim(10, "Toys: SGD loses plasticity in linear networks; UPGD is best; second order is better",
          TOYS, statements.toys),
    Claim(11, "Stationary MNIST: UPGD improves over SGD", (STATIONARY,), statements.stationary),
    Claim(12, "Ablation: decay and perturbation help, gating improves continually",
          tuple(f"ablation-{name}" for name in MAIN), statements.ablation),
    Claim(13, "Theorems, as restated in docs/curvature.md: propagation, conservation, convergence",
          (), lambda _: list(theorems.findings())),
    Claim(14, "Figure 1: Adam hardly improves or falls below its restarts, UPGD-W does neither",
          (EMNIST, "figure-1"), statements.figure_1),
)  # fmt: skip
"""All but the first, which :mod:`upgd.paper.utility_quality` computes and judges."""


class Judged(NamedTuple):
    """A claim with its statements and its verdict."""

    number: int
    text: str
    data: str  # the amount of data behind it
    findings: list[Finding]

    @property
    def verdict(self) -> ev.Verdict:
        """That of its worst statement."""
        return ev.worst(finding.verdict for finding in self.findings)


def judge(
    places: Iterable[str | os.PathLike[str]], say: Callable[[str], object] = lambda text: None
) -> list[Judged]:
    """Judge all fourteen claims by studies or folders of tables.

    Calls `say` with what is being done. What tables alone say is kept for the next time.
    """
    folders = [Path(place) for place in places]

    def compute() -> list[Judged]:
        return judge_results(load(folders, say), folders, say)

    if any(True for folder in folders for _ in folder.rglob(LEDGER)):
        return compute()
    names = (TABLE, utility_quality.TABLE)
    files = [path for folder in folders for n in names for path in sorted(folder.rglob(n))]
    return keep("claims", files, compute, _pack, _unpack)


def _pack(found: list[Judged]) -> list[list[object]]:
    return [[each.number, each.text, each.data, pack_findings(each.findings)] for each in found]


def _unpack(rows: list[list[Any]]) -> list[Judged]:
    if [number for number, *_ in rows] != [1, *(claim.number for claim in CLAIMS)]:
        raise ValueError("other claims")
    return [Judged(n, text, data, unpack_findings(found)) for n, text, data, found in rows]


def judge_results(
    results: All, folders: Iterable[Path], say: Callable[[str], object] = lambda text: None
) -> list[Judged]:
    """The same with loaded results; those of the first claim are read from the folders."""
    say("judging claim 1")
    found = [_utility_quality(folders)]
    for claim in CLAIMS:
        say(f"judging claim {claim.number}")
        found.append(judge_claim(claim, results))
    return found


def judge_claim(claim: Claim, results: All) -> Judged:
    """A claim's statements: statistics of all results, verdicts of those that are long enough."""
    there = {name: _retuned(results, name) for name in claim.needs if name in results}
    long = {name: each for name, each in there.items() if ev.length(each) >= ev.LONG_ENOUGH}
    findings = claim.check(there)
    if len(long) < len(there):
        verdicts = [finding.verdict for finding in claim.check(long)]
        both = zip(findings, verdicts, strict=True)
        findings = [finding._replace(verdict=verdict) for finding, verdict in both]
    data = ev.extent(list(there.values()), claim.metrics)
    if there and len(there) < len(claim.needs):
        data = f"{len(there)} of {len(claim.needs)} experiments: {data}"
    return Judged(claim.number, claim.text, data, findings)


def judge_study(ledger: Ledger, problem: str = "") -> tuple[list[html.Judged], list[str]]:
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
        statements = [(each.statement, ev.shown(each), each.verdict) for each in found.findings]
        text = f"{found.text} ({found.data})"
        judged.append(html.Judged(found.number, text, found.verdict, statements))
    return judged, others


def _retuned(results: All, name: str) -> Results:
    """An experiment's results, with those of the set found for :data:`RETUNED`."""
    printed, found = results[name], results.get(f"{BEST_SETS}{name}")
    if found is None or ev.length(found) < ev.length(printed):
        return printed
    if RETUNED not in (*found.arms, *found.diverged):
        return printed
    series = {
        metric: {**arms, RETUNED: found.of(RETUNED, metric)}
        for metric, arms in printed.series.items()
    }
    diverged = {**printed.diverged, RETUNED: found.diverged.get(RETUNED, ())}
    return replace(printed, series=series, diverged=diverged)


def _utility_quality(places: Iterable[Path]) -> Judged:
    paths = [p for place in places for p in sorted(place.rglob(utility_quality.TABLE))]
    text = (
        "Second-order utility has the highest rank correlation with true utility throughout "
        "(weights, ReLU, global)"
    )
    if not paths:
        return Judged(1, text, ev.NOTHING, [])
    found = utility_quality.Results.load(paths[-1])
    data = ev.how_much([utility_quality.length(found)], [len(found.seeds)])
    return Judged(1, text, data, utility_quality.claim(found))


def required(claim: Claim) -> str:
    """What a verdict on a claim takes: problems, methods and their sets, steps, seeds.

    Example:
        >>> required(next(claim for claim in CLAIMS if claim.number == 13))
        'no runs: it is computed'
    """
    some = [EXPERIMENTS[name] for name in claim.needs]
    if not some:
        return "no runs: it is computed"
    where = ", ".join(dict.fromkeys(each.problem for each in some))
    methods, steps = (
        "–".join(dict.fromkeys(grouped(n) for n in (min(all_), max(all_))))
        for all_ in (
            [len(each.arms) for each in some],
            [int(ev.LONG_ENOUGH * each.steps) for each in some],
        )
    )
    return f"{where}: {methods} methods at the paper's sets, {steps} steps, {FEWEST} seeds"


def table(found: Iterable[Judged]) -> list[str]:
    """Claims as lines of Markdown."""
    lines = ["| | claim | judged by | statements that hold | verdict |", "|---:|---|---|---:|---|"]
    for claim in found:
        cells = (str(claim.number), claim.text, claim.data, sure(claim), claim.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sure(claim: Judged) -> str:
    """The number of a claim's statements that hold."""
    verdicts = [finding.verdict for finding in claim.findings if finding.verdict != ev.TOLD]
    return f"{verdicts.count(ev.YES)} of {len(verdicts)}" if verdicts else "-"
