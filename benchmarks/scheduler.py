"""What the scheduler costs: on real stacks, and in a simulation of 1 000 workers and 10^5 runs.

    python benchmarks/scheduler.py [--runs 100000] [--workers 1000] [--seconds 12]
                                   [--rounds 3] [--output docs/benchmarks/scheduler.md]

Simulation: the real driver and the real ledger, on this disk, with workers that only exist on a
clock of their own (tests/simulated.py). They take their time, report every second, die, hang
and run out of memory. Fewer runs are simulated too: what an event costs must not depend on them.

Overhead: the same stack of real runs in this process, by a pool of one local process and by a Ray
cluster of this machine with one actor, in turns; each has compiled its loops before. The goal is
that a pool takes at most 5% longer.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import resource
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from upgd.engine.dense_cpu import cores
from upgd.ledger import Ledger, RunSpec
from upgd.ledger import crash_points as crash
from upgd.ledger.files import write_atomically
from upgd.study.options import Options
from upgd.study.pools import Pool, make_pool
from upgd.study.run import run_pending
from upgd.study.worker import REPORT, Job

sys.path.append(str(Path(__file__).parents[1]))  # python benchmarks/scheduler.py, from anywhere
from tests.simulated import Fate, SimulatedPool

PROBLEM = "label-permuted-digits"
GOAL = 0.05
JOB = 600.0
"""Seconds of a simulated job."""
PAUSE = 60.0
"""Seconds between its checkpoints."""
DIES, HANGS, FULL = 0.02, 0.005, 0.005
"""Parts of the simulated jobs that end so."""


# ------------------------------------------------------------------------------ simulation
@dataclass
class Simulated:
    """What a simulation gave; times in seconds, sizes in bytes."""

    runs: int
    workers: int
    clock: float
    wall: float
    driver: float
    read: float
    events: int
    commits: Counter[str]
    ledger: int
    written: int
    lost: float
    failed: int
    memory: int


class Timed(SimulatedPool):
    """Knows how long the simulation itself took."""

    spent = 0.0

    def events(self, timeout: float) -> Any:
        begin = time.perf_counter()
        try:
            return super().events(timeout)
        finally:
            self.spent += time.perf_counter() - begin

    def start(self, worker: int, job: Job) -> None:
        begin = time.perf_counter()
        super().start(worker, job)
        self.spent += time.perf_counter() - begin


def fates(seed: int) -> Callable[[int, Job], Fate]:
    rng = random.Random(seed)

    def fate(worker: int, job: Job) -> Fate:
        draw, at = rng.random(), rng.random()
        for how, part in (("dies", DIES), ("hangs", HANGS), ("memory", FULL)):
            draw -= part
            if draw < 0 and (how != "memory" or len(job.specs) > 16):
                return Fate(how, at)  # type: ignore[arg-type]
        return Fate()

    return fate


def simulate(runs: int, workers: int, folder: Path) -> Simulated:
    """Drive simulated workers through a study."""
    pool = Timed(workers, lambda job: JOB, fates(0), pause=PAUSE, beat=REPORT, points=400)
    commits: Counter[str] = Counter()

    def count(name: str) -> None:
        if name.endswith(": after commit"):
            commits[name.removesuffix(": after commit")] += 1

    before, crash.point = crash.point, count
    try:
        with Ledger.open(folder, now=pool.clock) as ledger:
            ledger.add(
                RunSpec(PROBLEM, "upgd", {"lr": 0.01}, seed, 100_000, {"window": 500})
                for seed in range(runs)
            )
            commits.clear()
            read = _reading(ledger)
            begin, written = time.perf_counter(), _written()
            tally = run_pending(ledger, pool=pool, clock=pool.clock)
            wall = time.perf_counter() - begin
            written = _written() - written
            assert tally.done + tally.failed == runs, tally
            assert ledger.counts()["done"] == tally.done
    finally:
        crash.point = before
    return Simulated(
        runs,
        workers,
        pool.clock.now,
        wall,
        wall - pool.spent,
        read,
        pool.told,
        commits,
        (folder / "ledger.sqlite").stat().st_size,
        written,
        pool.lost / pool.worked,
        tally.failed,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


def _reading(ledger: Ledger) -> float:
    """Seconds to read and group what is left to do, which happens once."""
    from upgd.study.backlog import Backlog

    begin = time.perf_counter()
    Backlog(ledger, None, "cpu").read()
    return time.perf_counter() - begin


def _written() -> int:
    """Bytes that this process has sent to the disk."""
    try:
        facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(facts["write_bytes"])
    except OSError:
        return 0


def checkpoint_cost(folder: Path, size: int, rounds: int = 30) -> float:
    """Seconds to write a checkpoint of this size durably."""
    content, times = os.urandom(size), []
    for _ in range(rounds):
        begin = time.perf_counter()
        write_atomically(folder / "checkpoint", content)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# -------------------------------------------------------------------------------- overhead
def specs(count: int, steps: int, first: int) -> list[RunSpec]:
    options = {"window": 500, "hidden": "300-150"}
    return [
        RunSpec(PROBLEM, "upgd", {"lr": 0.01}, first + seed, steps, options)
        for seed in range(count)
    ]


@dataclass
class Measured:
    """How long a study took."""

    wall: float
    inside: float
    """Seconds of learning, as the results have them."""


def measure(study: list[RunSpec], do: Callable[[Ledger], Any]) -> Measured:
    """Do a study in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, Ledger.open(folder) as ledger:
        ledger.add(study)
        begin = time.perf_counter()
        do(ledger)
        wall = time.perf_counter() - begin
        walls = [run.result.wall for run in ledger.runs() if run.result is not None]
        assert len(walls) == len(study)
        return Measured(wall, max(walls))


