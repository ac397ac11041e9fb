"""Figure 8 and claim 9: does PPO's return fall with long training, and does AdaUPGD prevent it?

The highest point of a noisy curve lies above its end even where nothing falls, so "peak less final"
would find a collapse in noise alone. Here the peak of a seed is taken where the *other* seeds have
theirs:

* a *tenth* is a tenth of a run, in consecutive windows;
* for each seed, the tenth is chosen in which the mean over all other seeds is highest; the seed's
  own *fall* is its mean in the last tenth less that in the chosen one. Its own noise had no part in
  the choice, so the expected fall of a curve that is level is 0, whatever its noise. Where returns
  rise to the end the chosen tenth is the last and the fall is exactly 0;
* the *gain* of a seed is its mean in the last tenth less that in the fifth of the run around its
  middle; nothing is chosen;
* both are shares of what was *learned*: the mean over seeds of the chosen tenth less the first
  window. Nothing was learned, and so nothing can be said, unless every seed's chosen tenth is above
  its first window, or the 95% interval of the difference is above 0.

Seeds choose for each other, so their falls are not independent, and Student's interval of their
mean is too narrow: of noise around a level curve it lies below 0 in 4% to 6% of cases, not in 2.5%.
The interval of the fall is therefore the jackknife's: the share is computed once more without each
seed, choices and all, and Student's quantile is taken times the standard error that follows (2.1%
to 2.7%, with 5 to 40 seeds). A fall of 0 [0, 0] is one where every choice is the last tenth,
whoever is left out. For the gain nothing is chosen, and its interval is Student's. Of fewer than
three seeds there are no intervals.

An agent that diverged has no return any more. It counts as one that collapsed: from the window on
in which it diverged, with the return of its first window (or, if it had none, its arm's mean).

Adam *falls* if the 95% interval of its fall lies below 0, and does not if it reaches 0 and lies
above −5%. AdaUPGD *keeps improving* if the interval of its gain lies above 0 and that of its fall
does not lie below, and does not if it falls, or if its gain reaches 0 (or lies below) and is less
than 5%. In between it is open. The 5% are ours. The claim is about long training: runs shorter than
:data:`LONG` steps give statistics and no verdict.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.metrics import FEWEST, Interval
from upgd.paper import evidence as ev
from upgd.paper.evidence import All
from upgd.paper.experiments import (
    AGENT_RIVALS,
    AGENT_STEPS,
    ENVIRONMENTS,
    EXPERIMENTS,
    agents_name,
)
from upgd.paper.results import Results
from upgd.paper.verdicts import NO, PERCENT, UNKNOWN, UP, YES, Finding, Verdict
from upgd.rl.collapse import NAMES, collapse, filled, over_seeds, tenths, width
from upgd.rl.ppo import Settings
from upgd.rl.runs import ITERATIONS

Array = NDArray[np.float64]
LONG = AGENT_STEPS
"""The fewest steps of a long run: the experiments' full scale."""
HARDLY = 0.05
"""The smallest fraction that counts as a fall or a gain."""
OURS = f"ours: no if by less than {HARDLY:.0%}"
METRIC = "return"


# ---------------------------------------------------------------------------- statistics
def curves(results: Results | None, arm: str) -> Array | None:
    """An arm's mean returns, a row per seed and a column per window; None if there are none."""
    if results is None:
        return None
    found = {seed: filled(x) for seed, x in results.of(arm, METRIC).items() if np.isfinite(x).any()}
    if not found:
        return None
    began = np.array([np.mean([curve[0] for curve in found.values()])])
    windows = max(len(x) for each in results.arms for x in results.of(each, METRIC).values())
    for seed in results.diverged.get(arm, ()):
        curve = found.get(seed, began)
        found[seed] = np.append(curve, np.full(windows - len(curve), curve[0]))
    shortest = min(map(len, found.values()))
    return np.stack([found[seed][:shortest] for seed in sorted(found)])


def peaks(returns: Array) -> Array:
    """Each seed's mean in the best tenth of all other seeds."""
    means = tenths(returns)
    best = (means.sum(0) - means).argmax(1)
    return np.asarray(means[np.arange(len(means)), best])


def learned(returns: Array) -> Array:
    """Each seed's peak minus its first window."""
    return np.asarray(peaks(returns) - returns[:, 0])


def has_learned(returns: Array) -> bool:
    """Whether the agents have learned anything that they can lose."""
    found = learned(returns)
    return bool((found > 0).all() or metrics.mean_interval(found).low > 0)


def falls(returns: Array) -> Array:
    """Each seed's last tenth minus its peak."""
    return np.asarray(tenths(returns)[:, -1] - peaks(returns))


def gains(returns: Array) -> Array:
    """Each seed's last tenth minus the fifth around the middle."""
    windows = returns.shape[1]
    middle = returns[:, int(0.4 * windows) : max(int(0.6 * windows), int(0.4 * windows) + 1)]
    return np.asarray(tenths(returns)[:, -1] - middle.mean(1))


def fall(returns: Array | None) -> Interval | None:
    """The mean fall as a fraction of what was learned."""
    if returns is None or not can_tell(returns):
        return None
    return metrics.jackknife(lambda some: float(shares(falls, some).mean()), returns)


def gain(returns: Array | None) -> Interval | None:
    """The mean gain as a fraction of what was learned."""
    if returns is None or not can_tell(returns):
        return None
    return metrics.mean_interval(shares(gains, returns))


def can_tell(returns: Array) -> bool:
    """Whether there are enough seeds, and agents that have learned."""
    return len(returns) >= FEWEST and has_learned(returns)


