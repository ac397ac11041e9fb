"""``upgd learn``: a learner for a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from upgd.cli import options as o
from upgd.cli.app import command, err, out, say, warn
from upgd.cli.arguments import whole
from upgd.text import count, duration, short

if TYPE_CHECKING:
    from upgd.pipe.task import Progress

INPUT: Any = partial(Option, rich_help_panel="Input")
LEARNER: Any = partial(Option, rich_help_panel="Learner")
SECONDS_BETWEEN_LINES, SECONDS_OF_PACE = 30.0, 10.0
_NAMED = ("small", "medium", "large")


@command(
    interrupted="what was saved is whole, and the same command continues from there",
    examples=(
        "upgd learn --target price --state prices.upgd < stream.csv",
        "upgd learn log.csv --target class --classify --predict predicted.csv",
    ),
)
def learn(
    files: Annotated[
        list[str] | None, Argument(help="CSV or JSON lines; default, or -: standard input.")
    ] = None,
    target: Annotated[str, Option(help="The column to learn.")] = "",
    classify: Annotated[
        bool, Option("--classify", help="The target is a class; default: guessed.")
    ] = False,
    regress: Annotated[
        bool, Option("--regress", help="The target is a number; default: guessed.")
    ] = False,
    format: Annotated[str, INPUT(help="csv or jsonl; default: guessed.")] = "",
    delimiter: Annotated[str, INPUT(help="Of CSV, such as ';' or tab; default: guessed.")] = "",
    columns: Annotated[str, INPUT(help="Names for CSV without a header, such as a,b,y.")] = "",
    ignore: Annotated[
        list[str] | None, INPUT(help="A column not to learn from. Repeatable.")
    ] = None,
    network: Annotated[
        str, LEARNER(help="small, medium or large, or hidden units such as 64-32, or none.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        LEARNER("--set", help="A parameter of the learner, such as horizon=500. Repeatable."),
    ] = None,
    state: Annotated[
        str | None, LEARNER(help="The learner's file; if it is there, learning goes on from it.")
    ] = None,
    save_every: Annotated[
        str, LEARNER(help="Samples after which the state is saved; also every minute.")
    ] = "10000",
    predict: Annotated[
        str | None,
        o.OUTPUT(help="A file, or -: predictions made before each row was learned, as CSV."),
    ] = None,
    bad: Annotated[str, INPUT(help="What to do with bad lines: skip or refuse.")] = "skip",
    bad_file: Annotated[str | None, INPUT(help="A file that keeps bad lines.")] = None,
    skip_seen: Annotated[
        bool,
        INPUT("--skip-seen", help="Skip records that the state has seen: the pipe starts again."),
    ] = False,
    complete: Annotated[
        bool,
        INPUT("--complete", help="With --state: learn a file's last line even without a newline."),
    ] = False,
    quiet: o.QUIET = False,
    as_json: o.JSON = False,
) -> None:
    """Learn from CSV or JSON lines as they come, predicting each first.

    Reports how good predictions were. With --state nothing learned is lost: the same command goes
    on where a killed one was. Rows without a target are predicted only.
    """
    from upgd.pipe.parameters import parse_parameters
    from upgd.pipe.pipe import Pipe
    from upgd.pipe.task import Task
    from upgd.study.prepare import units

    if classify and regress:
        raise ValueError("--classify and --regress exclude each other; give one of them")
    if bad not in ("skip", "refuse"):
        raise ValueError(f"--bad is skip or refuse, got {bad!r}")
    if as_json and predict == "-":
        raise ValueError("--json and --predict - both write to standard output; give a file")
    if target == "" and state is None:
        raise ValueError("name the column to learn: --target COLUMN")
    parameters = parse_parameters(settings or [])
    if network:
        parameters["network"] = network if network in _NAMED else tuple(units(network))
    elif parameters.keys() & {"optimizer", "hyper"} and state is None:
        raise ValueError(
            "an optimizer and its hyperparameters are those of one network; give its hidden units, "
            "such as --network 128"
        )
    task = Task(
        files=files or ["-"], target=target, ignore=ignore, format=format, columns=_names(columns),
        kind="classify" if classify else "regress" if regress else "",
        delimiter="\t" if delimiter in ("tab", "\\t") else delimiter, parameters=parameters,
        state=state, save_every=whole("--save-every", save_every), predict=predict,
        refuse=bad == "refuse", bad_file=bad_file, skip_seen=skip_seen,
        complete=complete,
    )  # fmt: skip
    if task.files == ["-"] and sys.stdin is not None and sys.stdin.isatty():
        warn("reads from the terminal; end with Ctrl-D")
    with _progress(quiet, is_plain=predict == "-") as show:
        pipe = Pipe(task, (lambda text: None) if quiet else warn, show)
        facts = pipe.run()
    if as_json:
        print(json.dumps(facts))
    elif not quiet:
        _summarise(facts, predict == "-")
    if pipe.signal is not None:
        raise Exit(128 + pipe.signal)


def _names(columns: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in columns.split(",")) if columns else ()


@contextmanager
def _progress(quiet: bool, is_plain: bool) -> Iterator[Callable[[Progress], None]]:
    """A line that changes in a terminal, else a line now and then."""
    if quiet:
        yield lambda progress: None
        return
    pace = Pace()
    if not err.is_terminal or (is_plain and sys.stdout.isatty()):
        last = time.monotonic()

        def show(progress: Progress) -> None:
            nonlocal last
            line = _line(progress, pace(progress))
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                say(line, err)

        yield show
        return
    from rich.progress import Progress as Bars
    from rich.progress import SpinnerColumn, TextColumn

    text = TextColumn("{task.description}", markup=False)
    with Bars(SpinnerColumn(), text, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda progress: bar.update(task, description=_line(progress, pace(progress)))


class Pace:
    """Samples per second, over the last ten seconds or so."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, int]] = deque([(0.0, 0)])

    def __call__(self, progress: Progress) -> float:
        """The pace now."""
        past, now = self._past, (progress.seconds, progress.counts.learned)
        if now[0] - past[-1][0] > 0.1:
            past.append(now)
        while len(past) > 1 and now[0] - past[1][0] >= SECONDS_OF_PACE:
            past.popleft()
        return (now[1] - past[0][1]) / max(now[0] - past[0][0], 1e-9)


