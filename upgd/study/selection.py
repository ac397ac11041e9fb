"""Which set of hyperparameters is best: the paper's criterion.

A run's value is the area under its curve: the mean over all its windows of the online accuracy or
of an agent's return, or of the loss where there is neither. A set's value is the mean over the
seeds that were asked for. The largest accuracy or return wins, or the lowest loss.

- A set that lacks one of these seeds, because the run is pending, running or failed, is
  incomplete: it is not compared and cannot win.
- A run that diverged has the worst value, such as accuracy 0 or an infinite loss. Sets are ranked
  by the number of diverged seeds first, and one with any cannot win.
- Sets that are equal in both are ordered by their hyperparameters, so that the order is unique.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from upgd.ledger.canonical import display_name
from upgd.ledger.ledger import Ledger
from upgd.ledger.records import Run
from upgd.ledger.spec import MEASURING, SOURCES, RunSpec, Scalar
from upgd.metrics import Interval, mean_interval
from upgd.text import pairs

LARGER = ("accuracy", "return")  # metrics of which more is better; others have a loss
Hyper = tuple[tuple[str, float], ...]  # a set: names and values, sorted by name


class Conditions(NamedTuple):
    """What runs must have in common to be compared: others stand in tables of their own."""

    problem: str
    steps: int
    options: tuple[tuple[str, Scalar], ...]

    @classmethod
    def of(cls, problem: str, steps: int, options: Mapping[str, Scalar]) -> Conditions:
        """The conditions of a run; options that only measure make no other ones."""
        kept = (pair for pair in options.items() if pair[0] not in MEASURING)
        return cls(problem, steps, tuple(kept))

    def __str__(self) -> str:
        told = f"{self.problem}, {self.steps} steps"
        return f"{told}, {pairs(dict(self.options))}" if self.options else told


class Family(NamedTuple):
    """Runs whose sets are compared: all but hyperparameters and seed is the same."""

    problem: str
    method: str
    steps: int
    options: tuple[tuple[str, Scalar], ...]
    rules: int
    sources: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, spec: RunSpec) -> Family:
        """The family of a run; its method is a row of the registry."""
        options, sources = tuple(spec.options.items()), tuple(spec.sources.items())
        return cls(spec.problem, spec.method, spec.steps, options, spec.rules, sources)


@dataclass(frozen=True)
class Candidate:
    """A set and the results of its seeds."""

    hyper: Hyper  # the set
    # By seed, the areas of those that are over; the worst value where one diverged.
    values: Mapping[int, float]
    diverged: tuple[int, ...] = ()  # the seeds that diverged
    missing: tuple[int, ...] = ()  # the seeds that were asked for and are not over

    @property
    def value(self) -> float:
        """The mean over seeds."""
        return float(np.mean(list(self.values.values()))) if self.values else math.nan

    @property
    def interval(self) -> Interval:
        """The mean over seeds with its 95% interval (NaN for fewer than three)."""
        if self.diverged or not self.values:
            return Interval(self.value, math.nan, math.nan)
        return mean_interval(list(self.values.values()))


@dataclass(frozen=True)
class Ranking:
    """The sets of a family in order."""

    family: Family  # what they have in common
    metric: str  # ``"accuracy"``, ``"return"`` or ``"loss"``
    seeds: tuple[int, ...]  # those that each set must have
    complete: tuple[Candidate, ...]  # the sets that have them all, best first
    incomplete: tuple[Candidate, ...]  # the others, in the order of their hyperparameters
    # How many further sets there are in runs of other lengths alone, as halving leaves them.
    dropped: int = 0
    lengths: tuple[int, ...] = ()  # of these runs
    requested: str = ""  # the name that the user gave, if any
    code: str = ""  # which of several codes of the method, such as ``@1a2b``; see :func:`codes`

    @property
    def name(self) -> str:
        """The method's name: as requested, else an alias that fits all sets, else its own."""
        every = (*self.complete, *self.incomplete)
        names = {display_name(self.family.method, dict(one.hyper)) for one in every}
        name = self.requested or (names.pop() if len(names) == 1 else self.family.method)
        return name + self.code

    @property
    def conditions(self) -> Conditions:
        """Rankings with the same ones can be compared."""
        family = self.family
        return Conditions.of(family.problem, family.steps, dict(family.options))

    @property
    def winner(self) -> Candidate | None:
        """The best set, if there is a complete one without divergence."""
        return next((one for one in self.complete if not one.diverged), None)

    def find(self, hyper: Mapping[str, float]) -> Candidate | None:
        """The first set with these values, whatever its other hyperparameters."""
        every = (*self.complete, *self.incomplete)
        return next((one for one in every if hyper.items() <= dict(one.hyper).items()), None)


