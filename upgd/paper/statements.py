"""The paper's claims as statements, with the statistics of :mod:`upgd.paper.evidence`.

Statements and their thresholds are fixed here, not fitted to results.

UPGD-W is *among the best* if it is one of the best three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from upgd.metrics import forgetting, loss_of_plasticity
from upgd.paper.comparisons import (
    beats,
    competitive,
    decays,
    holds,
    improves,
    most,
    named,
    unless_diverged,
    with_diverged,
)
from upgd.paper.evidence import (
    LAST,
    PERCENT,
    PLAIN,
    TOLD,
    All,
    Array,
    Finding,
    above,
    below,
    change,
    falling,
    lead,
    means_of_all,
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
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.results import Results
from upgd.paper.sets import MAIN, METHODS, TOYS
from upgd.paper.theorems import findings as proved
from upgd.report.verdict import HOLDS

PLASTIC = ("shrink-and-perturb", "pgd", "n-upgd")
"""Methods that only address loss of plasticity."""
STABLE = ("s-ewc", "s-mas", "s-si")
"""Methods that only address forgetting."""
STRONG = 0.7
"""The least correlation that counts as strong."""
STEADY = 0.1
"""A loss that rises by less than this fraction does not count as worse."""


def _of(all_: All, name: str) -> Results:
    """An experiment's results, which may be empty."""
    return all_.get(name) or Results(name, 1, {})


def input_permuted(all_: All) -> list[Finding]:
    """Claim 2."""
    results = _of(all_, "input-permuted-mnist")
    return [
        *[holds(results, arm) for arm in ("upgd", "n-upgd", "shrink-and-perturb")],
        *[decays(results, arm) for arm in (*STABLE, "s-rwalk")],
        competitive(results),
    ]


def plasticity_and_accuracy(all_: All) -> list[Finding]:
    """Claim 3.

    The claim is about the figure's ten methods, so seeds are resampled. A second interval, with
    methods resampled too, shows how little ten methods say about others.
    """
    results = _of(all_, "input-permuted-mnist")

    def late(curve: Array) -> float:
        return float(curve[-100:].mean())

    def correlation(means: Array) -> float:
        with np.errstate(invalid="ignore", divide="ignore"):  # the same method in all ten draws
            return float(np.corrcoef(means.T)[0, 1])

    accuracy = means_of_all(results, "accuracy", late)
    plasticity = means_of_all(results, "plasticity", late)
    pairs = {
        method: {seed: (by_seed[seed], plasticity[method][seed]) for seed in by_seed}
        for method, by_seed in (accuracy.items() if plasticity else ())
    }
    found = resampled(pairs, correlation)
    wide = resampled(pairs, correlation, arms_too=True)
    text = f"plasticity and accuracy correlate over the ten methods (r > {STRONG})"
    return [
        with_diverged(Finding(text, found, above(found, STRONG), PLAIN), results, *METHODS),
        Finding("the same if the ten stand for others (methods are drawn, too)", wide, TOLD, PLAIN),
    ]


def diagnostics(all_: All) -> list[Finding]:
    """Claim 4."""
    results = _of(all_, "input-permuted-mnist")
    kept = ("upgd", "n-upgd", "shrink-and-perturb")
    found = []
    for method in METHODS:
        zeros = change(results, method, "zero_activations")
        sparse = change(results, method, "gradient_l0")
        up, down = rising(zeros), falling(sparse)
        name = named(results, method)
        if method in kept:
            both = [
                Finding(f"{name}: zero activations do not rise", zeros, opposite(up)),
                Finding(f"{name}: gradient ℓ0 does not fall", sparse, opposite(down)),
            ]
            found += [unless_diverged(finding, results, method) for finding in both]
        else:
            both = [
                Finding(f"{name}: zero activations rise", zeros, up),
                Finding(f"{name}: gradient ℓ0 falls", sparse, down),
            ]
            found += [with_diverged(finding, results, method) for finding in both]
    return found


