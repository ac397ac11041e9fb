"""Rows for a learner, many at a time, with the result of one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.pipe.batches import Batches
from upgd.pipe.formats import number_of
from upgd.pipe.rows import BadLineError, Row
from upgd.stream.estimators import Classifier, Regressor
from upgd.stream.values import LARGEST, as_label

MOST = 1000
"""Rows that are learned in one call."""


class Guess(NamedTuple):
    """A prediction before its row was learned; None before anything was learned."""

    value: Any = None
    probability: float | None = None  # of a class


class Feed:
    """Gives rows to a learner, which predicts each and then learns it if its target is known.

    A row that brings something new (a feature, a string, a class) is given by itself; those between
    are learned in one call. The learner is the same, bit for bit, as after ``learn_one`` with each.

    Args:
        learner: A classifier or a regressor that has begun.
    """

    def __init__(self, learner: Classifier | Regressor) -> None:
        self.learner = learner
        self._batches = Batches(learner._columns)

    def checked(self, row: Row) -> Row:
        """A row with its class or number, as the learner takes it; raises BadLineError."""
        learner, target = self.learner, row.target
        if learner._columns.largest < LARGEST:
            for name, value in row.features.items():
                if not isinstance(value, str) and abs(value) > learner._columns.largest:
                    raise BadLineError(learner._columns._too_large(name, value))
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
        found = {"samples_learned": learner.n_samples_seen_, "features": len(learner._columns)}
        if isinstance(learner, Classifier):
            found["classes"] = len(learner._labels)
        return {**found, "drifts": len(learner.drifts_), "restarts": learner.restarts_}

    def _is_new(self, row: Row) -> bool:
        learner = self.learner
        if row.target is None or learner.committee_ is None or self._batches.is_new(row):
            return True
        return isinstance(learner, Classifier) and row.target not in learner._slots

    def _learn_one(self, row: Row) -> Guess:
        [guess] = self._predict([row])
        self.learner.learn_one(row.features, row.target)
        return guess

    def _learn_known(self, rows: Sequence[Row]) -> list[Guess]:
        learner, targets = self.learner, [row.target for row in rows]
        numbers = self._batches.matrix(rows)
        if isinstance(learner, Classifier):
            slots = np.array([learner._slots[target] for target in targets], np.int64)
            learner._known_before = len(learner._labels)
            return self._classes(learner._steps(numbers, slots, None, len(learner._labels)))
        answers = learner._steps(numbers, np.array(targets, np.float64)[:, None], None, 1)
        return [Guess(value) for value in answers[:, 0].tolist()]

    def _predict(self, rows: Sequence[Row]) -> list[Guess]:
        learner = self.learner
        if learner.committee_ is None:
            return [Guess()] * len(rows)
        answers = learner._answers(self._batches.matrix(rows))
        if isinstance(learner, Classifier):
            return self._classes(answers)
        values = learner._target_scaler.invert(answers)[:, 0]
        return [Guess(value) for value in values.tolist()]

    def _classes(self, answers: NDArray[np.float64]) -> list[Guess]:
        assert isinstance(self.learner, Classifier)
        best = answers.argmax(1)
        chances = np.exp(answers[np.arange(len(answers)), best])
        labels = self.learner._labels
        both = zip(best.tolist(), chances.tolist(), strict=True)
        return [Guess(labels[slot], chance) for slot, chance in both]


def _while(rows: Sequence[Row], begin: int, holds: Any) -> int:
    """Where a stretch of rows ends that begins at `begin`."""
    end = begin + 1
    while end < len(rows) and end - begin < MOST and holds(rows[end]):
        end += 1
    return end
