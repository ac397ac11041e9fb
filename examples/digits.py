"""Learn from a stream whose labels change their meaning, with and without UPGD.

    python examples/digits.py [--seeds 4] [--tasks 20]

The stream: scikit-learn's 8×8 digits one at a time, in random order. Every 500 samples
the ten labels are permuted, so the network must learn a new assignment of the same images.
What it learned about the images stays useful, if it is not forgotten and if the network
still can learn. The score is accuracy on each sample before learning from it.

Each optimizer's settings are the best of a grid (`grid` below) by mean accuracy on two other
seeds and fifteen tasks; ``--search`` repeats the choice.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import upgd

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

TASK = 500
Factory = Callable[[Any], torch.optim.Optimizer]


def stream(seed: int, tasks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per task, images scaled to [-1, 1] and permuted labels."""
    digits = load_digits()
    images = torch.tensor((digits.data / 16 - 0.5) / 0.5, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(tasks):
        order = torch.as_tensor(rng.permutation(len(images))[:TASK])
        meaning = torch.as_tensor(rng.permutation(10))
        result.append((images[order], meaning[labels[order]]))
    return result


def accuracies(make: Factory, seed: int, tasks: int) -> list[float]:
    """Online accuracy of each task for one learner."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    opt = make(model.parameters())
    result = []
    for images, labels in stream(seed, tasks):
        right = 0
        for x, y in zip(images, labels, strict=True):
            logits = model(x)
            right += int(logits.argmax() == y)
            opt.zero_grad()
            nn.functional.cross_entropy(logits, y).backward()
            opt.step()
        result.append(right / TASK)
    return result


def make_optimizer(name: str, parameters: Any, **hyper: float) -> torch.optim.Optimizer:
    classes = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "UPGD": upgd.UPGD}
    return classes[name](parameters, **hyper)


SETTINGS: dict[str, dict[str, float]] = {
    "SGD": {"lr": 0.03},
    "Adam": {"lr": 0.003},
    "UPGD": {"lr": 0.1, "sigma": 0.001, "weight_decay": 0.0},
}


def grid() -> list[tuple[str, dict[str, float]]]:
    """What the settings were chosen from."""
    rates = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    cells: list[tuple[str, dict[str, float]]] = [
        (name, {"lr": lr}) for name in ("SGD", "Adam") for lr in rates
    ]
    for lr, sigma, decay in itertools.product(rates, (0.001, 0.01), (0.0, 0.001)):
        cells.append(("UPGD", {"lr": lr, "sigma": sigma, "weight_decay": decay}))
    return cells


def learner(job: tuple[str, dict[str, float], int, int]) -> list[float]:
    name, hyper, seed, tasks = job
    torch.set_num_threads(1)
    return accuracies(lambda p: make_optimizer(name, p, **hyper), seed, tasks)


def search(pool: Executor, seeds: range, tasks: int) -> None:
    cells = grid()
    jobs = [(name, hyper, seed, tasks) for name, hyper in cells for seed in seeds]
    scores = pool.map(learner, jobs)
    for name, hyper in cells:
        score = np.mean([next(scores) for _ in seeds])
        print(f"{score:.3f}  {name} {hyper}", flush=True)


def draw(results: dict[str, np.ndarray], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for name, runs in results.items():
        mean = runs.mean(0)
        error = runs.std(0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else 0 * mean
        tasks = np.arange(1, len(mean) + 1)
        (line,) = axes.plot(tasks, mean, label=name)
        axes.fill_between(tasks, mean - error, mean + error, alpha=0.25, color=line.get_color())
    axes.set_xlabel(f"task ({TASK} samples each, labels permuted anew)")
    axes.set_ylabel("online accuracy")
    axes.set_title("Label-permuted digits: mean and standard error over seeds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("demo.png"))
    parser.add_argument("--search", action="store_true", help="repeat the choice of settings")
    args = parser.parse_args()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        if args.search:
            search(pool, range(100, 102), 15)
            return
        print(f"{args.seeds} learners each, {args.tasks} tasks of {TASK} samples ...", flush=True)
        results = {}
        for name, hyper in SETTINGS.items():
            start = time.perf_counter()
            jobs = [(name, hyper, seed, args.tasks) for seed in range(args.seeds)]
            runs = results[name] = np.array(list(pool.map(learner, jobs)))
            edge = min(5, args.tasks)
            print(
                f"{name:5} accuracy: first {edge} tasks {runs[:, :edge].mean():.3f}, "
                f"last {edge} tasks {runs[:, -edge:].mean():.3f}   "
                f"({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
    draw(results, args.output)
    print(f"figure: {args.output}")


if __name__ == "__main__":
    main()
