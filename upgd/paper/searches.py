"""Searches for hyperparameter sets, as data: arms, grids, stages, seeds.

All sets of an arm run for the first stage's steps; the best continue in the next, longer stage. So
does the printed set unless it diverges; for feature-wise, local and second-order utility, for which
none is printed, that of the plain kind. Each stage starts from the beginning, on the same stream
with the same noise. A set that diverges is replaced by the next best of the stage before. Sets are
ranked by means over whole runs (:mod:`upgd.study.selection`); one with a diverged seed is excluded.
The next runs are a function of the ledger, so an interrupted search resumes.

Seeds differ from those of the figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from upgd.ledger import Ledger, Run, RunSpec
from upgd.ledger.spec import Scalar
from upgd.paper.found import Found, Tried
from upgd.paper.grids import Axis, axes_from_paper, printed_grid
from upgd.paper.grids import sets as all_sets
from upgd.paper.sets import BEST, MAIN, METHODS, STATIONARY, TOYS, Set, from_paper
from upgd.streams import get as get_problem
from upgd.study.prepare import NO_LAYERS
from upgd.study.selection import Candidate, Hyper, Ranking
from upgd.study.sweeps import OVER, Sweep

SEEDS_OF_SEARCHES = range(1000, 2000)
REFERENCE = "reference"
"""The toys' baseline: one linear layer, with SGD."""
WEIGHTS = ("upgd", "n-upgd")
KINDS = (("", ""), ("feature-", ""), ("", "-local"), ("feature-", "-local"))
"""Prefix and suffix of a method's kinds: weight-wise and feature-wise, global and local."""


def variants(method: str, order: int = 1) -> tuple[str, ...]:
    """The names of a method's four kinds."""
    second = "-2nd" if order == 2 else ""
    return tuple(f"{before}{method}{second}{after}" for before, after in KINDS)


class Stage(NamedTuple):
    """One stage of a search."""

    steps: int
    sets: int = 0  # 0 means all
    each: str = ""  # keep `sets` at each value of this hyperparameter, if the arm has it

    def choose(
        self, pool: Sequence[Hyper], out: Collection[Hyper] = (), kept: Hyper | None = None
    ) -> list[Hyper]:
        """The sets of a stage, from those that remain, best first.

        Others replace those that diverge or fail in this stage (`out`); `kept` is always chosen
        while it remains.

        Example:
            >>> pool = [(("lr", 1.0), ("sigma", x)) for x in (0.1, 0.1, 0.0)]
            >>> [dict(one)["sigma"] for one in Stage(10, 1, "sigma").choose(pool)]
            [0.1, 0.0]
        """
        if not self.sets or (self.each and pool and self.each not in dict(pool[0])):
            return list(pool)
        taken: Counter[float | None] = Counter()
        found = []
        for one in pool:
            group = dict(one).get(self.each)
            good = one not in out and taken[group] < self.sets
            taken[group] += good
            if good or one in out or one == kept:
                found.append(one)
        return found


class Entrant(NamedTuple):
    """An arm of a search."""

    arm: str
    sweep: Sweep  # its sets at full length

    @property
    def method(self) -> str:
        """A name of the registry."""
        [method] = self.sweep.sets
        return method


