"""Learners that begin with what a fitted estimator knows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_classifier, is_regressor
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted
from torch import nn

from upgd.stream.columns import StreamWarning
from upgd.stream.learner import StreamLearner
from upgd.stream.module import ModuleCore
from upgd.stream.scaling import STATISTICS

if TYPE_CHECKING:
    from upgd.stream.export import TorchNetwork

AnyLearner = TypeVar("AnyLearner", bound=StreamLearner)
Matrix = NDArray[np.float64]
ACTIVATIONS = {"relu": "relu", "tanh": "tanh", "identity": "linear"}
"""scikit-learn's names, and ours."""
LARGEST = 0.5
"""Of hidden outputs, as the root of their mean square; see :meth:`Network.balanced`."""
FURTHEST = 8.0
"""Deviations of predictions from their mean: a learner cuts those that are further than 10."""
CHECKED = 64
"""Rows on which predictions are compared."""
TOLERANCE = 1e-3
"""Of these comparisons, beside the spread of predictions: another function is further away."""
_FUNCTIONS: dict[str, Callable[[Matrix], Matrix]] = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "linear": lambda z: z,
}
_TAKEN = (
    "MLPClassifier, MLPRegressor, LogisticRegression, SGDClassifier(loss='log_loss'), linear "
    "regressors with coef_ and intercept_, pipelines of a StandardScaler and one of these, and "
    "learners of upgd.stream"
)


@dataclass(frozen=True)
class Statistics:
    """Of each input: mean, variance, and of how many values."""

    mean: Matrix
    variance: Matrix
    count: Matrix


@dataclass(frozen=True)
class Network:
    """What a fitted estimator computes: a dense network, and what it is fed with.

    Attributes:
        layers: Weights [outputs, inputs + 1], biases last.
        activation: Of hidden units, by our name.
        statistics: By which inputs are scaled first; None if they are not.
        is_softmax: Whether the outputs' softmax are the probabilities; only for classifiers.
    """

    layers: list[Matrix]
    activation: str = "relu"
    statistics: Statistics | None = None
    is_softmax: bool = True

    @property
    def hidden(self) -> tuple[int, ...]:
        return tuple(len(layer) for layer in self.layers[:-1])

    def fed_with(self, scale: Matrix, shift: Matrix) -> Network:
        """The network that does the same with ``(x - shift) / scale`` in the place of x."""
        first = self.layers[0].copy()
        first[:, -1] += first[:, :-1] @ shift
        first[:, :-1] *= scale
        return replace(self, layers=[first, *self.layers[1:]])

    def answer(self, rows: Matrix) -> Matrix:
        """Its outputs, [T, outputs]."""
        h = self._scaled(rows)
        for layer in self.layers[:-1]:
            h = _FUNCTIONS[self.activation](_sums(layer, h))
        return _sums(self.layers[-1], h)

    def balanced(self, rows: Matrix) -> Network:
        """The same function, with hidden outputs no larger than a learner's own at its beginning.

        Single samples move weights in proportion to outputs; batches of a fitted network may have
        made these so large that any usual step size diverges. Where c·f(x) = f(c·x), weights into
        a unit are divided by what weights out of it are multiplied with.
        """
        if self.activation == "tanh":
            return self
        h, layers = self._scaled(rows), list(self.layers)
        for number in range(len(layers) - 1):
            found = _FUNCTIONS[self.activation](_sums(layers[number], h))
            factor = np.maximum(1, np.sqrt(np.square(found).mean(0)) / LARGEST)
            h = found / factor
            layers[number] = layers[number] / factor[:, None]
            layers[number + 1] = layers[number + 1] * np.append(factor, 1)
        return replace(self, layers=layers)

    def _scaled(self, rows: Matrix) -> Matrix:
        if self.statistics is None:
            return rows
        scaled: Matrix = (rows - self.statistics.mean) / _deviation(self.statistics.variance)
        return scaled


def _sums(layer: Matrix, h: Matrix) -> Matrix:
    found: Matrix = h @ layer[:, :-1].T + layer[:, -1]
    return found


def warm_started(
    cls: type[AnyLearner], fitted: Any, rows: Any, parameters: Mapping[str, Any]
) -> AnyLearner:
    """See :meth:`Classifier.from_estimator`."""
    if isinstance(fitted, StreamLearner):
        return _from_learner(cls, fitted, parameters)
    return _from_sklearn(cls, fitted, rows, parameters)


