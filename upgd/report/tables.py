"""Runs that differ in their seed alone, as rows of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from upgd import metrics
from upgd.study import Run, Scalar


class Group(NamedTuple):
    """What the runs of a row have in common."""

    problem: str
    method: str
    hyper: tuple[tuple[str, float], ...]
    steps: int
    options: tuple[tuple[str, Scalar], ...]


def group(runs: Iterable[Run]) -> dict[Group, list[Run]]:
    """Finished runs by what they have in common, in the order of their first."""
    groups: dict[Group, list[Run]] = defaultdict(list)
    for run in runs:
        if run.result is not None:
            spec = run.spec
            key = Group(
                spec.problem,
                spec.method,
                tuple(spec.hyper.items()),
                spec.steps,
                tuple(spec.options.items()),
            )
            groups[key].append(run)
    return dict(groups)


def main_metric(runs: Iterable[Run]) -> str:
    """Accuracy where it is known, else the loss."""
    known = any(run.result is not None and "accuracy" in run.result.summary for run in runs)
    return "accuracy" if known else "loss"


def rows(groups: dict[Group, list[Run]]) -> list[dict[str, Any]]:
    """Mean, standard error and interquartile mean with its interval, a row per group."""
    found = []
    for key, runs in groups.items():
        done = [run for run in runs if run.state == "done"]
        metric = main_metric(done)
        values = [
            run.result.summary[metric]
            for run in done
            if run.result is not None and metric in run.result.summary
        ]
        row: dict[str, Any] = {"problem": key.problem, "method": key.method, "steps": key.steps}
        row |= {"hyper": dict(key.hyper), "options": dict(key.options)}
        row |= {"seeds": len(done), "diverged": len(runs) - len(done)}
        if values:
            interval = metrics.bootstrap(values)
            error = float(metrics.standard_error(values)) if len(values) > 1 else None
            row |= {"metric": metric, "mean": float(np.mean(values)), "standard_error": error}
            row |= {"iqm": interval.estimate, "low": interval.low, "high": interval.high}
        found.append(row)
    return found


def varying(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each row's hyperparameters and options, those that tell rows of one method apart."""
    told = []
    for row in found:
        mine = {**row["hyper"], **row["options"]}
        others = [
            {**other["hyper"], **other["options"]}
            for other in found
            if (other["problem"], other["method"]) == (row["problem"], row["method"])
        ]
        told.append({k: v for k, v in mine.items() if any(o.get(k) != v for o in others)})
    return told