def cifar(all_: All) -> list[Finding]:
    """Claim 5."""
    results = _of(all_, "label-permuted-cifar10")
    top = over_seeds(results, "adamw", "accuracy", lambda curve: float(np.max(_smooth(curve, 20))))
    in_range = worst([above(top, 0.40), below(top, 0.45)])
    tops = Finding("AdamW tops out slightly above 40% (between 40 and 45)", top, in_range)
    lost = [plasticity_lost(results, method) for method in METHODS]
    return [
        *[improves(results, arm) for arm in (*STABLE, "s-rwalk", "upgd")],
        with_diverged(tops, results, "adamw"),
        most("no loss of plasticity", lost, lambda found: opposite(rising(found))),
        competitive(results),
    ]


def _smooth(curve: Array, size: int) -> Array:
    size = min(size, len(curve))
    return np.convolve(curve, np.ones(size) / size, "valid")


def label_permuted(name: str, shrink: Callable[..., Finding]) -> Callable[[All], list[Finding]]:
    """Claims 6 and 7, which differ in the statement about S&P."""

    def check(all_: All) -> list[Finding]:
        results = _of(all_, name)
        better = ("upgd", "s-ewc", "s-mas")
        found = [improves(results, arm) for arm in better]
        for arm in better:
            least = smallest_lead(results, arm, PLASTIC)
            text = f"{named(results, arm)} beats methods that only address plasticity"
            finding = Finding(text, least, above(least))
            found.append(unless_diverged(finding, results, arm, *PLASTIC))
        struggle = change(results, "s-rwalk")
        text = "S-RWalk struggles: it does not improve"
        finding = Finding(text, struggle, opposite(rising(struggle)))
        found.append(with_diverged(finding, results, "s-rwalk"))
        rest = [m for m in METHODS if m not in (*better, "s-rwalk", "shrink-and-perturb")]
        found += [decays(results, arm) for arm in rest]
        found.append(shrink(results, "shrink-and-perturb"))
        lost = [plasticity_lost(results, method) for method in METHODS]
        found.append(most("loss of plasticity", lost, rising))
        return [*found, competitive(results)]

    return check


def among_the_best(all_: All) -> list[Finding]:
    """Claim 8."""
    found = []
    for name in MAIN:
        results = _of(all_, name)
        measures: dict[str, tuple[str, Callable[[Array], float]]] = {
            "forgetting": ("accuracy", forgetting),
            "loss of plasticity": (
                "plasticity",
                partial(loss_of_plasticity, window=results.window),
            ),
        }
        for what, (metric, statistic) in measures.items():
            try:
                values = means_of_all(results, metric, statistic)
            except ValueError:  # too short
                values = {}
            mine = list(values).index("upgd") if "upgd" in values else 0
            rank = resampled(values, partial(_rank, mine)) if "upgd" in values else None
            text = f"{name}: {what} of UPGD-W among the best three (its rank)"
            finding = Finding(text, rank, below(rank, 3.5), PLAIN)
            found.append(unless_diverged(finding, results, "upgd", *METHODS))
    return found


def _rank(mine: int, means: Array) -> float:
    return float(1 + (means < means[mine]).sum())


def toys(all_: All) -> list[Finding]:
    """Claim 10; compares losses, with changes as fractions of the early loss."""
    first, second = (_of(all_, name) for name in TOYS)
    inputs, sign = "changing inputs: ", "changing sign: "
    rivals = ("reference", "sgdw", "shrink-and-perturb", "pgd", "n-upgd")
    degrades = relative_change(first, "sgdw", "loss")
    gains = relative_change(first, "upgd", "loss")
    found = [
        with_diverged(
            Finding("SGD's loss rises", degrades, above(degrades), PERCENT), first, "sgdw"
        ),
        beats(first, "shrink-and-perturb", "reference", "loss"),
        *[beats(first, arm, "shrink-and-perturb", "loss") for arm in ("pgd", "n-upgd")],
        *[beats(first, "upgd", arm, "loss") for arm in rivals],
        unless_diverged(
            Finding("UPGD improves: its loss falls", gains, below(gains), PERCENT), first, "upgd"
        ),
        beats(first, "upgd-2nd", "upgd", "loss"),
    ]
    found = [_where(inputs, finding) for finding in found]
    for arm in PLASTIC:
        steady = relative_change(second, arm, "loss")
        text = f"{named(second, arm)} does not get worse: its loss rises by less than {STEADY:.0%}"
        finding = Finding(text, steady, below(steady, STEADY), PERCENT)
        found.append(_where(sign, unless_diverged(finding, second, arm)))
        found.append(_where(sign, beats(second, "upgd", arm, "loss")))
    return [*found, _where(sign, beats(second, "upgd-2nd", "upgd", "loss"))]


