"""river: the wrappers pass its checks and do in its pipelines what a plain loop does."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("river", reason="needs the extra integrations")
pytest.importorskip("sklearn", reason="needs the extra stream")

import river
from river import checks, compose, datasets, drift, evaluate, metrics, preprocessing

from tests.stream_learners import assert_same
from upgd import stream
from upgd.integrations.river import Classifier, Regressor

MODELS = {
    "Classifier()": Classifier(),
    "Classifier((16,))": Classifier(network=(16,)),
    "Regressor()": Regressor(),
    "Regressor((16,))": Regressor(network=(16,)),
}


# ------------------------------------------------------------------------------ checks
def river_checks() -> Iterator[Any]:
    """All that river has for such estimators; of default networks, half and the longest: slow."""
    for name, model in MODELS.items():
        for number, check in enumerate(checks.yield_checks(model)):
            longest = check.__name__ == "check_learn_one"
            slow = name.endswith("()") and (number % 2 == 1 or longest)
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(model, check, marks=marks, id=f"{name}-{number}-{check.__name__}")


@pytest.mark.parametrize(("model", "check"), list(river_checks()))
def test_checks(model: Any, check: Any) -> None:
    check(model.clone())


def test_which_checks_there_are() -> None:
    """Those that need pandas, and those of classifiers, are among them."""
    names = {check.__name__ for check in checks.yield_checks(Classifier())}
    assert {
        "check_shuffle_features_no_impact",
        "check_radically_disappearing_features",
        "check_predict_proba_one",
    } <= names
    if river.__version__ >= "0.26":
        pytest.importorskip("pandas")
        assert "check_learn_many_matches_learn_one" in names
        assert "check_predict_proba_many_matches_predict_proba_one" in names


# -------------------------------------------------------------------------- evaluation
def test_progressive_validation_is_the_plain_loop() -> None:
    """A pipeline in ``progressive_val_score``; a scaler, a learner and a metric by hand."""
    model = preprocessing.StandardScaler() | Classifier(network=(16,))
    found = evaluate.progressive_val_score(
        datasets.ImageSegments().take(500), model, metrics.Accuracy()
    )

    scaler, learner = preprocessing.StandardScaler(), stream.Classifier(network=(16,))
    right = total = 0
    for x, y in datasets.ImageSegments().take(500):
        guess = learner.predict_one(scaler.transform_one(x))
        right, total = right + (guess == y), total + (guess is not None)
        scaler.learn_one(x)
        learner.learn_one(scaler.transform_one(x), y)
    assert found.get() == right / total
    assert found.get() > 0.4  # of seven classes
    assert_same(model["Classifier"].learner, learner)


def test_regression_is_the_plain_loop() -> None:
    model = Regressor(network=(16,))
    found = evaluate.progressive_val_score(datasets.TrumpApproval(), model, metrics.MAE())
    learner, errors = stream.Regressor(network=(16,)), []
    for x, y in datasets.TrumpApproval():
        errors.append(abs(learner.predict_one(x) - y))
        learner.learn_one(x, y)
    assert found.get() == pytest.approx(np.mean(errors), rel=1e-12)
    assert found.get() == pytest.approx(learner.mean_absolute_error_, rel=1e-12)
    assert_same(model.learner, learner)


def test_probabilities_reach_metrics() -> None:
    """Metrics that need no labels are given ``predict_proba_one``."""
    model = Classifier(network=(16,))
    found = evaluate.progressive_val_score(datasets.Phishing(), model, metrics.LogLoss())
    assert found.get() < 0.4


def test_delayed_targets() -> None:
    """Predictions first, targets ten samples later."""
    model = Classifier(network=(16,))
    found = evaluate.progressive_val_score(
        datasets.Phishing().take(300), model, metrics.Accuracy(), delay=10
    )
    learner, waiting, hits = stream.Classifier(network=(16,)), [], []
    for x, y in [*datasets.Phishing().take(300), *[(None, None)] * 10]:
        if len(waiting) == 10 or x is None:
            past, target, guess = waiting.pop(0)
            hits += [guess == target] if guess is not None else []
            learner.learn_one(past, target)
        if x is not None:
            waiting.append((x, y, learner.predict_one(x)))
    assert found.get() == pytest.approx(np.mean(hits), rel=1e-12)
    assert_same(model.learner, learner)


def test_the_bare_learner_needs_the_wrapper() -> None:
    """river asks for its own classes; a loop with its metrics does not."""
    learner, metric = stream.Classifier(network=(16,)), metrics.Accuracy()
    with pytest.raises(ValueError, match="not compatible"):
        evaluate.progressive_val_score(datasets.Phishing(), learner, metric)
    for x, y in datasets.Phishing():
        guess = learner.predict_one(x)
        if guess is not None:
            metric.update(y, guess)
        learner.learn_one(x, y)
    assert metric.get() > 0.8


# ---------------------------------------------------------------------------- pipelines
def test_strings_and_selections() -> None:
    """river's selectors leave out features; strings need no encoder."""
    data = [({"n": float(i % 7), "s": "abc"[i % 3], "id": str(i)}, i % 3 == 0) for i in range(300)]
    model = compose.Discard("id") | Classifier(network=(8,))
    metric = evaluate.progressive_val_score(data, model, metrics.Accuracy())
    assert metric.get() > 0.9
    assert set(model["Classifier"].learner._columns.names) == {"n", "s=a", "s=b", "s=c"}


