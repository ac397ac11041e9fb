"""``upgd search``: which sets are best, where the paper prints some and where it prints none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upgd.cli.app import app, mistakes_are_one_line, note, say, warn, wrote
from upgd.cli.arguments import axes
from upgd.cli.best import show_best
from upgd.cli.options import (
    CHECKPOINT,
    DATA_DIR,
    DEVICE,
    ENGINE,
    ON,
    QUIET,
    WORKERS,
    end,
    open_study,
)
from upgd.lab import searching
from upgd.ledger.files import check_output
from upgd.paper import found as sets_found
from upgd.paper.searches import SEARCHES
from upgd.study.execution import Tally
from upgd.study.options import check_device
from upgd.text import count

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
    workers: WORKERS = None,
) -> None:
    """Search hyperparameter sets: which are best where the paper prints none, and where it does.

    Many sets run briefly, the best of them longer; the same command goes on after an interruption.
    """
    if problems == ["list"]:
        for each in SEARCHES.values():
            for line in searching.describe(each):
                say(line)
        return
    mine = open_study(
        study,
        quiet=quiet,
        device=device,
        engine=engine,
        workers=workers,
        on=on,
        data_dir=data_dir,
        checkpoint_seconds=checkpoint_seconds,
    )
    chosen = searching.choose(problems, arms, axes(settings or []), scale, seeds, _numbers(keep))
    if save is not None:
        check_output(save)
        sets_found.read(save)
    if run or dry_run:
        check_device(mine.options.here)
        searching.check_data(chosen, mine)
    tally = Tally()
    for each in chosen:
        if dry_run or (run and not quiet):
            for line in searching.describe(each):
                say(line)
        if dry_run:
            say(searching.outlook(each, mine))
        elif run:
            try:
                searching.run(each, mine)
            except KeyboardInterrupt:
                warn("interrupted; the same command continues from here")
                raise typer.Exit(130) from None
            tally = tally + mine.tally
    if dry_run:
        return
    mine.tally = tally
    kept, rankings, lacking = searching.outcomes(chosen, mine)
    if not quiet:
        for ranked in rankings.values():
            show_best(ranked, study, as_json=False)
    for line in lacking:
        note(line)
    if save is not None:
        sets_found.write(kept, save)
        wrote(save, f": {count(sum(map(len, kept.values())), 'set')}")
    end(mine)


def _numbers(keep: str) -> list[int]:
    parts = [part.strip() for part in keep.split(",")] if keep else []
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--keep {keep!r} is not a list of numbers such as 12,2")
    return [int(part) for part in parts]
