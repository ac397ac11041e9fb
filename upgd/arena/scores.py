"""Scores: accuracy over the whole run relative to the best entrant's on the stream.

On each stream the best entrant is the one with the largest mean over seeds. All entrants have the
same seeds, so an entrant's score is the mean over seeds of its accuracy divided by the best one's
with the same seed, which cancels what makes a seed easy or hard; its interval is Student's over
these ratios, which holds for five seeds, where a bootstrap's is too narrow. The best one's score
is 1.

- The *mean* over streams is taken seed by seed; its interval is Student's over seeds.
- The *worst case* is the lowest score of a stream. Its bounds are the lowest bounds of any stream:
  the worst stream itself is uncertain.

Entrants are ranked by worst case. Equal ones share a rank. What counts are the streams that at
least half of the entrants have results on, or all that anybody has if there are none. An entrant
that lacks one of them has neither mean nor worst case and is not ranked, since both could only look
better.

Against a *baseline*, an entrant has the difference of accuracies with the same seed, with the same
kind of interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from upgd.arena.evidence import Evidence
from upgd.arena.protocol import value
from upgd.metrics import Interval, mean_interval

Mode = Literal["tuned", "one"]
MODES: Mapping[Mode, str] = {"tuned": "tuned per stream", "one": "one set for all streams"}


@dataclass(frozen=True)
class Entry:
    """An entrant on one stream."""

    accuracy: Interval  # mean over seeds
    relative: Interval  # to the best entrant
    ratios: tuple[float, ...]  # by seed
    diverged: int  # of its runs


@dataclass(frozen=True)
class Row:
    """An entrant's line of a table."""

    entrant: str
    entries: Mapping[str, Entry]  # by stream, where all runs have a result
    mean: Interval | None  # over streams; None if a stream is missing
    worst: Interval | None
    worst_stream: str
    rank: int | None

    @property
    def diverged(self) -> int:
        """How many of its runs diverged."""
        return sum(entry.diverged for entry in self.entries.values())


@dataclass(frozen=True)
class Table:
    """All entrants, best first; those that lack results are last."""

    mode: Mode
    rows: Sequence[Row]
    best: Mapping[str, str]  # by stream, the entrant that others are compared with
    counted: Sequence[str]  # the streams that means and worst cases are of

    def row(self, entrant: str) -> Row:
        """The line of an entrant."""
        return next(row for row in self.rows if row.entrant == entrant)


def judge(evidence: Evidence, mode: Mode) -> Table:
    """The table of a mode."""
    best: dict[str, str] = {}
    entries: dict[str, dict[str, Entry]] = {name: {} for name in evidence.entrants}
    for stream in evidence.streams:
        found = {
            name: values
            for name in evidence.entrants
            if (values := accuracies(evidence, name, stream, mode)) is not None
        }
        if not found:
            continue
        best[stream] = max(found, key=lambda name: float(found[name].mean()))
        for name, values in found.items():
            gone = _diverged(evidence, name, stream, mode)
            entries[name][stream] = _entry(values, found[best[stream]], gone)
    counted = [s for s in best if 2 * sum(s in e for e in entries.values()) >= len(entries)]
    rows = [_row(name, mine, counted or list(best)) for name, mine in entries.items()]
    return Table(mode, _ranked(rows), best, counted or list(best))


def accuracies(
    evidence: Evidence, entrant: str, stream: str, mode: Mode
) -> NDArray[np.float64] | None:
    """An entrant's accuracies by seed, diverged runs at chance; None if one is missing."""
    number = chosen(evidence, entrant, stream, mode)
    if number is None:
        return None
    where = evidence.streams[stream]
    cells = evidence.score.get((entrant, stream, number), ())
    found = np.array([value(cell, where.chance) for cell in cells])
    return found if len(found) == len(where.seeds) and np.isfinite(found).all() else None


def chosen(evidence: Evidence, entrant: str, stream: str, mode: Mode) -> int | None:
    """The number of the set that is scored."""
    choice = evidence.choices[entrant]
    return choice.one if mode == "one" else choice.tuned.get(stream)


def _diverged(evidence: Evidence, entrant: str, stream: str, mode: Mode) -> int:
    number = chosen(evidence, entrant, stream, mode)
    assert number is not None
    return list(evidence.score[entrant, stream, number]).count("diverged")


