"""The stream learners as estimators of scikit-learn: its own checks, and its tools."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="needs the extra stream")

import joblib
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_iris
from sklearn.ensemble import VotingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from tests.stream_learners import assert_same
from upgd.stream import Classifier, Regressor

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "a weight multiplies the loss of one step; "
    "two steps, or none, are something else (as for scikit-learn's MLPs)",
}


def scikit_learns_checks() -> Any:
    """All; of those of the default networks, which take longest, every other one is slow."""
    estimators = [Classifier(), Regressor(), Classifier(network=(16,)), Regressor(network=(16,))]
    every = parametrize_with_checks(estimators, expected_failed_checks=lambda _: EXPECTED_FAILURES)
    names, cases = every.args
    found = []
    for number, case in enumerate(cases):
        values, marks = getattr(case, "values", case), getattr(case, "marks", ())
        often = isinstance(values[0].network, tuple) or number % 2 == 0
        found.append(pytest.param(*values, marks=[*marks, *([] if often else [pytest.mark.slow])]))
    return pytest.mark.parametrize(names, found, **every.kwargs)


@scikit_learns_checks()
def test_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(estimator)


# ------------------------------------------------------------------------------- tools
@pytest.fixture(scope="module")
def iris() -> tuple[Any, Any]:
    X, y = load_iris(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(X))
    return X[order], load_iris().target_names[y[order]]


@pytest.fixture(scope="module")
def diabetes() -> tuple[Any, Any]:
    X, y = load_diabetes(return_X_y=True)
    return X[:200], y[:200]


def test_kinds() -> None:
    assert is_classifier(Classifier())
    assert not is_classifier(Regressor())
    assert is_regressor(Regressor())


def test_classes_are_strings_as_given(iris: Any) -> None:
    X, y = iris
    learner = Classifier(network=(16,)).fit(X, y)
    assert learner.classes_.tolist() == sorted(set(y))
    assert learner.score(X, y) > 0.9
    np.testing.assert_allclose(learner.predict_proba(X).sum(1), 1)
    np.testing.assert_array_equal(
        learner.predict(X), learner.classes_[learner.predict_proba(X).argmax(1)]
    )


def test_clone_copies_parameters_and_nothing_else(iris: Any) -> None:
    learner = Classifier(network=(8,), optimizer="sgd", hyper={"lr": 0.1}, epochs=1)
    again = clone(learner.fit(*iris))
    assert again.get_params() == learner.get_params()
    with pytest.raises(NotFittedError):
        again.predict(iris[0])
    assert_same(again.fit(*iris), learner)


def test_cross_validation(iris: Any, diabetes: Any) -> None:
    assert cross_val_score(Classifier(network=(16,)), *iris, error_score="raise").mean() > 0.9
    scores = cross_val_score(Regressor(network=(16,)), *diabetes, error_score="raise")
    assert scores.mean() > 0.2


def test_grid_search(iris: Any) -> None:
    grid = {"hyper": [{"lr": 1e-12}, {"lr": 0.03}], "network": [(4,), (8,)]}
    search = GridSearchCV(Classifier(optimizer="sgd", epochs=3), grid, cv=2, error_score="raise")
    search.fit(*iris)
    assert search.best_params_["hyper"] == {"lr": 0.03}
    assert search.best_estimator_.get_params()["hyper"] == {"lr": 0.03}
    assert {len(p["network"]) for p in search.cv_results_["params"]} == {1}


def test_grid_search_in_threads_is_the_same(iris: Any) -> None:
    grid = {"network": [(4,), (8,)]}
    with joblib.parallel_backend("threading"):
        found = [
            GridSearchCV(Classifier(epochs=1), grid, cv=2, n_jobs=n).fit(*iris) for n in (1, 2)
        ]
    np.testing.assert_array_equal(*(each.cv_results_["mean_test_score"] for each in found))
    assert_same(*(each.best_estimator_ for each in found))


def test_pipeline(iris: Any) -> None:
    X, y = iris
    pipeline = make_pipeline(StandardScaler(), Classifier(network=(16,))).fit(X, y)
    plain = Classifier(network=(16,)).fit(StandardScaler().fit_transform(X), y)
    np.testing.assert_array_equal(
        pipeline.predict_proba(X), plain.predict_proba(pipeline[0].transform(X))
    )
    pipeline.set_params(classifier__network=(4,)).fit(X, y)
    assert pipeline[-1].committee_.cores[0].sizes == (4, 4, 3)


def test_pipeline_of_frames(iris: Any) -> None:
    """``set_output`` of a transformer gives frames: columns have names, answers are the same."""
    pandas = pytest.importorskip("pandas")
    X, y = iris
    frame = pandas.DataFrame(X, columns=list("abcd"))
    frame["colour"] = np.where(X[:, 0] > 6, "red", "blue")
    encode = ColumnTransformer(
        [("colour", OneHotEncoder(sparse_output=False), ["colour"])], remainder="passthrough"
    )
    pipeline = make_pipeline(encode, Classifier(network=(8,), epochs=2))
    arrays = pipeline.fit(frame, y).predict_proba(frame)
    frames = pipeline.set_output(transform="pandas").fit(frame, y)
    np.testing.assert_array_equal(frames.predict_proba(frame), arrays)
    assert "remainder__a" in frames[-1]._columns.names


def test_transformed_targets_and_votes(iris: Any, diabetes: Any) -> None:
    X, y = diabetes
    model = TransformedTargetRegressor(
        Regressor(network=(16,)), func=np.log1p, inverse_func=np.expm1
    ).fit(X, y)
    plain = Regressor(network=(16,)).fit(X, np.log1p(y))
    np.testing.assert_allclose(model.predict(X), np.expm1(plain.predict(X)))

    members = [(name, Classifier(network=(8,), random_state=i)) for i, name in enumerate("ab")]
    X, y = iris
    votes = VotingClassifier(members, voting="soft").fit(X, y)
    codes = np.unique(y, return_inverse=True)[1]
    answers = [clone(member).fit(X, codes).predict_proba(X) for _, member in members]
    np.testing.assert_allclose(votes.predict_proba(X), np.mean(answers, 0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"network": "huge"}, "'huge' is unknown"),
        ({"network": (0,)}, "positive integers"),
        ({"network": 3}, "network cannot be 3"),
        ({"network": (4,), "optimizer": "upgdd"}, "did you mean 'upgd'"),
        ({"network": (4,), "hyper": {"lrr": 1}}, "no hyperparameter lrr"),
        ({"network": (4,), "hyper": {"lr": -1.0}}, "lr"),
        ({"optimizer": "sgd"}, "optimizers of their own"),
        ({"horizon": 1}, "horizon must be at least 2"),
        ({"horizon": "long"}, "horizon must be at least 2"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"epochs": 2.5}, "epochs must be at least 1"),
        ({"missing": "median"}, "missing must be"),
        ({"random_state": -1}, "random_state"),
    ],
)
def test_wrong_parameters_are_told_by_fit(wrong: dict[str, Any], message: str, iris: Any) -> None:
    learner = Classifier(**wrong)  # scikit-learn: not by __init__
    for method in (learner.fit, learner.partial_fit):
        with pytest.raises(ValueError, match=message):
            method(*iris)
    with pytest.raises(ValueError, match=message):
        learner.learn_one({"a": 1.0}, "x")


def test_several_outputs() -> None:
    X = np.random.RandomState(0).rand(300, 3)
    Y = np.stack([X[:, 0] * 100, -X[:, 1]], 1)
    learner = Regressor(network=(16,)).fit(X, Y)
    assert learner.predict(X).shape == Y.shape
    assert learner.score(X, Y) > 0.9
    with pytest.raises(ValueError, match="1 numbers per row, but 2"):
        learner.partial_fit(X, Y[:, 0])


def test_warm_start_goes_on(iris: Any) -> None:
    X, y = iris
    learner = Classifier(network=(8,), epochs=2, warm_start=True).fit(X, y)
    seen = learner.n_samples_seen_
    before = learner.predict_proba(X)
    learner.fit(X, y)
    assert learner.n_samples_seen_ == 2 * seen
    assert (learner.predict_proba(X) != before).any()
    learner.set_params(warm_start=False).fit(X, y)
    np.testing.assert_array_equal(learner.predict_proba(X), before)


# ------------------------------------------------------------------------------ copies
LEARNERS = {
    "mixture": {},
    "one network": {"network": (8,)},
    "features": {"network": (8,), "optimizer": "feature-upgd"},
    "replay and drift": {"network": (8,), "replay": 20, "drift": "adwin"},
    "batches": {"network": (8,), "batch_size": 4},
}


def _pickled(learner: Any, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(learner))


def _copied(learner: Any, folder: Path) -> Any:
    return copy.deepcopy(learner)


def _dumped(learner: Any, folder: Path) -> Any:
    joblib.dump(learner, folder / "learner.joblib")
    return joblib.load(folder / "learner.joblib")


def _mapped(learner: Any, folder: Path) -> Any:
    """Arrays that cannot be written."""
    joblib.dump(learner, folder / "learner.joblib")
    return joblib.load(folder / "learner.joblib", mmap_mode="r")


@pytest.mark.parametrize("kind", [Classifier, Regressor])
@pytest.mark.parametrize("way", [_pickled, _copied, _dumped, _mapped])
@pytest.mark.parametrize("options", LEARNERS.values(), ids=LEARNERS.keys())
def test_a_copy_continues_as_the_original(
    options: dict[str, Any], way: Any, kind: Any, tmp_path: Path
) -> None:
    if "drift" in options:
        pytest.importorskip("river")
    random = np.random.RandomState(0)
    X = random.randn(120, 3)
    y = (X[:, 0] > 0).astype(int) if kind is Classifier else X[:, 0]
    learner = kind(**options).partial_fit(X[:60], y[:60])
    other = way(learner, tmp_path)
    assert_same(learner, other)
    learner.partial_fit(X[60:], y[60:])
    assert other.n_samples_seen_ == 60  # learning by one does not change the other
    other.partial_fit(X[60:], y[60:])
    assert_same(learner, other)
    np.testing.assert_array_equal(learner.predict(X), other.predict(X))


def test_an_unfitted_learner_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Classifier(network=(3,)))).network == (3,)
