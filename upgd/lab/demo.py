"""The demo: a small study that shows what the package is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from upgd.engine.batched import has_dense_path
from upgd.engine.dense_cpu import cores
from upgd.lab.study import Study
from upgd.lab.views import Table
from upgd.ledger import Ledger, Run, RunSpec, Scalar, StudyError, write_atomically
from upgd.ledger.files import check_generated, check_output
from upgd.pages import MARK
from upgd.report import sections, verdict
from upgd.report.figures import draw_curves
from upgd.report.html import Report, plotly_source, render

PROBLEM = "label-permuted-digits"
TASK_LENGTH = 500
OPTIONS: Mapping[str, Scalar] = {"task_length": TASK_LENGTH, "hidden": "64-32"}
STEPS = 12 * TASK_LENGTH

SETTINGS: Mapping[str, Mapping[str, float]] = {
    "upgd-w": {"lr": 0.05, "weight_decay": 0.002, "sigma": 0.001, "beta_utility": 0.9},
    "adam": {"lr": 0.003, "beta1": 0.0, "beta2": 0.999},
    "sgd": {"lr": 0.05},
}
"""Each method's best set in docs/benchmarks/demo_search.md, the slowest method first."""

TITLES = {"upgd-w": "UPGD-W", "adam": "Adam", "sgd": "SGD"}
SUBJECT = "UPGD-W"

TITLE = "Learning from a stream that keeps changing"
ABOUT = (
    "A small network sees images of handwritten digits one at a time: it predicts each label, then "
    f"learns from it. The images never change, but every {TASK_LENGTH} samples the ten labels are "
    "shuffled, which starts a new task. A learner that reuses what it knows about the images, and "
    "can still learn, gets better from task to task. Accuracy is measured before learning from a "
    "sample.",
    "Each method has its best of 12 settings by mean accuracy, searched for on seeds that are not "
    "shown here (docs/benchmarks/demo_search.md). This is one small stream, made so that a minute "
    "shows a difference; other streams rank methods differently.",
)


@dataclass(frozen=True)
class Demo:
    """What the demo made.

    Attributes:
        page: Its report.
        figure: Its figure.
        headline: The result in a sentence.
        trends: How each method developed.
        table: The runs.
    """

    page: Path
    figure: Path
    headline: str
    trends: str
    table: Table


def specs(seeds: Sequence[int], steps: int = STEPS) -> list[RunSpec]:
    """The runs of the demo, those of the slowest method first so that the cores end together.

    Raises:
        ValueError: There would not be one whole task.
    """
    if steps < TASK_LENGTH:
        raise ValueError(f"steps must be at least one task of {TASK_LENGTH} samples; got {steps}")
    return [
        RunSpec(PROBLEM, method, given, seed, steps, OPTIONS)
        for method, given in SETTINGS.items()
        for seed in seeds
    ]


def make_study(folder: Path, workers: int = 0, quiet: bool = False) -> Study:
    """The demo's study: one stack where there is a compiled path, else processes."""
    if has_dense_path("cpu"):
        return Study(folder, quiet=quiet)
    return Study(folder, engine="eager", workers=workers or cores(), quiet=quiet)


def run(
    study: Study, seeds: Sequence[int] = range(5), steps: int = STEPS, output: Path | None = None
) -> Demo:
    """Run what is missing of the demo, and write its page and figure."""
    page = _page_path(study.folder, output)
    plotly_source()  # fails before any run starts where plotly is missing
    wanted = specs(seeds, steps)
    study.check(wanted)
    titles = {s.key: TITLES[m] for m in SETTINGS for s in wanted if s in _of(m, seeds, steps)}
    table = study.run_specs(wanted)
    runs = list(table.runs)
    missing = sum(run.result is None for run in runs)
    if missing:
        raise StudyError(
            f"{missing} runs are not done, or under way in another process; run 'upgd demo' "
            "again to continue"
        )
    page.parent.mkdir(parents=True, exist_ok=True)
    figure = page.with_suffix(".png")
    with study.read() as ledger:
        curves = _curves(ledger, runs, titles)
        drawn = {name: (TASK_LENGTH, _stack(by_seed)) for name, by_seed in curves.items()}
        draw_curves({n: d for n, d in drawn.items() if len(d[1])}, "accuracy", PROBLEM, figure)
        headline = verdict.headline(curves, SUBJECT)
        report = Report(TITLE, sections.read(ledger, runs), about=(headline, *ABOUT))
        write_atomically(page, render(report).encode())
    return Demo(page, figure, headline, verdict.trends(curves), table)


def _of(method: str, seeds: Sequence[int], steps: int) -> set[RunSpec]:
    return {RunSpec(PROBLEM, method, SETTINGS[method], seed, steps, OPTIONS) for seed in seeds}


def _page_path(study: Path, output: Path | None) -> Path:
    """Where the page goes; raises for a path that cannot be written, before any run starts."""
    page = output if output is not None else study / "demo.html"
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"the page's name must end in .html, got {page}; its figure is a .png")
    if page.is_dir():
        raise ValueError(f"{page} is a folder; give the page a name")
    figure = page.with_suffix(".png")
    if output is None:
        check_generated(page, MARK)
    else:
        check_output(page, make_folders=True)
        check_output(figure, make_folders=True)
    check_generated(figure)
    return page


def _curves(
    ledger: Ledger, runs: Sequence[Run], titles: Mapping[str, str]
) -> dict[str, dict[int, NDArray[np.floating]]]:
    """By method and seed, the accuracy of each task; runs that diverged are left out."""
    found: dict[str, dict[int, NDArray[np.floating]]] = {t: {} for t in TITLES.values()}
    for run in runs:
        if run.state == "done":
            series = ledger.series(run.key, "accuracy")
            found[titles[run.key]][run.spec.seed] = series.astype(np.float64)
    if not any(found.values()):
        raise StudyError("every run of the demo diverged; there is nothing to show")
    return found


def _stack(by_seed: Mapping[int, NDArray[np.floating]]) -> NDArray[np.floating]:
    return np.stack(list(by_seed.values())) if by_seed else np.empty((0, 0))
