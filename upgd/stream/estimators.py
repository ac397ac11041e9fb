"""The learners that users make: a classifier and a regressor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d
from typing_extensions import Self

from upgd.stream.columns import Rows
from upgd.stream.learner import Decode, Samples, StreamLearner, weights_of
from upgd.stream.scaling import STATISTICS, Scaler
from upgd.stream.values import LARGEST, Label, as_label, as_number, as_weight, usable


class Classifier(ClassifierMixin, StreamLearner):
    """Classifies samples of a stream with networks that keep learning.

    Made for streams: it learns from one sample at a time, in any order of calls, for as long as the
    stream lasts. Classes and features may appear at any time; missing values, strings as features
    and as classes, data frames, arrays, tensors and river's dicts are taken. scikit-learn's and
    river's methods do the same thing: rows given together are learned one after the other.

    Args:
        network: ``"small"``, ``"medium"`` or ``"large"``: a mixture of a linear model, wide and
            deeper networks, whose weights follow who is right. Or one network: a tuple of hidden
            units, a module, or a function of inputs and outputs that makes one.
        optimizer: A method of the registry (``upgd list methods``), for one network;
            ``"upgd"`` by default.
        hyper: Its hyperparameters; the rest have their defaults.
        activation: Of the hidden units of one network: ``"relu"``, ``"leaky_relu"``, ``"tanh"`` or
            ``"linear"``.
        normalize: Whether inputs are scaled by their running mean and variance.
        horizon: Over how many samples these run.
        missing: What takes the place of a missing value: its ``"mean"``, or ``"zero"``, for
            dicts that leave out zeros.
        max_features: Columns that features may fill; later ones are left out with a warning.
        replay: Past samples that are kept; 0 for none. Each new sample is followed by
            `replay_samples` old ones.
        replay_samples: How many.
        drift: ``"adwin"``, ``"page-hinkley"``, ``"kswin"`` or a detector of river: fed with every
            sample's error.
        on_drift: What is forgotten when it finds a change: traces of utility, statistics of the
            scaler.
        batch_size: Rows per step; more than one takes PyTorch's slower path.
        epochs: Passes of :meth:`fit` over its data.
        warm_start: Whether :meth:`fit` goes on from what was learned.
        snapshot: A file that is written every `snapshot_every` samples.
        snapshot_every: Samples.
        monitor_every: Samples from one measurement of :attr:`monitor` to the next.
        random_state: Of initial weights, noise and order; the same number, the same learner.

    Attributes:
        classes_: Sorted, in the order of columns of :meth:`predict_proba`.
        output_classes_: The same in the order of the networks' outputs: those known at the
            beginning, then in the order of their appearance.
        n_samples_seen_: Samples learned.
        accuracy_: Share of samples that were predicted correctly before they were learned.
        recent_accuracy_: The same of about the last 1000.
        drifts_: After which samples a change was found.
        extra: What was saved beside the learner.

    Example:
        >>> from upgd.stream import Classifier
        >>> learner = Classifier(network=(8,))
        >>> for _ in range(50):
        ...     learner.learn_one({"temperature": 3.0, "wind": "north"}, "snow")
        ...     learner.learn_one({"temperature": 21.0}, "sun")
        >>> learner.predict_one({"temperature": 20.0})
        'sun'
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = True
        return tags

    def _begin(self) -> None:
        super()._begin()
        self._slots: dict[Hashable, int] = {}
        self._labels: list[Label] = []

    def _state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays, facts = super()._state()
        return arrays, {**facts, "classes": self._labels}

    def _restore(self, arrays: Mapping[str, NDArray[Any]], facts: dict[str, Any]) -> None:
        self._know(facts["classes"])
        super()._restore(arrays, facts)

    @classmethod
    def from_estimator(cls, fitted: Any, rows: Any = None, **parameters: Any) -> Self:
        """A learner that predicts what a fitted estimator predicts, and learns on from there.

        Taken are scikit-learn's multilayer perceptrons (not ``activation="logistic"``), linear
        models with ``coef_`` and ``intercept_``, pipelines of a ``StandardScaler`` and one of
        these, and learners of this class. Features and classes keep their names; the scaler goes
        on from the fitted one's statistics. The network is the estimator's: use
        :meth:`partial_fit`, as :meth:`fit` begins again unless ``warm_start=True``. Where the
        stream is like the data that it was fitted to, smaller steps than a new learner's keep more
        of it: ``hyper={"lr": 0.001}``.

        Args:
            fitted: The estimator.
            rows: Some rows that it was fitted to. They are needed where it has no scaler, to scale
                inputs; without them inputs are not normalised (a regressor needs them).
            parameters: Of the class; those of a fitted learner of ours are kept unless given.

        Raises:
            TypeError: There is no network that does what the estimator does.
            ValueError: It has an activation or a network that cannot be taken.

        Example:
            >>> from sklearn.linear_model import LogisticRegression
            >>> from upgd.stream import Classifier
            >>> fitted = LogisticRegression().fit([[0.0], [1.0], [2.0], [3.0]], list("aabb"))
            >>> learner = Classifier.from_estimator(fitted)
            >>> learner.predict([[0.5], [2.5]]).tolist()
            ['a', 'b']
            >>> for _ in range(1000):
            ...     learner.learn_one({0: 2.5}, "c")
            >>> learner.predict_one({0: 2.5})
            'c'
        """
        from upgd.stream.warm import warm_started

        return warm_started(cls, fitted, rows, parameters)

    # ------------------------------------------------------------------------- classes
    @property
    def output_classes_(self) -> NDArray[Any]:
        """Classes in the order of the networks' outputs."""
        if not self._is_begun or not self._labels:
            raise AttributeError("there are no classes before something was learned")
        return _as_array(self._labels)

    @property
    def classes_(self) -> NDArray[Any]:
        """Classes in the order of the columns of :meth:`predict_proba`: sorted."""
        found: NDArray[Any] = self.output_classes_[self._order]
        return found

    @property
    def _order(self) -> list[int]:
        """The networks' outputs in the order of sorted classes."""
        return [self._slots[label] for label in _sorted(self._labels)]

    def _know(self, labels: Any) -> None:
        """Give classes their places."""
        for label in labels:
            if label not in self._slots:
                self._slots[label] = len(self._labels)
                self._labels.append(label)

    # ------------------------------------------------------------------------ learning
    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> Classifier:
        """Learn from rows, one after the other.

        Args:
            X: An array, a tensor, a data frame or dicts, [T, features].
            y: Their classes.
            classes: Classes that will come; they need not be known.
            sample_weight: By which each row's loss is multiplied.
        """
        self.predict_then_learn(X, y, classes, sample_weight)
        return self

    def predict_then_learn(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> NDArray[Any]:
        """For each row in turn: predict its class, then learn it. Returns the predictions.

        The first prediction of all is the row's own class, as nothing else is known; it is
        counted as wrong.
        """
        self._begin_once()
        known = [] if classes is None else _sorted(_labels(classes))
        samples = self._samples(X, y, sample_weight)
        self._know(known)
        slots = self._learn(*samples)
        found: NDArray[Any] = self.output_classes_[slots]
        return found

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Classifier:
        """Learn from all rows `epochs` times in random order, from the beginning."""
        rows, labels, weights, _ = self._first_samples(X, y, sample_weight)
        self._know(_sorted(labels.tolist()))
        self._epochs(rows, labels, weights)
        return self

    def learn_one(self, x: Mapping[Any, Any], y: Any, w: float = 1.0) -> None:
        """Learn from one dict of features; `w` multiplies its loss."""
        self._begin_once()
        target = np.array([as_label(y)], object)
        weights = _weights_of_one(w)
        self._learn(self._new_row(x), target, weights)

    def _samples(self, X: Any, y: Any, sample_weight: Any) -> Samples:
        labels = _labels(y)
        known = np.empty(len(labels), object)
        known[:] = labels
        weights = weights_of(sample_weight, len(labels))
        rows, widths = self._new_rows(X, len(labels))
        return rows, known, weights, widths

    def _learn_some(
        self, rows: Rows, targets: Any, weights: NDArray[np.float32] | None
    ) -> NDArray[Any]:
        """Learn up to each class that is new, then with it."""
        guesses, begin = [], 0
        while begin < len(rows):
            before = len(self._labels)
            self._know(targets[begin : begin + 1])
            end = begin + 1
            while end < len(rows) and targets[end] in self._slots:
                end += 1
            slots = np.array([self._slots[label] for label in targets[begin:end]], np.int64)
            weight = None if weights is None else weights[begin:end]
            self._known_before = before
            answers = self._steps(rows[begin:end], slots, weight, len(self._labels))
            self._known_before = before
            guesses.append(self._guesses(answers))
            begin = end
        return np.concatenate(guesses)

    def _guesses(self, answers: NDArray[np.float64]) -> NDArray[np.int64]:
        """The likeliest classes; the first row's is not one that came with it."""
        found: NDArray[np.int64] = answers.argmax(1)
        if 0 < self._known_before < answers.shape[1]:
            found[0] = answers[0, : self._known_before].argmax()
        return found

    def _sample_errors(
        self, answers: NDArray[np.float64], targets: NDArray[Any]
    ) -> NDArray[np.float64]:
        wrong: NDArray[np.float64] = (self._guesses(answers) != targets).astype(np.float64)
        if self._known_before == 0:
            wrong[0] = 1
        self._known_before = answers.shape[1]
        return wrong

    @property
    def accuracy_(self) -> float:
        return 1 - self._errors[0] / max(1, self.n_samples_seen_)

    @property
    def recent_accuracy_(self) -> float:
        return 1 - self._errors[1]

    # ---------------------------------------------------------------------- predicting
    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Logarithms of :meth:`predict_proba`."""
        check_is_fitted(self)
        found: NDArray[np.float64] = self._answers(self._rows(X, False)[0])[:, self._order]
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Each row's probability of each of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """The likeliest class of each row."""
        check_is_fitted(self)
        slots = self._answers(self._rows(X, False)[0]).argmax(1)
        found: NDArray[Any] = self.output_classes_[slots]
        return found

    def predict_proba_one(self, x: Mapping[Any, Any]) -> dict[Label, float]:
        """Each known class's probability; empty before something was learned."""
        if not self.__sklearn_is_fitted__():
            return {}
        answers = self._answers(self._columns.row(x, False)[None])[0]
        return dict(zip(self._labels, np.exp(answers).tolist(), strict=True))

    def predict_one(self, x: Mapping[Any, Any]) -> Label | None:
        """The likeliest class; None before something was learned."""
        if not self.__sklearn_is_fitted__():
            return None
        return self._labels[int(self._answers(self._columns.row(x, False)[None])[0].argmax())]


class Regressor(RegressorMixin, StreamLearner):
    """Predicts numbers of a stream with networks that keep learning.

    As :class:`Classifier`, which has the parameters. Targets are scaled by their running mean and
    variance, so that the step size fits whatever unit they have.

    Attributes:
        n_samples_seen_: Samples learned.
        mean_absolute_error_: Of predictions made before each sample was learned.
        recent_error_: The same of about the last 1000.

    Example:
        >>> from upgd.stream import Regressor
        >>> learner = Regressor(network=(8,))
        >>> for i in range(500):
        ...     learner.learn_one({"x": i % 10}, 100.0 + i % 10)
        >>> 105 < learner.predict_one({"x": 7}) < 109
        True
    """

    _squared = True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags

    def _begin(self) -> None:
        super()._begin()
        self._outputs: int | None = None
        self._flat = True

    def _state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        arrays, facts = super()._state()
        arrays |= {f"targets/{name}": getattr(self._target_scaler, name) for name in STATISTICS}
        return arrays, {**facts, "outputs": self._outputs, "flat": self._flat}

    def _restore(self, arrays: Mapping[str, NDArray[Any]], facts: dict[str, Any]) -> None:
        self._expect(facts["outputs"], facts["flat"])
        for name in STATISTICS:
            setattr(self._target_scaler, name, np.array(arrays[f"targets/{name}"]))
        super()._restore(arrays, facts)

    @classmethod
    def from_estimator(cls, fitted: Any, rows: Any = None, **parameters: Any) -> Self:
        """A learner that predicts what a fitted estimator predicts, and learns on from there.

        See :meth:`Classifier.from_estimator`. Targets are scaled as predictions for `rows` are.
        """
        from upgd.stream.warm import warm_started

        return warm_started(cls, fitted, rows, parameters)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:
        """Learn from rows, one after the other; see :meth:`Classifier.partial_fit`."""
        self.predict_then_learn(X, y, sample_weight)
        return self

    def predict_then_learn(self, X: Any, y: Any, sample_weight: Any = None) -> NDArray[Any]:
        """For each row in turn: predict its target, then learn it. Returns the predictions."""
        self._begin_once()
        samples = self._samples(X, y, sample_weight)
        return self._shaped(self._learn(*samples))

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Regressor:
        """Learn from all rows `epochs` times in random order, from the beginning."""
        rows, targets, weights, _ = self._first_samples(X, y, sample_weight)
        self._epochs(rows, targets, weights)
        return self

    def learn_one(self, x: Mapping[Any, Any], y: Any, w: float = 1.0) -> None:
        """Learn from one dict of features; `w` multiplies its loss."""
        self._begin_once()
        target = np.array([[_target(y)]])
        weights = _weights_of_one(w)
        self._check_outputs(1)
        row = self._new_row(x)
        self._expect(1, True)
        self._learn(row, target, weights)

    def _samples(self, X: Any, y: Any, sample_weight: Any) -> Samples:
        with usable("y"):
            y = _given(y)
            if _is_flat(y):
                y = [_target(each) for each in y]
            numbers = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if numbers.ndim > 2:
            raise ValueError(f"y has {numbers.ndim} dimensions; it is [rows] or [rows, outputs]")
        if (np.abs(numbers) > LARGEST).any():
            raise ValueError(f"y has magnitudes above {LARGEST:g}")
        if numbers.ndim == 2 and numbers.shape[1] == 1 and self._flat:
            numbers = column_or_1d(numbers, warn=True)
        flat = numbers.ndim == 1
        targets = numbers.reshape(len(numbers), -1)
        weights = weights_of(sample_weight, len(targets))
        self._check_outputs(targets.shape[1])
        rows, widths = self._new_rows(X, len(targets))
        self._expect(targets.shape[1], flat)
        return rows, targets, weights, widths

    def _check_outputs(self, outputs: int) -> None:
        if self._outputs is not None and outputs != self._outputs:
            raise ValueError(f"y has {outputs} numbers per row, but {self._outputs} were learned")

    def _expect(self, outputs: int, flat: bool) -> None:
        if self._outputs is None:
            self._outputs, self._flat = outputs, flat
            self._target_scaler = Scaler(outputs, 10 * self.horizon)

    def _learn_some(
        self, rows: Rows, targets: Any, weights: NDArray[np.float32] | None
    ) -> NDArray[Any]:
        return self._steps(rows, targets, weights, targets.shape[1])

    def _encode(self, targets: NDArray[Any]) -> tuple[NDArray[Any], Decode]:
        scaler, scaled = self._target_scaler, np.empty(targets.shape, np.float32)
        centre, spread = np.empty((2, *targets.shape))
        for t in range(len(targets)):
            centre[t], spread[t] = scaler.mean, scaler.deviation
            scaled[t] = scaler.learn(targets[t : t + 1])
        return scaled, lambda answers: answers * spread + centre

    def _encode_again(self, targets: NDArray[Any]) -> NDArray[Any]:
        return self._target_scaler.apply(targets)

    def _sample_errors(
        self, answers: NDArray[np.float64], targets: NDArray[Any]
    ) -> NDArray[np.float64]:
        found: NDArray[np.float64] = abs(answers - targets).mean(1)
        return found

    @property
    def mean_absolute_error_(self) -> float:
        return self._errors[0] / max(1, self.n_samples_seen_)

    @property
    def recent_error_(self) -> float:
        return self._errors[1]

    def predict(self, X: Any) -> NDArray[np.float64]:
        """The prediction for each row, [T] or [T, outputs] as targets were."""
        check_is_fitted(self)
        answers = self._answers(self._rows(X, False)[0])
        return self._shaped(self._target_scaler.invert(answers))

    def predict_one(self, x: Mapping[Any, Any]) -> float:
        """The prediction; 0 before something was learned."""
        if not self.__sklearn_is_fitted__():
            return 0.0
        answers = self._answers(self._columns.row(x, False)[None])
        return float(self._target_scaler.invert(answers)[0, 0])

    def _shaped(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values[:, 0] if self._flat else values


# ------------------------------------------------------------------------------ targets
def _given(y: Any) -> Any:
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None")
    return y.detach().cpu().numpy() if hasattr(y, "detach") else y


def _labels(y: Any) -> list[Label]:
    """Classes, [T]; of a list each keeps its type. Raises ValueError or TypeError."""
    with usable("y"):
        y = _given(y)
        if not _is_flat(y):
            y = column_or_1d(y, warn=True)
            if y.dtype.kind in "mM":
                raise TypeError(f"classes are strings or integers, got an array of {y.dtype}")
            y = y.tolist()
        return [as_label(each) for each in y]


def _is_flat(y: Any) -> bool:
    """Whether it is a list of single values."""
    return isinstance(y, list | tuple) and not any(
        isinstance(each, list | tuple) or getattr(each, "ndim", 0) for each in y
    )


def _sorted(labels: Iterable[Label]) -> list[Label]:
    """Each class once."""
    return sorted(set(labels), key=lambda each: (str(type(each)), each))


def _as_array(labels: list[Label]) -> NDArray[Any]:
    """Classes as an array of their own type; of objects where NumPy would change one."""
    if len({type(each) for each in labels}) == 1:
        found = np.array(labels)
        if found.tolist() == labels and type(found.item(0)) is type(labels[0]):
            return found
    found = np.empty(len(labels), object)
    found[:] = labels
    return found


def _target(value: Any) -> float:
    try:
        found = as_number(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the target of a sample {error}") from None
    if math.isnan(found):
        raise ValueError("the target of a sample is missing: NaN or None")
    return found


def _weights_of_one(w: Any) -> NDArray[np.float32] | None:
    found = 1.0 if type(w) is float and w == 1.0 else as_weight(w)
    return None if found == 1.0 else np.array([found], np.float32)
