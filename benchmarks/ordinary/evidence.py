"""What the results say: comparisons at one step size, best sets, and regrets of all sets.

Each number is a mean over seeds. Runs that diverged count as the row's worst: accuracy 0, or the
largest loss (the smallest return) of all runs on the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ordinary.runs import TORCH, Hyper, complete, parsed, rows_of
from ordinary.tasks import TASKS
from upgd.metrics import standard_error
from upgd.optim import registry
from upgd.streams import PROBLEMS

Unit = Literal["accuracy", "loss", "return"]
TARGET_VARIANCE = {"regression": 1.0, "toy-changing-inputs": 0.5, "toy-changing-sign": 0.5}
"""Of rows whose loss is the squared error."""
STREAM_HYPER = ("lr", "sigma", "beta_utility", "weight_decay", "momentum")


class Measured(NamedTuple):
    """A mean over seeds and its standard error, NaN where there is one seed."""

    mean: float
    error: float


def measured(values: Sequence[float]) -> Measured:
    error = float(standard_error(values)) if len(values) > 1 else math.nan
    return Measured(float(np.mean(values)), error)


@dataclass
class Row:
    """A task or a stream, with the values of every set of every optimizer by seed."""

    name: str
    values: dict[tuple[str, Hyper], dict[int, float]] = field(default_factory=dict)

    @property
    def is_ordinary(self) -> bool:
        """Whether it is a task of :mod:`ordinary.tasks`."""
        return self.name in TASKS

    @property
    def unit(self) -> Unit:
        """What its values are; other rows than tasks and streams are returns of agents."""
        if self.name in TASKS:
            return "accuracy" if TASKS[self.name].higher_is_better else "loss"
        if (stream := self.name.split("/")[0]) in PROBLEMS:
            return "accuracy" if PROBLEMS[stream].loss == "cross_entropy" else "loss"
        return "return"

    @property
    def sign(self) -> int:
        """1 where more is better, -1 for losses."""
        return -1 if self.unit == "loss" else 1

    def settle(self) -> None:
        """Replace NaN, the value of a run that diverged, by the worst value of the row."""
        known = [v for seeds in self.values.values() for v in seeds.values() if math.isfinite(v)]
        if self.unit == "accuracy":
            worst = 0.0
        else:
            known += [TASKS[self.name].worst] if self.is_ordinary else []
            worst = max(known, default=math.nan) if self.sign < 0 else min(known, default=math.nan)
        for seeds in self.values.values():
            seeds.update({s: worst for s, value in seeds.items() if not math.isfinite(value)})

    def sets(self, optimizer: str, lr: float | None = None) -> dict[Hyper, dict[int, float]]:
        """Values by seed of an optimizer's sets, of those with one step size if it is given."""
        return {
            hyper: seeds
            for (name, hyper), seeds in self.values.items()
            if name == optimizer and lr in (None, dict(hyper)["lr"])
        }


def collect(paths: Sequence[Path]) -> dict[str, Row]:
    """Rows by name from result files of ``run`` and of streams; tasks first, in their order."""
    rows = {name: Row(name) for name in TASKS}
    for path in paths:
        table = rows_of(path)
        streams = bool(table) and "problem" in table[0]
        for name, optimizer, hyper, seed, value in _streams(table) if streams else _ordinary(table):
            row = rows.setdefault(name, Row(name))
            row.values.setdefault((optimizer, hyper), {})[seed] = value
    found = {name: row for name, row in rows.items() if row.values}
    for row in found.values():
        row.settle()
    return found


_Value = tuple[str, str, Hyper, int, float]


def _ordinary(table: list[dict[str, str]]) -> list[_Value]:
    pairs = map(parsed, table)
    return [(r.task, r.optimizer, r.hyper, r.seed, result.value) for r, result in pairs]


def _streams(table: list[dict[str, str]]) -> list[_Value]:
    """The longest runs on each stream; their value is the mean over all steps."""
    longest: dict[str, int] = {}
    for line in table:
        longest[line["problem"]] = max(longest.get(line["problem"], 0), int(line["steps"]))
    found = []
    for line in table:
        if int(line["steps"]) == longest[line["problem"]]:
            given = {name: float(line[name]) for name in STREAM_HYPER if line.get(name)}
            hyper = complete(line["method"], given)
            value = float(line["mean"]) if line["state"] == "done" else math.nan
            found.append((line["problem"], line["method"], hyper, int(line["seed"]), value))
    return found


# --------------------------------------------------------------------- comparisons
@dataclass(frozen=True)
class Comparison:
    """Two optimizers on one row, by seeds that both have.

    Attributes:
        row: Where.
        lr: The step size of both.
        peer: PyTorch's.
        own: The package's.
        lead: By how much `own` is better, paired by seed; negative where it is behind.
    """

    row: Row
    lr: float
    peer: Measured
    own: Measured
    lead: Measured

    @property
    def error(self) -> float:
        """The standard error of the difference of the two means, as if seeds were independent."""
        return math.hypot(self.peer.error, self.own.error)

    @property
    def is_behind(self) -> bool:
        """Whether `own` is behind by more than the standard error; never for one seed."""
        return self.lead.mean < -self.error

    @property
    def is_ahead(self) -> bool:
        """Whether `own` is ahead by more than the standard error; never for one seed."""
        return self.lead.mean > self.error

    @property
    def is_behind_by_seed(self) -> bool:
        """Whether the paired lead is below minus its own standard error."""
        return self.lead.mean < -self.lead.error


