"""``upgd reproduce``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from upgd.cli.app import app, mistakes_are_one_line, say, warn, wrote
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
from upgd.paper import committed, provenance
from upgd.paper.committed import Table, are_tables
from upgd.paper.drawing import can_draw, diverged_arms, draw, missing
from upgd.paper.experiments import ENVIRONMENTS, EXPERIMENTS, SHORTEST, Experiment, agents_name
from upgd.paper.figures import FIGURES, Figure
from upgd.paper.measured import MEASURED
from upgd.paper.measuring import How, Measured
from upgd.paper.provenance import Provenance
from upgd.paper.results import TABLE, Results, find, folder_name, gather, lacking, read, write
from upgd.report.figures import check_format
from upgd.rl.environments import make
from upgd.rl.runs import PREFIX, is_rl
from upgd.rl.study import pace
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, Run, RunSpec, forecast
from upgd.study.files import check_generated, check_output_folder
from upgd.study.ledger import NAME
from upgd.study.prepare import check_device
from upgd.study.versions import commit
from upgd.study.work import Tally

STUDY = Path("studies/paper")
MARKED = {"png", "svg"}
"""Formats of figures that name the program near their beginning."""


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
            "only read, be they studies or folders of tables: what they have is not run again."
        ),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="A folder for tables; default STUDY/results.")
    ] = None,
    problems: Annotated[
        str, typer.Option(help="Only these problems: input-permuted-mnist. Default all.")
    ] = "",
    environments: Annotated[
        str, typer.Option(help="Of agents, only these: Hopper,Ant. Default all.")
    ] = "",
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
    if scale <= 0:
        raise ValueError(f"--scale must be above 0 and at most 1, got {scale:g}")
    drawn, measured = _chosen(figures, run or dry_run)
    first, *others = study or [STUDY]
    if are_tables(first):
        raise ValueError(f"{first} has tables, and is no study for runs: name one before it")
    for folder in others:
        if not are_tables(folder) and not (folder / NAME).exists():
            raise ValueError(f"there is neither a study nor a folder of tables in {folder}")
    studies = [first, *(each for each in others if not are_tables(each))]
    tables = results or first / "results"
    suffixes = _suffixes(formats)
    names = _experiments(drawn, problems, environments)
    to_run = _experiments(drawn, problems, environments, to_run=True)
    drawn = [_narrowed(figure, names) for figure in drawn if set(figure.experiments) & set(names)]
    _check_outputs(drawn, names, first, tables, suffixes)
    there = _tables(names, [each for each in others if are_tables(each)], data_dir)
    how = Work(data_dir, device, engine, quiet, checkpoint_seconds, on, workers)
    asked = How(scale, seeds, device)
    tally = Tally()
    for name in to_run:
        if not EXPERIMENTS[name].arms and EXPERIMENTS[name].awaited:
            problem = EXPERIMENTS[name].problem
            warn(f"{name}: its sets are still to be searched: 'upgd search {problem}' finds some")
        if run or dry_run:
            _tell_length(EXPERIMENTS[name], scale)
    if run or dry_run:
        check_device(device)
        specs = _specs(to_run, scale, seeds)
        needed = _specs(to_run, scale, seeds, there)
        tally = _run(needed, len(specs), studies, how, dry_run)
        for each in measured:
            _measure(each, asked, tables, quiet, dry_run)
    if dry_run:
        return
    found = _keep(names, studies, there, tables, data_dir)
    studies[0].mkdir(parents=True, exist_ok=True)
    for figure in drawn:
        _draw(figure, found, studies[0], suffixes)
    for each in measured:
        _draw_measured(each, tables / each.folder(asked), studies[0], suffixes)
    end(tally)


def _suffixes(formats: str) -> list[str]:
    """Formats of figures, each one that can be drawn."""
    found = [part.strip().lstrip(".").lower() for part in formats.split(",") if part.strip()]
    if not found:
        raise ValueError(f"--format takes formats such as png,svg; got {formats!r}")
    for suffix in found:
        check_format(Path(f"figure.{suffix}"))
    return list(dict.fromkeys(found))


def _check_outputs(
    drawn: Sequence[Figure],
    names: Sequence[str],
    study: Path,
    tables: Path,
    suffixes: Sequence[str],
) -> None:
    """Find out before anything runs whether figures and tables can be written."""
    for folder in (study, tables):
        check_output_folder(folder)
    for figure in drawn:
        for suffix in set(suffixes) & MARKED:
            check_generated(study / f"{figure.name}.{suffix}")
    for name in names:
        folder = tables / folder_name(name)
        if provenance.read(folder) is None and (folder / TABLE).exists():
            read(folder / TABLE, name)  # or it is somebody else's


def _chosen(names: Sequence[str], to_run: bool = True) -> tuple[list[Figure], list[Measured]]:
    """The figures of these names: those of experiments, and those that are measured in one go."""
    known = [*FIGURES, *MEASURED]
    wanted = names
    if "all" in names:
        wanted = _possible(known) if to_run else known
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"unknown figure {name!r}; {hint}'upgd reproduce list' shows all")
    return (
        [FIGURES[name] for name in wanted if name in FIGURES],
        [MEASURED[name] for name in wanted if name in MEASURED],
    )


def _possible(names: Sequence[str]) -> list[str]:
    """Figures that can be made with what is installed; says which cannot."""
    if find_spec("gymnasium") is not None:
        return list(names)
    agents = [name for name in names if name in FIGURES and _has_agents(FIGURES[name])]
    warn(f'leaving out {", ".join(agents)}, which need gymnasium: pip install "upgd[rl]"')
    return [name for name in names if name not in agents]


def _has_agents(figure: Figure) -> bool:
    return any(EXPERIMENTS[name].agents for name in figure.experiments)


def _experiments(
    figures: Sequence[Figure], problems: str = "", environments: str = "", to_run: bool = False
) -> tuple[str, ...]:
    """What figures need, of the problems and, for agents, the environments that are asked for."""
    needs = (figure.run if to_run else figure.experiments for figure in figures)
    names = dict.fromkeys(name for some in needs for name in some)
    ours = dict.fromkeys(EXPERIMENTS[n].problem for n in names if not EXPERIMENTS[n].agents)
    wanted = _wanted(problems, "problem", tuple(ours))
    agents = _wanted(environments, "environment", ENVIRONMENTS)
    chosen = {agents_name(each, annealed) for each in agents for annealed in (False, True)}

    def is_asked_for(name: str) -> bool:
        if EXPERIMENTS[name].agents:
            return name in chosen if agents else not wanted
        return not wanted or EXPERIMENTS[name].problem in wanted

    return tuple(filter(is_asked_for, names))


def _wanted(text: str, what: str, known: Sequence[str]) -> list[str]:
    wanted = [part.strip().lower() for part in text.split(",") if part.strip()]
    for each in wanted:
        if each not in map(str.lower, known):
            raise ValueError(f"no {what} {each!r}; there are {', '.join(known)}")
    return wanted


def _narrowed(figure: Figure, names: Sequence[str]) -> Figure:
    """A figure with the panels that are asked for."""
    if set(figure.experiments) <= set(names):
        return figure
    kept = (p for p in figure.panels if p.kind == "heat" or p.experiment in names)
    return replace(figure, panels=tuple(kept))


def _list() -> None:
    for figure in FIGURES.values():
        say(f"{figure.name:18} {figure.caption} ({', '.join(figure.run)})")
    for each in MEASURED.values():
        say(f"{each.NAME:18} {each.CAPTION}")


def _tell_length(experiment: Experiment, scale: float) -> None:
    """Say that runs are longer than asked for, if they are."""
    asked, steps = round(experiment.steps * scale), experiment.length(scale)
    if steps == experiment.shortest and asked < steps:
        why = f"a run has at least {SHORTEST} windows of {experiment.window}"
        warn(f"{experiment.name}: {steps} steps instead of {asked}, since {why}")


# --------------------------------------------------------------------------------- runs
def _tables(
    names: Sequence[str], folders: Sequence[Path], data_dir: Path | None
) -> dict[str, Table]:
    """Tables of experiments that count as runs, one of each."""
    found: dict[str, Table] = {}
    for folder in folders:
        for name in names:
            table = committed.read(folder, name)
            if table is None:
                continue
            unlike = table.unlike(EXPERIMENTS[name], data_dir)
            if unlike:
                warn(f"{name}: the table in {folder} does not count, it has {unlike}")
            elif name in found:
                warn(f"{name}: the table in {folder} does not count, another folder has one")
            else:
                found[name] = table
    return found


def _specs(
    names: Sequence[str],
    scale: float,
    seeds: int,
    there: Mapping[str, Table] | None = None,
) -> list[RunSpec]:
    """The runs of some experiments that are not in their tables, each once."""
    found: dict[str, RunSpec] = {}
    for name in names:
        table, twins = (there or {}).get(name), EXPERIMENTS[name].twins()
        for arm, runs in EXPERIMENTS[name].specs(scale, seeds or None).items():
            called = twins.get(arm, arm)  # of twins a table has the first
            new = (spec for spec in runs if table is None or not table.has(called, spec))
            found |= {spec.key: spec for spec in new}
    return list(found.values())


def _run(
    specs: Sequence[RunSpec], of: int, studies: Sequence[Path], how: Work, dry_run: bool
) -> Tally:
    """Run what no study has, into the first; `of` so many runs with those that tables have."""
    problems = dict.fromkeys(spec.problem for spec in specs)
    for data in {get_problem(problem).dataset for problem in problems if not is_rl(problem)}:
        if data is not None:
            check(data, how.data_dir)  # a wrong file is found before anything starts
    with ExitStack() as stack:
        known = [run for ledger in _ledgers(studies, stack) for run in ledger.runs()]
    left = lacking(specs, known)
    for problem in dict.fromkeys(spec.problem for spec in left if is_rl(spec.problem)):
        make(problem.removeprefix(PREFIX))  # so is a simulator that is not installed
    if of and (dry_run or not how.quiet):
        say(f"{len(left)} of {count(of, 'run')} to do in {studies[0]}")
        _forecast(left, known, how)
    if dry_run or not left:
        return Tally()
    with Ledger.open(studies[0]) as ledger:
        ledger.add(left)
        return do_work(ledger, [spec.key for spec in left], how)


def _ledgers(studies: Sequence[Path], stack: ExitStack) -> list[Ledger]:
    """Those of the studies, for reading; the first one may have none yet."""
    first, *others = studies
    there = [first, *others] if (first / NAME).exists() else others
    opened = (Ledger.open(folder, create=False, read_only=True) for folder in there)
    return [stack.enter_context(ledger) for ledger in opened]


def _forecast(left: Sequence[RunSpec], known: Sequence[Run], how: Work) -> None:
    """How long it will take here."""
    seconds = 0.0
    alike: dict[tuple[str, Any], list[RunSpec]] = {}
    for spec in left:
        alike.setdefault((spec.problem, spec.options.get("hidden")), []).append(spec)
    for (problem, _), some in alike.items():
        found = _pace(some, known, how)
        steps = sum(spec.steps for spec in some)
        seconds += steps / found.rate
        told = f"{short(steps)} learner-steps at {short(found.rate)} per second"
        say(f"  {problem}: {count(len(some), 'run')}, {told} ({found.source})")
    if left:
        alone = "" if any(is_rl(p) for p, _ in alike) else " in one process"
        say(f"time: about {clock(seconds)}{alone}")


def _pace(some: Sequence[RunSpec], known: Sequence[Run], how: Work) -> forecast.Pace:
    if not is_rl(some[0].problem):
        return forecast.pace(some, known, how.device, how.engine, how.data_dir)
    workers = how.workers if how.workers > 1 else None
    return forecast.Pace(pace(some, how.device, workers), "all processes, measured now")


def _measure(each: Measured, how: How, tables: Path, quiet: bool, dry_run: bool) -> None:
    """Measure a figure, unless that has been done in the same way."""
    folder = tables / each.folder(how)
    before = provenance.read(folder)
    if before is not None and before.command == how.command(each.NAME):
        say(f"{each.NAME}: measured on {before.parts[-1].ended}; remove {folder} to do it again")
        return
    if dry_run or not quiet:
        say(f"{each.NAME}: {each.plan(how)}")
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        commit()  # that of the code which runs, not of what lies there at the end
        each.measure(how, folder, (lambda text: None) if quiet else say)


# ------------------------------------------------------------------------------ results
def _keep(
    names: Sequence[str],
    studies: Sequence[Path],
    there: Mapping[str, Table],
    tables: Path,
    data_dir: Path | None,
) -> dict[str, Results]:
    """What there is of experiments, written as tables with where they come from."""
    kept: dict[str, Results] = {}
    with ExitStack() as stack:
        ledgers = _ledgers(studies, stack)
        for name in names:
            folder = tables / folder_name(name)
            before = provenance.read(folder)
            found = _found(EXPERIMENTS[name], ledgers, there.get(name), before, data_dir)
            if found is None:
                if (folder / TABLE).exists():  # as another study left it
                    kept[name] = read(folder / TABLE, name)
                continue
            results, told = found
            old = [] if before is None else before.outdated(EXPERIMENTS[name])
            if before is not None and not old and before.learner_steps > told.learner_steps:
                warn(f"kept {folder}: it has {count(before.runs, 'run')}, more than the study")
                results = read(folder / TABLE, name)
            elif before is not None and old and before.has_more(told, old):
                sets = f"other sets ({', '.join(old)}), and more runs of the others than the study"
                warn(f"kept {folder}, which is not drawn: it has {sets}")
            else:
                folder.mkdir(parents=True, exist_ok=True)
                write(results, folder / TABLE)
                told.write(folder)
            kept[name] = results
    return kept


def _found(
    experiment: Experiment,
    ledgers: Sequence[Ledger],
    table: Table | None,
    before: Provenance | None,
    data_dir: Path | None,
) -> Table | None:
    """What studies have of an experiment, with the table that counts as runs."""
    found = find(ledgers, experiment, None if table is None else table.told.steps)
    if table is not None:
        found = [each for each in found if not table.has(each.arm, each.run.spec)]
    new = gather(found, experiment.name)
    if new is None:
        return table
    known = before if table is None else table.told
    data = provenance.known_data(experiment.problem, data_dir, known)
    more = Table(new, provenance.describe(found, experiment, data))
    if table is None:
        return more
    if table.told.steps != more.told.steps:
        steps = f"{more.told.steps} steps, those of the table {table.told.steps}"
        warn(f"{experiment.name}: runs have {steps}: they are not put together")
        return more
    return table.joined(more, experiment)


def _draw(
    figure: Figure,
    results: Mapping[str, Results],
    folder: Path,
    suffixes: Sequence[str],
) -> None:
    paths = [folder / f"{figure.name}.{suffix}" for suffix in suffixes]
    if can_draw(figure, results):
        draw(figure, results, *paths)
        for path in paths:
            wrote(path)
    for each in diverged_arms(figure, results):
        warn(f"{figure.name}: diverged in {each}")
    lacking = missing(figure, results)
    if lacking:
        warn(f"{figure.name} lacks {', '.join(lacking)}")


def _draw_measured(each: Measured, table: Path, folder: Path, suffixes: Sequence[str]) -> None:
    if not (table / each.TABLE).exists():
        warn(f"{each.NAME} has not been measured")
        return
    for path in each.draw(table, folder, suffixes):
        wrote(path)
