"""Results of studies as the tables that the evidence reads: a line per run."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ordinary.evidence import STREAM_HYPER
from upgd.lab import Study
from upgd.ledger import Ledger, Run

METRICS = ("accuracy", "return", "loss")  # the first that a run has


def write(studies: Iterable[Path], output: Path) -> None:
    """All finished runs of studies; streams whose tasks have another length are problems apart."""
    names = ["problem", "method", *STREAM_HYPER, "seed", "steps", "state", "mean"]
    text = io.StringIO()
    lines = csv.DictWriter(text, names, lineterminator="\n")
    lines.writeheader()
    for folder in studies:
        with Study(folder).read() as ledger:
            lines.writerows(_lines(ledger))
    output.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _lines(ledger: Ledger) -> Iterator[dict[str, object]]:
    for run in list(ledger.runs()):
        if run.state in ("done", "diverged"):
            spec = run.spec
            length = spec.options.get("task_length")
            yield {name: spec.hyper[name] for name in STREAM_HYPER if name in spec.hyper} | {
                "problem": spec.problem if length is None else f"{spec.problem}/{length}",
                "method": "upgd" if spec.method == "upgd" else spec.name,
                "seed": spec.seed,
                "steps": spec.steps,
                "state": run.state,
                "mean": f"{_mean(ledger, run):.5f}",
            }


def _mean(ledger: Ledger, run: Run) -> float:
    known = ledger.metrics(run.key)
    metric = next(name for name in METRICS if name in known)
    return float(np.nanmean(ledger.series(run.key, metric)))