# ------------------------------------------------------------------------- scikit-learn
def _from_sklearn(
    cls: type[AnyLearner], fitted: Any, rows: Any, parameters: Mapping[str, Any]
) -> AnyLearner:
    name, squared = f"{cls.__name__}.from_estimator", cls._squared
    check_is_fitted(fitted)
    steps = [step for _, step in fitted.steps] if isinstance(fitted, Pipeline) else [fitted]
    steps = [step for step in steps if step is not None and step != "passthrough"]
    if not (is_regressor if squared else is_classifier)(steps[-1]):
        kind = "regressor" if squared else "classifier"
        raise TypeError(f"{name}: a fitted {kind} expected, got {_told(steps[-1])}")
    network = _scaled_by(steps[:-1], _read(steps[-1], squared, name), name)
    normalize = network.statistics is not None or rows is not None
    if squared and not normalize:
        raise ValueError(
            f"{name}: {_told(steps[-1])} does not say how large its inputs and targets are; "
            "give some rows that it was fitted to, rows=X, from which both are taken"
        )
    own = {"network": network.hidden, "activation": network.activation, "normalize": normalize}
    learner = _made(cls, own, parameters, name)
    inputs = network.layers[0].shape[1] - 1
    _name_columns(learner, getattr(fitted, "feature_names_in_", None), inputs)
    known = None if rows is None else learner._rows(rows, False)[0]
    if network.statistics is None and known is not None:
        network = _measured(network, known)
    samples = _samples(network, inputs, known)
    network = network.balanced(samples)
    if squared:
        flat = _quietly(fitted.predict, samples[:1]).ndim == 1
        network = _rescaled(learner, network, samples, known is not None, flat)
    else:
        learner._know(_plain(fitted.classes_))
    committee = learner._shape(inputs, len(network.layers[-1]))
    committee.cores[0].load_weights(network.layers)
    committee.keep_copies()  # to which it returns if it diverges
    if network.statistics is not None:
        for each in STATISTICS:
            setattr(learner._scaler, each, np.array(getattr(network.statistics, each), np.float64))
        learner._scaler.includes = False  # as the estimator scales
        # None of n values is further from their mean than √n standard deviations.
        furthest = float(np.sqrt(network.statistics.count.max()))
        learner._scaler.clip = max(learner._scaler.clip, furthest)
    _compare(learner, fitted, samples[:CHECKED], network, name)
    return learner


def _read(estimator: Any, squared: bool, name: str) -> Network:
    """The network of an estimator, without what scales its inputs."""
    if isinstance(estimator, MLPClassifier | MLPRegressor):
        network = _of_mlp(estimator, name)
    elif squared and hasattr(estimator, "coef_") and hasattr(estimator, "intercept_"):
        network = Network([_joined(estimator.coef_, estimator.intercept_)])
    elif isinstance(estimator, LogisticRegression) or (
        isinstance(estimator, SGDClassifier) and estimator.loss == "log_loss"
    ):
        weights = [_joined(estimator.coef_, estimator.intercept_)]
        network = Network(
            weights, is_softmax=len(estimator.classes_) == 2 or _is_softmax(estimator)
        )
    else:
        raise TypeError(f"{name}: {_told(estimator)} cannot be taken; these can: {_TAKEN}")
    if not squared and len(network.layers[-1]) == 1:  # the logit z of two classes: -z/2 and z/2
        half = network.layers[-1] / 2
        network = replace(network, layers=[*network.layers[:-1], np.concatenate([-half, half])])
    return network


def _is_softmax(estimator: LogisticRegression | SGDClassifier) -> bool:
    """Whether a classifier of several classes is one model, not one for each of them."""
    if isinstance(estimator, SGDClassifier) or estimator.solver == "liblinear":
        return False
    return getattr(estimator, "multi_class", "") != "ovr"


def _of_mlp(estimator: MLPClassifier | MLPRegressor, name: str) -> Network:
    if estimator.activation not in ACTIVATIONS:
        raise ValueError(
            f"{name}: activation={estimator.activation!r} of {_told(estimator)} is not one of "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )
    expected = {"identity"} if isinstance(estimator, MLPRegressor) else {"softmax", "logistic"}
    multilabel = estimator.out_activation_ == "logistic" and estimator.n_outputs_ > 1
    if estimator.out_activation_ not in expected or multilabel:
        raise ValueError(
            f"{name}: {_told(estimator)} has {estimator.n_outputs_} outputs with "
            f"{estimator.out_activation_!r}; one class or numbers per row are expected"
        )
    pairs = zip(estimator.coefs_, estimator.intercepts_, strict=True)
    return Network([_joined(w.T, b) for w, b in pairs], ACTIVATIONS[estimator.activation])


