"""``upgd claims``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from upgd.cli import options as o
from upgd.cli.app import command, err, out, say
from upgd.text import printable, ranges

if TYPE_CHECKING:
    from rich.table import Table

    from upgd.paper.verdicts import Judged


@command(examples=("upgd claims docs/results", "upgd claims studies/paper --details"))
def claims(
    places: Annotated[list[Path], Argument(help="Studies, or folders of tables as docs/results.")],
    details: Annotated[bool, o.OUTPUT("--details", help="All statements with statistics.")] = False,
    markdown: Annotated[bool, o.OUTPUT("--markdown", help="A table for a page.")] = False,
    as_json: o.FACTS = False,
) -> None:
    """Judge the paper's claims by finished runs.

    A claim is reproduced, mostly (its central statements are confirmed, others refuted), partly
    or not reproduced, or undecided. Statistics are shown at any scale. Verdicts need half of the
    paper's steps and three seeds. Of runs that no claim is about, says what they show, and what
    the claims need.
    """
    from rich.text import Text

    from upgd.paper.judging import LEDGER, judge
    from upgd.paper.verdicts import MORE_COLUMNS, NOTHING, summary, table

    for place in places:
        if not place.is_dir():
            raise ValueError(f"{place} is no folder; give a study or a folder of results")
    with err.status("reading") as status:  # on a terminal only
        found = judge(places, lambda text: status.update(Text(printable(text))))
    nothing = all(claim.data == NOTHING for claim in found)
    studies = sorted({path.parent for place in places for path in place.rglob(LEDGER)})
    if nothing and not studies:
        where = ", ".join(map(str, places))
        raise ValueError(f"no results in {where}; 'upgd reproduce list' shows what can be run")
    if nothing and not (as_json or markdown):
        for study in studies:
            _describe(study)
        _print_required()
    elif as_json:
        print(json.dumps([_plain(claim) for claim in found]))
    elif markdown:
        print("\n".join([summary(found), "", *table(found), "", MORE_COLUMNS]))
    else:
        _print(found, details)
        say(summary(found))


def _describe(study: Path) -> None:
    """Print what a study has, and what its runs show."""
    from upgd.ledger import Ledger
    from upgd.report import sections

    with Ledger.open(study, create=False, read_only=True) as ledger:
        runs = list(ledger.runs())
        say(f"{study}: {sections.tally(runs)}; none is a run of the paper's experiments")
        for section in sections.read(ledger, runs):
            methods = ", ".join(dict.fromkeys(arm.setting.method for arm in section.arms))
            seeds = ranges({run.spec.seed for arm in section.arms for run in arm.runs})
            tasks = f", tasks of {section.task_length}" if section.task_length else ""
            say(f"- {section.problem}, {section.steps} steps{tasks}, seeds {seeds}: {methods}")
            for sentence in sections.sentences(section):
                say(f"  {sentence}")


def _print_required() -> None:
    """Print what each claim needs."""
    from rich.table import Table

    from upgd.paper.claims import CLAIMS, required

    grid = Table("", "claim", "a verdict needs")
    for claim in CLAIMS:
        grid.add_row(str(claim.number), claim.text, required(claim))
    out.print(grid)
    say("'upgd reproduce list' shows the figures that these runs make; --scale 0.01 is a sketch")


def _print(found: list[Judged], details: bool) -> None:
    from rich.table import Table

    from upgd.paper.verdicts import COLUMNS, Count

    styles = {"reproduced": "green", "mostly reproduced": "green", "not reproduced": "red"}
    grid = Table("", "claim", "verdict", "central", "side", caption=COLUMNS)
    for claim in found:
        style = styles.get(claim.verdict, "yellow")
        text = f"{claim.text}\n[dim]{claim.data}[/dim]"
        counts = (str(Count.of(claim.some(mark))) for mark in (True, False))
        verdict = f"[{style}]{claim.verdict}[/{style}]"
        if details:
            verdict += f"\n[dim]½, 2 ×: {claim.scaled}\nstrictly: {claim.strict}[/dim]"
        grid.add_row(str(claim.number), text, verdict, *counts, end_section=details)
        if details:
            _add_statements(grid, claim)
    out.print(grid)


def _add_statements(grid: Table, claim: Judged) -> None:
    """The paper's words, and the statements on each, with effects."""
    from rich.markup import escape

    from upgd.paper.quotations import QUOTED
    from upgd.paper.verdicts import NO, TOLD, YES, row

    styles = {YES: "green", NO: "red", TOLD: "dim"}
    for quote in QUOTED[claim.number]:
        mark = "central" if quote.central else "side"
        grid.add_row("", f"[italic]{escape(str(quote))}[/italic]", mark)
        for finding in (each for each in claim.findings if each.part == quote.part):
            statement, effect, verdict, scaled = row(finding)
            style = styles.get(finding.verdict, "yellow")
            told = f" [dim]({scaled})[/dim]" if scaled else ""
            line = escape(f"  {statement}: {effect}")
            grid.add_row("", line, f"[{style}]{verdict}[/{style}]{told}")
    grid.add_section()


def _plain(claim: Judged) -> dict[str, object]:
    from upgd.paper.verdicts import Count, shown

    findings = [
        {"statement": f.statement, "central": mark, "found": f.found and list(f.found),
         "in words": shown(f), "verdict": f.verdict, "under half and twice our threshold": f.ours}
        for mark in (True, False)
        for f in claim.some(mark)
    ]  # fmt: skip
    counts = {
        name: Count.of(claim.some(mark))._asdict()
        for name, mark in (("central", True), ("side", False))
    }
    facts = {"number": claim.number, "claim": claim.text, "judged by": claim.data}
    verdicts = {"verdict": claim.verdict, "half": claim.under(0), "twice": claim.under(1)}
    return facts | verdicts | {"strict": claim.strict, **counts, "statements": findings}
