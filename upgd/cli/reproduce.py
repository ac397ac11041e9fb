"""``upgd reproduce``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
from upgd.paper import provenance
from upgd.paper.drawing import can_draw, draw, missing
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.figures import FIGURES, Figure
from upgd.paper.measured import MEASURED
from upgd.paper.measuring import How, Measured
from upgd.paper.results import TABLE, Results, find, gather, write
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, Run, RunSpec, forecast
from upgd.study.prepare import check_device
from upgd.study.versions import commit
from upgd.study.work import Tally

STUDY = Path("studies/paper")
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
    study: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder for runs and figures; default studies/paper. Of several the others are "
            "only read: what they have counts, and is not run again."
        ),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="A folder for tables; default STUDY/results.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Or draw from what there is, and say what lacks.")
    ] = True,
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
    """Run what figures of the paper need and the study lacks, draw them, and keep the numbers.

    Tables and where they come from go into STUDY/results; 'upgd results' makes pages of them.
    """
    if figures == ["list"]:
        _list()
        return
    drawn, measured = _chosen(figures)
    studies = study or [STUDY]
    tables = results or studies[0] / "results"
    suffixes = [part.strip().lstrip(".") for part in formats.split(",") if part.strip()]
    names = tuple(dict.fromkeys(name for figure in drawn for name in figure.experiments))
    how = Work(data_dir, device, engine, quiet, checkpoint_seconds, on, workers)
    asked = How(scale, seeds, device)
    tally = Tally()
    if run or dry_run:
        check_device(device)
        tally = _run(_specs(names, scale, seeds), studies, how, dry_run)
        for each in measured:
            _measure(each, asked, tables, quiet, dry_run)
    if dry_run:
        return
    found = _keep(names, studies, tables, data_dir)
    studies[0].mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        _draw(figure, found, studies[0], suffixes)
    for each in measured:
        _draw_measured(each, tables / each.folder(asked), studies[0], suffixes)
    end(tally)


def _chosen(names: Sequence[str]) -> tuple[list[Figure], list[Measured]]:
    """The figures of these names: those of experiments, and those that are measured in one go."""
    known = [*FIGURES, *MEASURED]
    wanted = known if "all" in names else names
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"unknown figure {name!r}; {hint}'upgd reproduce list' shows all")
    return (
        [FIGURES[name] for name in wanted if name in FIGURES],
        [MEASURED[name] for name in wanted if name in MEASURED],
    )


def _list() -> None:
    for figure in FIGURES.values():
        _tell(f"{figure.name:18} {figure.caption} ({', '.join(figure.experiments)})")
    for each in MEASURED.values():
        _tell(f"{each.NAME:18} {each.CAPTION}")


# --------------------------------------------------------------------------------- runs
def _specs(names: Sequence[str], scale: float, seeds: int) -> list[RunSpec]:
    """The runs of some experiments, each once."""
    found: dict[str, RunSpec] = {}
    for name in names:
        for runs in EXPERIMENTS[name].specs(scale, seeds or None).values():
            found |= {spec.key: spec for spec in runs}
    return list(found.values())


def _run(specs: Sequence[RunSpec], studies: Sequence[Path], how: Work, dry_run: bool) -> Tally:
    """Run what no study has, into the first."""
    for data in {get_problem(spec.problem).dataset for spec in specs}:
        if data is not None:
            check(data, how.data_dir)  # a wrong file is found before anything starts
    with ExitStack() as stack:
        known = [run for ledger in _ledgers(studies, stack) for run in ledger.runs()]
    over = {run.key for run in known if run.state in OVER}
    left = [spec for spec in specs if spec.key not in over]
    if specs and (dry_run or not how.quiet):
        _tell(f"{len(left)} of {count(len(specs), 'run')} to do in {studies[0]}")
        _forecast(left, known, how)
    if dry_run or not left:
        return Tally()
    with Ledger.open(studies[0]) as ledger:
        ledger.add(left)
        return do_work(ledger, [spec.key for spec in left], how)


def _ledgers(studies: Sequence[Path], stack: ExitStack) -> list[Ledger]:
    """Those of the studies, for reading; the first one may have none yet."""
    first, *others = studies
    there = [first, *others] if (first / "ledger.sqlite").exists() else others
    opened = (Ledger.open(folder, create=False, read_only=True) for folder in there)
    return [stack.enter_context(ledger) for ledger in opened]


def _forecast(left: Sequence[RunSpec], known: Sequence[Run], how: Work) -> None:
    """How long it will take here."""
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


def _measure(each: Measured, how: How, tables: Path, quiet: bool, dry_run: bool) -> None:
    """Measure a figure, unless that has been done in the same way."""
    folder = tables / each.folder(how)
    before = provenance.read(folder)
    if before is not None and before.command == how.command(each.NAME):
        _tell(f"{each.NAME}: measured on {before.parts[-1].ended}; remove {folder} to do it again")
        return
    if dry_run or not quiet:
        _tell(f"{each.NAME}: {each.plan(how)}")
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        commit()  # that of the code which runs, not of what lies there at the end
        each.measure(how, folder, (lambda text: None) if quiet else _tell)


# ------------------------------------------------------------------------------ results
def _keep(
    names: Sequence[str], studies: Sequence[Path], tables: Path, data_dir: Path | None
) -> dict[str, Results]:
    """What the studies have of experiments, written as tables with where they come from."""
    kept = {}
    with ExitStack() as stack:
        ledgers = _ledgers(studies, stack)
        for name in names:
            found = find(ledgers, EXPERIMENTS[name])
            results = gather(found, name)
            if results is None:
                continue
            folder = tables / name.replace("-", "_")
            before = provenance.read(folder)
            data = provenance.known_data(EXPERIMENTS[name].problem, data_dir, before)
            told = provenance.describe(found, EXPERIMENTS[name], data)
            kept[name] = results
            if before is not None and before.learner_steps > told.learner_steps:
                _note(f"kept {folder}: it has {count(before.runs, 'run')}, more than the study")
                continue
            folder.mkdir(parents=True, exist_ok=True)
            write(results, folder / TABLE)
            told.write(folder)
    return kept


def _draw(
    figure: Figure, results: Mapping[str, Results], folder: Path, suffixes: Sequence[str]
) -> None:
    paths = [folder / f"{figure.name}.{suffix}" for suffix in suffixes]
    if can_draw(figure, results):
        draw(figure, results, *paths)
        for path in paths:
            _tell(f"wrote {path}")
    lacking = missing(figure, results)
    if lacking:
        _note(f"{figure.name} lacks {', '.join(lacking)}")


def _draw_measured(each: Measured, table: Path, folder: Path, suffixes: Sequence[str]) -> None:
    if not (table / each.TABLE).exists():
        _note(f"{each.NAME} has not been measured")
        return
    for path in each.draw(table, folder, suffixes):
        _tell(f"wrote {path}")


def _tell(text: str) -> None:
    out.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def _note(text: str) -> None:
    err.print(printable(text), style="yellow", highlight=False, markup=False, soft_wrap=True)
