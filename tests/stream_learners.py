"""Comparing learners of :mod:`upgd.stream`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from upgd.stream.learner import StreamLearner


def state(learner: StreamLearner) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of everything that learning on depends on."""
    return copy.deepcopy(learner._state())


def assert_same_state(mine: Any, other: Any) -> None:
    assert mine[1] == other[1]
    assert mine[0].keys() == other[0].keys()
    for name, array in mine[0].items():
        assert array.dtype == other[0][name].dtype, name
        np.testing.assert_array_equal(array, other[0][name], err_msg=name)


def assert_same(a: StreamLearner, b: StreamLearner) -> None:
    """Everything that learning on depends on is equal to the bit."""
    assert_same_state(a._state(), b._state())
