"""``upgd check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from upgd.cli import options as o
from upgd.cli.app import command, say
from upgd.text import count

if TYPE_CHECKING:
    from upgd.ledger.checking import Findings


@command(examples=("upgd check studies/demo", "upgd check studies/demo --repair"))
def check(
    study: o.STUDY,
    repair: Annotated[
        bool, Option("--repair", help="Keep a copy, and mark damaged runs to be computed again.")
    ] = False,
) -> None:
    """Check a study for damage: the ledger, results, checkpoints.

    Exit code 0: intact; 1: damaged, with one line per damage.
    """
    from upgd.ledger.checking import check_study
    from upgd.ledger.repairing import repair_study

    found = check_study(study)
    for line in found.lines:
        say(f"damaged: {line}")
    if not found.lines or not repair:
        say(_summary(found))
        if found.lines:
            say(f"'upgd check {study} --repair' repairs what can be repaired")
            raise Exit(1)
        return
    done = repair_study(study, found)
    say(f"copied the ledger as it was to {done.copy}")
    if done.again:
        say(f"{count(done.again, 'run')} must be computed again: 'upgd resume {study}'")
    if done.lost != 0:
        runs = "runs may be lost" if done.lost is None else f"{count(done.lost, 'run')} lost"
        say(f"{runs}: repeat the commands that made the study, which run what is missing")
    left = check_study(study)
    for line in left.lines:
        say(f"still damaged: {line}")
    say(_summary(left))
    if left.lines or done.lost != 0:
        raise Exit(1)


def _summary(found: Findings) -> str:
    parts = (count(found.runs, "run"), f"{found.series} series", count(found.kept, "checkpoint"))
    whole = "damaged" if found.lines else "whole"
    note = "" if found.has_checksums else " (it has no checksums yet: 'upgd resume' adds them)"
    return f"{', '.join(parts)}: {whole}{note}"
