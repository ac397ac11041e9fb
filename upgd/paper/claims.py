"""The paper's claims, judged by results.

A claim is a list of statements (:mod:`upgd.paper.statements`); what a verdict on it means is said
in :mod:`upgd.paper.verdicts`. Statements are judged by experiments that have at least half of the
paper's steps (:data:`upgd.paper.evidence.LONG_ENOUGH`); shorter ones only give statistics. Methods
have the sets that the paper prints, except :data:`RETUNED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from upgd.ledger import Ledger
from upgd.metrics import FEWEST
from upgd.pages import grouped
from upgd.paper import evidence as ev
from upgd.paper import policy_collapse, statements, theorems, utility_quality
from upgd.paper.evidence import All
from upgd.paper.experiments import ABLATION, BEST_SETS, ENVIRONMENTS, EXPERIMENTS, agents_name
from upgd.paper.results import Results, collect
from upgd.paper.sets import MAIN, STATIONARY, TOYS
from upgd.paper.verdicts import NOTHING, Finding, Judged, shown
from upgd.report import html

RETUNED = ("s-si", "s-rwalk")
"""Their printed sets were tuned with code of the authors that computes something else. The sets
found here judge them, where these differ and ran as long; what was not measured of them is the
printed set's."""


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
    Claim(2, "Input-permuted MNIST: UPGD-W, N-UPGD-W and S&P maintain their level, methods against "
          "forgetting decay, UPGD-W is competitive", (MNIST,), statements.input_permuted),
    Claim(3, "Over methods, plasticity and accuracy correlate strongly",
          (MNIST,), statements.plasticity_and_accuracy),
    Claim(4, "Zero activations rise and gradient ℓ0 falls substantially for all but UPGD-W, "
          "N-UPGD-W and S&P",
          (MNIST,), statements.diagnostics, ("zero_activations", "gradient_l0")),
    Claim(5, "Label-permuted CIFAR-10: methods against forgetting keep improving, UPGD-W is "
          "competitive", (CIFAR,), statements.cifar),
    Claim(6, "Label-permuted EMNIST: UPGD-W, S-EWC and S-MAS keep improving, the rest "
          "deteriorates, UPGD-W is competitive",
          (EMNIST,), statements.emnist),
    Claim(7, "Label-permuted mini-ImageNet: methods against forgetting are the best, those against "
          "loss of plasticity only maintain a lower level, UPGD-W is competitive",
          (MINI,), statements.mini_imagenet),
    Claim(8, "UPGD-W's forgetting and loss of plasticity are among the best on all four problems",
          MAIN, statements.among_the_best),
    Claim(9, "PPO: Adam's return falls with long training, AdaUPGD's improves",
          tuple(map(agents_name, ENVIRONMENTS)), policy_collapse.findings),
    Claim(10, "Toys: SGD degrades even in linear networks, UPGD keeps improving and is best",
          TOYS, statements.toys),
    Claim(11, "Stationary MNIST: UPGD improves over SGD", (STATIONARY,), statements.stationary),
    Claim(12, "Ablation: decay and perturbation help, gating improves continually",
          tuple(f"{ABLATION}{name}" for name in MAIN), statements.ablation),
    Claim(13, "Theorems, as restated in docs/curvature.md: propagation, conservation, convergence",
          (), lambda _: list(theorems.findings())),
    Claim(14, "Figure 1: Adam hardly improves or falls below its restarts, UPGD-W does neither",
          (EMNIST, "figure-1"), statements.figure_1),
)  # fmt: skip
"""All but the first, which :mod:`upgd.paper.utility_quality` computes and judges."""


def judge_results(
    results: All, folders: Iterable[Path], say: Callable[[str], object] = lambda text: None
) -> list[Judged]:
    """Judge all claims by loaded results; those of the first are read from the folders.

    Calls `say` with what is being done.
    """
    say("judging claim 1")
    found = [_utility_quality(folders)]
    for claim in CLAIMS:
        say(f"judging claim {claim.number}")
        found.append(judge_claim(claim, results))
    return found


def judge_claim(claim: Claim, results: All) -> Judged:
    """A claim's statements: statistics of all results, verdicts of those that are long enough."""
    there = {name: _completed(results, name) for name in claim.needs if name in results}
    long = {name: each for name, each in there.items() if ev.length(each) >= ev.LONG_ENOUGH}
    findings = claim.check(there)
    if len(long) < len(there):
        both = zip(findings, claim.check(long), strict=True)
        findings = [one._replace(verdict=x.verdict, ours=x.ours) for one, x in both]
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
        told = [(each.statement, shown(each), each.verdict) for each in found.findings]
        text = f"{found.text} ({found.data})"
        judged.append(html.Judged(found.number, text, found.verdict, told))
    return judged, others


def _completed(results: All, name: str) -> Results:
    """An experiment's results, with runs of other experiments that judge its arms.

    These are the sets found for :data:`RETUNED`, and in an ablation the same learners of the main
    experiment, where they have more seeds.
    """
    mine = results[name]
    if name.startswith(ABLATION):
        main = name.removeprefix(ABLATION)
        return _with_arms(mine, results.get(main), _same_learners(results, name, main))
    found = results.get(f"{BEST_SETS}{name}")
    return _with_arms(mine, found, {method: method for method in RETUNED})


def _same_learners(results: All, name: str, other: str) -> dict[str, str]:
    """Arms of which another experiment has the same learner with more seeds, and its name there."""
    known = {arm.identity: arm.name for arm in EXPERIMENTS[other].arms}
    twins, found = EXPERIMENTS[name].twins(), {}
    for arm in EXPERIMENTS[name].arms:
        same, kept = known.get(arm.identity), twins.get(arm.name, arm.name)
        if same and _seeds(results.get(other), same) > _seeds(results.get(name), kept):
            found[kept] = same
    return found


def _seeds(results: Results | None, arm: str) -> int:
    return ev.diverged(results, arm)[1]


def _with_arms(mine: Results, theirs: Results | None, arms: Mapping[str, str]) -> Results:
    """Results in which some arms have the runs of others' arms, if these are as long."""
    if theirs is None or ev.length(theirs) < ev.length(mine):
        return mine
    there = {a: b for a, b in arms.items() if b in (*theirs.arms, *theirs.diverged)}
    series = {
        metric: {**old, **{a: theirs.of(b, metric) for a, b in there.items()}}
        if metric in theirs.series
        else old
        for metric, old in mine.series.items()
    }
    gone = {a: theirs.diverged.get(b, ()) for a, b in there.items()}
    return replace(mine, series=series, diverged={**mine.diverged, **gone})


def _utility_quality(places: Iterable[Path]) -> Judged:
    paths = [p for place in places for p in sorted(place.rglob(utility_quality.TABLE))]
    text = (
        "Second-order utility has the highest rank correlation with true utility throughout "
        "learning (weights, ReLU, global)"
    )
    if not paths:
        return Judged(1, text, NOTHING, [])
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
