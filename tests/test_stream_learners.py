"""Learners of streams: the networks against plain PyTorch, growth, replay, drift, files."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("numba")
pytest.importorskip("sklearn")

from upgd.stream import Classifier, Regressor, StreamWarning, members, mixing, scaling
from upgd.stream.dense import DenseCore, compiled_core
from upgd.stream.module import ModuleCore

ADA = {"lr": 0.003, "betas": (0.0, 0.999), "beta_utility": 0.999, "weight_decay": 0.01}
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.03}),
    "upgd": ("upgd", {"lr": 0.03, "sigma": 0.0}),
    "upgd with noise": ("upgd", {"lr": 0.03, "sigma": 0.01}),
    "ada-upgd": ("ada-upgd", {**ADA, "sigma": 0.0}),
    "ada-upgd with noise": ("ada-upgd", {**ADA, "sigma": 0.1}),
    "self-tuned-sgd": ("self-tuned-sgd", {"lr": 0.25}),
}


def samples(count: int, seed: int = 0, inputs: int = 5) -> tuple[Any, Any]:
    """Rows in three classes."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, inputs))
    return x, (x[:, 0] > 0).astype(int) + (x[:, 1] * x[:, 2] > 0)


def pair(rule: str, sizes: tuple[int, ...], squared: bool) -> tuple[DenseCore, ModuleCore]:
    """The compiled network and the same in PyTorch."""
    method, hyper = RULES[rule]
    module = members.dense_module(sizes, 3)
    common = (method, hyper, 3, squared)
    return compiled_core(sizes, *common), ModuleCore(module, sizes[0], sizes[-1], *common)


# ----------------------------------------------------------------------------- networks
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_the_compiled_network_learns_what_pytorch_learns(rule: str, squared: bool) -> None:
    compiled, plain = pair(rule, (5, 12, 7, 3), squared)
    x, y = samples(200)
    targets = np.stack([x[:, 0], x[:, 1], x[:, 0] * x[:, 3]], 1) if squared else y
    weights = np.random.default_rng(1).uniform(0, 3, len(x)).astype(np.float32)
    rows = x.astype(np.float32)
    found, expected = (core.learn(rows, targets, weights) for core in (compiled, plain))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
    np.testing.assert_allclose(compiled.answer(rows), plain.answer(rows), rtol=0, atol=2e-4)
    assert abs(found[-1]).max() > 0.05  # something was learned


def test_a_network_that_sees_its_layers_grows_as_in_pytorch() -> None:
    compiled, plain = pair("self-tuned-sgd", (5, 12, 7, 3), False)
    x, y = samples(100)
    rows = x.astype(np.float32)
    wider = np.random.default_rng(2).normal(size=(100, 7)).astype(np.float32)
    labels = np.random.default_rng(3).integers(0, 5, 100)
    for core in (compiled, plain):
        core.learn(rows, y)
    before = compiled.answer(rows)
    for core in (compiled, plain):
        core.grow(7, 5)
    padded = np.concatenate([rows, wider[:, 5:]], 1)
    np.testing.assert_allclose(compiled.answer(padded)[:, :3], before, rtol=0, atol=1e-6)
    found, expected = (core.learn(wider, labels) for core in (compiled, plain))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_growing_keeps_weights_and_traces() -> None:
    compiled, plain = pair("ada-upgd", (5, 12, 7, 3), False)
    x, y = samples(100)
    rows = x.astype(np.float32)
    for core in (compiled, plain):
        core.learn(rows, y)
    before, traces = compiled.answer(rows), compiled.utilities()
    wider = np.concatenate([rows, np.random.default_rng(2).normal(size=(100, 2))], 1)
    wider = wider.astype(np.float32)
    for core in (compiled, plain):
        core.grow(7, 5)
    # What is new has weights of zero, so old outputs do not change, whatever new inputs are.
    after = compiled.answer(wider)
    np.testing.assert_allclose(after[:, :3], before, rtol=0, atol=1e-6)
    assert not after[:, 3:].any()
    grown = compiled.utilities()
    assert traces is not None
    assert grown is not None
    assert (grown[0][:, :5] == traces[0][:, :-1]).all()
    assert (grown[-1][:3] == traces[-1]).all()
    assert not grown[0][:, 5:7].any()
    assert not grown[-1][3:].any()
    labels = np.random.default_rng(3).integers(0, 5, 100)
    found, expected = (core.learn(wider, labels) for core in (compiled, plain))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_answers_are_those_that_learning_begins_with() -> None:
    core, _ = pair("upgd with noise", (5, 12, 3), False)
    x, y = samples(50)
    for i in range(50):
        row = x[i : i + 1].astype(np.float32)
        assert (core.answer(row) == core.learn(row, y[i : i + 1])).all()


