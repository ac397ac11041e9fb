"""Rows for a learner, many at a time, with the result of one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upgd.pipe.batches import Batches
from upgd.pipe.formats import number_of
from upgd.pipe.rows import BadLineError, Row
from upgd.stream.estimators import Classifier, Regressor
from upgd.stream.known import Guess, Known
from upgd.stream.values import LARGEST, as_label

MOST = 1000
"""Rows that are learned in one call."""


class Feed:
    """Gives rows to a learner, which predicts each and then learns it if its target is known.

    A row that brings something new (a feature, a string, a class) is given by itself; those between
    are learned in one call. The learner is the same, bit for bit, as after ``learn_one`` with each.

    Args:
        learner: A classifier or a regressor.
    """

    def __init__(self, learner: Classifier | Regressor) -> None:
        self.learner = learner
        self._known = Known(learner)
        self._batches = Batches(self._known.columns)

    def checked(self, row: Row) -> Row:
        """A row with its class or number, as the learner takes it; raises BadLineError."""
        learner, target = self.learner, row.target
        columns = self._known.columns
        if columns.largest < LARGEST:
            for name, value in row.features.items():
                if not isinstance(value, str) and abs(value) > columns.largest:
                    raise BadLineError(columns.too_large(name, value))
        if target is None or (type(target) is str and isinstance(learner, Classifier)):
            return row
        try:
            known = as_label(target) if isinstance(learner, Classifier) else number_of(target)
        except (TypeError, ValueError) as error:
            raise BadLineError(str(error)) from None
        return row._replace(target=known)

    def learn(self, rows: Sequence[Row]) -> list[Guess]:
        """Predict and learn rows in their order; the predictions."""
        found: list[Guess] = []
        while len(found) < len(rows):
            begin = len(found)
            first = rows[begin]
            if first.target is None:
                end = _while(rows, begin, lambda row: row.target is None)
                found += self._predict(rows[begin:end])
            elif self._is_new(first):
                found.append(self._learn_one(first))
            else:
                end = _while(rows, begin, lambda row: not self._is_new(row))
                found += self._learn_known(rows[begin:end])
        return found

    def errors(self) -> dict[str, float]:
        """Errors of predictions before learning: of all samples, and of about the last thousand."""
        learner = self.learner
        if not learner.n_samples_seen_:
            return {}
        if isinstance(learner, Classifier):
            return {"accuracy": learner.accuracy_, "recent_accuracy": learner.recent_accuracy_}
        return {
            "mean_absolute_error": learner.mean_absolute_error_,
            "recent_mean_absolute_error": learner.recent_error_,
        }

    def facts(self) -> dict[str, Any]:
        """The learner in numbers."""
        learner = self.learner
        found = {"samples_learned": learner.n_samples_seen_, "features": len(self._known.columns)}
        if self._known.classes is not None:
            found["classes"] = self._known.classes
        return {**found, "drifts": len(learner.drifts_), "restarts": learner.restarts_}

    def _is_new(self, row: Row) -> bool:
        return row.target is None or not self._known.has(row.target) or self._batches.is_new(row)

    def _learn_one(self, row: Row) -> Guess:
        [guess] = self._predict([row])
        self.learner.learn_one(row.features, row.target)
        return guess

    def _learn_known(self, rows: Sequence[Row]) -> list[Guess]:
        return self._known.learn(self._batches.matrix(rows), [row.target for row in rows])

    def _predict(self, rows: Sequence[Row]) -> list[Guess]:
        return self._known.predict(self._batches.matrix(rows))


def _while(rows: Sequence[Row], begin: int, holds: Any) -> int:
    """Where a stretch of rows ends that begins at `begin`."""
    end = begin + 1
    while end < len(rows) and end - begin < MOST and holds(rows[end]):
        end += 1
    return end
