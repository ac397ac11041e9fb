"""Figure 2 and its appendix version: how well do approximations rank weights and features?

An SGD learner sees one sample at a time: five inputs from U[-½, ½], the target the sum of two
of them. Before every update, the true utility of every weight (network 5-50-1) or feature
(5-50-50-1) is compared with its approximations by Spearman's rank correlation, over the whole
network and within layers, in float64. All seeds learn side by side in stacked tensors; a seed's
result does not depend on its neighbours.

    python -m upgd.paper.utility_quality --output docs/results/utility_quality
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import io
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from upgd import curvature
from upgd.utility import Kind, Scope, Utilities, approximate, rank_correlation, true_utility

Of: TypeAlias = Literal["weight", "feature"]
Activation: TypeAlias = Literal["relu", "leaky_relu", "tanh"]
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
        loss = learners.loss(leaves, gates, x, y).sum()  # seeds do not mix: a sum is all of them
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
    """Global correlation as the paper's public code has it: of one ``argsort``, not of ranks."""
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
    if kind == "random":  # a seed's own, whoever learns beside it
        return torch.stack([torch.rand(value.shape[1:], generator=g) for g in noise])
    if kind == "magnitude" and of == "feature":  # a gate is 1: take the weights that leave it
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
        path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what :meth:`save` wrote."""
        with gzip.open(path, "rt") as lines:
            _, *table = csv.reader(lines)
        results = cls(list(dict.fromkeys(int(row[4]) for row in table)))
        for index in range(0, len(table), len(results.seeds)):
            rows = table[index : index + len(results.seeds)]
            activation, of, scope, kind = rows[0][:4]
            key = (activation, of, scope, kind)
            results.undefined[key] = np.array([int(row[5]) for row in rows])
            results.series[key] = np.array([[float(x) for x in row[6:]] for row in rows])
        return results


def collect(activations: list[str], seeds: list[int], steps: int) -> Results:
    """Run everything, saying how far it is."""
    results = Results(seeds)
    parts = [(activation, of) for activation in activations for of in get_args(Of)]
    started = time.monotonic()
    for number, (activation, of) in enumerate(parts):
        rows: dict[tuple[str, str], list[Tensor]] = {}
        for step, row in enumerate(run(activation, of, seeds, steps)):
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
            if (sys.stderr.isatty() and step % 20 == 0) or step + 1 == steps:
                done = (number + (step + 1) / steps) / len(parts)
                left = (time.monotonic() - started) * (1 - done) / done
                print(
                    f"\r{NAMES[activation]}, {of}s: step {step + 1} of {steps}; "
                    f"{100 * done:.0f}% of all, {left:.0f} s left   ",
                    end="" if sys.stderr.isatty() else "\n",
                    file=sys.stderr,
                    flush=True,
                )
        for (kind, scope), values in rows.items():
            every = torch.stack(values, 1).numpy()  # [seed, step]
            points = every.reshape(len(seeds), -1, POINT)
            with np.errstate(invalid="ignore"):
                counted = np.isfinite(points).sum(2)
                means = np.where(counted > 0, np.nansum(points, 2) / np.maximum(counted, 1), np.nan)
            name = (activation, of, scope, kind)
            results.series[name] = means
            results.undefined[name] = np.isnan(every).sum(1)
    print(file=sys.stderr)
    return results


# ------------------------------------------------------------------------- the claim
@dataclass(frozen=True)
class Finding:
    """One part of the paper's claim 1, judged: a statistic with a 95% interval over seeds."""

    statement: str
    estimate: float
    low: float
    high: float
    holds: bool

    def __str__(self) -> str:
        """A row of a Markdown table."""
        verdict = "holds" if self.holds else "does not hold"
        return (
            f"| {self.statement} | {self.estimate:+.3f} | [{self.low:+.3f}, {self.high:+.3f}] "
            f"| {verdict} |"
        )


