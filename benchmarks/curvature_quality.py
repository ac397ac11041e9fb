"""How close the estimates come to the exact Hessian diagonal, and what each of them costs.

    python benchmarks/curvature_quality.py [--seeds 6] [--networks "MLP tanh"] [--output page.md]

Small networks on scikit-learn's 8×8 digits, in double precision, at initialisation and after
some steps of Adam. The exact diagonal takes one Hessian-vector product per parameter. A seed
determines the split of the data, the initialisation, the order of training and the images whose
loss is differentiated; measures are taken per seed, then averaged.

The three estimates an optimizer can afford are HesScale, its Gauss-Newton variant and Hutchinson
with one sample. Hutchinson with 16 samples and the exact Gauss-Newton diagonal are there for
reference: the first tells how noise goes down, the second what Gauss-Newton leaves out.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import networks
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from upgd import curvature

sys.path.append(str(Path(__file__).parents[1]))  # python benchmarks/curvature_quality.py
from tests.exact import exact_diagonal, exact_ggn_diagonal

OPTIONS: dict[str, dict[str, Any]] = {
    "HesScale": {"method": "hesscale"},
    "GGN": {"method": "ggn"},
    "Hutchinson": {"method": "hutchinson"},
    "Hutchinson, 16 samples": {"method": "hutchinson", "samples": 16},
}
AFFORDABLE = ["HesScale", "GGN", "Hutchinson"]
ESTIMATES = [*OPTIONS, "exact GGN"]
STAGES = ["new", "trained"]
DRAWS = {32: 1, 1: 4}  # batch size: how many batches a seed's measures are the mean of
MEASURES = {"error": min, "ranks": max, "tensor error": min, "tensor ranks": max}  # and the best
ROUNDING = 1e-12  # of the largest exact element


# --------------------------------------------------------------------------- networks
@dataclass(frozen=True)
class Network:
    """A model and what it makes of pixels from 0 to 16, of shape (batch, 64)."""

    build: Callable[[], nn.Module]
    encode: Callable[[Tensor], Tensor]


def vector(pixels: Tensor) -> Tensor:
    return pixels / 8 - 1


def image(pixels: Tensor) -> Tensor:
    return vector(pixels).reshape(-1, 1, 8, 8)


def colours(pixels: Tensor) -> Tensor:
    return image(pixels).repeat(1, 3, 1, 1)


def tokens(pixels: Tensor) -> Tensor:
    """16 tokens out of 80: the mean of 2×2 pixels in five levels, and where they are."""
    levels = F.avg_pool2d(pixels.reshape(-1, 1, 8, 8), 2).flatten(1).div(4).round().long()
    return 5 * torch.arange(16) + levels


def cnn(activation: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 1, 1), activation()),
        *(nn.Conv2d(8, 12, 3, 2, 1), activation()),
        *(nn.Conv2d(12, 12, 3, 2, 1), activation()),
        *(nn.Flatten(), nn.Linear(48, 10)),
    )


NETWORKS = {
    "MLP relu": Network(lambda: networks.mlp([64, 32, 32, 10], nn.ReLU), vector),
    "MLP tanh": Network(lambda: networks.mlp([64, 32, 32, 10], nn.Tanh), vector),
    "CNN relu": Network(lambda: cnn(nn.ReLU), image),
    "CNN tanh": Network(lambda: cnn(nn.Tanh), image),
    "residual CNN relu": Network(lambda: networks.resnet([6, 10], 1, 10, nn.ReLU), colours),
    "residual CNN silu": Network(lambda: networks.resnet([6, 10], 1, 10, nn.SiLU), colours),
    "transformer gelu": Network(lambda: networks.Transformer(80, 16, 2, 10), tokens),
}


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels and labels, 1500 to train with and 297 to test."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    pixels, labels = torch.tensor(data.data)[order], torch.tensor(data.target)[order]
    return pixels[:1500], labels[:1500], pixels[1500:], labels[1500:]


def fix(model: nn.Module, x: Tensor) -> None:
    """Where there is batch normalisation, give it the statistics of `x` and eval mode."""
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        for _ in range(50):  # each moves the running averages by a tenth
            networks.settle(model, x[:500])


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        chosen = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()


# -------------------------------------------------------------------------- estimates
def closures(
    model: nn.Module, x: Tensor, y: Tensor
) -> tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """The network's output as a function of its parameters, and the loss of an output."""
    names = [name for name, _ in model.named_parameters()]

    def outputs(*tensors: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, tensors, strict=True)), (x,))

    return outputs, lambda output: F.cross_entropy(output, y)


