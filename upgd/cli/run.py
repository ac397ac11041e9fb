"""``upgd run`` and ``upgd resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from upgd.cli.app import app, mistakes_are_one_line, out, printable
from upgd.cli.arguments import all_methods, hyperparameters, seed_list, whole
from upgd.cli.show import show_study
from upgd.cli.working import (
    AGENTS_ARE_LOCAL,
    CHECKPOINT,
    DATA_DIR,
    DEVICE,
    ENGINE,
    ON,
    QUIET,
    WORKERS,
    Work,
    do_work,
    end,
)
from upgd.engine import Setting
from upgd.rl.runs import is_rl
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, RunSpec
from upgd.study.prepare import check_device, prepare


@app.command()
@mistakes_are_one_line
def run(
    problem: Annotated[str, typer.Argument(help="A problem; 'upgd list' shows them.")],
    methods: Annotated[
        list[str], typer.Argument(help="One or several methods; 'paper' is the paper's ten.")
    ],
    seeds: Annotated[str, typer.Option(help="How many, or which: 20, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, typer.Option(help="Samples per run; default the problem's.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyperparameter: lr=0.01. Repeatable.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Start from the sets that the paper prints as best.")
    ] = False,
    study: Annotated[Path | None, typer.Option(help="A folder; default studies/PROBLEM.")] = None,
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Samples per update.")] = 1,
    restart: Annotated[bool, typer.Option(help="A fresh learner for every task.")] = False,
    held_out: Annotated[int, typer.Option(min=0, help="Held-out samples after each task.")] = 0,
    stride: Annotated[int, typer.Option(min=0, help="Diagnostics every so many steps.")] = 0,
    window: Annotated[int, typer.Option(min=0, help="Samples per point; default one task.")] = 0,
    task_length: Annotated[
        int, typer.Option(min=0, help="Samples per task; default the problem's.")
    ] = 0,
    hidden: Annotated[
        str, typer.Option(help="Hidden units, such as 64-32, or none; default the problem's.")
    ] = "",
    dry_run: Annotated[bool, typer.Option(help="Say what would be run, and stop.")] = False,
    quiet: QUIET = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table for scripts.")] = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = 1,
) -> None:
    """Run methods on a problem; what the study has already is not run again."""
    row = get_problem(problem)
    length = whole("steps", steps) if steps else row.steps
    options: dict[str, Any] = {"batch": batch} if batch > 1 else {}
    options |= {"restart": True} if restart else {}
    options |= {"held_out": held_out} if held_out else {}
    options |= {"stride": stride} if stride else {}
    options |= {"window": window} if window else {}
    options |= {"task_length": task_length} if task_length else {}
    options |= {"hidden": hidden} if hidden else {}
    arms = hyperparameters(all_methods(methods), settings or [], row.name if best else "")
    every = (
        RunSpec(row.name, name, hyper, seed, length, options)
        for name, hyper in arms.items()
        for seed in seed_list(seeds)
    )
    specs = list(dict.fromkeys(every))  # two names may mean the same run
    how = Work(data_dir, device, engine, quiet, checkpoint_seconds, on, workers)
    here = device if on == "local" else "cpu"  # a driver needs no GPU
    check_device(here)
    if row.dataset is not None:
        check(row.dataset, data_dir)  # a wrong file is found before anything starts
    for spec in {s.method: s for s in specs}.values():
        check_length(spec, prepare(spec, data_dir, here).setting)
    folder = study if study is not None else Path("studies") / row.name
    if dry_run:
        known = _known(folder)
        missing = [s for s in specs if s.key not in known]
        where = printable(folder)
        out.print(f"{len(missing)} of {len(specs)} runs to do in {where}: {length} steps each")
        return
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        keys = [spec.key for spec in specs]
        tally = do_work(ledger, keys, how)
        if not quiet:
            show_study(ledger, folder, as_json, set(keys))
    end(tally)


@app.command()
@mistakes_are_one_line
def resume(
    study: Annotated[Path, typer.Argument(help="A study's folder.")],
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    retry: Annotated[bool, typer.Option("--retry", help="Also try failed runs again.")] = False,
    quiet: QUIET = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = 1,
) -> None:
    """Finish what a study has begun."""
    how = Work(data_dir, device, engine, quiet, checkpoint_seconds, on, workers)
    check_device(device if on == "local" else "cpu")
    with Ledger.open(study, create=False) as ledger:
        if retry:
            failed = [part.problem for part in ledger.parts() if part.state == "failed"]
            if on != "local" and any(map(is_rl, failed)):
                raise ValueError(AGENTS_ARE_LOCAL)
            ledger.retry_failed()
        tally = do_work(ledger, None, how)
        if not quiet:
            show_study(ledger, study, False)
    end(tally)


def check_length(spec: RunSpec, setting: Setting) -> None:
    """A run without a whole window would have no result."""
    if spec.steps * setting.batch < setting.window:
        samples = f" of {setting.batch} samples" if setting.batch > 1 else ""
        raise ValueError(
            f"{spec.steps} steps{samples} are less than one window of {setting.window} samples, "
            "so nothing would be measured; give more --steps or a smaller --window"
        )


def _known(folder: Path) -> set[str]:
    if not (folder / "ledger.sqlite").exists():
        return set()
    with Ledger.open(folder, create=False, read_only=True) as ledger:
        return {run.key for run in ledger.runs() if run.state in ("done", "diverged")}
