"""Avalanche: a strategy takes the optimizer and swaps parameters as the model grows.

Avalanche needs torchvision, so `make test` does not have it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import upgd
from tests.integrations import plain

pytest.importorskip("avalanche", reason="needs Avalanche and torchvision", exc_type=ImportError)
pytestmark = pytest.mark.slow

CLASSES = 4


def experiences() -> Any:
    """Two experiences with two classes each."""
    from avalanche.benchmarks import tensors_benchmark

    def tensors(seed: int) -> list[Any]:
        x, _ = plain.samples(48)
        y = torch.arange(48) // 12
        return [(x[y // 2 == n] + seed, y[y // 2 == n]) for n in range(2)]

    return tensors_benchmark(tensors(0), tensors(1), task_labels=[0, 0]).train_stream


class Growing(nn.Module):
    """A head for the classes seen so far, as class-incremental learning has it."""

    def __init__(self) -> None:
        from avalanche.models import IncrementalClassifier

        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(plain.SIZE, 8), nn.ReLU())
        self.classifier = IncrementalClassifier(8, initial_out_features=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.classifier(self.hidden(x))


def train(model: nn.Module, opt: torch.optim.Optimizer, stream: Any, **more: Any) -> Any:
    from avalanche.training import Naive

    strategy = Naive(
        model=model, optimizer=opt, criterion=nn.CrossEntropyLoss(),
        train_mb_size=12, train_epochs=2, device="cpu", **more,
    )  # fmt: skip
    for experience in stream:
        strategy.train(experience, shuffle=False)
    return strategy


@plain.choices
def test_train_is_the_plain_loop(choice: tuple[Any, dict[str, Any]]) -> None:
    """The optimizer keeps its traces from one experience to the next."""
    optimizer, options = choice
    model = plain.network()
    model[4] = nn.Linear(8, CLASSES)
    other = plain.network()
    other[4] = nn.Linear(8, CLASSES)
    other.load_state_dict(model.state_dict())
    train(model, optimizer(model.parameters(), **options), experiences())

    opt = optimizer(other.parameters(), **options)
    for experience in experiences():
        x = torch.stack([sample[0] for sample in experience.dataset])
        y = torch.tensor([int(sample[1]) for sample in experience.dataset])
        plain.train(other, opt, list(zip(x.split(12), y.split(12), strict=True)) * 2)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@plain.choices
def test_a_model_that_grows(choice: tuple[Any, dict[str, Any]]) -> None:
    from upgd.integrations.avalanche import MonitorPlugin

    optimizer, options = choice
    model = Growing()
    plugin = MonitorPlugin(every=3)
    opt = optimizer(model.parameters(), **options)
    strategy = train(model, opt, experiences(), plugins=[plugin])
    assert model.classifier.classifier.weight.shape == (CLASSES, 8)
    steps = [step for step, _ in plugin.monitor.history]
    assert steps == [3, 6]  # of 2 experiences of 2 epochs of 2 batches
    found = strategy.evaluator.get_last_metrics()
    assert found["monitor/dormant"] == plugin.monitor.scalars()["dormant"]


def test_features_of_a_model_that_grows() -> None:
    model = Growing()
    features = upgd.Features(model, output="classifier.classifier")
    opt = upgd.FeatureUPGD(model.parameters(), features, **plain.FEATURES)
    train(model, opt, experiences())
    assert opt.scaled_utility(model.hidden[0].weight).shape == (8,)