def shares(values: Callable[[Array], Array], returns: Array) -> Array:
    """Each seed's fall or gain as a fraction of what was learned."""
    return np.asarray(values(returns) / learned(returns).mean())


def final_lead(results: Results, arm: str, other: str) -> tuple[float, float, Interval] | None:
    """The last tenths of two arms' long runs, of seeds that both have, and their difference.

    None with fewer than :data:`FEWEST` such seeds, with shorter runs, or if an agent diverged.
    """
    both = [curves(results, each) for each in (arm, other)]
    if any(x is None or not is_long(results, x) for x in both) or {arm, other} & {
        *results.diverged
    }:
        return None
    ends = [
        {s: float(np.nanmean(x[-width(len(x)) :])) for s, x in results.of(each, METRIC).items()}
        for each in (arm, other)
    ]
    common = sorted(ends[0].keys() & ends[1].keys())
    if len(common) < FEWEST:
        return None
    mine, theirs = (np.array([end[s] for s in common]) for end in ends)
    return float(mine.mean()), float(theirs.mean()), metrics.mean_interval(mine - theirs)


# ----------------------------------------------------------------------------- statements
def findings(all_: All) -> list[Finding]:
    """The statements of claim 9, environment by environment."""
    found = []
    for environment in ENVIRONMENTS:
        name = agents_name(environment)
        results = all_.get(name)
        for arm in EXPERIMENTS[name].arms:
            if arm.name in AGENT_RIVALS:  # the paper says nothing about them
                continue
            returns = curves(results, arm.name)
            finding = _judged(arm.name, returns)
            text = f"{environment}: {arm.title} {finding.statement}"
            if results is not None and returns is not None:
                gone = len(results.diverged.get(arm.name, ()))
                text += f" ({gone} of {len(returns)} agents diverged)" if gone else ""
                if not is_long(results, returns):
                    text, finding = f"{text} (too short to tell)", finding.decided(UNKNOWN)
            found.append(finding._replace(statement=text))
    return found


PARTS = {"adam": "collapse", "ada-upgd": "improves"}
"""The paper's words on an arm; it has none on others."""


def _judged(arm: str, returns: Array | None) -> Finding:
    """The statement on an arm. What counts as a fall or a gain is ours."""
    fallen, risen = fall(returns), gain(returns)
    part = PARTS.get(arm, "others")

    def falls_(hardly: float) -> Verdict:
        return ev.falling(fallen, hardly)

    def rises(hardly: float) -> Verdict:
        return NO if falls_(hardly) == YES else ev.rising(risen, hardly)

    if arm.startswith("ada-upgd"):
        shown_ = fallen if falls_(HARDLY) == YES else risen
        text = "keeps improving" + (" (its fall)" if shown_ is fallen and fallen else "")
        text += f" ({OURS})"
        judge = rises
    else:
        text, shown_, judge = f"falls after its peak ({OURS})", fallen, falls_
    return Finding(text, shown_, judge(HARDLY), PERCENT, UP, part, ev.scaled(judge, HARDLY))


def is_long(results: Results, returns: Array) -> bool:
    """Whether runs are long enough, but for an incomplete last window, which is not measured."""
    return bool(returns.shape[1] * results.window > LONG - ITERATIONS * Settings().steps)


# --------------------------------------------------------------------------------- pages
def numbers(results: Results) -> list[str]:
    """The table of an environment's arms, in Markdown."""
    columns = ("peak", "final", "drop", "fall [95%]", "gain [95%]")
    lines = [f"| method | seeds | {' | '.join(columns)} |", "|---|---:|" + "---:|" * len(columns)]
    for arm in EXPERIMENTS[results.name].arms:
        returns = curves(results, arm.name)
        if returns is None:
            continue
        gone = len(results.diverged.get(arm.name, ()))
        seeds = f"{len(returns)} ({gone} diverged)" if gone else str(len(returns))
        cells = [seeds, *_returns(returns)]
        cells += [_percent(fall(returns), falls, returns), _percent(gain(returns), gains, returns)]
        lines.append(f"| {arm.title} | {' | '.join(cells)} |")
    note = (
        "Returns of episodes, means over seeds with Student's 95% intervals; of fewer than "
        f"{FEWEST} seeds, those of each. Peak is the best tenth of each run, final the last "
        "one, drop their difference, which noise alone makes larger than 0. Fall is the last "
        "tenth less the tenth that is the best of the other seeds, gain the last tenth less the "
        "middle of the run, both in percent of what was learned; the interval of the fall is the "
        "jackknife's (`upgd/paper/policy_collapse.py`). A fall of 0 [0, 0] is one where the best "
        "tenth is the last for all seeds; a dash says that nothing was learned, or that there is "
        "one seed."
    )
    if results.diverged:
        note += " An agent that diverged counts as one that is back where it began."
    return [*lines, "", note]


def _returns(returns: Array) -> list[str]:
    """The peak, final return and drop."""
    found = [collapse(curve) for curve in returns]
    if len(found) < FEWEST:
        return [", ".join(_number(each[name]) for each in found) for name in NAMES]
    cells = []
    for interval in over_seeds(found).values():
        mean, low, high = map(_number, interval)
        cells.append(f"{mean} [{low}, {high}]")
    return cells


def _percent(found: Interval | None, values: Callable[[Array], Array], returns: Array) -> str:
    """A fraction with its interval, or each seed's where they are few."""
    if len(returns) < 2 or not has_learned(returns):
        return "-"
    if found is None:
        return ", ".join(_number(100 * x, "+.1f") for x in shares(values, returns))
    mean, low, high = (_number(100 * x, "+.1f") for x in found)
    return f"{mean} [{low}, {high}]"


def _number(value: float, how: str = ".0f") -> str:
    return f"{value:{how}}".replace("-", "−")
