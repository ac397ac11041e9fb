"""``upgd demo``: a small study that shows what the package is about."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from upgd.cli.app import app, mistakes_are_one_line, say
from upgd.cli.arguments import hyperparameters, seed_list, whole
from upgd.cli.show import show_study
from upgd.cli.working import Work, do_work, end
from upgd.engine.batched import has_dense_path
from upgd.engine.dense_cpu import cores
from upgd.report import sections, tables, verdict
from upgd.report.figures import draw_curves
from upgd.report.html import MARK, Report, plotly_source, render
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, Run, RunSpec, Scalar, StudyError, write_atomically
from upgd.study.files import check_generated, check_output

PROBLEM = "label-permuted-digits"
TASK_LENGTH = 500
OPTIONS: Mapping[str, Scalar] = {"task_length": TASK_LENGTH, "hidden": "64-32"}
STEPS = 12 * TASK_LENGTH

SETTINGS: Mapping[str, Mapping[str, float]] = {
    "upgd-w": {"lr": 0.1, "sigma": 0.001, "beta_utility": 0.9},
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


@app.command()
@mistakes_are_one_line
def demo(
    seeds: Annotated[str, typer.Option(help="How many, or which: 5, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, typer.Option(help="Samples per run.")] = str(STEPS),
    study: Annotated[Path, typer.Option(help="The study's folder.")] = Path("studies/demo"),
    output: Annotated[
        Path | None, typer.Option(help="The page; default STUDY/demo.html, with a .png beside it.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; default one per core.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, no table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The results for scripts.")] = False,
) -> None:
    """See UPGD-W beside Adam and SGD on a stream of digits: under a minute on two cores.

    The images stay the same and every 500 samples the ten labels are shuffled. Writes a page and
    a figure. What is done already is not run again.
    """
    page = _page_path(study, output)
    plotly_source()  # fails before any run starts where plotly is missing
    wanted = specs(seed_list(seeds), whole("steps", steps))
    dataset = get_problem(PROBLEM).dataset
    assert dataset is not None
    check(dataset)
    keys = [spec.key for spec in wanted]
    with Ledger.open(study) as ledger:
        ledger.add(wanted)
        if any(run.result is None for run in _runs(ledger, keys)):
            with _threads(workers or cores()) as processes:
                end(do_work(ledger, keys, Work(quiet=quiet or as_json, workers=processes)))
        runs = _runs(ledger, keys)
        missing = sum(run.result is None for run in runs)
        if missing:
            raise StudyError(
                f"{missing} runs are not done, or under way in another process; run 'upgd demo' "
                "again to continue"
            )
        curves = _curves(ledger, runs)
        page.parent.mkdir(parents=True, exist_ok=True)
        figure = page.with_suffix(".png")
        drawn = {name: (TASK_LENGTH, _stack(by_seed)) for name, by_seed in curves.items()}
        draw_curves({n: d for n, d in drawn.items() if len(d[1])}, "accuracy", PROBLEM, figure)
        sentence = verdict.headline(curves, SUBJECT)
        report = Report(TITLE, sections.read(ledger, runs), about=(sentence, *ABOUT))
        write_atomically(page, render(report).encode())
        if as_json:
            rows = tables.rows(tables.group(runs))
            written = {"study": str(study), "page": str(page), "figure": str(figure)}
            print(json.dumps({**written, "summary": sentence, "results": rows}))
            return
        if quiet:
            return
        show_study(ledger, study, False, set(keys))
    for text in (sentence, verdict.trends(curves), f"page: {page}", f"figure: {figure}"):
        say(text)


def specs(seeds: list[int], steps: int) -> list[RunSpec]:
    """The runs of the demo, those of the slowest method first so that the cores end together.

    Example:
        >>> print(specs([0], 500)[-1].label())
        label-permuted-digits sgd lr=0.05 weight_decay=0.0 seed=0 steps=500 hidden=64-32 \
task_length=500
    """
    if steps < TASK_LENGTH:
        raise ValueError(f"steps must be at least one task of {TASK_LENGTH} samples; got {steps}")
    return [
        RunSpec(PROBLEM, method, hyper(method, given), seed, steps, OPTIONS)
        for method, given in SETTINGS.items()
        for seed in seeds
    ]


def hyper(method: str, given: Mapping[str, float]) -> dict[str, float]:
    """All hyperparameters of a method: those given, and its defaults."""
    settings = [f"{name}={value!r}" for name, value in given.items()]
    return hyperparameters([method], settings)[method]


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


def _runs(ledger: Ledger, keys: list[str]) -> list[Run]:
    wanted = set(keys)
    return [run for run in ledger.runs() if run.key in wanted]


def _curves(ledger: Ledger, runs: list[Run]) -> dict[str, dict[int, NDArray[np.floating]]]:
    """By method and seed, the accuracy of each task; runs that diverged are left out."""
    found: dict[str, dict[int, NDArray[np.floating]]] = {t: {} for t in TITLES.values()}
    for run in runs:
        if run.state == "done":
            series = ledger.series(run.key, "accuracy")
            found[TITLES[run.spec.method]][run.spec.seed] = series.astype(np.float64)
    if not any(found.values()):
        raise StudyError("every run of the demo diverged; there is nothing to show")
    return found


def _stack(by_seed: Mapping[int, NDArray[np.floating]]) -> NDArray[np.floating]:
    return np.stack(list(by_seed.values())) if by_seed else np.empty((0, 0))


@contextmanager
def _threads(workers: int) -> Iterator[int]:
    """Use `workers` threads for a stack of runs; yields the number of processes to use.

    Without the compiled path each run needs a process of its own instead of a thread.
    """
    if not has_dense_path("cpu"):
        yield workers
        return
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        yield 1
    finally:
        torch.set_num_threads(before)
