"""``upgd.Monitor``: every number against a plain definition, and no effect on training."""

from __future__ import annotations

import copy
import csv
import io
import math
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import upgd
from tests.cases import needs_cuda
from upgd.metrics import sample_plasticity
from upgd.monitor import alarms, measures, sinks, weights
from upgd.monitor.monitor import MonitorWarning
from upgd.monitor.recorder import Hook

TAU = 0.3  # large enough that small networks have dormant units


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 3)
    )


def data(batch: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(batch, 6, generator=generator)
    return x, x[:, :3].argmax(1)


def train(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    steps: int,
    batch: int = 8,
    before: Callable[[int], None] = lambda step: None,
) -> None:
    for step in range(steps):
        x, y = data(batch, step)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before(step)
        opt.step()


# ------------------------------------------------------------------- plain definitions
def dormant_share(h: Any, tau: float) -> float:
    """By loops, as Sokar et al. write it."""
    means = [np.mean([abs(float(row[i])) for row in h]) for i in range(h.shape[1])]
    if sum(means) == 0:
        return 1.0
    return float(np.mean([m / np.mean(means) <= tau for m in means]))


def dead_share(h: Any) -> float:
    return float(np.mean([all(row[i] == 0 for row in h) for i in range(h.shape[1])]))


def plain_ranks(h: Any) -> tuple[float, float]:
    s = np.linalg.svd(np.asarray(h, np.float64), compute_uv=False)
    p = s[s > 0] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum())), float((s**2).sum() / s[0] ** 2)


def test_measures_of_a_batch_are_the_plain_definitions() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias[:7] = -50  # these never fire
        model[2].weight[4] *= 0.01
        model[2].bias[4] = 0
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=3, tau=TAU)
    outputs: dict[str, Any] = {}
    old: list[Tensor] = []
    gradients: list[Tensor] = []

    def look(step: int) -> None:
        if step == 2:
            x = data(80, 2)[0]
            with torch.no_grad():
                outputs["0"] = model[:2](x).numpy()
                outputs["2"] = model[:4](x).numpy()
            old.extend(p.detach().clone() for p in model.parameters())
            gradients.extend(p.grad.clone() for p in model.parameters())

    train(model, opt, 3, batch=80, before=look)
    found = monitor.scalars()
    assert monitor.measured == 1
    assert [step for step, _ in monitor.history] == [3]
    total = {"dormant": 0.0, "dead": 0.0}
    for name, h in outputs.items():
        assert found[f"dormant/{name}"] == pytest.approx(dormant_share(h, TAU))
        assert found[f"dead/{name}"] == pytest.approx(dead_share(h))
        total["dormant"] += dormant_share(h, TAU) * h.shape[1] / 30
        total["dead"] += dead_share(h) * h.shape[1] / 30
        some = measures.some_rows(torch.from_numpy(h), 32)
        effective, stable = plain_ranks(some)
        assert found[f"effective_rank/{name}"] == pytest.approx(effective, rel=1e-5)
        assert found[f"stable_rank/{name}"] == pytest.approx(stable, rel=1e-5)
    assert 0.3 < found["dead/0"] < 1
    assert {name: found[name] for name in total} == pytest.approx(total)
    params = dict(model.named_parameters())
    for layer in ("0", "2", "4"):
        names = (f"{layer}.weight", f"{layer}.bias")
        w = np.concatenate([params[n].detach().numpy().ravel() for n in names])
        places = [list(params).index(n) for n in names]
        g = np.concatenate([gradients[i].numpy().ravel() for i in places])
        was = np.concatenate([old[i].numpy().ravel() for i in places])
        assert found[f"weight_norm/{layer}"] == pytest.approx(np.linalg.norm(w), rel=1e-5)
        assert found[f"weight_magnitude/{layer}"] == pytest.approx(np.abs(w).mean(), rel=1e-5)
        assert found[f"gradient_norm/{layer}"] == pytest.approx(np.linalg.norm(g), rel=1e-5)
        ratio = np.linalg.norm(w - was) / np.linalg.norm(was)
        assert found[f"update_ratio/{layer}"] == pytest.approx(ratio, rel=1e-4)
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    assert found["weight_norm"] == pytest.approx(np.linalg.norm(flat), rel=1e-5)
    assert found["weight_magnitude"] == pytest.approx(np.abs(flat).mean(), rel=1e-5)
    assert "eta" not in found
    assert "skipped_steps" not in found


