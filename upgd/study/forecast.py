"""How long runs will take, how much memory and how much disk, before any of them begins.

The pace is that of runs in the ledger that the same engine did on the same device, where there are
any of the same problem and options; else some of the runs are begun and timed for a second or two.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from upgd.engine import memory
from upgd.engine.batched import BatchedRun, Kind, kind_of
from upgd.study.backlog import MOST_ON_CUDA, PER_CORE
from upgd.study.ledger import Ledger
from upgd.study.prepare import plan, prepare
from upgd.study.records import Result, Run, Series
from upgd.study.spec import RunSpec

SECONDS = 1.5
SAMPLE = 64
"""Runs that are written to a ledger to see how much room they take."""


@dataclass(frozen=True)
class Pace:
    """Learner-steps per second, and where that is known from."""

    rate: float
    source: str


@dataclass(frozen=True)
class Room:
    """Bytes that runs take.

    Attributes:
        runs: How many run at a time.
        stack: Bytes of memory for them together, at most.
        ledger: Bytes on disk for the results of one.
        checkpoint: Bytes on disk for one under way, at most.
    """

    runs: int
    stack: int
    ledger: int
    checkpoint: int


def pace(
    specs: Sequence[RunSpec],
    runs: Iterable[Run],
    device: str = "cpu",
    engine: str = "auto",
    data_dir: str | os.PathLike[str] | None = None,
) -> Pace:
    """How fast these runs will be.

    Args:
        specs: What is to be run; at least one.
        runs: What the ledger has.
        device: Where.
        engine: ``"auto"``, ``"batched"`` or ``"eager"``.
        data_dir: Where data are looked for first.
    """
    kind = _kind(specs[0], device, engine)
    recorded = _recorded(specs, runs, _name(device), f"batched-{kind}" if kind else "eager")
    if recorded is not None:
        return recorded
    if kind is None:
        return _timed_eagerly(specs[0], device, data_dir)
    return _timed(_spread(specs, at_a_time(device)), device, data_dir)


def room(
    specs: Sequence[RunSpec],
    device: str = "cpu",
    engine: str = "auto",
    data_dir: str | os.PathLike[str] | None = None,
) -> Room:
    """How much memory these runs take at a time, and how much disk."""
    spec = specs[0]
    problem, setting = plan(spec)
    stream = problem.make(spec.seed, data_dir)
    batched = _kind(spec, device, engine) is not None
    some = _spread(specs, at_a_time(device) if batched else 1)
    settings = [plan(one)[1] for one in some]
    need = memory.need(problem, settings, stream, spec.steps, device)
    count = need.fitting(memory.free_bytes(device))
    inputs = min(count * need.inputs, need.most_inputs)
    stack = need.shared + sum(need.each[:count]) + inputs
    windows = spec.steps * setting.batch // setting.window
    metrics = 2 + (problem.loss == "cross_entropy") + (7 if setting.stride else 0)
    return Room(count, stack, ledger_bytes(spec, windows, metrics), max(need.each))


def ledger_bytes(spec: RunSpec, windows: int, metrics: int) -> int:
    """Bytes that a run with its results takes in a ledger, by writing some to one."""
    values = np.linspace(0, 1, max(1, windows))
    series = {f"metric_{i}": Series(values, 1) for i in range(metrics)}
    summary = dict.fromkeys((*series, "steps", "forgetting"), 0.123456789)
    facts = {"upgd": "0.0.0", "torch": "0.0.0", "numpy": "0.0.0", "python": "3.00.00"}
    result = Result("batched-dense", versions=facts, host=facts, summary=summary, series=series)
    with tempfile.TemporaryDirectory() as folder, Ledger.open(folder) as ledger:
        empty = _size(ledger)
        ledger.add(replace(spec, seed=seed) for seed in range(SAMPLE))
        for claim in ledger.claim("forecast", 60, limit=SAMPLE):
            ledger.finish(claim, result)
        return max(0, _size(ledger) - empty) // SAMPLE


def _size(ledger: Ledger) -> int:
    """The size of a ledger's file and of its log, as it will be once that is written back."""
    with ledger._database.read() as db:
        pages, size = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
        )
    return int(pages) * int(size)


def _kind(spec: RunSpec, device: str, engine: str) -> Kind | None:
    """Which stack runs it; None for the eager engine."""
    return None if engine == "eager" else kind_of(*plan(spec), device)


def at_a_time(device: str) -> int:
    """How many runs go together where memory allows it."""
    if torch.device(device).type == "cuda":
        return MOST_ON_CUDA
    return PER_CORE * torch.get_num_threads()


def _name(device: str) -> str:
    """A device as results have it."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return device


def _spread(specs: Sequence[RunSpec], count: int) -> list[RunSpec]:
    """So many of the runs, taken evenly, so that each method is there by its share."""
    if len(specs) <= count:
        return list(specs)
    return [specs[i * len(specs) // count] for i in range(count)]


def _recorded(
    specs: Collection[RunSpec], runs: Iterable[Run], device: str, engine: str
) -> Pace | None:
    """The pace of runs in the ledger: the mean over methods of what all their runs reached."""
    first = next(iter(specs))
    methods = {spec.method for spec in specs}
    paces: dict[str, list[float]] = {}
    for run in runs:
        spec, result = run.spec, run.result
        if result is None or run.state != "done" or result.wall <= 0 or spec.method not in methods:
            continue
        if (result.engine, result.device) != (engine, device) or spec.problem != first.problem:
            continue
        if spec.options == first.options:
            together = float(result.host.get("runs_in_stack") or 1)
            paces.setdefault(spec.method, []).append(spec.steps * together / result.wall)
    if paces.keys() != methods:
        return None
    weights = [sum(spec.method == method for spec in specs) for method in paces]
    # Steps at a pace each: times add up, so paces are averaged harmonically.
    seconds = [w / float(np.median(p)) for w, p in zip(weights, paces.values(), strict=True)]
    count = sum(map(len, paces.values()))
    return Pace(sum(weights) / sum(seconds), f"the pace of {count} runs of this study")


def _timed(specs: list[RunSpec], device: str, data_dir: Any) -> Pace:
    """Begin a stack and time it, once it is warm."""
    problem = plan(specs[0])[0]
    settings = [plan(spec)[1] for spec in specs]
    streams = [problem.make(spec.seed, data_dir) for spec in specs]
    run = BatchedRun(problem, settings, streams, specs[0].steps, device)
    rate = _time(run.advance, lambda: run.step, specs[0].steps, device) * len(specs)
    return Pace(rate, f"timed now, {len(specs)} runs at a time")


def _timed_eagerly(spec: RunSpec, device: str, data_dir: Any) -> Pace:
    run = prepare(spec, data_dir, device)
    rate = _time(run.advance, lambda: run.step, spec.steps, device)
    return Pace(rate, "timed now, one run at a time")


def _time(advance: Any, step: Any, steps: int, device: str) -> float:
    """Steps per second: after a start that does not count, longer and longer pieces."""
    advance(min(10, max(1, steps // 2)))  # compiles
    piece, best = 10, 0.0
    until = time.monotonic() + SECONDS
    while True:
        first, before = step(), time.monotonic()
        advance(min(piece, steps - first))
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        took = max(time.monotonic() - before, 1e-9)
        if step() > first:
            best = (step() - first) / took  # of the last and longest piece
        piece *= 2
        if step() >= steps or time.monotonic() >= until:
            return max(best, 1e-9)
