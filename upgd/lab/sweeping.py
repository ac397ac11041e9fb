"""Sweeps from beginning to end: which sets, in which order, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from upgd.lab import grids
from upgd.ledger import Ledger, Run, RunSpec, Scalar
from upgd.paper.grids import each_set
from upgd.rules.vocabulary import setting
from upgd.streams import Problem
from upgd.study import search as searches
from upgd.study import sweeps as halvings
from upgd.study.execution import Tally
from upgd.study.learners import at_a_time
from upgd.study.options import Options
from upgd.study.prepare import prepare
from upgd.study.selection import Candidate, Hyper, Ranking, longest
from upgd.study.sweeps import Sweep
from upgd.text import count, pairs

MOST_RUNS = 200_000
"""A grid that has more is taken for a mistake."""
SHOWN = 10
"""Dropped sets that are listed one by one."""
ROUNDS = 4
"""Of a search, at least: sets that are proposed together do not learn from each other."""
Work = Callable[[Sequence[RunSpec]], Tally]
"""Does runs, all of them."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep that was checked and can be run.

    Attributes:
        sweep: The sets of each method.
        spaces: Of a search, where it looks.
        halving: Of successive halving, one in how many sets goes on.
        search: Of a search, how many sets of each method are tried.
        window: Steps per point.
    """

    sweep: Sweep
    spaces: Mapping[str, searches.Space]
    halving: int | None
    search: int | None
    window: int

    def execute(self, ledger: Ledger, options: Options, run: Work, say: Say) -> Tally:
        """Do all runs of the sweep; what the study has already is not run again."""
        if self.halving:
            return self._halve(ledger, run, say)
        if self.search:
            return self._search(ledger, options, run, say)
        return run(self.sweep.specs())

    def own_runs(self, runs: Iterable[Run]) -> dict[str, list[Run]]:
        """By name that was asked for, the runs of its sets, of whatever length.

        Names may stand for the same row of the registry, as sgd and sgdw do. Of a search, sets
        are those that lie in its space.
        """
        every, found = list(runs), dict[str, list[Run]]()
        for name, hypers in self.sweep.hypers().items():
            row, own, space = self.sweep.family(name).method, set(hypers), self.spaces.get(name)
            mine = ((run, tuple(run.spec.hyper.items())) for run in every if run.spec.method == row)
            found[name] = [
                run
                for run, hyper in mine
                if (hyper in own if space is None else space.places(hyper) is not None)
            ]
        return found

    def keys(self, ledger: Ledger) -> set[str]:
        """The runs of the sweep that there are, of whatever length."""
        own = self.own_runs(ledger.runs(problem=self.sweep.problem))
        seeds = self.sweep.seeds
        return {run.key for some in own.values() for run in some if run.spec.seed in seeds}

    def rankings(self, ledger: Ledger) -> list[Ranking]:
        """How the sets of each name rank that was asked for."""
        own = self.own_runs(ledger.runs(problem=self.sweep.problem))
        return [
            replace(ranking, requested=name)
            for name, mine in own.items()
            for ranking in longest(mine, self.sweep.seeds)
            if ranking.family == self.sweep.family(name)
        ]

    def _halve(self, ledger: Ledger, run: Work, say: Say) -> Tally:
        """Rung by rung; what each one drops is said once."""
        assert self.halving is not None
        tally, told = Tally(), 0
        sweep, eta, window = self.sweep, self.halving, self.window
        of = len(halvings.schedule(sweep, eta, window))
        while True:
            rungs = halvings.rungs(ledger, sweep, eta, window)
            for number, rung in enumerate(rungs[told:], told + 1):
                if rung.over:
                    told = number
                    if rung.steps < sweep.steps:
                        _describe_rung(rung, f"rung {number} of {of}", say)
            if rungs[-1].over:
                return tally
            sizes = ", ".join(f"{len(mine)} of {m}" for m, mine in rungs[-1].sets.items())
            say(f"rung {told + 1} of {of}, {rungs[-1].steps} steps: {sizes}")
            tally = tally + run(halvings.specs_of(sweep, rungs[-1]))

    def _search(self, ledger: Ledger, options: Options, run: Work, say: Say) -> Tally:
        """Propose, run, and again, until every method has so many sets."""
        assert self.search is not None
        tally, sweep, spaces, sets = Tally(), self.sweep, self.spaces, self.search
        fill = (options.workers or 1) * at_a_time(options.device)
        together = max(1, min(fill // (len(sweep.seeds) * len(spaces)), sets // ROUNDS))
        while chosen := searches.next_sets(ledger, sweep, spaces, sets, together):
            tally = tally + run(sweep.specs(sets=chosen))
            for ranking in self.rankings(ledger):
                best = ranking.winner
                if best is not None and ranking.requested in chosen:
                    known, where = count(len(ranking.complete), "set"), pairs(dict(best.hyper))
                    say(f"{ranking.name}: {known}, best {best.value:.4f} at {where}")
        return tally


def plan_sweep(
    problem: Problem,
    axes: Mapping[str, grids.Grid],
    *,
    seeds: Sequence[int],
    steps: int,
    run_options: Mapping[str, Scalar],
    options: Options,
    halving: int | None = None,
    search: int | None = None,
    max_runs: int = MOST_RUNS,
) -> PlannedSweep:
    """Check a sweep before anything is run.

    Args:
        problem: On which problem.
        axes: By method, the values of each hyperparameter.
        seeds: Every set has all of them.
        steps: The length of a full run.
        run_options: As a run's.
        options: How runs are executed.
        halving: Run all sets briefly and one in so many longer, rung by rung.
        search: Let Optuna choose so many sets per method within the axes.
        max_runs: Refuse a sweep with more runs.
    """
    if halving and search:
        raise ValueError("choose one of halving and search")
    sizes = {name: search or grids.size(mine) for name, mine in axes.items()}
    grids.check_size(sizes, len(seeds), max_runs, "search, or a larger max_runs")
    sweep = Sweep(
        problem.name,
        # A search makes its own; these stand for them when times are estimated.
        {name: list(islice(each_set(mine), search)) for name, mine in axes.items()},
        tuple(seeds),
        steps,
        run_options,
    )
    spaces: dict[str, searches.Space] = {}
    if search:
        spaces = {name: searches.Space.around(mine) for name, mine in axes.items()}
        searches.check(spaces)
    [first, *_] = sweep.specs()
    setting = prepare(first, options.data_dir, options.here).setting
    window = max(1, setting.window // setting.batch)
    return PlannedSweep(sweep, spaces, halving, search, window)


def _describe_rung(rung: halvings.Rung, name: str, say: Say) -> None:
    for method, dropped in rung.dropped.items():
        kept = rung.kept[method]
        worst = f", down to {kept[-1].value:.4f}" if kept else ""
        say(f"{name}: {method} keeps {count(len(kept), 'set')}{worst}, drops {len(dropped)}")
        varying = _varying(rung.sets[method])
        for one in dropped[:SHOWN]:
            shown = pairs({name: value for name, value in one.hyper if name in varying})
            say(f"  dropped {shown}: {_value(one)}")
        if len(dropped) > SHOWN:
            say(f"  and {len(dropped) - SHOWN} more")


def _varying(hypers: Sequence[Hyper]) -> set[str]:
    """The hyperparameters in which sets differ."""
    sets = [dict(hyper) for hyper in hypers]
    names = {name for each in sets for name in each}
    return {name for name in names if len({setting(each, name) for each in sets}) > 1}


def _value(one: Candidate) -> str:
    if one.missing:
        return f"lacks {count(len(one.missing), 'seed')}"
    if one.diverged:
        return f"{count(len(one.diverged), 'seed')} diverged"
    return f"{one.value:.4f}"
