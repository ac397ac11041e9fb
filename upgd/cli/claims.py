"""``upgd claims``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from upgd.cli import options as o
from upgd.cli.app import command, out

if TYPE_CHECKING:
    from upgd.paper.claims import Judged


@command(examples=("upgd claims docs/results", "upgd claims studies/paper --details"))
def claims(
    places: Annotated[list[Path], Argument(help="Studies, or folders of tables as docs/results.")],
    details: Annotated[bool, o.OUTPUT("--details", help="All statements with statistics.")] = False,
    markdown: Annotated[bool, o.OUTPUT("--markdown", help="A table for a page.")] = False,
    as_json: o.FACTS = False,
) -> None:
    """Judge the paper's claims by finished runs.

    Statistics are shown at any scale. Verdicts need half of the paper's steps and three seeds.
    """
    from upgd.paper.claims import judge, table
    from upgd.paper.evidence import NOTHING

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
    from rich.table import Table

    from upgd.paper.claims import sure
    from upgd.paper.evidence import NO, TOLD, YES, shown

    styles = {YES: "green", NO: "red", TOLD: "dim"}
    grid = Table("", "claim", "holds", "verdict")
    for claim in found:
        style = styles.get(claim.verdict, "yellow")
        verdict = f"[{style}]{claim.verdict}[/{style}]"
        text = f"{claim.text}\n[dim]{claim.data}[/dim]"
        grid.add_row(str(claim.number), text, sure(claim), verdict, end_section=details)
        for finding in claim.findings if details else ():
            style = styles.get(finding.verdict, "yellow")
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
