"""Many sets of hyperparameters on one problem, each with the same seeds; successive halving.

All sets of a method are run for a part of the steps, with all seeds. The best of them by the
criterion of :mod:`upgd.study.selection`, one in `eta`, are run `eta` times as long, and so on up to
the full length. A shorter run has the stream, initial weights and noise of a longer one.

The runs of each rung are separate runs in the ledger: a longer one restarts instead of continuing
the shorter one, which costs at most 1/eta more. What comes next is a function of the sweep and the
ledger, so a sweep that was killed continues, and several processes may work on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from upgd.ledger.ledger import Ledger
from upgd.ledger.records import Run
from upgd.ledger.spec import RunSpec, Scalar
from upgd.study.selection import Candidate, Family, Hyper, Ranking, rankings

OVER = ("done", "diverged", "failed")  # states in which a run has ended


@dataclass(frozen=True)
class Sweep:
    """What is to be compared.

    Example:
        >>> sweep = Sweep("digits", {"sgd": [{"lr": 0.1}, {"lr": 0.01}]}, (0, 1, 2), 100)
        >>> len(sweep.specs()), len(sweep.specs(10, {"sgd": sweep.hypers()["sgd"][:1]}))
        (6, 3)
    """

    problem: str  # on which problem
    # By a method's name or alias, its sets; what a set leaves out has its default.
    sets: Mapping[str, Sequence[Mapping[str, float]]]
    seeds: tuple[int, ...]  # every set has all of them
    steps: int  # the length of a full run
    options: Mapping[str, Scalar] = field(default_factory=dict)  # as a run's

    def specs(
        self, steps: int | None = None, sets: Mapping[str, Iterable[Hyper]] | None = None
    ) -> list[RunSpec]:
        """The runs, each once; or those of some sets, or of another length."""
        chosen = self.hypers() if sets is None else sets
        every = (
            RunSpec(self.problem, method, dict(hyper), seed, steps or self.steps, self.options)
            for method, hypers in chosen.items()
            for hyper in hypers
            for seed in self.seeds
        )
        return list(dict.fromkeys(every))

    def hypers(self) -> dict[str, list[Hyper]]:
        """By method, its sets in the ledger's form."""
        return {
            method: [tuple(RunSpec(self.problem, method, one).hyper.items()) for one in sets]
            for method, sets in self.sets.items()
        }

    def family(self, method: str, steps: int | None = None) -> Family:
        """What the runs of a method have in common."""
        spec = RunSpec(self.problem, method, steps=steps or self.steps, options=self.options)
        return Family.of(spec)

    def ranking(
        self, runs: Iterable[Run], method: str, sets: Sequence[Hyper], steps: int | None = None
    ) -> Ranking:
        """The ranking of some sets of a method by `runs`."""
        family = self.family(method, steps)
        mine = (run for run in runs if Family.of(run.spec) == family)
        found = rankings(mine, self.seeds, frozenset(sets)).get(family)
        return found or Ranking(family, "accuracy", self.seeds, (), ())


def read(ledger: Ledger, sweep: Sweep) -> dict[str, list[Run]]:
    """By method, the runs of a sweep's problem that a ledger has."""
    return {
        method: list(ledger.runs(problem=sweep.problem, method=sweep.family(method).method))
        for method in sweep.sets
    }


# ------------------------------------------------------------------- successive halving
@dataclass(frozen=True)
class Rung:
    """Sets that are run for so many steps, and their results."""

    steps: int  # how many
    sets: Mapping[str, Sequence[Hyper]]  # by method, those that are run
    over: bool  # whether all runs are; until then there is no order
    # By method, the sets that continue, best first; at full length all complete ones.
    kept: Mapping[str, Sequence[Candidate]]
    # By method, the others, best first; last those that lack a seed.
    dropped: Mapping[str, Sequence[Candidate]]


def lengths(sets: int, steps: int, eta: int, window: int) -> list[int]:
    """The steps of the rungs of a method with so many sets: whole windows, except for the last.

    At least one set is left at full length, and the first rung is not shorter than a window.

    Example:
        >>> lengths(sets=20, steps=100_000, eta=3, window=2_500)
        [10000, 32500, 100000]
        >>> lengths(sets=2, steps=100_000, eta=3, window=2_500)
        [100000]
    """
    found = [steps]
    parts = eta
    while parts <= sets and (short := steps // parts // window * window) >= window:
        if short < found[0]:
            found.insert(0, short)
        parts *= eta
    return found


def schedule(sweep: Sweep, eta: int, window: int) -> dict[int, dict[str, int]]:
    """By rung's length, how many sets of each method are run there, from the shortest rung on."""
    found: dict[int, dict[str, int]] = {}
    for method, sets in sweep.sets.items():
        count = len(sets)
        for steps in lengths(len(sets), sweep.steps, eta, window):
            found.setdefault(steps, {})[method] = count
            count = -(-count // eta)
    return dict(sorted(found.items()))


def rungs(ledger: Ledger, sweep: Sweep, eta: int, window: int) -> list[Rung]:
    """The rungs up to the one to work on, or all; one set in `eta` continues."""
    runs = read(ledger, sweep)
    states = {run.key: run.state for found in runs.values() for run in found}
    alive: dict[str, list[Hyper]] = sweep.hypers()
    found: list[Rung] = []
    for steps, methods in schedule(sweep, eta, window).items():
        sets = {method: alive[method] for method in methods}
        specs = sweep.specs(steps, sets)
        if not all(states.get(spec.key) in OVER for spec in specs):
            return [*found, Rung(steps, sets, False, {}, {})]
        rung = _settled(sweep, runs, steps, sets, eta)
        found.append(rung)
        alive |= {method: [one.hyper for one in kept] for method, kept in rung.kept.items()}
    return found


def specs_of(sweep: Sweep, rung: Rung) -> list[RunSpec]:
    """The runs of a rung."""
    return sweep.specs(rung.steps, rung.sets)


def _settled(
    sweep: Sweep,
    runs: Mapping[str, Sequence[Run]],
    steps: int,
    sets: Mapping[str, Sequence[Hyper]],
    eta: int,
) -> Rung:
    kept: dict[str, Sequence[Candidate]] = {}
    dropped: dict[str, Sequence[Candidate]] = {}
    for method, mine in sets.items():
        ranking = sweep.ranking(runs[method], method, mine, steps)
        count = len(mine) if steps == sweep.steps else -(-len(mine) // eta)
        kept[method] = ranking.complete[:count]
        dropped[method] = (*ranking.complete[count:], *ranking.incomplete)
    return Rung(steps, sets, True, kept, dropped)
