"""``upgd demo``: a small study that shows what the package is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, err, say, warn
from upgd.cli.arguments import length, seed_list
from upgd.cli.options import end
from upgd.cli.show import show_table


@command(examples=("upgd demo", "upgd demo --seeds 10 --steps 20000"))
def demo(
    seeds: Annotated[str, Option(help="How many, or which: 5, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, Option(help="Samples per run; default twelve tasks.")] = "",
    study: Annotated[Path, Option(help="The study's folder.")] = Path("studies/demo"),
    output: Annotated[
        Path | None, o.OUTPUT(help="The page, with a .png; default STUDY/demo.html.")
    ] = None,
    workers: Annotated[
        int, o.EXECUTION(min=0, show_default=False, help="Processes; default one per core.")
    ] = 0,
    quiet: o.QUIET = False,
    as_json: o.JSON = False,
) -> None:
    """See UPGD-W beside Adam and SGD on shuffled digits, in a minute.

    The images stay the same and every 500 samples the ten labels are shuffled. Writes a page and
    a figure. What is done already is not run again.
    """
    from upgd.lab import demo as demonstration

    mine = demonstration.make_study(study, workers, quiet or as_json)
    mine.console, mine.note = err, warn
    long = length(steps) or demonstration.STEPS
    found = demonstration.run(mine, seed_list(seeds), long, output)
    if as_json:
        written = {"study": str(study), "page": str(found.page), "figure": str(found.figure)}
        rows = [dict(row) for row in found.table.rows]
        print(json.dumps({**written, "summary": found.headline, "results": rows}))
    elif not quiet:
        show_table(found.table, study, False)
        pages = (f"page: {found.page}", f"figure: {found.figure}")
        for text in (found.headline, found.trends, *pages):
            say(text)
    end(mine)
