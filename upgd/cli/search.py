"""``upgd search``: which sets are best, where the paper prints some and where it prints none."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from upgd.cli import grids
from upgd.cli.app import app, err, mistakes_are_one_line, out, printable, wrote
from upgd.cli.best import show_best
from upgd.cli.numbers import clock, count, short
from upgd.cli.sweep import MOST_RUNS, settle
from upgd.cli.working import (
    CHECKPOINT,
    DATA_DIR,
    DEVICE,
    ENGINE,
    ON,
    QUIET,
    WORKERS,
    Work,
    end,
)
from upgd.optim.registry import scalars
from upgd.paper import found as sets_found
from upgd.paper.searches import GROUPS, SEARCHES, Search, learner, outcome, upcoming
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, forecast
from upgd.study.files import check_output
from upgd.study.prepare import check_device
from upgd.study.work import Tally

STUDY = Path("studies/search")


@app.command()
@mistakes_are_one_line
def search(
    problems: Annotated[
        list[str],
        typer.Argument(help="Problems, or toys, main, all; 'list' shows what is searched."),
    ],
    arms: Annotated[str, typer.Option(help="Only these: upgd,pgd. Default all.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Other values of an axis: sigma=0.01,0.1. Repeatable."),
    ] = None,
    scale: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the steps.")] = 1.0,
    seeds: Annotated[int, typer.Option(min=0, help="How many; default the search's.")] = 0,
    keep: Annotated[
        str, typer.Option(help="How many sets go on to each later stage: 12,2. Default more.")
    ] = "",
    study: Annotated[Path, typer.Option(help="A folder for the runs.")] = STUDY,
    save: Annotated[
        Path | None, typer.Option(help="Put what was found into this file: upgd/paper/found.json.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Or tell what the study has found so far.")
    ] = True,
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    dry_run: Annotated[bool, typer.Option(help="Say what would be run, and stop.")] = False,
    quiet: QUIET = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = 1,
) -> None:
    """Search hyperparameter sets: which are best where the paper prints none, and where it does.

    Many sets run briefly, the best of them longer; the same command goes on after an interruption.
    """
    if problems == ["list"]:
        for each in SEARCHES.values():
            _plan(each)
        return
    chosen = [
        _narrowed(_keeping(SEARCHES[name], keep), arms, settings or [], scale, seeds)
        for name in _names(problems)
    ]
    how = Work(data_dir, device, engine, quiet, checkpoint_seconds, on, workers)
    if save is not None:
        check_output(save)
        sets_found.read(save)
    if run or dry_run:
        check_device(device if on == "local" else "cpu")
        for data in {get_problem(each.problem).dataset for each in chosen}:
            if data is not None:
                check(data, data_dir)  # a wrong file is found before anything starts
    tally = Tally()
    for each in chosen:
        if dry_run or (run and not quiet):
            _plan(each)
        if dry_run:
            _forecast(each, study, how)
        elif run:
            tally = tally + _run(each, study, how)
    if dry_run:
        return
    _tell_found(chosen, study, save, quiet)
    end(tally)


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


def _keeping(search: Search, keep: str) -> Search:
    """With as many sets in each stage as an option wants."""
    if not keep:
        return search
    parts = [part.strip() for part in keep.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--keep {keep!r} is not a list of numbers such as 12,2")
    return search.keeping([int(part) for part in parts])


def _narrowed(
    search: Search, arms: str, settings: Sequence[str], scale: float, seeds: int
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
    axes = grids.change_axes(have, settings).values()
    given = {name: values for grid in axes for name, values in grid.items() if values}
    changed = replace(search, arms=chosen, seeds=seeds or search.seeds, axes=given)
    sizes = {arm: grids.size(changed.grid(arm)) for arm in chosen}
    grids.check_size(sizes, changed.seeds, MOST_RUNS, "or fewer --arms")
    return changed.scaled(scale) if scale < 1 else changed


def _plan(search: Search) -> None:
    sets = sum(len(search.sets(arm)) for arm in search.arms)
    _tell(
        f"{search.problem}: {count(len(search.arms), 'arm')}, {count(sets, 'set')}, "
        f"{count(search.seeds, 'seed')}, {short(search.learner_steps)} learner-steps"
    )
    for stage in search.stages:
        at = f" at every {stage.each}" if stage.each else ""
        best = f", the best {stage.sets} of each{at}" if stage.sets else ""
        _tell(f"  {stage.steps} steps: {count(search.runs(stage), 'run')}{best}")


def _forecast(search: Search, study: Path, how: Work) -> None:
    known = []
    if (study / "ledger.sqlite").exists():
        with Ledger.open(study, create=False, read_only=True) as ledger:
            known = list(ledger.runs(problem=search.problem))
            left = upcoming(ledger, search)
    else:
        left = [spec for e in search.entrants() for spec in e.sweep.specs(search.stages[0].steps)]
    if not left:
        _tell("  nothing is left to do")
        return
    usual = [spec for spec in left if not spec.options] or left  # not the small baseline
    found = forecast.pace(usual, known, how.device, how.engine, how.data_dir)
    seconds = search.learner_steps / found.rate
    _tell(
        f"  all of it: about {clock(seconds)} in one process, at {short(found.rate)} per second "
        f"({found.source}); next are {count(len(left), 'run')}"
    )


def _run(search: Search, study: Path, how: Work) -> Tally:
    """Stage by stage."""
    tally = Tally()
    with Ledger.open(study) as ledger:
        try:
            while specs := upcoming(ledger, search):
                if not how.quiet:
                    lengths = sorted({spec.steps for spec in specs})
                    steps = " and ".join(map(str, lengths))
                    _say(f"{search.problem}: {count(len(specs), 'run')} of {steps} steps")
                tally = tally + settle(ledger, specs, how)
        except KeyboardInterrupt:
            err.print("interrupted; the same command goes on from here", style="yellow")
            raise typer.Exit(130) from None
    return tally


def _tell_found(searches: Sequence[Search], study: Path, save: Path | None, quiet: bool) -> None:
    """Show what was found, and keep it."""
    kept: dict[str, dict[str, sets_found.Found]] = {}
    with Ledger.open(study, create=False, read_only=True) as ledger:
        for each in searches:
            found, rankings = outcome(ledger, each)
            if found:
                kept[each.problem] = found
            if rankings and not quiet:
                show_best(rankings, study, as_json=False)
            open_ = [arm for arm in each.arms if arm not in found]
            if open_:
                _say(f"{each.problem}: nothing found for {', '.join(open_)}")
    if save is not None:
        sets_found.write(kept, save)
        wrote(save, f": {count(sum(map(len, kept.values())), 'set')}")


def _tell(text: str) -> None:
    out.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def _say(text: str) -> None:
    err.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)