def claim(
    results: Results, activation: str = "relu", of: str = "weight", scope: str = "global"
) -> list[Finding]:
    """The paper's claim 1 on one panel.

    First and last fifth of the run are compared where something is said to grow or shrink;
    averages over the run where something is said to be higher. "Throughout" also asks for
    the mean over seeds to be the highest at every point.
    """
    data = {kind: results.series[activation, of, scope, kind] for kind in get_args(Kind)}
    fifth = data["second"].shape[1] // 5
    change = {k: v[:, -fifth:].mean(1) - v[:, :fifth].mean(1) for k, v in data.items()}
    mean = {k: np.nanmean(v, 1) for k, v in data.items()}
    average = {k: np.nanmean(v, 0) for k, v in data.items()}
    others = [k for k in data if k != "second"]
    best = np.max([average[k] for k in others], axis=0)
    runner_up = max(others, key=lambda k: float(mean[k].mean()))
    everywhere = float(np.mean(average["second"] >= best))
    below = float(np.mean(average["squared_gradient"] < average["first"]))
    return [
        _finding(
            f"second-order minus the next best ({LABELS[runner_up].lower()}); its mean is highest "
            f"at {100 * everywhere:.0f}% of the points",
            mean["second"] - mean[runner_up],
            lambda low, high: low > 0 and everywhere == 1,
        ),
        _finding(
            "first-order falls: last fifth minus first fifth",
            change["first"],
            lambda low, high: high < 0,
        ),
        _finding(
            "weight magnitude is small: mean over the run (small: below 0.3)",
            mean["magnitude"],
            lambda low, high: high < 0.3,
        ),
        _finding(
            "weight magnitude shrinks: last fifth minus first fifth",
            change["magnitude"],
            lambda low, high: high < 0,
        ),
        _finding(
            "squared gradient grows: last fifth minus first fifth",
            change["squared_gradient"],
            lambda low, high: low > 0,
        ),
        _finding(
            "first-order minus squared gradient; the latter's mean is below at "
            f"{100 * below:.0f}% of the points",
            mean["first"] - mean["squared_gradient"],
            lambda low, high: low > 0 and below == 1,
        ),
        _finding(
            "random is zero: mean over the run (within ±0.01)",
            mean["random"],
            lambda low, high: low > -0.01 and high < 0.01,
        ),
    ]


def _finding(statement: str, per_seed: NDArray[np.float64], judge: Any) -> Finding:
    """Mean over seeds with a 95% bootstrap interval (10⁴ resamples, seeded)."""
    values = per_seed[np.isfinite(per_seed)]
    draws = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    low, high = np.percentile(values[draws].mean(1), [2.5, 97.5])
    return Finding(statement, float(values.mean()), low, high, bool(judge(low, high)))