def test_single_samples_are_gathered_over_the_last_passes() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = upgd.Monitor(model, opt, every=50, tau=TAU, samples=16)
    rows: list[Any] = []

    def look(step: int) -> None:
        with torch.no_grad():
            rows.append(model[:2](data(1, step)[0]).numpy()[0])

    train(model, opt, 100, batch=1, before=look)
    for end, (step, found) in zip((50, 100), monitor.history, strict=True):
        assert step == end
        h = np.stack(rows[end - 16 : end])
        assert found["dormant/0"] == pytest.approx(dormant_share(h, TAU))
        assert found["dead/0"] == pytest.approx(dead_share(h))
        assert found["effective_rank/0"] == pytest.approx(plain_ranks(h)[0], rel=1e-5)


class Convolutional(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.act = nn.ReLU(inplace)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("inplace", [False, True])
def test_channels_count_over_samples_and_positions(inplace: bool) -> None:
    torch.manual_seed(0)
    model = Convolutional(inplace)
    with torch.no_grad():
        model.norm.bias[1] = -50
    monitor = upgd.Monitor(model, every=1, tau=TAU, samples=20)
    x = torch.randn(4, 1, 6, 6)
    seen: list[Tensor] = []
    model.act.register_forward_hook(lambda m, args, output: seen.append(output.detach().clone()))
    model(x)
    monitor.step()
    found = monitor.scalars()
    h = seen[0].permute(0, 2, 3, 1).reshape(-1, 5).numpy()
    assert found["dormant/conv"] == pytest.approx(dormant_share(h, TAU))
    assert found["dead/conv"] == pytest.approx(0.2)
    rows = measures.some_rows(seen[0].movedim(1, -1), 20)
    assert found["effective_rank/conv"] == pytest.approx(plain_ranks(rows)[0], rel=1e-5)
    assert "dormant/head" not in found
    assert "behind 'act'" in repr(monitor)


def test_sampled_rows_are_rows_and_prefer_no_position() -> None:
    h = torch.arange(8 * 12 * 3.0).reshape(8, 12, 3)
    rows = measures.some_rows(h, 24)
    assert rows.shape == (24, 3)
    places = (rows[:, 0] / 3).long()
    assert len(set(places.tolist())) == 24
    assert set((places % 12).tolist()) == set(range(12))
    assert set((places // 12).tolist()) == set(range(8))
    assert torch.equal(measures.some_rows(h, 96), h.reshape(96, 3))


@pytest.mark.parametrize("kind", ["global", "local", "feature", "ada"])
def test_utilities_are_the_optimizers_own(kind: str) -> None:
    model = mlp()
    if kind == "feature":
        opt: Any = upgd.FeatureUPGD(model.parameters(), features=upgd.Features(model))
    elif kind == "ada":
        opt = upgd.AdaUPGD(model.parameters())
    else:
        opt = upgd.UPGD(model.parameters(), scaling=kind)
    monitor = upgd.Monitor(model, opt, every=5)
    train(model, opt, 5)
    found = monitor.scalars()
    held = [(n.split(".")[0], p) for n, p in model.named_parameters()]
    held = [(layer, p) for layer, p in held if "utility" in opt.state[p]]
    scaled = [(layer, opt.scaled_utility(p).numpy().ravel()) for layer, p in held]
    every = np.concatenate([s for _, s in scaled])
    assert found["protected"] == pytest.approx((every >= weights.PROTECTED).mean())
    layer = np.concatenate([s for name, s in scaled if name == "0"])
    assert found["protected/0"] == pytest.approx((layer >= weights.PROTECTED).mean())
    if kind == "local":
        assert "eta" not in found
    else:
        assert found["eta"] == pytest.approx(abs(max(float(opt.utility(p).max()) for _, p in held)))
    counts = np.histogram(every, weights.BINS, (0, 1))[0]
    assert monitor.histograms[-1][1]["utility"] == pytest.approx(counts)
    assert found["skipped_steps"] == 0


def test_skipped_steps_are_counted() -> None:
    model = mlp()
    opt = upgd.UPGD(model.parameters(), nonfinite="skip")
    monitor = upgd.Monitor(model, opt, every=4)

    def spoil(step: int) -> None:
        if step == 1:
            model[0].weight.grad[0, 0] = torch.nan

    train(model, opt, 4, before=spoil)
    assert monitor.scalars()["skipped_steps"] == 1
    assert "1 step was skipped because of values that are not finite." in monitor.warnings()


def test_large_tensors_are_sampled_without_preferring_a_column() -> None:
    torch.manual_seed(0)
    columns = torch.arange(784.0).expand(300, 784)
    assert len(set(weights.sample(columns).tolist())) == 784
    values = torch.rand(300, 784)
    assert abs(float(weights.sample(values).mean()) - 0.5) < 0.02
    counts = weights.histograms([values[:10].flatten().logit(), values[10:12].flatten().logit()])
    plain = [np.histogram(v, weights.BINS, (0, 1))[0] for v in (values[:10], values[10:12])]
    assert counts.tolist() == [p.tolist() for p in plain]


# --------------------------------------------------------------------------- plasticity
class Noisy(nn.Module):
    """Has a buffer that a pass changes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_plasticity_looks_at_the_same_samples_again() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    now: dict[str, Any] = {}

    def losses() -> Tensor:
        x, y = data(8, now["step"])
        return F.cross_entropy(model(x), y, reduction="none")

    monitor = upgd.Monitor(model, opt, every=2, closure=losses)
    kept = []

    def note(step: int) -> None:
        now["step"] = step
        kept.append((step, losses().detach()))

    train(model, opt, 2, before=note)
    after = losses().detach()
    found = monitor.scalars()
    expected = sample_plasticity(kept[-1][1].numpy(), after.numpy()).mean()
    assert found["plasticity"] == pytest.approx(float(expected), rel=1e-6)
    assert 0 < found["plasticity"] < 1
    assert found["loss"] == pytest.approx(float(kept[-1][1].mean()), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("method", ["upgd", "adam"])
def test_training_is_the_same_bit_for_bit(batch: int, method: str) -> None:
    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Noisy() if batch > 1 else mlp()
        params = model.parameters()
        make = upgd.UPGD if method == "upgd" else torch.optim.Adam
        opt: Any = make(params, lr=0.01)
        monitor = upgd.Monitor(model, opt, every=7) if watched else None

        def observe(step: int, monitor: Any = monitor, model: nn.Module = model) -> None:
            if monitor is not None:
                x, y = data(batch, step)
                monitor.observe(lambda: F.cross_entropy(model(x), y))

        train(model, opt, 30, batch, observe)
        ends.append([t.clone() for t in (*model.state_dict().values(), torch.rand(3))])
        if monitor is not None:
            assert monitor.measured == 4
            assert "plasticity" in monitor.scalars()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# ------------------------------------------------------------------------------ counting
def test_nothing_happens_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"measured": 0, "recorded": 0}
    measure, call = upgd.Monitor._measure, Hook.__call__

    def count_measure(self: Any) -> None:
        calls["measured"] += 1
        measure(self)

    def count_call(self: Any, *args: Any) -> None:
        calls["recorded"] += 1
        call(self, *args)

    monkeypatch.setattr(upgd.Monitor, "_measure", count_measure)
    monkeypatch.setattr(Hook, "__call__", count_call)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=100, samples=64)
    train(model, opt, 1, batch=32)
    assert calls.pop("recorded") == 4  # two layers, two activations, to find their places
    calls["recorded"] = 0
    train(model, opt, 96, batch=32)
    assert calls == {"measured": 0, "recorded": 0}
    assert not any(module._forward_hooks for module in model.modules())
    train(model, opt, 3, batch=32)
    assert calls == {"measured": 1, "recorded": 4}  # two passes of 32 rows, two places
    assert monitor.measured == 1


def test_accumulated_gradients_closures_and_several_optimizers() -> None:
    model = mlp()
    first = torch.optim.SGD(model[:3].parameters(), lr=0.1)
    second = upgd.UPGD(model[4].parameters())
    monitor = upgd.Monitor(model, [first, second], every=2)
    for step in range(4):
        for part in range(3):
            x, y = data(4, 10 * step + part)
            F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    assert [step for step, _ in monitor.history] == [2, 4]
    assert "eta" in monitor.scalars()
    monitor.close()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = data(16, 0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    monitor = upgd.Monitor(model, opt, every=1)
    opt.step(closure)
    assert monitor.measured == 1
    assert monitor.scalars()["update_ratio"] > 0


def test_all_optimizers_utilities_count_each_with_its_own_eta() -> None:
    model = mlp()
    first, second = upgd.UPGD(model[0].parameters()), upgd.AdaUPGD(model[2:].parameters())
    monitor = upgd.Monitor(model, [second, first], every=5)
    for step in range(5):
        x, y = data(16, step)
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
        model.zero_grad()
    scalars, (_, found) = monitor.scalars(), monitor.histograms[-1]
    assert scalars["eta"] == pytest.approx(max(float(u.max()) for u in second.utilities().values()))
    scaled = [*first.scaled_utilities().values(), *second.scaled_utilities().values()]
    flat = torch.cat([u.reshape(-1) for u in scaled])
    assert len(flat) == sum(p.numel() for p in model.parameters())
    assert scalars["protected"] == pytest.approx(float((flat >= 0.55).double().mean()))
    assert found["utility"].sum() == pytest.approx(len(flat))
    assert scalars["protected/0"] == pytest.approx(
        float(torch.cat([u.reshape(-1) for u in scaled[:2]]).ge(0.55).double().mean())
    )


def test_evaluation_does_not_count() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = upgd.Monitor(model, opt, every=1, samples=8)
    x, y = data(8, 0)
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        model(100 * torch.ones(8, 6))
    model.eval()
    model(100 * torch.ones(8, 6))
    opt.step()
    with torch.no_grad():
        h = model[:2](x).numpy()
    assert monitor.scalars()["effective_rank/0"] == pytest.approx(plain_ranks(h)[0], rel=1e-5)


# -------------------------------------------------------------------------------- models
class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.act, self.head = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.cell(x))
        return self.head(x)


class Shared(nn.Module):
    """One activation module for two layers, and another library's after the third."""

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.act, self.sine, self.head = nn.ReLU(), self.Sine(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.b(self.act(self.a(x))))
        return self.head(self.d(self.sine(self.c(x))))


def measured_twice(model: nn.Module, **options: Any) -> Any:
    """A monitor after two measurements of the same pass: before and after places are known."""
    monitor = upgd.Monitor(model, every=1, tau=TAU, **options)
    for _ in range(2):
        model(data(16, 0)[0])
        monitor.step()
    (_, one), (_, two) = monitor.history
    assert one == two
    return monitor


def test_functional_activations_are_applied_to_outputs() -> None:
    torch.manual_seed(0)
    model = Functional()
    with torch.no_grad():
        model.one.bias[:3] = -50
        pre = model.one(data(16, 0)[0])
    monitor = measured_twice(model)
    assert monitor.scalars()["dead/one"] == pytest.approx(1 / 3)
    assert "relu" in repr(monitor)
    tanh = measured_twice(model, activation=torch.tanh)
    expected = dormant_share(pre.tanh().numpy(), TAU)
    assert tanh.scalars()["dormant/one"] == pytest.approx(expected)
    assert measured_twice(model, activation=None).scalars()["dead/one"] == 0


def test_a_layer_that_is_used_several_times() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    monitor = measured_twice(model, samples=48)
    with torch.no_grad():
        x, rows = data(16, 0)[0], []
        for _ in range(3):
            x = torch.tanh(model.cell(x))
            rows.append(x)
    effective = plain_ranks(torch.cat(rows))[0]
    assert monitor.scalars()["effective_rank/cell"] == pytest.approx(effective, rel=1e-5)


def test_a_shared_activation_and_layers_without_any() -> None:
    torch.manual_seed(0)
    model = Shared()
    found = measured_twice(model).scalars()
    with torch.no_grad():
        a = model.act(model.a(data(16, 0)[0]))
        b = model.act(model.b(a))
        c = model.c(b).sin()
    for name, h in (("a", a), ("b", b), ("c", c)):
        assert found[f"dormant/{name}"] == pytest.approx(dormant_share(h.numpy(), TAU)), name
        assert found[f"effective_rank/{name}"] == pytest.approx(plain_ranks(h)[0], rel=1e-5)
    assert "dormant/d" not in found  # others have activations


def test_a_layer_that_is_first_used_later() -> None:
    """As an actor's, which is trained at every second step of its critic."""

    def part() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))

    model = nn.ModuleDict({"critic": part(), "actor": part()})
    monitor = upgd.Monitor(model, every=2, output=["critic.2", "actor.2"])
    x = torch.randn(64, 3)
    for step in range(6):
        model["critic"](x)
        if step > 2:
            model["actor"](x)
        monitor.step()
    found = [{name for name in row if name.startswith("dormant/")} for _, row in monitor.history]
    assert found == [{"dormant/critic.0"}] + [{"dormant/critic.0", "dormant/actor.0"}] * 2
    hidden = model["actor"][:2](x).detach()
    scores = hidden.abs().mean(0) / hidden.abs().mean()
    assert monitor.scalars()["dormant/actor.0"] == (scores <= 0.025).float().mean()


def test_tokens_are_rows() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, nn.GELU(), batch_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 3))
    monitor = upgd.Monitor(model, every=1, samples=1000)
    seen: list[Tensor] = []
    layer.linear2.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    model(torch.randn(4, 5, 8))
    monitor.step()
    effective = plain_ranks(seen[0].reshape(20, 16))[0]
    assert monitor.scalars()["effective_rank/0.linear1"] == pytest.approx(effective, rel=1e-5)
    assert monitor.units == {"0.linear1": 16, "0.linear2": 8}


