"""Figure 2 and its appendix version: how well do approximations rank weights and features?

An SGD learner sees one sample at a time: five inputs from U[-½, ½], the target the sum of two
of them. Before every update, the true utility of every weight (network 5-50-1) or feature
(5-50-50-1) is compared with its approximations by Spearman's rank correlation, over the whole
network and within layers, in float64. All seeds learn side by side in stacked tensors; a seed's
result does not depend on its neighbours. ``upgd reproduce fig2`` runs it.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from upgd import curvature
from upgd.ledger import write_atomically
from upgd.ledger.versions import processor
from upgd.metrics import Interval
from upgd.paper.drawing import canvas, save
from upgd.paper.evidence import (
    LONG_ENOUGH,
    NO,
    PLAIN,
    UNKNOWN,
    YES,
    Array,
    Finding,
    Verdict,
    above,
    below,
    how_much,
    interval,
    within,
    worst,
)
from upgd.paper.measuring import How, Say, note
from upgd.paper.results import table_rows
from upgd.utility import Kind, Scope, Utilities, approximate, rank_correlation, true_utility

NAME = "fig2"
CAPTION = "Quality of the approximated utilities, and the appendix version of it."
TABLE = "correlations.csv.gz"
SEEDS, STEPS = 30, 2000
PACE = (0.05, 0.005)
"""Seconds of a step with one activation, and for each seed, on two cores."""

Of: TypeAlias = Literal["weight", "feature"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
}
SIZES: dict[str, list[int]] = {"weight": [5, 50, 1], "feature": [5, 50, 50, 1]}
STEP_SIZE = 0.01
POINT = 10
LABELS: dict[str, str] = {
    "second": "Second-order utility",
    "first": "First-order utility",
    "squared_gradient": "Squared gradient",
    "magnitude": "Weight magnitude",
    "random": "Random",
}
NAMES = {"relu": "ReLU", "leaky_relu": "LeakyReLU", "tanh": "Tanh"}
PANELS: list[tuple[Of, Scope]] = [
    ("weight", "global"),
    ("weight", "local"),
    ("feature", "global"),
    ("feature", "local"),
]


# -------------------------------------------------------------------- the experiment
class Learners:
    """The networks of all seeds, stacked: weights [seed, out, in], biases [seed, 1, out]."""

    def __init__(self, sizes: list[int], activation: str, seeds: list[int]) -> None:
        self.activation = ACTIVATIONS[activation]()
        self.depth = len(sizes) - 1
        networks = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                networks.append([nn.Linear(*pair) for pair in itertools.pairwise(sizes)])
        self.weights: Utilities = {}
        for layer in range(self.depth):
            stack = [network[layer] for network in networks]
            self.weights[f"{layer}.weight"] = torch.stack(
                [m.weight.detach().double() for m in stack]
            )
            self.weights[f"{layer}.bias"] = torch.stack(
                [m.bias.detach().double()[None] for m in stack]
            )
        self.gates = {
            str(layer): torch.ones(len(seeds), 1, sizes[layer + 1], dtype=torch.float64)
            for layer in range(self.depth - 1)
        }

    def loss(self, weights: Utilities, gates: Utilities, x: Tensor, y: Tensor) -> Tensor:
        """The squared error of every seed, [seed]."""
        h = x
        for layer in range(self.depth):
            weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
            h = torch.baddbmm(bias, h, weight.transpose(1, 2))
            if layer < self.depth - 1:
                h = self.activation(h) * gates[str(layer)]
        return (h[:, 0, 0] - y).square()


def samples(seed: int, steps: int) -> tuple[Tensor, Tensor]:
    """The stream of a seed: inputs [steps, 5] and targets [steps]."""
    generator = np.random.default_rng([seed, 0xF162])
    pair = generator.choice(5, size=2, replace=False)
    x = generator.uniform(-0.5, 0.5, size=(steps, 5))
    return torch.from_numpy(x), torch.from_numpy(x[:, pair].sum(1))


def run(
    activation: str, of: Of, seeds: list[int], steps: int
) -> Iterator[dict[tuple[str, str], Tensor]]:
    """Step by step, the correlation [seed] of each (kind, scope); NaN where it is undefined."""
    learners = Learners(SIZES[of], activation, seeds)
    streams = [samples(seed, steps) for seed in seeds]
    noise = [torch.Generator().manual_seed(seed + 1) for seed in seeds]
    for step in range(steps):
        x = torch.stack([x[step] for x, _ in streams])[:, None]
        y = torch.stack([y[step] for _, y in streams])
        leaves = {name: w.detach().requires_grad_() for name, w in learners.weights.items()}
        gates = {name: g.detach().requires_grad_() for name, g in learners.gates.items()}
        loss = learners.loss(
            leaves, gates, x, y
        ).sum()  # seeds are independent, so the sum has all gradients
        chosen = leaves if of == "weight" else gates
        gradients = torch.autograd.grad(
            loss, [*leaves.values(), *gates.values()], retain_graph=True
        )
        named = dict(zip([*leaves, *gates], gradients, strict=True))
        seconds = curvature.diagonal(loss, list(chosen.values()))
        values = {name: t.detach() for name, t in chosen.items()}

        def loss_of(values: Utilities, x: Tensor = x, y: Tensor = y) -> Tensor:
            given = (values, learners.gates) if of == "weight" else (learners.weights, values)
            return learners.loss(*given, x, y)

        true = true_utility(loss_of, values, stacked=True)
        row = {}
        for kind in get_args(Kind):
            guess = {
                name: _approximation(kind, of, name, t, named[name], h, learners, noise)
                for (name, t), h in zip(values.items(), seconds, strict=True)
            }
            for scope in get_args(Scope):
                row[kind, scope] = rank_correlation(true, guess, scope, stacked=True).value
            row[kind, "argsort"] = _argsort_correlation(true, guess)
        yield row
        for name, weight in learners.weights.items():
            learners.weights[name] = weight - STEP_SIZE * named[name]


def _argsort_correlation(true: Utilities, guess: Utilities) -> Tensor:
    """Global correlation as in the paper's public code: of one ``argsort``, not of ranks."""
    places = [
        torch.cat([t.flatten(1) for t in utilities.values()], 1).argsort(1).double()
        for utilities in (true, guess)
    ]
    a, b = (p - p.mean(1, keepdim=True) for p in places)
    correlation: Tensor = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    return correlation


