"""Learners that are compared: the package's, river's, scikit-learn's, plain loops of PyTorch.

All are used with the settings their packages have as defaults unless it is said here. Limits on
the number of samples keep slow ones affordable: comparisons are made at equal numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import sklearn
from numpy.typing import NDArray
from river import dummy, ensemble, forest, linear_model, naive_bayes, neighbors, preprocessing, tree
from river import stats as river_stats
from sklearn.neural_network import MLPClassifier, MLPRegressor

from prequential.mlp import TorchLoop
from upgd.stream import Classifier, Regressor

NOTHING = -1
"""The class predicted by a learner that predicts none."""


class Learner(Protocol):
    """Predicts every row before learning from it, in order."""

    def predict_then_learn(self, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Task:
    """What a learner may know before the first sample."""

    features: int
    classes: int
    hidden: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Entry:
    """A learner of the comparison.

    Args:
        title: for tables.
        family: ``ours``, ``neural``, ``river`` or ``baseline``.
        classifier: makes one; None if there is none.
        regressor: the same.
        random: seeds make a difference on the same samples.
        hidden: its network has the hidden sizes that are compared.
        limits: most samples, by the number of features from which it holds.
    """

    title: str
    family: str
    classifier: Callable[[Task], Learner] | None
    regressor: Callable[[Task], Learner] | None = None
    random: bool = True
    hidden: bool = False
    limits: dict[int, int] = field(default_factory=dict)

    def make(self, task: Task) -> Learner | None:
        maker = self.classifier if task.classes else self.regressor
        return None if maker is None else maker(task)

    def limit(self, features: int) -> float:
        found = [limit for least, limit in self.limits.items() if features >= least]
        return min(found, default=math.inf)


# ------------------------------------------------------------------------------- ours
class Ours:
    """``upgd.stream``'s estimators with their defaults."""

    def __init__(self, task: Task, **given: Any) -> None:
        make = Classifier if task.classes else Regressor
        self._model: Any = make(random_state=task.seed, **given)
        self._classes, self._begun = task.classes, False

    def predict_then_learn(self, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = self._model.predict_then_learn(x, y)
        if self._classes and not self._begun:
            found[0] = NOTHING  # it cannot know any class, and gives that of the sample
        self._begun = True
        return found


# ------------------------------------------------------------------------------ river
class River:
    """A model of river, sample by sample."""

    def __init__(self, model: Any, names: list[str], classes: int) -> None:
        self._model, self._names, self._classes = model, names, classes

    def predict_then_learn(self, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
        found = np.zeros(len(y), np.int64 if self._classes else float)
        predict, learn = self._model.predict_one, self._model.learn_one
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            for n, (row, target) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
                named = dict(zip(self._names, row, strict=True))
                guess = predict(named)
                found[n] = NOTHING if guess is None else guess
                learn(named, target)
        return found


def river(model: Callable[[Task], Any]) -> Callable[[Task], Learner]:
    def make(task: Task) -> Learner:
        return River(model(task), [f"x{i}" for i in range(task.features)], task.classes)

    return make


def _scaled(model: Any) -> Any:
    return preprocessing.StandardScaler() | model


def _linear_classifier(task: Task) -> Any:
    binary = task.classes == 2
    return _scaled(
        linear_model.LogisticRegression() if binary else linear_model.SoftmaxRegression()
    )


# ----------------------------------------------------------------------- scikit-learn
class Scaler:
    """Standardises by the mean and variance of all samples so far, as river's scaler does."""

    def __init__(self, features: int) -> None:
        self.count, self.mean, self.squares = 0, np.zeros(features), np.zeros(features)

    @property
    def deviation(self) -> NDArray[np.float64]:
        return np.sqrt(self.squares / max(1, self.count))

    def learn(self, row: NDArray[Any]) -> None:
        self.count += 1
        difference = row - self.mean
        self.mean = self.mean + difference / self.count
        self.squares = self.squares + difference * (row - self.mean)

    def transform(self, row: NDArray[Any]) -> NDArray[np.float64]:
        deviation = self.deviation
        return np.where(deviation > 0, (row - self.mean) / np.where(deviation > 0, deviation, 1), 0)


class ScikitLearn:
    """``partial_fit`` of MLPClassifier or MLPRegressor with one row.

    Validation of arguments takes most of the time of such a call. With ``fast`` the first sample
    is learned by ``partial_fit``, the others by the estimator's own back-propagation and
    optimizer, which gives the same weights (``python benchmarks/stream.py check``).
    """

    def __init__(self, task: Task, scaled: bool, fast: bool = True) -> None:
        make = MLPClassifier if task.classes else MLPRegressor
        self.model = make(hidden_layer_sizes=task.hidden, random_state=task.seed)
        self._classes = {"classes": np.arange(task.classes)} if task.classes else {}
        self._scaled, self._fast = scaled, fast
        self._inputs, self._target = Scaler(task.features), Scaler(1)
        self._started = False

    def _predict(self, row: NDArray[Any]) -> float:
        if not self._started:
            return NOTHING if self._classes else 0.0
        if not self._fast:
            return float(self.model.predict(row)[0])
        output = self.model._forward_pass_fast(row, check_input=False)[0]
        if not self._classes:
            return float(output[0])
        return float(output.argmax() if len(output) > 1 else output[0] > 0.5)

    def _learn(self, row: NDArray[Any], target: Any) -> None:
        model = self.model
        if not self._started or not self._fast:
            self._started = True
            y = np.array([target])
            model.partial_fit(row, y, **({} if hasattr(model, "coefs_") else self._classes))
            self._lists = [[None] * (model.n_layers_ - 1) for _ in range(3)]
            return
        if self._classes:
            y = np.zeros((1, model.n_outputs_))
            y[0, int(target) if model.n_outputs_ > 1 else 0] = 1 if model.n_outputs_ > 1 else target
        else:
            y = np.array([[target]])
        activations = [row] + [None] * (model.n_layers_ - 1)
        _, weights, biases = model._backprop(row, y, None, activations, *self._lists)
        model._optimizer.update_params(model.coefs_ + model.intercepts_, weights + biases)

    def predict_then_learn(self, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
        found = np.zeros(len(y))
        options = {"assume_finite": True, "skip_parameter_validation": True}
        with sklearn.config_context(**options), np.errstate(all="ignore"):
            for n, (row, target) in enumerate(zip(x, y, strict=True)):
                found[n] = self._one(row, target)
        return found.astype(np.int64) if self._classes else found

    def _one(self, row: NDArray[Any], target: Any) -> float:
        inputs, regression = self._inputs, not self._classes
        seen = inputs.transform(row) if self._scaled else row
        guess = self._predict(seen[None])
        if not self._scaled:
            self._learn(row[None], target)
            return guess
        if regression:
            guess = float(self._target.mean[0] + (self._target.deviation[0] or 1) * guess)
            self._target.learn(np.array([target]))
            target = self._target.transform(np.array([target]))[0]
        inputs.learn(row)
        self._learn(inputs.transform(row)[None], target)
        return guess


# ---------------------------------------------------------------------------- entries
def _torch(task: Task, adam: bool, lr: float, scaled: bool) -> Learner:
    return TorchLoop(task.features, task.classes, task.hidden, task.seed, adam, lr, scaled)


def _loops() -> dict[str, Entry]:
    """Adam with three step sizes and SGD, with inputs as they are and standardised."""
    found = {}
    for scaled in (True, False):
        inputs = "scaled" if scaled else "raw"
        rates = [(True, 1e-3), (True, 1e-4), (True, 1e-2), (False, 0.01)]
        for adam, lr in rates:
            make = partial(_torch, adam=adam, lr=lr, scaled=scaled)
            name = "adam" if adam else "sgd"
            title = f"PyTorch {'Adam' if adam else 'SGD'} {lr:g}, {inputs}"
            found[f"{name}-{lr:g}-{inputs}"] = Entry(title, "neural", make, make, hidden=True)
    return found


def _single(task: Task, **given: Any) -> Learner:
    return Ours(task, network=task.hidden, **given)


def _mlp(scaled: bool) -> Entry:
    make = partial(ScikitLearn, scaled=scaled)
    title = f"scikit-learn MLP, {'scaled' if scaled else 'raw'}"
    return Entry(title, "neural", make, make, hidden=True)


TREE = {64: 20_000, 500: 20_000}
LEARNERS: dict[str, Entry] = {
    "upgd": Entry("upgd.stream", "ours", Ours, Ours),
    "upgd-one": Entry("upgd.stream, one network", "ours", _single, _single, hidden=True),
    "upgd-one-raw": Entry(
        "upgd.stream, one network, inputs as they are",
        *("ours", partial(_single, normalize=False), partial(_single, normalize=False)),
        hidden=True,
    ),
    "no-change": Entry(
        "the last label again",
        "baseline",
        river(lambda task: dummy.NoChangeClassifier()),
        random=False,
    ),
    "prior": Entry(
        "the most frequent label, the mean",
        "baseline",
        river(lambda task: dummy.PriorClassifier()),
        river(lambda task: dummy.StatisticRegressor(river_stats.Mean())),
        random=False,
    ),
    **_loops(),
    "mlp-scaled": _mlp(True),
    "mlp-raw": _mlp(False),
    "linear": Entry(
        "river linear model, scaled",
        "river",
        river(_linear_classifier),
        river(lambda task: _scaled(linear_model.LinearRegression())),
        random=False,
        limits=TREE,
    ),
    "naive-bayes": Entry(
        "river naive Bayes",
        "river",
        river(lambda task: naive_bayes.GaussianNB()),
        random=False,
        limits={**TREE, 500: 0},
    ),
    "knn": Entry(
        "river k nearest neighbours, scaled",
        "river",
        river(lambda task: _scaled(neighbors.KNNClassifier())),
        river(lambda task: _scaled(neighbors.KNNRegressor())),
        random=False,
        limits={0: 20_000},
    ),
    "hoeffding": Entry(
        "river Hoeffding tree",
        "river",
        river(lambda task: tree.HoeffdingTreeClassifier()),
        river(lambda task: _scaled(tree.HoeffdingTreeRegressor())),
        random=False,
        limits=TREE,
    ),
    "adaptive-tree": Entry(
        "river Hoeffding adaptive tree",
        "river",
        river(lambda task: tree.HoeffdingAdaptiveTreeClassifier(seed=task.seed)),
        river(lambda task: _scaled(tree.HoeffdingAdaptiveTreeRegressor(seed=task.seed))),
        limits={**TREE, 500: 0},
    ),
    "forest": Entry(
        "river adaptive random forest, 10 trees",
        "river",
        river(lambda task: forest.ARFClassifier(n_models=10, seed=task.seed)),
        river(lambda task: _scaled(forest.ARFRegressor(n_models=10, seed=task.seed))),
        limits={0: 20_000},
    ),
    "mondrian": Entry(
        "river aggregated Mondrian forest, 10 trees",
        "river",
        river(lambda task: forest.AMFClassifier(n_estimators=10, seed=task.seed)),
        river(lambda task: forest.AMFRegressor(n_estimators=10, seed=task.seed)),
        limits={0: 20_000, 500: 0},
    ),
    "patches": Entry(
        "river streaming random patches, 10 trees",
        "river",
        river(lambda task: ensemble.SRPClassifier(n_models=10, seed=task.seed)),
        river(lambda task: ensemble.SRPRegressor(n_models=10, seed=task.seed)),
        limits={0: 20_000, 32: 0},
    ),
}


def check_scikit_learn(classes: int) -> float:
    """Largest difference of a weight between ``partial_fit`` and the fast way, 100 samples."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(100, 8))
    y = draw.integers(classes, size=100) if classes else x[:, 0] * x[:, 1]
    task = Task(8, classes, (16, 8), 0)
    slow, fast = ScikitLearn(task, True, fast=False), ScikitLearn(task, True)
    if not np.array_equal(slow.predict_then_learn(x, y), fast.predict_then_learn(x, y)):
        return math.inf
    pairs = zip(slow.model.coefs_, fast.model.coefs_, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)