def _joined(weights: Any, biases: Any) -> Matrix:
    """Weights and biases as one matrix."""
    if hasattr(weights, "toarray"):
        weights = weights.toarray()
    weights = np.atleast_2d(np.asarray(weights, np.float64))
    biases = np.broadcast_to(np.asarray(biases, np.float64).ravel(), len(weights))
    return np.concatenate([weights, biases[:, None]], 1)


def _scaled_by(steps: list[Any], network: Network, name: str) -> Network:
    """The network with the scaler that comes before it in a pipeline."""
    if not steps:
        return network
    if len(steps) > 1 or not isinstance(steps[0], StandardScaler):
        told = ", ".join(_told(step) for step in steps)
        raise TypeError(f"{name}: a pipeline may have one StandardScaler, this one has {told}")
    scaler, inputs = steps[0], network.layers[0].shape[1] - 1
    if scaler.var_ is None:  # nothing is divided, so there is no variance to begin with
        shift = scaler.mean_ if scaler.with_mean else np.zeros(inputs)
        return network.fed_with(np.ones(inputs), -shift)
    count = np.broadcast_to(np.asarray(scaler.n_samples_seen_, np.float64), inputs)
    variance = np.where(scaler.var_ > 0, scaler.var_, 0)
    if not scaler.with_mean:  # x/s is (x - m)/s + m/s
        network = network.fed_with(np.ones(inputs), scaler.mean_ / scaler.scale_)
    return replace(network, statistics=Statistics(scaler.mean_, variance, count))


def _measured(network: Network, rows: Matrix) -> Network:
    """The network with its inputs scaled by what rows have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of columns without a value
        mean, variance = np.nan_to_num(np.nanmean(rows, 0)), np.nan_to_num(np.nanvar(rows, 0))
    count = (~np.isnan(rows)).sum(0).astype(np.float64)
    network = network.fed_with(_deviation(variance), mean)
    return replace(network, statistics=Statistics(mean, variance, count))


def _deviation(variance: Matrix) -> Matrix:
    return np.where(variance > 0, np.sqrt(variance), 1)


def _samples(network: Network, inputs: int, known: Matrix | None) -> Matrix:
    """Rows as an estimator may have seen them, without missing values."""
    centre, spread = np.zeros(inputs), np.ones(inputs)
    if network.statistics is not None:
        centre, spread = network.statistics.mean, np.sqrt(network.statistics.variance)
    if known is not None:
        return np.where(np.isnan(known), centre, known)
    drawn: Matrix = np.random.default_rng(0).normal(size=(1000, inputs)) * spread + centre
    return drawn


def _rescaled(
    learner: Any, network: Network, samples: Matrix, are_real: bool, flat: bool
) -> Network:
    """The network for scaled targets; their scale is that of its predictions."""
    answers = network.answer(samples)
    centre = answers.mean(0)
    far = abs(answers - centre).max(0) / FURTHEST
    spread = np.maximum(answers.std(0), far if are_real else _widest(network, samples, answers))
    spread = np.where(spread > 1e-12 * abs(centre), spread, 1)
    learner._expect(len(centre), flat)
    scaler = learner._target_scaler
    scaler.mean, scaler.variance = centre.copy(), spread**2
    scaler.count = np.full(len(centre), scaler.horizon)
    head = network.layers[-1].copy()
    head[:, -1] -= centre
    return replace(network, layers=[*network.layers[:-1], head / spread[:, None]])


def _widest(network: Network, samples: Matrix, answers: Matrix) -> Matrix:
    """How far predictions would spread if inputs were not independent, as in `samples`.

    Each output is looked at where all inputs move together, in the direction that moves it.
    """
    centre, spread = samples.mean(0), samples.std(0)
    slopes = np.sign((samples - centre).T @ (answers - answers.mean(0)))
    together = np.random.default_rng(1).normal(size=(len(samples), 1)) * spread
    found = [network.answer(together * d + centre)[:, k].std() for k, d in enumerate(slopes.T)]
    return np.array(found)


def _compare(learner: Any, fitted: Any, rows: Matrix, network: Network, name: str) -> None:
    """Raise unless the learner predicts what the estimator does."""
    if not network.is_softmax:
        warnings.warn(
            f"{name}: {_told(fitted)} has a probability of its own for each class; the learner "
            "predicts the same classes, with the softmax of its scores as probabilities",
            StreamWarning,
            stacklevel=4,
        )
    answers = learner._answers(rows)
    if learner._squared:
        expected = _quietly(fitted.predict, rows)
        found = learner._shaped(learner._target_scaler.invert(answers))
    elif network.is_softmax:
        expected, found = _quietly(fitted.predict_proba, rows), np.exp(answers)
    else:
        expected = _quietly(fitted.predict, rows)
        found = learner.output_classes_[answers.argmax(1)]
    if learner._squared or network.is_softmax:
        same = bool((abs(found - expected) <= TOLERANCE * (np.std(expected) + 1e-3)).all())
    else:
        same = bool((found == expected).mean() > 0.9)  # all but those on the line between two
    if not same:
        raise ValueError(
            f"{name}: {_told(fitted)} does not predict what its weights say, so that it cannot be "
            f"taken; these can: {_TAKEN}"
        )


def _quietly(call: Any, rows: Matrix) -> Any:
    """What an estimator predicts; that features have no names here is of no interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return np.asarray(call(rows))


