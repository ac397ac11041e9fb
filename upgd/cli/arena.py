"""``upgd arena``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from upgd.cli import options as o
from upgd.cli.app import command, say, wrote
from upgd.cli.arguments import all_methods
from upgd.cli.options import end, load, open_study
from upgd.text import count, pairs

if TYPE_CHECKING:
    from upgd.arena.evidence import Evidence


@command(
    interrupted=o.CONTINUES,
    examples=(
        "upgd arena list",
        "upgd arena upgd-w sgd --scale quick --dry-run",
        "upgd arena --use mine.py --baseline sgdw",
    ),
)
def arena(
    methods: Annotated[
        list[str] | None,
        Argument(
            help="Methods, also as sgdw+layer_norm or sgdw+input_norm; default those of --use, or "
            "all that have a grid. 'list' shows them."
        ),
    ] = None,
    use: o.USE = None,
    scale: Annotated[str, Option(help="smoke, quick, full or long.")] = "quick",
    streams: Annotated[str, Option(help="Other streams than the scale's, comma-separated.")] = "",
    study: Annotated[
        list[Path] | None,
        Option(help="For runs; default studies/arena-SCALE. Further ones are only read."),
    ] = None,
    against: Annotated[
        Path | None, Option(help="Results whose methods are rivals; default those of the package.")
    ] = None,
    alone: Annotated[bool, Option("--alone", help="No rivals from earlier results.")] = False,
    results: Annotated[
        Path | None, o.OUTPUT(help="For tables and pages; default STUDY/results.")
    ] = None,
    baseline: Annotated[
        str, Option(help="Compare all methods with this one, stream by stream.")
    ] = "",
    only_page: Annotated[
        Path | None, o.OUTPUT("--page", help="Only make the page of these results again.")
    ] = None,
    run: Annotated[bool, Option("--run/--no-run", help="Or show what there is so far.")] = True,
    timing: Annotated[
        bool | None,
        o.EXECUTION(help="Time steps of methods that have no cost yet; default: with --run."),
    ] = None,
    data_dir: o.DATA_DIR = None,
    device: o.DEVICE = "cpu",
    engine: o.ENGINE = "auto",
    dry_run: o.DRY_RUN = False,
    quiet: o.QUIET = False,
    as_json: o.JSON = False,
    checkpoint_seconds: o.CHECKPOINT = None,
    on: o.ON = "local",
    workers: o.WORKERS = None,
) -> None:
    """Rank methods on many streams, each with the same search budget.

    All streams are of one protocol. The same command goes on after an interruption. Two tables:
    sets tuned per stream, and one set for all streams.
    """
    from upgd.lab.competing import Contest, committed, page

    load(use)
    if only_page is not None:
        for path in page(only_page, baseline):
            wrote(path)
        return
    if methods == ["list"]:
        _list()
        return
    first, *others = study or [Path("studies") / f"arena-{scale}"]
    mine = open_study(first, quiet, device, engine, workers, on, data_dir, checkpoint_seconds)
    contest = Contest(
        mine,
        all_methods(methods or []),
        scale,
        [name.strip() for name in streams.split(",") if name.strip()],
        others,
        None if alone else against or committed(scale),
        results,
        baseline,
    )
    contest.check()
    if dry_run:
        for line in contest.outlook():
            say(line)
        return
    if run:
        contest.run()
    found = contest.gather(measure=run if timing is None else timing)
    written = contest.write()
    if as_json:
        print(json.dumps(_facts(found)))
    elif not quiet:
        _show(found)
        for path in written:
            wrote(path)
    end(mine)


def _list() -> None:
    from upgd.arena import grids
    from upgd.arena.protocol import SCALES

    for scale in SCALES.values():
        size = f"{scale.steps} steps, {scale.seeds} seeds, {scale.sets} sets"
        say(f"{scale.name}: {scale.about}; {size}")
        for stream in scale.streams:
            say(f"  {stream}")
    say("methods with a grid:")
    for name in grids.GRIDS:
        found = grids.sets(name)
        first = f"{pairs(found[0])} … " if found[0] else ""
        say(f"  {name}: {first}({count(len(found), 'set')})")


def _show(found: Evidence) -> None:
    from upgd.arena import board
    from upgd.arena.scores import MODES

    for mode in board.modes(found):
        say(f"{MODES[mode]}, per cent of the best method's accuracy:")
        _print(board.lines(found, mode))
    if found.baseline:
        say(f"against {found.baseline}, points of accuracy over all streams:")
        _print([row[:2] for row in board.differences(found).rows])


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say("  " + "  ".join(cells).rstrip())


def _facts(found: Evidence) -> dict[str, Any]:
    """The rankings for scripts: scores are shares."""
    from upgd.arena.scores import MODES, judge, versus

    facts: dict[str, Any] = {
        mode: [
            {
                "method": row.entrant,
                "rank": row.rank,
                "worst": None if row.worst is None else row.worst.estimate,
                "mean": None if row.mean is None else row.mean.estimate,
                "on": row.worst_stream,
                "accuracy": {name: e.accuracy.estimate for name, e in row.entries.items()},
                "diverged": row.diverged,
            }
            for row in judge(found, mode).rows
        ]
        for mode in MODES
    }
    if found.baseline:
        others = versus(found, found.baseline).others
        facts["against"] = found.baseline
        facts["differences"] = {
            name: {stream: one.estimate for stream, one in apart.streams.items()}
            for name, apart in others.items()
        }
    return facts
