"""``upgd report``: a study as one page with interactive figures."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, wrote


@command(examples=("upgd report studies/demo --open", "upgd report studies/demo -o demo.html"))
def report(
    study: o.STUDY,
    output: Annotated[Path | None, o.OUTPUT("--output", "-o", help="Or STUDY/report.html.")] = None,
    problem: o.PROBLEM = "",
    method: o.METHOD = "",
    metric: Annotated[
        list[str] | None, Option(metavar="NAME", help="Only this metric. Repeatable.")
    ] = None,
    opened: Annotated[bool, o.OUTPUT("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a study as one page with interactive figures.

    Also tables, claims, and where the numbers come from. The page is a single file that needs no
    network.
    """
    from upgd.lab.study import Study

    page = Study(study).report(output, problem=problem, method=method, metrics=metric or ())
    wrote(page)
    if opened:
        webbrowser.open(page.resolve().as_uri())
