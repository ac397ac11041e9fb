"""``upgd sweep``: many sets of hyperparameters, all of them, by halving, or by search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, say
from upgd.cli.arguments import all_methods, axes, length, seed_list
from upgd.cli.best import show_best
from upgd.cli.options import end, load, open_study


@command(
    interrupted=o.CONTINUES,
    examples=(
        "upgd sweep label-permuted-digits upgd-w sgd --set lr=0.1,0.01 --seeds 3",
        "upgd sweep input-permuted-mnist paper --halving 4 --dry-run",
    ),
)
def sweep(
    problem: o.ANY_PROBLEM,
    methods: o.METHODS,
    seeds: o.SEEDS = "5",
    steps: o.STEPS = "",
    paper: Annotated[bool, Option("--paper", help="The paper's grids: the default.")] = False,
    best: Annotated[bool, Option("--best", help="Only the paper's printed sets.")] = False,
    grid: Annotated[
        Path | None, Option(help="TOML: tables [upgd] or [all], lr = [0.1, 0.01].")
    ] = None,
    settings: o.AXES = None,
    halving: Annotated[
        int | None, Option(min=2, help="Rung by rung, run one set in so many longer.")
    ] = None,
    search: Annotated[
        int | None, Option(min=1, help="Optuna chooses so many sets per method.")
    ] = None,
    max_runs: Annotated[
        int | None,
        o.EXECUTION(
            min=1, metavar="NUMBER", help="Refuse a sweep with more runs; default 200 000."
        ),
    ] = None,
    use: o.USE = None,
    study: o.FOLDER = None,
    data_dir: o.DATA_DIR = None,
    device: o.DEVICE = "cpu",
    engine: o.ENGINE = "auto",
    batch: o.BATCH = 1,
    window: o.WINDOW = 0,
    task_length: o.TASK_LENGTH = 0,
    hidden: o.HIDDEN = "",
    network: o.NETWORK = "",
    layer_norm: o.LAYER_NORM = False,
    input_norm: o.INPUT_NORM = False,
    dry_run: Annotated[
        bool, o.EXECUTION("--dry-run", help="Say how many runs, how long, and stop.")
    ] = False,
    quiet: o.QUIET = False,
    as_json: o.JSON = False,
    checkpoint_seconds: o.CHECKPOINT = None,
    on: o.ON = "local",
    workers: o.WORKERS = None,
) -> None:
    """Try many sets of hyperparameters, and show each method's best.

    What the study has already is not run again: the same command continues after an interruption.
    """
    from upgd.lab.definitions import resolve_problem
    from upgd.lab.outlook import lines
    from upgd.lab.sweeping import MOST_RUNS

    if sum((paper, best, grid is not None)) > 1:
        raise ValueError("choose one of --paper, --best and --grid")
    load(use)
    row = resolve_problem(problem)
    folder = Path("studies") / row.name if study is None else study
    mine = open_study(folder, quiet, device, engine, workers, on, data_dir, checkpoint_seconds)
    planned = mine.plan_sweep(
        row, all_methods(methods), "best" if best else grid, seeds=seed_list(seeds),
        steps=length(steps), halving=halving, search=search, max_runs=max_runs or MOST_RUNS,
        batch=batch if batch > 1 else 0, window=window, task_length=task_length, hidden=hidden,
        network=network, layer_norm=layer_norm, input_norm=input_norm, **axes(settings or []),
    )  # fmt: skip
    if dry_run:
        facts = mine.outlook(planned)
        for line in () if as_json else lines(facts):
            say(line)
        if as_json:
            print(json.dumps(facts))
        return
    found = mine.run_sweep(planned)
    if not quiet:
        show_best(found, mine.folder, as_json)
    end(mine)
