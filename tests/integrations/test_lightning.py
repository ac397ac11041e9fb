"""Lightning: the optimizer comes from ``configure_optimizers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import upgd
from tests.integrations import plain

L = pytest.importorskip("lightning", reason="needs the extra integrations")
from lightning.pytorch.loggers import Logger  # noqa: E402

COUNT = 6  # batches an epoch


def decay(opt: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)


class Module(L.LightningModule):
    """Automatic optimization, with a schedule that advances at every step."""

    def __init__(self, optimizer: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.model = plain.network()
        self.optimizer, self.options = optimizer, options

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        opt = self.optimizer(self.model.parameters(), **self.options)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": decay(opt), "interval": "step"}}


def trainer(path: Path, epochs: int = 1, **settings: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return L.Trainer(
        accelerator="cpu", max_epochs=epochs, default_root_dir=path, **(quiet | settings)
    )


def fit(module: Any, path: Path, epochs: int = 1, resume: Any = None, **settings: Any) -> Any:
    data = DataLoader(TensorDataset(*plain.samples(COUNT * plain.BATCH)), plain.BATCH)
    runs = trainer(path, epochs, **settings)
    runs.fit(module, data, ckpt_path=resume)
    return runs


@plain.choices
def test_fit_is_the_plain_loop(choice: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    """Gradients accumulated over two batches and clipped, a schedule."""
    optimizer, options = choice
    module = Module(optimizer, options)
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "enable_checkpointing": False}
    fit(module, tmp_path, **more)

    model = plain.network()
    opt = optimizer(model.parameters(), **options)
    data = plain.batches(COUNT)
    plain.train(model, opt, data, schedule=decay(opt), clip=0.5, accumulate=2)
    plain.assert_same(module.model, model)


@plain.choices
def test_resumed_is_never_stopped(choice: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    first = fit(Module(*choice), tmp_path)
    file = tmp_path / "stopped.ckpt"
    first.save_checkpoint(file)
    second, whole = Module(*choice), Module(*choice)
    fit(second, tmp_path, epochs=2, resume=file)
    fit(whole, tmp_path, epochs=2, enable_checkpointing=False)
    plain.assert_same(second.model, whole.model)


def test_bfloat16(tmp_path: Path) -> None:
    optimizer, options = plain.CHOICES["AdaUPGD"]
    module = Module(optimizer, options)
    fit(module, tmp_path, precision="bf16-mixed", enable_checkpointing=False)

    model = plain.network()
    opt = optimizer(model.parameters(), **options)
    data = plain.batches(COUNT)
    plain.train(model, opt, data, schedule=decay(opt), precision=torch.bfloat16)
    plain.assert_same(module.model, model)


class FeatureWise(Module):
    def configure_optimizers(self) -> Any:
        features = upgd.Features(self.model)
        return upgd.FeatureUPGD(self.model.parameters(), features, **plain.FEATURES)


def test_features(tmp_path: Path) -> None:
    module = FeatureWise(None, {})
    fit(module, tmp_path, enable_checkpointing=False)

    model = plain.network()
    opt = upgd.FeatureUPGD(model.parameters(), upgd.Features(model), **plain.FEATURES)
    plain.train(model, opt, plain.batches(COUNT))
    plain.assert_same(module.model, model)


class SecondOrder(Module):
    """Automatic optimization; Lightning calls `backward` with the loss."""

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizers().optimizer.backward(loss)


class SecondOrderByHand(Module):
    def __init__(self, optimizer: Any, options: dict[str, Any]) -> None:
        super().__init__(optimizer, options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        opt = self.optimizers()
        loss = super().training_step(batch, index)
        opt.zero_grad()
        opt.optimizer.backward(loss)
        opt.step()
        self.lr_schedulers().step()


@pytest.mark.parametrize("kind", [SecondOrder, SecondOrderByHand])
def test_second_order(kind: type[Module], tmp_path: Path) -> None:
    options = {"order": 2, "lr": 0.05, "sigma": 0.1, "seed": 3}
    module = kind(upgd.UPGD, options)
    fit(module, tmp_path, enable_checkpointing=False)

    model = plain.network()
    opt = upgd.UPGD(model.parameters(), **options)
    data = plain.batches(COUNT)
    plain.train(model, opt, data, schedule=decay(opt), backward=opt.backward)
    plain.assert_same(module.model, model)


class Two(Module):
    """Two optimizers by hand: the odd batches train the last layer alone."""

    def __init__(self) -> None:
        super().__init__(None, {})
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        opt = self.optimizers()[index % 2]
        opt.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        opt.step()

    def configure_optimizers(self) -> Any:
        body = upgd.UPGD(self.model[:4].parameters(), seed=3)
        return body, upgd.AdaUPGD(self.model[4].parameters(), seed=4)


def test_two_optimizers(tmp_path: Path) -> None:
    """Stopped after the first epoch and resumed."""
    first = fit(Two(), tmp_path)
    file = tmp_path / "stopped.ckpt"
    first.save_checkpoint(file)
    module = Two()
    fit(module, tmp_path, epochs=2, resume=file)

    model = plain.network()
    both = [upgd.UPGD(model[:4].parameters(), seed=3), upgd.AdaUPGD(model[4].parameters(), seed=4)]
    for i, (x, y) in enumerate(plain.batches(COUNT) * 2):
        both[i % 2].zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        both[i % 2].step()
    plain.assert_same(module.model, model)


class Kept(Logger):
    """Keeps what is logged."""

    name = version = None

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        found = {n: x for n, x in metrics.items() if n.startswith("monitor/")}
        if found:
            self.rows.append((step or 0, found))


def test_the_callback_logs_and_changes_nothing(tmp_path: Path) -> None:
    """Gradients are accumulated: steps of the optimizer count, before and after a resume."""
    from upgd.integrations.lightning import MonitorCallback

    more = {"accumulate_grad_batches": 2, "log_every_n_steps": 1000}
    choice = plain.CHOICES["UPGD"]
    logger, callback, module = Kept(), MonitorCallback(every=2, output="model.4"), Module(*choice)
    runs = fit(module, tmp_path, epochs=2, logger=logger, callbacks=[callback], **more)
    assert [step for step, _ in logger.rows] == [2, 4, 6]
    newest = {f"monitor/{n}": x for n, x in callback.monitor.scalars().items()}
    assert logger.rows[-1][1] == pytest.approx(newest)
    assert {n for n in newest if "dormant/" in n} == {f"monitor/dormant/model.{n}" for n in (0, 2)}
    assert float(runs.callback_metrics["monitor/weight_norm"]) == pytest.approx(
        newest["monitor/weight_norm"]
    )

    file = tmp_path / "stopped.ckpt"
    runs.save_checkpoint(file)
    logger, callback = Kept(), MonitorCallback(every=2)
    resumed, whole = Module(*choice), Module(*choice)
    fit(resumed, tmp_path, 4, file, logger=logger, callbacks=[callback], **more)
    fit(whole, tmp_path, 4, **more)
    assert [step for step, _ in logger.rows] == [8, 10, 12]
    plain.assert_same(resumed.model, whole.model)


def test_the_callback_with_two_optimizers(tmp_path: Path) -> None:
    from upgd.integrations.lightning import MonitorCallback

    callback = MonitorCallback(every=1)
    fit(Two(), tmp_path, callbacks=[callback], enable_checkpointing=False)
    assert len(callback.monitor.optimizers) == 2
    assert [step for step, _ in callback.monitor.history] == [1, 2, 3]  # of the first one
