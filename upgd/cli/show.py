"""``upgd show``, ``upgd plot`` and ``upgd export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, out, say, wrote
from upgd.cli.options import open_study

if TYPE_CHECKING:
    from upgd.lab import views


@command(examples=("upgd show studies/demo", "upgd show studies/demo --method upgd-w --json"))
def show(
    study: o.STUDY, problem: o.PROBLEM = "", method: o.METHOD = "", as_json: o.FACTS = False
) -> None:
    """Show a study's results: means over seeds, with intervals."""
    from upgd.lab.study import Study

    show_table(Study(study).table(problem, method), study, as_json)


@command(
    examples=(
        "upgd plot studies/demo",
        "upgd plot studies/demo --metric plasticity --output plasticity.svg",
    )
)
def plot(
    study: o.STUDY,
    metric: Annotated[str, Option(help="accuracy, loss, plasticity, ...")] = "",
    problem: o.PROBLEM = "",
    method: o.METHOD = "",
    every: Annotated[bool, Option("--all", help="Every setting, however many.")] = False,
    output: Annotated[Path | None, o.OUTPUT(help="Default STUDY/METRIC.png.")] = None,
) -> None:
    """Draw a metric over time, a line per setting.

    Lines are means over seeds, with their standard errors. With more than ten settings only each
    method's best is drawn, by area under the curve.
    """
    wrote(open_study(study).plot(metric, problem=problem, method=method, every=every, path=output))


@command(
    examples=(
        "upgd export studies/demo --output runs.csv",
        "upgd export studies/demo --metric accuracy",
        "upgd export studies/demo --tensorboard events",
    )
)
def export(
    study: o.STUDY,
    output: Annotated[Path | None, o.OUTPUT(help="Default STUDY/runs.csv.")] = None,
    metric: Annotated[str, Option(help="This metric over time instead of a row per run.")] = "",
    tensorboard: Annotated[Path | None, o.OUTPUT(help="A folder for event files instead.")] = None,
) -> None:
    """Export a study as CSV, or as TensorBoard event files."""
    from upgd.ledger import Ledger
    from upgd.ledger.files import check_output, check_output_folder
    from upgd.report.tensorboard import write_events

    if tensorboard is not None:
        if metric or output is not None:
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
        path = output or study / (f"{metric}.csv" if metric else "runs.csv")
        count = ledger.series_csv(path, [metric]) if metric else ledger.export_csv(path)
    wrote(path, f" ({count} rows)")


def show_table(found: views.Table, study: Path, as_json: bool) -> None:
    """Print a table of a study."""
    from upgd.ledger import RULES_VERSION

    rows, counts = [dict(row) for row in found.rows], found.counts
    if as_json:
        print(json.dumps({"study": str(study), "counts": dict(counts), "results": rows}))
        return
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["problem"], []).append(row)
    for title, some in (problems or {str(study): []}).items():
        _show_rows(title, some)
    left = {state: count for state, count in counts.items() if count and state != "done"}
    if left:
        out.print(", ".join(f"{count} {state}" for state, count in left.items()))
    others = sum(run.spec.rules != RULES_VERSION for run in found.runs)
    if others:
        out.print(f"{others} of these runs followed other versions of the rules")


def _show_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """The table of one problem."""
    from rich.table import Table

    from upgd.lab import views
    from upgd.report import tables

    table = Table("method", "steps", "seeds", "metric", "mean ± s.e.", "IQM [95%]", title=title)
    names = tables.labels(rows)
    for row, name in zip(rows, names, strict=True):
        seeds = str(row["seeds"]) + (f" (+{row['diverged']} diverged)" if row["diverged"] else "")
        table.add_row(name, str(row["steps"]), seeds, *views.numbers(row))
    out.print(table)
    _show_collapse(names, rows)


def _show_collapse(names: list[str], rows: list[dict[str, Any]]) -> None:
    """Print peak and final return of agents, if there are any."""
    keys = ("peak_return", "final_return", "drop_after_peak")
    agents = [(n, r) for n, r in zip(names, rows, strict=True) if r.get("collapse")]
    if not agents:
        return
    from rich.table import Table

    columns = (key.replace("_", " ") for key in keys)
    table = Table("method", "steps", *columns, title="Policy collapse")
    table.caption = "means [95%] over seeds; peak: the best tenth of a run, final: the last tenth"
    for name, row in agents:
        cells = (_interval(row["collapse"].get(key)) for key in keys)
        table.add_row(name, str(row["steps"]), *cells)
    out.print(table)


def _interval(found: list[float | None] | None) -> str:
    if not found:
        return "-"
    mean, low, high = found
    return f"{mean:.1f}" + ("" if low is None else f" [{low:.1f}, {high:.1f}]")
