"""Groups of runs that differ only in their seed, as rows of a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from upgd import metrics
from upgd.ledger import Ledger, Run, RunSpec, Scalar
from upgd.ledger.canonical import meaning
from upgd.ledger.spec import MEASURING
from upgd.study.selection import LARGER, codes
from upgd.text import pairs


class SettingKey(NamedTuple):
    """What the runs of a row have in common."""

    problem: str
    method: str
    hyper: tuple[tuple[str, float], ...]
    steps: int
    options: tuple[tuple[str, Scalar], ...]
    sources: tuple[tuple[str, str], ...] = ()

    def row(self) -> dict[str, Any]:
        """The first columns of the row."""
        row: dict[str, Any] = {"problem": self.problem, "method": self.method}
        row |= {"steps": self.steps, "hyper": dict(self.hyper), "options": dict(self.options)}
        row |= {"sources": dict(self.sources)} if self.sources else {}
        return row


def chosen(ledger: Ledger, problem: str | None = None, method: str | None = None) -> list[Run]:
    """The runs of a problem or a method, or all; ValueError if there is none.

    A method's own name means all its runs, an alias such as ``upgd-w`` those that it fits.
    """
    runs = list(ledger.runs(problem=problem or None, method=method or None))
    if not runs and (problem or method):
        raise no_such_run(ledger, problem, [method] if method else [])
    return runs


def no_such_run(ledger: Ledger, problem: str | None, methods: Iterable[str]) -> ValueError:
    """The error that there is no run of these; it says what there is, and what aliases mean."""
    there = sorted({(part.problem, part.method) for part in ledger.parts()})
    names = ", ".join(f"{p} {m}" for p, m in there) or "none"
    told = {name: meaning(name) for name in methods}
    wanted = [problem] if problem else []
    wanted += [f"{name} ({means})" if means else name for name, means in told.items()]
    return ValueError(f"no run of {' '.join(wanted) or 'this kind'}; there are {names}")


def group(runs: Iterable[Run]) -> dict[SettingKey, list[Run]]:
    """Finished runs by group, in the order of first appearance."""
    groups: dict[SettingKey, list[Run]] = defaultdict(list)
    for run in runs:
        if run.result is not None:
            groups[setting(run.spec)].append(run)
    return dict(groups)


def setting(spec: RunSpec) -> SettingKey:
    """The group of a run: everything but its seed."""
    hyper, options = tuple(spec.hyper.items()), tuple(spec.options.items())
    return SettingKey(
        spec.problem, spec.name, hyper, spec.steps, options, tuple(spec.sources.items())
    )


def names(keys: Iterable[SettingKey]) -> dict[SettingKey, str]:
    """Names of groups: the method, and the settings in which its groups differ."""
    listed = list(keys)
    return dict(zip(listed, labels([key.row() for key in listed]), strict=True))


def labels(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name per row: the method, which of its codes, and the settings in which rows differ."""
    each = [(_called(row), row.get("sources", {})) for row in found]
    rows = list(zip(found, codes(each), varying(found), strict=True))
    short = [f"{row['method']}{code} {pairs(differs)}".strip() for row, code, differs in rows]
    times = Counter(zip((row["problem"] for row in found), short, strict=True))
    return [
        name if times[row["problem"], name] == 1 else f"{row['method']}{code} {_in_full(differs)}"
        for name, (row, code, differs) in zip(short, rows, strict=True)
    ]


def _in_full(values: Mapping[str, Any]) -> str:
    """Names and values with all their digits, where fewer do not tell settings apart."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def _called(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["problem"], row["method"], tuple(row["hyper"].items()), tuple(row["options"].items())


def main_metric(runs: Iterable[Run]) -> str:
    """Accuracy or return if a run has it, else the loss."""
    known = {metric for run in runs if run.result for metric in run.result.summary}
    return next((metric for metric in LARGER if metric in known), "loss")


def summaries(runs: Iterable[Run], metric: str) -> list[float]:
    """The means of a metric over the whole of each run that is done and has it."""
    done = (dict(run.result.summary) for run in runs if run.state == "done" and run.result)
    return [summary[metric] for summary in done if metric in summary]


def rows(groups: dict[SettingKey, list[Run]]) -> list[dict[str, Any]]:
    """Mean and standard error over seeds with Student's 95% interval, a row per group."""
    found = []
    for key, runs in groups.items():
        done = [run for run in runs if run.state == "done"]
        metric = main_metric(done)
        values = summaries(done, metric)
        row = key.row() | {"seeds": len(done), "diverged": len(runs) - len(done)}
        if values:
            mean, *ends = metrics.mean_interval(values)
            low, high = (end if np.isfinite(end) else None for end in ends)
            error = float(metrics.standard_error(values)) if len(values) > 1 else None
            row |= {"metric": metric, "mean": mean, "standard_error": error}
            row |= {"low": low, "high": high}
        if metric == "return":
            row["collapse"] = _collapse(done)
        found.append(row)
    return found


def _collapse(runs: Iterable[Run]) -> dict[str, list[float | None]]:
    """Peak, final return and drop of agents: means over seeds with 95% intervals."""
    from upgd.rl.collapse import over_seeds

    found = over_seeds([dict(run.result.summary) for run in runs if run.result is not None])
    return {
        name: [value if np.isfinite(value) else None for value in interval]
        for name, interval in found.items()
    }


def varying(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each row, where it differs: hyperparameters from its method's, options from all rows'."""
    hyper = _differing([((row["problem"], row["method"]), row["hyper"]) for row in found])
    options = _differing([(row["problem"], row["options"]) for row in found])
    return [{**mine, **own} for mine, own in zip(hyper, options, strict=True)]


def _differing(given: Sequence[tuple[Hashable, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Of each mapping, the items that not all mappings of its family have."""
    sizes = Counter(family for family, _ in given)
    having = Counter((family, item) for family, mine in given for item in mine.items())
    return [
        {item[0]: item[1] for item in mine.items() if having[family, item] < sizes[family]}
        for family, mine in given
    ]


def best_settings(groups: Mapping[SettingKey, list[Run]]) -> dict[SettingKey, int]:
    """The best setting of each method, length and options, with the number of settings compared.

    Options, such as a network without hidden layers, make another learner unless they only measure
    (:data:`upgd.ledger.spec.MEASURING`). Settings are compared by the area under the curve (the
    mean over the whole run, over seeds) of their accuracy or return, or of their loss where there
    is none; those without a diverged seed come first.
    """
    families: dict[SettingKey, dict[SettingKey, tuple[int, float]]] = defaultdict(dict)
    for key, runs in groups.items():
        done = [run for run in runs if run.state == "done"]
        metric = main_metric(done)
        values = [run.result.summary.get(metric, np.nan) for run in done if run.result]
        mean = float(np.mean(values)) if values else np.nan
        if np.isfinite(mean):
            cost = -mean if metric in LARGER else mean
            rest = tuple(pair for pair in key.options if pair[0] not in MEASURING)
            families[key._replace(hyper=(), options=rest)][key] = (len(runs) - len(done), cost)
    return {min(ranks, key=ranks.__getitem__): len(ranks) for ranks in families.values()}