def diagonals(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> dict[str, list[Tensor]]:
    """One tensor per parameter under each of ESTIMATES and under "exact"."""
    params = list(model.parameters())
    outputs, loss = closures(model, x, y)
    found = {
        name: curvature.diagonal(loss(model(x)), params, seed=seed, **options)
        for name, options in OPTIONS.items()
    }
    found["exact GGN"] = exact_ggn_diagonal(loss, outputs, params)
    found["exact"] = exact_diagonal(lambda *tensors: loss(outputs(*tensors)), params)
    # Zero but for rounding (attention does not feel its keys' bias) has neither order nor sign.
    floor = ROUNDING * max(float(h.abs().max()) for h in found["exact"])
    return {k: [torch.where(h.abs() > floor, h, 0.0) for h in hs] for k, hs in found.items()}


def relative_error(h: Tensor, exact: Tensor) -> float:
    return float((h - exact).norm() / exact.norm())


def rank_correlation(h: Tensor, exact: Tensor) -> float:
    constant = bool((h == h[0]).all())
    return 0.0 if constant else float(spearmanr(h, exact).statistic)


def measures(found: dict[str, list[Tensor]], output_layer: int) -> Iterator[tuple[str, str, float]]:
    """(measure, estimate, value); the last `output_layer` tensors are those of that layer."""
    # Parameters that the loss does not see (dead units, tokens that do not occur) are zero
    # to every estimate; their ties would count as agreement.
    seen = [sum(h.abs() for h in hs) > 0 for hs in zip(*found.values(), strict=True)]
    found = {k: [h[s] for h, s in zip(hs, seen, strict=True)] for k, hs in found.items()}
    tensors = found.pop("exact")
    exact = torch.cat(tensors)
    curved = exact != 0
    yield "negative", "exact", float((exact < 0)[curved].double().mean())
    for name, hs in found.items():
        h = torch.cat(hs)
        yield "error", name, relative_error(h, exact)
        yield "ranks", name, rank_correlation(h, exact)
        yield "sign", name, float((h.sign() == exact.sign())[curved].double().mean())
        yield "size", name, float(h.norm() / exact.norm())
        pairs = list(zip(hs, tensors, strict=True))
        varied = [(a, b) for a, b in pairs if b.numel() > 1 and not (b == b[0]).all()]
        yield "tensor error", name, statistics.mean(relative_error(*pair) for pair in varied)
        yield "tensor ranks", name, statistics.mean(rank_correlation(*pair) for pair in varied)
        last = [relative_error(*pair) for pair in pairs[-output_layer:] if pair[1].any()]
        yield "output layer", name, max(last)


class Row(NamedTuple):
    """One measured number, of one seed and one batch."""

    network: str
    stage: str
    batch: int
    seed: int
    measure: str
    estimate: str
    value: float


def work(task: tuple[str, int, int]) -> list[Row]:
    """All rows of one network and seed."""
    name, seed, steps = task
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    pixels, y, test_pixels, test_y = digits(seed)
    network = NETWORKS[name]
    model, x = network.build(), network.encode(pixels)
    rows = []
    with sdpa_kernel(SDPBackend.MATH):  # fused attention does not differentiate twice
        for stage in STAGES:
            if stage == "trained":
                train(model, x, y, steps)
            fix(model, x)
            for batch, draws in DRAWS.items():
                for draw in range(draws):
                    some = slice(batch * draw, batch * (draw + 1))
                    found = diagonals(model, x[some], y[some], seed=100 * seed + draw)
                    rows += [
                        Row(name, stage, batch, seed, *measured)
                        for measured in measures(found, output_layer=2)
                    ]
    right = (model(network.encode(test_pixels)).argmax(1) == test_y).double().mean()
    return [*rows, Row(name, "trained", 0, seed, "accuracy", "", float(right))]


def all_rows(names: Iterable[str], seeds: int, steps: int) -> list[Row]:
    tasks = [(name, seed, steps) for name in reversed(list(names)) for seed in range(seeds)]
    rows: list[Row] = []
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for done, found in enumerate(pool.imap_unordered(work, tasks), 1):
            rows += found
            print(
                f"{time.perf_counter() - start:5.0f} s  {done}/{len(tasks)}  "
                f"{found[0].network}, seed {found[0].seed}",
                file=sys.stderr,
                flush=True,
            )
    return rows


class Summary:
    """Means and standard errors over seeds."""

    def __init__(self, rows: list[Row]) -> None:
        self._values: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for row in rows:
            key = (row.network, row.stage, row.batch, row.measure, row.estimate)
            self._values[key][row.seed].append(row.value)

    def seeds(self, *key: Any) -> list[float]:
        return [statistics.mean(values) for values in self._values[key].values()]

    def mean(self, *key: Any) -> float:
        return statistics.mean(self.seeds(*key))

    def largest(self, *key: Any) -> float:
        return max(max(values) for values in self._values[key].values())

    def cell(self, *key: Any) -> str:
        values = self.seeds(*key)
        mean = statistics.mean(values)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        if error < 1e-9 and abs(mean - round(mean)) < 1e-9:
            return f"{round(mean)}"
        digits = min(3, max(0, math.ceil(-math.log10(error)))) if error > 0 else 2
        return f"{number(mean, digits)} ± {number(error, digits)}"


def number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.00


# ------------------------------------------------------------------------------- cost
def cost(network: Network, rounds: int) -> dict[str, float]:
    """How often forward + backward fits into a step with each estimate; "ms" is its time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, y, _, _ = digits(0)
    model, x = network.build(), network.encode(pixels)
    fix(model, x)
    x, y = x[:32], y[:32]
    params = list(model.parameters())
    outputs, loss = closures(model, x, y)

    def gradient() -> None:
        model.zero_grad(set_to_none=True)
        loss(model(x)).backward()

    def estimate(options: dict[str, Any]) -> None:
        model.zero_grad(set_to_none=True)
        curvature.backward(loss(model(x)), params, **options)

    steps: dict[str, Callable[[], Any]] = {
        "gradient": gradient,
        "forward": lambda: loss(model(x)),
        **{name: lambda o=options: estimate(o) for name, options in OPTIONS.items()},
    }
    times = defaultdict(list)
    for i in range(rounds + 1):
        for name, step in steps.items():
            seconds = duration(step, repeats=1 if "16" in name else 5)
            if i > 0:  # the first round warms up
                times[name].append(seconds)
    unit = statistics.median(times["gradient"])
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["gradient"], strict=True))
        for name in steps
    }
    ratios["ms"] = 1e3 * unit
    ratios["parameters"] = sum(p.numel() for p in params)
    for _ in range(2):  # the second time counts
        ratios["exact GGN"] = duration(lambda: exact_ggn_diagonal(loss, outputs, params)) / unit
    ratios["exact"] = duration(lambda: exact_diagonal(lambda *t: loss(outputs(*t)), params)) / unit
    return ratios


def duration(step: Callable[[], Any], repeats: int = 1) -> float:
    start = time.process_time()  # other programs may run, too
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats


# ------------------------------------------------------------------------------- page
def markdown(head: list[str], body: Iterable[list[str]]) -> list[str]:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def quality_table(
    summary: Summary, names: list[str], batch: int, measure: str, best: Callable[..., float]
) -> list[str]:
    """A line per network and stage; the best of the affordable estimates in bold."""
    body = []
    for name in names:
        for stage in STAGES:
            key = (name, stage, batch, measure)
            cells = {e: summary.cell(*key, e) for e in ESTIMATES}
            first = cells[best(AFFORDABLE, key=lambda e, key=key: summary.mean(*key, e))]
            for e in AFFORDABLE:
                cells[e] = f"**{cells[e]}**" if cells[e] == first else cells[e]
            body.append([f"{name}, {stage}", *cells.values()])
    return markdown(["network", *ESTIMATES], body)


def sign_table(summary: Summary, names: list[str], batch: int) -> list[str]:
    head = ["network", "negative, %", *(f"sign: {e}" for e in AFFORDABLE)]
    head += [f"size: {e}" for e in AFFORDABLE]
    body = []
    for name in names:
        for stage in STAGES:
            key = (name, stage, batch)
            line = [f"{name}, {stage}", f"{100 * summary.mean(*key, 'negative', 'exact'):.0f}"]
            line += [f"{100 * summary.mean(*key, 'sign', e):.0f}" for e in AFFORDABLE]
            line += [summary.cell(*key, "size", e) for e in AFFORDABLE]
            body.append(line)
    return markdown(head, body)


def cost_table(summary: Summary, costs: dict[str, dict[str, float]]) -> list[str]:
    columns = [*ESTIMATES, "exact"]
    head = ["network", "parameters", "test accuracy, %", "gradient, ms", *columns]
    body = []
    for name, ratios in costs.items():
        accuracy = 100 * summary.mean(name, "trained", 0, "accuracy", "")
        line = [name, f"{ratios['parameters']:,}", f"{accuracy:.0f}", f"{ratios['ms']:.2f}"]
        line += [f"{ratios[c]:.{2 if ratios[c] < 10 else 0}f}" for c in columns]
        body.append(line)
    return markdown(head, body)


def span(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    low, high = (number(v, digits if v < 10 else 0) for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def overview(summary: Summary, names: list[str], costs: dict[str, dict[str, float]]) -> list[str]:
    """What the numbers say: ranges over all lines of the tables, then sentences."""
    lines = [(name, stage, batch) for batch in DRAWS for name in names for stage in STAGES]
    relu = [line for line in lines if line[0].endswith("relu")]
    smooth = [line for line in lines if line not in relu]

    def means(measure: str, estimate: str, among: Any = lines) -> list[float]:
        return [summary.mean(*line, measure, estimate) for line in among]

    def wins(than: str, among: Any = lines, measure: str = "error", sign: int = 1) -> str:
        pairs = zip(means(measure, "HesScale", among), means(measure, than, among), strict=True)
        return f"{sum(sign * a < sign * b for a, b in pairs)} of {len(among)}"

    head = ["over all lines", "time ÷ gradient", "relative error", "error below 1"]
    body = [
        [
            e,
            span((ratios[e] for ratios in costs.values()), 1),
            span(means("error", e)),
            f"{sum(value < 1 for value in means('error', e))} of {len(lines)}",
            span(means("ranks", e)),
            span((100 * value for value in means("sign", e)), 0),
        ]
        for e in ESTIMATES
    ]
    passes = [(r["Hutchinson"] - r["HesScale"]) / (1 - r["forward"]) for r in costs.values()]
    output = max(
        summary.largest(*line, "output layer", e) for line in lines for e in ("HesScale", "GGN")
    )
    sentences = [
        "An estimate of nothing but zeros has the relative error 1. HesScale is closer than "
        f"Hutchinson in {wins('Hutchinson')} lines, and than Hutchinson with 16 "
        f"samples in {wins('Hutchinson, 16 samples')}. One sample costs "
        f"{span(passes, 1)} backward passes more than HesScale.",
        "The output layer's curvature is exact with HesScale and GGN (largest relative error of "
        f"a tensor: {output:.0g}).",
    ]
    if relu:
        ggn = max(means("error", "exact GGN", relu))
        sentences.append(
            "A ReLU network is piecewise linear in each single weight, so the exact Gauss-Newton "
            f"diagonal is the Hessian's (largest error {ggn:.0g}), HesScale and GGN are the same, "
            "and their error comes from dropping off-diagonal elements alone."
        )
    if smooth:
        negative = span((100 * value for value in means("negative", "exact", smooth)), 0)
        sentences.append(
            f"With smooth activations {negative} % of the curvatures are negative. There, HesScale "
            f"is closer than GGN in {wins('GGN', smooth)} lines and than the exact Gauss-Newton "
            f"diagonal in {wins('exact GGN', smooth)}; it has the better rank correlation in "
            f"{wins('GGN', smooth, 'ranks', -1)} and {wins('exact GGN', smooth, 'ranks', -1)}."
        )
    new, trained = ([line for line in lines if line[1] == stage] for stage in STAGES)
    small = {line[0] for line in trained if summary.mean(*line, "size", "HesScale") < 0.5}
    sentences.append(
        f"HesScale's norm is {span(means('size', 'HesScale', new))} of the exact one in new "
        f"networks and {span(means('size', 'HesScale', trained))} in trained ones (below 0.5: "
        f"{', '.join(sorted(small)) or 'none'}). Hutchinson's is "
        f"{span(means('size', 'Hutchinson'), 1)} times the exact one."
    )
    table = markdown([*head, "rank correlation", "sign right, %"], body)
    return [*table, "", *(f"- {sentence}" for sentence in sentences)]


PAGE = """\
# How close the estimates come to the exact Hessian diagonal

`python benchmarks/curvature_quality.py {arguments}`, torch {torch}, {machine}.

Small networks on scikit-learn's 8×8 digits, cross-entropy, double precision; `new` is at
initialisation, `trained` after {steps} steps of Adam. Batch normalisation is in eval mode. Numbers
are mean ± standard error over {seeds} seeds (split, initialisation, training, images); with batch 1
a seed's number is the mean over {draws} images.

`HesScale`, `GGN` and `Hutchinson` are the three methods of `upgd.curvature`, the last with one
sample, the least it can do; the best of them is in bold. Two columns are not at the same cost:
`Hutchinson, 16 samples`, and `exact GGN`, the diagonal of the Gauss-Newton matrix. All are
estimates from one batch at one step: averaged over steps, Hutchinson's error, which is noise, would
shrink, and that of the others, which is bias, would stay.

## What one sees

{overview}

## Networks and cost

Processor time of forward + backward + estimate, divided by that of forward + backward (gradient):
batch 32, one thread, median of 15 rounds. `exact` is the exact Hessian diagonal; it and `exact GGN`
are timed once, by themselves.

{cost}
"""
SECTION = """
## Batch {batch}

### Relative error

‖ĥ - h‖ / ‖h‖ over all parameters that the loss sees.

{error}

### Rank correlation

Spearman's, over all parameters that the loss sees.

{ranks}

### Relative error, mean over parameter tensors

{tensor_error}

### Rank correlation, mean over parameter tensors

{tensor_ranks}

### Sign and size

Share of curvatures that are negative, share whose sign is right (in %, of those that are not
zero), and ‖ĥ‖ / ‖h‖.

{sign}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--quick", action="store_true", help="two seeds, 50 steps")
    parser.add_argument("--output", type=Path, help="write a Markdown page here")
    args = parser.parse_args()
    names = args.networks
    seeds, steps = (2, 50) if args.quick else (args.seeds, args.steps)
    summary = Summary(all_rows(names, seeds, steps))
    torch.set_default_dtype(torch.float64)
    costs = {}
    with sdpa_kernel(SDPBackend.MATH):
        for name in names:
            costs[name] = cost(NETWORKS[name], rounds=15)
            print(f"{name}: cost measured", file=sys.stderr, flush=True)
    page = PAGE.format(
        arguments=shlex.join(sys.argv[1:]),
        torch=torch.__version__,
        machine=platform.machine(),
        steps=steps,
        seeds=seeds,
        draws=DRAWS[1],
        overview="\n".join(overview(summary, names, costs)),
        cost="\n".join(cost_table(summary, costs)),
    )
    for batch in DRAWS:
        tables = {
            measure.replace(" ", "_"): quality_table(summary, names, batch, measure, best)
            for measure, best in MEASURES.items()
        }
        tables["sign"] = sign_table(summary, names, batch)
        page += SECTION.format(batch=batch, **{k: "\n".join(v) for k, v in tables.items()})
    print(page, end="")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(page)


if __name__ == "__main__":
    main()
