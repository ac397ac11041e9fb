"""Many sets of hyperparameters on one problem, each with the same seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from upgd.study.ledger import Ledger
from upgd.study.records import Run
from upgd.study.selection import Family, Hyper, Ranking, rankings
from upgd.study.spec import RunSpec, Scalar

OVER = ("done", "diverged", "failed")
"""States in which nothing more comes of a run."""


@dataclass(frozen=True)
class Sweep:
    """What is to be compared.

    Attributes:
        problem: On which problem.
        sets: By a method's name or alias, its sets; what a set leaves out has its default.
        seeds: Every set has all of them.
        steps: The length of a full run.
        options: As a run's.

    Example:
        >>> sweep = Sweep("digits", {"sgd": [{"lr": 0.1}, {"lr": 0.01}]}, (0, 1, 2), 100)
        >>> len(sweep.specs()), len(sweep.specs(10, {"sgd": sweep.hypers()["sgd"][:1]}))
        (6, 3)
    """

    problem: str
    sets: Mapping[str, Sequence[Mapping[str, float]]]
    seeds: tuple[int, ...]
    steps: int
    options: Mapping[str, Scalar] = field(default_factory=dict)

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
        """By method, its sets in the form in which the ledger has them."""
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
        """The order of some sets of a method, as far as `runs` tell."""
        family = self.family(method, steps)
        mine = (run for run in runs if Family.of(run.spec) == family)
        found = rankings(mine, self.seeds, frozenset(sets)).get(family)
        return found or Ranking(family, "accuracy", self.seeds, (), ())


def read(ledger: Ledger, sweep: Sweep) -> dict[str, list[Run]]:
    """By method, the runs of a sweep's problem that a ledger has, whatever they are called."""
    return {
        method: list(ledger.runs(problem=sweep.problem, method=sweep.family(method).method))
        for method in sweep.sets
    }
