"""``upgd demo``: a small study that shows what the package is about."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from upgd.cli.app import app, err, mistakes_are_one_line, out, printable
from upgd.cli.arguments import hyperparameters, seed_list, whole
from upgd.cli.show import show_study
from upgd.engine.batched import has_dense_path
from upgd.engine.dense_cpu import cores
from upgd.metrics import standard_error
from upgd.report import tables, verdict
from upgd.report.chart import line_chart
from upgd.report.figures import draw_curves
from upgd.report.page import MARK, Page, render
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, Run, RunSpec, Scalar, StudyError, write_atomically
from upgd.study.driver import drive
from upgd.study.files import check_generated, check_output
from upgd.study.pools import LocalPool
from upgd.study.stacks import work_stacks
from upgd.study.work import Progress as RunProgress
from upgd.study.work import Tally

PROBLEM = "label-permuted-digits"
TASK_LENGTH = 500
OPTIONS: Mapping[str, Scalar] = {"task_length": TASK_LENGTH, "hidden": "64-32"}
STEPS = 12 * TASK_LENGTH

SETTINGS: Mapping[str, Mapping[str, float]] = {
    "upgd-w": {"lr": 0.1, "sigma": 0.001, "beta_utility": 0.9},
    "adam": {"lr": 0.003, "beta1": 0.0, "beta2": 0.999},
    "sgd": {"lr": 0.05},
}
"""Each method's best in docs/benchmarks/demo_search.md, the slowest method first."""

TITLES = {"upgd-w": "UPGD-W", "adam": "Adam", "sgd": "SGD"}
SUBJECT = "UPGD-W"


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
    wanted = specs(seed_list(seeds), whole("steps", steps))
    dataset = get_problem(PROBLEM).dataset
    assert dataset is not None
    check(dataset)
    keys = {spec.key for spec in wanted}
    with Ledger.open(study) as ledger:
        ledger.add(wanted)
        left = [r.spec for r in ledger.runs() if r.key in keys and r.result is None]
    if left:
        if not (quiet or as_json or err.is_terminal):
            err.print(f"{len(left)} runs of {steps} steps in {printable(study)} ...")
        with _progress(left, quiet or as_json) as on_progress:
            tally = _work(study, left, workers or cores(), on_progress)
        if tally.errors:
            raise StudyError(tally.errors[0])
    with Ledger.open(study) as ledger:
        runs = [run for run in ledger.runs() if run.key in keys]
        missing = sum(run.result is None for run in runs)
        if missing:
            raise StudyError(
                f"{missing} runs are not done, or under way in another process; 'upgd demo' again "
                "goes on"
            )
        curves = _curves(ledger, runs)
        page.parent.mkdir(parents=True, exist_ok=True)
        figure = page.with_suffix(".png")
        drawn = {name: (TASK_LENGTH, _stack(by_seed)) for name, by_seed in curves.items()}
        draw_curves({n: d for n, d in drawn.items() if len(d[1])}, "accuracy", PROBLEM, figure)
        write_atomically(page, render(describe(runs, curves, study)).encode())
        sentence = verdict.headline(curves, SUBJECT)
        if as_json:
            rows = tables.rows(tables.group(runs))
            told = {"study": str(study), "page": str(page), "figure": str(figure)}
            print(json.dumps({**told, "summary": sentence, "results": rows}))
            return
        if quiet:
            return
        show_study(ledger, study, False, keys)
    for text in (sentence, verdict.trends(curves), f"page: {page}", f"figure: {figure}"):
        out.print(printable(text), highlight=False, markup=False, soft_wrap=True)


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
    """Where the page goes; a place that cannot be is a mistake before the work, not after."""
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


def _curves(ledger: Ledger, runs: list[Run]) -> dict[str, dict[int, NDArray[np.floating]]]:
    """By method and seed, the accuracy of each task; runs that diverged are left out."""
    found: dict[str, dict[int, NDArray[np.floating]]] = {t: {} for t in TITLES.values()}
    for run in runs:
        if run.state == "done":
            series = ledger.series(run.key, "accuracy")
            found[TITLES[run.spec.name]][run.spec.seed] = series.astype(np.float64)
    if not any(found.values()):
        raise StudyError("every run of the demo diverged; there is nothing to show")
    return found


def _stack(by_seed: Mapping[int, NDArray[np.floating]]) -> NDArray[Any]:
    return np.stack(list(by_seed.values())) if by_seed else np.empty((0, 0))


def describe(runs: list[Run], curves: verdict.Curves, study: Path) -> Page:
    """The demo's page: nothing on it is said that the runs do not show."""
    known = {name: by_seed for name, by_seed in curves.items() if by_seed}
    tasks = min(len(curve) for by_seed in known.values() for curve in by_seed.values())
    headline = verdict.headline(curves, SUBJECT)
    several = any(len(by_seed) > 1 for by_seed in known.values())
    return Page(
        title="Learning from a stream that keeps changing",
        result=headline,
        about=[
            "A small network sees images of handwritten digits, one at a time, and learns from "
            "each once it has named it. The images stay as they are, but every "
            f"{TASK_LENGTH} samples the ten labels are shuffled: what was called 3 is now called "
            "7, and so on. That is a new task. A learner that keeps what it knows about the "
            "images, and that still can learn, should get better from task to task.",
        ],
        chart=line_chart(
            {name: _stack(by_seed) for name, by_seed in known.items()}, headline, "task", "accuracy"
        ),
        caption="Online accuracy: the share of samples that were named right before learning from "
        "them, task by task." + (" Mean and standard error over seeds." if several else ""),
        header=_header(tasks),
        rows=[_row(name, by_seed, tasks) for name, by_seed in known.items()],
        notes=[
            verdict.trends(curves),
            "Differences are taken seed by seed, since with the same seed all methods see the same "
            "stream. “Improved” and “fell” mean that the 95% interval over seeds excludes no "
            "change; “held” that it lies within one point.",
            *_losses(runs),
            "This is one small stream, made so that a minute shows something. Other streams rank "
            "methods differently; the page on how the settings were chosen has examples.",
        ],
        facts=_facts(runs, study),
    )


