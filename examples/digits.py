"""Learn from a stream whose labels change their meaning: the optimizers alone, no laboratory.

    python examples/digits.py

The stream is scikit-learn's 8×8 digits, one at a time; every 500 samples the ten labels are
permuted. Printed is the accuracy of each task, on samples not yet learned from. ``upgd demo``
shows the same with several seeds, settings that were searched for, and a page.
"""

from __future__ import annotations

import torch
from torch import nn

from upgd import UPGD
from upgd.streams import TaskStream, load

TASK, TASKS = 500, 12
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "UPGD-W": lambda parameters: UPGD(
        parameters, lr=0.05, sigma=0.01, beta_utility=0.9, weight_decay=0.002
    ),
}


def main() -> None:
    stream = TaskStream(load("digits"), seed=0, task_length=TASK, permute="labels", flatten=True)
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
        model = nn.Sequential(*layers)
        opt = make(model.parameters())
        print(f"{name:7}", end="", flush=True)
        for task in range(TASKS):
            right = 0
            for step in range(task * TASK, (task + 1) * TASK):
                x, y = map(torch.from_numpy, stream.at(step))
                logits = model(x)
                right += int(logits.argmax() == y)
                opt.zero_grad()
                nn.functional.cross_entropy(logits, y).backward()
                opt.step()
            print(f" {right / TASK:.2f}", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