def test_any_module_learns_and_its_head_grows() -> None:
    body = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    network = nn.Sequential(body, nn.Linear(144, 2))
    before = [p.detach().clone() for p in network.parameters()]
    learner = Classifier(network, optimizer="ada-upgd", hyper={"lr": 0.01})
    random = np.random.default_rng(0)
    y = random.integers(0, 4, 400)
    x = random.normal(size=(400, 64)) * 0.3
    x[np.arange(400), y * 9] += 3
    learner.partial_fit(x, y)
    assert learner.recent_accuracy_ > 0.6
    assert learner.predict_proba(x[:3]).shape == (3, 4)
    # The module that was given is as it was.
    assert all((a == b).all() for a, b in zip(network.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="64 features"):
        learner.partial_fit(x[:, :60], y)


def test_a_function_makes_the_network_and_batches_share_a_step() -> None:
    def make(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))

    x, y = samples(640)
    learner = Classifier(make, batch_size=32, optimizer="adam", hyper={"lr": 0.01})
    learner.partial_fit(x, y, classes=[0, 1, 2])
    torch.manual_seed(0)
    module = make(5, 3)
    opt = torch.optim.Adam(module.parameters(), lr=0.01)
    scaled = torch.from_numpy(scaling.Scaler(5, 300).learn(x))
    for begin in range(0, 640, 32):
        some = slice(begin, begin + 32)
        loss = nn.functional.cross_entropy(module(scaled[some]), torch.from_numpy(y[some]))
        opt.zero_grad()
        loss.backward()
        opt.step()
    core = learner.committee_.cores[0]  # type: ignore[union-attr]
    for p, q in zip(core.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def test_the_mixture_beats_its_worst_members_and_follows_a_change() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(6000, 2))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)  # nothing for a linear model
    mixed, linear = Classifier("small").partial_fit(x, y), Classifier(()).partial_fit(x, y)
    assert linear.accuracy_ < 0.6
    assert mixed.recent_accuracy_ > 0.93


# ------------------------------------------------------------------------------- without
def test_without_numba_the_same_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples(120)
    targets = x[:, 0] * x[:, 1]
    x[::7, 2] = math.nan
    fast = Classifier("small").partial_fit(x, y), Regressor("small").partial_fit(x, targets)
    monkeypatch.setattr(members, "has_compiled_core", lambda: False)
    monkeypatch.setattr(scaling, "scale_rows", None)
    monkeypatch.setattr(mixing, "mix_rows", None)
    plain = Classifier("small").partial_fit(x, y), Regressor("small").partial_fit(x, targets)
    np.testing.assert_allclose(fast[0].predict_proba(x), plain[0].predict_proba(x), atol=1e-3)
    np.testing.assert_allclose(fast[1].predict(x), plain[1].predict(x), atol=5e-3)


# -------------------------------------------------------------------------------- safety
def test_a_learner_that_diverges_goes_back() -> None:
    x, _ = samples(3000)
    learner = Regressor((16,), optimizer="sgd", hyper={"lr": 0.01})
    learner.partial_fit(x, x[:, 0])
    good = learner.predict(x)
    core = learner.committee_.cores[0]  # type: ignore[union-attr]
    core.lr = 1e30
    with pytest.warns(StreamWarning, match="diverged"):
        learner.partial_fit(x[:2], x[:2, 0] + 3)
    assert learner.restarts_ == 1
    assert core.lr == 0.5e30
    core.lr = 0.01
    assert np.isfinite(learner.predict(x)).all()
    assert abs(learner.predict(x) - good).mean() < 0.1


