"""Search beyond grids: Optuna proposes sets, the ledger has their results.

For each proposal an Optuna study is made in memory from the complete sets of the ledger, and its
sampler (TPE) is seeded by the number of sets. So proposals are a function of the ledger, and a
search that was killed continues.

An axis goes from the least to the largest value of the grid on a logarithmic scale; decays β are
searched as 1 - β. Where the grid has 0 too, one more decade at the lower end stands for 0.
Proposals are rounded to three digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from upgd.extras import install
from upgd.ledger.errors import StudyError
from upgd.ledger.ledger import Ledger
from upgd.rules.vocabulary import setting
from upgd.study.selection import LARGER, Family, Hyper, Ranking
from upgd.study.sweeps import OVER, Sweep

DECADE = 10.0
WORST = 1e300  # stands for an infinite loss


@dataclass(frozen=True)
class Axis:
    """The values that one hyperparameter may take.

    Example:
        >>> axis = Axis.between("weight_decay", (0.0, 0.001, 0.1))
        >>> [axis.value(x) for x in (0.0005, 0.0123456, 0.1)]
        [0.0, 0.0123, 0.1]
        >>> Axis.between("beta2", (0.99, 0.9999)).value(0.00123456)
        0.99877
    """

    name: str  # the hyperparameter
    low: float  # the least value, on the scale that is searched
    high: float  # the largest; a hyperparameter with one value is fixed
    zero: bool = False  # whether 0 is among them, below `low`
    complement: bool = False  # whether 1 - β is searched in place of β

    @classmethod
    def between(cls, name: str, values: Sequence[float]) -> Axis:
        """The axis between the extremes of a grid's values."""
        if name.startswith("beta"):
            searched = [_tidy(1 - value) for value in values]
            return cls(name, min(searched), max(searched), complement=True)
        positive = [value for value in values if value > 0]
        if not positive:
            return cls(name, 0.0, 0.0)
        return cls(name, min(positive), max(positive), zero=0.0 in values)

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to search."""
        return self.low == self.high and not self.zero

    @property
    def start(self) -> float:
        """Where the scale begins."""
        return self.low / DECADE if self.zero else self.low

    @property
    def threshold(self) -> float:
        """Places below stand for 0; with one other value, each has half of the scale."""
        if not self.zero:
            return self.low
        return self.low if self.low < self.high else self.low / math.sqrt(DECADE)

    def value(self, x: float) -> float:
        """The hyperparameter at a place of the scale."""
        if x < self.threshold:
            return 0.0
        short = min(max(float(f"{x:.3g}"), self.low), self.high)
        return _tidy(1 - short) if self.complement else short

    def place(self, value: float) -> float | None:
        """Where a value is on the scale; None if it is not on it."""
        if self.zero and value == 0:
            return math.sqrt(self.start * self.threshold)
        x = _tidy(1 - value) if self.complement else value
        return x if self.low <= x <= self.high else None


def _tidy(number: float) -> float:
    """Without the rounding error of 1 - β."""
    return round(number, 12)


@dataclass(frozen=True)
class Space:
    """What is searched of one method."""

    axes: tuple[Axis, ...]  # one per hyperparameter
    grid: Mapping[str, Sequence[float]]  # the values of each on the grid

    @classmethod
    def around(cls, grid: Mapping[str, Sequence[float]]) -> Space:
        """The space between the extremes of a grid."""
        return cls(tuple(Axis.between(name, values) for name, values in grid.items()), grid)

    def places(self, hyper: Hyper) -> dict[str, float] | None:
        """A set as parameters of a trial; None if it is outside."""
        found: dict[str, float] = {}
        values = dict(hyper)
        for axis in self.axes:
            value = setting(values, axis.name)
            place = None if value is None else axis.place(value)
            if axis.is_fixed and value in self.grid[axis.name]:
                continue
            if place is None:
                return None
            found[axis.name] = place
        return found

    def is_on_grid(self, hyper: Hyper) -> bool:
        """Whether a set is one of the grid's."""
        values = dict(hyper)
        known = all(name in self.grid for name in values)
        return known and all(setting(values, name) in self.grid[name] for name in self.grid)

    def searched(self, hypers: Iterable[Hyper]) -> list[Hyper]:
        """The sets that are in the space and not on the grid."""
        return [one for one in hypers if self.places(one) is not None and not self.is_on_grid(one)]


