"""Figure 8 and claim 9: does PPO's return fall with long training, and does AdaUPGD prevent it?

The highest point of a noisy curve lies above its end even where nothing falls, so "peak less final"
would find a collapse in noise alone. Here the peak of a seed is looked up where the *other* seeds
have theirs:

* a *tenth* is a tenth of a run, in consecutive windows;
* for each seed, the tenth is chosen in which the mean over all other seeds is highest; the seed's
  own *fall* is its mean in the last tenth less that in the chosen one. Its own noise had no part in
  the choice, so the expected fall of a curve that is level is 0, whatever its noise. Where returns
  rise to the end the chosen tenth is the last and the fall is exactly 0;
* the *gain* of a seed is its mean in the last tenth less that in the fifth of the run around its
  middle; nothing is chosen;
* both are shares of what had been *learned*: the mean over seeds of their chosen tenth less their
  first window. Where the interval of that is not above 0, nothing was learned, and so nothing can
  be said.

Adam *falls* if the 95% interval over seeds of its fall lies below 0, and does not if it reaches 0
and lies above −5%. AdaUPGD *keeps improving* if the interval of its gain lies above 0, and does not
if it reaches 0 (or lies below) and is less than 5%. In between there is not enough data. The claim
is about long training: runs shorter than :data:`LONG` steps give statistics and no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.metrics import Interval
from upgd.paper.evidence import UNKNOWN, All, Finding, falling, rising
from upgd.paper.experiments import AGENT_STEPS, ENVIRONMENTS, EXPERIMENTS, agents_name
from upgd.paper.results import Results
from upgd.rl.collapse import collapse, filled, over_seeds, width

Array = NDArray[np.float64]
LONG = AGENT_STEPS
"""Steps from which on a run is long: the experiments' full scale."""
HARDLY = 0.05
"""A fall or a gain that is less than this share is none."""
METRIC = "return"


# ---------------------------------------------------------------------------- statistics
def curves(results: Results | None, arm: str) -> Array | None:
    """An arm's mean returns, a row per seed and a column per window; None if there are none."""
    found = [] if results is None else [filled(x) for x in results.of(arm, METRIC).values()]
    found = [curve for curve in found if np.isfinite(curve).all()]
    if not found:
        return None
    shortest = min(map(len, found))
    return np.stack([curve[:shortest] for curve in found])


def peaks(returns: Array) -> Array:
    """Each seed's mean in the tenth that is the best of all other seeds."""
    tenths = _tenths(returns)
    best = (tenths.sum(0) - tenths).argmax(1)
    return np.asarray(tenths[np.arange(len(tenths)), best])


def learned(returns: Array) -> Interval:
    """What seeds have gained at these peaks since their first window."""
    return metrics.mean_interval(peaks(returns) - returns[:, 0])


def falls(returns: Array) -> Array:
    """Each seed's last tenth less its peak."""
    return np.asarray(_tenths(returns)[:, -1] - peaks(returns))


def gains(returns: Array) -> Array:
    """Each seed's last tenth less the fifth around the middle."""
    windows = returns.shape[1]
    middle = returns[:, int(0.4 * windows) : max(int(0.6 * windows), int(0.4 * windows) + 1)]
    return np.asarray(_tenths(returns)[:, -1] - middle.mean(1))


def fall(returns: Array | None) -> Interval | None:
    """The mean fall as a share of what was learned."""
    return None if returns is None or len(returns) < 2 else _share(falls(returns), returns)


def gain(returns: Array | None) -> Interval | None:
    """The mean gain as a share of what was learned."""
    return None if returns is None or len(returns) < 2 else _share(gains(returns), returns)


def _share(values: Array, returns: Array) -> Interval | None:
    size = learned(returns)
    return metrics.mean_interval(values / size.estimate) if size.low > 0 else None


def _tenths(returns: Array) -> Array:
    """Means of every tenth, by the window at which it begins."""
    size = width(returns.shape[-1])
    zero = np.zeros((*returns.shape[:-1], 1))
    sums = np.cumsum(np.concatenate([zero, returns], -1), -1)
    return np.asarray((sums[..., size:] - sums[..., :-size]) / size)


