"""The paper's claims as statements, with the statistics of :mod:`upgd.paper.evidence`.

Each statement names the part of the paper's words that it judges (:mod:`upgd.paper.quotations`).
All say how many seeds diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from upgd.metrics import Interval, forgetting, loss_of_plasticity
from upgd.paper import evidence as ev
from upgd.paper import phrases as say
from upgd.paper.evidence import All, Array
from upgd.paper.experiments import ABLATION, EXPERIMENTS
from upgd.paper.figures import LONG
from upgd.paper.phrases import named, ours, unless_diverged, with_diverged
from upgd.paper.results import Results
from upgd.paper.sets import MAIN, METHODS, TOYS
from upgd.paper.verdicts import (
    AHEAD,
    PERCENT,
    PLAIN,
    TOLD,
    UNKNOWN,
    UP,
    Finding,
    Verdict,
    shown,
    worst,
)
from upgd.report.verdict import HOLDS

PLASTIC = ("shrink-and-perturb", "pgd", "n-upgd")
"""Methods that only address loss of plasticity."""
STABLE = ("s-ewc", "s-mas", "s-si")
"""Methods that only address forgetting."""
BETTER = ("upgd", "s-ewc", "s-mas")
"""Methods that address forgetting, without the two that the paper excepts."""


def _of(all_: All, name: str) -> Results:
    """An experiment's results, which may be empty."""
    return all_.get(name) or Results(name, 1, {})


def _part(name: str, *findings: Finding) -> list[Finding]:
    """Statements on a part of the paper's words."""
    return [finding._replace(part=name) for finding in findings]


def _where(place: str, findings: Iterable[Finding]) -> list[Finding]:
    return [finding._replace(statement=place + finding.statement) for finding in findings]


# --------------------------------------------------------------------------------- claims
def input_permuted(all_: All) -> list[Finding]:
    """Claim 2."""
    results = _of(all_, "input-permuted-mnist")
    kept = ("upgd", "n-upgd", "shrink-and-perturb")
    pgd, upgd = (
        Finding(f"{text}, since tasks 11–30", ev.change(results, arm), TOLD, words=UP)
        for arm, text in (
            ("pgd", "PGD, which is counted among such methods on other problems"),
            ("upgd", "UPGD-W continues to improve, where the section says that it maintains"),
        )
    )
    return [
        *_part("decay", *[say.decays(results, arm) for arm in STABLE]),
        *_part("maintain", *[say.maintains(results, arm) for arm in kept], pgd),
        *_part("except", say.decays(results, "s-rwalk")),
        *_part("competitive", say.competitive(results), upgd),
    ]


def plasticity_and_accuracy(all_: All) -> list[Finding]:
    """Claim 3.

    The claim is about the figure's ten methods, so its interval is over seeds. That of ten methods
    drawn from others (Fisher's) shows how little they say about others.
    """
    results = _of(all_, "input-permuted-mnist")

    def late(curve: Array) -> float:
        return float(curve[-100:].mean())

    def correlation(means: Array) -> float:
        first, second = means - means.mean(1, keepdims=True)
        return float(first @ second / np.sqrt((first @ first) * (second @ second)))

    both = [ev.means_of_all(results, metric, late) for metric in ("accuracy", "plasticity")]
    found = ev.together(correlation, *both) if all(both) else None
    finding = with_diverged(say.strongly(found), results, *METHODS)
    finding = _of_seeds(finding, *both)
    text = "the same if the ten methods stand for others"
    others = Finding(text, found and _fisher(found.estimate, len(both[0])), TOLD, PLAIN)
    return _part("correlated", finding, others)


def _of_seeds(finding: Finding, *values: ev.Values) -> Finding:
    """A statement on all methods at once, with its seeds where some methods have more."""
    least = len(ev.seeds_of_all(*values))
    if not least or least == max(len(x) for some in values for x in some.values()):
        return finding
    return finding._replace(statement=f"{finding.statement} ({least} seeds, which all have)")


def _fisher(correlation: float, count: int) -> Interval:
    """Fisher's 95% interval of a correlation over `count` pairs."""
    half = 1.959964 / np.sqrt(count - 3)
    z = np.arctanh(np.clip(correlation, -1 + 1e-12, 1 - 1e-12))
    low, high = np.tanh([z - half, z + half])
    return Interval(correlation, float(low), float(high))


