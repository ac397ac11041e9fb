"""``upgd reproduce``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from upgd.cli.app import app, err, mistakes_are_one_line, out, printable
from upgd.cli.numbers import clock, count, short
from upgd.cli.working import (
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
from upgd.paper.drawing import draw
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.figures import FIGURES, Figure
from upgd.paper.results import collect, write
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, RunSpec, forecast
from upgd.study.prepare import check_device

UTILITY = "fig2"
OVER = ("done", "diverged")


@app.command()
@mistakes_are_one_line
def reproduce(
    figures: Annotated[
        list[str], typer.Argument(help="Such as fig3; 'all' for all, 'list' to see which.")
    ],
    scale: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the paper's steps.")
    ] = 1.0,
    seeds: Annotated[int, typer.Option(min=0, help="How many; default the paper's.")] = 0,
    study: Annotated[Path, typer.Option(help="A folder for runs and figures.")] = Path(
        "studies/paper"
    ),
    formats: Annotated[str, typer.Option("--format", help="Such as png,svg.")] = "png,svg",
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    dry_run: Annotated[bool, typer.Option(help="Say what would be run, and stop.")] = False,
    quiet: QUIET = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = 1,
) -> None:
    """Run what a figure of the paper needs and the study lacks, and draw it."""
    if figures == ["list"]:
        _list()
        return
    chosen = _chosen(figures)
    check_device(device)
    names = tuple(dict.fromkeys(name for figure in chosen for name in figure.experiments))
    for name in names:
        data = get_problem(EXPERIMENTS[name].problem).dataset
        if data is not None:
            check(data, data_dir)  # a wrong file is found before anything starts
    specs = _specs(names, scale, seeds)
    how = Work(data_dir, device, engine, quiet, checkpoint_seconds, on, workers)
    if dry_run or not quiet:
        _say(specs, study, how)
    if dry_run:
        return
    suffixes = [part.strip().lstrip(".") for part in formats.split(",") if part.strip()]
    with Ledger.open(study) as ledger:
        ledger.add(specs)
        tally = do_work(ledger, [spec.key for spec in specs], how)
        results = {}
        for name in names:
            found = collect(ledger, EXPERIMENTS[name])
            if found is not None:
                results[name] = found
    for name, found in results.items():
        folder = study / "results" / name.replace("-", "_")
        folder.mkdir(parents=True, exist_ok=True)
        write(found, folder / "series.csv.gz")
    for figure in chosen:
        for suffix in suffixes:
            path = study / f"{figure.name}.{suffix}"
            missing = draw(figure, results, path)
            _tell(f"wrote {path}")
        if missing:
            _note(f"{figure.name} lacks {', '.join(missing)}")
    end(tally)


def _chosen(names: Sequence[str]) -> list[Figure]:
    if "all" in names:
        return list(FIGURES.values())
    found = []
    for name in names:
        if name == UTILITY:
            raise ValueError("fig2 has a command of its own: python -m upgd.paper.utility_quality")
        if name not in FIGURES:
            close = difflib.get_close_matches(name, FIGURES, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"unknown figure {name!r}; {hint}'upgd reproduce list' shows all")
        found.append(FIGURES[name])
    return found


def _list() -> None:
    for figure in FIGURES.values():
        of = ", ".join(figure.experiments)
        out.print(f"{figure.name:18} {figure.caption} ({of})", highlight=False, soft_wrap=True)


def _specs(names: Sequence[str], scale: float, seeds: int) -> list[RunSpec]:
    """The runs of some experiments, each once."""
    found: dict[str, RunSpec] = {}
    for name in names:
        for runs in EXPERIMENTS[name].specs(scale, seeds or None).values():
            found |= {spec.key: spec for spec in runs}
    return list(found.values())


def _say(specs: Sequence[RunSpec], study: Path, how: Work) -> None:
    """How much there is to do and how long it will take here."""
    known = []
    if (study / "ledger.sqlite").exists():
        with Ledger.open(study, create=False, read_only=True) as ledger:
            known = list(ledger.runs())
    over = {run.key for run in known if run.state in OVER}
    left = [spec for spec in specs if spec.key not in over]
    _tell(f"{len(left)} of {count(len(specs), 'run')} to do in {study}")
    seconds = 0.0
    problems: dict[str, list[RunSpec]] = {}
    for spec in left:
        problems.setdefault(spec.problem, []).append(spec)
    for problem, some in problems.items():
        pace = forecast.pace(some, known, how.device, how.engine, how.data_dir)
        steps = sum(spec.steps for spec in some)
        seconds += steps / pace.rate
        told = f"{short(steps)} learner-steps at {short(pace.rate)} per second"
        _tell(f"  {problem}: {count(len(some), 'run')}, {told} ({pace.source})")
    if left:
        _tell(f"time: about {clock(seconds)} in one process")


def _tell(text: str) -> None:
    out.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def _note(text: str) -> None:
    err.print(printable(text), style="yellow", highlight=False, markup=False, soft_wrap=True)
