"""The paper's claims, each as statements about statistics that :mod:`upgd.paper.evidence` defines.

They and their thresholds are fixed here, not fitted to results. A claim is as good as its worst
statement.

UPGD-W is *among the best* if it is one of the best three.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from upgd.metrics import Interval, forgetting, loss_of_plasticity
from upgd.paper import policy_collapse
from upgd.paper.evidence import (
    NO,
    YES,
    All,
    Array,
    Finding,
    Verdict,
    above,
    beats,
    below,
    change,
    competitive,
    decays,
    falling,
    holds,
    improves,
    lead,
    means_of_all,
    most,
    named,
    opposite,
    over_seeds,
    plasticity_lost,
    relative_change,
    resampled,
    rising,
    smallest_lead,
    within,
    worst,
)
from upgd.paper.experiments import ENVIRONMENTS, EXPERIMENTS, MAIN, agents_name, title
from upgd.paper.results import load
from upgd.paper.sets import METHODS
from upgd.report.verdict import HOLDS

PLASTIC = ("shrink-and-perturb", "pgd", "n-upgd")
"""Methods that only address loss of plasticity."""
STABLE = ("s-ewc", "s-mas", "s-si")
"""Methods that only address forgetting."""
STRONG = 0.7
"""A correlation from which on one speaks of a strong one."""
STEADY = 0.1
"""A loss holds if it changes by less than this share."""


@dataclass(frozen=True)
class Claim:
    """One of the paper's claims.

    Attributes:
        number: Its number in the list.
        text: What it says, in a line.
        needs: The experiments it looks at.
        check: Its statements, judged.
    """

    number: int
    text: str
    needs: tuple[str, ...]
    check: Callable[[All], list[Finding]]


def _input_permuted(all_: All) -> list[Finding]:
    results = all_.get("input-permuted-mnist")
    return [
        *[holds(results, arm) for arm in ("upgd", "n-upgd", "shrink-and-perturb")],
        *[decays(results, arm) for arm in (*STABLE, "s-rwalk")],
        competitive(results),
    ]


def _plasticity_and_accuracy(all_: All) -> list[Finding]:
    results = all_.get("input-permuted-mnist")

    def late(curve: Array) -> float:
        return float(curve[-100:].mean())

    accuracy = means_of_all(results, "accuracy", late)
    plasticity = means_of_all(results, "plasticity", late)
    both = {f"a {m}": v for m, v in accuracy.items()} | {f"p {m}": v for m, v in plasticity.items()}

    def correlation(means: Array) -> float:
        half = len(means) // 2
        return float(np.corrcoef(means[:half], means[half:])[0, 1])

    found = resampled(both, correlation) if accuracy and plasticity else None
    text = f"plasticity and accuracy correlate over methods (r > {STRONG})"
    return [Finding(text, found, above(found, STRONG), points=False)]


def _diagnostics(all_: All) -> list[Finding]:
    results = all_.get("input-permuted-mnist")
    kept = ("upgd", "n-upgd", "shrink-and-perturb")
    found = []
    for method in METHODS:
        zeros = change(results, method, "zero_activations")
        sparse = change(results, method, "gradient_l0")
        up, down = rising(zeros), falling(sparse)
        name = title(method)
        if method in kept:
            found.append(Finding(f"{name}: zero activations do not rise", zeros, opposite(up)))
            found.append(Finding(f"{name}: gradient ℓ0 does not fall", sparse, opposite(down)))
        else:
            found.append(Finding(f"{name}: zero activations rise", zeros, up))
            found.append(Finding(f"{name}: gradient ℓ0 falls", sparse, down))
    return found


def _cifar(all_: All) -> list[Finding]:
    results = all_.get("label-permuted-cifar10")
    top = over_seeds(results, "adamw", "accuracy", lambda curve: float(np.max(_smooth(curve, 20))))
    in_range = worst([above(top, 0.40), below(top, 0.45)])
    lost = [plasticity_lost(results, method) for method in METHODS]
    return [
        *[improves(results, arm) for arm in (*STABLE, "s-rwalk", "upgd")],
        Finding("AdamW tops out slightly above 40% (between 40 and 45)", top, in_range),
        most("no loss of plasticity", lost, lambda found: opposite(rising(found))),
        competitive(results),
    ]


def _smooth(curve: Array, size: int) -> Array:
    size = min(size, len(curve))
    return np.convolve(curve, np.ones(size) / size, "valid")


def _label_permuted(name: str, shrink: Callable[..., Finding]) -> Callable[[All], list[Finding]]:
    def check(all_: All) -> list[Finding]:
        results = all_.get(name)
        better = ("upgd", "s-ewc", "s-mas")
        found = [improves(results, arm) for arm in better]
        for arm in better:
            least = smallest_lead(results, arm, PLASTIC)
            text = f"{title(arm)} beats methods that only address plasticity"
            found.append(Finding(text, least, above(least)))
        struggle = change(results, "s-rwalk")
        text = "S-RWalk struggles: it does not improve"
        found.append(Finding(text, struggle, opposite(rising(struggle))))
        rest = [m for m in METHODS if m not in (*better, "s-rwalk", "shrink-and-perturb")]
        found += [decays(results, arm) for arm in rest]
        found.append(shrink(results, "shrink-and-perturb"))
        lost = [plasticity_lost(results, method) for method in METHODS]
        found.append(most("loss of plasticity", lost, rising))
        return [*found, competitive(results)]

    return check


def _among_the_best(all_: All) -> list[Finding]:
    found = []
    for name in MAIN:
        results = all_.get(name)
        window = results.window if results else 1
        measures: dict[str, tuple[str, Callable[[Array], float]]] = {
            "forgetting": ("accuracy", forgetting),
            "loss of plasticity": ("plasticity", partial(loss_of_plasticity, window=window)),
        }
        for what, (metric, statistic) in measures.items():
            try:
                values = means_of_all(results, metric, statistic)
            except ValueError:  # too short
                values = {}
            rank = resampled(values, _rank_of_upgd) if values else None
            text = f"{name}: {what} of UPGD-W among the best three (its rank)"
            found.append(Finding(text, rank, below(rank, 3.5), points=False))
    return found


def _rank_of_upgd(means: Array) -> float:
    mine = means[METHODS.index("upgd")]
    return float(1 + (means < mine).sum())


def _toys(all_: All) -> list[Finding]:
    first, second = (all_.get(name) for name in ("toy-changing-inputs", "toy-changing-sign"))
    degrades = relative_change(first, "sgdw", "loss")
    gains = relative_change(first, "upgd", "loss")
    found = [
        Finding("inputs: SGD degrades (relative)", degrades, above(degrades), False),
        beats(first, "shrink-and-perturb", "reference", "loss"),
        *[beats(first, arm, "shrink-and-perturb", "loss") for arm in ("pgd", "n-upgd")],
        *[beats(first, "upgd", arm, "loss") for arm in ("sgdw", "pgd", "n-upgd")],
        Finding("inputs: UPGD improves (relative)", gains, below(gains), False),
    ]
    for arm in ("shrink-and-perturb", "pgd", "n-upgd"):
        steady = relative_change(second, arm, "loss")
        text = f"sign: {named(arm)} does not get worse (relative)"
        found.append(Finding(text, steady, below(steady, STEADY), False))
        found.append(beats(second, "upgd", arm, "loss"))
    for results in (first, second):
        found.append(beats(results, "upgd-2nd", "upgd", "loss"))
    return found


def _stationary(all_: All) -> list[Finding]:
    return [beats(all_.get("stationary-mnist"), "upgd", "sgdw")]


def _ablation(all_: All) -> list[Finding]:
    found = []
    for name in MAIN:
        results = all_.get(f"ablation-{name}")
        twins = EXPERIMENTS[f"ablation-{name}"].twins()
        label = name != "input-permuted-mnist"

        def add(
            finding: Finding, *arms: str, where: str = name, same: Mapping[str, str] = twins
        ) -> None:
            if not any(arm in same for arm in arms):  # an arm that is another one shows nothing
                found.append(finding._replace(statement=f"{where}: {finding.statement}"))

        for part in ("sgd+wd", "sgd+wp"):
            add(beats(results, part, "sgd"), part)
        add(holds(results, "sgd+wd+wp"), "sgd+wd+wp")
        if label:
            add(improves(results, "upgd"))
            add(improves(results, "sgd+ug"), "sgd+ug")
            little = lead(results, "upgd", "sgd+ug")
            text = "decay and perturbation matter little beside gating"
            add(Finding(text, little, within(little)), "sgd+ug")
        else:
            add(beats(results, "upgd", "sgd+wd+wp"))
            add(holds(results, "sgd+ug"), "sgd+ug")
    return found


def _figure_1(all_: All) -> list[Finding]:
    emnist, long = all_.get("label-permuted-emnist"), all_.get("figure-1")
    hardly = change(emnist, "adamw")
    behind = lead(long, "adam", "adam-restarts")
    level = lead(long, "upgd", "adam-restarts")
    return [
        Finding("EMNIST: Adam hardly improves (by a point at most)", hardly, below(hardly, HOLDS)),
        improves(emnist, "upgd"),
        Finding("MNIST: Adam falls below Adam-Restarts", behind, below(behind)),
        holds(long, "adam-restarts"),
        Finding("MNIST: UPGD-W does not fall below", level, above(level, -HOLDS)),
    ]


def _theorems(_: All) -> list[Finding]:
    return list(_proved())


@cache
def _proved() -> tuple[Finding, ...]:
    """What does not depend on runs."""
    from torch import nn

    from upgd.paper import theorems

    exact = theorems.propagation()
    conserved, _second = theorems.conservation(nn.ReLU, 8, 40)
    bent, _second = theorems.conservation(nn.Tanh, 8, 40)
    found = [
        ("propagated utility is HesScale's (relative distance below 1e-8)", exact, exact < 1e-8),
        ("first-order utility is conserved, ReLU (below 1e-9)", conserved, conserved < 1e-9),
        ("and not for tanh (above 0.01)", bent, bent > 0.01),
    ]
    for protect, name in ((False, "N-UPGD"), (True, "UPGD")):
        average, bound = theorems.bounded(protect)
        text = f"{name}'s averaged squared gradient obeys its bound (share of it)"
        found.append((text, average / bound, average < bound))
    return tuple(
        Finding(text, Interval(value, value, value), YES if right else NO, points=False)
        for text, value, right in found
    )


CLAIMS: Sequence[Claim] = (
    Claim(
        2,
        "Input-permuted MNIST: UPGD-W, N-UPGD-W and S&P hold, methods against forgetting decay",
        ("input-permuted-mnist",),
        _input_permuted,
    ),
    Claim(
        3,
        "Over methods, plasticity and accuracy correlate strongly",
        ("input-permuted-mnist",),
        _plasticity_and_accuracy,
    ),
    Claim(
        4,
        "Zero activations rise and gradient ℓ0 falls for all but UPGD-W, N-UPGD-W and S&P",
        ("input-permuted-mnist",),
        _diagnostics,
    ),
    Claim(
        5,
        "Label-permuted CIFAR-10: methods against forgetting keep improving, UPGD-W is competitive",
        ("label-permuted-cifar10",),
        _cifar,
    ),
    Claim(
        6,
        "Label-permuted EMNIST: UPGD-W, S-EWC and S-MAS keep improving, the rest deteriorates",
        ("label-permuted-emnist",),
        _label_permuted("label-permuted-emnist", decays),
    ),
    Claim(
        7,
        "Label-permuted mini-ImageNet: the same; S&P holds at a lower level",
        ("label-permuted-mini-imagenet",),
        _label_permuted("label-permuted-mini-imagenet", holds),
    ),
    Claim(
        8,
        "UPGD-W's forgetting and loss of plasticity are among the best on all four problems",
        MAIN,
        _among_the_best,
    ),
    Claim(
        9,
        "PPO: Adam's return falls with long training, AdaUPGD's improves",
        tuple(agents_name(environment) for environment in ENVIRONMENTS),
        policy_collapse.findings,
    ),
    Claim(
        10,
        "Toys: SGD loses plasticity in linear networks; UPGD is best; second order is better",
        ("toy-changing-inputs", "toy-changing-sign"),
        _toys,
    ),
    Claim(11, "Stationary MNIST: UPGD improves over SGD", ("stationary-mnist",), _stationary),
    Claim(
        12,
        "Ablation: decay and perturbation help, gating improves continually",
        tuple(f"ablation-{name}" for name in MAIN),
        _ablation,
    ),
    Claim(13, "Theorems: propagation, conservation, convergence", (), _theorems),
    Claim(
        14,
        "Figure 1: Adam hardly improves or falls below its restarts, UPGD-W does neither",
        ("label-permuted-emnist", "figure-1"),
        _figure_1,
    ),
)
"""All but the first, which :mod:`upgd.paper.utility_quality` computes and judges."""


class Judged(NamedTuple):
    """A claim with its statements and its verdict."""

    number: int
    text: str
    findings: list[Finding]
    verdict: Verdict


def judge(places: Iterable[str | os.PathLike[str]]) -> list[Judged]:
    """All fourteen, from studies' folders or folders of tables."""
    folders = [Path(place) for place in places]
    return judge_results(load(folders), folders)


