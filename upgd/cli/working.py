"""How commands do the work of a study: engines, progress, what is said at the end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn

from upgd.cli.app import err, printable
from upgd.cli.numbers import clock, count, short
from upgd.rl.runs import is_rl
from upgd.rl.study import work_agents
from upgd.study import Ledger
from upgd.study.backlog import ENGINES
from upgd.study.driver import drive
from upgd.study.pools import Pool, check_pool, make_pool
from upgd.study.stacks import work_stacks
from upgd.study.work import Progress as RunProgress
from upgd.study.work import Tally, work

SECONDS_BETWEEN_LINES = 30.0
AGENTS_ARE_LOCAL = "agents of reinforcement learning run on this machine; leave out --on"
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
ON = Annotated[
    str, typer.Option("--on", help="local, ray (a cluster started for this), or ray://host:port.")
]
WORKERS = Annotated[
    int, typer.Option("--workers", min=1, help="Worker processes; 1 on local: this one alone.")
]


@dataclass(frozen=True)
class Work:
    """How to work, as a command's options say.

    Attributes:
        data_dir: Where data are looked for first.
        device: Where runs run.
        engine: ``"auto"``, ``"batched"`` or ``"eager"``.
        quiet: Whether to keep progress to itself.
        checkpoint_seconds: How often runs are saved.
        on: Whose workers do it: ``"local"``, ``"ray"`` or the address of a Ray cluster.
        workers: How many; one on this machine is this process.
        agents: Processes that agents of reinforcement learning are spread over; by default as
            many as workers, or one per core where there is one worker.
    """

    data_dir: Path | None = None
    device: str = "cpu"
    engine: str = "auto"
    quiet: bool = False
    checkpoint_seconds: float | None = None
    on: str = "local"
    workers: int = 1
    agents: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be done, before a command touches a study.

        Raises:
            ValueError: An option has a value that it cannot have.
            ImportError: Ray is not installed.
        """
        if self.engine not in ENGINES:
            raise ValueError(f"engine is one of {', '.join(ENGINES)}; got {self.engine!r}")
        check_pool(self.on)
        if self.on != "local" and self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"workers of a cluster have cpu or cuda, not {self.device!r}")


def do_work(ledger: Ledger, keys: Sequence[str] | None, how: Work) -> Tally:
    """Run what is pending among `keys`, or in the whole study; says what went wrong."""
    where: dict[str, Any] | None = None if keys is None else {"key": list(keys)}
    left = ledger.unfinished(where)
    total = len(keys) if keys else left
    how = replace(how, workers=min(how.workers, left))
    tally = Tally()
    problems = ledger.problems()
    others = sorted(problem for problem in problems if not is_rl(problem))
    if len(others) < len(problems):
        tally = _agents(ledger, where, total, how)
        if not others:
            return _said(ledger, keys, tally)
        where = {**(where or {}), "problem": others}
    with (
        _workers(how, None if how.quiet else _note) as workers,
        _terminated_as_interrupted(),  # after Ray, which sees to SIGTERM in its own way
        _progress(total, how.quiet) as on_progress,
    ):
        for do in workers:
            part = do(
                ledger,
                data_dir=how.data_dir,
                device=how.device,
                where=where,
                on_progress=on_progress,
                checkpoint_seconds=how.checkpoint_seconds,
            )
            tally = tally + part
    return _said(ledger, keys, tally)


def _agents(ledger: Ledger, where: dict[str, Any] | None, total: int, how: Work) -> Tally:
    """The part of the work that is reinforcement learning."""
    if how.on != "local":
        if any(is_rl(spec.problem) for spec in ledger.claimable(where)):
            raise ValueError(AGENTS_ARE_LOCAL)
        return Tally()
    workers = how.workers if how.workers > 1 else None
    with _terminated_as_interrupted(), _progress(total, how.quiet) as on_progress:
        return work_agents(
            ledger,
            device=how.device,
            where=where,
            on_progress=on_progress,
            checkpoint_seconds=how.checkpoint_seconds,
            workers=workers if how.agents is None else how.agents,
            on_note=None if how.quiet else _note,
        )


