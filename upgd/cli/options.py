"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from upgd.cli.app import err, warn
from upgd.lab.study import Study
from upgd.study.extensions import use as use_extension

STUDY = Annotated[Path, Argument(help="A study's folder.")]
PROBLEM = Annotated[str, Option(help="Only this problem.")]
METHOD = Annotated[str, Option(help="Only this method.")]
DATA_DIR = Annotated[Path | None, Option(help="Where data are looked for first.")]
DEVICE = Annotated[str, Option(help="cpu or cuda.")]
ENGINE = Annotated[str, Option(help="auto, batched (many runs at once), or eager (one by one).")]
QUIET = Annotated[bool, Option("--quiet", help="No progress, no table.")]
JSON = Annotated[bool, Option("--json", help="The result for scripts.")]
CHECKPOINT = Annotated[
    float | None, Option(min=0.0, help="How often a run is saved; default: costs 2% at most.")
]
ON = Annotated[str, Option("--on", help="local, ray (starts a cluster), or ray://host:port.")]
WORKERS = Annotated[
    int | None,
    Option(
        "--workers",
        min=1,
        help="Worker processes; default one, or one per core for runs one by one.",
    ),
]
USE = Annotated[
    list[str] | None,
    Option(
        "--use",
        help="A Python file or installed extension with your own methods, problems or networks, "
        "which is run. Repeatable.",
    ),
]
ANY_PROBLEM = Annotated[str, Argument(help="A problem ('upgd list' shows them), or an .npz file.")]
METHODS = Annotated[list[str], Argument(help="One or several methods; 'paper' is the paper's ten.")]
FOLDER = Annotated[Path | None, Option(help="A folder; default studies/PROBLEM.")]
AXES = Annotated[
    list[str] | None, Option("--set", help="Other values: sigma=0.01,0.1. Repeatable.")
]
FACTS = Annotated[bool, Option("--json", help="For scripts.")]
DRY_RUN = Annotated[bool, Option(help="Say what would be run, and stop.")]
CONTINUES = "the same command continues from here"
SEEDS = Annotated[str, Option(help="How many, or which: 20, or 3,5, or 0-4.")]
STEPS = Annotated[str, Option(help="Samples per run; default the problem's.")]
BATCH = Annotated[int, Option(min=1, help="Samples per update.")]
WINDOW = Annotated[int, Option(min=0, help="Samples per point; default one task.")]
TASK_LENGTH = Annotated[int, Option(min=0, help="Samples per task; default the problem's.")]
HIDDEN = Annotated[str, Option(help="Hidden units, such as 64-32, or none; default the problem's.")]
NETWORK = Annotated[str, Option(help="A network of your own by its name; see --use.")]

LAYER_NORM = Annotated[
    bool, Option("--layer-norm", help="Layers normalised before each activation.")
]
INPUT_NORM = Annotated[bool, Option("--input-norm", help="Inputs normalised online.")]


def open_study(
    folder: Path, quiet: bool = False, device: str = "cpu", engine: str = "auto",
    workers: int | None = None, on: str = "local", data_dir: Path | None = None,
    checkpoint_seconds: float | None = None,
) -> Study:  # fmt: skip
    """A study that shows progress and notes on standard error."""
    study = Study(
        folder, device=device, engine=engine, workers=workers, on=on, data_dir=data_dir,
        checkpoint_seconds=checkpoint_seconds, quiet=quiet,
    )  # fmt: skip
    study.console, study.note = err, warn
    return study


def load(extensions: list[str] | None) -> None:
    """Load what ``--use`` names."""
    for each in extensions or []:
        use_extension(each)


def end(study: Study) -> None:
    """Tell the shell whether a run failed, now or earlier, or could not be done here."""
    if study.tally.failed or study.tally.failed_earlier or study.tally.refused:
        raise Exit(1)