def rankings(
    runs: Iterable[Run], seeds: Collection[int] | None = None, sets: Collection[Hyper] | None = None
) -> dict[Family, Ranking]:
    """Rank the sets of every family, or only these `sets`.

    Each set must have these `seeds`, by default all that the family has.
    """
    families: dict[Family, dict[Hyper, dict[int, Run]]] = {}
    for run in runs:
        hyper = tuple(run.spec.hyper.items())
        if sets is None or hyper in sets:
            by_set = families.setdefault(Family.of(run.spec), {})
            by_set.setdefault(hyper, {})[run.spec.seed] = run
    return {family: _rank(family, by_set, seeds) for family, by_set in families.items()}


def best_sets(
    ledger: Ledger,
    problem: str | None = None,
    methods: Collection[str] | None = None,
    seeds: Collection[int] | None = None,
    steps: int | None = None,
) -> list[Ranking]:
    """The rankings of a study: per problem, method and options those of the longest runs.

    `methods` are names or aliases, which mean the sets that have these; each set must have the
    `seeds`, by default all of its family; `steps` chooses another length.
    """
    runs = (
        run
        for run in ledger.runs(problem=problem)
        if (methods is None or any(map(run.spec.is_called, methods)))
        and (steps is None or run.spec.steps == steps)
    )
    return longest(runs, seeds)


def longest(runs: Iterable[Run], seeds: Collection[int] | None = None) -> list[Ranking]:
    """Per problem, method and options the ranking of the longest runs; see :func:`rankings`."""
    alike: dict[tuple[object, ...], list[Ranking]] = {}
    chosen = (run for run in runs if seeds is None or run.spec.seed in seeds)
    for family, ranking in rankings(chosen, seeds).items():
        key = (family.problem, family.method, family.options, family.sources)
        alike.setdefault(key, []).append(ranking)
    found = [_longest(same) for same in alike.values()]
    told = codes([(_alike(ranking.family), dict(ranking.family.sources)) for ranking in found])
    return [replace(ranking, code=code) for ranking, code in zip(found, told, strict=True)]


def _alike(family: Family) -> Hashable:
    return family.problem, family.method, family.options


def codes(runs: Sequence[tuple[Hashable, Mapping[str, str]]]) -> list[str]:
    """What tells apart runs that differ in their code alone; empty where there is one code.

    Args:
        runs: What a run is called, and its :attr:`RunSpec.sources`.

    Example:
        >>> codes([("mine", {"method": "1a2b3c"}), ("mine", {"method": "4d5e"}), ("sgd", {})])
        ['@1a2b', '@4d5e', '']
    """
    known: dict[Hashable, list[Mapping[str, str]]] = {}
    for name, sources in runs:
        known.setdefault(name, []).append(sources)
    found = []
    for name, sources in runs:
        differ = [w for w in SOURCES if len({each.get(w, "") for each in known[name]}) > 1]
        digits = ((what, sources.get(what, "")[:4] or "none") for what in differ)
        found.append("".join(f"@{d}" if w == "method" else f" {w}@{d}" for w, d in digits))
    return found


def _longest(found: Collection[Ranking]) -> Ranking:
    """The ranking of the newest rules and the longest runs."""
    longest = max(found, key=lambda ranking: (ranking.family.rules, ranking.family.steps))
    mine = {one.hyper for one in (*longest.complete, *longest.incomplete)}
    others: dict[Hyper, set[int]] = {}
    for ranking in found:
        for one in (*ranking.complete, *ranking.incomplete):
            if one.hyper not in mine:
                others.setdefault(one.hyper, set()).add(ranking.family.steps)
    lengths = sorted({max(steps) for steps in others.values()}, reverse=True)
    return replace(longest, dropped=len(others), lengths=tuple(lengths))


def _rank(
    family: Family, by_set: Mapping[Hyper, Mapping[int, Run]], seeds: Collection[int] | None
) -> Ranking:
    runs = [run for by_seed in by_set.values() for run in by_seed.values()]
    asked = sorted({run.spec.seed for run in runs} if seeds is None else set(seeds))
    known = {name for run in runs if run.result is not None for name in run.result.summary}
    metric = next((name for name in (*LARGER, "loss") if name in known), LARGER[0])
    found = [_candidate(hyper, by_seed, asked, metric) for hyper, by_seed in by_set.items()]
    sign = -1 if metric in LARGER else 1
    complete = [one for one in found if not one.missing]
    complete.sort(key=lambda one: (len(one.diverged), sign * one.value, one.hyper))
    incomplete = sorted((one for one in found if one.missing), key=lambda one: one.hyper)
    return Ranking(family, metric, tuple(asked), tuple(complete), tuple(incomplete))


def _candidate(
    hyper: Hyper, by_seed: Mapping[int, Run], asked: Iterable[int], metric: str
) -> Candidate:
    values: dict[int, float] = {}
    diverged: list[int] = []
    missing: list[int] = []
    for seed in asked:
        run = by_seed.get(seed)
        if run is None or run.result is None:
            missing.append(seed)
            continue
        value = run.result.summary.get(metric, math.nan)
        if run.state == "diverged" or not math.isfinite(value):
            diverged.append(seed)
            value = {"accuracy": 0.0, "return": -math.inf}.get(metric, math.inf)
        values[seed] = value
    return Candidate(hyper, values, tuple(diverged), tuple(missing))
