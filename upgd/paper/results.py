"""Results of an experiment: series of window means by metric, arm and seed.

They come from a ledger, at whatever scale it has, or from a compact table (``series.csv.gz``), as
the committed ones do.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import rewindow
from upgd.paper.experiments import EXPERIMENTS, Experiment
from upgd.paper.searches import SEEDS_OF_SEARCHES
from upgd.rl.runs import is_rl
from upgd.study import Ledger, Run, RunSpec
from upgd.study.files import write_atomically
from upgd.study.spec import MEASURING

Array = NDArray[np.float64]
TABLE = "series.csv.gz"
DIGITS = 5
DIVERGED = "diverged"
"""In place of a number of samples."""


@dataclass(frozen=True)
class Results:
    """What an experiment's runs measured.

    Attributes:
        name: The experiment's.
        window: Samples per value.
        series: By metric, arm and seed, a value per window.
        diverged: By arm, seeds that diverged. Agents' series end before that window, others have
            none.
    """

    name: str
    window: int
    series: Mapping[str, Mapping[str, Mapping[int, Array]]]
    diverged: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def of(self, arm: str, metric: str) -> Mapping[int, Array]:
        """An arm's series by seed; empty if there is none."""
        return self.series.get(metric, {}).get(arm, {})

    def by_task(self, arm: str, metric: str) -> Mapping[int, Array]:
        """The same with a value per task, where windows are shorter than tasks."""
        factor = self.task_window // self.window
        found = self.of(arm, metric)
        return {seed: rewindow(x, factor) for seed, x in found.items()} if factor > 1 else found

    @property
    def task_window(self) -> int:
        """Samples per value of :meth:`by_task`: a task, or a window that is longer."""
        options = EXPERIMENTS[self.name].options if self.name in EXPERIMENTS else {}
        return max(self.window, int(options.get("task_length", 0)))

    @property
    def arms(self) -> tuple[str, ...]:
        """Those that have results."""
        return tuple(dict.fromkeys(arm for arms in self.series.values() for arm in arms))


class Found(NamedTuple):
    """A run of an experiment, done or diverged, and the ledger that has it."""

    arm: str
    run: Run
    ledger: Ledger


def find(
    ledgers: Iterable[Ledger], experiment: Experiment, steps: int | None = None
) -> list[Found]:
    """What ledgers have of an experiment, one run per arm and seed.

    Of several lengths it is `steps`, if there are runs of it; otherwise the longest that most arms
    have: a single run that is longer hides no others, and neither do many short ones.

    A run counts if its problem, method, hyperparameters and options are an arm's. Options that only
    measure (:data:`MEASURING`) do not matter: a run without them lacks those series, and one with
    more of them is preferred. Seeds of searches do not count: their sets were chosen by them.
    """
    firsts = {arm: spec for arm, [spec] in experiment.specs(seeds=1).items()}
    known = {
        _learner(firsts[arm.name]): arm.name
        for arm in reversed(experiment.arms)  # of twins the first stays
    }
    found: dict[int, dict[tuple[str, int], Found]] = {}
    for ledger in ledgers:
        for run in ledger.runs(problem=experiment.problem):
            spec = run.spec
            arm = known.get(_learner(spec))
            if arm is None or run.result is None or spec.seed in SEEDS_OF_SEARCHES:
                continue
            same = found.setdefault(spec.steps, {})
            other = same.get((arm, spec.seed))
            if other is None or len(spec.options) > len(other.run.spec.options):
                same[arm, spec.seed] = Found(arm, run, ledger)
    if steps in found:
        return list(found[steps].values())
    arms = {n: {f.arm for f in runs.values() if _counts(f.run)} for n, runs in found.items()}
    best = max(arms, key=lambda n: (len(arms[n]), n), default=0)
    return list(found[best].values()) if arms.get(best) else []


def lacking(specs: Sequence[RunSpec], known: Iterable[Run]) -> list[RunSpec]:
    """Those for which nothing stands in: a run that is over, or a spec that measures more.

    That is the same learner with the same seed and length, and all that is to be measured.

    Example:
        >>> plain = RunSpec("p", "upgd", {"lr": 0.1}, 0, 100)
        >>> more = RunSpec("p", "upgd", {"lr": 0.1}, 0, 100, {"stride": 10})
        >>> lacking([plain, more], []) == [more]
        True
    """
    over: dict[Any, list[Mapping[str, Any]]] = {}
    for run in known:
        if run.result is not None:
            over.setdefault(_task(run.spec), []).append(run.spec.options)
    wanted: dict[Any, list[Mapping[str, Any]]] = {}
    for spec in specs:
        wanted.setdefault(_task(spec), []).append(spec.options)

    def is_there(spec: RunSpec) -> bool:
        task, options = _task(spec), spec.options
        more = (other for other in wanted[task] if len(other) > len(options))
        return any(_measures(other, options) for other in (*over.get(task, ()), *more))

    return [spec for spec in specs if not is_there(spec)]


def _task(spec: RunSpec) -> Any:
    return spec.problem, spec.seed, spec.steps, *_learner(spec)


