"""``upgd report``: a study as one page with interactive figures."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from upgd.cli.app import app, mistakes_are_one_line, wrote
from upgd.cli.options import PROBLEM, STUDY
from upgd.lab.study import Study


@app.command()
@mistakes_are_one_line
def report(
    study: STUDY,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default STUDY/report.html.")
    ] = None,
    problem: PROBLEM = "",
    metric: Annotated[
        list[str] | None, typer.Option(help="Only this metric; may be given several times.")
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a study as one page: interactive figures, tables, claims, provenance.

    The page is a single file that needs no network.
    """
    page = Study(study).report(output, problem=problem, metrics=metric or ())
    wrote(page)
    if opened:
        webbrowser.open(page.resolve().as_uri())
