"""Results of an experiment: series of window means by metric, arm and seed.

They are read from a ledger, at any scale, or from a compact table (``series.csv.gz``), such as the
committed ones.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.ledger import Ledger, Run, RunSpec
from upgd.ledger.files import write_atomically
from upgd.ledger.spec import MEASURING
from upgd.metrics import DIAGNOSTICS, STRIDED, rewindow
from upgd.paper.experiments import EXPERIMENTS, Experiment
from upgd.paper.searches import SEEDS_OF_SEARCHES
from upgd.study.kinds import kind_of

Array = NDArray[np.float64]
TABLE = "series.csv.gz"
DIGITS = 5
DIVERGED = "diverged"
"""Stands for a number of samples."""


@dataclass(frozen=True)
class Results:
    """The measurements of an experiment's runs."""

    name: str
    window: int  # samples per value
    series: Mapping[str, Mapping[str, Mapping[int, Array]]]  # by metric, arm and seed
    # By arm, seeds. Series of diverged agents end before that window, others have none.
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
        """Arms that have results."""
        return tuple(dict.fromkeys(arm for arms in self.series.values() for arm in arms))


class Found(NamedTuple):
    """A run of an experiment, done or diverged, and the ledger that has it."""

    arm: str
    run: Run
    ledger: Ledger


def find(
    ledgers: Iterable[Ledger], experiment: Experiment, steps: int | None = None
) -> list[Found]:
    """The runs of an experiment in some ledgers, one per arm and seed.

    If runs have several lengths, `steps` is chosen if there are such runs, otherwise the longest
    length that most arms have: neither a single longer run nor many short ones hide the others.

    A run counts if its problem, method, hyperparameters and options are an arm's. Options that only
    measure (:data:`MEASURING`) are ignored: a run without them lacks those series, and one with
    current diagnostics, or with more of them, is preferred. Seeds of searches do not count: they
    were used to choose the sets.
    """
    known: dict[Any, str] = {}
    for arm, [spec] in experiment.specs(seeds=1).items():
        known.setdefault(_learner(spec), arm)  # of equal arms, keep the first
    found: dict[int, dict[tuple[str, int], Found]] = {}
    for ledger in ledgers:
        for run in ledger.runs(problem=experiment.problem):
            spec, name = run.spec, known.get(_learner(run.spec))
            if name is None or run.result is None or spec.seed in SEEDS_OF_SEARCHES:
                continue
            same = found.setdefault(spec.steps, {})
            other = same.get((name, spec.seed))
            if other is None or _measured(spec) > _measured(other.run.spec):
                same[name, spec.seed] = Found(name, run, ledger)
    if steps in found:
        return list(found[steps].values())
    arms = {n: {f.arm for f in runs.values() if _counts(f.run)} for n, runs in found.items()}
    best = max(arms, key=lambda n: (len(arms[n]), n), default=0)
    return list(found[best].values()) if arms.get(best) else []


def lacking(specs: Sequence[RunSpec], known: Iterable[Run]) -> list[RunSpec]:
    """The specs that neither a finished run nor a spec that measures more can replace.

    A replacement is the same learner with the same seed and length and at least the same metrics.

    Example:
        >>> plain = RunSpec("p", "upgd", {"lr": 0.1}, 0, 100)
        >>> more = RunSpec("p", "upgd", {"lr": 0.1}, 0, 100, {"stride": 10})
        >>> lacking([plain, more], []) == [more]
        True
    """
    over: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    wanted: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for run in known:
        if run.result is not None:
            over[_task(run.spec)].append(run.spec.options)
    for spec in specs:
        wanted[_task(spec)].append(spec.options)

    def is_there(spec: RunSpec) -> bool:
        task, options = _task(spec), spec.options
        more = (other for other in wanted[task] if len(other) > len(options))
        measured = MEASURING.intersection(options)
        return any(all(o.get(m) == options[m] for m in measured) for o in (*over[task], *more))

    return [spec for spec in specs if not is_there(spec)]


def is_diagnosed(spec: RunSpec) -> bool:
    """Whether a run measures diagnostics (:data:`STRIDED`) by their current definition."""
    return spec.options.get("diagnostics") == DIAGNOSTICS


def _measured(spec: RunSpec) -> tuple[bool, int]:
    """How much a run measures, for comparison."""
    return is_diagnosed(spec), len(spec.options)


def _task(spec: RunSpec) -> Any:
    return spec.problem, spec.seed, spec.steps, *_learner(spec)


def _counts(run: Run) -> bool:
    """Whether a run has results: it is done, or an agent, whose divergence is one."""
    if run.state == "diverged":
        return kind_of(run.spec.problem).diverged_counts
    return run.state == "done"


def collect(ledger: Ledger, experiment: Experiment) -> Results | None:
    """The results of what :func:`find` finds in a ledger; None if there is nothing."""
    return gather(find([ledger], experiment), experiment.name)


