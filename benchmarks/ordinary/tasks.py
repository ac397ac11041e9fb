"""Ordinary supervised work: six small tasks, each trained for a fixed number of steps.

A run is a function of the task, the optimizer and the seed: the seed gives the initial weights and
the batches, so that optimizers are compared on the same ones. One number comes out: accuracy on
the test images, or a loss on data that was not trained on.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
from networks import mlp
from torch import Tensor, nn
from torch.nn import functional as F

from upgd.streams import Dataset, load

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]
SMALL_STEPS = 10
EVALUATED_AT_ONCE = 500


class Source(NamedTuple):
    """Where data comes from: `small` replaces it by something that needs no files."""

    data_dir: str | None = None
    small: bool = False


class Images(nn.Module):
    """Flat or square inputs [n, side, side] for a network that takes images [n, 1, side, side]."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.unsqueeze(1))


def encoder(width: int, layers: int, heads: int) -> nn.TransformerEncoder:
    """Pre-norm blocks without dropout, four times as wide inside, and a last normalisation."""
    layer = nn.TransformerEncoderLayer(
        *(width, heads, 4 * width),
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
    norm = nn.LayerNorm(width)
    stack = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
    for p in stack.parameters():  # the layers are copies of one, with the same weights
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return stack


class CharacterModel(nn.Module):
    """A causal transformer that predicts the next of `symbols` characters at every place."""

    def __init__(self, symbols: int, context: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        self.body = encoder(width, layers=2, heads=4)
        self.out = nn.Linear(width, symbols)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.body(self.embedding(x) + self.places, mask=mask, is_causal=True)
        return self.out(hidden)


class ViT(nn.Module):
    """Patches of an image [n, 1, side, side] as tokens; their mean is classified."""

    def __init__(self, side: int, patch: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.body = encoder(width, layers=2, heads=4)
        self.out = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.out(self.body(tokens).mean(1))


def cnn(side: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, classes)),
    )


# ------------------------------------------------------------------------- the data
class Data(NamedTuple):
    """What a task learns from: batches of a size by a generator, and pairs to test with."""

    batch: Callable[[int, torch.Generator], Batch]
    test: Batch


def digits(source: Source) -> Data:
    """MNIST in [-1, 1]: 60 000 images to train, 10 000 to test with."""
    name = "digits" if source.small else "mnist"
    train, test = (load(name, split, source.data_dir) for split in ("train", "test"))

    def pairs(data: Dataset, chosen: slice | list[int]) -> Batch:
        return torch.from_numpy(data.scaled(chosen)), torch.tensor(data.labels[chosen])

    def batch(size: int, generator: torch.Generator) -> Batch:
        return pairs(train, torch.randint(len(train), (size,), generator=generator).tolist())

    return Data(batch, pairs(test, slice(None)))


CONTEXT = 64
SYMBOLS = 64


def characters(source: Source) -> Data:
    """The texts of Python's own ``help()``, its last tenth to test with.

    The 63 commonest characters, in lower case, and one symbol for all others. The texts are of
    the running Python: versions of it differ a little.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    text = text[:20_000] if source.small else text
    common = [c for c, _ in sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))]
    code = {c: i for i, c in enumerate(common[: SYMBOLS - 1])}
    symbols = torch.tensor([code.get(c, SYMBOLS - 1) for c in text])
    train, test = symbols[: len(symbols) * 9 // 10], symbols[len(symbols) * 9 // 10 :]
    windows = test[: (len(test) - 1) // CONTEXT * CONTEXT + 1]

    def batch(size: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(train) - CONTEXT, (size, 1), generator=generator)
        places = starts + torch.arange(CONTEXT)
        return train[places], train[places + 1]

    return Data(batch, (windows[:-1].view(-1, CONTEXT), windows[1:].view(-1, CONTEXT)))


def friedman(source: Source) -> Data:
    """Friedman's first function: ten inputs, five of which matter; all of mean 0 and variance 1.

    The noise is a tenth of the targets' standard deviation, so no test error is below 0.01.
    """
    samples = 500 if source.small else 12_000
    make = import_module("sklearn.datasets").make_friedman1
    inputs, targets = make(n_samples=samples, n_features=10, noise=0.5, random_state=0)
    x, y = (
        torch.tensor((each - each.mean(0)) / each.std(0), dtype=torch.float32)
        for each in (inputs, targets)
    )
    count = samples * 5 // 6

    def batch(size: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(count, (size,), generator=generator)
        return x[chosen], y[chosen]

    return Data(batch, (x[count:], y[count:]))


# ------------------------------------------------------------------------ the tasks
def classified(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(-1) == y).float().mean()


def nats(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(outputs.squeeze(-1), y)


@dataclass(frozen=True)
class Task:
    """One row of ordinary work.

    Attributes:
        title: What is learned by what.
        steps: How long it is trained.
        batch: Samples a step.
        data: Its data.
        model: A fresh network for a side of images.
        loss: What is minimised.
        measure: What is reported of the test data, a mean over samples.
        worst: What a run that diverged counts as: no image right, or a guess without the inputs.
        cost: Processor seconds of a run, roughly: long ones start first.
    """

    title: str
    steps: int
    batch: int
    data: Callable[[Source], Data]
    model: Callable[[int], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    measure: Callable[[Tensor, Tensor], Tensor]
    worst: float
    cost: float

    @property
    def higher_is_better(self) -> bool:
        """Whether the number is an accuracy, not a loss."""
        return self.measure is classified


def image_mlp(side: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), mlp([side * side, 300, 150, 10]))


def of_images(
    title: str, steps: int, batch: int, model: Callable[[int], nn.Module], cost: float
) -> Task:
    return Task(title, steps, batch, digits, model, F.cross_entropy, classified, 0.0, cost)


TASKS: dict[str, Task] = {
    "mnist-32": of_images("MNIST, MLP 784-300-150-10", 2000, 32, image_mlp, 12),
    "mnist-128": of_images("MNIST, MLP 784-300-150-10", 600, 128, image_mlp, 5),
    "cnn": of_images("MNIST, two convolutions", 300, 32, lambda side: Images(cnn(side, 10)), 9),
    "char-lm": Task(
        *("characters of English, transformer of width 64", 400, 16, characters),
        *(lambda side: CharacterModel(SYMBOLS, CONTEXT), nats, nats, math.log(SYMBOLS), 12),
    ),
    "vit": of_images(
        *("MNIST, ViT of width 64", 500, 32, lambda side: Images(ViT(side, side // 4, 10)), 9)
    ),
    "regression": Task(
        *("Friedman's function, MLP 10-64-64-1", 2000, 32, friedman),
        *(lambda side: mlp([10, 64, 64, 1]), squared_error, squared_error, 1.0, 5),
    ),
}


@functools.cache
def data_of(task: str, source: Source) -> Data:
    return TASKS[task].data(source)


def train(name: str, optimizers: Optimizers, seed: int, source: Source) -> float:
    """Train one network; returns the task's number, NaN if the run diverged."""
    task, data = TASKS[name], data_of(name, source)
    torch.manual_seed(seed)
    model = task.model(data.test[0].shape[-1])
    opt = optimizers(model)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(SMALL_STEPS if source.small else task.steps):
        x, y = data.batch(task.batch, generator)
        loss = task.loss(model(x), y)
        if not math.isfinite(loss.item()):
            return math.nan
        opt.zero_grad(set_to_none=True)
        loss.backward()
        try:
            opt.step()
        except FloatingPointError:  # the package's optimizers refuse what is not finite
            return math.nan
    return evaluate(task, model, data.test)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, test: Batch) -> float:
    """The mean of the measure over the test data, taken some at a time."""
    total = 0.0
    for x, y in zip(*(each.split(EVALUATED_AT_ONCE) for each in test), strict=True):
        total += len(x) * task.measure(model(x), y).item()
    value = total / len(test[0])
    return value if math.isfinite(value) else math.nan
