"""``upgd sweep``: many sets of hyperparameters, all of them, by halving, or by search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from upgd.cli.app import app, mistakes_are_one_line, say, warn
from upgd.cli.arguments import all_methods, axes, seed_list, whole
from upgd.cli.best import show_best
from upgd.cli.options import (
    BATCH,
    CHECKPOINT,
    DATA_DIR,
    DEVICE,
    ENGINE,
    HIDDEN,
    JSON,
    NETWORK,
    ON,
    QUIET,
    SEEDS,
    STEPS,
    TASK_LENGTH,
    USE,
    WINDOW,
    WORKERS,
    end,
    load,
    open_study,
)
from upgd.lab.definitions import resolve_problem
from upgd.lab.outlook import lines
from upgd.lab.sweeping import MOST_RUNS


@app.command()
@mistakes_are_one_line
def sweep(
    problem: Annotated[
        str, typer.Argument(help="A problem ('upgd list' shows them), or an .npz file.")
    ],
    methods: Annotated[
        list[str], typer.Argument(help="One or several methods; 'paper' is the paper's ten.")
    ],
    seeds: SEEDS = "5",
    steps: STEPS = "",
    paper: Annotated[bool, typer.Option("--paper", help="The paper's grids: the default.")] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Only the sets that the paper prints as best.")
    ] = False,
    grid: Annotated[
        Path | None,
        typer.Option(help="A TOML file: tables [upgd] or [all], with lr = [0.1, 0.01]."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Other values of an axis: sigma=0.01,0.1. Repeatable."),
    ] = None,
    halving: Annotated[
        int | None,
        typer.Option(min=2, help="Run all sets briefly and one in so many longer, rung by rung."),
    ] = None,
    search: Annotated[
        int | None,
        typer.Option(min=1, help="Let Optuna choose so many sets per method within the grid."),
    ] = None,
    max_runs: Annotated[
        int, typer.Option(min=1, help="Refuse a sweep with more runs than these.")
    ] = MOST_RUNS,
    use: USE = None,
    study: Annotated[Path | None, typer.Option(help="A folder; default studies/PROBLEM.")] = None,
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    batch: BATCH = 1,
    window: WINDOW = 0,
    task_length: TASK_LENGTH = 0,
    hidden: HIDDEN = "",
    network: NETWORK = "",
    dry_run: Annotated[
        bool, typer.Option(help="Say how many runs, how long, how much memory, and stop.")
    ] = False,
    quiet: QUIET = False,
    as_json: JSON = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = None,
) -> None:
    """Try many sets of hyperparameters, and show each method's best.

    What the study has already is not run again: the same command continues after an interruption.
    """
    if sum((paper, best, grid is not None)) > 1:
        raise ValueError("choose one of --paper, --best and --grid")
    load(use)
    row = resolve_problem(problem)
    mine = open_study(
        study if study is not None else Path("studies") / row.name,
        quiet=quiet,
        device=device,
        engine=engine,
        workers=workers,
        on=on,
        data_dir=data_dir,
        checkpoint_seconds=checkpoint_seconds,
    )
    planned = mine.plan_sweep(
        row,
        all_methods(methods),
        "best" if best else grid,
        seeds=seed_list(seeds),
        steps=whole("steps", steps) if steps else None,
        halving=halving,
        search=search,
        max_runs=max_runs,
        batch=batch if batch > 1 else 0,
        window=window,
        task_length=task_length,
        hidden=hidden,
        network=network,
        **axes(settings or []),
    )
    if dry_run:
        facts = mine.outlook(planned)
        if as_json:
            print(json.dumps(facts))
            return
        for line in lines(facts):
            say(line)
        return
    try:
        found = mine.run_sweep(planned)
    except KeyboardInterrupt:
        warn("interrupted; the same command continues from here")
        raise typer.Exit(130) from None
    if not quiet:
        show_best(found, mine.folder, as_json)
    end(mine)