# ------------------------------------------------------------------------ own learners
def _from_learner(
    cls: type[AnyLearner], fitted: StreamLearner, parameters: Mapping[str, Any]
) -> AnyLearner:
    name = f"{cls.__name__}.from_estimator"
    if not isinstance(fitted, cls):
        raise TypeError(f"{name}: a {cls.__name__} expected, got a {type(fitted).__name__}")
    check_is_fitted(fitted)
    assert fitted.committee_ is not None
    own = {"activation": fitted.activation, "normalize": fitted.normalize}
    given = {**fitted.get_params(deep=False), "snapshot": None, **parameters}
    learner = _made(cls, own, given, name)
    learner._columns.restore(fitted._columns.state())
    if fitted._squared:
        learner._expect(fitted._outputs, fitted._flat)
        for each in STATISTICS:
            theirs = getattr(fitted._target_scaler, each)
            setattr(learner._target_scaler, each, theirs.copy())
    else:
        learner._know(fitted._labels)
    committee = learner._shape(*fitted.committee_.shape)
    before, after = _shapes(fitted.to_torch()), _shapes(learner.to_torch())
    if before != after:
        raise ValueError(
            f"{name}: the fitted learner has {_sizes(before)}, and network={learner.network!r} "
            f"has {_sizes(after)}; leave network out, or give the fitted learner's"
        )
    for core, network in zip(committee.cores, fitted.to_torch(), strict=True):
        if isinstance(core, ModuleCore):
            core.module.load_state_dict(network.module.state_dict())
        else:
            core.load_weights(_layers(network))
    committee.mixture.restore(fitted.committee_.mixture.state())
    committee.keep_copies()
    for each in STATISTICS:
        setattr(learner._scaler, each, getattr(fitted._scaler, each).copy())
    learner._scaler.includes, learner._scaler.clip = fitted._scaler.includes, fitted._scaler.clip
    return learner


def _layers(network: TorchNetwork) -> list[Matrix]:
    linear = [each for each in network.module.modules() if isinstance(each, nn.Linear)]
    return [_joined(each.weight.detach().numpy(), each.bias.detach().numpy()) for each in linear]


def _shapes(networks: list[TorchNetwork]) -> list[list[tuple[int, ...]]]:
    return [[tuple(p.shape) for p in module.parameters()] for module, _ in networks]


def _sizes(shapes: list[list[tuple[int, ...]]]) -> str:
    told = [" and ".join(f"{'×'.join(map(str, s))}" for s in each if len(s) > 1) for each in shapes]
    return f"{len(shapes)} networks with weights of {'; '.join(told)}"


# ------------------------------------------------------------------------------- shared
def _made(
    cls: type[AnyLearner], own: Mapping[str, Any], given: Mapping[str, Any], name: str
) -> AnyLearner:
    """A learner that has begun; raises if what the estimator determines is given otherwise."""
    for key, value in own.items():
        if key in given and given[key] != value:
            raise ValueError(
                f"{name}: {key} is the fitted estimator's, {value!r}; got {given[key]!r}"
            )
    learner = cls(**{**own, **given})
    learner._begin()
    return learner


def _name_columns(learner: StreamLearner, names: Any, inputs: int) -> None:
    if names is None:
        learner._columns.fix(inputs)
    else:
        known = {"names": [str(each) for each in names], "numbers": range(inputs)}
        learner._columns.restore({**known, "categories": [], "others": []})


def _plain(classes: Any) -> list[Any]:
    return [each.item() if isinstance(each, np.generic) else each for each in classes]


def _told(estimator: Any) -> str:
    return type(estimator).__name__
