"""``upgd list``, ``upgd show``, ``upgd plot`` and ``upgd export``."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from upgd.cli.app import app, mistakes_are_one_line, out, printable, wrote
from upgd.optim.registry import METHODS
from upgd.report import tables
from upgd.report.figures import Curve, check_format, draw_curves
from upgd.rl.runs import is_rl
from upgd.streams import PROBLEMS
from upgd.study import RULES_VERSION, Ledger, Run, StudyError
from upgd.study.events import write_events
from upgd.study.files import check_generated, check_output, check_output_folder
from upgd.study.queries import Kept


@app.command("list")
@mistakes_are_one_line
def list_(
    what: Annotated[str, typer.Argument(help="problems, methods or all")] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Show the problems and methods there are."""
    if what not in ("problems", "methods", "all"):
        raise ValueError(f"cannot list {what!r}; there are problems and methods")
    problems = {name: _describe(name) for name in PROBLEMS}
    methods: dict[str, dict[str, Any]] = {
        name: {
            "title": row.title,
            "hyper": row.defaults,
            "aliases": {alias: dict(changed) for alias, changed in row.aliases.items()},
        }
        for name, row in METHODS.items()
    }
    if as_json:
        both = {"problems": problems, "methods": methods}
        print(json.dumps(both if what == "all" else both[what]))
        return
    if what != "methods":
        table = Table(title="Problems")
        table.add_column("problem", no_wrap=True)
        for column in ("data", "network", "task", "steps", "seeds"):
            table.add_column(column)
        for name, facts in problems.items():
            table.add_row(
                name, *(str(facts[k]) for k in ("data", "network", "task", "steps", "seeds"))
            )
        out.print(table)
    if what != "problems":
        table = Table(title="Methods")
        table.add_column("method", no_wrap=True)
        for column in ("in the paper", "hyperparameters"):
            table.add_column(column)
        for name, facts in methods.items():
            table.add_row(name, facts["title"], _values(facts["hyper"]))
            for alias, changed in facts["aliases"].items():
                table.add_row(alias, f"= {name}", _values(changed))
        out.print(table)


def _values(hyper: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in hyper.items())


def _describe(name: str) -> dict[str, Any]:
    problem = PROBLEMS[name]
    network = problem.network if problem.network == "cnn" else "-".join(map(str, problem.network))
    return {
        "data": problem.dataset or "-",
        "network": network,
        "task": problem.task_length,
        "steps": problem.steps,
        "seeds": problem.runs,
    }


STUDY = Annotated[Path, typer.Argument(help="A study's folder.")]
PROBLEM = Annotated[str, typer.Option(help="Only this problem.")]
METHOD = Annotated[str, typer.Option(help="Only this method.")]
READABLE = 10  # lines in one figure


@app.command()
@mistakes_are_one_line
def show(
    study: STUDY,
    problem: PROBLEM = "",
    method: METHOD = "",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Show a study's results: means over seeds with standard errors and intervals."""
    with Ledger.open(study, create=False, read_only=True) as ledger:
        show_study(ledger, study, as_json, problem=problem, method=method)


@app.command()
@mistakes_are_one_line
def plot(
    study: STUDY,
    metric: Annotated[str, typer.Option(help="accuracy, loss, plasticity, ...")] = "",
    problem: PROBLEM = "",
    method: METHOD = "",
    every: Annotated[bool, typer.Option("--all", help="Every setting, however many.")] = False,
    output: Annotated[Path | None, typer.Option(help="Default STUDY/METRIC.png.")] = None,
) -> None:
    """Draw a metric over time: mean and standard error over seeds, a line per setting.

    Of more than ten settings only each method's best is drawn, by area under the curve.
    """
    if output is not None:
        check_format(output)
        check_output(output)
    with Ledger.open(study, create=False, read_only=True) as ledger:
        groups = tables.group(chosen_runs(ledger, problem, method))
        if not any(run.state == "done" for runs in groups.values() for run in runs):
            raise StudyError(f"{study} has no finished run to draw")
        problems = list(dict.fromkeys(key.problem for key in groups))
        if len(problems) > 1:
            raise ValueError(f"{study} has several problems; choose --problem {problems[0]}, ...")
        chosen = metric or tables.main_metric(run for runs in groups.values() for run in runs)
        best = tables.best_settings(groups) if len(groups) > READABLE and not every else None
        curves = _curves(ledger, groups, chosen, best)
        if not curves:
            there = ", ".join(ledger.all_metrics()) or "none"
            raise ValueError(f"no metric {chosen!r} in {study}; there are {there}")
    path = output or study / f"{chosen}.png"
    if output is None:
        check_generated(path)
    draw_curves(curves, chosen, problems[0], path, "Steps" if is_rl(problems[0]) else "Samples")
    wrote(path)
    if best is not None:
        out.print(f"each method's best of {len(groups)} settings by area; --all draws all")


@app.command()
@mistakes_are_one_line
def export(
    study: STUDY,
    output: Annotated[Path | None, typer.Option(help="Default STUDY/runs.csv.")] = None,
    metric: Annotated[
        str, typer.Option(help="Write this metric over time instead of one row per run.")
    ] = "",
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write event files to this folder instead: all metrics.")
    ] = None,
) -> None:
    """Write a study for other programs: as CSV, or as TensorBoard's event files."""
    if tensorboard is not None:
        if metric or output is not None:
            raise ValueError("--tensorboard writes all metrics to its folder; leave the rest out")
        check_output_folder(tensorboard)
        _export_events(study, tensorboard)
        return
    if output is not None:
        check_output(output)
    with Ledger.open(study, create=False, read_only=True) as ledger:
        there = ledger.all_metrics() if metric else []
        if metric and metric not in there:
            have = ", ".join(there) or "none"
            raise ValueError(f"no metric {metric!r} in {study}; there are {have}")
        path = output or study / (f"{metric}.csv" if metric else "runs.csv")
        count = ledger.series_csv(path, [metric]) if metric else ledger.export_csv(path)
    wrote(path, f" ({count} rows)")


