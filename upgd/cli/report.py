"""``upgd report``: a study as one page with interactive figures."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from upgd.cli.app import app, mistakes_are_one_line, printable, wrote
from upgd.cli.show import PROBLEM, STUDY, chosen_runs
from upgd.paper.claims import CLAIMS, judge_claim
from upgd.paper.evidence import shown
from upgd.paper.experiments import EXPERIMENTS
from upgd.paper.results import collect
from upgd.report import sections
from upgd.report.html import MARK, Judged, Report, render
from upgd.study import Ledger, StudyError, write_atomically
from upgd.study.files import check_generated, check_output


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
    page = output or study / "report.html"
    if page.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"a report's name must end in .html, got {page}; 'upgd plot' draws others")
    check_output(page, make_folders=output is not None)
    if output is None:
        check_generated(page, MARK)
    with Ledger.open(study, create=False, read_only=True) as ledger:
        there = ledger.all_metrics()
        for name in metric or []:
            if name not in there:
                have = ", ".join(there) or "none"
                raise ValueError(f"no metric {name!r} in {study}; there are {have}")
        runs = chosen_runs(ledger, problem)
        if not runs:
            raise StudyError(f"{study} has no run to report on")
        found = sections.read(ledger, runs, metric or [])
        claims, others = judge(ledger, problem)
    title = f"Study {printable(study.resolve().name)}"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, render(Report(title, found, claims, others)).encode())
    wrote(page)
    if opened:
        webbrowser.open(page.resolve().as_uri())


def judge(ledger: Ledger, problem: str = "") -> tuple[list[Judged], list[str]]:
    """The paper's claims that a study has runs for, judged, and the text of the others."""
    results = {}
    for name, experiment in EXPERIMENTS.items():
        asked = problem in ("", experiment.problem)
        there = collect(ledger, experiment) if asked else None
        if there is not None:
            results[name] = there
    judged, others = [], []
    for claim in CLAIMS:
        if not any(name in results for name in claim.needs):
            others.append(f"{claim.number}. {claim.text}")
            continue
        found = judge_claim(claim, results)
        statements = [(each.statement, shown(each), each.verdict) for each in found.findings]
        text = f"{found.text} ({found.data})"
        judged.append(Judged(found.number, text, found.verdict, statements))
    return judged, others