def outlier_stream() -> tuple[Any, Any]:
    """Numbers that are not scaled, one of which makes a network diverge."""
    x, _ = samples(3600)
    x[3500] = 1e15
    return x, x[:, 0]


PLAIN: dict[str, Any] = {"network": (8,), "optimizer": "sgd", "normalize": False}


def test_a_learner_that_diverges_is_the_same_however_rows_come(tmp_path: Path) -> None:
    x, y = outlier_stream()
    whole, pieces, saved = (Regressor(**PLAIN, hyper={"lr": 0.01}) for _ in range(3))
    with pytest.warns(StreamWarning, match="diverged"):
        whole.partial_fit(x, y)
    saved.partial_fit(x[:3400], y[:3400])
    saved.save(tmp_path / "learner")
    saved = Regressor.load(tmp_path / "learner")
    with pytest.warns(StreamWarning, match="diverged"):
        saved.partial_fit(x[3400:], y[3400:])
    for begin in range(0, 3600, 77):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StreamWarning)
            pieces.partial_fit(x[begin : begin + 77], y[begin : begin + 77])
    core = whole.committee_.cores[0]  # type: ignore[union-attr]
    assert core.steps > 3000  # it went back to a copy, not to the beginning
    for other in (pieces, saved):
        a, b = whole._state()[0], other._state()[0]
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_a_step_size_that_was_halved_recovers() -> None:
    x, y = outlier_stream()
    learner = Regressor(**PLAIN, hyper={"lr": 0.01})
    with pytest.warns(StreamWarning, match="diverged"):
        learner.partial_fit(x, y)
    core = learner.committee_.cores[0]  # type: ignore[union-attr]
    assert core.lr == 0.005
    for _ in range(4):
        learner.partial_fit(x[:3400], y[:3400])
    assert core.lr == 0.01


def test_features_that_appear_make_steps_smaller() -> None:
    wide = {f"f{i}": float(i % 7) for i in range(256)}
    grown, whole = Classifier("small"), Classifier("small")
    grown.learn_one({"f0": 1.0}, "a")
    grown.learn_one(wide, "b")
    whole.learn_one(wide, "a")
    assert [core.lr for core in grown.committee_.cores] == pytest.approx(  # type: ignore[union-attr]
        [core.lr for core in whole.committee_.cores]  # type: ignore[union-attr]
    )
    assert whole.committee_.cores[0].lr == 0.015  # type: ignore[union-attr]


