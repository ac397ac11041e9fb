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
from collections.abc import Iterator, Sequence
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
from upgd.pages.colours import RULE
from upgd.paper import utility_claim
from upgd.paper.measuring import How, Say, note
from upgd.paper.results import table_rows
from upgd.paper.utility_claim import LABELS
from upgd.paper.verdicts import Finding
from upgd.report.plotting import (
    BAND,
    canvas,
    curve,
    footnote,
    label_ends,
    legend,
    look,
    save,
    seeds,
    standard_error,
    styled,
)
from upgd.report.sections import Line, thin
from upgd.text import count
from upgd.utility import Kind, Scope, Utilities, approximate, rank_correlation, true_utility

NAME = "fig2"
CAPTION = "Quality of the approximated utilities, and the appendix version of it."
TABLE = "correlations.csv.gz"
SEEDS, STEPS = 30, 2000
PACE = (0.05, 0.005)
"""Seconds of a step with one activation, and for each seed, on two cores."""

Of: TypeAlias = Literal["weight", "feature"]
ACTIVATIONS = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "tanh": nn.Tanh}
NAMES = {name: module.__name__ for name, module in ACTIVATIONS.items()}
SIZES: dict[str, list[int]] = {"weight": [5, 50, 1], "feature": [5, 50, 50, 1]}
STEP_SIZE = 0.01
POINT = 10
DRAWN = 100
"""Points of a line in the figures; beyond, they are means of several."""
PANELS: list[tuple[Of, Scope]] = list(itertools.product(get_args(Of), ("global", "local")))


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
            weights, biases = [m.weight for m in stack], [m.bias[None] for m in stack]
            self.weights[f"{layer}.weight"] = torch.stack(weights).detach().double()
            self.weights[f"{layer}.bias"] = torch.stack(biases).detach().double()
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
        loss = learners.loss(leaves, gates, x, y).sum()  # seeds are independent
        chosen, both = leaves if of == "weight" else gates, leaves | gates
        gradients = torch.autograd.grad(loss, list(both.values()), retain_graph=True)
        named = dict(zip(both, gradients, strict=True))
        seconds = curvature.diagonal(loss, list(chosen.values()))
        values = {name: t.detach() for name, t in chosen.items()}

        def loss_of(values: Utilities, x: Tensor = x, y: Tensor = y) -> Tensor:
            given = (values, learners.gates) if of == "weight" else (learners.weights, values)
            return learners.loss(*given, x, y)

        true = true_utility(loss_of, values, stacked=True)
        row = {}
        for kind in get_args(Kind):
            guess = {}
            for (name, t), second in zip(values.items(), seconds, strict=True):
                if kind == "random":  # a function of the seed alone
                    draws = [torch.rand(t.shape[1:], generator=g) for g in noise]
                    guess[name] = torch.stack(draws)
                elif kind == "magnitude" and of == "feature":  # a gate is 1: its outgoing weights
                    outgoing = learners.weights[f"{int(name) + 1}.weight"]
                    guess[name] = outgoing.abs().sum(1, keepdim=True)
                else:
                    guess[name] = approximate(kind, t, named[name], second)
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


# ------------------------------------------------------------------------ the results
@dataclass
class Results:
    """Correlations in 10-step means, by (activation, of, scope, kind): [seed, point].

    The means leave out steps at which a correlation had no value; `undefined` [seed] counts them.
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
        """Read what :meth:`save` wrote; ValueError if it is broken."""
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
            say(f"{NAMES[activation]}, {of}s: {steps} steps of {count(len(seeds), 'seed')} done")
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
    return f"{count(seeds, 'seed')} of {steps} steps, {time_}"


def measure(how: How, folder: Path, say: Say) -> None:
    """Run everything and write the table."""
    began, (seeds, steps) = time.time(), size(how)
    results = collect(list(ACTIVATIONS), list(range(seeds)), steps, say)
    results.save(folder / TABLE)
    arms = {f"{NAMES[a]}, {of}s": list(range(seeds)) for a in ACTIVATIONS for of in get_args(Of)}
    where = f"{processor()}, {torch.get_num_threads()} threads"
    total = len(arms) * seeds * steps
    note(how, NAME, where, "stacked", "float64", steps, arms, total, began).write(folder)


def length(results: Results) -> float:
    """The share of the paper's steps."""
    points = next(iter(results.series.values())).shape[1]
    return float(points * POINT / STEPS)