def test_models_without_hidden_layers_frozen_parts_and_half_precision() -> None:
    monitor = upgd.Monitor(nn.Linear(3, 1), every=1)
    monitor.step()
    assert "dormant" not in monitor.scalars()
    model = mlp().bfloat16()
    model[0].requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=1)
    model(data(16, 0)[0].bfloat16()).float().square().mean().backward()
    opt.step()
    found = monitor.scalars()
    assert "weight_norm/0" not in found
    assert "dormant/0" in found
    rest = nn.utils.parameters_to_vector(model[2:].parameters()).detach().float()
    assert found["weight_norm"] == pytest.approx(float(rest.norm()), rel=1e-5)


def test_outputs_are_named() -> None:
    model = mlp()
    assert set(measured_twice(model, output="2").units) == {"0", "4"}
    assert set(measured_twice(model, output=("2", "4")).units) == {"0"}
    with pytest.raises(ValueError, match="these are: 0, 2, 4"):
        upgd.Monitor(model, output="head")
    with pytest.raises(ValueError, match="every must be"):
        upgd.Monitor(model, every=0)
    with pytest.raises(ValueError, match="observe"):
        upgd.Monitor(model, closure=lambda: torch.zeros(()))
    with pytest.raises(TypeError, match="got str"):
        upgd.Monitor(model, ["adam"])  # type: ignore[list-item]


