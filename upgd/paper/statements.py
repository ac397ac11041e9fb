"""The paper's claims as statements, with the statistics of :mod:`upgd.paper.evidence`.

Statements and their thresholds are fixed here, not fitted to results; all say how many seeds
diverged. UPGD-W is *among the best* if it is one of the best three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from upgd.metrics import FEWEST, Interval, forgetting, loss_of_plasticity
from upgd.paper import evidence as ev
from upgd.paper.evidence import All, Array, Finding
from upgd.paper.experiments import EXPERIMENTS, title
from upgd.paper.results import Results
from upgd.paper.sets import MAIN, METHODS, STATIONARY, TOYS
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


# ------------------------------------------------------------------ words of statements
def with_diverged(finding: Finding, results: Results, *arms: str) -> Finding:
    """A statement with the number of diverged seeds."""
    told = ""
    for arm in dict.fromkeys(arms):
        gone, all_ = ev.diverged(results, arm)
        told += f" ({named(results, arm)}: {gone} of {all_} seeds diverged)" if gone else ""
    return finding._replace(statement=finding.statement + told)


def unless_diverged(finding: Finding, results: Results, arm: str, *others: str) -> Finding:
    """The same for a statement that does not hold if a seed diverged."""
    gone, all_ = ev.diverged(results, arm)
    if gone:
        finding = finding._replace(verdict=ev.NO if all_ >= FEWEST else ev.UNKNOWN)
    return with_diverged(finding, results, arm, *others)


def improves(results: Results, arm: str) -> Finding:
    """The statement that an arm improves."""
    return unless_diverged(_changes(results, arm, "improves", ev.rising), results, arm)


def decays(results: Results, arm: str) -> Finding:
    """The statement that an arm decays."""
    return with_diverged(_changes(results, arm, "decays", ev.falling), results, arm)


def holds(results: Results, arm: str) -> Finding:
    """The statement that an arm holds."""
    return unless_diverged(_changes(results, arm, "holds", ev.within), results, arm)


def _changes(
    results: Results, arm: str, how: str, judge: Callable[[Interval | None], ev.Verdict]
) -> Finding:
    found = ev.change(results, arm)
    return Finding(f"{named(results, arm)} {how}", found, judge(found))


def competitive(results: Results, arm: str = "upgd") -> Finding:
    """The statement that no method is a point ahead of an arm."""
    found = ev.smallest_lead(results, arm, METHODS)
    text = f"{named(results, arm)} surpasses or is competitive with every method"
    return unless_diverged(Finding(text, found, ev.above(found, -HOLDS)), results, arm, *METHODS)


def beats(results: Results, arm: str, other: str, metric: str = "accuracy") -> Finding:
    """The statement that an arm has the higher accuracy, or the lower loss, over the run."""
    found = ev.lead(results, arm, other, metric)
    text = f"{named(results, arm)} beats {named(results, other)}"
    judged = ev.above(found) if metric == "accuracy" else ev.below(found)
    if ev.has_lost(results, other) and ev.diverged(results, arm)[1] >= FEWEST:
        judged = ev.YES
    finding = Finding(text, found, judged, ev.POINTS if metric == "accuracy" else ev.PLAIN)
    return unless_diverged(finding, results, arm, other)


def named(results: Results, arm: str) -> str:
    """The title of an arm in an experiment's figures."""
    titles = {each.name: each.title for each in EXPERIMENTS[results.name].arms}
    return titles.get(arm) or title(arm, decay=results.name not in (*TOYS, STATIONARY))


def most(
    statement: str, findings: Sequence[Interval | None], judge: Callable[..., ev.Verdict]
) -> Finding:
    """The statement that at least :data:`MOST` of ten findings pass."""
    verdicts = [judge(found) for found in findings]
    sure, open_ = verdicts.count(ev.YES), verdicts.count(ev.UNKNOWN)
    verdict = ev.YES if sure >= ev.MOST else ev.NO if sure + open_ < ev.MOST else ev.UNKNOWN
    known = (
        Interval(float(sure), float(sure), float(sure + open_)) if open_ < len(verdicts) else None
    )
    return Finding(f"{statement} (methods, of {len(verdicts)})", known, verdict, ev.PLAIN)


# --------------------------------------------------------------------------------- claims
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

    accuracy = ev.means_of_all(results, "accuracy", late)
    plasticity = ev.means_of_all(results, "plasticity", late)
    pairs = {
        method: {seed: (by_seed[seed], plasticity[method][seed]) for seed in by_seed}
        for method, by_seed in (accuracy.items() if plasticity else ())
    }
    found = ev.resampled(pairs, correlation)
    wide = ev.resampled(pairs, correlation, arms_too=True)
    text = f"plasticity and accuracy correlate over the ten methods (r > {STRONG})"
    return [
        with_diverged(Finding(text, found, ev.above(found, STRONG), ev.PLAIN), results, *METHODS),
        Finding(
            "the same if the ten stand for others (methods are drawn, too)", wide, ev.TOLD, ev.PLAIN
        ),
    ]


def diagnostics(all_: All) -> list[Finding]:
    """Claim 4."""
    results = _of(all_, "input-permuted-mnist")
    kept = ("upgd", "n-upgd", "shrink-and-perturb")
    found = []
    for method in METHODS:
        zeros = ev.change(results, method, "zero_activations")
        sparse = ev.change(results, method, "gradient_l0")
        up, down = ev.rising(zeros), ev.falling(sparse)
        tell: Callable[..., Finding] = with_diverged
        texts = ("zero activations rise", "gradient ℓ0 falls")
        if method in kept:
            up, down, tell = ev.opposite(up), ev.opposite(down), unless_diverged
            texts = ("zero activations do not rise", "gradient ℓ0 does not fall")
        for text, statistic, verdict in zip(texts, (zeros, sparse), (up, down), strict=True):
            finding = Finding(f"{named(results, method)}: {text}", statistic, verdict)
            found.append(tell(finding, results, method))
    return found


