"""Learners that begin with a fitted estimator: the same predictions, then learning on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import (
    ElasticNet,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from upgd.stream import Classifier, Regressor, StreamWarning, scaling
from upgd.stream.learner import StreamLearner

pytest.importorskip("numba")
Array = NDArray[np.float64]
SCALE, SHIFT = np.array([1.0, 10, 0.01, 100, 3]), np.array([0.0, 50, 1, -700, 2])


def rows_of(count: int, seed: int = 0, raw: bool = True) -> Array:
    rows = np.random.default_rng(seed).normal(size=(count, 5))
    return rows * SCALE + SHIFT if raw else rows


def scores(rows: Array, raw: bool = True) -> Array:
    """Of three classes."""
    z = (rows - SHIFT) / SCALE if raw else rows
    return np.stack([z[:, 0] + z[:, 1], z[:, 2] * z[:, 3], 0.5 - z[:, 4]], 1)


def classes_of(rows: Array, classes: int, raw: bool = True) -> NDArray[Any]:
    return np.array(["ant", "bee", "cat"])[scores(rows, raw)[:, :classes].argmax(1)]


def fitted(estimator: Any, rows: Any, targets: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return clone(estimator).fit(rows, targets)


def mlp(kind: Callable[..., Any], activation: str = "relu") -> Any:
    return kind(hidden_layer_sizes=(12, 7), activation=activation, max_iter=30, random_state=0)


CLASSIFIERS = {
    "logistic regression": LogisticRegression(),
    "liblinear": LogisticRegression(solver="liblinear"),
    "SGD": SGDClassifier(loss="log_loss", random_state=0),
    "perceptron": mlp(MLPClassifier),
    "tanh": mlp(MLPClassifier, "tanh"),
    "identity": mlp(MLPClassifier, "identity"),
}
REGRESSORS = {
    "linear": LinearRegression(),
    "no intercept": LinearRegression(fit_intercept=False),
    "ridge": Ridge(),
    "elastic net": ElasticNet(0.01),
    "SGD": SGDRegressor(random_state=0),
    "perceptron": mlp(MLPRegressor),
    "tanh": mlp(MLPRegressor, "tanh"),
}
SCALERS = {
    "scaled": StandardScaler(),
    "not centred": StandardScaler(with_mean=False),
    "not divided": StandardScaler(with_std=False),
}


# ---------------------------------------------------------------------- the same predictions
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("scaler", [None, *SCALERS])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_predicts_the_same(name: str, scaler: str | None, classes: int) -> None:
    one_per_class = classes > 2 and name in ("SGD", "liblinear")
    if one_per_class and name == "liblinear":
        pytest.skip("scikit-learn refuses it")
    raw = scaler is not None
    rows, new = rows_of(300, 0, raw), rows_of(200, 1, raw)
    step = CLASSIFIERS[name]
    whole = make_pipeline(SCALERS[scaler], step) if scaler else step
    estimator = fitted(whole, rows, classes_of(rows, classes, raw))
    if one_per_class:
        with pytest.warns(StreamWarning, match="the learner predicts the same classes"):
            learner = Classifier.from_estimator(estimator)
    else:
        learner = Classifier.from_estimator(estimator)
        expected = estimator.predict_proba(new)
        # In float32, inputs of several hundreds leave fewer digits to the outputs.
        atol = 1e-3 if scaler == "not divided" else 1e-5
        np.testing.assert_allclose(learner.predict_proba(new), expected, rtol=0, atol=atol)
    assert (learner.predict(new) == estimator.predict(new)).mean() >= 0.99
    assert learner.classes_.tolist() == estimator.classes_.tolist()
    assert learner.n_samples_seen_ == 0
    assert learner.normalize == (scaler in ("scaled", "not centred"))


def targets_of(rows: Array, kind: str) -> Array:
    found = 1000 + 30 * scores(rows)
    return found[:, 0] if kind == "flat" else found[:, :1] if kind == "column" else found[:, :2]


@pytest.mark.parametrize("kind", ["flat", "column", "two"])
@pytest.mark.parametrize("scaler", [None, *SCALERS])
@pytest.mark.parametrize("name", REGRESSORS)
def test_a_regressor_predicts_the_same(name: str, scaler: str | None, kind: str) -> None:
    step = REGRESSORS[name]
    if kind != "flat" and name == "SGD":
        pytest.skip("scikit-learn's takes flat targets")
    rows, new = rows_of(300), rows_of(200, 1)
    whole = make_pipeline(SCALERS[scaler], step) if scaler else step
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator = fitted(whole, rows, targets_of(rows, kind))
    expected = estimator.predict(new)
    if not np.isfinite(expected).all() or abs(expected).max() > 1e7:
        pytest.skip("this one diverges on inputs that are not scaled")
    has_scale = scaler in ("scaled", "not centred")
    learner = Regressor.from_estimator(estimator, rows=None if has_scale else rows)
    found = learner.predict(new)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, expected.std()))


@pytest.mark.parametrize("name", ["logistic regression", "perceptron"])
def test_rows_give_a_scale_to_an_estimator_without_one(name: str) -> None:
    rows, new = rows_of(300), rows_of(200, 1)
    rows[::9, 1] = 0  # not missing, but far away
    estimator = fitted(CLASSIFIERS[name], rows, classes_of(rows, 3))
    some = rows.copy()
    some[::7, 2] = np.nan
    learner = Classifier.from_estimator(estimator, rows=some)
    assert learner.normalize
    np.testing.assert_allclose(learner._scaler.mean, np.nanmean(some, 0))
    np.testing.assert_allclose(
        learner.predict_proba(new), estimator.predict_proba(new), rtol=0, atol=2e-5
    )


def test_columns_that_never_change_are_of_no_account() -> None:
    rows = rows_of(300)
    rows[:, 2] = 7
    for estimator in (LogisticRegression(), make_pipeline(StandardScaler(), LogisticRegression())):
        known = fitted(estimator, rows, classes_of(rows, 2))
        learner = Classifier.from_estimator(known, rows=rows)
        np.testing.assert_allclose(
            learner.predict_proba(rows), known.predict_proba(rows), rtol=0, atol=2e-5
        )


def test_values_far_from_the_others_are_not_cut() -> None:
    rows = rows_of(400)
    rows[:, 3] = 0
    rows[7, 3] = 5  # 20 standard deviations from the mean
    estimator = fitted(
        make_pipeline(StandardScaler(), LogisticRegression()), rows, classes_of(rows, 2)
    )
    learner = Classifier.from_estimator(estimator)
    expected = estimator.predict_proba(rows)
    np.testing.assert_allclose(learner.predict_proba(rows), expected, rtol=0, atol=1e-5)
    again = Classifier.from_estimator(learner)
    np.testing.assert_array_equal(learner.predict_proba(rows), again.predict_proba(rows))


def test_names_and_classes_are_carried() -> None:
    pandas = pytest.importorskip("pandas")
    names = ["a", "b", "c", "d", "e"]
    frame = pandas.DataFrame(rows_of(300), columns=names)
    labels = np.where(scores(rows_of(300))[:, 0] > 0, 7, -3)
    estimator = fitted(make_pipeline(StandardScaler(), LogisticRegression()), frame, labels)
    learner = Classifier.from_estimator(estimator)
    expected = estimator.predict_proba(frame)
    np.testing.assert_allclose(learner.predict_proba(frame), expected, rtol=0, atol=1e-5)
    turned = frame[names[::-1]]
    np.testing.assert_allclose(learner.predict_proba(turned), expected, rtol=0, atol=1e-5)
    found = learner.predict_proba_one(frame.iloc[0].to_dict())
    assert found == pytest.approx(dict(zip([-3, 7], expected[0], strict=True)), abs=1e-5)
    assert all(type(label) is int for label in found)
    learner.learn_one({"a": 1.0, "new": 2.0}, "another")
    assert learner.classes_.tolist() == [-3, 7, "another"]
    assert len(learner._columns) == 6


def test_scalers_that_skipped_missing_values_count_what_they_saw() -> None:
    rows = rows_of(300)
    rows[:100, 1] = np.nan
    scaler = StandardScaler().fit(rows)
    filled = np.where(np.isnan(rows), SHIFT, rows)
    step = LogisticRegression().fit(scaler.transform(filled), classes_of(filled, 2))
    pipeline = make_pipeline(scaler, step)
    learner = Classifier.from_estimator(pipeline)
    assert learner._scaler.count.tolist() == [300, 200, 300, 300, 300]
    expected = pipeline.predict_proba(filled)
    np.testing.assert_allclose(learner.predict_proba(filled), expected, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------ learning on
def pipeline_for(classes: int = 3) -> Any:
    rows = rows_of(2000)
    step = MLPClassifier((32,), max_iter=60, random_state=0)
    return fitted(make_pipeline(StandardScaler(), step), rows, classes_of(rows, classes))


def test_what_is_known_is_kept_and_more_is_learned() -> None:
    estimator = pipeline_for()
    rows = rows_of(3000, 5)
    labels = classes_of(rows, 3)
    warm = Classifier.from_estimator(estimator, hyper={"lr": 0.02, "sigma": 0.0})
    cold = Classifier((32,), hyper={"lr": 0.02, "sigma": 0.0})
    first = (estimator.predict(rows[:300]) == labels[:300]).mean()
    early = (warm.predict_then_learn(rows[:300], labels[:300]) == labels[:300]).mean()
    assert early > first - 0.05
    assert early > (cold.predict_then_learn(rows[:300], labels[:300]) == labels[:300]).mean() + 0.05
    turned = {"ant": "bee", "bee": "cat", "cat": "ant"}
    new = np.array([turned[label] for label in labels])
    assert (estimator.predict(rows[2500:]) == new[2500:]).mean() < 0.3
    found = warm.predict_then_learn(rows[300:], new[300:])
    assert (found[-500:] == new[-500:]).mean() > 0.7


@pytest.mark.filterwarnings("error::upgd.stream.StreamWarning")
@pytest.mark.parametrize("hidden", [(32,), (32, 16)])
def test_a_regressor_keeps_what_it_knows(hidden: tuple[int, ...]) -> None:
    """Its targets are far from zero, so that the fitted network has hidden outputs of hundreds."""
    rows = rows_of(2000)
    targets = 1000 + 30 * scores(rows).sum(1)
    step = MLPRegressor(hidden_layer_sizes=hidden, max_iter=200, random_state=0)
    estimator = fitted(make_pipeline(StandardScaler(), step), rows, targets)
    new = rows_of(1000, 5)
    truth = 1000 + 30 * scores(new).sum(1)
    before = abs(estimator.predict(new) - truth).mean()
    learner = Regressor.from_estimator(estimator, hyper={"lr": 0.01, "sigma": 0.0})
    found = learner.predict_then_learn(new, truth)
    assert abs(found - truth).mean() < 1.1 * before
    after = abs(learner.predict(rows) - targets).mean()
    assert after < 1.1 * abs(estimator.predict(rows) - targets).mean()


@pytest.mark.parametrize("parameters", [{}, {"batch_size": 4}, {"optimizer": "s-si"}], ids=str)
def test_it_can_be_saved_and_goes_on_bit_for_bit(
    parameters: dict[str, Any], tmp_path: Path
) -> None:
    rows = rows_of(200, 3)
    labels = classes_of(rows, 3)
    learner = Classifier.from_estimator(pipeline_for(), **parameters)
    learner.save(tmp_path / "fresh")
    fresh = Classifier.load(tmp_path / "fresh")
    learner.partial_fit(rows[:100], labels[:100])
    learner.save(tmp_path / "later")
    later = Classifier.load(tmp_path / "later")
    fresh.partial_fit(rows[:100], labels[:100])
    for each in (learner, fresh, later):
        each.partial_fit(rows[100:], labels[100:])
    for other in (fresh, later):
        np.testing.assert_array_equal(learner.predict_proba(rows), other.predict_proba(rows))


def test_rows_together_or_one_by_one() -> None:
    estimator = pipeline_for()
    rows = rows_of(150, 3)
    labels = classes_of(rows, 3)
    one, other = Classifier.from_estimator(estimator), Classifier.from_estimator(estimator)
    one.partial_fit(rows, labels)
    before = []
    for row, label in zip(rows, labels, strict=True):
        x = dict(enumerate(row))
        before.append(other.predict_one(x))
        other.learn_one(x, label)
    np.testing.assert_array_equal(one.predict_proba(rows), other.predict_proba(rows))
    again = Classifier.from_estimator(estimator)
    assert again.predict_then_learn(rows, labels).tolist() == before


def test_a_learner_that_diverges_returns_to_the_estimator() -> None:
    rows = rows_of(300)
    estimator = fitted(REGRESSORS["linear"], rows, targets_of(rows, "flat"))
    learner = Regressor.from_estimator(estimator, rows=rows, optimizer="sgd")
    assert learner.committee_ is not None
    learner.committee_.cores[0].lr = 1e30
    with pytest.warns(StreamWarning, match="diverged"):  # by the first sample, at the second
        learner.partial_fit(rows[:2], targets_of(rows[:2], "flat") + 100)
    assert abs(learner.predict(rows) - estimator.predict(rows)).max() < 30


@pytest.mark.parametrize("compiled", [True, False])
def test_statistics_of_those_before(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scaler that does not include a value is scikit-learn's, fitted to the rows before."""
    if not compiled:
        monkeypatch.setattr(scaling, "scale_rows", None)
    rows = rows_of(50)
    scaler = scaling.Scaler(5, horizon=np.inf, includes=False)
    scaler.learn(rows[:20])
    for t in range(20, 50):
        expected = StandardScaler().fit(rows[:t]).transform(rows[t:])
        np.testing.assert_allclose(scaler.peek(rows[t:]), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(scaler.apply(rows[t:]), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            scaler.learn(rows[t : t + 1]), expected[:1], rtol=1e-5, atol=1e-6
        )


# ------------------------------------------------------------------------------ own learners
def own(network: Any, **parameters: Any) -> Classifier:
    rows = rows_of(400)
    return Classifier(network, **parameters).partial_fit(rows, classes_of(rows, 3))


@pytest.mark.parametrize(
    "parameters",
    [
        {"network": "small"},
        {"network": (9, 4), "activation": "tanh"},
        {"network": (9,), "batch_size": 4},
        {"network": nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 3))},
    ],
    ids=str,
)
def test_a_learner_of_ours(parameters: dict[str, Any]) -> None:
    torch.manual_seed(0)
    before = own(**parameters)
    rows = rows_of(100, 1)
    kept = before.predict_proba(rows)
    hyper = {} if parameters["network"] == "small" else {"optimizer": "adam", "hyper": {"lr": 0.01}}
    learner = Classifier.from_estimator(before, **hyper, random_state=3)
    np.testing.assert_array_equal(learner.predict_proba(rows), kept)
    assert learner.n_samples_seen_ == 0
    assert learner.network is before.network
    learner.partial_fit(rows, classes_of(rows, 3))
    assert not np.array_equal(learner.predict_proba(rows), kept)
    np.testing.assert_array_equal(before.predict_proba(rows), kept)


