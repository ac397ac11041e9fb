"""``upgd sweep``: many sets of hyperparameters, all of them, by halving, or by search."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from upgd.cli import grids
from upgd.cli.app import app, err, mistakes_are_one_line, printable
from upgd.cli.arguments import all_methods, seed_list, whole
from upgd.cli.best import pairs, show_best
from upgd.cli.numbers import count
from upgd.cli.outlook import (
    halving_amount,
    known_runs,
    search_amount,
    show_outlook,
    whole_amount,
)
from upgd.cli.run import check_length
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
    failed_earlier,
)
from upgd.paper.grids import each_set
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, Run, RunSpec, StudyError
from upgd.study import halving as halvings
from upgd.study import search as searches
from upgd.study.forecast import at_a_time
from upgd.study.prepare import check_device, prepare
from upgd.study.selection import Candidate, Hyper, Ranking, longest
from upgd.study.sweeps import OVER, Sweep
from upgd.study.work import Tally

MOST_RUNS = 200_000
"""A grid that has more is taken for a mistake."""
SHOWN = 10
"""Dropped sets that are listed one by one."""
ROUNDS = 4
"""Of a search, at least: sets that are proposed together do not learn from each other."""
SECONDS_BETWEEN_LOOKS = 1.0


@app.command()
@mistakes_are_one_line
def sweep(
    problem: Annotated[str, typer.Argument(help="A problem; 'upgd list' shows them.")],
    methods: Annotated[
        list[str], typer.Argument(help="One or several methods; 'paper' is the paper's ten.")
    ],
    seeds: Annotated[str, typer.Option(help="How many, or which: 20, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, typer.Option(help="Samples per run; default the problem's.")] = "",
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
    study: Annotated[Path | None, typer.Option(help="A folder; default studies/PROBLEM.")] = None,
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Samples per update.")] = 1,
    window: Annotated[int, typer.Option(min=0, help="Samples per point; default one task.")] = 0,
    task_length: Annotated[
        int, typer.Option(min=0, help="Samples per task; default the problem's.")
    ] = 0,
    hidden: Annotated[
        str, typer.Option(help="Hidden units, such as 64-32, or none; default the problem's.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option(help="Say how many runs, how long, how much memory, and stop.")
    ] = False,
    quiet: QUIET = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result for scripts.")] = False,
    checkpoint_seconds: CHECKPOINT = None,
    on: ON = "local",
    workers: WORKERS = 1,
) -> None:
    """Try many sets of hyperparameters, and show each method's best.

    What the study has already is not run again: the same command goes on after an interruption.
    """
    row = get_problem(problem)
    if sum((paper, best, grid is not None)) > 1:
        raise ValueError("choose one of --paper, --best and --grid")
    if halving and search:
        raise ValueError("choose one of --halving and --search")
    names = list(dict.fromkeys(name.lower() for name in all_methods(methods)))
    axes = _axes(row.name, names, best, grid, settings or [])
    options: dict[str, Any] = {"batch": batch} if batch > 1 else {}
    options |= {"window": window} if window else {}
    options |= {"task_length": task_length} if task_length else {}
    options |= {"hidden": hidden} if hidden else {}
    chosen = tuple(seed_list(seeds))
    sizes = {name: search or grids.size(mine) for name, mine in axes.items()}
    grids.check_size(sizes, len(chosen), max_runs, "--search, or a larger --max-runs")
    plan = Sweep(
        row.name,
        # A search makes its own; these stand for them when times are estimated.
        {name: list(islice(each_set(mine), search)) for name, mine in axes.items()},
        chosen,
        whole("steps", steps) if steps else row.steps,
        options,
    )
    here = device if on == "local" else "cpu"  # a driver needs no GPU
    check_device(here)
    if row.dataset is not None:
        check(row.dataset, data_dir)  # a wrong file is found before anything starts
    points = {name: _steps_per_point(plan, name, data_dir, here) for name in names}
    folder = study if study is not None else Path("studies") / row.name
    spaces: dict[str, searches.Space] = {}
    if search:
        spaces = {name: searches.Space.around(mine) for name, mine in axes.items()}
        searches.check(spaces)
    how = Work(
        data_dir=data_dir,
        device=device,
        engine=engine,
        quiet=quiet,
        checkpoint_seconds=checkpoint_seconds,
        on=on,
        workers=workers,
    )
    if dry_run:
        known = known_runs(folder, plan)
        amount = whole_amount(plan, known)
        if halving:
            amount = halving_amount(plan, known, halving, points[names[0]])
        elif search:
            amount = search_amount(plan, known, spaces, search)
        show_outlook(folder, plan, replace(how, device=here), known, amount, as_json)
        return
    say = _silent if quiet else _say
    with Ledger.open(folder) as ledger:
        try:
            if halving:
                tally = _halve(ledger, plan, how, halving, points[names[0]], say)
                tally = tally + failed_earlier(ledger, _keys(ledger, plan, spaces), tally.failed)
            elif search:
                tally = _search(ledger, plan, how, spaces, search, say)
                tally = tally + failed_earlier(ledger, _keys(ledger, plan, spaces), tally.failed)
            else:
                ledger.add(plan.specs())
                tally = do_work(ledger, [spec.key for spec in plan.specs()], how)
        except KeyboardInterrupt:
            err.print("interrupted; the same command goes on from here", style="yellow")
            raise typer.Exit(130) from None
        if not quiet:
            show_best(list(_rankings(ledger, plan, spaces)), folder, as_json)
    end(tally)


def _own_runs(
    runs: Sequence[Run], plan: Sweep, spaces: Mapping[str, searches.Space]
) -> dict[str, list[Run]]:
    """By name that was asked for, the runs of its sets, of whatever length.

    Names may stand for the same row of the registry, as sgd and sgdw do. Of a search, sets are
    those that lie in its space.
    """
    found: dict[str, list[Run]] = {}
    for name, hypers in plan.hypers().items():
        row, own, space = plan.family(name).method, set(hypers), spaces.get(name)
        mine = ((run, tuple(run.spec.hyper.items())) for run in runs if run.spec.method == row)
        found[name] = [
            run
            for run, hyper in mine
            if (hyper in own if space is None else space.places(hyper) is not None)
        ]
    return found


def _rankings(
    ledger: Ledger, plan: Sweep, spaces: Mapping[str, searches.Space]
) -> Iterator[Ranking]:
    """How the sets of each name rank that was asked for."""
    runs = list(ledger.runs(problem=plan.problem))
    for name, mine in _own_runs(runs, plan, spaces).items():
        for ranking in longest(mine, plan.seeds):
            if ranking.family == plan.family(name):
                yield replace(ranking, requested=name)


def _keys(ledger: Ledger, plan: Sweep, spaces: Mapping[str, searches.Space]) -> set[str]:
    """The runs of a sweep that there are, of whatever length."""
    own = _own_runs(list(ledger.runs(problem=plan.problem)), plan, spaces)
    return {run.key for some in own.values() for run in some if run.spec.seed in plan.seeds}


def _axes(
    problem: str, names: Sequence[str], best: bool, grid: Path | None, settings: Sequence[str]
) -> dict[str, grids.Grid]:
    """By method, the values of each hyperparameter."""
    if best:
        found = grids.best_grids(problem, names)
    elif grid is not None:
        found = grids.file_grids(grid, names)
    else:
        found = grids.paper_grids(problem, names)
    return grids.change_axes(found, settings)


def _steps_per_point(plan: Sweep, method: str, data_dir: Path | None, device: str) -> int:
    """How many steps a window has; a set that cannot be run is a mistake."""
    first = plan.specs(sets={method: plan.hypers()[method][:1]})[0]
    setting = prepare(first, data_dir, device).setting
    check_length(first, setting)
    return max(1, setting.window // setting.batch)


def _say(text: str) -> None:
    err.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def _silent(text: str) -> None:
    pass


# ---------------------------------------------------------------------------------- rungs
def _halve(
    ledger: Ledger, plan: Sweep, how: Work, eta: int, window: int, say: Callable[[str], None]
) -> Tally:
    """Rung by rung; what each drops is told once."""
    tally, told = Tally(), 0
    of = len(halvings.schedule(plan, eta, window))
    while True:
        rungs = halvings.rungs(ledger, plan, eta, window)
        for number, rung in enumerate(rungs[told:], told + 1):
            if rung.over:
                told = number
                if rung.steps < plan.steps:
                    _tell_rung(rung, f"rung {number} of {of}", say)
        if rungs[-1].over:
            return tally
        sizes = ", ".join(f"{len(mine)} of {m}" for m, mine in rungs[-1].sets.items())
        say(f"rung {told + 1} of {of}, {rungs[-1].steps} steps: {sizes}")
        tally = tally + settle(ledger, halvings.specs_of(plan, rungs[-1]), how)


def _tell_rung(rung: halvings.Rung, name: str, say: Callable[[str], None]) -> None:
    for method, dropped in rung.dropped.items():
        kept = rung.kept[method]
        worst = f", down to {kept[-1].value:.4f}" if kept else ""
        say(f"{name}: {method} keeps {count(len(kept), 'set')}{worst}, drops {len(dropped)}")
        apart = _apart(rung.sets[method])
        for one in dropped[:SHOWN]:
            shown = pairs({name: value for name, value in one.hyper if name in apart})
            say(f"  dropped {shown}: {_value(one)}")
        if len(dropped) > SHOWN:
            say(f"  and {len(dropped) - SHOWN} more")


def _apart(hypers: Sequence[Hyper]) -> set[str]:
    """The hyperparameters in which sets differ."""
    values: dict[str, set[float]] = {}
    for hyper in hypers:
        for name, value in hyper:
            values.setdefault(name, set()).add(value)
    return {name for name, several in values.items() if len(several) > 1}


def _value(one: Candidate) -> str:
    if one.missing:
        return f"lacks {count(len(one.missing), 'seed')}"
    if one.diverged:
        return f"{count(len(one.diverged), 'seed')} diverged"
    return f"{one.value:.4f}"


# --------------------------------------------------------------------------------- search
def _search(
    ledger: Ledger,
    plan: Sweep,
    how: Work,
    spaces: Mapping[str, searches.Space],
    sets: int,
    say: Callable[[str], None],
) -> Tally:
    """Propose, run, and again, until every method has so many sets."""
    tally = Tally()
    fill = how.workers * at_a_time(how.device) // (len(plan.seeds) * len(spaces))
    together = max(1, min(fill, sets // ROUNDS))
    while chosen := searches.next_sets(ledger, plan, spaces, sets, together):
        tally = tally + settle(ledger, plan.specs(sets=chosen), how)
        for ranking in _rankings(ledger, plan, spaces):
            best = ranking.winner
            if best is not None and ranking.requested in chosen:
                known, where = len(ranking.complete), pairs(dict(best.hyper))
                say(f"{ranking.name}: {count(known, 'set')}, best {best.value:.4f} at {where}")
    return tally


def settle(ledger: Ledger, specs: Sequence[RunSpec], how: Work) -> Tally:
    """Do these runs, and wait for those that other processes do: what comes next needs all."""
    ledger.add(specs)
    keys = [spec.key for spec in specs]
    tally = do_work(ledger, keys, how)
    mine = set(keys)
    while any(lease.key in mine for lease in ledger.leases()):
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if next(ledger.claimable({"key": keys}), None) is not None:
            tally = tally + do_work(ledger, keys, how)
    left = [key for key in keys if ledger.get(key).state not in OVER]
    if left:
        raise StudyError(
            f"{count(len(left), 'run')} cannot be done by the {how.engine} engine; "
            "--engine auto can"
        )
    return tally