def _approximation(
    kind: Kind,
    of: Of,
    name: str,
    value: Tensor,
    gradient: Tensor,
    second: Tensor,
    learners: Learners,
    noise: list[torch.Generator],
) -> Tensor:
    if kind == "random":  # a function of the seed alone
        return torch.stack([torch.rand(value.shape[1:], generator=g) for g in noise])
    if kind == "magnitude" and of == "feature":  # a gate is 1: use its outgoing weights
        outgoing = learners.weights[f"{int(name) + 1}.weight"]
        return outgoing.abs().sum(1, keepdim=True)
    return approximate(kind, value, gradient, second)


# ------------------------------------------------------------------------ the results
@dataclass
class Results:
    """Correlations in 10-step means, by (activation, of, scope, kind): [seed, point].

    `undefined` counts the steps [seed] at which a correlation had no value; the means leave
    them out.
    """

    seeds: list[int]
    series: dict[tuple[str, str, str, str], NDArray[np.float64]] = field(default_factory=dict)
    undefined: dict[tuple[str, str, str, str], NDArray[np.int64]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a compressed CSV: one row per series and seed, one column per point."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        points = next(iter(self.series.values())).shape[1]
        steps = [POINT * (point + 1) for point in range(points)]
        writer.writerow(["activation", "of", "scope", "kind", "seed", "undefined", *steps])
        for key, values in self.series.items():
            for seed, undefined, row in zip(self.seeds, self.undefined[key], values, strict=True):
                writer.writerow([*key, seed, undefined, *[f"{value:.3f}" for value in row]])
        write_atomically(path, gzip.compress(text.getvalue().encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: It is broken.
        """
        _, *table = table_rows(path)
        results = cls(list(dict.fromkeys(int(row[4]) for row in table)))
        for index in range(0, len(table), len(results.seeds)):
            rows = table[index : index + len(results.seeds)]
            activation, of, scope, kind = rows[0][:4]
            key = (activation, of, scope, kind)
            results.undefined[key] = np.array([int(row[5]) for row in rows])
            results.series[key] = np.array([[float(x) for x in row[6:]] for row in rows])
        return results


def collect(
    activations: Sequence[str], seeds: list[int], steps: int, say: Say | None = None
) -> Results:
    """Run everything and report progress."""
    results = Results(seeds)
    for activation, of in itertools.product(activations, get_args(Of)):
        rows: dict[tuple[str, str], list[Tensor]] = {}
        for row in run(activation, of, seeds, steps):
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
        for (kind, scope), values in rows.items():
            every = torch.stack(values, 1).numpy()  # [seed, step]
            points = every.reshape(len(seeds), -1, POINT)
            with np.errstate(invalid="ignore"):
                counted = np.isfinite(points).sum(2)
                means = np.where(counted > 0, np.nansum(points, 2) / np.maximum(counted, 1), np.nan)
            name = (activation, of, scope, kind)
            results.series[name] = means
            results.undefined[name] = np.isnan(every).sum(1)
        if say is not None:
            say(f"{NAMES[activation]}, {of}s: {steps} steps of {_seeds(len(seeds))} done")
    return results


def folder(how: How) -> str:
    """The same for all devices: it runs on CPU."""
    return "utility_quality"


def size(how: How) -> tuple[int, int]:
    """The number of seeds and of steps, in at least five whole points."""
    steps = max(5, round(STEPS * how.scale / POINT)) * POINT
    return how.seeds or SEEDS, steps


def plan(how: How) -> str:
    """How long it takes."""
    seeds, steps = size(how)
    minutes = len(ACTIVATIONS) * steps * (PACE[0] + PACE[1] * seeds) / 60
    time_ = f"about {max(1, round(minutes))} minutes on two cores"
    return f"{_seeds(seeds)} of {steps} steps, {time_}"


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"


def measure(how: How, folder: Path, say: Say) -> None:
    """Run everything and write the table."""
    began, (seeds, steps) = time.time(), size(how)
    results = collect(list(ACTIVATIONS), list(range(seeds)), steps, say)
    results.save(folder / TABLE)
    arms = {f"{NAMES[a]}, {of}s": list(range(seeds)) for a in ACTIVATIONS for of in get_args(Of)}
    where = f"{processor()}, {torch.get_num_threads()} threads"
    total = len(arms) * seeds * steps
    note(how, NAME, where, "stacked", "float64", steps, arms, total, began).write(folder)


# ------------------------------------------------------------------------- the claim
def extent(results: Results) -> str:
    """The amount of data, as text."""
    return how_much([_length(results)], [len(results.seeds)])


def _length(results: Results) -> float:
    """The share of the paper's steps."""
    points = next(iter(results.series.values())).shape[1]
    return float(points * POINT / STEPS)


def claim(
    results: Results, activation: str = "relu", of: str = "weight", scope: str = "global"
) -> list[Finding]:
    """The paper's claim 1 on one panel.

    "Grows" and "shrinks" compare the first and the last fifth of the run, "higher" compares means
    over the run. "Throughout" also requires the mean over seeds to be the highest at every point.
    Runs that are too short give statistics and no verdict.
    """
    data = {kind: results.series[activation, of, scope, kind] for kind in get_args(Kind)}
    fifth = data["second"].shape[1] // 5
    change = {k: _mean(v[:, -fifth:]) - _mean(v[:, :fifth]) for k, v in data.items()}
    mean = {k: _mean(v) for k, v in data.items()}
    others = [k for k in data if k != "second"]
    runner_up = max(others, key=lambda k: float(np.nanmean(mean[k])))
    lead = mean["second"] - mean[runner_up]
    highest, throughout = _throughout(data["second"], [data[k] for k in others])
    ahead = mean["first"] - mean["squared_gradient"]
    higher, always = _throughout(data["first"], [data["squared_gradient"]])
    falls = "last fifth minus first fifth"
    found = [
        _finding(
            f"second-order minus the next best ({LABELS[runner_up].lower()}); its mean is highest "
            f"at {100 * highest:.0f}% of the points",
            lead,
            lambda found: worst([above(found), throughout]),
        ),
        _finding(f"first-order falls: {falls}", change["first"], below),
        _finding(
            "weight magnitude is small: mean over the run (small: below 0.3)",
            mean["magnitude"],
            lambda found: below(found, 0.3),
        ),
        _finding(f"weight magnitude shrinks: {falls}", change["magnitude"], below),
        _finding(f"squared gradient grows: {falls}", change["squared_gradient"], above),
        _finding(
            "first-order minus squared gradient; the latter's mean is below at "
            f"{100 * higher:.0f}% of the points",
            ahead,
            lambda found: worst([above(found), always]),
        ),
        _finding(
            "random is zero: mean over the run (within ±0.01)",
            mean["random"],
            lambda found: within(found, 0.01),
        ),
    ]
    if _length(results) >= LONG_ENOUGH:
        return found
    return [each._replace(verdict=UNKNOWN) for each in found]


def _mean(values: Array) -> Array:
    """The mean over points [seed, point]; NaN where a seed has none."""
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def _throughout(mine: Array, others: Sequence[Array]) -> tuple[float, Verdict]:
    """The fraction of points [seed, point] at which a mean is highest, and whether it always is.

    If it is not, the interval at the point where it is furthest below decides.
    """
    rivals = np.stack(others)
    best = np.nanmean(rivals, 1).argmax(0)
    lead = mine - rivals[best, :, np.arange(len(best))].T
    average = np.nanmean(lead, 0)
    share = float(np.mean(average >= 0))
    lowest = lead[:, average.argmin()]
    found = interval(lowest[np.isfinite(lowest)])
    return share, YES if share == 1 else NO if below(found) == YES else UNKNOWN


def _finding(statement: str, per_seed: Array, judge: Callable[[Interval], Verdict]) -> Finding:
    """A statement about a mean over seeds."""
    found = interval(per_seed[np.isfinite(per_seed)])
    return Finding(statement, found, judge(found), PLAIN)


def _row(finding: Finding) -> str:
    """A finding as a row of a Markdown table."""
    assert finding.found is not None
    value, low, high = (f"{x:+.3f}" for x in finding.found)
    between = "-" if np.isnan(finding.found.low) else f"[{low}, {high}]"
    return f"| {finding.statement} | {value} | {between} | {finding.verdict} |"


# ------------------------------------------------------------------------ the figures
def title(folder: Path) -> str:
    """A one-line description of a table."""
    return "Quality of the approximated utilities"


def pictures(folder: Path) -> dict[str, str]:
    """Figure 2 and its appendix version."""
    what = "rank correlation with the true utility; bands are standard errors over seeds."
    return {
        "fig2": f"Figure 2: {what}",
        "fig2-appendix": f"Three activations, weights and features, global and local: {what}",
    }


def draw(folder: Path, target: Path, suffixes: Sequence[str]) -> list[Path]:
    """Figure 2 and its appendix version; mean and standard error over seeds."""
    results = Results.load(folder / TABLE)
    drawn = (_figure(results), _appendix(results))
    return [
        path
        for name, picture in zip(pictures(folder), drawn, strict=True)
        for path in save(picture, [target / f"{name}.{suffix}" for suffix in suffixes])
    ]


def _figure(results: Results) -> Any:
    first = next(iter(results.series))[0]
    picture, [[axes]] = canvas(1, 1, (4.2, 3.2))
    _panel(axes, results, first, "weight", "global")
    axes.set(xlabel="Time step", ylabel="Spearman correlation")
    axes.set_title(f"Global weight utility, {NAMES[first]}", fontsize=10)
    axes.legend(fontsize=7, loc="center left", frameon=False, bbox_to_anchor=(0, 0.52))
    return picture


def _appendix(results: Results) -> Any:
    activations = list(dict.fromkeys(key[0] for key in results.series))
    rows = len(activations)
    picture, grid = canvas(rows, 4, (11, 2.5 * rows + 0.5))
    for i, activation in enumerate(activations):
        for j, (of, scope) in enumerate(PANELS):
            _panel(grid[i, j], results, activation, of, scope)
            if i == 0:
                grid[i, j].set_title(f"{of.capitalize()}, {scope} utility", fontsize=10)
            if i == rows - 1:
                grid[i, j].set_xlabel("Time step")
        grid[i, 0].set_ylabel(f"{NAMES[activation]}\nSpearman correlation")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return picture


def _panel(axes: Any, results: Results, activation: str, of: str, scope: str) -> None:
    for colour, kind in enumerate(get_args(Kind)):
        values = results.series[activation, of, scope, kind]
        counted = np.isfinite(values).sum(0)
        mean = np.nanmean(values, 0)
        time_steps = POINT * (np.arange(len(mean)) + 1)
        label = LABELS[kind]
        if kind == "magnitude" and of == "feature":
            label = "Outgoing weight magnitude"
        axes.plot(time_steps, mean, color=f"C{colour}", label=label, linewidth=1.2)
        if len(values) > 1:
            error = np.nanstd(values, 0, ddof=1) / np.sqrt(counted)
            ends = (mean - error, mean + error)
            axes.fill_between(time_steps, *ends, color=f"C{colour}", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(-0.25, 1.05)
    axes.axhline(0, color="0.8", linewidth=0.6, zorder=0)


def page(folder: Path) -> list[str]:
    """The quality of the approximations, and the paper's claim 1 on all panels."""
    results = Results.load(folder / TABLE)
    lines = [
        f"Lines are {POINT}-step means over seeds, bands standard errors.",
        "",
        "Feature panels have two hidden layers (5-50-50-1). A gate has no magnitude: there, the "
        "magnitude is the sum of a feature's outgoing weights' magnitudes. With one output and one "
        "hidden layer (weight panels) HesScale is the exact Hessian diagonal, and for ReLU the "
        "second-order utility of every weight is exact unless removing it moves a unit across "
        "zero.",
    ]
    for of in get_args(Of):
        for activation in dict.fromkeys(key[0] for key in results.series):
            lines += [
                "",
                f"## Claim 1, {of}s, {NAMES[activation]}, global",
                "",
                "| statement | estimate | 95% interval over seeds | verdict |",
                "|---|---:|---|---|",
                *[_row(finding) for finding in claim(results, activation, of)],
            ]
    first = next(iter(results.series))[0]
    lines += [
        "",
        f"## Claim 1 with the public code's ranks, weights, {NAMES[first]}, global",
        "",
        "The paper's public code correlates the results of one `argsort`, where ranks take two. "
        "That is not Spearman's correlation; presumably the paper's figure was made with it.",
        "",
        "| statement | estimate | 95% interval over seeds | verdict |",
        "|---|---:|---|---|",
        *[_row(finding) for finding in claim(results, first, "weight", "argsort")],
        "",
        "## Means over the run",
        "",
        "| panel | " + " | ".join(LABELS[kind] for kind in get_args(Kind)) + " |",
        "|---|" + "---:|" * len(get_args(Kind)),
    ]
    for activation in dict.fromkeys(key[0] for key in results.series):
        for of, scope in PANELS:
            means = [
                np.nanmean(results.series[activation, of, scope, kind]) for kind in get_args(Kind)
            ]
            cells = " | ".join(f"{value:.3f}" for value in means)
            lines.append(f"| {NAMES[activation]}, {of}, {scope} | {cells} |")
    missing = {k: int(count.sum()) for k, count in results.undefined.items() if count.any()}
    if missing:
        total = sum(missing.values())
        lines += ["", f"Undefined correlations (one side constant), left out: {total}, in "]
        lines[-1] += "; ".join(f"{' '.join(key)}: {count}" for key, count in missing.items()) + "."
    return lines
