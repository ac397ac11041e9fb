"""What measurements mean, in plain language: one rule per row of a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

History = Sequence[tuple[int, Mapping[str, float]]]
LATEST = 3
"""Measurements in a row that a slow change must have lasted."""
STEADY = 0.9
"""The part of today's dormant share that was there all the time of which a sentence speaks."""


class Past(NamedTuple):
    """What there is to judge."""

    history: History
    units: Mapping[str, int]  # of hidden layers

    def names(self, measure: str) -> list[str]:
        """The layers for which the newest measurement has a measure."""
        start = f"{measure}/"
        return [name[len(start) :] for name in self.history[-1][1] if name.startswith(start)]

    def values(self, name: str) -> list[tuple[int, float]]:
        """The finite values of a measure over time, with their steps."""
        found = [(step, scalars.get(name, math.nan)) for step, scalars in self.history]
        return [(step, value) for step, value in found if math.isfinite(value)]


class Rule(NamedTuple):
    """A warning: when it is given, and what finds it."""

    when: str  # in words, for the documentation
    limit: float
    find: Callable[[Past, float], Iterator[str]]


def warnings_of(history: History, units: Mapping[str, int]) -> list[str]:
    """A sentence for everything that a rule finds in a history.

    Example:
        >>> warnings_of([(100, {"dormant/fc2": 1 / 3, "dead/fc2": 0.0})], {"fc2": 150})
        ["A third of layer 'fc2' (50 of 150 units) is dormant."]
    """
    if not history:
        return []
    past = Past(history, units)
    return [text for rule in RULES for text in rule.find(past, rule.limit)]


# ------------------------------------------------------------------------------- rules
def _dormant(past: Past, limit: float) -> Iterator[str]:
    for layer in past.names("dormant"):
        values = past.values(f"dormant/{layer}")
        if not values or values[-1][1] < limit:
            continue
        step, share = values[-1]
        since = step
        for earlier, value in reversed(values):
            if value < max(limit, STEADY * share):
                break
            since = earlier
        units = past.units.get(layer, 0)
        text = f"{_share(share)} of layer {layer!r} ({round(share * units)} of {units} units) "
        text += "has been" if step > since else "is"
        text += " dormant"
        if step > since:
            text += f" for the last {_count(step - since)} steps"
        dead = past.history[-1][1].get(f"dead/{layer}", 0.0)
        if dead > 0:
            many = "all" if dead == share else str(round(dead * units))
            text += f"; {many} of them put out zero for every sample"
        yield f"{text}."


def _growing(past: Past, limit: float) -> Iterator[str]:
    most = RULES[0].limit
    for layer in past.names("dormant"):
        values = [value for _, value in past.values(f"dormant/{layer}")]
        if len(values) > LATEST and limit <= values[-1] < most:
            start = sum(values[:LATEST]) / LATEST
            if min(values[-LATEST:]) >= 2 * start and values[-1] >= start + limit / 2:
                told = f"grew from {start:.1%} to {values[-1]:.1%}"
                yield f"The dormant share of layer {layer!r} {told}."


def _rank(past: Past, limit: float) -> Iterator[str]:
    for layer in past.names("effective_rank"):
        values = [value for _, value in past.values(f"effective_rank/{layer}")]
        if len(values) > LATEST and 0 < max(values[-LATEST:]) < limit * values[0]:
            told = f"fell from {values[0]:.1f} to {values[-1]:.1f}"
            yield f"The effective rank of layer {layer!r} {told}: its units have become more alike."


def _gradient(past: Past, limit: float) -> Iterator[str]:
    values = [value for _, value in past.values("gradient_norm")]
    if values and values[-1] == 0:
        yield "The gradient is zero: nothing is learnt."
    elif len(values) > LATEST and max(values[-LATEST:]) < limit * values[0]:
        told = f"fell from {values[0]:.3g} to {values[-1]:.3g}"
        yield f"The gradient norm {told}: the loss is at its minimum, or little is learnt any more."


def _weights(past: Past, limit: float) -> Iterator[str]:
    for layer in past.names("weight_norm"):
        values = [value for _, value in past.values(f"weight_norm/{layer}")]
        if values and values[0] > 0 and values[-1] > limit * values[0]:
            told = f"grew from {values[0]:.3g} to {values[-1]:.3g}"
            yield f"The weight norm of layer {layer!r} {told}."


def _update(past: Past, limit: float) -> Iterator[str]:
    values = [value for _, value in past.values("update_ratio")]
    if len(values) >= LATEST and min(values[-LATEST:]) > limit:
        told = f"a step changes them by {values[-1]:.0%} of their norm"
        yield f"The weights move very fast: {told}; the step size may be too large."


def _skipped(past: Past, limit: float) -> Iterator[str]:
    count = past.history[-1][1].get("skipped_steps", 0.0)
    if count > limit:
        steps = "step was" if count == 1 else "steps were"
        yield f"{_count(int(count))} {steps} skipped because of values that are not finite."


def _protected(past: Past, limit: float) -> Iterator[str]:
    share = past.history[-1][1].get("protected", math.nan)
    if share >= limit:
        yield f"{_share(share)} of all weights are protected: there is little left to learn with."
    elif share == 0:
        yield "No weight is protected: none has a utility that stands out."


def _finite(past: Past, limit: float) -> Iterator[str]:
    step, scalars = past.history[-1]
    for name in ("weight_norm", "gradient_norm", "loss"):
        if not math.isfinite(scalars.get(name, 0.0)):
            yield f"The {name.replace('_', ' ')} is not finite at step {_count(step)}."


RULES = (
    Rule("a layer's dormant share is 0.25 or more", 0.25, _dormant),
    Rule("a layer's dormant share is 0.1 or more and has doubled", 0.1, _growing),
    Rule("a layer's effective rank is below half of its first value", 0.5, _rank),
    Rule("the gradient norm is zero, or below a thousandth of its first value", 1e-3, _gradient),
    Rule("a layer's weight norm is more than ten times its first value", 10.0, _weights),
    Rule("a step changes the weights by more than a tenth of their norm", 0.1, _update),
    Rule("the optimizer has skipped steps", 0.0, _skipped),
    Rule("99% of all weights are protected, or none", 0.99, _protected),
    Rule("the norm of weights or gradients, or the loss, is not finite", 0.0, _finite),
)


# ------------------------------------------------------------------------------- words
def _share(share: float) -> str:
    words = {1: "All", 0.75: "Three quarters", 2 / 3: "Two thirds", 0.5: "Half"}
    words |= {1 / 3: "A third", 0.25: "A quarter"}
    for value, word in words.items():
        if abs(share - value) < (0.02 if value < 1 else 1e-9):
            return word
    return f"{share:.0%}" if share < 0.995 else f"{share:.1%}"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")