def judge_results(results: All, folders: Iterable[Path]) -> list[Judged]:
    """The same from results that are loaded; the first claim's are found in the folders."""
    found = [_utility_quality(folders)]
    for claim in CLAIMS:
        findings = claim.check(results)
        found.append(Judged(claim.number, claim.text, findings, worst(f.verdict for f in findings)))
    return found


def _utility_quality(places: Iterable[Path]) -> Judged:
    from upgd.paper import utility_quality

    findings: list[Finding] = []
    for path in (p for place in places for p in sorted(place.rglob("correlations.csv.gz"))):
        findings = [
            Finding(
                each.statement,
                Interval(each.estimate, each.low, each.high),
                YES if each.holds else NO,
                points=False,
            )
            for each in utility_quality.claim(utility_quality.Results.load(path))
        ]
    text = "Second-order utility has the highest rank correlation with true utility throughout"
    return Judged(1, text, findings, worst(f.verdict for f in findings))


def table(found: Iterable[Judged]) -> list[str]:
    """Claims as lines of Markdown."""
    lines = ["| | claim | statements that hold | verdict |", "|---:|---|---:|---|"]
    for claim in found:
        lines.append(f"| {claim.number} | {claim.text} | {sure(claim)} | {claim.verdict} |")
    return lines


def sure(claim: Judged) -> str:
    """How many of a claim's statements hold."""
    number = sum(finding.verdict == YES for finding in claim.findings)
    return f"{number} of {len(claim.findings)}" if claim.findings else "-"
