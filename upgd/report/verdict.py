"""Sentences about curves over tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import Interval, mean_interval

Curves = Mapping[str, Mapping[int, NDArray[np.floating]]]
"""By name and seed, the accuracy of each task. Equal seeds mean equal streams."""

HOLDS = 0.01
"""A curve holds if the interval of its change lies within ± this."""


class Parts(NamedTuple):
    """The compared tasks, counted from 0: an early part and the last part."""

    early: range
    late: range

    @classmethod
    def of(cls, tasks: int) -> Parts:
        """The second and the last quarter; of fewer than four tasks, the first and the last."""
        size = max(1, tasks // 4)
        start = size if tasks >= 4 else 0
        return cls(range(start, start + size), range(tasks - size, tasks))


def told(tasks: range, unit: str = "task") -> str:
    """A range of tasks (or another unit) as text, counted from 1."""
    first, last = tasks.start + 1, tasks.stop
    return f"{unit} {last}" if first == last else f"{unit}s {first}–{last}"


def accuracy(seeds: Mapping[int, NDArray[np.floating]], tasks: range) -> Interval:
    """Accuracy in some tasks, over seeds."""
    return mean_interval([_mean(curve, tasks) for curve in seeds.values()])


def change(seeds: Mapping[int, NDArray[np.floating]], parts: Parts) -> Interval:
    """Accuracy in the last part minus that in the early part, over seeds."""
    pairs = ((_mean(c, parts.late), _mean(c, parts.early)) for c in seeds.values())
    return mean_interval([late - early for late, early in pairs])


def trend(found: Interval) -> str:
    """The word for a change: improved, fell, held, or no clear trend."""
    if found.low > 0 or found.high < 0:
        return "improved" if found.low > 0 else "fell"
    return "held" if found.low > -HOLDS and found.high < HOLDS else "no clear trend"


def headline(curves: Curves, subject: str, unit: str = "task") -> str:
    """Whether `subject` ends ahead of the others, in one sentence.

    Differences are taken seed by seed, because equal seeds mean equal streams.
    """
    known = {name: seeds for name, seeds in curves.items() if seeds}
    others = [name for name in known if name != subject]
    if subject not in known:
        return f"No run of {subject} finished, so there is nothing to compare."
    tasks = min(len(curve) for seeds in known.values() for curve in seeds.values())
    late = Parts.of(tasks).late
    ends = {name: accuracy(seeds, late).estimate for name, seeds in known.items()}
    where = f"in {told(late, unit)} of {tasks}"
    if not others:
        return f"{subject} gets {ends[subject]:.1%} right {where}; no other method finished."
    others.sort(key=lambda name: -ends[name])
    rival = others[0]
    common = sorted(known[subject].keys() & known[rival].keys())
    if not common:
        return f"{subject} and {rival} have no seed in common, so there is nothing to compare."
    mine, theirs = known[subject], known[rival]
    lead = mean_interval([_mean(mine[s], late) - _mean(theirs[s], late) for s in common])
    listed = ", ".join(f"{name} {ends[name]:.1%}" for name in others)
    scores = f"{where}, {subject} gets {ends[subject]:.1%} right, {listed}"
    if len(common) == 1:
        by = f"{abs(lead.estimate) * 100:.1f} points {'above' if lead.estimate > 0 else 'below'}"
        return f"{subject} ends {by} {rival}: {scores}; one seed is an example, not evidence."
    if lead.low > 0:
        return f"{subject} ends ahead: {scores}; it leads {rival} by {points(lead)}."
    if lead.high < 0:
        behind = Interval(-lead.estimate, -lead.high, -lead.low)
        return f"{subject} ends behind: {scores}; it trails {rival} by {points(behind)}."
    return (
        f"No clear winner: {scores}; {subject} and {rival} differ by {points(lead)}, "
        f"which {len(common)} seeds cannot distinguish from zero."
    )


def trends(curves: Curves, unit: str = "task") -> str:
    """How each method changed between the early and the last part, in one sentence."""
    known = {name: seeds for name, seeds in curves.items() if seeds}
    tasks = min((len(c) for seeds in known.values() for c in seeds.values()), default=0)
    if tasks < 2:
        return ""
    parts = Parts.of(tasks)
    found = {name: change(seeds, parts) for name, seeds in known.items()}
    clauses = [f"{name} {trend(x)} ({_plain(x.estimate, '+')})" for name, x in found.items()]
    early, late = (told(part, unit) for part in parts)
    return f"From {early} to {late}, in points: {', '.join(clauses)}."


def points(found: Interval) -> str:
    """A difference of accuracies with its interval, if there is one."""
    estimate, low, high = (_plain(value) for value in found)
    within = "" if math.isnan(found.low) else f" (95% interval {low} to {high})"
    return f"{estimate} points{within}"


def _plain(value: float, sign: str = "") -> str:
    return f"{value * 100:{sign}.1f}".replace("-", "−")


def _mean(curve: NDArray[np.floating], tasks: range) -> float:
    return float(curve[tasks.start : tasks.stop].mean())
