"""The paper's networks, with PyTorch's initial weights, as a function of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

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


def build(network: Sequence[int] | str, seed: int, activation: str = "relu") -> nn.Sequential:
    """A network whose initial weights are a function of `seed` alone.

    Args:
        network: The sizes of an MLP's layers, or ``"cnn"``.
        seed: Determines the weights; PyTorch's global generator is left as it is.
        activation: Of an MLP.

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
        torch.manual_seed(seed)
        return cnn() if isinstance(network, str) else mlp(network, activation)
