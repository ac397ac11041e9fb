"""Tables for other programs."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from upgd.ledger.files import write_atomically
from upgd.ledger.records import Run

if TYPE_CHECKING:
    from upgd.ledger.ledger import Ledger

FIRST = ("key", "problem", "method", "seed", "steps", "rules", "state", "attempts", "error")
LAST = ("engine", "device", "dtype", "started", "finished", "wall", "diverged_at")

Target = str | os.PathLike[str] | TextIO


def runs_csv(runs: Iterable[Run], target: Target) -> int:
    """Write one row per run and return how many.

    Hyperparameters, options and final metrics have a column each, called ``hyper.lr``,
    ``option.batch``, ``summary.accuracy``; a cell is empty where a run has no such value. Numbers
    are written exactly. Methods have the names that people use; the last column, ``spec``, is the
    whole specification as JSON. A path is written atomically.
    """
    rows = [_row(run) for run in runs]
    extra = {name for row in rows for name in row if "." in name}
    groups = [sorted(n for n in extra if n.startswith(g)) for g in ("hyper.", "option.")]
    metrics = sorted(n for n in extra if n.startswith("summary."))
    columns = [*FIRST, *groups[0], *groups[1], *LAST, *metrics, "spec"]
    _write(target, columns, (_line(row.get(name) for name in columns) for row in rows))
    return len(rows)


def series_csv(
    ledger: Ledger, runs: Iterable[Run], target: Target, metrics: Collection[str] | None = None
) -> int:
    """Write one row per window of these runs and metrics, by default all, and return how many.

    Columns: key, problem, method, seed, metric, step (the last one of the window), value.
    """
    count = 0

    def lines() -> Iterator[str]:
        nonlocal count
        specs = {run.key: run.spec for run in runs}
        for key, metric, window, values in ledger.each_series(metrics):
            if key in specs:
                spec = specs[key]
                start = _line([key, spec.problem, spec.name, spec.seed, metric])[:-1]
                count += len(values)
                yield "".join(f"{start},{i * window},{v!s}\n" for i, v in enumerate(values, 1))

    _write(target, ["key", "problem", "method", "seed", "metric", "step", "value"], lines())
    return count


def _row(run: Run) -> dict[str, Any]:
    spec, result = run.spec, run.result
    row = {name: getattr(run if hasattr(run, name) else spec, name) for name in FIRST}
    row |= {"method": spec.name, "spec": spec.to_json()}
    row.update({f"hyper.{name}": value for name, value in spec.hyper.items()})
    row.update({f"option.{name}": _cell(value) for name, value in spec.options.items()})
    if result is not None:
        row.update({name: getattr(result, name) for name in LAST})
        row.update({f"summary.{name}": _cell(value) for name, value in result.summary.items()})
    return row


def _cell(value: Any) -> Any:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _line(cells: Iterable[Any]) -> str:
    """Cells as a line of CSV, with its end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _write(target: Target, columns: list[str], lines: Iterable[str]) -> None:
    def fill(file: TextIO) -> None:
        file.write(_line(columns))
        file.writelines(lines)

    def encoded(file: BinaryIO) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        try:
            fill(text)
        finally:
            text.detach()  # flushes, and leaves the file open for its owner

    if isinstance(target, str | os.PathLike):
        write_atomically(target, encoded)
    else:
        fill(target)
