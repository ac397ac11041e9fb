"""``upgd reproduce``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from upgd.cli import options as o
from upgd.cli.app import command, say, wrote
from upgd.cli.options import end, open_study


@command(
    examples=(
        "upgd reproduce list",
        "upgd reproduce fig3 --scale 0.02 --seeds 3 --problems input-permuted-mnist",
    )
)
def reproduce(
    figures: Annotated[list[str], Argument(help="Such as fig3, or 'all'; 'list' shows them.")],
    scale: Annotated[float, Option(min=0.0, max=1.0, help="Share of the paper's steps.")] = 1.0,
    seeds: Annotated[
        int, Option(min=0, show_default=False, help="How many; default the paper's.")
    ] = 0,
    study: Annotated[
        list[Path] | None,
        Option(
            help="For runs and figures; default studies/paper. Further ones, or folders of tables, "
            "are only read: what they have is not run again."
        ),
    ] = None,
    results: Annotated[Path | None, o.OUTPUT(help="For tables; default STUDY/results.")] = None,
    problems: Annotated[str, Option(help="Only these: input-permuted-mnist. Default all.")] = "",
    environments: Annotated[str, Option(help="Only these agents': Hopper,Ant. Default all.")] = "",
    run: Annotated[bool, Option("--run/--no-run", help="Or only draw from what there is.")] = True,
    formats: Annotated[str, o.OUTPUT("--format", help="Such as png,svg.")] = "png,svg",
    data_dir: o.DATA_DIR = None,
    device: o.DEVICE = "cpu",
    engine: o.ENGINE = "auto",
    dry_run: o.DRY_RUN = False,
    quiet: o.QUIET = False,
    checkpoint_seconds: o.CHECKPOINT = None,
    on: o.ON = "local",
    workers: o.WORKERS = None,
) -> None:
    """Run what the paper's figures need, and draw them.

    Only what the study lacks is run. Tables and where they come from go into STUDY/results; 'upgd
    results' makes pages of them.
    """
    if figures == ["list"]:
        _list()
        return
    from upgd.lab.reproducing import Reproduction

    first, *others = study or [Path("studies/paper")]
    mine = open_study(first, quiet, device, engine, workers, on, data_dir, checkpoint_seconds)
    chosen = Reproduction(
        *(mine, figures, others, results, scale, seeds, problems, environments, formats),
        to_run=run or dry_run,
    )
    if dry_run:
        for line in chosen.outlook():
            say(line)
        return
    if run:
        chosen.run()
    chosen.draw()
    for path in chosen.written:
        wrote(path)
    end(mine)


def _list() -> None:
    from upgd.paper.figures import FIGURES
    from upgd.paper.measured import MEASURED

    for figure in FIGURES.values():
        say(f"{figure.name:18} {figure.caption} ({', '.join(figure.run)})")
    for each in MEASURED.values():
        say(f"{each.NAME:18} {each.CAPTION}")
