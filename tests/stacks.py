"""What the tests of all stacks have in common: the plain loop they must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from upgd.engine.dense import Learner
from upgd.engine.feed import Feed
from upgd.metrics import sample_plasticity
from upgd.networks import build
from upgd.optim.noise import PhiloxNoise
from upgd.optim.registry import get
from upgd.streams import TaskStream, ToyStream, load

SIZES = (64, 7, 6, 10)


def classify(seed: int) -> Any:
    """Digits, inputs permuted anew every five samples."""
    return TaskStream(load("digits"), seed, 5, "inputs", flatten=True)


def small(seed: int, task_length: int = 5) -> Any:
    """Digits of 4×4, the same otherwise."""
    digits = load("digits")
    inputs = digits.inputs.reshape(-1, 4, 2, 4, 2).mean((2, 4)).astype(np.float32) / 8 - 1
    return TaskStream(replace(digits, inputs=inputs), seed, task_length, "inputs", flatten=True)


def regress(seed: int) -> Any:
    """A toy regression."""
    return ToyStream("changing-inputs", seed, 5)


class Trace(NamedTuple):
    """What a plain loop gave: the weights at the end, and each step's metrics."""

    weights: np.ndarray[Any, Any]
    losses: np.ndarray[Any, Any]
    plasticity: np.ndarray[Any, Any]
    right: np.ndarray[Any, Any]


def plain(
    learner: Learner,
    stream: Any,
    steps: int,
    sizes: Sequence[int] = SIZES,
    activation: str = "relu",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    model: nn.Module | None = None,
    noise: Any = None,
    kept: list[Any] | None = None,
) -> Trace:
    """One learner, one sample after the other, with PyTorch's autograd and our optimizers.

    `model` and `noise` take the place of the seed's own; `kept` receives the optimizer.
    """
    model = (model or build(sizes, learner.seed, activation)).to(device, dtype)
    row, defaults = get(learner.method)
    noise = noise or PhiloxNoise([tuple(p.shape) for p in model.parameters()])
    optimizer = row.make(model, **{**defaults, **learner.hyper}, seed=learner.seed, noise=noise)
    if kept is not None:
        kept.append(optimizer)
    losses, after, right = [], [], []
    for step in range(steps):
        x, y = (torch.from_numpy(part).to(device) for part in stream.at(step))
        x = x.to(dtype)

        def loss_of(output: torch.Tensor, y: torch.Tensor = y) -> torch.Tensor:
            if stream.loss == "cross_entropy":
                return F.cross_entropy(output, y)
            return F.mse_loss(output, y.to(dtype))

        output = model(x)
        loss = loss_of(output)
        optimizer.zero_grad()
        getattr(optimizer, "backward", torch.Tensor.backward)(loss)
        optimizer.step()
        losses.append(loss.item())
        right.append(float((output.argmax(1) == y).sum()) if y.dim() == 1 else 0.0)
        model.eval()
        with torch.no_grad():
            after.append(float(loss_of(model(x))))
        model.train()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    progress = sample_plasticity(losses, after)
    return Trace(weights.cpu().numpy(), np.array(losses), progress, np.array(right))


def output_layer_after_sgd(learner: Learner, stream: Any, sizes: Sequence[int]) -> Any:
    """Its weights and biases after a step of PyTorch's SGD, `output_gate` times as large."""
    model = build(sizes, learner.seed, "relu").to(torch.float64)
    x, y = (torch.from_numpy(part) for part in stream.at(0))
    F.cross_entropy(model(x.double()), y).backward()
    last = list(model.parameters())[-2:]
    gate = 1.0 if learner.method.startswith("feature-n-") else learner.hyper["output_gate"]
    torch.optim.SGD(last, lr=learner.hyper["lr"] * gate).step()
    return torch.cat([p.detach().flatten() for p in last]).numpy()


def gated_outputs(seed: int) -> list[Learner]:
    """Learners whose output layers have all kinds of gates."""
    hyper = {"lr": 0.3, "sigma": 0.5, "weight_decay": 0.0}
    gates = [("upgd", gate) for gate in (0.0, 0.5, 1.0, 2.0)]
    return [
        Learner(f"feature-{name}", {**hyper, "output_gate": gate}, seed)
        for name, gate in [*gates, ("n-upgd", 2.0), ("upgd-local", 2.0)]
    ]


def feed(learners: Sequence[Learner], stream: Any = classify) -> Feed:
    """The samples of a stack."""
    return Feed([stream(learner.seed) for learner in learners])


def numbers(array: Any) -> Any:
    """A NumPy array, from wherever."""
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
