"""A tiny task and the plain loop that every framework's own loop is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import upgd

SIZE, CLASSES, BATCH = 6, 3, 4

# How each class is chosen: the class and keyword arguments, as every framework takes them.
CHOICES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "UPGD": (upgd.UPGD, {"lr": 0.05, "sigma": 0.1, "seed": 3}),
    "AdaUPGD": (upgd.AdaUPGD, {"lr": 0.01, "sigma": 0.1, "eps": 1e-5, "seed": 3}),
    "StreamingEWC": (upgd.StreamingEWC, {"lr": 0.05, "seed": 3}),
}
FEATURES = {"lr": 0.05, "sigma": 0.1, "seed": 3}

choices = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Always the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [nn.Linear(SIZE, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)]
        return nn.Sequential(*layers).to(dtype)


def samples(count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, SIZE, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches, in order."""
    x, y = samples(count * BATCH)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    data: list[tuple[Tensor, Tensor]],
    *,
    schedule: Any = None,
    clip: float | None = None,
    accumulate: int = 1,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    precision: torch.dtype | None = None,
) -> None:
    """The loop of PyTorch's tutorials; `schedule` advances with every step of `opt`."""
    for i, (x, y) in enumerate(data):
        with torch.autocast("cpu", dtype=precision, enabled=precision is not None):
            out = model(x)
            loss = nn.functional.cross_entropy(out.float(), y) / accumulate
        backward(loss)
        if (i + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if schedule is not None:
                schedule.step()
            opt.zero_grad()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """The same weights, bit for bit, and not those that training began with."""
    weights, others = model.state_dict(), other.state_dict()
    assert list(weights) == list(others)
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name
    assert not all(map(torch.equal, weights.values(), network().state_dict().values()))
