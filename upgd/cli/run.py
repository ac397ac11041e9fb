"""``upgd run`` and ``upgd resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, say
from upgd.cli.arguments import all_methods, length, numbers, seed_list
from upgd.cli.options import end, load, open_study
from upgd.cli.show import show_table


@command(
    examples=(
        "upgd run label-permuted-digits upgd-w sgd --seeds 5",
        "upgd run input-permuted-mnist paper --best --seeds 20 --device cuda",
        "upgd run label-permuted-digits upgd --set lr=0.1 --set sigma=0.01",
    )
)
def run(
    problem: o.ANY_PROBLEM,
    methods: o.METHODS,
    seeds: o.SEEDS = "5",
    steps: o.STEPS = "",
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", help="Such as lr=0.01. Repeatable."),
    ] = None,
    best: Annotated[bool, Option("--best", help="Start from the paper's printed sets.")] = False,
    use: o.USE = None,
    study: o.FOLDER = None,
    data_dir: o.DATA_DIR = None,
    device: o.DEVICE = "cpu",
    engine: o.ENGINE = "auto",
    batch: o.BATCH = 1,
    restart: Annotated[
        bool, o.LEARNER("--restart", help="A fresh learner for every task.")
    ] = False,
    held_out: Annotated[
        int, o.LEARNER(min=0, metavar="SAMPLES", help="Held-out samples after each task.")
    ] = 0,
    stride: Annotated[
        int,
        o.LEARNER(min=0, metavar="STEPS", help="Diagnostics at one of so many steps; 0: never."),
    ] = 0,
    window: o.WINDOW = 0,
    task_length: o.TASK_LENGTH = 0,
    hidden: o.HIDDEN = "",
    network: o.NETWORK = "",
    layer_norm: o.LAYER_NORM = False,
    input_norm: o.INPUT_NORM = False,
    dry_run: o.DRY_RUN = False,
    quiet: o.QUIET = False,
    as_json: o.JSON = False,
    checkpoint_seconds: o.CHECKPOINT = None,
    on: o.ON = "local",
    workers: o.WORKERS = None,
) -> None:
    """Run methods on a problem.

    What the study has already is not run again.
    """
    from upgd.lab.definitions import resolve_problem

    load(use)
    row = resolve_problem(problem)
    folder = Path("studies") / row.name if study is None else study
    mine = open_study(folder, quiet, device, engine, workers, on, data_dir, checkpoint_seconds)
    specs = mine.specs(
        row, all_methods(methods), seeds=seed_list(seeds), steps=length(steps), best=best,
        batch=batch if batch > 1 else 0, restart=restart, held_out=held_out, stride=stride,
        window=window, task_length=task_length, hidden=hidden, network=network,
        layer_norm=layer_norm, input_norm=input_norm,
        **numbers(settings or []),
    )  # fmt: skip
    if dry_run:
        left = len(mine.missing(specs))
        say(f"{left} of {len(specs)} runs to do in {mine.folder}: {specs[0].steps} steps each")
        return
    table = mine.run_specs(specs)
    if not quiet:
        show_table(table, mine.folder, as_json)
    end(mine)


@command(
    examples=(
        "upgd resume studies/demo",
        "upgd resume studies/demo --retry",
        "upgd resume studies/demo --other-versions  # after an upgrade of torch",
    )
)
def resume(
    study: o.STUDY,
    use: o.USE = None,
    data_dir: o.DATA_DIR = None,
    device: o.DEVICE = "cpu",
    engine: o.ENGINE = "auto",
    retry: Annotated[bool, Option("--retry", help="Also try failed runs again.")] = False,
    other_versions: Annotated[
        bool,
        Option(
            "--other-versions",
            help="Also continue runs that were begun with other versions; results name both.",
        ),
    ] = False,
    quiet: o.QUIET = False,
    checkpoint_seconds: o.CHECKPOINT = None,
    on: o.ON = "local",
    workers: o.WORKERS = None,
) -> None:
    """Finish what a study has begun."""
    load(use)
    mine = open_study(study, quiet, device, engine, workers, on, data_dir, checkpoint_seconds)
    table = mine.resume(retry, other_versions)
    if not quiet:
        show_table(table, mine.folder, False)
    end(mine)