def _line(progress: Progress, pace: float) -> str:
    counts = progress.counts
    parts = [f"{short(counts.learned)} samples, {short(pace)}/s", *_quality(progress.errors)]
    if counts.bad:
        parts.append(count(counts.bad, "bad line"))
    if progress.is_waiting:
        parts.append("waiting")
    return ", ".join(parts)


def _quality(facts: dict[str, Any]) -> Iterator[str]:
    """How good predictions were."""
    for name, told in (("accuracy", "accuracy"), ("mean_absolute_error", "mean absolute error")):
        if name in facts:
            yield f"{told} {facts[name]:.4g} (last 1000: {facts['recent_' + name]:.4g})"


def _summarise(facts: dict[str, Any], to_errors: bool) -> None:
    console = err if to_errors else out
    pace = facts["samples_per_second"] or 0.0
    learned = count(facts["learned"], "sample")
    say(f"learned {learned} in {duration(facts['seconds'])} ({short(pace)}/s)", console)
    quality = list(_quality(facts))
    if quality:
        earlier = facts["samples_learned"] - facts["learned"]
        since = f", with {earlier} of earlier runs" if earlier else ""
        say(f"before learning each: {quality[0]}{since}", console)
    if facts["predicted"]:
        say(f"predicted without a target: {facts['predicted']}", console)
    if facts["bad"]:
        say(f"skipped: {count(facts['bad'], 'bad line')}", console)
    if facts["signal"]:
        if facts["state"] is None:
            way_out = "nothing was saved; --state FILE keeps what is learned"
        else:
            way_out = f"{facts['state']} is saved, and the same command goes on from there"
        warn(f"ended by {facts['signal']}; {way_out}")
