"""Claim 1: which approximation of utility has the highest rank correlation with the true one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from upgd.metrics import Interval, mean_interval
from upgd.paper import evidence as ev
from upgd.paper.verdicts import (
    NO,
    NO_WORDS,
    PLAIN,
    UNKNOWN,
    UP,
    YES,
    Finding,
    Verdict,
    worst,
)

Array = NDArray[np.float64]
LABELS: dict[str, str] = {
    "second": "Second-order utility",
    "first": "First-order utility",
    "squared_gradient": "Squared gradient",
    "magnitude": "Weight magnitude",
    "random": "Random",
}
CHANGE = "last fifth minus first fifth"
HIGHER = ("higher by ", "lower by ")
SMALL, ZERO = 0.3, 0.01
"""Correlations that count as small and as zero; ours."""


def claim(data: Mapping[str, Array], length: float) -> list[Finding]:
    """The paper's claim 1 on a panel: correlations by approximation [seed, point].

    "Grows" and "shrinks" compare the first and the last fifth of the run, "higher" compares means
    over the run. "Throughout" also requires the mean over seeds to be the highest at every point.
    Runs that are too short (`length`, as a fraction of the paper's) give statistics and no verdict.
    """
    fifth = data["second"].shape[1] // 5
    change = {k: _mean(v[:, -fifth:]) - _mean(v[:, :fifth]) for k, v in data.items()}
    mean = {k: _mean(v) for k, v in data.items()}
    others = [k for k in data if k != "second"]
    runner_up = max(others, key=lambda k: float(np.nanmean(mean[k])))
    highest, throughout = _throughout(data["second"], [data[k] for k in others])
    higher, always = _throughout(data["first"], [data["squared_gradient"]])
    found = [
        _finding(
            "highest",
            f"second-order minus the next best ({LABELS[runner_up].lower()}); its mean is highest "
            f"at {100 * highest:.0f}% of the points",
            mean["second"] - mean[runner_up],
            lambda found: worst([ev.above(found), throughout]),
        ),
        _finding("first", f"first-order falls: {CHANGE}", change["first"], ev.below),
        _ours("magnitude", "weight magnitude is small", "below", mean["magnitude"], SMALL),
        _finding("magnitude", f"weight magnitude shrinks: {CHANGE}", change["magnitude"], ev.below),
        _finding("squared", f"squared gradient grows: {CHANGE}", change["squared_gradient"],
                 ev.above),
        _finding(
            "squared",
            "first-order minus squared gradient; the latter's mean is below at "
            f"{100 * higher:.0f}% of the points",
            mean["first"] - mean["squared_gradient"],
            lambda found: worst([ev.above(found), always]),
        ),
        _ours("random", "random is zero", "within ±", mean["random"], ZERO),
    ]  # fmt: skip
    if length >= ev.LONG_ENOUGH:
        return found
    return [each.decided(UNKNOWN) for each in found]


def table(findings: Sequence[Finding]) -> list[str]:
    """Findings as a Markdown table."""
    lines = ["| statement | estimate | 95% interval over seeds | verdict |", "|---|---:|---|---|"]
    for each in findings:
        assert each.found is not None
        value, low, high = (f"{x:+.3f}" for x in each.found)
        between = "-" if np.isnan(each.found.low) else f"[{low}, {high}]"
        lines.append(f"| {each.statement} | {value} | {between} | {each.verdict} |")
    return lines


def _mean(values: Array) -> Array:
    """The mean over points [seed, point]; NaN where a seed has none."""
    return np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in values])


def _throughout(mine: Array, others: Sequence[Array]) -> tuple[float, Verdict]:
    """The fraction of points [seed, point] at which a mean is highest, and whether it always is.

    If it is not, the interval at the point where it is furthest below decides.
    """
    rivals = np.stack(others)
    best = np.nanmean(rivals, 1).argmax(0)
    lead = mine - rivals[best, :, np.arange(len(best))].T
    average = np.nanmean(lead, 0)
    share = float(np.mean(average >= 0))
    lowest = lead[:, average.argmin()]
    found = mean_interval(lowest[np.isfinite(lowest)])
    return share, YES if share == 1 else NO if ev.below(found) == YES else UNKNOWN


def _finding(
    part: str, statement: str, per_seed: Array, judge: Callable[[Interval], Verdict]
) -> Finding:
    """A statement about a mean over seeds."""
    found = mean_interval(per_seed[np.isfinite(per_seed)])
    words = UP if CHANGE in statement else HIGHER if " minus " in statement else NO_WORDS
    return Finding(statement, found, judge(found), PLAIN, words, part)


def _ours(part: str, statement: str, how: str, per_seed: Array, threshold: float) -> Finding:
    """The same with a threshold of ours."""
    judge = ev.within if how == "within ±" else ev.below
    text = f"{statement}: mean over the run (ours: {how if how[-1] == '±' else how + ' '}"
    finding = _finding(part, f"{text}{threshold})", per_seed, lambda x: judge(x, threshold))
    return finding._replace(ours=ev.scaled(partial(judge, finding.found), threshold))