def _measures(options: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a run with these options measures all that is wanted."""
    return all(options.get(name) == wanted[name] for name in MEASURING.intersection(wanted))


def _counts(run: Run) -> bool:
    """Whether a run has results: it is done, or an agent, whose divergence is one."""
    return run.state == "done" or (run.state == "diverged" and is_rl(run.spec.problem))


def collect(ledger: Ledger, experiment: Experiment) -> Results | None:
    """The results of what :func:`find` finds in a ledger; None if there is nothing."""
    return gather(find([ledger], experiment), experiment.name)


def gather(found: Iterable[Found], name: str) -> Results | None:
    """The series of the runs that are done, and of agents that diverged.

    Which of the others diverged is known, too; None if there is nothing.
    """
    runs: dict[Ledger, dict[str, Found]] = {}
    diverged: dict[str, list[int]] = {}
    for each in found:
        if each.run.state == "diverged":
            diverged.setdefault(each.arm, []).append(each.run.spec.seed)
        if _counts(each.run):
            runs.setdefault(each.ledger, {})[each.run.key] = each
    series: dict[str, dict[str, dict[int, Array]]] = {}
    window = 0
    for ledger, some in runs.items():
        for kept in ledger.each_series(keys=list(some)):
            arm, run, _ = some[kept.key]
            values = kept.values[: _windows(run, kept.window)].astype(float)
            series.setdefault(kept.metric, {}).setdefault(arm, {})[run.spec.seed] = values
            window = kept.window if kept.metric != "offline_accuracy" else window or kept.window
    return Results(name, window, series, diverged) if runs or diverged else None


def joined(table: Results, more: Results) -> Results:
    """A table with runs that it lacks.

    Raises:
        ValueError: Their windows have other lengths.
    """
    if table.window and more.window and table.window != more.window:  # 0 where all diverged
        windows = f"windows of {table.window} and of {more.window} samples"
        raise ValueError(f"{table.name}: {windows} do not go together")
    series = {
        metric: {
            arm: {**table.of(arm, metric), **more.of(arm, metric)}
            for arm in dict.fromkeys((*table.series.get(metric, {}), *more.series.get(metric, {})))
        }
        for metric in dict.fromkeys((*table.series, *more.series))
    }
    arms = dict.fromkeys((*table.diverged, *more.diverged))
    diverged = {a: [*table.diverged.get(a, ()), *more.diverged.get(a, ())] for a in arms}
    return Results(table.name, table.window or more.window, series, diverged)


def _windows(run: Run, window: int) -> int | None:
    """How many windows of a run count: those before it diverged; None for all."""
    end = None if run.result is None else run.result.diverged_at
    return None if end is None else (end - 1) // window


def _learner(spec: RunSpec) -> Any:
    """What makes two runs of an experiment the same but for their seeds and lengths."""
    rest = tuple((name, value) for name, value in spec.options.items() if name not in MEASURING)
    return spec.method, tuple(spec.hyper.items()), rest, tuple(spec.sources.items())


# ------------------------------------------------------------------------------ tables
def folder_name(experiment: str) -> str:
    """That of an experiment's table."""
    return experiment.replace("-", "_")


def write(results: Results, path: str | os.PathLike[str]) -> None:
    """Write a table: a row per arm, seed and window, a column per metric.

    After those of a run that diverged comes one that says so.
    """
    metrics = sorted(results.series)
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["arm", "seed", "samples", *metrics])
    for arm in dict.fromkeys((*results.arms, *results.diverged)):
        gone = results.diverged.get(arm, ())
        seeds = {seed for metric in metrics for seed in results.of(arm, metric)}
        for seed in sorted(seeds.union(gone)):
            columns = [results.of(arm, metric).get(seed, np.zeros(0)) for metric in metrics]
            for k in range(max(map(len, columns), default=0)):
                cells = [_cell(column[k]) if k < len(column) else "" for column in columns]
                out.writerow([arm, seed, (k + 1) * results.window, *cells])
            if seed in gone:
                out.writerow([arm, seed, DIVERGED, *[""] * len(metrics)])
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:  # the same bytes every time
        file.write(text.getvalue().encode())
    write_atomically(Path(path), buffer.getvalue())


def _cell(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.{DIGITS}g}"


def read(path: str | os.PathLike[str], name: str) -> Results:
    """Read a table that :func:`write` wrote.

    Raises:
        ValueError: It is none, or broken.
    """
    header, *rows = table_rows(path)
    if header[:3] != ["arm", "seed", "samples"]:
        raise ValueError(f"{path} is no table of results: it begins with {','.join(header)}")
    try:
        return _parse(rows, header[3:], name)
    except ValueError as error:
        raise ValueError(f"{path} is no table of results: {error}") from None


def table_rows(path: str | os.PathLike[str]) -> list[list[str]]:
    """The rows of a compressed table, with its header.

    Raises:
        ValueError: It is broken, or empty.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is broken: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


def _parse(rows: Iterable[list[str]], metrics: list[str], name: str) -> Results:
    tables: dict[tuple[str, int], list[list[float]]] = {}
    diverged: dict[str, list[int]] = {}
    window = 0
    for arm, seed, samples, *cells in rows:
        if samples == DIVERGED:
            diverged.setdefault(arm, []).append(int(seed))
            continue
        window = window or int(samples)
        values = [float(cell) if cell else float("nan") for cell in cells]
        tables.setdefault((arm, int(seed)), []).append(values)
    series: dict[str, dict[str, dict[int, Array]]] = {}
    for (arm, number), table in tables.items():
        for metric, column in zip(metrics, np.array(table).T, strict=True):
            if not np.isnan(column).all():
                series.setdefault(metric, {}).setdefault(arm, {})[number] = column
    return Results(name, window, series, diverged)


def load(places: Iterable[str | os.PathLike[str]]) -> dict[str, Results]:
    """Results of all experiments found in studies' folders, or in folders of tables."""
    found: dict[str, Results] = {}
    for place in map(Path, places):
        for path in sorted(place.rglob(TABLE)):
            name = path.parent.name.replace("_", "-")
            if name in EXPERIMENTS:
                found[name] = read(path, name)
        for path in sorted(place.rglob("ledger.sqlite")):
            with Ledger.open(path.parent, create=False, read_only=True) as ledger:
                for name, experiment in EXPERIMENTS.items():
                    results = collect(ledger, experiment)
                    if results is not None:
                        found[name] = results
    return found
