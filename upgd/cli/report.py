"""``upgd report``: a study as one page with interactive figures."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, wrote
from upgd.lab.study import Study


@command()
def report(
    study: o.STUDY,
    output: Annotated[Path | None, Option("--output", "-o", help="Or STUDY/report.html.")] = None,
    problem: o.PROBLEM = "",
    method: o.METHOD = "",
    metric: Annotated[list[str] | None, Option(help="Only this metric. Repeatable.")] = None,
    opened: Annotated[bool, Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a study as one page: interactive figures, tables, claims, provenance.

    The page is a single file that needs no network.
    """
    page = Study(study).report(output, problem=problem, method=method, metrics=metric or ())
    wrote(page)
    if opened:
        webbrowser.open(page.resolve().as_uri())
