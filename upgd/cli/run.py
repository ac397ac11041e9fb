"""``upgd run`` and ``upgd resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from upgd.cli.app import app, mistakes_are_one_line, say
from upgd.cli.arguments import all_methods, numbers, seed_list, whole
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
    STUDY,
    TASK_LENGTH,
    USE,
    WINDOW,
    WORKERS,
    end,
    load,
    open_study,
)
from upgd.cli.show import show_table
from upgd.lab.definitions import resolve_problem


@app.command()
@mistakes_are_one_line
def run(
    problem: Annotated[
        str, typer.Argument(help="A problem ('upgd list' shows them), or an .npz file.")
    ],
    methods: Annotated[
        list[str], typer.Argument(help="One or several methods; 'paper' is the paper's ten.")
    ],
    seeds: SEEDS = "5",
    steps: STEPS = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyperparameter: lr=0.01. Repeatable.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Start from the sets that the paper prints as best.")
    ] = False,
    use: USE = None,
    study: Annotated[Path | None, typer.Option(help="A folder; default studies/PROBLEM.")] = None,
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    batch: BATCH = 1,
    restart: Annotated[bool, typer.Option(help="A fresh learner for every task.")] = False,
    held_out: Annotated[int, typer.Option(min=0, help="Held-out samples after each task.")] = 0,
    stride: Annotated[int, typer.Option(min=0, help="Diagnostics every so many steps.")] = 0,
    window: WINDOW = 0,
    task_length: TASK_LENGTH = 0,
    hidden: HIDDEN = "",
    network: NETWORK = "",
    dry_run: Annotated[bool, typer.Option(help="Say what would be run, and stop.")] = False,
    quiet: QUIET = False,
    as_json: JSON = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = None,
) -> None:
    """Run methods on a problem; what the study has already is not run again."""
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
    specs = mine.specs(
        row,
        all_methods(methods),
        seeds=seed_list(seeds),
        steps=whole("steps", steps) if steps else None,
        best=best,
        batch=batch if batch > 1 else 0,
        restart=restart,
        held_out=held_out,
        stride=stride,
        window=window,
        task_length=task_length,
        hidden=hidden,
        network=network,
        **numbers(settings or []),
    )
    if dry_run:
        left = len(mine.missing(specs))
        say(f"{left} of {len(specs)} runs to do in {mine.folder}: {specs[0].steps} steps each")
        return
    table = mine.run_specs(specs)
    if not quiet:
        show_table(table, mine.folder, as_json)
    end(mine)


@app.command()
@mistakes_are_one_line
def resume(
    study: STUDY,
    use: USE = None,
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    retry: Annotated[bool, typer.Option("--retry", help="Also try failed runs again.")] = False,
    quiet: QUIET = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = None,
) -> None:
    """Finish what a study has begun."""
    load(use)
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
    table = mine.resume(retry)
    if not quiet:
        show_table(table, mine.folder, False)
    end(mine)