def test_weights_arrive() -> None:
    model, learner = Classifier(network=(8,)), stream.Classifier(network=(8,))
    data = [({"a": float(i % 5)}, i % 5 > 2, {"w": 1 + i % 3}) for i in range(60)]
    evaluate.progressive_val_score(data, model, metrics.Accuracy())
    for x, y, extra in [({"a": float(i % 5)}, i % 5 > 2, 1 + i % 3) for i in range(60)]:
        learner.learn_one(x, y, extra)
    assert_same(model.learner, learner)


def test_many_is_one_by_one() -> None:
    pandas = pytest.importorskip("pandas")
    rows = list(datasets.ImageSegments().take(200))
    X, y = pandas.DataFrame([x for x, _ in rows]), pandas.Series([y for _, y in rows])
    X.index = y.index = [f"row {i}" for i in range(len(X))]
    model, other = Classifier(network=(8,)), Classifier(network=(8,))
    assert model.predict_proba_many(X).shape == (200, 0)
    assert model.predict_many(X).empty
    for begin in range(0, 200, 40):
        model.learn_many(X[begin : begin + 40], y[begin : begin + 40])
    for x, target in rows:
        other.learn_one(x, target)
    assert_same(model.learner, other.learner)
    found = model.predict_many(X)
    assert found.tolist() == [other.predict_one(x) for x, _ in rows]
    assert found.index.tolist() == X.index.tolist()
    probabilities = model.predict_proba_many(X).to_dict("records")
    for (x, _), each in zip(rows, probabilities, strict=True):
        assert other.predict_proba_one(x) == pytest.approx(each, rel=1e-5)

    numbers = Regressor(network=(8,))
    assert (numbers.predict_many(X) == 0).all()
    numbers.learn_many(X, pandas.Series(np.arange(200.0), X.index), w=np.full(200, 0.5))
    assert numbers.predict_many(X).index.tolist() == X.index.tolist()


# ------------------------------------------------------------------------------ copies
@pytest.mark.parametrize(
    "options",
    [
        {"network": ()},
        {"network": (4, 4), "optimizer": "adamw", "hyper": {"lr": 0.01}},
        {"drift": drift.ADWIN(delta=0.01), "network": (4,), "on_drift": ()},
        {"seed": 7, "horizon": 50},
    ],
)
def test_clone_has_the_parameters_and_nothing_learned(options: dict[str, Any]) -> None:
    model = Classifier(**options)
    model.learn_one({"a": 1.0}, "x")
    again = model.clone()
    assert again.predict_one({"a": 1.0}) is None
    assert repr(again) == repr(model)
    for name, value in options.items():
        if name not in ("drift", "seed"):
            assert getattr(again.learner, name) == (value or type(getattr(again.learner, name))())
    assert again.learner.random_state == options.get("seed", 0)
    again.learn_one({"a": 1.0}, "x")
    assert_same(model.learner, again.learner)
    assert model.clone({"seed": 11}).learner.random_state == 11


def test_pickled_goes_on_as_the_original() -> None:
    model = preprocessing.StandardScaler() | Classifier(network=(8,))
    rows = list(datasets.Phishing().take(200))
    for x, y in rows[:100]:
        model.predict_one(x)
        model.learn_one(x, y)
    other = pickle.loads(pickle.dumps(model))
    for x, y in rows[100:]:
        assert model.predict_proba_one(x) == other.predict_proba_one(x)
        model.learn_one(x, y)
        other.learn_one(x, y)
    assert_same(model["Classifier"].learner, other["Classifier"].learner)


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="netwrok"):
        Classifier(netwrok=(8,))