def _said(ledger: Ledger, keys: Sequence[str] | None, tally: Tally) -> Tally:
    """Say what went wrong, also with runs that nobody tried again."""
    if tally.diverged:
        err.print(f"{count(tally.diverged, 'run')} diverged", style="yellow")
    for line in tally.errors:
        text = printable(f"failed: {line}")
        err.print(text, style="red", highlight=False, markup=False, emoji=False, soft_wrap=True)
    mine = None if keys is None else frozenset(keys)
    others = sum(mine is None or lease.key in mine for lease in ledger.leases())
    if others:
        told = "1 run is under way in another process"
        told = told if others == 1 else f"{others} runs are under way in other processes"
        err.print(told, style="yellow")
    return tally + failed_earlier(ledger, mine, tally.failed)


def failed_earlier(ledger: Ledger, keys: Collection[str] | None, now: int = 0) -> Tally:
    """Count runs that failed, among `keys` or in the study, other than `now`; say how to retry."""
    failed = sum(keys is None or run.key in keys for run in ledger.runs(state="failed"))
    tally = Tally(failed_earlier=max(0, failed - now))
    if tally.failed_earlier:
        _note(
            f"{count(tally.failed_earlier, 'run')} failed earlier; "
            f"'upgd resume {printable(ledger.path.parent)} --retry' tries again"
        )
    return tally


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, by which schedulers stop a job, save and give back like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a script's background jobs
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _note(text: str) -> None:
    err.print(text, style="yellow", highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def _workers(
    how: Work, on_note: Callable[[str], None] | None
) -> Iterator[list[Callable[..., Tally]]]:
    """What does the work: this process, or a pool."""
    if how.workers == 0 or (how.on == "local" and how.workers == 1):
        stacks = partial(work_stacks, on_note=on_note)
        # The eager engine takes what the batched one cannot.
        engines: dict[str, list[Callable[..., Tally]]]
        alone = partial(work, on_note=on_note)
        engines = {"auto": [stacks, alone], "batched": [stacks], "eager": [alone]}
        yield engines[how.engine]
        return
    pool = make_pool(how.on, how.workers, how.device)
    try:
        yield [partial(_drive, pool, how.engine, on_note)]
    finally:
        pool.close()


def _drive(
    pool: Pool, engine: str, on_note: Callable[[str], None] | None, ledger: Ledger, **given: Any
) -> Tally:
    return drive(ledger, pool, engine=engine, on_note=on_note, **given)


def end(tally: Tally) -> None:
    """Tell the shell whether something failed, now or earlier."""
    if tally.failed or tally.failed_earlier:
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
            bar.update(
                task,
                completed=done.runs,
                description=_what(progress),
                pace=done.pace(progress),
                latest=_latest(progress),
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
            told = [f"{done.runs:.1f} of {total} runs", done.pace(progress)]
            text = ", ".join([*told, *filter(None, [_returns(progress)])])
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
        found = [f"{short(progress.rate)} steps/s"]
        if progress.share is not None:
            found.append(f"{progress.share:.0%} of the roofline")
        if progress.rate > 0:
            left = max(0.0, self.total - self.runs) * progress.spec.steps / progress.rate
            found.append(f"{clock(left)} left")
        return ", ".join(found)


def _latest(progress: RunProgress) -> str:
    shown = {k: v for k, v in progress.latest.items() if k in ("accuracy", "loss")}
    return " ".join(f"{k} {v:.3f}" for k, v in shown.items()) or _returns(progress)


def _returns(progress: RunProgress) -> str:
    """What agents' recent episodes gave."""
    found = {k: v for k, v in progress.latest.items() if k.startswith("return")}
    return ", ".join(f"{k} {v:.1f}" for k, v in found.items())


def _what(progress: RunProgress) -> str:
    if is_rl(progress.spec.problem):
        name = progress.spec.problem.partition("/")[2]
        return f"{name}: {count(1 + len(progress.others), 'agent')} at step {progress.step}"
    if progress.others:
        return f"{1 + len(progress.others)} runs at step {progress.step}"
    return f"{progress.spec.method} seed {progress.spec.seed}"