def _where(place: str, finding: Finding) -> Finding:
    return finding._replace(statement=place + finding.statement)


def stationary(all_: All) -> list[Finding]:
    """Claim 11."""
    return [beats(_of(all_, "stationary-mnist"), "upgd", "sgdw")]


def ablation(all_: All) -> list[Finding]:
    """Claim 12; arms that are the same learner are not compared with each other."""
    return [
        _where(f"{name}: ", finding)
        for name in MAIN
        for finding in _ablation(_with_twins(_of(all_, f"ablation-{name}")))
    ]


def _ablation(results: Results) -> Iterator[Finding]:
    twins = EXPERIMENTS[results.name].twins()

    def differ(arm: str, other: str) -> bool:
        return twins.get(arm, arm) != twins.get(other, other)

    for part in ("sgd+wd", "sgd+wp"):
        if differ(part, "sgd"):
            yield beats(results, part, "sgd")
    yield holds(results, "sgd+wd+wp")
    if results.name == "ablation-input-permuted-mnist":
        if differ("upgd", "sgd+wd+wp"):
            yield beats(results, "upgd", "sgd+wd+wp")
        yield holds(results, "sgd+ug")
        return
    yield improves(results, "upgd")
    yield improves(results, "sgd+ug")
    if differ("upgd", "sgd+ug"):
        little = lead(results, "upgd", "sgd+ug")
        text = "decay and perturbation matter little beside gating: UPGD-W's lead over SGD+UG"
        yield unless_diverged(Finding(text, little, within(little)), results, "upgd", "sgd+ug")


def _with_twins(results: Results) -> Results:
    """Results in which arms that equal another arm have its series."""
    twins = EXPERIMENTS[results.name].twins()
    series = {
        metric: {**arms, **{arm: arms[same] for arm, same in twins.items() if same in arms}}
        for metric, arms in results.series.items()
    }
    gone = results.diverged
    gone = {**gone, **{arm: gone[same] for arm, same in twins.items() if same in gone}}
    return replace(results, series=series, diverged=gone)


def figure_1(all_: All) -> list[Finding]:
    """Claim 14; compares the last tasks."""
    emnist, long = _of(all_, "label-permuted-emnist"), _of(all_, "figure-1")
    hardly = change(emnist, "adamw")
    behind = lead(long, "adam", "adam-restarts", last=LAST)
    level = lead(long, "upgd", "adam-restarts", last=LAST)
    text = "Adam hardly improves (by a point at most)"
    late = f"in the last {LAST} tasks"
    found = [
        with_diverged(Finding(text, hardly, below(hardly, HOLDS)), emnist, "adamw"),
        improves(emnist, "upgd"),
    ]
    more = [
        with_diverged(
            Finding(f"Adam is below Adam-Restarts {late}", behind, below(behind)),
            *(long, "adam", "adam-restarts"),
        ),
        holds(long, "adam-restarts"),
        unless_diverged(
            Finding(f"UPGD-W is not below Adam-Restarts {late}", level, above(level, -HOLDS)),
            *(long, "upgd", "adam-restarts"),
        ),
    ]
    return [
        *[_where("EMNIST: ", finding) for finding in found],
        *[_where("MNIST: ", finding) for finding in more],
    ]


def theorems(_: All) -> list[Finding]:
    """Claim 13, which does not depend on runs."""
    return list(proved())
