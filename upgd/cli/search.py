"""``upgd search``: which sets are best, where the paper prints some and where it prints none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from upgd.cli import options as o
from upgd.cli.app import command, err, say, wrote
from upgd.cli.arguments import axes
from upgd.cli.best import show_best
from upgd.cli.options import end, open_study
from upgd.text import count


@command(
    interrupted=o.CONTINUES,
    examples=(
        "upgd search list",
        "upgd search label-permuted-mini-imagenet --arms upgd,pgd --dry-run",
    ),
)
def search(
    problems: Annotated[
        list[str], Argument(help="Problems, or toys, main, all; 'list' shows them.")
    ],
    arms: Annotated[str, Option(help="Only these: upgd,pgd. Default all.")] = "",
    settings: o.AXES = None,
    scale: Annotated[float, Option(min=0.0, max=1.0, help="Share of the steps.")] = 1.0,
    seeds: Annotated[
        int, Option(min=0, show_default=False, help="How many; default the search's.")
    ] = 0,
    keep: Annotated[
        str, Option(help="How many sets reach each later stage: 12,2. Default more.")
    ] = "",
    study: Annotated[Path, Option(help="For the runs.")] = Path("studies/search"),
    save: Annotated[Path | None, o.OUTPUT(help="Add what was found to this file.")] = None,
    run: Annotated[bool, Option("--run/--no-run", help="Or show what was found so far.")] = True,
    data_dir: o.DATA_DIR = None,
    device: o.DEVICE = "cpu",
    engine: o.ENGINE = "auto",
    dry_run: o.DRY_RUN = False,
    quiet: o.QUIET = False,
    checkpoint_seconds: o.CHECKPOINT = None,
    on: o.ON = "local",
    workers: o.WORKERS = None,
) -> None:
    """Search the best sets, also where the paper prints none.

    Many sets run briefly, the best of them longer; the same command goes on after an interruption.
    """
    from upgd.lab import searching
    from upgd.ledger.files import check_output
    from upgd.paper import found as sets_found
    from upgd.paper.searches import SEARCHES
    from upgd.study.execution import Tally
    from upgd.study.options import check_device

    if problems == ["list"]:
        for each in SEARCHES.values():
            for line in searching.describe(each):
                say(line)
        return
    mine = open_study(study, quiet, device, engine, workers, on, data_dir, checkpoint_seconds)
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
            searching.run(each, mine)
            tally = tally + mine.tally
    if dry_run:
        return
    mine.tally = tally
    kept, rankings, lacking = searching.outcomes(chosen, mine)
    if not quiet:
        for ranked in rankings.values():
            show_best(ranked, study, as_json=False)
    for line in lacking:
        say(line, err)
    if save is not None:
        sets_found.write(kept, save)
        wrote(save, f": {count(sum(map(len, kept.values())), 'set')}")
    end(mine)


def _numbers(keep: str) -> list[int]:
    parts = [part.strip() for part in keep.split(",")] if keep else []
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--keep {keep!r} is not a list of numbers such as 12,2")
    return [int(part) for part in parts]