def _export_events(study: Path, folder: Path) -> None:
    with Ledger.open(study, create=False, read_only=True) as ledger:
        written, known = write_events(ledger, folder)
    text = f"wrote {written} runs to {printable(folder)}" + (
        f", {known} were there" if known else ""
    )
    out.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def chosen_runs(ledger: Ledger, problem: str = "", method: str = "") -> list[Run]:
    """The runs chosen by options; a choice that there is none of is a mistake."""
    runs = list(ledger.runs(problem=problem or None, method=method or None))
    if not runs and (problem or method):
        have = {(run.spec.problem, run.spec.name) for run in ledger.runs()}
        names = ", ".join(f"{p} {m}" for p, m in sorted(have)) or "none"
        raise ValueError(
            f"no run of {' '.join(filter(None, (problem, method)))}; there are {names}"
        )
    return runs


def _curves(
    ledger: Ledger,
    groups: dict[tables.Group, list[Run]],
    metric: str,
    best: dict[tables.Group, int] | None,
) -> dict[str, Curve]:
    """By name, what is to be drawn of each group."""
    names = {}
    for key, name in tables.names(groups).items():
        if best is None or key in best:
            among = 1 if best is None else best[key]
            names[key] = f"{name}, best of {among}" if among > 1 else name
    where = {run.key: key for key in names for run in groups[key] if run.state == "done"}
    found: dict[tables.Group, list[Kept]] = {}
    for series in ledger.each_series([metric], where):
        found.setdefault(where[series.key], []).append(series)
    curves = {}
    for key in names:
        if key in found:
            shortest = min(len(series.values) for series in found[key])
            values = np.stack([series.values[:shortest] for series in found[key]])
            curves[names[key]] = Curve(found[key][0].window, values, key.method)
    return curves


def show_study(
    ledger: Ledger,
    study: Path,
    as_json: bool,
    keys: Collection[str] | None = None,
    problem: str = "",
    method: str = "",
) -> None:
    """Print a study's table, or that of some of its runs."""
    runs = chosen_runs(ledger, problem, method)
    runs = [run for run in runs if keys is None or run.key in keys]
    rows = tables.rows(tables.group(runs))
    counts = ledger.counts()
    if as_json:
        print(json.dumps({"study": str(study), "counts": counts, "results": rows}))
        return
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    for title, some in (problems or {str(study): []}).items():
        _show_rows(title, some)
    left = {state: count for state, count in counts.items() if count and state != "done"}
    if left:
        out.print(", ".join(f"{count} {state}" for state, count in left.items()))
    others = sum(run.spec.rules != RULES_VERSION for run in runs)
    if others:
        out.print(f"{others} of these runs followed other versions of the rules")


def _show_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """The table of one problem."""
    table = Table("method", "steps", "seeds", "metric", "mean ± s.e.", "IQM [95%]", title=title)
    names = []
    for row, differs in zip(rows, tables.varying(rows), strict=True):
        names.append(" ".join([row["method"], *(f"{k}={v}" for k, v in differs.items())]))
        seeds = str(row["seeds"]) + (f" (+{row['diverged']} diverged)" if row["diverged"] else "")
        table.add_row(names[-1], str(row["steps"]), seeds, *_cells(row))
    out.print(table)
    _show_collapse(names, rows)


def _show_collapse(names: list[str], rows: list[dict[str, Any]]) -> None:
    """What became of agents, if there are any: their best tenth and their last."""
    columns = {
        "peak_return": "peak return",
        "final_return": "final return",
        "drop_after_peak": "drop after peak",
    }
    agents = [(n, r) for n, r in zip(names, rows, strict=True) if r.get("collapse")]
    if not agents:
        return
    table = Table("method", "steps", *columns.values(), title="Policy collapse")
    table.caption = "means [95%] over seeds; peak: the best tenth of a run, final: the last tenth"
    for name, row in agents:
        cells = (_interval(row["collapse"].get(key)) for key in columns)
        table.add_row(name, str(row["steps"]), *cells)
    out.print(table)


def _interval(found: list[float | None] | None) -> str:
    if not found:
        return "-"
    mean, low, high = found
    return f"{mean:.1f}" + ("" if low is None else f" [{low:.1f}, {high:.1f}]")


def _cells(row: dict[str, Any]) -> list[str]:
    if "metric" not in row:
        return ["-", "-", "-"]
    error, digits = row["standard_error"], 1 if row["metric"] == "return" else 4
    return [
        row["metric"],
        f"{row['mean']:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}"),
        f"{row['iqm']:.{digits}f} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]",
    ]
