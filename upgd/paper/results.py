"""Results of an experiment: series of window means by metric, arm and seed.

They come from a ledger, at whatever scale it has, or from a compact table (``series.csv.gz``), as
the committed ones do.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import rewindow
from upgd.paper.experiments import EXPERIMENTS, Experiment
from upgd.paper.searches import SEEDS_OF_SEARCHES
from upgd.study import Ledger, Run
from upgd.study.files import write_atomically

Array = NDArray[np.float64]
TABLE = "series.csv.gz"
DIGITS = 5
MEASURING = frozenset({"stride", "held_out"})
"""Options that change what is measured and nothing else."""


@dataclass(frozen=True)
class Results:
    """What an experiment's runs measured.

    Attributes:
        name: The experiment's.
        window: Samples per value.
        series: By metric, arm and seed, a value per window.
    """

    name: str
    window: int
    series: Mapping[str, Mapping[str, Mapping[int, Array]]]

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


def find(ledgers: Iterable[Ledger], experiment: Experiment) -> list[Found]:
    """What ledgers have of an experiment: its longest runs, one per arm and seed.

    A run counts if its problem, method, hyperparameters and options are an arm's. Options that only
    measure (:data:`MEASURING`) do not matter: a run without them lacks those series, and one with
    more of them is preferred. Seeds of searches do not count: their sets were chosen by them.
    """
    known = {
        _learner(arm.method, arm.hyper, {**experiment.options, **arm.options}): arm.name
        for arm in reversed(experiment.arms)  # of twins the first stays
    }
    found: dict[int, dict[tuple[str, int], Found]] = {}
    for ledger in ledgers:
        for run in ledger.runs(problem=experiment.problem):
            spec = run.spec
            arm = known.get(_learner(spec.method, spec.hyper, spec.options))
            if arm is None or run.result is None or spec.seed in SEEDS_OF_SEARCHES:
                continue
            same = found.setdefault(spec.steps, {})
            other = same.get((arm, spec.seed))
            if other is None or len(spec.options) > len(other.run.spec.options):
                same[arm, spec.seed] = Found(arm, run, ledger)
    done = [n for n, runs in found.items() if any(f.run.state == "done" for f in runs.values())]
    return list(found[max(done)].values()) if done else []


def collect(ledger: Ledger, experiment: Experiment) -> Results | None:
    """The results of what :func:`find` finds in a ledger; None if there is nothing."""
    return gather(find([ledger], experiment), experiment.name)


def gather(found: Iterable[Found], name: str) -> Results | None:
    """The series of the runs that are done; None if there are none."""
    runs: dict[Ledger, dict[str, tuple[str, int]]] = {}
    for arm, run, ledger in found:
        if run.state == "done":
            runs.setdefault(ledger, {})[run.key] = arm, run.spec.seed
    series: dict[str, dict[str, dict[int, Array]]] = {}
    window = 0
    for ledger, some in runs.items():
        for kept in ledger.each_series(keys=list(some)):
            arm, seed = some[kept.key]
            series.setdefault(kept.metric, {}).setdefault(arm, {})[seed] = kept.values.astype(float)
            window = kept.window if kept.metric != "offline_accuracy" else window or kept.window
    return Results(name, window, series) if runs else None


def _learner(method: str, hyper: Mapping[str, float], options: Mapping[str, Any]) -> Any:
    """What makes two runs of an experiment the same but for their seeds and lengths."""
    rest = {name: value for name, value in options.items() if name not in MEASURING}
    numbers = {name: float(value) for name, value in hyper.items()}
    return method, tuple(sorted(numbers.items())), tuple(sorted(rest.items()))


# ------------------------------------------------------------------------------ tables
def write(results: Results, path: str | os.PathLike[str]) -> None:
    """Write a table: a row per arm, seed and window, a column per metric."""
    metrics = sorted(results.series)
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["arm", "seed", "samples", *metrics])
    for arm in results.arms:
        seeds = sorted({seed for metric in metrics for seed in results.of(arm, metric)})
        for seed in seeds:
            columns = [results.of(arm, metric).get(seed, np.zeros(0)) for metric in metrics]
            for k in range(max(map(len, columns))):
                cells = [_cell(column[k]) if k < len(column) else "" for column in columns]
                out.writerow([arm, seed, (k + 1) * results.window, *cells])
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:  # the same bytes every time
        file.write(text.getvalue().encode())
    write_atomically(Path(path), buffer.getvalue())


def _cell(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.{DIGITS}g}"


def read(path: str | os.PathLike[str], name: str) -> Results:
    """Read a table that :func:`write` wrote."""
    with gzip.open(path, "rt", newline="") as file:
        rows = csv.reader(file)
        header = next(rows)
        if header[:3] != ["arm", "seed", "samples"]:
            raise ValueError(f"{path} is no table of results: it begins with {','.join(header)}")
        return _parse(rows, header[3:], name)


def _parse(rows: Iterable[list[str]], metrics: list[str], name: str) -> Results:
    tables: dict[tuple[str, int], list[list[float]]] = {}
    window = 0
    for arm, seed, samples, *cells in rows:
        window = window or int(samples)
        values = [float(cell) if cell else float("nan") for cell in cells]
        tables.setdefault((arm, int(seed)), []).append(values)
    series: dict[str, dict[str, dict[int, Array]]] = {}
    for (arm, number), table in tables.items():
        for metric, column in zip(metrics, np.array(table).T, strict=True):
            if not np.isnan(column).all():
                series.setdefault(metric, {}).setdefault(arm, {})[number] = column
    return Results(name, window, series)


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