def _header(tasks: int) -> list[str]:
    parts = verdict.Parts.of(tasks)
    early, late = (verdict.told(part) for part in parts)
    trend = [early, late, "change [95%]"] if tasks > 1 else []
    return ["method", "all tasks", *trend, "seeds"]


def _row(name: str, by_seed: Mapping[int, NDArray[np.floating]], tasks: int) -> list[str]:
    values = _stack(by_seed).mean(1)
    error = f" ± {standard_error(values):.1%}" if len(values) > 1 else ""
    cells = [name, f"{values.mean():.1%}{error}"]
    if tasks > 1:
        parts = verdict.Parts.of(tasks)
        change = verdict.change(by_seed, parts)
        points = [f"{value * 100:+.1f}".replace("-", "−") for value in change]
        cells += [f"{verdict.accuracy(by_seed, part).estimate:.1%}" for part in parts]
        cells.append(f"{points[0]} [{points[1]}, {points[2]}]" if len(values) > 1 else points[0])
    return [*cells, str(len(values))]


def _losses(runs: list[Run]) -> list[str]:
    lost = [run for run in runs if run.state == "diverged"]
    named = ", ".join(f"{TITLES[run.spec.name]} with seed {run.spec.seed}" for run in lost)
    return [f"Diverged, and not in the means: {named}."] if lost else []


def _facts(runs: list[Run], study: Path) -> dict[str, str]:
    spec = runs[0].spec
    network = get_problem(PROBLEM).network
    shown = {}
    for method, title in TITLES.items():
        mine = next(run.spec.hyper for run in runs if run.spec.name == method)
        shown[title] = ", ".join(f"{name} {value:g}" for name, value in mine.items())
    results = [run.result for run in runs if run.result is not None]
    stacks = dict.fromkeys(
        ", ".join([*(f"{k} {v}" for k, v in r.versions.items()), str(r.host.get("machine", ""))])
        for r in results
    )
    seeds = sorted({run.spec.seed for run in runs})
    listed = ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")
    return {
        "Stream": f"{PROBLEM}: scikit-learn's 8×8 digits, {spec.steps} samples in tasks of "
        f"{TASK_LENGTH}",
        "Network": f"{network[0]}-{OPTIONS['hidden']}-{network[-1]}, ReLU, one sample per update",
        **shown,
        "Choice of settings": "Each method's best of 12 settings by mean accuracy over all tasks, "
        f"in runs of {STEPS} samples with seeds 100 to 109, which are not shown here. "
        "benchmarks/demo_search.py repeats the search; docs/benchmarks/demo_search.md has every "
        "result.",
        "Seeds": ", ".join(map(str, seeds)),
        "Made with": "; ".join(stacks) + f"; {results[0].engine} engine on {results[0].device}, "
        f"rules version {spec.rules}",
        "Work": f"{len(runs)} runs, {sum(r.wall for r in results):.0f} s in all",
        "Again": f"upgd demo --seeds {listed} --steps {spec.steps}; "
        f"upgd show {printable(study)} has the table",
    }


def _work(
    study: Path,
    left: list[RunSpec],
    workers: int,
    on_progress: Callable[[RunProgress], None] | None,
) -> Tally:
    """All runs at once where the compiled path is installed, else in several processes."""
    where = {"key": [spec.key for spec in left]}
    if not has_dense_path("cpu"):
        with Ledger.open(study) as ledger, closing(LocalPool(min(workers, len(left)))) as pool:
            return drive(ledger, pool, where=where, engine="eager", on_progress=on_progress)
    before = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        with Ledger.open(study) as ledger:
            return work_stacks(ledger, where=where, on_progress=on_progress)
    finally:
        torch.set_num_threads(before)


class _Remaining(TimeRemainingColumn):
    """The time that is left, of all runs together."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.description == "all" else Text("")


@contextmanager
def _progress(left: list[RunSpec], quiet: bool) -> Iterator[Callable[[RunProgress], None] | None]:
    """Live bars where there is a terminal, one per method and one for all, else nothing."""
    if quiet or not err.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        TextColumn("{task.fields[latest]:14}"),
        _Remaining(),
    )
    with Progress(*columns, console=err, transient=True) as bars:
        totals: dict[str, int] = {}
        for spec in left:
            totals[spec.name] = totals.get(spec.name, 0) + spec.steps
        rows = {m: bars.add_task(TITLES[m], total=n, latest="") for m, n in totals.items()}
        everything = bars.add_task("all", total=sum(totals.values()), latest="")
        heard: dict[str, RunProgress] = {}

        def on_progress(progress: RunProgress) -> None:
            heard[progress.spec.key] = progress
            for other in progress.others:  # in lock step; what they have reached is not told
                heard[other.key] = replace(progress, spec=other, latest={})
            for method in {spec.name for spec in (progress.spec, *progress.others)}:
                mine = [p for p in heard.values() if p.spec.name == method]
                known = [p.latest["accuracy"] for p in mine if "accuracy" in p.latest]
                latest = f"accuracy {np.mean(known):.3f}" if known else ""
                bars.update(rows[method], completed=sum(p.step for p in mine), latest=latest)
            done = sum(p.step for p in heard.values())
            bars.update(everything, completed=done, latest=f"{progress.rate:.0f} steps/s")

        yield on_progress
