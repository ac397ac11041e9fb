"""``upgd watch``: a study while it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group
from rich.text import Text
from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, out
from upgd.text import clock, count, printable, short

if TYPE_CHECKING:
    from upgd.ledger import Ledger
    from upgd.report.watching import MethodProgress, View

LONGEST = 400  # characters of a note
LOOKS = 3  # polls without work before it ends: a sweep adds runs after each of its rungs


@command(examples=("upgd watch studies/demo", "upgd watch studies/demo --once"))
def watch(
    study: o.STUDY,
    method: o.METHOD = "",
    every: Annotated[float, Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, Option("--once", help="Look once.")] = False,
    as_json: Annotated[bool, o.OUTPUT("--json", help="One look, for scripts.")] = False,
) -> None:
    """Watch a study: progress, pace, time left, and what failed.

    Only reads. Ends when nothing is left to do, or with Ctrl-C. The pace is that of the last five
    minutes; at first, and with '--once', the average since each run began.
    """
    from upgd.ledger import Ledger
    from upgd.report.watching import look

    with Ledger.open(study, create=False, read_only=True) as ledger:
        if as_json:
            print(json.dumps(_facts(look(ledger, method), study)))
        elif once:
            out.print(frame(look(ledger, method), study))
        else:
            with suppress(KeyboardInterrupt):
                _watch(ledger, study, every, method)


def _watch(ledger: Ledger, study: Path, every: float, method: str) -> None:
    from rich.live import Live

    from upgd.report.watching import Paces, look

    idle, paces = 0, Paces()
    view = look(ledger, method)
    paces.update(view, time.monotonic())
    with Live(frame(view, study), console=out, auto_refresh=False) as live:
        while True:
            idle = 0 if view.total.to_do else idle + 1
            if idle >= LOOKS:
                return
            time.sleep(every)
            view = look(ledger, method)
            paces.update(view, time.monotonic())
            live.update(frame(view, study), refresh=True)


def frame(view: View, study: Path) -> Group:
    """The display at one moment."""
    from rich.table import Column, Table

    names = ("done", "running", "steps/s", "left")
    columns = (Column(name, justify="right", no_wrap=True) for name in names)
    table = Table(Column("method", no_wrap=True), "", *columns, "", title=Text(printable(study)))
    several = len({row.problem for row in view.rows}) > 1
    for row in view.rows:
        name = f"{row.problem} {row.method}" if several else row.method
        table.add_row(*_cells(row, name))
    if len(view.rows) > 1:
        table.add_section()
        table.add_row(*_cells(view.total, "all"))
    return Group(table, *_notes(view, study))


def _cells(row: MethodProgress, name: str) -> list[Any]:
    from rich.progress_bar import ProgressBar

    over = row.runs - row.to_do
    lost = [f"{row.counts[s]} {s}" for s in ("failed", "diverged") if row.counts.get(s)]
    left = "-" if row.seconds_left is None else clock(row.seconds_left)
    return [
        Text(printable(name)),
        ProgressBar(total=max(1, row.steps), completed=row.done, width=20),
        f"{over}/{row.runs}",
        str(row.counts.get("running", 0) or "-"),
        short(row.pace) if row.pace else "-",
        left if row.to_do else "over",
        Text(", ".join(lost), style="yellow"),
    ]


def _notes(view: View, study: Path) -> Iterator[Text]:
    def note(text: str, style: str = "yellow") -> Text:
        return Text(printable(text[:LONGEST]), style=style, overflow="fold")

    for spec, error in view.failures:
        text = error.splitlines()[0] if error else "no reason was given"
        yield note(f"failed: {spec.label()}: {text}", "red")
    counts = view.total.counts
    if left := counts.get("left", 0):
        yield note(f"{count(left, 'run')} left by processes that ended")
    if view.total.to_do and not counts.get("running"):
        yield note(f"nobody works on it; 'upgd resume {study}' does")


def _facts(view: View, study: Path) -> dict[str, Any]:
    def facts(row: MethodProgress) -> dict[str, Any]:
        return {
            "problem": row.problem, "method": row.method, "counts": row.counts,
            "steps": row.steps, "steps_done": row.done, "steps_per_second": row.pace,
            "seconds_left": row.seconds_left,
        }  # fmt: skip

    return {
        "study": str(study),
        "methods": [facts(row) for row in view.rows],
        "all": facts(view.total),
        "failures": [{"run": spec.label(), "error": error} for spec, error in view.failures],
    }
