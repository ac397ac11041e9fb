"""Online accuracy of 16-bit weights and traces on digits whose labels are permuted again and again.

    python benchmarks/low_precision.py [--seeds 3]

A network 64-128-64-10 sees batches of 16 of scikit-learn's digits, 1000 in all; after every 250 the
labels are permuted. The accuracy is that before each step, averaged over all. Each line keeps
weights and traces in its way (:data:`upgd.optim.memory.PRECISIONS`, and bfloat16 rounded to the
nearest); activations have the type of the weights. Runs of one seed see the same samples.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from upgd import UPGD, AdaUPGD
from upgd.optim.memory import PRECISIONS

STEPS, BATCH, TASK = 1000, 16, 250
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "UPGD(lr=0.03)": (UPGD, {"lr": 0.03}),
    "AdaUPGD(lr=0.001)": (AdaUPGD, {"lr": 0.001}),
    "AdaUPGD(lr=0.0001)": (AdaUPGD, {"lr": 0.0001}),
}
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bfloat16, to the nearest": (torch.bfloat16, {}),
    **PRECISIONS,
}


def accuracy(cls: Any, hyper: dict[str, float], way: str, seed: int) -> float:
    dtype, options = WAYS[way]
    torch.manual_seed(seed)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    model = nn.Sequential(*layers).to(dtype)
    opt = cls(model.parameters(), seed=seed, **hyper, **options)
    digits = load_digits()
    images = (torch.tensor(digits.data) / 16).to(dtype)
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(seed)
    right = 0
    for step in range(STEPS):
        if step % TASK == 0:
            names = torch.randperm(10, generator=generator)
        some = torch.randint(len(labels), (BATCH,), generator=generator)
        y = names[labels[some]]
        opt.zero_grad()
        logits = model(images[some]).float()
        nn.functional.cross_entropy(logits, y).backward()
        opt.step()
        right += int((logits.detach().argmax(1) == y).sum())
    return right / (STEPS * BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print(f"| weights | {' | '.join(f'`{name}`' for name in OPTIMIZERS)} |")
    print("|---|" + "---|" * len(OPTIMIZERS))
    for way in WAYS:
        cells = []
        for cls, hyper in OPTIMIZERS.values():
            found = [accuracy(cls, hyper, way, seed) for seed in seeds]
            error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
            cells.append(f"{100 * statistics.mean(found):.1f} ± {100 * error:.1f}")
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
