"""Networks that the benchmarks share, from a few thousand parameters to ResNet-18."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def mlp(sizes: list[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Two 3×3 convolutions with batch normalisation, added to the input."""

    def __init__(
        self, channels_in: int, channels: int, stride: int, activation: type[nn.Module]
    ) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            activation(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.skip = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.main(x) + self.skip(x))


def resnet(
    widths: list[int], blocks: int, classes: int, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """``resnet([64, 128, 256, 512], 2, 10)`` is ResNet-18 for small images: 11.2 M parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        activation(),
    ]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Block(channels, width, stride, activation))
            channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)


def settle(model: nn.Module, x: Tensor) -> nn.Module:
    """Let batch normalisation see some data, then fix its statistics."""
    with torch.no_grad():
        model.train()(x)
    return model.eval()


class Transformer(nn.Module):
    """One pre-norm transformer block between an embedding and a linear read-out."""

    def __init__(self, tokens: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.block = nn.TransformerEncoderLayer(
            *(width, heads, 2 * width),
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.block(self.embedding(x)).mean(1)))
