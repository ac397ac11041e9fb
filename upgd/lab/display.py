"""Progress of runs: a live line in a terminal or a notebook, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

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


@contextmanager
def progress(total: int, shown: Any = None) -> Iterator[OnProgress]:
    """Show how far `total` runs are.

    Args:
        total: How many runs.
        shown: Rich's console; None for plain lines.
    """
    if shown is None or not (shown.is_terminal or shown.is_jupyter):
        yield _lines(total, SECONDS_BETWEEN_LINES, note)
        return
    if shown.is_jupyter and find_spec("ipywidgets") is None:  # without it, rich shows nothing
        yield _lines(total, 0.5, lambda text: print(f"\r{text:<100}", end="", file=sys.stderr))
        note("")
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[pace]}  {task.fields[latest]}"),
    )
    with Bars(*columns, console=shown, transient=True) as bar:
        task = bar.add_task("starting", total=float(total), pace="", latest="")
        done = _Done(total)

        def on_progress(progress: Progress) -> None:
            done.add(progress)
            bar.update(
                task,
                completed=done.runs,
                description=_what(progress),
                pace=done.pace(progress),
                latest=_latest(progress),
            )

        yield on_progress


def _lines(total: int, pause: float, write: Callable[[str], None]) -> OnProgress:
    last = time.monotonic()
    done = _Done(total)

    def on_progress(progress: Progress) -> None:
        nonlocal last
        done.add(progress)
        if time.monotonic() - last >= pause:
            last = time.monotonic()
            told = [f"{done.runs:.1f} of {total} runs", done.pace(progress)]
            text = ", ".join([*told, *filter(None, [_returns(progress)])])
            write(f"{_what(progress)}: {text}")

    return on_progress


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
        """Learner-steps per second, the share of the roofline, and the time left at this pace."""
        found = [f"{short(progress.rate)} steps/s"]
        if progress.share is not None:
            found.append(f"{progress.share:.0%} of the roofline")
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