def overhead(seconds: float, rounds: int) -> dict[str, list[Measured]]:
    """The same stack in this process, in a local pool and on Ray, in turns."""
    count = 8 * cores()
    torch.set_num_threads(cores())
    pools: dict[str, Pool] = {on: make_pool(Options(on=on), 1) for on in ("local", "ray")}
    ways: dict[str, Callable[[Ledger], Any]] = {"this process": in_this_process}
    ways |= {on: _by(pool) for on, pool in pools.items()}
    found: dict[str, list[Measured]] = {name: [] for name in ways}
    try:
        for do in ways.values():
            measure(specs(count, 500, 10_000), do)  # compile
        pace = measure(specs(count, 2000, 20_000), in_this_process).inside / 2000
        steps = 500 * max(1, round(seconds / pace / 500))
        for number in range(rounds):
            for name, do in ways.items():
                found[name].append(measure(specs(count, steps, 1000 * number), do))
    finally:
        for pool in pools.values():
            pool.close()
    return found


def in_this_process(ledger: Ledger) -> Any:
    return run_pending(ledger, Options(engine="batched"))


def _by(pool: Pool) -> Callable[[Ledger], Any]:
    return lambda ledger: run_pending(ledger, pool=pool)


# ------------------------------------------------------------------------------------ page
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    found = overhead(given.seconds, given.rounds) if given.rounds else {}
    print("\n".join(_overhead_lines(found)) if found else "", flush=True)
    rows: list[Simulated] = []
    few, many = given.workers // 10, given.workers
    for runs, workers in ((given.runs // 10, few), (given.runs, few), (given.runs, many)):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(simulate(runs, workers, Path(folder)))
            print(rows[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        costs = {size: checkpoint_cost(Path(folder), size) for size in (10_000, 3_400_000)}
    page = describe(rows, costs, found)
    print(page)
    if given.output:
        given.output.write_text(page)


def describe(
    rows: list[Simulated],
    costs: dict[int, float],
    found: dict[str, list[Measured]],
) -> str:
    machine = f"{platform.machine()}, {cores()} cores"
    lines = ["# What the scheduler costs", ""]
    lines += [f"`python benchmarks/scheduler.py`, {machine}, SQLite {sqlite3.sqlite_version},"]
    lines += [f"Python {platform.python_version()}. [What it means](../scale.md).", ""]
    if found:
        lines += _overhead_lines(found)
    lines += ["## Simulated workers", ""]
    lines += [
        f"Stacks of 32 runs, {JOB:.0f} s each on the simulation's clock, "
        f"reports every {REPORT:g} s;",
        f"{DIES:.1%} of the jobs end with a dead worker, {HANGS:.1%} hang, {FULL:.1%} run out of "
        "memory, at a",
        f"random time; checkpoints every {PAUSE:.0f} s (of jobs that end badly; those of others "
        "are not written).",
        "The driver and the ledger are the real ones.",
        "",
        "| | " + " | ".join(f"{r.runs:,} runs, {r.workers:,} workers" for r in rows) + " |",
        "|---|" + "---:|" * len(rows),
    ]
    table: list[tuple[str, Callable[[Simulated], str]]] = [
        ("simulated time", lambda r: f"{r.clock:,.0f} s"),
        ("events", lambda r: f"{r.events:,}"),
        ("driver's own time", lambda r: f"{r.driver:.1f} s"),
        ("of it reading what is left to do", lambda r: f"{r.read:.1f} s"),
        ("per run", lambda r: f"{1e3 * r.driver / r.runs:.2f} ms"),
        ("per event", lambda r: f"{1e6 * r.driver / r.events:.0f} µs"),
        ("part of the simulated time", lambda r: f"{r.driver / r.clock:.1%}"),
        ("transactions", lambda r: f"{sum(r.commits.values()):,}"),
        ("per simulated second", lambda r: f"{sum(r.commits.values()) / r.clock:.1f}"),
        ("claims", lambda r: f"{r.commits['claim']:,}"),
        ("settlements", lambda r: f"{r.commits['settle']:,}"),
        ("ledger", lambda r: f"{r.ledger / 1e6:.1f} MB"),
        ("per run", lambda r: f"{r.ledger / r.runs:,.0f} bytes"),
        ("written to the disk in all", lambda r: f"{r.written / 1e6:,.0f} MB"),
        ("work lost and done again", lambda r: f"{r.lost:.2%}"),
        ("runs given up", lambda r: f"{r.failed}"),
        ("memory, with the simulation", lambda r: f"{r.memory / 1e3:.0f} MB"),
    ]
    lines += [f"| {name} | " + " | ".join(map(tell, rows)) + " |" for name, tell in table]
    lines += [""]
    told = ", ".join(f"{size / 1e6:g} MB {1e3 * cost:.1f} ms" for size, cost in costs.items())
    lines += [f"A checkpoint on this disk, synced: {told} (medians of 30).", ""]
    return "\n".join(lines)


def _overhead_lines(found: dict[str, list[Measured]]) -> list[str]:
    own = statistics.median(one.wall for one in found["this process"])
    lines = ["## A stack of real runs", ""]
    lines += [
        f"{8 * cores()} runs of `upgd` on {PROBLEM} with 300-150 hidden units; medians of "
        f"{len(found['local'])} rounds in turns,",
        "workers warm. Outside: the part of the time in which the stack does not learn (claim, "
        "way to the",
        "worker, making the stack, way back, commit).",
        "",
        "| | whole | against this process | outside |",
        "|---|---:|---:|---:|",
    ]
    worst = 0.0
    for name, all_of in found.items():
        wall = statistics.median(one.wall for one in all_of)
        outside = statistics.median(1 - one.inside / one.wall for one in all_of)
        worst = max(worst, wall / own - 1)
        lines += [f"| {name} | {wall:.2f} s | {wall / own - 1:+.1%} | {outside:.1%} |"]
    verdict = "reached" if worst <= GOAL else "not reached"
    return [
        *lines,
        "",
        f"Goal: at most {GOAL:.0%} more than this process; {worst:+.1%}: {verdict}.",
        "",
    ]


if __name__ == "__main__":
    main()
