"""The paper's networks, with PyTorch's initial weights, as a function of a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from upgd.streams import keyed

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
}


def mlp(sizes: Sequence[int], activation: str = "relu") -> nn.Sequential:
    """Linear layers with an activation between each two; inputs are flattened first.

    Example:
        >>> from upgd.networks import mlp
        >>> [type(layer).__name__ for layer in mlp([784, 300, 10])]
        ['Flatten', 'Linear', 'ReLU', 'Linear']
    """
    if len(sizes) < 2 or any(size < 1 for size in sizes):
        raise ValueError(f"mlp: sizes are positive, inputs and outputs at least; got {sizes}")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"mlp: activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}"
        )
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def cnn(classes: int = 10) -> nn.Sequential:
    """The paper's network for CIFAR-10: no activation after the convolutions.

    Example:
        >>> import torch
        >>> from upgd.networks import cnn
        >>> cnn()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def build(
    network: Sequence[int] | str, seed: int, activation: str = "relu", task: int = 0
) -> nn.Sequential:
    """A network whose initial weights are a function of `seed` and `task` alone.

    Args:
        network: The sizes of an MLP's layers, or ``"cnn"``.
        seed: Determines the weights; PyTorch's global generator is left as it is.
        activation: Of an MLP.
        task: Other weights for each, where a learner starts afresh with every task.

    Example:
        >>> import torch
        >>> from upgd.networks import build
        >>> a, b = (build([4, 3, 2], seed=1) for _ in range(2))
        >>> torch.equal(a[1].weight, b[1].weight)
        True
    """
    if isinstance(network, str) and network != "cnn":
        raise ValueError(f"build: a network is a list of sizes or 'cnn', got {network!r}")
    with torch.random.fork_rng(devices=[]):
        model = cnn() if isinstance(network, str) else mlp(network, activation)
    begin(model, seed, task)
    return model


@torch.no_grad()
def begin(model: nn.Module, seed: int, task: int = 0) -> None:
    """Give every linear and convolutional layer its initial weights."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    tensors = [t for layer in layers for t in (layer.weight, layer.bias) if t is not None]
    values = initial_weights([tuple(t.shape) for t in tensors], seed, task)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(torch.from_numpy(value))


def initial_weights(
    shapes: Sequence[tuple[int, ...]], seed: int, task: int = 0
) -> list[NDArray[np.float32]]:
    """PyTorch's distribution for layers (uniform within ±1/√fan-in) from our own random words.

    Args:
        shapes: Of each layer's weight and bias, in turn.
        seed: Of the run.
        task: See :func:`build`.
    """
    found = []
    for number, shape in enumerate(shapes):
        weight = shapes[number - number % 2]
        bound = 1 / math.sqrt(math.prod(weight[1:]))
        u = keyed.uniform(math.prod(shape), seed, keyed.Purpose.WEIGHTS, task, number)
        found.append(((2 * u - 1) * bound).astype(np.float32).reshape(shape))
    return found
