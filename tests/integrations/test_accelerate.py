"""accelerate: models, optimizers, loaders and schedules are wrapped by ``prepare``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import upgd
from tests.integrations import plain

accelerate = pytest.importorskip("accelerate", reason="needs the extra integrations")
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402


@pytest.fixture(autouse=True)
def singletons_are_forgotten() -> Iterator[None]:
    """Accelerator's settings are the process's: a second one would keep the first one's."""
    states = (AcceleratorState, GradientState, PartialState)
    for state in states:
        state._reset_state()
    yield
    for state in states:
        state._reset_state()


def loader(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*plain.samples(count * plain.BATCH)), plain.BATCH)


def decay(opt: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)


class Run:
    """One prepared training; `epoch` is the loop of accelerate's documentation."""

    def __init__(self, model: nn.Module, opt: Any, count: int, **settings: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        self.model, self.opt, self.loader, self.schedule = self.accelerator.prepare(
            model, opt, loader(count), decay(opt)
        )

    def epoch(self) -> None:
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.opt.step()
                self.schedule.step()
                self.opt.zero_grad()


@plain.choices
def test_the_loop_is_the_plain_one(choice: tuple[Any, dict[str, Any]]) -> None:
    """Gradients accumulated over two batches and clipped, a schedule."""
    optimizer, options = choice
    model = plain.network()
    run = Run(model, optimizer(model.parameters(), **options), 6, gradient_accumulation_steps=2)
    run.epoch()

    other = plain.network()
    opt = optimizer(other.parameters(), **options)
    plain.train(other, opt, plain.batches(6), schedule=decay(opt), clip=0.5, accumulate=2)
    plain.assert_same(model, other)


@plain.choices
def test_bfloat16(choice: tuple[Any, dict[str, Any]]) -> None:
    optimizer, options = choice
    model = plain.network()
    run = Run(model, optimizer(model.parameters(), **options), 4, mixed_precision="bf16")
    run.epoch()

    other = plain.network()
    opt = optimizer(other.parameters(), **options)
    data = plain.batches(4)
    plain.train(other, opt, data, schedule=decay(opt), clip=0.5, precision=torch.bfloat16)
    plain.assert_same(model, other)


@plain.choices
def test_saved_and_loaded_is_never_stopped(
    choice: tuple[Any, dict[str, Any]], tmp_path: Path
) -> None:
    optimizer, options = choice

    def run() -> Run:
        model = plain.network()
        return Run(model, optimizer(model.parameters(), **options), 4)

    first = run()
    first.epoch()
    first.accelerator.save_state(str(tmp_path))
    second = run()
    second.accelerator.load_state(str(tmp_path))
    second.epoch()

    whole = run()
    whole.epoch()
    whole.epoch()
    plain.assert_same(second.model, whole.model)


def test_features() -> None:
    """The gates see the loss that ``accelerator.backward`` divides, as ``.grad`` does."""
    model = plain.network()
    opt = upgd.FeatureUPGD(model.parameters(), upgd.Features(model), **plain.FEATURES)
    Run(model, opt, 4, gradient_accumulation_steps=2).epoch()

    other = plain.network()
    opt = upgd.FeatureUPGD(other.parameters(), upgd.Features(other), **plain.FEATURES)
    plain.train(other, opt, plain.batches(4), schedule=decay(opt), clip=0.5, accumulate=2)
    plain.assert_same(model, other)


def test_second_order() -> None:
    """The wrapped optimizer's own backward takes the place of the accelerator's."""
    model = plain.network()
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped, opt, data = accelerator.prepare(
        model, upgd.UPGD(model.parameters(), order=2, seed=3), loader(4)
    )
    for x, y in data:
        opt.optimizer.backward(nn.functional.cross_entropy(wrapped(x), y))
        opt.step()
        opt.zero_grad()

    other = plain.network()
    second = upgd.UPGD(other.parameters(), order=2, seed=3)
    plain.train(other, second, plain.batches(4), backward=second.backward)
    plain.assert_same(model, other)