@dataclass(frozen=True)
class Search:
    """A search on a problem; `more` and `axes` are in the paper's form, as printed grids are."""

    problem: str
    arms: tuple[str, ...]
    stages: tuple[Stage, ...]  # from short to long
    seeds: int = 3
    more: Mapping[str, Axis] | None = None  # values in addition to the paper's
    axes: Mapping[str, Axis] | None = None  # values instead of the paper's

    def scaled(self, scale: float) -> Search:
        """The search with shorter stages, in whole windows."""
        window = get_problem(self.problem).window
        stages = (
            stage._replace(steps=max(1, round(stage.steps * scale / window)) * window)
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages))

    def keeping(self, sets: Sequence[int]) -> Search:
        """The search with other numbers of sets, one for each stage but the first."""
        first, *others = self.stages
        if len(sets) != len(others) or any(n < 1 for n in sets):
            raise ValueError(
                f"after the first stage, {self.problem} needs so many numbers of sets, 1 or more: "
                f"{len(others)}, not {', '.join(map(str, sets)) or 'none'}"
            )
        stages = (stage._replace(sets=n) for stage, n in zip(others, sets, strict=True))
        return replace(self, stages=(first, *stages))

    def entrants(self) -> list[Entrant]:
        """All arms with their sets."""
        seeds, last = tuple(SEEDS_OF_SEARCHES[: self.seeds]), self.stages[-1].steps
        found = []
        for arm in self.arms:
            method, options = learner(arm)
            sweep = Sweep(self.problem, {method: self.sets(arm)}, seeds, last, options)
            found.append(Entrant(arm, sweep))
        return found

    def sets(self, arm: str) -> list[Set]:
        """An arm's sets; the printed one is among them, or that of its plain kind."""
        found: list[Set] = list(all_sets(self.grid(arm)))
        known = _kept_set(self.problem, arm)
        return found if known is None or known in found else [*found, known]

    def grid(self, arm: str) -> dict[str, Axis]:
        """The values of each of an arm's axes."""
        method, more = learner(arm)[0], self.more or {}
        given = printed_grid(self.problem, method)
        axes = {name: tuple(dict.fromkeys((*x, *more.get(name, ())))) for name, x in given.items()}
        axes |= {name: axis for name, axis in (self.axes or {}).items() if name in axes}
        return axes_from_paper(method, axes)

    def runs(self, stage: Stage) -> int:
        """The number of runs in a stage, without replacements and the printed set."""
        return self.seeds * sum(len(stage.choose(some)) for some in self._hypers)

    @cached_property
    def _hypers(self) -> list[list[Hyper]]:
        """Of each arm, its sets in the ledger's form."""
        return [entrant.sweep.hypers()[entrant.method] for entrant in self.entrants()]

    @property
    def learner_steps(self) -> int:
        """The learner-steps of all stages."""
        return sum(stage.steps * self.runs(stage) for stage in self.stages)


def learner(arm: str) -> tuple[str, dict[str, Scalar]]:
    """An arm's method and options."""
    return ("sgdw", {"hidden": NO_LAYERS}) if arm == REFERENCE else (arm, {})


def printed_set(problem: str, arm: str, like: str = "") -> Set | None:
    """The hyperparameters of an arm with the set that the paper prints for it, if it does.

    Or with the set that it prints for another arm, `like`.
    """
    printed = BEST.get(problem, {}).get(like or arm)
    return None if printed is None else from_paper(learner(arm)[0], printed)


_PLAIN = ("sgdw", "pgd", "shrink-and-perturb")
_FIRST, _SECOND = (
    tuple(
        name for kind in zip(*(variants(m, order) for m in WEIGHTS), strict=True) for name in kind
    )
    for order in (1, 2)
)


def _toy(problem: str) -> Search:
    """σ = 1e-4, which the paper's set for UPGD has, is not on its axis: all have it here.

    Whether a set survives a million steps depends on σ, and short runs do not show it: they favour
    much noise. So the best at every σ go on.
    """
    stages = (Stage(20_000), Stage(100_000, 4, "sigma"), Stage(1_000_000, 1, "sigma"))
    arms = (REFERENCE, *_PLAIN, *_FIRST, *_SECOND)
    return Search(problem, arms, stages, more={"sigma": (1e-4,)})


def _main(problem: str) -> Search:
    """Whether the printed sets are best; and sets of utilities for which none are printed.

    On CIFAR-10 the paper has local utility alone, and two printed sets have σ = 0: all have it.

    Short runs say little here: whether a set keeps its plasticity shows late. Of the ten methods'
    sets that were best in the end on Input-permuted MNIST, eight were the 22nd to 107th of their
    grids after 20 000 steps. After 100 000 eight were the second to fourth; S&P's, the tenth, and
    N-UPGD-W's, the 40th, reached the end as printed ones, and so did seven on CIFAR-10, the 7th to
    40th. So the first stage leaves out a half at most of the larger grids, and other kinds of
    utility take the printed set of the plain one along. A set that is best late, and not printed,
    may still be lost.
    """
    kinds = [name for name in _FIRST if name not in WEIGHTS]
    more: dict[str, Axis] = {}
    if problem == "label-permuted-cifar10":
        kinds = [name for name in kinds if not name.startswith("feature-")]
        more = {"sigma": (0.0,)}
    stages = (Stage(20_000), Stage(100_000, 160), Stage(1_000_000, 4))
    return Search(problem, (*METHODS, *kinds), stages, seeds=2, more=more)


_ALL = (
    *map(_toy, TOYS),
    Search(STATIONARY, (*_PLAIN, *_FIRST), (Stage(20_000), Stage(200_000, 6)), seeds=2),
    *map(_main, MAIN),
)
SEARCHES: Mapping[str, Search] = {search.problem: search for search in _ALL}
"""By problem."""
GROUPS: Mapping[str, tuple[str, ...]] = {"toys": TOYS, "main": MAIN, "all": tuple(SEARCHES)}
"""Names that stand for several."""