def test_a_regressor_of_ours() -> None:
    rows = rows_of(400)
    before = Regressor((8,)).partial_fit(rows, targets_of(rows, "two"))
    learner = Regressor.from_estimator(before, optimizer="ada-upgd", batch_size=2)
    np.testing.assert_allclose(learner.predict(rows), before.predict(rows), rtol=1e-6)
    learner.partial_fit(rows, targets_of(rows, "two"))
    with pytest.raises(TypeError, match="a Classifier expected, got a Regressor"):
        Classifier.from_estimator(before)


def test_networks_of_other_sizes_are_refused() -> None:
    before = own((9,))
    for network in ((10,), (9, 4), "small"):
        with pytest.raises(ValueError, match="leave network out, or give the fitted learner's"):
            Classifier.from_estimator(before, network=network)
    with pytest.raises(ValueError, match=r"activation is the fitted estimator's, 'relu'"):
        Classifier.from_estimator(before, activation="tanh")


def test_a_snapshot_is_not_inherited(tmp_path: Path) -> None:
    before = own((9,), snapshot=tmp_path / "learner")
    assert Classifier.from_estimator(before).snapshot is None
    assert Classifier.from_estimator(before, snapshot="here").snapshot == "here"


# ---------------------------------------------------------------------------------- refused
def refused(
    kind: type[StreamLearner], estimator: Any, error: type[Exception], match: str, **parameters: Any
) -> None:
    with pytest.raises(error, match=match):
        kind.from_estimator(estimator, **parameters)