def claim(
    results: Results, activation: str = "relu", of: str = "weight", scope: str = "global"
) -> list[Finding]:
    """The paper's claim 1 on one panel."""
    data = {kind: results.series[activation, of, scope, kind] for kind in get_args(Kind)}
    return utility_claim.claim(data, length(results))


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


@styled()
def draw(folder: Path, target: Path, suffixes: Sequence[str]) -> list[Path]:
    """Figure 2 and its appendix version; mean and standard error over seeds."""
    results = Results.load(folder / TABLE)
    drawn = (_figure(results), _appendix(results))
    return [
        path
        for name, picture in zip(pictures(folder), drawn, strict=True)
        for path in save(picture, *(target / f"{name}.{suffix}" for suffix in suffixes))
    ]


def _figure(results: Results) -> Any:
    first = next(iter(results.series))[0]
    picture, [[axes]] = canvas(1, 1, (5.3, 2.9))
    _panel(axes, results, first, "weight", "global")
    axes.set(ylabel="Spearman correlation", title=f"Global weight utility, {NAMES[first]}")
    label_ends(picture)
    return picture


def _appendix(results: Results) -> Any:
    activations = list(dict.fromkeys(key[0] for key in results.series))
    rows = len(activations)
    picture, grid = canvas(rows, 4, (11, 2.5 * rows + 0.5))
    for i, activation in enumerate(activations):
        for j, (of, scope) in enumerate(PANELS):
            _panel(grid[i, j], results, activation, of, scope)
            if i == 0:
                grid[i, j].set_title(f"{of.capitalize()}, {scope} utility")
        grid[i, 0].set_ylabel(f"{NAMES[activation]}\nSpearman correlation")
    legend(picture, grid.flat)
    return picture


def _panel(axes: Any, results: Results, activation: str, of: str, scope: str) -> None:
    lines = {kind: results.series[activation, of, scope, kind] for kind in get_args(Kind)}
    for number, (kind, values) in enumerate(lines.items()):
        drawn = thin(Line(POINT, tuple(range(len(values))), values), DRAWN)
        curve(axes, drawn.samples, drawn.values, look(number), LABELS[kind], standard_error)
    axes.set_ylim(-0.25, 1.05)
    axes.axhline(0, color=RULE, linewidth=0.6, zorder=0)
    axes.set_xlabel("Time step")
    footnote(axes, f"{seeds([len(values) for values in lines.values()])}; bands: {BAND}")


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
    activations = list(dict.fromkeys(key[0] for key in results.series))
    for of, activation in itertools.product(get_args(Of), activations):
        found = claim(results, activation, of)
        lines += [
            "",
            f"## Claim 1, {of}s, {NAMES[activation]}, global",
            "",
            *utility_claim.table(found),
        ]
    first = activations[0]
    lines += [
        "",
        f"## Claim 1 with the public code's ranks, weights, {NAMES[first]}, global",
        "",
        "The paper's public code correlates the results of one `argsort`, where ranks take two. "
        "That is not Spearman's correlation; presumably the paper's figure was made with it.",
        "",
        *utility_claim.table(claim(results, first, "weight", "argsort")),
        "",
        "## Means over the run",
        "",
        "| panel | " + " | ".join(LABELS[kind] for kind in get_args(Kind)) + " |",
        "|---|" + "---:|" * len(get_args(Kind)),
    ]
    for activation, (of, scope) in itertools.product(activations, PANELS):
        series = (results.series[activation, of, scope, kind] for kind in get_args(Kind))
        cells = " | ".join(f"{np.nanmean(values):.3f}" for values in series)
        lines.append(f"| {NAMES[activation]}, {of}, {scope} | {cells} |")
    missing = {" ".join(k): int(x.sum()) for k, x in results.undefined.items() if x.any()}
    if missing:
        told = "; ".join(f"{name}: {times}" for name, times in missing.items())
        text = f"left out: {sum(missing.values())}, in {told}."
        lines += ["", f"Undefined correlations (one side constant), {text}"]
    return [*lines, ""]  # notes may follow