# ---------------------------------------------------------------------------------- runs
class Course(NamedTuple):
    """The progress of an arm."""

    rankings: list[Ranking]  # of the finished stages
    todo: list[RunSpec]  # the next runs; empty at the end


def course(runs: Sequence[Run], entrant: Entrant, stages: Sequence[Stage]) -> Course:
    """An arm's progress according to a ledger."""
    sweep, method = entrant.sweep, entrant.method
    over = {run.key for run in runs if run.state in OVER}
    pool = sweep.hypers()[method]
    kept = _as_ranked(entrant, _kept_set(sweep.problem, entrant.arm))
    done: list[Ranking] = []
    for stage in stages:
        out: set[Hyper] = set()
        while True:
            chosen = stage.choose(pool, out, kept)
            left = [s for s in sweep.specs(stage.steps, {method: chosen}) if s.key not in over]
            if left:
                return Course(done, left)
            ranking = sweep.ranking(runs, method, chosen, stage.steps)
            survived = [one.hyper for one in ranking.complete if not one.diverged]
            lost = set(chosen).difference(survived)
            if lost == out:
                break
            out = lost
        done.append(ranking)
        pool = survived
    return Course(done, [])


def _kept_set(problem: str, arm: str) -> Set | None:
    """The set that continues whatever its rank: the printed one of the arm or of its plain kind."""
    kinds = {name: m for m in WEIGHTS for order in (1, 2) for name in variants(m, order)}
    return printed_set(problem, arm, like=kinds.get(arm, arm))


def _as_ranked(entrant: Entrant, known: Set | None) -> Hyper | None:
    """A set as rankings have it."""
    if known is None:
        return None
    [[one]] = replace(entrant.sweep, sets={entrant.method: [known]}).hypers().values()
    return one


def upcoming(ledger: Ledger, search: Search) -> list[RunSpec]:
    """The next runs of a search; empty at its end."""
    runs = list(ledger.runs(problem=search.problem))
    courses = (course(runs, entrant, search.stages) for entrant in search.entrants())
    return [spec for each in courses for spec in each.todo]


def outcome(ledger: Ledger, search: Search) -> tuple[dict[str, Found], list[Ranking]]:
    """By arm, the set found; and the last rankings, also of arms without a winner.

    Arms with an unfinished last stage are omitted.
    """
    runs = list(ledger.runs(problem=search.problem))
    found: dict[str, Found] = {}
    last: list[Ranking] = []
    for entrant in search.entrants():
        done, todo = course(runs, entrant, search.stages)
        if todo:
            continue
        last.append(done[-1])
        if done[-1].winner is not None:
            mine = [run for run in runs if run.spec.method == entrant.method]
            found[entrant.arm] = _found(entrant, done, mine)
    return found, last


def _found(entrant: Entrant, done: Sequence[Ranking], runs: Iterable[Run]) -> Found:
    ranking = done[-1]
    first, *others = [one for one in ranking.complete if not one.diverged]
    interval = first.interval
    known = _as_ranked(entrant, printed_set(entrant.sweep.problem, entrant.arm))
    devices = {run.result.device for run in runs if run.result and run.spec.seed in ranking.seeds}
    low, high = (None if math.isnan(x) else _short(x) for x in interval[1:])
    return Found(
        entrant.method,
        dict(first.hyper),
        ranking.metric,
        _short(first.value),
        low,
        high,
        ranking.seeds,
        ranking.family.steps,
        len(entrant.sweep.sets[entrant.method]),
        len({one.hyper for each in done for one in each.complete if one.diverged}),
        _tried(others[0], ranking) if others else None,
        None if known is None else _longest(known, done),
        dict(entrant.sweep.options),
        ranking.family.rules,
        tuple(sorted(devices)),
        tuple(len(each.complete) for each in done),
    )


def _longest(hyper: Hyper, done: Sequence[Ranking]) -> Tried | None:
    """The result of a set in the last stage that it reached."""
    found = ((one, r) for r in reversed(done) for one in r.complete if one.hyper == hyper)
    return next((_tried(*pair) for pair in found), None)


def _tried(one: Candidate, ranking: Ranking) -> Tried:
    mean = None if one.diverged else _short(one.value)
    return Tried(dict(one.hyper), ranking.family.steps, mean, len(one.diverged))


def _short(number: float) -> float:
    """Rounded to the precision of a mean over seeds."""
    return float(f"{number:.6g}")
