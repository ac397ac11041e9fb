"""The eager engine against a plain loop, through restarts, checkpoints and divergence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from upgd.engine import Divergence, EagerRun, Setting
from upgd.networks import build, cnn, mlp


class Noise:
    """A stream of normal inputs whose label is the sign of one of them; tasks of 10 samples."""

    task_length: int | None = 10

    def __init__(self, loss: str = "cross_entropy") -> None:
        self.loss = loss

    def at(self, step: int, batch: int = 1) -> Any:
        rows = [
            np.random.default_rng(i).normal(size=4) for i in range(step * batch, (step + 1) * batch)
        ]
        x = np.array(rows, np.float32)
        y = (x[:, 0] > 0).astype(np.int64)
        return x, (y if self.loss == "cross_entropy" else x[:, :1] + x[:, 1:2])

    def held_out(self, task: int, count: int) -> Any:
        x = np.random.default_rng([task, 7]).normal(size=(count, 4)).astype(np.float32)
        return x, (x[:, 0] > 0).astype(np.int64)


def make(seed: int, task: int = 0) -> nn.Module:
    return build([4, 6, 2], seed, "relu", task)


def regress(seed: int, task: int = 0) -> nn.Module:
    return build([4, 6, 1], seed, "tanh", task)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_a_run_is_the_plain_loop(loss: str, batch: int) -> None:
    """Predict, score, update, score again: with gradient descent written out."""
    network = make if loss == "cross_entropy" else regress
    stream, lr = Noise(loss), 0.1
    run = EagerRun(stream, network, Setting("sgd", {"lr": lr}, 3, window=10, batch=batch))
    run.advance(40 // batch)
    model = network(3)
    rows = []
    for step in range(40 // batch):
        x, y = (torch.from_numpy(part) for part in stream.at(step, batch))

        def losses(x: Any = x, y: Any = y) -> Any:
            if loss == "cross_entropy":
                return F.cross_entropy(model(x), y, reduction="none")
            return (model(x) - y).square().mean(1)

        before = losses()
        right = (model(x).argmax(1) == y).double() if loss == "cross_entropy" else before * 0
        gradients = torch.autograd.grad(before.mean(), list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= lr * g
            plasticity = (1 - losses() / before.clamp_min(1e-8)).clamp(0, 1)
        for row in zip(right, before, plasticity, strict=True):
            rows.append([float(value.detach()) for value in row])
    table = np.array(rows).reshape(4, 10, 3).mean(1)
    if loss == "cross_entropy":
        np.testing.assert_allclose(run.meter.series("accuracy"), table[:, 0])
    np.testing.assert_allclose(run.meter.series("loss"), table[:, 1], rtol=1e-5)
    np.testing.assert_allclose(run.meter.series("plasticity"), table[:, 2], atol=1e-5)


@pytest.mark.parametrize(
    "method", ["upgd-w", "adamw", "feature-upgd", "upgd-2nd", "feature-upgd-2nd", "s-rwalk", "s&p"]
)
@pytest.mark.parametrize("stop", [1, 10, 23])
def test_a_resumed_run_is_the_uninterrupted_one(method: str, stop: int) -> None:
    setting = Setting(method, {"lr": 0.05}, 5, window=10, stride=3, held_out=4)
    whole = EagerRun(Noise(), make, setting)
    whole.advance(35)
    first = EagerRun(Noise(), make, setting)
    first.advance(stop)
    arrays, meta = first.state()
    first.advance(1)  # what was saved does not follow
    second = EagerRun(Noise(), make, setting)
    second.restore(arrays, meta)
    second.advance(35 - stop)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert whole.meter.closed.keys() == second.meter.closed.keys()
    for name in whole.meter.closed:
        np.testing.assert_array_equal(whole.meter.series(name), second.meter.series(name))
    assert whole.offline == second.offline
    assert whole.meter.sums == second.meter.sums


def test_a_run_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    run = EagerRun(Noise(), make, Setting("upgd", {}, 1, window=5))
    run.advance(5)
    assert torch.equal(torch.rand(3), expected)


class Later(Noise):
    """The same stream from its second task on."""

    def at(self, step: int, batch: int = 1) -> Any:
        return super().at(step + 10, batch)


def test_restarts_begin_each_task_afresh() -> None:
    """The second task is a run of its own: nothing of the first is left."""
    hyper = {"lr": 0.05}
    run = EagerRun(Noise(), make, Setting("adam", hyper, 5, window=10, restart=True))
    run.advance(17)
    setting = Setting("adam", hyper, 5, window=10)
    alone = EagerRun(Later(), lambda seed, task: make(seed, 1), setting)
    alone.advance(7)
    for a, b in zip(run.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert run.meter.sums == alone.meter.sums
    firsts = [next(make(*pair).parameters()) for pair in ((5, 0), (5, 1), (6, 0), (6, 1))]
    assert len({float(p.flatten()[0]) for p in firsts}) == 4


def test_held_out_samples_are_predicted_after_each_tasks_last_update() -> None:
    run = EagerRun(Noise(), make, Setting("sgd", {"lr": 0.1}, 0, window=10, held_out=50))
    run.advance(9)
    assert run.offline == []
    run.advance(1)
    x, y = (torch.from_numpy(part) for part in Noise().held_out(0, 50))
    assert run.offline == [float((run.model(x).argmax(1) == y).double().mean())]


def test_diagnostics_are_those_of_the_step() -> None:
    run = EagerRun(Noise(), make, Setting("sgd", {"lr": 0.1}, 0, window=1, stride=2))
    model = make(0)
    x, y = (torch.from_numpy(part) for part in Noise().at(0))
    hidden = model[2](model[1](x))
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    flat = torch.cat([g.flatten() for g in gradients])
    run.advance(2)
    after = torch.cat(
        [(p - 0.1 * g).flatten() for p, g in zip(model.parameters(), gradients, strict=True)]
    )
    series = {name: run.meter.series(name) for name in run.meter.closed}
    assert series["zero_activations"][0] == pytest.approx(float((hidden == 0).double().mean()))
    assert series["gradient_l0"][0] == pytest.approx(float((flat != 0).double().mean()))
    assert series["gradient_l2"][0] == pytest.approx(float(flat.norm()), rel=1e-5)
    assert series["weight_l1"][0] == pytest.approx(float(after.abs().sum().detach()), rel=1e-5)
    assert series["effective_rank"][0] > 1
    assert all(np.isnan(series[name][1]) for name in ("gradient_l2", "effective_rank"))


def test_divergence_ends_the_run_before_the_step() -> None:
    run = EagerRun(Noise("squared_error"), regress, Setting("sgd", {"lr": 1e4}, 0, window=10))
    with pytest.raises(Divergence, match="diverged at step") as caught:
        run.advance(1000)
    assert caught.value.step == run.step < 1000


def test_bad_settings_are_told() -> None:
    with pytest.raises(ValueError, match="no hyperparameter kappa; it has lr"):
        EagerRun(Noise(), make, Setting("upgd", {"kappa": 1.0}, 0, window=10))
    with pytest.raises(ValueError, match="whole number of batches"):
        EagerRun(Noise(), make, Setting("upgd", {}, 0, window=10, batch=3))
    endless = Noise()
    endless.task_length = None
    with pytest.raises(ValueError, match="that has tasks"):
        EagerRun(endless, make, Setting("upgd", {}, 0, window=10, restart=True))
    with pytest.raises(KeyError, match="did you mean 'upgd'"):
        EagerRun(Noise(), make, Setting("updg", {}, 0, window=10))


def test_networks_are_the_papers() -> None:
    count = sum(p.numel() for p in build([784, 300, 150, 10], 0).parameters())
    assert count == 785 * 300 + 301 * 150 + 151 * 10
    convolutional = [type(m).__name__ for m in cnn()]
    assert convolutional == [
        *("Conv2d", "MaxPool2d", "Conv2d", "MaxPool2d", "Flatten"),
        *("Linear", "ReLU", "Linear", "ReLU", "Linear"),
    ]
    a, b = build([4, 3], 1), build([4, 3], 2)
    assert not torch.equal(a[1].weight, b[1].weight)
    with pytest.raises(ValueError, match="activation must be one of"):
        mlp([2, 2], "sine")
    with pytest.raises(ValueError, match="sizes are positive"):
        mlp([2])
    with pytest.raises(ValueError, match="unknown network 'resnet'; known: cnn"):
        build("resnet", 0)
