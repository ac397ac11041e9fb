"""Options that several commands share, by the sections of their help pages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from upgd.cli.app import err, warn

if TYPE_CHECKING:
    from upgd.lab.study import Study

CONTINUES = "the same command continues from here"
LEARNER: Any = partial(Option, rich_help_panel="Stream and network")
EXECUTION: Any = partial(Option, rich_help_panel="Execution")
OUTPUT: Any = partial(Option, rich_help_panel="Output")

# ------------------------------------------------------------------------------ what is run
STUDY = Annotated[Path, Argument(help="A study's folder.")]
PROBLEM = Annotated[str, Option(help="Only this problem.")]
METHOD = Annotated[str, Option(help="Only this method.")]
ANY_PROBLEM = Annotated[str, Argument(help="A problem ('upgd list' shows them), or an .npz file.")]
METHODS = Annotated[list[str], Argument(help="One or several methods; 'paper' is the paper's ten.")]
SEEDS = Annotated[str, Option(help="How many, or which: 20, or 3,5, or 0-4.")]
STEPS = Annotated[str, Option(help="Samples per run; default the problem's.")]
FOLDER = Annotated[Path | None, Option(help="A folder; default studies/PROBLEM.")]
AXES = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUES", help="Other values: sigma=0.01,0.1. Repeatable."),
]
USE = Annotated[
    list[str] | None,
    Option(
        "--use",
        metavar="FILE",
        help="A Python file or installed extension with your own methods, problems or networks, "
        "which is run. Repeatable.",
    ),
]

# ---------------------------------------------------------------------- streams and networks
BATCH = Annotated[int, LEARNER(min=1, metavar="SAMPLES", help="Samples per update.")]
WINDOW = Annotated[
    int,
    LEARNER(
        min=0, metavar="SAMPLES", show_default=False, help="Samples per point; default one task."
    ),
]
TASK_LENGTH = Annotated[
    int,
    LEARNER(
        min=0,
        metavar="SAMPLES",
        show_default=False,
        help="Samples per task; default the problem's.",
    ),
]
HIDDEN = Annotated[
    str,
    LEARNER(metavar="UNITS", help="Hidden units, such as 64-32, or none; default the problem's."),
]
NETWORK = Annotated[
    str, LEARNER(metavar="NAME", help="A network of your own by its name; see --use.")
]
LAYER_NORM = Annotated[
    bool, LEARNER("--layer-norm", help="Layers normalised before each activation.")
]
INPUT_NORM = Annotated[bool, LEARNER("--input-norm", help="Inputs normalised online.")]

# ------------------------------------------------------------------------------- execution
DATA_DIR = Annotated[Path | None, EXECUTION(help="Where data are looked for first.")]
DEVICE = Annotated[str, EXECUTION(help="cpu or cuda.")]
ENGINE = Annotated[str, EXECUTION(help="auto, batched (many runs at once), or eager (one by one).")]
CHECKPOINT = Annotated[
    float | None,
    EXECUTION(
        min=0.0, metavar="SECONDS", help="How often a run is saved; default: costs 2% at most."
    ),
]
ON = Annotated[str, EXECUTION("--on", help="local, ray (starts a cluster), or ray://host:port.")]
WORKERS = Annotated[
    int | None,
    EXECUTION(
        "--workers",
        min=1,
        metavar="NUMBER",
        help="Worker processes; default one, or one per core for runs one by one.",
    ),
]
DRY_RUN = Annotated[bool, EXECUTION("--dry-run", help="Say what would be run, and stop.")]

# ---------------------------------------------------------------------------------- output
QUIET = Annotated[bool, OUTPUT("--quiet", help="No progress, no table.")]
JSON = Annotated[bool, OUTPUT("--json", help="The result for scripts.")]
FACTS = Annotated[bool, OUTPUT("--json", help="For scripts.")]


def open_study(
    folder: Path, quiet: bool = False, device: str = "cpu", engine: str = "auto",
    workers: int | None = None, on: str = "local", data_dir: Path | None = None,
    checkpoint_seconds: float | None = None,
) -> Study:  # fmt: skip
    """A study that shows progress and notes on standard error."""
    from upgd.lab.study import Study

    study = Study(
        folder, device=device, engine=engine, workers=workers, on=on, data_dir=data_dir,
        checkpoint_seconds=checkpoint_seconds, quiet=quiet,
    )  # fmt: skip
    study.console, study.note = err, warn
    return study


def load(extensions: list[str] | None) -> None:
    """Load what ``--use`` names."""
    if extensions:
        from upgd.study.extensions import use

        for each in extensions:
            use(each)


def end(study: Study) -> None:
    """Tell the shell whether a run failed, now or earlier, or could not be done here."""
    if study.tally.failed or study.tally.failed_earlier or study.tally.refused:
        raise Exit(1)