def diagnostics(all_: All) -> list[Finding]:
    """Claim 4."""
    results = _of(all_, "input-permuted-mnist")
    kept = ("upgd", "n-upgd", "shrink-and-perturb")
    much = f"(ours: {100 * say.SUBSTANTIAL:g} points)"
    found = []
    for method in METHODS:
        zeros = ev.change(results, method, "zero_activations")
        sparse = ev.change(results, method, "gradient_l0")
        down = sparse and Interval(-sparse.estimate, -sparse.high, -sparse.low)
        spared = method in kept
        texts = ("zero activations rise", "gradient ℓ0 falls")
        if spared:
            texts = ("zero activations do not rise", "gradient ℓ0 does not fall")
        judge, tell = (ev.below, unless_diverged) if spared else (ev.above, with_diverged)
        for text, shown_, rise in zip(texts, (zeros, sparse), (zeros, down), strict=True):
            statement = f"{named(results, method)}: {text} substantially {much}"
            finding = ours(
                Finding(statement, shown_, UNKNOWN, words=UP), partial(judge, rise), say.SUBSTANTIAL
            )
            found += _part("except" if spared else "all", tell(finding, results, method))
    return found


def cifar(all_: All) -> list[Finding]:
    """Claim 5."""
    results = _of(all_, "label-permuted-cifar10")
    top = say.slightly_above(
        "AdamW tops out slightly above 40%", ev.top(results, "adamw"), level=0.4
    )
    return [
        *_part("improve", *[say.improves(results, arm) for arm in (*STABLE, "s-rwalk", "upgd")]),
        *_part("competitive", say.competitive(results)),
        *_part("all", _all_improve(results)),
        *_part("majority", _most_lose(results, False)),
        *_part("top", with_diverged(top, results, "adamw")),
    ]


def _all_improve(results: Results) -> Finding:
    """The statement that every method is better in the end; it shows the least change."""
    found = [ev.change(results, arm) for arm in ev.learners(results.name)]
    known = [each for each in found if each is not None]
    least = min(known, key=lambda each: each.estimate, default=None)
    text = "all learners improve: the least change since tasks 11–30"
    finding = Finding(text, least, worst(map(ev.above, found)), words=UP)
    for arm in ev.learners(results.name):
        finding = unless_diverged(finding, results, arm)
    return finding


def _most_lose(results: Results, lose: bool) -> Finding:
    """The statement that most methods lose plasticity, or that most do not."""
    with suppress(ValueError):  # too short
        lost = partial(loss_of_plasticity, window=results.task_window)
        values = ev.means_of_all(results, "plasticity", lost)
        found = ev.middle(values)
        count = sum(np.mean(list(x.values())) < 0 for x in values.values())
        text = f"the majority of methods {'loses' if lose else 'does not lose'} plasticity"
        told = f" ({count} of {len(values)} have negative means)"
        judged = ev.above(found) if lose else ev.below(found)
        text += told if values else ""
        return _of_seeds(Finding(text, found, judged, words=("median ",) * 2), values)
    text = f"the majority of methods {'loses' if lose else 'does not lose'} plasticity (too short)"
    return Finding(text, None, UNKNOWN)


def emnist(all_: All) -> list[Finding]:
    """Claim 6."""
    results = _of(all_, "label-permuted-emnist")
    whom = "methods that only address plasticity"
    return [
        *_part("improve", *[say.improves(results, arm) for arm in BETTER]),
        *_part("outperform", *[say.beats_all(results, arm, PLASTIC, whom) for arm in BETTER]),
        *_part("competitive", say.competitive(results)),
        *_part("struggles", say.struggles(results, "s-rwalk")),
        *_part("rest", *[say.decays(results, arm) for arm in ("s-si", "sgdw", "adamw", *PLASTIC)]),
        *_part("most", _most_lose(results, True)),
    ]


def mini_imagenet(all_: All) -> list[Finding]:
    """Claim 7."""
    results = _of(all_, "label-permuted-mini-imagenet")
    others = ("sgdw", "adamw", *PLASTIC)
    whom = "all that do not address forgetting"
    return [
        *_part("best", *[say.beats_all(results, arm, others, whom) for arm in BETTER]),
        *_part("maintained", *[say.maintains(results, arm) for arm in PLASTIC]),
        *_part("competitive", say.improves(results, "upgd"), say.competitive(results)),
        *_part(
            "trends",
            *[say.improves(results, arm) for arm in BETTER[1:]],
            say.struggles(results, "s-rwalk"),
            *[say.decays(results, arm) for arm in ("s-si", "sgdw", "adamw")],
            _most_lose(results, True),
        ),
    ]