def test_a_model_that_grows() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=2)
    train(model, opt, 2)
    model[2], model[4] = nn.Linear(20, 30), nn.Linear(30, 3)
    train(model, opt, 4)
    assert monitor.units["2"] == 30
    assert "dormant/2" in monitor.scalars()


def test_copies_and_pickles_of_a_watched_model() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=1)  # its hooks are on
    train(model, opt, 2)
    assert any(module._forward_hooks for module in model.modules())
    x = data(4, 0)[0]
    copied = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    before = monitor._recorder.layers[0].rows
    for other in (copied, loaded):
        assert torch.equal(other(x), model.eval()(x))
        model.train()
    assert monitor._recorder.layers[0].rows == before
    copy.deepcopy(opt)


class Looped(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("how", ["wrapper", "in place", "a part"])
def test_compiled_models(how: str) -> None:
    ends, found = [], []
    for watched, compiled in ((False, True), (True, True), (True, False)):
        torch._dynamo.reset()
        model: Any = Looped(*mlp(), nn.Dropout(0.1))
        torch.manual_seed(1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        called: nn.Module = model
        if compiled and how == "wrapper":
            called = torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
        elif compiled:
            part = model if how == "in place" else model[2]
            part.compile(backend="aot_eager")
        monitor = upgd.Monitor(called, opt, every=3) if watched else None
        train(called, opt, 7, batch=64)
        ends.append(nn.utils.parameters_to_vector(model.parameters()))
        if monitor is not None:
            found.append(monitor.scalars())
            monitor.close()
        assert getattr(model, "_compiled_call_impl", None) is None or how == "in place"
    assert torch.equal(ends[0], ends[1])
    assert set(found[0]) == set(found[1])
    # The compiled model is looked at after the step, the other one before it.
    assert found[0]["effective_rank/0"] == pytest.approx(found[1]["effective_rank/0"], rel=0.05)
    assert found[0]["weight_norm"] == pytest.approx(found[1]["weight_norm"], rel=1e-5)


def test_a_compiled_step_and_hooks_that_compiled_code_does_not_see() -> None:
    torch._dynamo.reset()
    model = Looped(*mlp())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    opt.step = torch.compile(opt.step, backend="eager")  # type: ignore[method-assign]
    with pytest.warns(MonitorWarning, match="give Monitor the compiled one"):
        train(compiled, opt, 4)
    assert [step for step, _ in monitor.history] == [2, 4]
    assert "weight_norm" in monitor.scalars()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this build of torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_replicas_and_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found = []
    for kind in ("plain", "replica", "shard"):
        model: nn.Module = mlp()
        if kind == "replica":
            model = nn.parallel.DistributedDataParallel(model)
        elif kind == "shard":
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        opt = upgd.UPGD(model.parameters(), sigma=0.0)
        monitor = upgd.Monitor(model, opt, every=3)
        train(model, opt, 3)
        found.append(monitor.scalars())
        monitor.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("method", ["upgd", "sgd"])
def test_scaled_gradients_are_unscaled(method: str) -> None:
    found = []
    for scale in (None, 1024.0):
        model = mlp()
        make: Any = upgd.UPGD if method == "upgd" else torch.optim.SGD
        opt = make(model.parameters(), lr=0.1)
        monitor = upgd.Monitor(model, opt, every=1)
        loss = F.cross_entropy(model(data(8, 0)[0]), data(8, 0)[1])
        if scale is None:
            loss.backward()
            opt.step()
        else:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(loss).backward()
            scaler.step(opt)
        found.append(monitor.scalars()["gradient_norm"])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@needs_cuda
@pytest.mark.parametrize("scaling", ["global", "local"])
def test_no_step_waits_for_the_gpu(scaling: Any) -> None:
    model = mlp().cuda()
    opt = upgd.UPGD(model.parameters(), scaling=scaling)
    monitor = upgd.Monitor(model, opt, every=2)
    batches = [tuple(t.cuda() for t in data(16, step)) for step in range(8)]

    def learn(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()

    learn(*batches[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in batches[1:]:
            learn(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_gpu = monitor.history
    assert monitor.measured == 4
    assert all(math.isfinite(value) for _, found in on_gpu for value in found.values())
    values = [torch.rand(100), torch.rand(50)]
    counts = weights.histograms([v.cuda() for v in values]).cpu()
    assert torch.equal(counts, weights.histograms(values))


# -------------------------------------------------------------------------------- faults
def test_a_measurement_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(weights, "take_gradients", fail)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=1)
    with pytest.warns(MonitorWarning, match="gradients are no longer measured.*no such thing"):
        train(model, opt, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, 2)
    assert monitor.measured == 3
    assert "gradient_norm" not in monitor.scalars()
    assert "dormant" in monitor.scalars()

    def sink(step: int, scalars: Any) -> None:
        raise OSError("disk full")

    monitor.on_measure(sink)
    with pytest.warns(MonitorWarning, match="disk full"):
        train(model, opt, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, 1)


class Overwritten(nn.Module):
    """Changes its hidden outputs in place after their use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.one(x))
        out = self.two(h)
        with torch.no_grad():
            h.zero_()
        return out


def test_outputs_that_are_overwritten_are_copied() -> None:
    torch.manual_seed(0)
    model = Overwritten()
    monitor = upgd.Monitor(model, every=1)
    for _ in range(3):
        model(data(16, 0)[0])
        monitor.step()
    assert "dead/one" not in monitor.history[0][1]  # what is seen is not what it was
    assert monitor.scalars()["dead/one"] == 0
    with torch.no_grad():
        h = model.act(model.one(data(16, 0)[0]))
    assert monitor.scalars()["effective_rank/one"] == pytest.approx(plain_ranks(h)[0], rel=1e-5)


def test_hooks_are_gone_after_the_end() -> None:
    model = mlp()
    opt = upgd.UPGD(model.parameters())
    with upgd.Monitor(model, opt, every=1) as monitor:
        train(model, opt, 3)
    assert not any(module._forward_hooks for module in model.modules())
    assert not opt._optimizer_step_post_hooks
    assert not opt._optimizer_step_pre_hooks
    train(model, opt, 3)
    assert monitor.measured == 3
    assert len(monitor.history) == 3


# ------------------------------------------------------------------------------ warnings
def test_a_network_trained_to_death_is_reported() -> None:
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=1.0)
    monitor = upgd.Monitor(model, opt, every=10)
    train(model, opt, 200, batch=32)
    x = data(64, 1000)[0]
    with torch.no_grad():
        h = model[:4](x).numpy()
    assert dead_share(h) == 1
    assert monitor.scalars()["dead/2"] == monitor.scalars()["dormant/2"] == 1
    told = [text for text in monitor.warnings() if "'2'" in text]
    assert told[0].startswith("All of layer '2' (10 of 10 units) has been dormant for the last ")
    assert told[0].endswith("; all of them put out zero for every sample.")


def history_of(**series: list[float]) -> list[tuple[int, dict[str, float]]]:
    keys = {name: name.replace("__", "/") for name in series}
    length = len(next(iter(series.values())))
    return [(100 * (n + 1), {keys[k]: v[n] for k, v in series.items()}) for n in range(length)]


@pytest.mark.parametrize(
    ("series", "told"),
    [
        ({"dormant__a": [0.0, 0.33, 0.33, 1 / 3]}, "A third of layer 'a' (50 of 150 units) has "),
        ({"dormant__a": [0.3, 0.2, 0.3]}, "30% of layer 'a' (45 of 150 units) is dormant."),
        ({"dormant__a": [0.2] * 9}, ""),
        ({"dormant__a": [0.0, 0.02, 0.04, 0.1, 0.11, 0.12]}, "grew from 2.0% to 12.0%"),
        ({"effective_rank__a": [40.0, 30.0, 19.0, 18.0, 17.0]}, "fell from 40.0 to 17.0"),
        ({"effective_rank__a": [40.0, 30.0, 19.0, 18.0, 21.0]}, ""),
        ({"gradient_norm": [1.0, 1e-4, 1e-4, 1e-4]}, "fell from 1 to 0.0001"),
        ({"gradient_norm": [1.0, 0.0]}, "The gradient is zero"),
        ({"gradient_norm": [1.0, 0.01, 0.01, 0.01]}, ""),
        ({"weight_norm__a": [1.0, 11.0]}, "The weight norm of layer 'a' grew from 1 to 11."),
        ({"weight_norm__a": [1.0, 9.0]}, ""),
        ({"update_ratio": [0.2, 0.2, 0.2]}, "a step changes them by 20% of their norm"),
        ({"update_ratio": [0.2, 0.02, 0.2]}, ""),
        ({"skipped_steps": [0.0, 1200.0]}, "1 200 steps were skipped"),
        ({"protected": [0.5, 1.0]}, "All of all weights"),
        ({"protected": [0.5, 0.0]}, "No weight is protected"),
        ({"protected": [0.5, 0.5]}, ""),
        ({"loss": [1.0, math.nan]}, "The loss is not finite at step 200."),
    ],
)
def test_rules(series: dict[str, list[float]], told: str) -> None:
    found = alarms.warnings_of(history_of(**series), {"a": 150})
    assert len(found) == bool(told)
    assert told in "".join(found)


def test_how_long_it_has_been_so() -> None:
    shares = [1 / 3] * 3 + [0.1] + [1 / 3] * 101
    [told] = alarms.warnings_of(history_of(dormant__fc2=shares), {"fc2": 150})
    expected = (
        "A third of layer 'fc2' (50 of 150 units) has been dormant for the last 10 000 steps."
    )
    assert told == expected


# --------------------------------------------------------------------------------- sinks
def test_csv_and_tensorboard_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = mlp()
    opt = upgd.UPGD(model.parameters())
    monitor = upgd.Monitor(model, opt, every=2)
    monitor.on_measure(sinks.CSV(tmp_path / "run.csv"))
    monitor.on_measure(sinks.TensorBoard(tmp_path / "events", monitor))
    train(model, opt, 6)
    monitor.close()
    with (tmp_path / "run.csv").open() as file:
        rows = [(int(r["step"]), r["name"], float(r["value"])) for r in csv.DictReader(file)]
    assert rows == [(step, k, v) for step, found in monitor.history for k, v in found.items()]
    events = EventAccumulator(str(tmp_path / "events"), size_guidance={"histograms": 0})
    events.Reload()
    written = [(e.step, e.value) for e in events.Scalars("monitor/dormant/0")]
    assert written == [(step, pytest.approx(f["dormant/0"])) for step, f in monitor.history]
    counts = events.Histograms("monitor/utility")[-1]
    assert counts.step == 6
    assert counts.histogram_value.num == sum(p.numel() for p in model.parameters())
    sinks.CSV(tmp_path / "run.csv")(8, {"dormant": 1.0})  # continues the file
    assert (tmp_path / "run.csv").read_text().count("step,name") == 1


class Run:
    def __init__(self) -> None:
        self.logged: list[Any] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.logged.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        self.logged.append((run, name, value, step))


def test_wandb_and_mlflow_are_called_as_they_expect() -> None:
    run, client = Run(), Run()
    sinks.WandB(run)(5, {"dormant": 0.5, "eta": math.nan})
    assert run.logged[0] == ("monitor/*", "monitor/step")
    assert run.logged[1] == {"monitor/step": 5, "monitor/dormant": 0.5}
    sinks.MLflow("a", client)(5, {"dormant/0": 0.5})
    assert client.logged == [("a", "monitor/dormant/0", 0.5, 5)]


def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    run = wandb.init(mode="offline", dir=tmp_path, project="monitor")
    sinks.WandB()(5, {"dormant": 0.5})
    assert run.summary["monitor/dormant"] == 0.5
    run.finish()


def test_mlflow_itself(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        sinks.MLflow()(5, {"dormant/0": 0.5})
    [found] = mlflow.MlflowClient().get_metric_history(run.info.run_id, "monitor/dormant/0")
    assert (found.step, found.value) == (5, 0.5)


# ---------------------------------------------------------------------------------- page
EVIL = '"><script>alert(1)</script>'
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


def watched(layers: int = 2) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential()
    for n in range(layers):
        model.add_module(f"{EVIL} {n}", nn.Linear(6, 6))
        model.add_module(f"relu {n}", nn.ReLU())
    model.add_module("head", nn.Linear(6, 3))
    opt = upgd.UPGD(model.parameters())
    monitor = upgd.Monitor(model, opt, every=1)
    train(model, opt, 5)
    return monitor


def test_the_page_is_one_file_and_replaces_only_pages(tmp_path: Path) -> None:
    monitor = watched(9)
    path = monitor.page(tmp_path / "page.html", title=EVIL)
    text = path.read_text()
    assert "script>" not in text
    assert not any(word in text for word in ("<script", "http:", "https:", "src=", "url("))
    assert "The 6 of 9 layers with the largest values." in text
    assert monitor.page(path).read_text() != text
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    with pytest.raises(FileExistsError, match=r"mine\.html"):
        monitor.page(mine)
    fresh = upgd.Monitor(mlp())
    assert "Nothing was measured yet" in fresh.page(tmp_path / "empty.html").read_text()
    assert "Nothing was measured yet" in fresh._repr_html_()


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    driver = pytest.importorskip("playwright.sync_api")
    monitor = watched()
    path = monitor.page(tmp_path / "page.html")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 375, "height": 700}, color_scheme="dark")
        complaints: list[str] = []
        page.on("console", lambda m: complaints.append(m.text))
        requests: list[str] = []
        page.on("request", lambda r: requests.append(r.url))
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 27)"
        rows = page.locator("tbody tr").count()
        titles = page.locator("figure h3").all_text_contents()
        lines = (
            page.locator("figure")
            .first.locator("polyline")
            .evaluate_all("all => all.map(line => line.points.numberOfItems)")
        )
        browser.close()
    assert (complaints, requests) == ([], [path.as_uri()])
    assert rows == 3
    assert {"Dormant units", "Effective rank", "Scaled utilities"} <= {*titles}
    assert lines == [5, 5, 5]  # two layers, and all; five measurements


def test_figures_in_a_notebook_follow_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    shown: list[str] = []

    class Handle:
        def update(self, what: Any) -> None:
            shown.append(what._repr_html_())

    module: Any = ModuleType("IPython.display")
    module.display = lambda what, display_id: Handle()
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("upgd.monitor.page.time.monotonic", iter(range(1000)).__next__)
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = upgd.Monitor(model, opt, every=1)
    monitor.show()
    train(model, opt, 3)
    assert len(shown) == 3
    assert "One measurement" in shown[0]
    assert "<svg" in shown[-1]
    monitor.close()
    assert len(shown) == 4
