"""``upgd sweep --dry-run``: how many runs, how long, how much memory and disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from upgd.cli.app import out, printable
from upgd.cli.numbers import clock, count, short
from upgd.cli.working import Work
from upgd.study import Ledger, Run, RunSpec, forecast, halving
from upgd.study.ledger import NAME
from upgd.study.sweeps import OVER, Sweep


def show_outlook(
    folder: Path,
    plan: Sweep,
    how: Work,
    eta: int | None,
    search: int | None,
    window: int,
    as_json: bool,
) -> None:
    """Print what a sweep would take."""
    known = _known(folder, plan)
    over = {run.key for run in known if run.state in OVER}
    total, left, left_steps, rungs = _amount(plan, over, eta, search, window)
    specs = [spec for spec in plan.specs() if spec.key not in over] or plan.specs()
    facts: dict[str, Any] = {
        "study": str(folder),
        "sets": {name: search or len(mine) for name, mine in plan.sets.items()},
        "seeds": len(plan.seeds),
        "runs": total,
        "to_do": left,
        "learner_steps": left_steps,
        "rungs": {str(steps): sizes for steps, sizes in rungs.items()},
    }
    if left:
        facts |= _costs(specs, known, how, total, left_steps)
    if as_json:
        print(json.dumps(facts))
        return
    for line in _lines(facts, plan):
        out.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True)


def _known(folder: Path, plan: Sweep) -> list[Run]:
    if not (folder / NAME).exists():
        return []
    with Ledger.open(folder, create=False, read_only=True) as ledger:
        return [run for run in ledger.runs(problem=plan.problem) if run.spec.method in plan.sets]


def _amount(
    plan: Sweep, over: set[str], eta: int | None, search: int | None, window: int
) -> tuple[int, int, int, dict[int, dict[str, int]]]:
    """Runs in all, those to do, their steps, and of halving the rungs.

    Of rungs and of a search it is not known yet which sets they will run: runs that are over are
    counted off as far as they are of the first rung's sets.
    """
    seeds = len(plan.seeds)
    if search:
        runs = search * seeds * len(plan.sets)
        return runs, runs, runs * plan.steps, {}
    if not eta:
        specs = plan.specs()
        left = sum(spec.key not in over for spec in specs)
        return len(specs), left, left * plan.steps, {}
    rungs = halving.schedule(plan, eta, window)
    total = left = left_steps = 0
    for steps, sizes in rungs.items():
        every = plan.specs(steps)
        for method, size in sizes.items():
            done = sum(spec.method == method and spec.key in over for spec in every)
            total += size * seeds
            missing = max(0, size * seeds - done)
            left += missing
            left_steps += missing * steps
    return total, left, left_steps, rungs


def _costs(
    specs: list[RunSpec], known: list[Run], how: Work, total: int, steps: int
) -> dict[str, Any]:
    pace = forecast.pace(specs, known, how.device, how.engine, how.data_dir)
    room = forecast.room(specs, how.device, how.engine, how.data_dir)
    return {
        "seconds": steps / pace.rate,
        "steps_per_second": pace.rate,
        "pace": pace.source,
        "runs_at_a_time": room.runs,
        "memory_bytes": room.stack,
        "ledger_bytes": room.ledger * total,
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
