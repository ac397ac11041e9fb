"""``upgd claims``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from upgd.cli import options as o
from upgd.cli.app import command, out
from upgd.paper.claims import Judged, judge, sure, table
from upgd.paper.evidence import NO, NOTHING, TOLD, YES, shown

STYLES = {YES: "green", NO: "red", TOLD: "dim"}


@command()
def claims(
    places: Annotated[list[Path], Argument(help="Studies, or folders of tables as docs/results.")],
    details: Annotated[bool, Option("--details", help="All statements with statistics.")] = False,
    markdown: Annotated[bool, Option("--markdown", help="A table for a page.")] = False,
    as_json: o.FACTS = False,
) -> None:
    """Judge the paper's claims by finished runs.

    Statistics are shown at any scale. Verdicts need half of the paper's steps and three seeds.
    """
    for place in places:
        if not place.is_dir():
            raise ValueError(f"{place} is no folder; give a study or a folder of results")
    found = judge(places)
    if all(claim.data == NOTHING for claim in found):
        where = ", ".join(map(str, places))
        raise ValueError(f"no results in {where}; 'upgd reproduce list' shows what can be run")
    if as_json:
        print(json.dumps([_plain(claim) for claim in found]))
    elif markdown:
        print("\n".join(table(found)))
    else:
        _print(found, details)


def _print(found: list[Judged], details: bool) -> None:
    grid = Table("", "claim", "holds", "verdict")
    for claim in found:
        style = STYLES.get(claim.verdict, "yellow")
        verdict = f"[{style}]{claim.verdict}[/{style}]"
        text = f"{claim.text}\n[dim]{claim.data}[/dim]"
        grid.add_row(str(claim.number), text, sure(claim), verdict, end_section=details)
        for finding in claim.findings if details else ():
            style = STYLES.get(finding.verdict, "yellow")
            line = f"  {finding.statement}: {shown(finding)}".replace("[", r"\[")
            grid.add_row("", line, "", f"[{style}]{finding.verdict}[/{style}]")
    out.print(grid)


def _plain(claim: Judged) -> dict[str, object]:
    findings = [
        {"statement": f.statement, "found": f.found and list(f.found), "verdict": f.verdict}
        for f in claim.findings
    ]
    facts = {"number": claim.number, "claim": claim.text, "judged by": claim.data}
    return facts | {"verdict": claim.verdict, "statements": findings}
