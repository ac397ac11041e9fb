"""What a sweep would take: how many runs, how long, how much memory and disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upgd.lab.sweeping import PlannedSweep
from upgd.ledger import Run, RunSpec
from upgd.study import forecast
from upgd.study import sweeps as halving
from upgd.study.options import Options
from upgd.study.search import Space
from upgd.study.selection import Family
from upgd.study.sweeps import OVER, Sweep
from upgd.text import clock, count, short


@dataclass
class Amount:
    """What is to be done.

    Attributes:
        sets: By method, how many.
        runs: In all.
        left: Those that are not over.
        steps: Of those, all together.
        rungs: Of halving, how many sets of each method run for how many steps.
    """

    sets: dict[str, int]
    runs: int = 0
    left: int = 0
    steps: int = 0
    rungs: dict[int, dict[str, int]] = field(default_factory=dict)

    def add(self, runs: int, over: int, steps: int) -> None:
        """Count so many runs of so many steps each."""
        left = max(0, runs - over)
        self.runs += runs
        self.left += left
        self.steps += left * steps


def whole_amount(plan: Sweep, known: Iterable[Run]) -> Amount:
    """All sets at full length."""
    amount, over = Amount(_sizes(plan)), over_keys(known)
    specs = plan.specs()
    amount.add(len(specs), sum(spec.key in over for spec in specs), plan.steps)
    return amount


def halving_amount(plan: Sweep, known: Iterable[Run], eta: int, window: int) -> Amount:
    """The rungs; which sets will reach the later ones is not known yet, only how many."""
    amount, over = Amount(_sizes(plan), rungs=halving.schedule(plan, eta, window)), over_keys(known)
    hypers = plan.hypers()
    for steps, sizes in amount.rungs.items():
        for method, size in sizes.items():
            specs = plan.specs(steps, {method: hypers[method]})
            amount.add(size * len(plan.seeds), sum(spec.key in over for spec in specs), steps)
    return amount


def search_amount(
    plan: Sweep, known: Iterable[Run], spaces: Mapping[str, Space], sets: int
) -> Amount:
    """So many sets of each method that lie between the values of the grid."""
    amount = Amount(dict.fromkeys(plan.sets, sets))
    runs = [run for run in known if run.state in OVER and run.spec.seed in plan.seeds]
    for method, space in spaces.items():
        family = plan.family(method)
        mine = [tuple(run.spec.hyper.items()) for run in runs if Family.of(run.spec) == family]
        amount.add(sets * len(plan.seeds), len(space.searched(mine)), plan.steps)
    return amount


def _sizes(plan: Sweep) -> dict[str, int]:
    return {method: len(sets) for method, sets in plan.sets.items()}


def over_keys(known: Iterable[Run]) -> set[str]:
    """The keys of runs that need no more work: done or diverged."""
    return {run.key for run in known if run.state in OVER}


def outlook(
    folder: Path, planned: PlannedSweep, options: Options, known: Iterable[Run]
) -> dict[str, Any]:
    """What a sweep would take.

    Args:
        folder: The study's.
        planned: The sweep.
        options: How runs are executed.
        known: The runs of the study.
    """
    sweep = planned.sweep
    rows = {sweep.family(name).method for name in sweep.sets}
    runs = [run for run in known if run.spec.method in rows]
    if planned.halving:
        amount = halving_amount(sweep, runs, planned.halving, planned.window)
    elif planned.search:
        amount = search_amount(sweep, runs, planned.spaces, planned.search)
    else:
        amount = whole_amount(sweep, runs)
    over = over_keys(runs)
    specs = [spec for spec in sweep.specs() if spec.key not in over] or sweep.specs()
    facts: dict[str, Any] = {
        "study": str(folder),
        "sets": amount.sets,
        "seeds": len(sweep.seeds),
        "steps": sweep.steps,
        "runs": amount.runs,
        "to_do": amount.left,
        "learner_steps": amount.steps,
        "rungs": {str(steps): sizes for steps, sizes in amount.rungs.items()},
    }
    return facts | (_costs(specs, runs, options, amount) if amount.left else {})


def _costs(
    specs: list[RunSpec], known: list[Run], options: Options, amount: Amount
) -> dict[str, Any]:
    pace = forecast.pace(specs, known, options)
    room = forecast.footprint(specs, options)
    return {
        "seconds": amount.steps / pace.rate,
        "steps_per_second": pace.rate,
        "pace": pace.source,
        "runs_at_a_time": room.runs,
        "memory_bytes": room.stack,
        "ledger_bytes": room.ledger * amount.runs,
        "checkpoint_bytes": room.checkpoint * room.runs,
    }


def lines(facts: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    sets = ", ".join(f"{name} {count(size, 'set')}" for name, size in facts["sets"].items())
    lines = [
        f"{sets}; {count(facts['seeds'], 'seed')}, {facts['steps']} steps",
        f"{facts['to_do']} of {count(facts['runs'], 'run')} to do in {facts['study']}",
    ]
    for steps, sizes in facts["rungs"].items():
        at = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        lines.append(f"  {steps} steps: {at}")
    if facts["to_do"]:
        memory, ledger, checkpoints = (
            f"{short(facts[f'{name}_bytes'])}B" for name in ("memory", "ledger", "checkpoint")
        )
        lines += [
            f"time: about {clock(facts['seconds'])} in one process: "
            f"{short(facts['learner_steps'])} learner-steps at "
            f"{short(facts['steps_per_second'])} per second ({facts['pace']})",
            f"memory: {memory} for {count(facts['runs_at_a_time'], 'run')} at a time",
            f"disk: {ledger} for the results of all, {checkpoints} for checkpoints on the way",
        ]
    return lines