def among_the_best(all_: All) -> list[Finding]:
    """Claim 8."""
    found = []
    for name in MAIN:
        results = _of(all_, name)
        lost = partial(loss_of_plasticity, window=results.task_window)
        measures: tuple[tuple[str, str, Callable[[Array], float]], ...] = (
            ("forgetting", "accuracy", forgetting),
            ("loss of plasticity", "plasticity", lost),
        )
        for what, metric, statistic in measures:
            rank = None
            with suppress(ValueError):  # too short
                rank = ev.rank(ev.means_of_all(results, metric, statistic), "upgd")
            text = f"{LONG[name]}: {what} of UPGD-W is among the best"
            finding = say.among_the_best(text, rank)
            found.append(unless_diverged(finding, results, "upgd", *METHODS))
    return _part("both", *found)


# ----------------------------------------------------------------------------- appendices
def toys(all_: All) -> list[Finding]:
    """Claim 10; compares losses, with changes as fractions of the earlier loss."""
    first, second = (_of(all_, name) for name in TOYS)
    rivals = ("reference", "sgdw", "shrink-and-perturb", "pgd", "n-upgd")
    inputs = [
        *_part("inputs: SGD", _loss_rises(first)),
        *_part("inputs: UPGD", _keeps_plasticity(first), _loss_falls(first, late=False)),
        *_part("inputs: others", *[say.beats(first, "upgd", arm, "loss") for arm in rivals]),
        *_part(
            "inputs: S&P",
            say.beats(first, "shrink-and-perturb", "reference", "loss"),
            *[say.beats(first, arm, "shrink-and-perturb", "loss") for arm in ("pgd", "n-upgd")],
        ),
        *_part("second", say.beats(first, "upgd-2nd", "upgd", "loss")),
    ]
    sign = [
        *_part("sign: SGD", _loss_rises(second)),
        *_part("sign: UPGD", _loss_falls(second, late=True)),
        *_part("sign: others", *[each for arm in PLASTIC for each in _steady(second, arm)]),
        *_part("second", say.beats(second, "upgd-2nd", "upgd", "loss")),
    ]
    return [*_where("changing inputs: ", inputs), *_where("changing sign: ", sign)]


def _loss_rises(results: Results) -> Finding:
    rise = ev.relative_change(results, "sgdw", "loss")
    finding = Finding("SGD's loss rises", rise, ev.above(rise), PERCENT, UP)
    return with_diverged(finding, results, "sgdw")


def _keeps_plasticity(results: Results) -> Finding:
    kept = ev.change(results, "upgd", "plasticity")
    text = "UPGD maintains its plasticity (ours: it falls by a point at most)"
    finding = Finding(text, kept, UNKNOWN, words=UP)
    judged = ours(finding, lambda margin: ev.above(kept, -margin), HOLDS)
    return unless_diverged(judged, results, "upgd")


def _loss_falls(results: Results, late: bool) -> Finding:
    """The statement that UPGD improves; with `late`, that it still does in the second half."""
    whole, half = (ev.relative_change(results, "upgd", "loss", late=x) for x in (False, True))
    how = "keeps improving" if late else "improves"
    beside = shown(Finding("", half, UNKNOWN, PERCENT, UP))
    told = f" (since the middle of the run: {beside})" if half else ""
    text = f"UPGD {how}: its loss falls (ours: no if by less than {say.STEADY:.0%}){told}"
    asked = (whole, half) if late else (whole,)
    finding = ours(
        Finding(text, whole, UNKNOWN, PERCENT, UP),
        lambda least: worst(ev.falling(each, least) for each in asked),
        say.STEADY,
    )
    return unless_diverged(finding, results, "upgd")


def _steady(results: Results, arm: str) -> Iterator[Finding]:
    rise = ev.relative_change(results, arm, "loss")
    text = f"{named(results, arm)} does not get worse (ours: its loss rises by less than "
    finding = Finding(f"{text}{say.STEADY:.0%})", rise, UNKNOWN, PERCENT, UP)
    yield unless_diverged(ours(finding, partial(ev.below, rise), say.STEADY), results, arm)
    yield say.beats(results, "upgd", arm, "loss")


