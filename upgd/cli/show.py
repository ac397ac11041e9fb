"""``upgd show``, ``upgd plot`` and ``upgd export``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    """Show a study's results: means over seeds, with intervals.

    Intervals are Student's 95%, of three seeds or more. Runs of other lengths or options have a
    table of their own.
    """
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

    Lines are means over seeds, with Student's 95% intervals. With more than ten settings only each
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
    problem: o.PROBLEM = "",
    method: o.METHOD = "",
    tensorboard: Annotated[Path | None, o.OUTPUT(help="A folder for event files instead.")] = None,
) -> None:
    """Export a study as CSV, or as TensorBoard event files."""
    from upgd.ledger import Ledger
    from upgd.ledger.export import runs_csv, series_csv
    from upgd.ledger.files import check_output, check_output_folder
    from upgd.report.tables import chosen
    from upgd.report.tensorboard import write_events

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
    from rich.table import Table

    from upgd.ledger import RULES_VERSION
    from upgd.metrics import FEWEST

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
    from upgd.lab import views

    mean, low, high = found
    return views.with_interval(mean, low, high, digits=1)


def _show_collapse(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print peak and final return of agents, if there are any."""
    keys = ("peak_return", "final_return", "drop_after_peak")
    agents = [(n, r) for n, r in zip(names, rows, strict=True) if r.get("collapse")]
    if not agents:
        return
    from rich.table import Table

    from upgd.metrics import INTERVAL

    columns = (key.replace("_", " ") for key in keys)
    table = Table("method", *columns, title="Policy collapse")
    table.caption = f"means [{INTERVAL}]; peak: the best tenth of a run, final: the last tenth"
    for name, row in agents:
        found = (row["collapse"].get(key) for key in keys)
        table.add_row(name, *(_return(each) if each else "-" for each in found))
    out.print(table)