def default_set(optimizer: str, lr: float) -> Hyper:
    """The defaults of an optimizer's class, at another step size."""
    return complete(optimizer, {"lr": lr})


def compare(row: Row, peer: str, own: str, lr: float) -> Comparison | None:
    """Two optimizers with their defaults at one step size; None without a seed of both."""
    one = row.values.get((peer, default_set(peer, lr)), {})
    other = row.values.get((own, default_set(own, lr)), {})
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        return None
    a, b = [one[s] for s in seeds], [other[s] for s in seeds]
    lead = measured([row.sign * (y - x) for x, y in zip(a, b, strict=True)])
    return Comparison(row, lr, measured(a), measured(b), lead)


def best(row: Row, optimizer: str) -> tuple[Hyper, Measured] | None:
    """The set with the best mean, of those that have most seeds."""
    sets = row.sets(optimizer)
    most = max(map(len, sets.values()), default=0)
    found = {h: measured(list(s.values())) for h, s in sets.items() if len(s) == most}
    if not found:
        return None
    hyper = max(found, key=lambda h: row.sign * found[h].mean)
    return hyper, found[hyper]


# ------------------------------------------------------------------------- regrets
def regret_unit(row: Row, best: float) -> float:
    """What a difference to the best is divided by: points of accuracy or of explained variance.

    Of other losses and of returns, per cent of the best.
    """
    if row.unit == "accuracy":
        return 0.01
    return 0.01 * TARGET_VARIANCE.get(row.name, abs(best))


@dataclass(frozen=True)
class Choice:
    """The regrets of all sets of one optimizer at its default step size.

    Attributes:
        optimizer: Which.
        lr: Its default step size.
        rows: The rows that count.
        regrets: Of each set, on each of these rows; best set first.
        incomplete: How many sets were left out because a row or a seed of theirs is missing.
        skipped: Rows that do not count, because few sets were run there.
    """

    optimizer: str
    lr: float
    rows: list[Row]
    regrets: dict[Hyper, dict[str, Measured]]
    incomplete: int
    skipped: list[str]

    def worst(self, hyper: Hyper) -> str:
        """The row on which a set has its largest regret."""
        return max(self.regrets[hyper], key=lambda name: self.regrets[hyper][name].mean)


def rank(regrets: Mapping[str, Measured]) -> tuple[float, float]:
    """What sets are ordered by: the largest regret, then the mean."""
    means = [found.mean for found in regrets.values()]
    return max(means), sum(means) / len(means)


def choose(rows: Mapping[str, Row], optimizer: str) -> Choice:
    """Regrets of every set at the default step size.

    A row counts if it has at least half as many sets as the row that has most, and with it the
    seeds that at least half of its sets have. A set is compared if it has all of them.
    """
    lr = dict(complete(optimizer, {}))["lr"]
    sets = {name: row.sets(optimizer, lr) for name, row in rows.items()}
    sets = {name: found for name, found in sets.items() if found}
    most = max(map(len, sets.values()), default=0)
    counted = {name: found for name, found in sets.items() if 2 * len(found) >= most}
    seeds = {name: _common(list(found.values())) for name, found in counted.items()}
    every = {hyper for found in counted.values() for hyper in found}
    full = [
        hyper
        for hyper in sorted(every)
        if all(seeds[name] <= found.get(hyper, {}).keys() for name, found in counted.items())
    ]
    on_rows = {
        name: _regrets(rows[name], {h: counted[name][h] for h in full}, sorted(seeds[name]))
        for name in counted
    }
    regrets = {h: {name: found[h] for name, found in on_rows.items()} for h in full}
    return Choice(
        *(optimizer, lr, [rows[name] for name in counted]),
        regrets=dict(sorted(regrets.items(), key=lambda item: rank(item[1]))),
        incomplete=len(every) - len(full),
        skipped=sorted(sets.keys() - counted.keys()),
    )


def _common(sets: list[dict[int, float]]) -> set[int]:
    """The seeds that at least half of the sets have."""
    every = {seed for seeds in sets for seed in seeds}
    return {seed for seed in every if 2 * sum(seed in seeds for seeds in sets) >= len(sets)}


def _regrets(
    row: Row, sets: Mapping[Hyper, Mapping[int, float]], seeds: Sequence[int]
) -> dict[Hyper, Measured]:
    """Of each set on one row, with the standard error of its difference to the best set."""
    values = {hyper: np.array([found[s] for s in seeds]) for hyper, found in sets.items()}
    if not values:
        return {}
    top = values[max(values, key=lambda h: row.sign * values[h].mean())]
    unit = row.sign * regret_unit(row, float(top.mean()))
    return {hyper: measured(list((top - found) / unit)) for hyper, found in values.items()}


def own_optimizers(rows: Mapping[str, Row]) -> list[str]:
    """The package's methods that the rows have, in the registry's order."""
    found = {name for row in rows.values() for name, _ in row.values}
    return [name for name in registry.METHODS if name in found and name not in TORCH]
