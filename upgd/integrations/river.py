"""river: the learners of :mod:`upgd.stream` as its estimators, for pipelines and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from river import base

from upgd import stream

if TYPE_CHECKING:
    import pandas


class _Held:
    """Holds a learner and its parameters, as river's ``clone`` and ``repr`` read them."""

    _kind: type[stream.Classifier] | type[stream.Regressor]

    def __init__(self, network: Any = "medium", *, seed: int | None = 0, **options: Any) -> None:
        given = {"network": network, "seed": seed, **options}
        for name, value in given.items():
            setattr(self, name, [] if value == () else value)  # clone looks at a tuple's first
        self.options = {name: getattr(self, name) for name in options}
        self.learner = self._kind(network=network, random_state=seed, **options)

    def learn_one(self, x: dict[Any, Any], y: Any, w: float = 1.0) -> None:
        """Learn from one dict of features; `w` multiplies its loss."""
        self.learner.learn_one(x, y, w)

    def learn_many(self, X: pandas.DataFrame, y: pandas.Series, w: Any = None) -> None:
        """Learn from rows, one after the other; `w` multiplies their losses."""
        self.learner.partial_fit(X, y, sample_weight=w)


class Classifier(_Held, base.MiniBatchClassifier):
    """:class:`upgd.stream.Classifier` as a classifier of river.

    Args:
        network: See there.
        seed: Its `random_state`.
        options: Its other parameters.

    Attributes:
        learner: The :class:`upgd.stream.Classifier`.

    Example:
        >>> from river import datasets, evaluate, metrics, preprocessing
        >>> model = preprocessing.StandardScaler() | Classifier(network=(16,))
        >>> metric = evaluate.progressive_val_score(datasets.Phishing(), model, metrics.F1())
        >>> metric.get() > 0.8
        True
    """

    _kind = stream.Classifier
    learner: stream.Classifier

    @property
    def _multiclass(self) -> bool:
        return True

    def predict_proba_one(self, x: dict[Any, Any], **kwargs: Any) -> dict[Any, float]:
        """Each known class's probability; empty before something was learned."""
        found: dict[Any, float] = self.learner.predict_proba_one(x)
        return found

    def predict_one(self, x: dict[Any, Any], **kwargs: Any) -> Any:
        """The likeliest class; None before something was learned."""
        return self.learner.predict_one(x)

    def predict_proba_many(self, X: pandas.DataFrame) -> pandas.DataFrame:
        """Each row's probability of each class; without columns before something was learned."""
        import pandas

        if not self.learner.__sklearn_is_fitted__():
            return pandas.DataFrame(index=X.index)
        answers = self.learner.predict_proba(X)
        return pandas.DataFrame(answers, X.index, columns=list(self.learner.classes_))

    def predict_many(self, X: pandas.DataFrame) -> pandas.Series:
        """The likeliest class of each row; empty before something was learned."""
        import pandas

        if not self.learner.__sklearn_is_fitted__():
            return pandas.Series(dtype="object")
        return pandas.Series(self.learner.predict(X), X.index)


class Regressor(_Held, base.MiniBatchRegressor):
    """:class:`upgd.stream.Regressor` as a regressor of river; see :class:`Classifier`.

    Example:
        >>> from river import datasets, evaluate, metrics
        >>> model = Regressor(network=(16,))
        >>> metric = evaluate.progressive_val_score(datasets.TrumpApproval(), model, metrics.MAE())
        >>> metric.get() < 1
        True
    """

    _kind = stream.Regressor
    learner: stream.Regressor

    def predict_one(self, x: Mapping[Any, Any], **kwargs: Any) -> float:
        """The prediction; 0 before something was learned."""
        return self.learner.predict_one(x)

    def predict_many(self, X: pandas.DataFrame) -> pandas.Series:
        """The prediction for each row; 0 before something was learned."""
        import pandas

        if not self.learner.__sklearn_is_fitted__():
            return pandas.Series(0.0, X.index)
        return pandas.Series(self.learner.predict(X), X.index)