def test_growth_that_was_interrupted_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Classifier("small")
    learner.learn_one({"a": 1.0}, "x")
    grow, calls = DenseCore.grow, []

    def interrupted(core: DenseCore, inputs: int, outputs: int) -> None:
        calls.append(core)
        if len(calls) == 3:
            raise KeyboardInterrupt
        grow(core, inputs, outputs)

    monkeypatch.setattr(DenseCore, "grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learner.learn_one({"a": 1.0, "b": 2.0}, "y")
    learner.learn_one({"a": 1.0, "b": 2.0}, "y")
    cores = learner.committee_.cores  # type: ignore[union-attr]
    assert {(core.sizes[0], core.sizes[-1]) for core in cores} == {(2, 2)}


def test_zeros_take_the_place_of_all_that_is_missing() -> None:
    x, y = samples(100)
    learner = Classifier((8,), missing="zero")
    for row, label in zip(x.tolist(), y.tolist(), strict=True):
        learner.learn_one(dict(enumerate(row)), label)
    answers = [
        learner.predict_proba_one({1: 0.5, 2: 1.0, 3: 1.0, 4: 1.0, **absent})
        for absent in ({}, {0: None}, {0: math.nan}, {0: 0.0})
    ]
    assert answers[1:] == answers[:1] * 3


def test_scorers_of_scikit_learn_know_which_class_is_which() -> None:
    from sklearn.metrics import get_scorer

    x, _ = samples(2000)
    y = np.where(x[:, 0] > 0, "a", "b")
    learner = Classifier((16,)).partial_fit(x, y)
    assert set(y[:1]) | {"a", "b"} == set(learner.classes_)
    for first in ("a", "b"):
        start = int(np.flatnonzero(y == first)[0])
        learner = Classifier((16,)).partial_fit(x[start:], y[start:])
        assert learner.output_classes_[0] == first
        assert get_scorer("roc_auc")(learner, x, y) > 0.95
        assert get_scorer("neg_log_loss")(learner, x, y) > -0.5


def test_replay_learns_old_samples_again() -> None:
    x, y = samples(300)
    hyper = {"lr": 0.03, "sigma": 0.0}
    learner = Classifier((8,), hyper=hyper, normalize=False, replay=50, replay_samples=2)
    learner.partial_fit(x, y, classes=[0, 1, 2])
    buffer = learner._buffer
    assert buffer is not None
    assert len(buffer) == 50
    newest = {tuple(row) for row in x[-50:]}
    assert {tuple(row) for row in buffer.rows} == newest
    core = learner.committee_.cores[0]  # type: ignore[union-attr]
    assert core.steps == 300 + 2 * 299  # there is nothing to draw at the first sample
    # One sample at a time by hand.
    again = DenseCore((5, 8, 3), "upgd", hyper, 0, False)
    other = type(buffer)(50, 0)
    for row, label in zip(x, y, strict=True):
        again.learn(row[None].astype(np.float32), np.array([label]))
        if len(other):
            rows, labels = other.draw(2)
            again.learn(rows.astype(np.float32), labels)
        other.add(row, label)
    assert (again.stack.weights == core.stack.weights).all()


def test_a_change_is_found_and_utilities_are_forgotten() -> None:
    pytest.importorskip("river")
    x, _ = samples(4000)
    y = x[:, 0] > 0
    y[2000:] = ~y[2000:]
    learner = Classifier((16,), drift="adwin", on_drift=["utilities"])
    learner.partial_fit(x, y)
    assert [found for found in learner.drifts_ if 2000 < found < 2200]
    assert not [found for found in learner.drifts_ if found <= 2000][2:]
    with pytest.raises(ValueError, match="on_drift"):
        Classifier(on_drift=["weights"]).partial_fit(x, y)
    with pytest.raises(ValueError, match="adwin"):
        Classifier(drift="adwim").partial_fit(x, y)


# --------------------------------------------------------------------------------- files
LEARNERS: dict[str, dict[str, Any]] = {
    "mixture": {"network": "small"},
    "noise": {"network": (16,), "optimizer": "upgd", "hyper": {"sigma": 0.1}},
    "replay": {"network": (16,), "replay": 30},
    "features": {"network": (16,), "optimizer": "feature-upgd"},
    "consolidation": {"network": (16,), "optimizer": "s-rwalk"},
    "batches": {"network": (8,), "batch_size": 4, "optimizer": "ada-upgd"},
    "drift": {"network": (16,), "drift": "adwin"},
}


@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.parametrize("cls", [Classifier, Regressor])
def test_a_loaded_learner_goes_on_bit_for_bit(
    cls: type[Classifier] | type[Regressor], kind: str, tmp_path: Path
) -> None:
    if kind == "drift":
        pytest.importorskip("river")
    x, y = samples(400)
    first, file = cls(**LEARNERS[kind]), tmp_path / "learner"
    first.partial_fit(x[:200, :4], y[:200])
    first.save(file, extra={"offset": 200})
    second = cls.load(file)
    assert second.extra == {"offset": 200}
    assert second.n_samples_seen_ == 200
    # Features and classes that are new.
    named = [{**dict(enumerate(row)), "colour": "red"} for row in x[200:, :4]]
    for learner in (first, second):
        for row, target in zip(named, y[200:] + 1, strict=True):
            learner.learn_one(row, int(target))
    (a, b), (c, d) = first._state(), second._state()
    assert b == d
    assert a.keys() == c.keys()
    for name in a:
        assert a[name].tobytes() == c[name].tobytes(), name


def test_what_is_no_learner_is_refused(tmp_path: Path) -> None:
    x, y = samples(20)
    file = tmp_path / "learner"
    learner = Classifier((4,)).partial_fit(x, y)
    learner.save(file)
    with pytest.raises(ValueError, match=r"Classifier\.load"):
        Regressor.load(file)
    with pytest.raises(FileNotFoundError, match="no saved learner"):
        Classifier.load(tmp_path / "nothing")
    content = file.read_bytes()
    for damaged in (content[:-100], b"", content.replace(b"weights", b"wreights"), b"x" * 1000):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"):
            Classifier.load(file)
    with pytest.raises(OSError, match="cannot write"):
        learner.save(tmp_path / "no" / "folder")
    with pytest.raises(ValueError, match="JSON"):
        learner.save(file, extra={"at": object()})
    module = nn.Linear(5, 3)
    Classifier(module).partial_fit(x, y).save(file)
    with pytest.raises(ValueError, match=r"network=\.\.\."):
        Classifier.load(file)
    assert Classifier.load(file, network=module).predict(x).shape == (20,)
    with pytest.raises(ValueError, match="learned with hyper=None"):
        Classifier.load(file, network=module, hyper={"lr": 0.1})
    assert Classifier.load(file, network=module, snapshot_every=7).snapshot_every == 7


def test_parameters_that_are_changed_later_do_not_spoil_a_file(tmp_path: Path) -> None:
    x, y = samples(50)
    learner = Classifier((4,)).partial_fit(x, y)
    learner.set_params(network=(8,), horizon=5, snapshot_every=7)
    learner.partial_fit(x, y)
    learner.save(tmp_path / "learner")
    loaded = Classifier.load(tmp_path / "learner")
    assert (loaded.predict_proba(x) == learner.predict_proba(x)).all()
    assert (loaded.network, loaded.horizon, loaded.snapshot_every) == ([4], 300, 7)
    assert learner.fit(x, y).committee_.cores[0].sizes == (5, 8, 3)


def test_a_file_of_a_smaller_mixture_goes_on_with_its_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtures of version 0.1.0 had five networks."""
    x, y = samples(60)
    mixture = members.mixture
    with monkeypatch.context() as older:
        older.setattr(members, "mixture", lambda *asked: mixture(*asked)[:5])
        learner = Classifier("small").partial_fit(x[:30], y[:30])
        learner.save(tmp_path / "learner")
        learner.partial_fit(x[30:], y[30:])
    loaded = Classifier.load(tmp_path / "learner").partial_fit(x[30:], y[30:])
    assert (loaded.predict_proba(x) == learner.predict_proba(x)).all()
    assert loaded.committee_ is not None
    assert len(loaded.committee_.cores) == 5
    assert len(loaded.fit(x, y).committee_.cores) == 6


def test_a_module_that_has_grown_can_be_loaded(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    learner = Classifier(module)
    for i in range(30):
        learner.learn_one({"a": i % 3, "b": 1.0}, i % 2)
    for i in range(30):
        learner.learn_one({"a": i % 3, "b": 1.0, "c": i % 5}, i % 3)
    learner.save(tmp_path / "learner")
    loaded = Classifier.load(tmp_path / "learner", network=module)
    row = {"a": 1, "b": 2, "c": 3}
    assert loaded.predict_proba_one(row) == learner.predict_proba_one(row)


def test_a_position_is_never_that_of_another_learner(tmp_path: Path) -> None:
    x, y = samples(40)
    file = tmp_path / "learner"
    learner = Classifier((4,), snapshot=file, snapshot_every=10).partial_fit(x[:5], y[:5])
    learner.save(file, {"position": 5})
    assert Classifier.load(file).extra == {"position": 5}
    learner.partial_fit(x[5:20], y[5:20])
    loaded = Classifier.load(file)
    assert loaded.n_samples_seen_ == 20
    assert loaded.extra == {}


def test_a_snapshot_that_fails_does_not_stop_learning(tmp_path: Path) -> None:
    x, y = samples(40)
    with pytest.raises(ValueError, match="no folder"):
        Classifier((4,), snapshot=tmp_path / "none" / "file").partial_fit(x, y)
    learner = Classifier((4,), snapshot=tmp_path, snapshot_every=10)  # a folder is no file
    with pytest.warns(StreamWarning, match="no snapshot"):
        learner.partial_fit(x, y)
    assert learner.n_samples_seen_ == 40


def test_files_hold_no_pickle(tmp_path: Path) -> None:
    x, y = samples(20)
    Classifier("small", replay=5).partial_fit(x, y).save(tmp_path / "learner")
    with zipfile.ZipFile(tmp_path / "learner") as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                np.lib.format.read_array(file, allow_pickle=False)


def test_snapshots_are_written_and_can_be_resumed(tmp_path: Path) -> None:
    x, y = samples(5500)
    file = tmp_path / "snapshot"
    learner = Classifier((8,), snapshot=file, snapshot_every=2000)
    learner.partial_fit(x, y)
    again = Classifier.load(file)
    assert again.n_samples_seen_ == 4000
    again.partial_fit(x[4000:], y[4000:])
    assert (again.predict_proba(x) == learner.predict_proba(x)).all()


_LEARNING = """
import sys
import numpy as np
from upgd.stream import Classifier
x = np.random.default_rng(0).normal(size=(4000, 6))
y = (x[:, 0] > 0).astype(int)
learner = Classifier((32,), hyper={"sigma": 0.0}, snapshot=sys.argv[1], snapshot_every=1)
learner.partial_fit(x[:1], y[:1])
print("begun", flush=True)
for i in range(1, 10**9):
    learner.partial_fit(x[i % 4000][None], y[i % 4000][None])
"""


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.2, pytest.param(0.33, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_a_whole_snapshot(wait: float, tmp_path: Path) -> None:
    file = tmp_path / "snapshot"
    command = [sys.executable, "-c", _LEARNING, str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ})
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    learner = Classifier.load(file)
    x = np.random.default_rng(0).normal(size=(4000, 6))
    y = (x[:, 0] > 0).astype(int)
    other = Classifier((32,), hyper={"sigma": 0.0})
    rows = np.arange(learner.n_samples_seen_) % 4000
    other.partial_fit(x[rows], y[rows])  # the same as one by one: tests/test_stream_inputs.py
    assert (other.predict_proba(x) == learner.predict_proba(x)).all()


# -------------------------------------------------------------------------- wrong values
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"network": "huge"}, "'small', 'medium', 'large'"),
        ({"network": (0,)}, "positive"),
        ({"network": 3}, "cannot be 3"),
        ({"optimizer": "adam"}, "hidden units"),
        ({"network": (4,), "optimizer": "upgdd"}, "did you mean 'upgd'"),
        ({"network": (4,), "hyper": {"lrr": 1}}, "lrr"),
        ({"horizon": 1}, "horizon"),
        ({"batch_size": 0}, "batch_size"),
        ({"replay": -1}, "replay"),
        ({"missing": "median"}, "missing"),
        ({"random_state": -1}, "random_state"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], message: str) -> None:
    x, y = samples(10)
    with pytest.raises((ValueError, KeyError), match=message):
        Classifier(**parameters).partial_fit(x, y)


@pytest.mark.parametrize("detector", ["adwin", "page-hinkley", "kswin"])
def test_a_detector_of_drift_makes_the_same_learner_again(detector: str) -> None:
    pytest.importorskip("river", reason="detectors are river's")
    X = np.random.default_rng(0).normal(size=(2000, 2))
    y = (X[:, 0] > 0) ^ (np.arange(2000) > 1000)
    found = [Classifier((4,), drift=detector).partial_fit(X, y).drifts_ for _ in range(2)]
    assert found[0] == found[1] != []
