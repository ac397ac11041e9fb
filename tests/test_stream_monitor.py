"""A learner's monitor: its numbers against a plain loop, and no effect on learning."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

import upgd
from upgd.monitor.measures import dormancy_scores
from upgd.monitor.monitor import MonitorWarning
from upgd.monitor.sinks import CSV
from upgd.stream import Classifier, Regressor

pytest.importorskip("numba")
Arrays = tuple[NDArray[np.float64], NDArray[np.int64]]


def samples(count: int, classes: int = 3) -> Arrays:
    random = np.random.default_rng(0)
    rows = random.normal(size=(count, 6))
    return rows, (rows @ random.normal(size=(6, classes))).argmax(1)


def state_of(learner: Classifier | Regressor) -> dict[str, NDArray[Any]]:
    return learner._state()[0]


def same(one: Classifier | Regressor, other: Classifier | Regressor) -> bool:
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    return all(np.array_equal(first[name], second[name]) for name in first)


def test_numbers_are_those_of_a_monitor_in_a_plain_loop() -> None:
    rows, labels = samples(300)
    learner = Classifier((12, 8), optimizer="ada-upgd", monitor_every=20)
    learner.partial_fit(rows[:200], labels[:200])
    ((module, opt),) = learner.to_torch()
    plain = upgd.Monitor(module, opt, every=20)
    monitor = learner.monitor
    places = learner.output_classes_.tolist()
    for row, label in zip(rows[200:], labels[200:], strict=True):
        x, y = torch.from_numpy(learner.scaled_rows(row[None])), torch.tensor([places.index(label)])
        opt.zero_grad()
        cross_entropy(module(x), y).backward()
        plain.observe(lambda x=x, y=y: cross_entropy(module(x), y))  # type: ignore[misc]
        opt.step()
        learner.partial_fit(row[None], [label])
    assert [step for step, _ in monitor.history] == [220, 240, 260, 280, 300]
    exact = ("weight_norm", "weight_magnitude", "gradient_norm", "update_ratio", "protected", "eta")
    for (_, found), (_, expected) in zip(monitor.history, plain.history, strict=True):
        assert found.keys() == expected.keys()
        for name in found:
            if name.split("/")[0] in (*exact, "loss", "plasticity", "skipped_steps"):
                assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert monitor.histograms[-1][1].keys() == plain.histograms[-1][1].keys()


def test_hidden_units_are_measured_on_the_newest_rows() -> None:
    """By a learner that stops before the sample that is measured."""
    rows, labels = samples(400)
    rows[:, 5] = 0
    learner, other = (Classifier((40,), monitor_every=400, hyper={"lr": 0.1}) for _ in range(2))
    learner.monitor.tau = 0.3
    learner.partial_fit(rows, labels)
    other.partial_fit(rows[:399], labels[:399])
    seen, _ = learner._recent.newest(32, 6)
    assert len(seen) == 32
    ((module, _),) = other.to_torch()
    hidden = module[:3](torch.from_numpy(seen))  # type: ignore[index]
    dormant = (dormancy_scores(hidden.abs().mean(0)) <= 0.3).double().mean()
    found = learner.monitor.scalars()
    assert 0 < float(dormant) == found["dormant"] == found["dormant/1"]
    assert found["dead"] == float((hidden == 0).all(0).double().mean())
    assert learner.monitor.units == {"1": 40}
    values = np.linalg.svd(hidden.detach().double().numpy(), compute_uv=False)
    stable = (values**2).sum() / values[0] ** 2
    assert found["stable_rank/1"] == pytest.approx(stable, rel=1e-5)


def test_a_mixture_is_measured_as_a_whole() -> None:
    rows, labels = samples(300)
    learner, other = Classifier("small", monitor_every=300), Classifier("small")
    monitor = learner.monitor
    learner.partial_fit(rows, labels)
    other.partial_fit(rows[:299], labels[:299])
    place = other.classes_.tolist().index(labels[299])
    found = monitor.scalars()
    expected = -other.predict_log_proba(rows[299:])[0, place]
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert 0 <= found["plasticity"] <= 1
    layers = [units for member in learner._members for units in member.hidden]  # type: ignore[union-attr]
    assert list(monitor.units.values()) == layers
    networks = learner.to_torch()
    sizes = [
        sum(p.numel() for p in module.parameters())
        for module, opt in networks
        if isinstance(opt, upgd.UPGD | upgd.AdaUPGD)
    ]
    assert 0 < len(sizes) < len(networks)
    assert sum(monitor.histograms[-1][1]["utility"]) == pytest.approx(sum(sizes))


@pytest.mark.parametrize(
    "parameters",
    [
        {"network": "small"},
        {"network": (8,), "replay": 20},
        {"network": (8,), "batch_size": 4},
        {"network": (8,), "optimizer": "feature-upgd", "batch_size": 3},
        {"network": (8,), "optimizer": "upgd-2nd"},
        {"network": (8,), "drift": "adwin"},
        {"network": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))},
    ],
    ids=str,
)
def test_learning_is_the_same_with_a_monitor(parameters: dict[str, Any]) -> None:
    rows, labels = samples(200)
    weights = np.random.default_rng(1).uniform(0.5, 2, 200)
    found = []
    for watched in (True, False):
        torch.manual_seed(0)
        learner = Classifier(**parameters, monitor_every=7)
        guesses = []
        for begin, end in ((0, 30), (30, 31), (31, 100), (100, 200)):
            if watched and begin == 30:
                assert learner.monitor.measured == 0
            some = slice(begin, end)
            guesses.append(
                learner.predict_then_learn(rows[some], labels[some], None, weights[some])
            )
        found.append((learner, np.concatenate(guesses), torch.rand(1)))
    (one, first, draw), (other, second, its_draw) = found
    assert one.monitor.measured > 15
    assert other._monitor is None
    assert same(one, other)
    np.testing.assert_array_equal(first, second)
    assert draw == its_draw


def test_measurements_do_not_depend_on_how_rows_come() -> None:
    rows, labels = samples(120)
    histories = []
    for size in (1, 13, 120):
        learner = Classifier((8,), monitor_every=25)
        assert learner.monitor.history == []
        for begin in range(0, 120, size):
            learner.partial_fit(rows[begin : begin + size], labels[begin : begin + size])
        histories.append(learner.monitor.history)
    assert [step for step, _ in histories[0]] == [25, 50, 75, 100]
    for history in histories[1:]:
        for (step, found), (its_step, expected) in zip(history, histories[0], strict=True):
            assert step == its_step
            assert found == pytest.approx(expected, nan_ok=True)


def test_batches_are_measured_where_they_are_due() -> None:
    rows, labels = samples(100)
    learner = Classifier((8,), batch_size=8, monitor_every=10)
    monitor = learner.monitor
    learner.partial_fit(rows, labels)
    assert [step for step, _ in monitor.history] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    learner = Classifier((8,), batch_size=8, monitor_every=3)
    learner.monitor.on_measure(lambda step, _: None)
    learner.partial_fit(rows[:16], labels[:16], classes=[0, 1, 2])
    assert learner.monitor.measured == 2  # one per step at most


def test_classes_and_features_may_appear_meanwhile() -> None:
    learner = Classifier("small", monitor_every=10)
    monitor = learner.monitor
    for t in range(40):
        x = {"a": t % 3} if t < 15 else {"a": t % 3, "b": t % 5, "c": "xy"[t % 2]}
        learner.learn_one(x, "old" if t < 25 else ["old", "new"][t % 2])
    assert [step for step, _ in monitor.history] == [10, 20, 30, 40]
    assert all(np.isfinite(numbers["weight_norm"]) for _, numbers in monitor.history)


def test_a_regressor_is_measured() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(201, 3))
    targets = np.stack([rows @ [1.0, 2, 3], rows @ [0.0, 1, 0]], 1)
    learner, other = Regressor("small", monitor_every=200), Regressor("small")
    monitor = learner.monitor
    learner.partial_fit(rows[:200], targets[:200])
    other.partial_fit(rows[:199], targets[:199])
    scaler = copy.deepcopy(other._target_scaler)
    answers = other._answers(rows[199:200])
    expected = np.square(answers - scaler.learn(targets[199:200])).mean()
    assert monitor.scalars()["loss"] == pytest.approx(expected, rel=1e-4)


def test_pages_sinks_and_warnings(tmp_path: Path) -> None:
    rows, labels = samples(200)
    rows[100:] = 0
    learner = Classifier((8,), normalize=False, monitor_every=50, hyper={"lr": 0.5})
    learner.monitor.on_measure(CSV(tmp_path / "run.csv"))
    learner.partial_fit(rows, labels)
    monitor = learner.monitor
    assert monitor is learner.monitor
    assert all(isinstance(each, str) for each in monitor.warnings())
    page = monitor.page(tmp_path / "run.html").read_text("utf-8")
    assert "Dormant units" in page
    assert "8 units behind" in page
    lines = (tmp_path / "run.csv").read_text("utf-8").splitlines()
    assert {line.split(",")[0] for line in lines[1:]} == {"50", "100", "150", "200"}
    assert "4 measured" in repr(monitor)
    with pytest.raises(TypeError, match="counts samples itself"):
        monitor.step()
    monitor.close()
    learner.partial_fit(rows, labels)
    assert monitor.measured == 4


def test_a_loaded_learner_measures_at_the_same_samples(tmp_path: Path) -> None:
    rows, labels = samples(120)
    learner = Classifier((8,), monitor_every=50)
    assert learner.monitor.scalars() == {}
    learner.partial_fit(rows[:70], labels[:70])
    learner.save(tmp_path / "learner")
    loaded = Classifier.load(tmp_path / "learner")
    assert loaded._monitor is None
    assert loaded.monitor.history == []
    for each in (learner, loaded):
        each.partial_fit(rows[70:], labels[70:])
    assert same(learner, loaded)
    assert [step for step, _ in learner.monitor.history] == [50, 100]
    assert [step for step, _ in loaded.monitor.history] == [100]
    fewer = ("dormant", "dead", "rank")  # of rows that came before it was loaded
    for name, value in loaded.monitor.scalars().items():
        if not any(each in name for each in fewer):
            assert learner.monitor.scalars()[name] == value


def test_a_learner_that_begins_again_is_measured_again() -> None:
    rows, labels = samples(60)
    learner = Classifier((8,), epochs=2, monitor_every=40)
    called = []
    learner.monitor.on_measure(lambda step, _: called.append(step))
    learner.fit(rows, labels)
    learner.fit(rows, labels)
    assert called == [40, 80, 120, 40, 80, 120]
    assert [step for step, _ in learner.monitor.history] == [40, 80, 120]


def test_learning_goes_on_where_measuring_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = samples(60)
    learner, other = Classifier((8,), monitor_every=10), Classifier((8,))
    monitor = learner.monitor

    def fails(self: Classifier) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(Classifier, "to_torch", fails)
    with pytest.warns(MonitorWarning, match="networks are no longer measured, since that failed"):
        learner.partial_fit(rows, labels)
    other.partial_fit(rows, labels)
    assert same(learner, other)
    assert monitor.measured == 0


def test_steps_that_are_not_finite_are_not_measured() -> None:
    rows, labels = samples(80)
    learner = Classifier((8,), monitor_every=21)
    learner.monitor.on_measure(lambda *_: None)
    learner.partial_fit(rows[:19], labels[:19])
    assert learner.committee_ is not None
    learner.committee_.cores[0].lr = 1e30
    with pytest.warns(UserWarning, match="diverged"):
        learner.partial_fit(rows[19:22], labels[19:22])
    assert learner.monitor.history == []
    learner.committee_.cores[0].lr = 0.01
    learner.partial_fit(rows[22:], labels[22:])
    assert [step for step, _ in learner.monitor.history] == [42, 63]


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_an_interval_must_be_a_positive_number(every: Any) -> None:
    with pytest.raises(ValueError, match="monitor_every must be at least 1"):
        Classifier(monitor_every=every).partial_fit(*samples(5))