def gather(found: Iterable[Found], name: str) -> Results | None:
    """The series of finished runs and of diverged agents, and which runs diverged; or None.

    Diagnostics of an older definition are left out.
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
            if kept.metric in STRIDED and not is_diagnosed(run.spec):
                continue
            end = None if run.result is None else run.result.diverged_at
            whole = None if end is None else (end - 1) // kept.window  # windows before that
            values = kept.values[:whole].astype(float)
            series.setdefault(kept.metric, {}).setdefault(arm, {})[run.spec.seed] = values
            window = kept.window if kept.metric != "offline_accuracy" else window or kept.window
    return Results(name, window, series, diverged) if runs or diverged else None


def without(table: Results, metrics: Iterable[str]) -> Results:
    """A table without some metrics."""
    left = {name: table.series[name] for name in table.series if name not in set(metrics)}
    return replace(table, series=left)


def joined(table: Results, more: Results) -> Results:
    """A table with additional runs, which replace its own of the same arms and seeds.

    Raises ValueError if their windows have other lengths.
    """
    if table.window and more.window and table.window != more.window:  # 0 where all diverged
        windows = f"windows of {table.window} and of {more.window} samples"
        raise ValueError(f"{table.name}: {windows} do not go together")
    gone = {arm: set(seeds) for arm, seeds in more.diverged.items()}
    series: dict[str, dict[str, dict[int, Array]]] = {}
    for metric in dict.fromkeys((*table.series, *more.series)):
        for arm in dict.fromkeys((*table.series.get(metric, {}), *more.series.get(metric, {}))):
            old = table.of(arm, metric)
            left = {seed: old[seed] for seed in old if seed not in gone.get(arm, ())}
            if both := {**left, **more.of(arm, metric)}:
                series.setdefault(metric, {})[arm] = both
    diverged = {}
    for arm in dict.fromkeys((*table.diverged, *more.diverged)):
        done = {seed for metric in more.series for seed in more.of(arm, metric)}
        if seeds := (set(table.diverged.get(arm, ())) - done) | gone.get(arm, set()):
            diverged[arm] = sorted(seeds)
    return Results(table.name, table.window or more.window, series, diverged)


def _learner(spec: RunSpec) -> Any:
    """The identity of a run without its seed and length."""
    rest = tuple((name, value) for name, value in spec.options.items() if name not in MEASURING)
    return spec.method, tuple(spec.hyper.items()), rest, tuple(spec.sources.items())


# ------------------------------------------------------------------------------ tables
def folder_name(experiment: str) -> str:
    """The folder of an experiment's table."""
    return experiment.replace("-", "_")


def write(results: Results, path: str | os.PathLike[str]) -> None:
    """Write a table: a row per arm, seed and window (and divergence), a column per metric."""
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
    write_atomically(path, buffer.getvalue())


def _cell(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.{DIGITS}g}"


def read(path: str | os.PathLike[str], name: str) -> Results:
    """Read a table that :func:`write` wrote; ValueError if it is not a table, or broken."""
    first, *lines = _text(path).splitlines()
    header = first.split(",")
    if header[:3] != ["arm", "seed", "samples"]:
        raise ValueError(f"{path} is not a table of results: it begins with {first}")
    try:
        return _parse(lines, header[3:], name)
    except ValueError as error:
        raise ValueError(f"{path} is not a table of results: {error}") from None


def table_rows(path: str | os.PathLike[str]) -> list[list[str]]:
    """The rows of a compressed table, with its header; ValueError if it is broken or empty."""
    try:
        return list(csv.reader(io.StringIO(_text(path), newline="")))
    except csv.Error as error:
        raise ValueError(f"{path} is broken: {error}") from None


def _text(path: str | os.PathLike[str]) -> str:
    """A compressed text; ValueError if it is broken or empty."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            text = file.read()
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is broken: {error}") from None
    if not text:
        raise ValueError(f"{path} is empty")
    return text


def _parse(lines: Iterable[str], metrics: list[str], name: str) -> Results:
    tables: dict[tuple[str, str], list[str]] = {}
    diverged: dict[str, list[int]] = {}
    window = 0
    for line in lines:
        arm, seed, samples, cells = line.split(",", 3)
        if samples == DIVERGED:
            diverged.setdefault(arm, []).append(int(seed))
            continue
        window = window or int(samples)
        tables.setdefault((arm, seed), []).append(cells)
    series: dict[str, dict[str, dict[int, Array]]] = {}
    for (arm, seed), rows in tables.items():
        for metric, column in zip(metrics, _columns(rows, len(metrics)), strict=True):
            if not np.isnan(column).all():
                series.setdefault(metric, {}).setdefault(arm, {})[int(seed)] = column
    return Results(name, window, series, diverged)


def _columns(rows: Sequence[str], count: int) -> Array:
    """Columns of numbers, one a row of the result; empty cells are NaN."""
    if any(row.count(",") != count - 1 for row in rows):
        raise ValueError("a row has more cells than the header, or fewer")
    text = f",{','.join(rows)},".replace(",,", ",nan,").replace(",,", ",nan,")
    values = np.fromstring(text[1:-1], sep=",")  # ends at the first cell that is no number
    if values.size != len(rows) * count:
        raise ValueError("a cell is not a number")
    return np.ascontiguousarray(values.reshape(-1, count).T)