# ------------------------------------------------------------------------ the figures
def draw(results: Results, folder: Path) -> list[Path]:
    """Figure 2 and its appendix version; mean and standard error over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "upgd", "axes.spines.top": False})
    plt.rcParams.update({"axes.spines.right": False, "font.size": 9})
    activations = list(dict.fromkeys(key[0] for key in results.series))
    paths = []
    figure, axes = plt.subplots(figsize=(4.2, 3.2), layout="constrained")
    _panel(axes, results, activations[0], "weight", "global")
    axes.set(xlabel="Time step", ylabel="Spearman correlation")
    axes.set_title(f"Global weight utility, {NAMES[activations[0]]}")
    axes.legend(fontsize=7, loc="center left", frameon=False, bbox_to_anchor=(0, 0.52))
    paths.append(folder / "figure2.png")
    figure.savefig(paths[-1], dpi=200)
    plt.close(figure)

    rows = len(activations)
    figure, grid = plt.subplots(
        *(rows, 4), figsize=(11, 2.5 * rows + 0.5), sharex=True, sharey=True, squeeze=False
    )
    for i, activation in enumerate(activations):
        for j, (of, scope) in enumerate(PANELS):
            _panel(grid[i, j], results, activation, of, scope)
            if i == 0:
                grid[i, j].set_title(f"{of.capitalize()}, {scope} utility")
            if i == rows - 1:
                grid[i, j].set_xlabel("Time step")
        grid[i, 0].set_ylabel(f"{NAMES[activation]}\nSpearman correlation")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    paths.append(folder / "figure2_appendix.png")
    figure.savefig(paths[-1], dpi=130)
    plt.close(figure)
    return paths


def _panel(axes: Any, results: Results, activation: str, of: str, scope: str) -> None:
    for colour, kind in enumerate(get_args(Kind)):
        values = results.series[activation, of, scope, kind]
        counted = np.isfinite(values).sum(0)
        mean = np.nanmean(values, 0)
        error = np.nanstd(values, 0, ddof=1) / np.sqrt(counted)
        time_steps = POINT * (np.arange(len(mean)) + 1)
        label = LABELS[kind]
        if kind == "magnitude" and of == "feature":
            label = "Outgoing weight magnitude"
        axes.plot(time_steps, mean, color=f"C{colour}", label=label, linewidth=1.2)
        axes.fill_between(time_steps, mean - error, mean + error, color=f"C{colour}", alpha=0.25)
    axes.set_ylim(-0.25, 1.05)
    axes.axhline(0, color="0.8", linewidth=0.6, zorder=0)


def page(results: Results) -> str:
    """The results as a Markdown page."""
    steps = POINT * next(iter(results.series.values())).shape[1]
    command = "python -m upgd.paper.utility_quality"
    if (len(results.seeds), steps) != (30, 2000):
        command += f" --seeds {len(results.seeds)} --steps {steps}"
    lines = [
        "# Quality of the approximated utilities (Figure 2)",
        "",
        f"`{command}`: {len(results.seeds)} seeds, {steps} steps, {POINT}-step means. Lines are "
        "means over seeds, bands standard errors.",
        "",
        "![Figure 2: rank correlation with the true utility](figure2.png)",
        "",
        "![The appendix version: three activations, weights and features, global and local]"
        "(figure2_appendix.png)",
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
                *[str(finding) for finding in claim(results, activation, of)],
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
        *[str(finding) for finding in claim(results, first, "weight", "argsort")],
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
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Run, draw and judge."""
    parser = argparse.ArgumentParser(
        prog="python -m upgd.paper.utility_quality", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=30, help="how many runs (default 30)")
    parser.add_argument("--steps", type=int, default=2000, help="default 2000")
    parser.add_argument("--activations", nargs="+", choices=[*ACTIVATIONS], default=[*ACTIVATIONS])
    parser.add_argument("--output", type=Path, default=Path("utility_quality"), help="a folder")
    parser.add_argument(
        "--redraw", action="store_true", help="figures and page from the numbers in that folder"
    )
    args = parser.parse_args(arguments)
    if args.seeds < 2 or args.steps < 5 * POINT or args.steps % POINT:
        parser.error(f"at least 2 seeds, and steps a multiple of {POINT} from {5 * POINT} on")
    if importlib.util.find_spec("matplotlib") is None:  # say so before the work, not after it
        parser.error("the figures need matplotlib: pip install 'upgd[demo]'")
    numbers = args.output / "correlations.csv.gz"
    if args.redraw:
        if not numbers.exists():
            parser.error(f"there is no {numbers} to draw from; run without --redraw first")
        results = Results.load(numbers)
    else:
        args.output.mkdir(parents=True, exist_ok=True)
        results = collect(args.activations, list(range(args.seeds)), args.steps)
        results.save(numbers)
    paths = draw(results, args.output)
    text = args.output / "README.md"
    text.write_text(page(results))
    for finding in claim(results, next(iter(results.series))[0]):
        print(finding)
    print("wrote", *paths, text, numbers)


if __name__ == "__main__":
    main()