def _entry(values: NDArray[np.float64], best: NDArray[np.float64], diverged: int) -> Entry:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(best > 0, values / best, 1.0)
    return Entry(mean_interval(values), mean_interval(ratios), tuple(map(float, ratios)), diverged)


def _row(entrant: str, entries: Mapping[str, Entry], streams: Sequence[str]) -> Row:
    if not streams or any(stream not in entries for stream in streams):
        return Row(entrant, entries, None, None, "", None)
    mean = mean_interval(np.mean([entries[stream].ratios for stream in streams], axis=0))
    lowest = min(streams, key=lambda stream: entries[stream].relative.estimate)
    every = [entries[stream].relative for stream in streams]
    low, high = (min(getattr(one, end) for one in every) for end in ("low", "high"))
    # One seed has no bounds; NaN would depend on the order in which minima are taken.
    bounds = (math.nan, math.nan) if any(math.isnan(one.low) for one in every) else (low, high)
    worst = Interval(entries[lowest].relative.estimate, *bounds)
    return Row(entrant, entries, mean, worst, lowest, None)


def _ranked(rows: Sequence[Row]) -> list[Row]:
    whole = [row for row in rows if row.worst is not None and row.mean is not None]
    scores = {row.entrant: row.worst.estimate for row in whole if row.worst is not None}
    means = {row.entrant: row.mean.estimate for row in whole if row.mean is not None}
    whole.sort(key=lambda row: (-scores[row.entrant], -means[row.entrant]))
    ranks = {name: 1 + sum(s > score for s in scores.values()) for name, score in scores.items()}
    found = [replace(row, rank=ranks[row.entrant]) for row in whole]
    return [*found, *(row for row in rows if row.worst is None)]


# -------------------------------------------------------------------------- against a baseline
@dataclass(frozen=True)
class Difference:
    """Accuracies of one entrant, or of several, minus the baseline's, paired by seeds."""

    streams: Mapping[str, Interval]  # where both have all results
    mean: Interval | None  # over the streams that count; None if one is missing


@dataclass(frozen=True)
class Versus:
    """All entrants against one of them, each tuned per stream."""

    baseline: str
    rest: Difference  # the best of the others on each stream
    best: Mapping[str, str]  # by stream, which one that is
    others: Mapping[str, Difference]  # largest mean first; those that lack results last


def versus(evidence: Evidence, baseline: str) -> Versus:
    """How far entrants are ahead of the baseline, or behind.

    On each stream the best of the others is the one with the largest mean, found by the same runs,
    so the comparison with it flatters the others.
    """
    table, best = judge(evidence, "tuned"), {}
    apart: dict[str, dict[str, NDArray[np.float64]]] = {name: {} for name in evidence.entrants}
    for stream in table.best:
        mine = accuracies(evidence, baseline, stream, "tuned")
        for name, some in apart.items():
            values = accuracies(evidence, name, stream, "tuned")
            if mine is not None and values is not None:
                some[stream] = values - mine
    del apart[baseline]
    for stream in table.best:
        means = {name: some[stream].mean() for name, some in apart.items() if stream in some}
        if means:
            best[stream] = max(means, key=lambda name: float(means[name]))
    rest = {stream: apart[name][stream] for stream, name in best.items()}
    found = {name: _difference(some, table.counted) for name, some in apart.items()}
    order = sorted(found, key=lambda n: math.inf if (m := found[n].mean) is None else -m.estimate)
    others = {name: found[name] for name in order}
    return Versus(baseline, _difference(rest, table.counted), best, others)


def _difference(apart: Mapping[str, NDArray[np.float64]], counted: Sequence[str]) -> Difference:
    whole = bool(counted) and all(stream in apart for stream in counted)
    mean = mean_interval(np.mean([apart[s] for s in counted], axis=0)) if whole else None
    return Difference({stream: mean_interval(some) for stream, some in apart.items()}, mean)


# -------------------------------------------------------------------------------- the search
def searched(evidence: Evidence, entrant: str, stream: str) -> list[float]:
    """The mean accuracy of each set in the search, by number; NaN where it lacks a result."""
    where = evidence.streams[stream]
    found = []
    for number in range(len(evidence.entrants[entrant].sets)):
        cells = evidence.search.get((entrant, stream, number), ())
        values = [value(cell, where.chance) for cell in cells]
        found.append(float(np.mean(values)) if values else math.nan)
    return found
