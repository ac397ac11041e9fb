"""``upgd demo``: a small study that shows what the package is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from upgd.cli.app import command, err, say, warn
from upgd.cli.arguments import seed_list, whole
from upgd.cli.options import end
from upgd.cli.show import show_table
from upgd.lab import demo as demonstration
from upgd.lab.demo import STEPS


@command()
def demo(
    seeds: Annotated[str, Option(help="How many, or which: 5, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, Option(help="Samples per run.")] = str(STEPS),
    study: Annotated[Path, Option(help="The study's folder.")] = Path("studies/demo"),
    output: Annotated[
        Path | None, Option(help="The page, with a .png; default STUDY/demo.html.")
    ] = None,
    workers: Annotated[int, Option(min=0, help="Processes; default one per core.")] = 0,
    quiet: Annotated[bool, Option("--quiet", help="No progress, no table.")] = False,
    as_json: Annotated[bool, Option("--json", help="The results for scripts.")] = False,
) -> None:
    """See UPGD-W beside Adam and SGD on a stream of digits: under a minute on two cores.

    The images stay the same and every 500 samples the ten labels are shuffled. Writes a page and
    a figure. What is done already is not run again.
    """
    mine = demonstration.make_study(study, workers, quiet or as_json)
    mine.console, mine.note = err, warn
    found = demonstration.run(mine, seed_list(seeds), whole("steps", steps), output)
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