def next_sets(
    ledger: Ledger, sweep: Sweep, spaces: Mapping[str, Space], count: int, at_a_time: int
) -> dict[str, list[Hyper]]:
    """By method, the sets to run next: those that have started, else new ones; empty at the end.

    All sets that the ledger has for this problem and length guide the search; those of the grid and
    those outside of the space do not count as searched.

    Args:
        ledger: The study's.
        sweep: Problem, seeds, length and options; its sets are ignored.
        spaces: Where to search, by method.
        count: Sets per method.
        at_a_time: How many to propose before any of them has run.
    """
    found: dict[str, list[Hyper]] = {}
    for method, space in spaces.items():
        family = sweep.family(method)
        every = ledger.runs(problem=sweep.problem, method=family.method)
        runs = [r for r in every if Family.of(r.spec) == family and r.spec.seed in sweep.seeds]
        known = list(dict.fromkeys(tuple(run.spec.hyper.items()) for run in runs))
        searched = space.searched(known)
        over = {run.key for run in runs if run.state in OVER}
        begun = [
            one
            for one in searched
            if any(spec.key not in over for spec in sweep.specs(sets={method: [one]}))
        ]
        if begun:
            found[method] = begun
        elif len(searched) < count:
            ranking = sweep.ranking(runs, method, known)
            new = propose(space, ranking, min(at_a_time, count - len(searched)), len(known))
            if new:
                found[method] = new
    return found


def check(spaces: Mapping[str, Space]) -> None:
    """Raise StudyError if Optuna is not installed, or a space has nothing to search."""
    _optuna()
    for method, space in spaces.items():
        if all(axis.is_fixed for axis in space.axes):
            raise StudyError(f"{method} has one set here; there is nothing to search")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise StudyError(f"--search needs optuna: {install('search')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def propose(space: Space, ranking: Ranking, count: int, seed: int) -> list[Hyper]:
    """`count` sets that are worth trying, other than those of the ranking; see :func:`check`.

    The seed and the ranking determine the proposals.
    """
    check({ranking.family.method: space})
    study, distributions = _study(space, ranking, seed)
    taken = {one.hyper for one in (*ranking.complete, *ranking.incomplete)}
    found: list[Hyper] = []
    for _ in range(20 * count):  # a narrow space may repeat itself
        trial = study.ask(distributions)
        hyper = _set(space, trial.params)
        if hyper not in taken:
            taken.add(hyper)
            found.append(hyper)
            if len(found) == count:
                break
    return found


def _study(space: Space, ranking: Ranking, seed: int) -> tuple[Any, dict[str, Any]]:
    optuna = _optuna()
    distributions: dict[str, Any] = {
        axis.name: optuna.distributions.FloatDistribution(axis.start, axis.high, log=True)
        for axis in space.axes
        if not axis.is_fixed
    }
    larger = ranking.metric in LARGER
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="maximize" if larger else "minimize")
    for one in ranking.complete:
        places = space.places(one.hyper)
        if places is not None:
            value = one.value if math.isfinite(one.value) else WORST
            make = optuna.trial.create_trial
            study.add_trial(make(params=places, distributions=distributions, value=value))
    return study, distributions


def _set(space: Space, params: Mapping[str, float]) -> Hyper:
    fixed = {axis.name: float(space.grid[axis.name][0]) for axis in space.axes if axis.is_fixed}
    values = {a.name: a.value(params[a.name]) for a in space.axes if not a.is_fixed}
    return tuple(sorted((fixed | values).items()))
