"""Searches of the paper's sets: as options narrow them, stage by stage, and what they find."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from upgd.lab import grids
from upgd.lab.study import Study
from upgd.lab.sweeping import MOST_RUNS
from upgd.ledger import Ledger
from upgd.optim.registry import scalars
from upgd.paper import found as sets_found
from upgd.paper.searches import GROUPS, SEARCHES, Search, learner, outcome, upcoming
from upgd.study import forecast
from upgd.study.execution import Tally
from upgd.study.kinds import kind_of
from upgd.study.selection import Ranking
from upgd.text import clock, count, short


def choose(
    problems: Sequence[str],
    arms: str = "",
    axes: Mapping[str, Any] | None = None,
    scale: float = 1.0,
    seeds: int = 0,
    keep: Sequence[int] = (),
) -> list[Search]:
    """Searches on problems, narrowed.

    Args:
        problems: Names of problems or of groups of them.
        arms: Only these, comma-separated.
        axes: Other values of hyperparameters.
        scale: Share of the steps.
        seeds: How many; 0 for the search's.
        keep: How many sets go on to each later stage.

    Raises:
        ValueError: There is no such search, arm or hyperparameter.
    """
    return [
        _narrowed(
            SEARCHES[name].keeping(keep) if keep else SEARCHES[name], arms, axes or {}, scale, seeds
        )
        for name in _names(problems)
    ]


def _names(given: Sequence[str]) -> list[str]:
    """Problems, each once."""
    found: dict[str, None] = {}
    for name in given:
        if name not in GROUPS and name not in SEARCHES:
            close = difflib.get_close_matches(name, [*SEARCHES, *GROUPS], 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"no search on {name!r}; {hint}'upgd search list' shows all")
        found |= dict.fromkeys(GROUPS.get(name, (name,)))
    return list(found)


def _narrowed(
    search: Search, arms: str, axes: Mapping[str, Any], scale: float, seeds: int
) -> Search:
    """A search as the options want it."""
    wanted = [part.strip().lower() for part in arms.split(",") if part.strip()]
    unknown = [arm for arm in wanted if arm not in search.arms]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is not searched on {search.problem}; there are "
            f"{', '.join(search.arms)}"
        )
    chosen = tuple(arm for arm in search.arms if not wanted or arm in wanted)
    methods = [learner(arm)[0] for arm in chosen]
    have: dict[str, grids.Grid] = {m: dict.fromkeys(scalars(m), ()) for m in methods}
    changed_axes = grids.change_axes(have, axes).values()
    given = {name: values for grid in changed_axes for name, values in grid.items() if values}
    changed = replace(search, arms=chosen, seeds=seeds or search.seeds, axes=given)
    sizes = {arm: grids.size(changed.grid(arm)) for arm in chosen}
    grids.check_size(sizes, changed.seeds, MOST_RUNS, "or fewer --arms")
    return changed.scaled(scale) if scale < 1 else changed


def describe(search: Search) -> list[str]:
    """How much there is to do, as lines."""
    sets = sum(len(search.sets(arm)) for arm in search.arms)
    lines = [
        f"{search.problem}: {count(len(search.arms), 'arm')}, {count(sets, 'set')}, "
        f"{count(search.seeds, 'seed')}, {short(search.learner_steps)} learner-steps"
    ]
    for stage in search.stages:
        at = f" at every {stage.each}" if stage.each else ""
        best = f", the best {stage.sets} of each{at}" if stage.sets else ""
        lines.append(f"  {stage.steps} steps: {count(search.runs(stage), 'run')}{best}")
    return lines


def outlook(search: Search, study: Study) -> str:
    """How long a search takes, in a line."""
    known = study.runs(problem=search.problem)
    if study.exists():
        with study.read() as ledger:
            left = upcoming(ledger, search)
    else:
        left = [spec for e in search.entrants() for spec in e.sweep.specs(search.stages[0].steps)]
    if not left:
        return "  nothing is left to do"
    usual = [spec for spec in left if not spec.options] or left  # not the small baseline
    found = forecast.pace(usual, known, study.options)
    seconds = search.learner_steps / found.rate
    return (
        f"  all of it: about {clock(seconds)} in one process, at {short(found.rate)} per second "
        f"({found.source}); next are {count(len(left), 'run')}"
    )


def check_data(searches: Sequence[Search], study: Study) -> None:
    """Find missing data before anything starts."""
    for problem in {search.problem for search in searches}:
        kind_of(problem).check_data(problem, study.options.data_dir)


def run(search: Search, study: Study) -> None:
    """Stage by stage; the study's tally counts all runs."""
    tally = Tally()
    with Ledger.open(study.folder) as ledger:
        while specs := upcoming(ledger, search):
            if not study.quiet:
                steps = " and ".join(map(str, sorted({spec.steps for spec in specs})))
                study.note(f"{search.problem}: {count(len(specs), 'run')} of {steps} steps")
            study.run_specs(specs, wait=True)
            tally = tally + study.tally
    study.tally = tally


def outcomes(
    searches: Sequence[Search], study: Study
) -> tuple[dict[str, dict[str, sets_found.Found]], dict[str, Sequence[Ranking]], list[str]]:
    """By problem, the sets found and their rankings; and for which arms nothing was found."""
    kept: dict[str, dict[str, sets_found.Found]] = {}
    rankings: dict[str, Sequence[Ranking]] = {}
    lacking = []
    with study.read() as ledger:
        for search in searches:
            found, ranked = outcome(ledger, search)
            if found:
                kept[search.problem] = found
            if ranked:
                rankings[search.problem] = ranked
            missing = [arm for arm in search.arms if arm not in found]
            if missing:
                lacking.append(f"{search.problem}: nothing found for {', '.join(missing)}")
    return kept, rankings, lacking