def cifar(all_: All) -> list[Finding]:
    """Claim 5."""
    results = _of(all_, "label-permuted-cifar10")
    top = ev.over_seeds(
        results, "adamw", "accuracy", lambda curve: float(np.max(_smooth(curve, 20)))
    )
    in_range = ev.worst([ev.above(top, 0.40), ev.below(top, 0.45)])
    tops = Finding("AdamW tops out slightly above 40% (between 40 and 45)", top, in_range)
    lost = [ev.plasticity_lost(results, method) for method in METHODS]
    return [
        *[improves(results, arm) for arm in (*STABLE, "s-rwalk", "upgd")],
        with_diverged(tops, results, "adamw"),
        most("no loss of plasticity", lost, lambda found: ev.opposite(ev.rising(found))),
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
            least = ev.smallest_lead(results, arm, PLASTIC)
            text = f"{named(results, arm)} beats methods that only address plasticity"
            finding = Finding(text, least, ev.above(least))
            found.append(unless_diverged(finding, results, arm, *PLASTIC))
        struggle = ev.change(results, "s-rwalk")
        text = "S-RWalk struggles: it does not improve"
        finding = Finding(text, struggle, ev.opposite(ev.rising(struggle)))
        found.append(with_diverged(finding, results, "s-rwalk"))
        rest = [m for m in METHODS if m not in (*better, "s-rwalk", "shrink-and-perturb")]
        found += [decays(results, arm) for arm in rest]
        found.append(shrink(results, "shrink-and-perturb"))
        lost = [ev.plasticity_lost(results, method) for method in METHODS]
        found.append(most("loss of plasticity", lost, ev.rising))
        return [*found, competitive(results)]

    return check


def among_the_best(all_: All) -> list[Finding]:
    """Claim 8."""
    found = []
    for name in MAIN:
        results = _of(all_, name)
        lost = partial(loss_of_plasticity, window=results.window)
        measures: tuple[tuple[str, str, Callable[[Array], float]], ...] = (
            ("forgetting", "accuracy", forgetting),
            ("loss of plasticity", "plasticity", lost),
        )
        for what, metric, statistic in measures:
            rank = None
            with suppress(ValueError):  # too short
                values = ev.means_of_all(results, metric, statistic)
                if "upgd" in values:
                    rank = ev.resampled(values, partial(_rank, list(values).index("upgd")))
            text = f"{name}: {what} of UPGD-W among the best three (its rank)"
            finding = Finding(text, rank, ev.below(rank, 3.5), ev.PLAIN)
            found.append(unless_diverged(finding, results, "upgd", *METHODS))
    return found


def _rank(mine: int, means: Array) -> float:
    return float(1 + (means < means[mine]).sum())


def toys(all_: All) -> list[Finding]:
    """Claim 10; compares losses, with changes as fractions of the early loss."""
    first, second = (_of(all_, name) for name in TOYS)
    inputs, sign = "changing inputs: ", "changing sign: "
    rivals = ("reference", "sgdw", "shrink-and-perturb", "pgd", "n-upgd")
    degrades = ev.relative_change(first, "sgdw", "loss")
    gains = ev.relative_change(first, "upgd", "loss")
    found = [
        with_diverged(
            Finding("SGD's loss rises", degrades, ev.above(degrades), ev.PERCENT), first, "sgdw"
        ),
        beats(first, "shrink-and-perturb", "reference", "loss"),
        *[beats(first, arm, "shrink-and-perturb", "loss") for arm in ("pgd", "n-upgd")],
        *[beats(first, "upgd", arm, "loss") for arm in rivals],
        unless_diverged(
            Finding("UPGD improves: its loss falls", gains, ev.below(gains), ev.PERCENT),
            first,
            "upgd",
        ),
        beats(first, "upgd-2nd", "upgd", "loss"),
    ]
    found = [_where(inputs, finding) for finding in found]
    for arm in PLASTIC:
        steady = ev.relative_change(second, arm, "loss")
        text = f"{named(second, arm)} does not get worse: its loss rises by less than {STEADY:.0%}"
        finding = Finding(text, steady, ev.below(steady, STEADY), ev.PERCENT)
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
        little = ev.lead(results, "upgd", "sgd+ug")
        text = "decay and perturbation matter little beside gating: UPGD-W's lead over SGD+UG"
        yield unless_diverged(Finding(text, little, ev.within(little)), results, "upgd", "sgd+ug")


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
    hardly = ev.change(emnist, "adamw")
    behind = ev.lead(long, "adam", "adam-restarts", last=ev.LAST)
    level = ev.lead(long, "upgd", "adam-restarts", last=ev.LAST)
    text = "Adam hardly improves (by a point at most)"
    late = f"in the last {ev.LAST} tasks"
    below = Finding(f"Adam is below Adam-Restarts {late}", behind, ev.below(behind))
    not_below = f"UPGD-W is not below Adam-Restarts {late}"
    above = Finding(not_below, level, ev.above(level, -HOLDS))
    found = [
        with_diverged(Finding(text, hardly, ev.below(hardly, HOLDS)), emnist, "adamw"),
        improves(emnist, "upgd"),
    ]
    more = [
        with_diverged(below, long, "adam", "adam-restarts"),
        holds(long, "adam-restarts"),
        unless_diverged(above, long, "upgd", "adam-restarts"),
    ]
    return [*(_where("EMNIST: ", each) for each in found), *(_where("MNIST: ", e) for e in more)]
