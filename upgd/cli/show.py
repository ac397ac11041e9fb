"""``upgd list``, ``upgd show``, ``upgd plot`` and ``upgd export``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.table import Column, Table
from typer import Argument, Option

from upgd.cli import options as o
from upgd.cli.app import command, out, say, wrote
from upgd.cli.options import load, open_study
from upgd.lab import views
from upgd.lab.study import Study
from upgd.ledger import RULES_VERSION, Ledger
from upgd.ledger.export import runs_csv, series_csv
from upgd.ledger.files import check_output, check_output_folder
from upgd.metrics import FEWEST, INTERVAL
from upgd.optim.registry import METHODS
from upgd.report.tables import chosen
from upgd.report.tensorboard import write_events
from upgd.streams import PROBLEMS
from upgd.text import pairs


@command("list")
def list_(
    what: Annotated[str, Argument(help="problems, methods or all")] = "all",
    use: o.USE = None,
    as_json: o.FACTS = False,
) -> None:
    """List problems and methods."""
    if what not in ("problems", "methods", "all"):
        raise ValueError(f"cannot list {what!r}; there are problems and methods")
    load(use)
    problems = {name: _describe(name) for name in PROBLEMS}
    methods: dict[str, dict[str, Any]] = {}
    for name, row in METHODS.items():
        aliases = {alias: dict(changed) for alias, changed in row.aliases.items()}
        methods[name] = {"title": row.title, "hyper": row.defaults, "aliases": aliases}
    if as_json:
        both = {"problems": problems, "methods": methods}
        print(json.dumps(both if what == "all" else both[what]))
        return
    if what != "methods":
        columns = ("data", "network", "task", "steps", "seeds")
        table = Table(Column("problem", no_wrap=True), *columns, title="Problems")
        for name, facts in problems.items():
            table.add_row(name, *(str(facts[column]) for column in columns))
        out.print(table)
    if what != "problems":
        table = Table(Column("method", no_wrap=True), "in the paper", "hyperparameters")
        table.title = "Methods"
        for name, facts in methods.items():
            table.add_row(name, facts["title"], pairs(facts["hyper"]))
            for alias, changed in facts["aliases"].items():
                table.add_row(alias, f"= {name}", pairs(changed))
        out.print(table)


def _describe(name: str) -> dict[str, Any]:
    problem = PROBLEMS[name]
    own = problem.network
    network = own if isinstance(own, str) else "-".join(map(str, own))
    facts = {"data": problem.dataset or "-", "network": network, "task": problem.task_length}
    return facts | {"steps": problem.steps, "seeds": problem.runs}


@command()
def show(
    study: o.STUDY, problem: o.PROBLEM = "", method: o.METHOD = "", as_json: o.FACTS = False
) -> None:
    """Show a study's results: means over seeds with Student's 95% intervals, of three or more.

    Runs of other lengths or options have a table of their own.
    """
    show_table(Study(study).table(problem, method), study, as_json)


@command()
def plot(
    study: o.STUDY,
    metric: Annotated[str, Option(help="accuracy, loss, plasticity, ...")] = "",
    problem: o.PROBLEM = "",
    method: o.METHOD = "",
    every: Annotated[bool, Option("--all", help="Every setting, however many.")] = False,
    output: Annotated[Path | None, Option(help="Default STUDY/METRIC.png.")] = None,
) -> None:
    """Draw a metric over time: means over seeds with 95% intervals, a line per setting.

    With more than ten settings only each method's best is drawn, by area under the curve.
    """
    wrote(open_study(study).plot(metric, problem=problem, method=method, every=every, path=output))


@command()
def export(
    study: o.STUDY,
    output: Annotated[Path | None, Option(help="Default STUDY/runs.csv.")] = None,
    metric: Annotated[str, Option(help="This metric over time instead of a row per run.")] = "",
    problem: o.PROBLEM = "",
    method: o.METHOD = "",
    tensorboard: Annotated[Path | None, Option(help="A folder for event files instead.")] = None,
) -> None:
    """Export a study as CSV, or as TensorBoard event files."""
    if tensorboard is not None:
        if metric or problem or method or output is not None:
            raise ValueError("--tensorboard writes all metrics to its folder; leave the rest out")
        check_output_folder(tensorboard)
        with Ledger.open(study, create=False, read_only=True) as ledger:
            written, known = write_events(ledger, tensorboard)
        rest = f", {known} were there" if known else ""
        say(f"wrote {written} runs to {tensorboard}{rest}")
        return
    if output is not None:
        check_output(output)
    with Ledger.open(study, create=False, read_only=True) as ledger:
        if metric and metric not in (there := ledger.all_metrics()):
            have = ", ".join(there) or "none"
            raise ValueError(f"no metric {metric!r} in {study}; there are {have}")
        runs = chosen(ledger, problem, method)
        path = output or study / (f"{metric}.csv" if metric else "runs.csv")
        count = series_csv(ledger, runs, path, [metric]) if metric else runs_csv(runs, path)
    wrote(path, f" ({count} rows)")


def show_table(found: views.Table, study: Path, as_json: bool) -> None:
    """Print a table of a study."""
    rows, counts = [dict(row) for row in found.rows], found.counts
    if as_json:
        print(json.dumps({"study": str(study), "counts": dict(counts), "results": rows}))
        return
    by_conditions = found.by_conditions()
    for title, (header, *cells) in found.parts():
        table = Table(*header, title=title)
        for row in cells:
            table.add_row(*row)
        out.print(table)
        _show_collapse([row[0] for row in cells], by_conditions[title])
    if not rows:
        say(f"{study} has no finished run yet")
    if any(row["seeds"] < FEWEST for row in rows):
        say(f"intervals need {FEWEST} seeds or more")
    left = {state: count for state, count in counts.items() if count and state != "done"}
    if left:
        out.print(", ".join(f"{count} {state}" for state, count in left.items()))
    others = sum(run.spec.rules != RULES_VERSION for run in found.runs)
    if others:
        out.print(f"{others} of these runs followed other versions of the rules")


def _return(found: tuple[float, float | None, float | None]) -> str:
    mean, low, high = found
    return views.with_interval(mean, low, high, digits=1)


def _show_collapse(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print peak and final return of agents, if there are any."""
    keys = ("peak_return", "final_return", "drop_after_peak")
    agents = [(n, r) for n, r in zip(names, rows, strict=True) if r.get("collapse")]
    if not agents:
        return
    columns = (key.replace("_", " ") for key in keys)
    table = Table("method", *columns, title="Policy collapse")
    table.caption = f"means [{INTERVAL}]; peak: the best tenth of a run, final: the last tenth"
    for name, row in agents:
        found = (row["collapse"].get(key) for key in keys)
        table.add_row(name, *(_return(each) if each else "-" for each in found))
    out.print(table)
