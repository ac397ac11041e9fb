"""``upgd run`` and ``upgd resume``."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn

from upgd.cli.app import app, err, mistakes_are_one_line, out, printable
from upgd.cli.arguments import all_methods, hyperparameters, seed_list, whole
from upgd.cli.show import show_study
from upgd.engine import Setting
from upgd.streams import check
from upgd.streams import get as get_problem
from upgd.study import Ledger, RunSpec
from upgd.study.prepare import check_device, prepare
from upgd.study.stacks import work_stacks
from upgd.study.work import Progress as RunProgress
from upgd.study.work import Tally, work

SECONDS_BETWEEN_LINES = 30.0
DATA_DIR = Annotated[Path | None, typer.Option(help="Where data are looked for first.")]
DEVICE = Annotated[str, typer.Option(help="cpu or cuda.")]
ENGINE = Annotated[
    str,
    typer.Option(help="auto (many runs at once where possible), batched, or eager (one by one)."),
]
QUIET = Annotated[bool, typer.Option("--quiet", help="No progress, no table.")]
CHECKPOINT = Annotated[
    float | None,
    typer.Option(min=0.0, help="How often a run is saved; default so that it costs 2% at most."),
]


@app.command()
@mistakes_are_one_line
def run(
    problem: Annotated[str, typer.Argument(help="A problem; 'upgd list' shows them.")],
    methods: Annotated[
        list[str], typer.Argument(help="One or several methods; 'paper' is the paper's ten.")
    ],
    seeds: Annotated[str, typer.Option(help="How many, or which: 20, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, typer.Option(help="Samples per run; default the problem's.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyperparameter: lr=0.01. Repeatable.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Start from the sets that the paper prints as best.")
    ] = False,
    study: Annotated[Path | None, typer.Option(help="A folder; default studies/PROBLEM.")] = None,
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Samples per update.")] = 1,
    restart: Annotated[bool, typer.Option(help="A fresh learner for every task.")] = False,
    held_out: Annotated[int, typer.Option(min=0, help="Held-out samples after each task.")] = 0,
    stride: Annotated[int, typer.Option(min=0, help="Diagnostics every so many steps.")] = 0,
    window: Annotated[int, typer.Option(min=0, help="Samples per point; default one task.")] = 0,
    task_length: Annotated[
        int, typer.Option(min=0, help="Samples per task; default the problem's.")
    ] = 0,
    hidden: Annotated[
        str, typer.Option(help="Hidden units, such as 64-32; default the problem's.")
    ] = "",
    dry_run: Annotated[bool, typer.Option(help="Say what would be run, and stop.")] = False,
    quiet: QUIET = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table for scripts.")] = False,
    checkpoint_seconds: CHECKPOINT = None,
) -> None:
    """Run methods on a problem; what the study has already is not run again."""
    row = get_problem(problem)
    length = whole("steps", steps) if steps else row.steps
    options: dict[str, Any] = {"batch": batch} if batch > 1 else {}
    options |= {"restart": True} if restart else {}
    options |= {"held_out": held_out} if held_out else {}
    options |= {"stride": stride} if stride else {}
    options |= {"window": window} if window else {}
    options |= {"task_length": task_length} if task_length else {}
    options |= {"hidden": hidden} if hidden else {}
    specs = [
        RunSpec(row.name, name, hyper, seed, length, options)
        for name, hyper in hyperparameters(
            all_methods(methods), settings or [], row.name if best else ""
        ).items()
        for seed in seed_list(seeds)
    ]
    check_device(device)
    if row.dataset is not None:
        check(row.dataset, data_dir)  # a wrong file is found before anything starts
    for spec in {s.method: s for s in specs}.values():
        _check_length(spec, prepare(spec, data_dir, device).setting)
    folder = study if study is not None else Path("studies") / row.name
    if dry_run:
        known = _known(folder)
        missing = [s for s in specs if s.key not in known]
        where = printable(folder)
        out.print(f"{len(missing)} of {len(specs)} runs to do in {where}: {length} steps each")
        return
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        keys = [spec.key for spec in specs]
        tally = _work(ledger, {"key": keys}, data_dir, device, engine, quiet, checkpoint_seconds)
        if not quiet:
            show_study(ledger, folder, as_json, set(keys))
    _end(tally)


@app.command()
@mistakes_are_one_line
def resume(
    study: Annotated[Path, typer.Argument(help="A study's folder.")],
    data_dir: DATA_DIR = None,
    device: DEVICE = "cpu",
    engine: ENGINE = "auto",
    retry: Annotated[bool, typer.Option("--retry", help="Also try failed runs again.")] = False,
    quiet: QUIET = False,
    checkpoint_seconds: CHECKPOINT = None,
) -> None:
    """Finish what a study has begun."""
    with Ledger.open(study, create=False) as ledger:
        if retry:
            check_device(device)
            ledger.retry_failed()
        tally = _work(ledger, None, data_dir, device, engine, quiet, checkpoint_seconds)
        if not quiet:
            show_study(ledger, study, False)
    _end(tally)


def _check_length(spec: RunSpec, setting: Setting) -> None:
    """A run without a whole window would have no result."""
    if spec.steps * setting.batch < setting.window:
        samples = f" of {setting.batch} samples" if setting.batch > 1 else ""
        raise ValueError(
            f"{spec.steps} steps{samples} are less than one window of {setting.window} samples, "
            "so nothing would be measured; give more --steps or a smaller --window"
        )


def _known(folder: Path) -> set[str]:
    if not (folder / "ledger.sqlite").exists():
        return set()
    with Ledger.open(folder, create=False, read_only=True) as ledger:
        return {run.key for run in ledger.runs() if run.state in ("done", "diverged")}


def _work(
    ledger: Ledger,
    where: dict[str, Any] | None,
    data_dir: Path | None,
    device: str,
    engine: str,
    quiet: bool,
    checkpoint_seconds: float | None,
) -> Tally:
    keys = None if where is None else where["key"]
    total = len(keys) if keys else sum(ledger.counts()[state] for state in ("pending", "running"))
    tally = Tally()
    with _terminated_as_interrupted(), _progress(total, quiet) as on_progress:
        for do in _workers(engine, None if quiet else _note):
            part = do(
                ledger,
                data_dir=data_dir,
                device=device,
                where=where,
                on_progress=on_progress,
                checkpoint_seconds=checkpoint_seconds,
            )
            tally = tally + part
    if tally.diverged:
        err.print(f"{tally.diverged} runs diverged", style="yellow")
    for line in tally.errors:
        text = printable(f"failed: {line}")
        err.print(text, style="red", highlight=False, markup=False, emoji=False, soft_wrap=True)
    others = [lease for lease in ledger.leases() if keys is None or lease.key in keys]
    if others:
        err.print(f"{len(others)} runs are under way in other processes", style="yellow")
    return tally


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, by which schedulers stop a job, save and give back like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _note(text: str) -> None:
    err.print(text, style="yellow", highlight=False, soft_wrap=True)


def _workers(engine: str, on_note: Callable[[str], None] | None) -> list[Callable[..., Tally]]:
    """What does the work; the eager engine takes what the batched one cannot."""
    stacks = partial(work_stacks, on_note=on_note)
    engines: dict[str, list[Callable[..., Tally]]] = {
        "auto": [stacks, work],
        "batched": [stacks],
        "eager": [work],
    }
    if engine not in engines:
        raise ValueError(f"engine is one of {', '.join(engines)}; got {engine!r}")
    return engines[engine]


def _end(tally: Tally) -> None:
    if tally.failed:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[RunProgress], None] | None]:
    """A live line where there is a terminal, else a plain line now and then."""
    if quiet:
        yield None
        return
    if not err.is_terminal:
        yield _lines(total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[pace]}  {task.fields[latest]}"),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=float(total), pace="", latest="")
        done = _Done(total)

        def on_progress(progress: RunProgress) -> None:
            done.note(progress)
            shown = {k: v for k, v in progress.latest.items() if k in ("accuracy", "loss")}
            bar.update(
                task,
                completed=done.runs,
                description=_what(progress),
                pace=done.pace(progress),
                latest=" ".join(f"{k} {v:.3f}" for k, v in shown.items()),
            )

        yield on_progress


def _lines(total: int) -> Callable[[RunProgress], None]:
    last = time.monotonic()
    done = _Done(total)

    def on_progress(progress: RunProgress) -> None:
        nonlocal last
        done.note(progress)
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            text = f"{done.runs:.1f} of {total} runs, {done.pace(progress)}"
            err.print(f"{_what(progress)}: {text}", highlight=False, soft_wrap=True)

    return on_progress


class _Done:
    """How much of some runs is done, and how fast the rest will be."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._parts: dict[str, float] = {}

    def note(self, progress: RunProgress) -> None:
        """Take in what a worker told."""
        for each in (progress.spec, *progress.others):
            self._parts[each.key] = progress.step / each.steps

    @property
    def runs(self) -> float:
        """How many, in parts too."""
        return sum(self._parts.values())

    def pace(self, progress: RunProgress) -> str:
        """Learner-steps per second, the share of the roofline, and the time left at this pace."""
        found = [f"{_short(progress.rate)} steps/s"]
        if progress.share is not None:
            found.append(f"{progress.share:.0%} of the roofline")
        if progress.rate > 0:
            left = max(0.0, self.total - self.runs) * progress.spec.steps / progress.rate
            found.append(f"{_clock(left)} left")
        return ", ".join(found)


def _what(progress: RunProgress) -> str:
    if progress.others:
        return f"{1 + len(progress.others)} runs at step {progress.step}"
    return f"{progress.spec.method} seed {progress.spec.seed}"


def _short(number: float) -> str:
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if number >= 10 * unit:
            return f"{number / unit:.0f}{name}"
    return f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
