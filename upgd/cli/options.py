"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from upgd.cli.app import err, warn
from upgd.lab.study import Study
from upgd.study.extensions import use as use_extension

STUDY = Annotated[Path, typer.Argument(help="A study's folder.")]
PROBLEM = Annotated[str, typer.Option(help="Only this problem.")]
METHOD = Annotated[str, typer.Option(help="Only this method.")]
DATA_DIR = Annotated[Path | None, typer.Option(help="Where data are looked for first.")]
DEVICE = Annotated[str, typer.Option(help="cpu or cuda.")]
ENGINE = Annotated[
    str,
    typer.Option(help="auto (many runs at once where possible), batched, or eager (one by one)."),
]
QUIET = Annotated[bool, typer.Option("--quiet", help="No progress, no table.")]
JSON = Annotated[bool, typer.Option("--json", help="The result for scripts.")]
CHECKPOINT = Annotated[
    float | None,
    typer.Option(min=0.0, help="How often a run is saved; default so that it costs 2% at most."),
]
ON = Annotated[
    str, typer.Option("--on", help="local, ray (a cluster started for this), or ray://host:port.")
]
WORKERS = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Worker processes; default this one, and one per core for runs that go one at a time.",
    ),
]
USE = Annotated[
    list[str] | None,
    typer.Option(
        "--use",
        help="A Python file, or an installed extension, with methods, problems or networks of "
        "your own. Its code is run. Repeatable.",
    ),
]
SEEDS = Annotated[str, typer.Option(help="How many, or which: 20, or 3,5, or 0-4.")]
STEPS = Annotated[str, typer.Option(help="Samples per run; default the problem's.")]
BATCH = Annotated[int, typer.Option(min=1, help="Samples per update.")]
WINDOW = Annotated[int, typer.Option(min=0, help="Samples per point; default one task.")]
TASK_LENGTH = Annotated[int, typer.Option(min=0, help="Samples per task; default the problem's.")]
HIDDEN = Annotated[
    str, typer.Option(help="Hidden units, such as 64-32, or none; default the problem's.")
]
NETWORK = Annotated[str, typer.Option(help="A network of your own by its name; see --use.")]


def open_study(folder: Path, *, quiet: bool = False, **options: Any) -> Study:
    """A study that shows progress and notes on standard error."""
    study = Study(folder, quiet=quiet, **options)
    study.console, study.note = err, warn
    return study


def load(extensions: list[str] | None) -> None:
    """Load what ``--use`` names."""
    for each in extensions or []:
        use_extension(each)


def end(study: Study) -> None:
    """Tell the shell whether a run failed, now or earlier, or could not be done here."""
    if study.tally.failed or study.tally.failed_earlier or study.tally.refused:
        raise typer.Exit(1)