def stationary(all_: All) -> list[Finding]:
    """Claim 11."""
    return _part("over SGD", say.beats(_of(all_, "stationary-mnist"), "upgd", "sgdw"))


def ablation(all_: All) -> list[Finding]:
    """Claim 12; arms that are the same learner are not compared with each other."""
    return [
        finding
        for name in MAIN
        for finding in _where(
            f"{LONG[name]}: ", _ablation(_with_twins(_of(all_, f"{ABLATION}{name}")))
        )
    ]


def _ablation(results: Results) -> Iterator[Finding]:
    twins = EXPERIMENTS[results.name].twins()
    mnist = results.name == f"{ABLATION}input-permuted-mnist"

    def beats(arm: str, other: str, metric: str = "accuracy") -> list[Finding]:
        differ = twins.get(arm, arm) != twins.get(other, other)
        return [say.beats(results, arm, other, metric)] if differ else []

    yield from _part("separately", *beats("sgd+wd", "sgd"), *beats("sgd+wp", "sgd"))
    if mnist or results.name == f"{ABLATION}label-permuted-mini-imagenet":
        yield from _part("decay", *beats("sgd+wd", "sgd+wp"))
    yield from _part("together", say.maintains(results, "sgd+wd+wp"))
    if mnist:
        yield from _part("gating", *beats("upgd", "sgd+wd+wp"))
        yield from _part("alone", say.maintains(results, "sgd+ug"))
        both = (*beats("upgd", "sgd+ug"), *beats("upgd", "sgd+ug", "plasticity"))
        yield from _part("including", *both)
        return
    yield from _part("gating", say.improves(results, "upgd"))
    yield from _part("alone", say.improves(results, "sgd+ug"))
    if beats("upgd", "sgd+ug"):
        little = ev.lead(results, "upgd", "sgd+ug")
        text = "decay and perturbation matter little beside gating: UPGD-W and SGD+UG "
        finding = Finding(f"{text}(ours: within ±1 point)", little, UNKNOWN, words=AHEAD)
        finding = ours(finding, partial(ev.within, little), HOLDS)
        yield from _part("role", unless_diverged(finding, results, "upgd", "sgd+ug"))


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
    emnist_, long = _of(all_, "label-permuted-emnist"), _of(all_, "figure-1")
    hardly = ev.change(emnist_, "adamw")
    last = slice(-ev.LAST, None)
    behind = ev.lead(long, "adam", "adam-restarts", tasks=last)
    level = ev.lead(long, "upgd", "adam-restarts", tasks=last)
    first = ev.lead(long, "upgd", "adam-restarts", tasks=slice(1))
    quick = Finding(
        "UPGD-W quickly learns: the first task, against Adam's", first, TOLD, words=AHEAD
    )
    late = f"in the last {ev.LAST} tasks (ours: "

    def stated(text: str, found: Interval | None, judge: Callable[[float], Verdict]) -> Finding:
        words = UP if found is hardly else AHEAD
        return ours(Finding(text, found, UNKNOWN, words=words), judge, HOLDS)

    slow = stated(
        "Adam (AdamW's printed set) hardly improves (ours: by a point at most)",
        hardly,
        partial(ev.below, hardly),
    )
    below = stated(
        f"Adam is much worse than Adam-Restarts {late}by a point or more)",
        behind,
        lambda margin: ev.below(behind, -margin),
    )
    above = stated(
        f"UPGD-W is level with Adam-Restarts or above {late}a point below at most)",
        level,
        lambda margin: ev.above(level, -margin),
    )
    return [
        *_where("EMNIST: ", _part("hardly", with_diverged(slow, emnist_, "adamw"))),
        *_where("MNIST: ", _part("worse", with_diverged(below, long, "adam", "adam-restarts"))),
        *_where("EMNIST: ", _part("UPGD", say.improves(emnist_, "upgd"))),
        *_where(
            "MNIST: ", _part("UPGD", unless_diverged(above, long, "upgd", "adam-restarts"), quick)
        ),
        *_where("MNIST: ", _part("stable", say.maintains(long, "adam-restarts"))),
    ]
