"""``upgd sweep --dry-run``: how many runs, how long, how much memory and disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from upgd.cli.app import out, printable
from upgd.cli.numbers import clock, count, short
from upgd.cli.working import Work
from upgd.study import Ledger, Run, RunSpec, forecast, halving
from upgd.study.ledger import NAME
from upgd.study.search import Space
from upgd.study.selection import Family
from upgd.study.sweeps import OVER, Sweep


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


def known_runs(folder: Path, plan: Sweep) -> list[Run]:
    """What a study has of a sweep's methods; nothing where there is no study yet."""
    if not (folder / NAME).exists():
        return []
    with Ledger.open(folder, create=False, read_only=True) as ledger:
        rows = {plan.family(name).method for name in plan.sets}
        return [run for run in ledger.runs(problem=plan.problem) if run.spec.method in rows]


def whole_amount(plan: Sweep, known: Iterable[Run]) -> Amount:
    """All sets at full length."""
    amount, over = Amount(_sizes(plan)), _over(known)
    specs = plan.specs()
    amount.add(len(specs), sum(spec.key in over for spec in specs), plan.steps)
    return amount


def halving_amount(plan: Sweep, known: Iterable[Run], eta: int, window: int) -> Amount:
    """The rungs; which sets will reach the later ones is not known yet, only how many."""
    amount, over = Amount(_sizes(plan), rungs=halving.schedule(plan, eta, window)), _over(known)
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


def _over(known: Iterable[Run]) -> set[str]:
    return {run.key for run in known if run.state in OVER}


def show_outlook(
    folder: Path, plan: Sweep, how: Work, known: list[Run], amount: Amount, as_json: bool
) -> None:
    """Print what a sweep would take."""
    over = _over(known)
    specs = [spec for spec in plan.specs() if spec.key not in over] or plan.specs()
    facts: dict[str, Any] = {
        "study": str(folder),
        "sets": amount.sets,
        "seeds": len(plan.seeds),
        "runs": amount.runs,
        "to_do": amount.left,
        "learner_steps": amount.steps,
        "rungs": {str(steps): sizes for steps, sizes in amount.rungs.items()},
    }
    if amount.left:
        facts |= _costs(specs, known, how, amount)
    if as_json:
        print(json.dumps(facts))
        return
    for line in _lines(facts, plan):
        out.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True)


def _costs(specs: list[RunSpec], known: list[Run], how: Work, amount: Amount) -> dict[str, Any]:
    pace = forecast.pace(specs, known, how.device, how.engine, how.data_dir)
    room = forecast.room(specs, how.device, how.engine, how.data_dir)
    return {
        "seconds": amount.steps / pace.rate,
        "steps_per_second": pace.rate,
        "pace": pace.source,
        "runs_at_a_time": room.runs,
        "memory_bytes": room.stack,
        "ledger_bytes": room.ledger * amount.runs,
        "checkpoint_bytes": room.checkpoint * room.runs,
    }


def _lines(facts: dict[str, Any], plan: Sweep) -> list[str]:
    sets = ", ".join(f"{name} {count(size, 'set')}" for name, size in facts["sets"].items())
    lines = [
        f"{sets}; {count(facts['seeds'], 'seed')}, {plan.steps} steps",
        f"{facts['to_do']} of {count(facts['runs'], 'run')} to do in {facts['study']}",
    ]
    for steps, sizes in facts["rungs"].items():
        at = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        lines.append(f"  {steps} steps: {at}")
    if facts["to_do"]:
        memory, ledger, checkpoints = (
            decimal(int(facts[f"{name}_bytes"])) for name in ("memory", "ledger", "checkpoint")
        )
        lines += [
            f"time: about {clock(facts['seconds'])} in one process: "
            f"{short(facts['learner_steps'])} learner-steps at "
            f"{short(facts['steps_per_second'])} per second ({facts['pace']})",
            f"memory: {memory} for {count(facts['runs_at_a_time'], 'run')} at a time",
            f"disk: {ledger} for the results of all, {checkpoints} for checkpoints on the way",
        ]
    return lines
