"""What ``upgd.pipe`` uses of a learner beyond its public methods: many rows of numbers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.stream.columns import Columns, Rows
from upgd.stream.estimators import Classifier, Regressor


class Guess(NamedTuple):
    """A prediction before its row was learned; None before anything was learned."""

    value: Any = None
    probability: float | None = None  # of a class


class Known:
    """Predicts and learns rows that bring nothing new, many in one call.

    Rows are numbers in the order of :attr:`columns`, [T, columns]. The learner is the same, bit for
    bit, as after ``learn_one`` with each; what is new must go through that.

    Args:
        learner: A classifier or a regressor of single numbers; it begins if it has not.
    """

    def __init__(self, learner: Classifier | Regressor) -> None:
        learner._begin_once()
        self.learner = learner

    @property
    def columns(self) -> Columns:
        """The learner's columns; look, but do not add."""
        return self.learner._columns

    @property
    def classes(self) -> int | None:
        """How many are known; None of a regressor."""
        return len(self.learner._labels) if isinstance(self.learner, Classifier) else None

    def has(self, target: Any) -> bool:
        """Whether the networks have an output for a target."""
        if self.learner.committee_ is None:
            return False
        return not isinstance(self.learner, Classifier) or target in self.learner._slots

    def predict(self, rows: Rows) -> list[Guess]:
        """Predictions, one per row."""
        learner = self.learner
        if learner.committee_ is None:
            return [Guess()] * len(rows)
        answers = learner._answers(rows)
        if isinstance(learner, Classifier):
            return _classes(learner, answers)
        return _numbers(learner._target_scaler.invert(answers))

    def learn(self, rows: Rows, targets: Sequence[Any]) -> list[Guess]:
        """Learn rows with targets that :meth:`has` knows; the prediction before each."""
        learner = self.learner
        if isinstance(learner, Classifier):
            slots = np.array([learner._slots[target] for target in targets], np.int64)
            learner._known_before = len(learner._labels)
            return _classes(learner, learner._steps(rows, slots, None, len(learner._labels)))
        return _numbers(learner._steps(rows, np.array(targets, np.float64)[:, None], None, 1))


def _classes(learner: Classifier, answers: NDArray[np.float64]) -> list[Guess]:
    best = answers.argmax(1)
    chances = np.exp(answers[np.arange(len(answers)), best])
    both = zip(best.tolist(), chances.tolist(), strict=True)
    return [Guess(learner._labels[slot], chance) for slot, chance in both]


def _numbers(values: NDArray[np.float64]) -> list[Guess]:
    return [Guess(value) for value in values[:, 0].tolist()]
