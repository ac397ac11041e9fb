"""The memory layout of a step over many tensors.

One launch serves all parameters of an optimizer. Its inputs are three tables: a row
of addresses and sizes per tensor, a row of numbers per parameter group, and *items*, the pieces of
work: a tensor and the first of the quads (:mod:`upgd.kernels.philox`) that it updates. An item's
weights are four stretches, one in each of the tensor's four spans, so noise can be generated where
it is used.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

from upgd.kernels.rules import MOST_NUMBERS, MOST_STATES, source
from upgd.rules.vocabulary import Method, Phase

# Columns of a tensor's row: addresses first.
W, G, H = range(3)
STATE = 3  # and the following
TOTAL = STATE + MOST_STATES  # how many weights
SPAN = TOTAL + 1  # how many quads
NUMBER = SPAN + 1  # of the parameter, for the generator
GROUP = NUMBER + 1  # row of the group's numbers
LENGTH = GROUP + 1  # of a row over which a norm is taken
ROW = LENGTH + 1  # where its norms begin
ALIGNED = ROW + 1  # whether four weights at a time may be loaded
FIRST = ALIGNED + 1  # of a part of a parameter: its first weight in the whole, or -1
WHOLE_SPAN = FIRST + 1  # and how many quads the whole has
COLUMNS = WHOLE_SPAN + 1

# Columns of a group's row.
CORRECTION = MOST_NUMBERS  # and the following; a method's numbers come first
DUE = CORRECTION + MOST_STATES
FACTOR = DUE + 1  # of the gradient
SIGN = FACTOR + 1  # of the curvature
ETA = SIGN + 1
AGE = ETA + 1  # which clock counts its steps
NUMBERS = AGE + 1


def without_noise(method: Method) -> Method:
    """The method for groups that are not perturbed: the noise vanishes from its rules."""
    return replace(method, phases=tuple(map(_quiet, method.phases)))


def _quiet(phase: Phase) -> Phase:
    if "noise" not in phase.reads:
        return phase
    parameters = inspect.signature(phase.fn).parameters
    kept = [p for name, p in parameters.items() if name != "noise"]

    def fn(*values: Any) -> Any:
        given = dict(zip([p.name for p in kept], values, strict=True))
        return phase.fn(**given, noise=0.0)

    fn.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return Phase(fn, phase.writes, phase.reduce, phase.over)


def uses_eta(method: Method) -> bool:
    """Whether the update depends on η: without noise, a method that protects nothing does not."""
    _, body = source(method, "update", "triton").split("\n", 1)
    return re.search(r"\beta\b", body) is not None