# ----------------------------------------------------------------------------- statements
def findings(all_: All) -> list[Finding]:
    """The statements of claim 9, environment by environment."""
    found = []
    for environment in ENVIRONMENTS:
        name = agents_name(environment)
        results = all_.get(name)
        for arm in EXPERIMENTS[name].arms:
            returns = curves(results, arm.name)
            if arm.name == "adam":
                statistic, text = fall(returns), f"{arm.title} falls after its peak"
                verdict = falling(statistic, HARDLY)
            else:
                statistic, text = gain(returns), f"{arm.title} keeps improving"
                verdict = rising(statistic, HARDLY)
            if results is not None and not is_long(results, returns):
                text, verdict = f"{text} (too short to tell)", UNKNOWN
            found.append(Finding(f"{environment}: {text}", statistic, verdict))
    return found


def is_long(results: Results, returns: Array | None) -> bool:
    """Whether runs are so long that the claim is about them; the last window may be missing."""
    return returns is not None and (returns.shape[1] + 1) * results.window > LONG


# --------------------------------------------------------------------------------- pages
def numbers(results: Results) -> list[str]:
    """The table of an environment's arms, in Markdown."""
    columns = ("peak", "final", "drop", "fall [95%]", "gain [95%]")
    lines = [f"| method | seeds | {' | '.join(columns)} |", "|---|---:|" + "---:|" * len(columns)]
    for arm in EXPERIMENTS[results.name].arms:
        returns = curves(results, arm.name)
        if returns is None:
            continue
        found = over_seeds([collapse(curve) for curve in returns])
        cells = [_interval(each) for each in found.values()]
        cells += [_percent(fall(returns)), _percent(gain(returns))]
        lines.append(f"| {arm.title} | {len(returns)} | {' | '.join(cells)} |")
    note = (
        "Returns of episodes, means over seeds with Student's 95% intervals. Peak is the best "
        "tenth of each run, final the last one, drop their difference, which noise alone makes "
        "larger than 0. Fall is the last tenth less the tenth that is the best of the other "
        "seeds, gain the last tenth less the middle of the run, both in percent of what was "
        "learned (`upgd/paper/policy_collapse.py`)."
    )
    return [*lines, "", note]


def _interval(found: Interval) -> str:
    mean, low, high = (f"{x:.0f}".replace("-", "−") for x in found)
    return mean if np.isnan(found.low) else f"{mean} [{low}, {high}]"


def _percent(found: Interval | None) -> str:
    if found is None:
        return "-"
    mean, low, high = (f"{100 * x:+.1f}".replace("-", "−") for x in found)
    return f"{mean} [{low}, {high}]"


# -------------------------------------------------------------------------------- drawing
def draw_returns(
    axes: Any, arms: Mapping[str, str], results: Results, colours: Mapping[str, str]
) -> None:
    """Return against steps: mean over seeds with its 95% interval, or two seeds by themselves.

    Axes show where the seeds are: of few seeds an interval may reach far beyond.
    """
    ends_of_axis: list[float] = []
    for arm, title in arms.items():
        returns = curves(results, arm)
        if returns is None:
            continue
        steps = results.window * np.arange(1, returns.shape[1] + 1) / 1e6
        ends_of_axis += [float(returns.min()), float(returns.max())]
        mean, colour = returns.mean(0), colours.get(arm, "black")
        axes.plot(steps, mean, color=colour, label=title, linewidth=1.3)
        if len(returns) == 2:  # an interval would be twelve times as wide as they are apart
            axes.plot(steps, returns.T, color=colour, alpha=0.35, linewidth=0.6)
        elif len(returns) > 2:
            ends = np.array([metrics.mean_interval(column)[1:] for column in returns.T])
            axes.fill_between(
                *(steps, ends[:, 0], ends[:, 1]), color=colour, alpha=0.2, linewidth=0
            )
    if ends_of_axis:
        low, high = min(ends_of_axis), max(ends_of_axis)
        room = 0.05 * max(high - low, 1e-6)
        axes.set_ylim(low - room, high + room)
    axes.set(xlabel="Steps (millions)", ylabel="Mean return of episodes")
