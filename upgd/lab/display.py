"""Progress of runs: a live line in a terminal or a notebook, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

from upgd.kernels.announcing import listening
from upgd.study.execution import Progress
from upgd.study.kinds import kind_of
from upgd.text import clock, count, short

SECONDS_BETWEEN_LINES = 30.0
OnProgress = Callable[[Progress], None]


def console() -> Any:
    """Rich's console on standard error, or None where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True)


def note(text: str) -> None:
    """Print one line for the user to standard error."""
    print(text, file=sys.stderr)


class Now(NamedTuple):
    """How far runs are at one moment."""

    what: str  # what is under way
    done: float  # runs, in parts too
    total: int  # runs
    pace: str  # steps per second, time left
    latest: str = ""  # recent values, in a live line
    more: str = ""  # what plain lines say as well


@contextmanager
def live(shown: Any = None) -> Iterator[Callable[[Now], None]]:
    """Show what is under way: a bar in a terminal or a notebook, else a line now and then.

    Args:
        shown: Rich's console; None for plain lines.
    """
    if shown is None or not (shown.is_terminal or shown.is_jupyter):
        yield _lines(SECONDS_BETWEEN_LINES, note)
        return
    if shown.is_jupyter and find_spec("ipywidgets") is None:  # without it, rich shows nothing
        yield _lines(0.5, lambda text: print(f"\r{text:<100}", end="", file=sys.stderr))
        note("")
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[pace]}  {task.fields[latest]}"),
    )
    with Bars(*columns, console=shown, transient=True) as bar:
        task = bar.add_task("starting", total=None, pace="", latest="")

        def show(now: Now) -> None:
            bar.update(
                task,
                completed=now.done,
                total=float(now.total),
                description=now.what,
                pace=now.pace,
                latest=now.latest,
            )

        yield show


def _lines(pause: float, write: Callable[[str], None]) -> Callable[[Now], None]:
    last = time.monotonic()

    def show(now: Now) -> None:
        nonlocal last
        if time.monotonic() - last >= pause:
            last = time.monotonic()
            told = [f"{now.done:.1f} of {now.total} runs", now.pace, now.more]
            write(f"{now.what}: {', '.join(filter(None, told))}")

    return show


@contextmanager
def progress(total: int, shown: Any = None) -> Iterator[OnProgress]:
    """Show how far `total` runs of a study are.

    Args:
        total: How many runs.
        shown: Rich's console; None for plain lines.
    """
    done, kernels = _Done(total), 0
    with live(shown) as show:

        def on_kernel(name: str) -> None:
            nonlocal kernels
            kernels += 1
            show(Now(f"compiling, once: kernel {kernels}, {name}", done.runs, total, ""))

        def on_progress(progress: Progress) -> None:
            done.add(progress)
            pace, latest = done.pace(progress), _latest(progress)
            show(Now(_what(progress), done.runs, total, pace, latest, _returns(progress)))

        with listening(on_kernel):
            yield on_progress


class _Done:
    """How much of some runs is done, and how fast the rest will be."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._parts: dict[str, float] = {}

    def add(self, progress: Progress) -> None:
        for each in (progress.spec, *progress.others):
            self._parts[each.key] = progress.step / each.steps

    @property
    def runs(self) -> float:
        """How many, in parts too."""
        return sum(self._parts.values())

    def pace(self, progress: Progress) -> str:
        """Learner-steps per second, their share of the possible ones, and the time left."""
        found = [f"{short(progress.rate)} steps/s"]
        if progress.share is not None:
            found.append(f"{progress.share:.0%} of what memory bandwidth allows")
        if progress.rate > 0:
            left = max(0.0, self.total - self.runs) * progress.spec.steps / progress.rate
            found.append(f"{clock(left)} left")
        return ", ".join(found)


def _latest(progress: Progress) -> str:
    shown = {k: v for k, v in progress.latest.items() if k in ("accuracy", "loss")}
    return " ".join(f"{k} {v:.3f}" for k, v in shown.items()) or _returns(progress)


def _returns(progress: Progress) -> str:
    """The mean returns of agents' recent episodes."""
    found = {k: v for k, v in progress.latest.items() if k.startswith("return")}
    return ", ".join(f"{k} {v:.1f}" for k, v in found.items())


def _what(progress: Progress) -> str:
    """What a report is about: one run, or runs that advance together."""
    spec, together = progress.spec, 1 + len(progress.others)
    noun = kind_of(spec.problem).noun
    if noun == "run" and together == 1:
        return f"{spec.name} seed {spec.seed}"
    where = f"{spec.problem.partition('/')[2]}: " if "/" in spec.problem else ""
    return f"{where}{count(together, noun)} at step {progress.step}"