def test_what_cannot_be_taken_is_refused() -> None:
    rows = rows_of(100)
    labels, targets = classes_of(rows, 3), abs(targets_of(rows, "flat")) / 1000
    known = fitted(LogisticRegression(), rows, labels)
    line = fitted(LinearRegression(), rows, targets)
    tree = fitted(DecisionTreeClassifier(), rows, labels)
    refused(Classifier, tree, TypeError, "DecisionTreeClassifier cannot be taken; these can: MLP")
    hinge = fitted(SGDClassifier(), rows, labels)
    refused(Classifier, hinge, TypeError, "SGDClassifier cannot be taken")
    refused(Classifier, fitted(LinearSVC(), rows, labels), TypeError, "LinearSVC cannot be taken")
    logistic = fitted(mlp(MLPClassifier, "logistic"), rows, labels)
    refused(Classifier, logistic, ValueError, "activation='logistic' of MLPClassifier is not one")
    several = fitted(mlp(MLPClassifier), rows, scores(rows) > 0)
    refused(Classifier, several, ValueError, "one class or numbers per row are expected")
    pca = fitted(make_pipeline(PCA(3), LogisticRegression()), rows, labels)
    refused(Classifier, pca, TypeError, "may have one StandardScaler, this one has PCA")
    refused(Classifier, line, TypeError, "a fitted classifier expected, got LinearRegression")
    refused(Regressor, known, TypeError, "a fitted regressor expected, got LogisticRegression")
    refused(Regressor, line, ValueError, "does not say how large its inputs and targets are")
    poisson = fitted(make_pipeline(StandardScaler(), PoissonRegressor()), rows, targets)
    refused(Regressor, poisson, ValueError, "does not predict what its weights say")
    refused(Classifier, LogisticRegression(), NotFittedError, "not fitted")
    refused(Classifier, "logistic", TypeError, "not an estimator")
    refused(
        Classifier, known, ValueError, r"network is the fitted .*\(\); got \(8,\)", network=(8,)
    )
    refused(Classifier, known, ValueError, "normalize is the fitted", normalize=True)
