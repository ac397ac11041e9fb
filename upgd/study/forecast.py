"""How much time, memory and disk runs will take.

The pace is that of runs in the ledger with the same engine, device, problem and options, if there
are any; else some of the runs are started and timed for a second or two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from upgd.engine import memory
from upgd.ledger.ledger import Ledger
from upgd.ledger.records import Result, Run, Series
from upgd.ledger.spec import RunSpec, Scalar
from upgd.study.kinds import Pace, kind_of
from upgd.study.learners import EAGER, at_a_time, device_name, spread
from upgd.study.options import Options, check_device
from upgd.study.prepare import plan
from upgd.text import clock, count, short

NETWORK = ("hidden", "layer_norm", "input_norm")  # options that change how fast runs are
SAMPLE = 64  # runs that are written to a ledger to see how much room they take


@dataclass(frozen=True)
class Footprint:
    """Bytes that runs take."""

    runs: int  # how many run at a time
    stack: int  # bytes of memory for them together, at most
    ledger: int  # bytes on disk for the results of one
    checkpoint: int  # bytes on disk for one under way, at most


def pace(specs: Sequence[RunSpec], runs: Iterable[Run], options: Options) -> Pace:
    """How fast runs of one kind will be; `runs` are those of the ledger.

    Raises SpecError where nothing is known and the device is not here.
    """
    kind, device = kind_of(specs[0].problem), options.device
    group = kind.group(specs[0], options)
    if group is not None:
        recorded = _recorded(specs, runs, kind.engine_name(specs[0], group[0], device), device)
        if recorded is not None:
            return recorded
    check_device(device)
    return kind.measure_pace(specs, options)


def forecast_lines(left: Sequence[RunSpec], known: Iterable[Run], options: Options) -> list[str]:
    """Lines that say how long runs will take here; `known` are runs of ledgers."""
    lines, seconds, known = [], 0.0, list(known)
    alike: dict[tuple[str, tuple[Scalar, ...], str], list[RunSpec]] = {}
    for spec in left:
        network = tuple(spec.options.get(name) for name in NETWORK)
        alike.setdefault((spec.problem, network, _engine(spec, options)), []).append(spec)
    for (problem, network, _), some in alike.items():
        norms = [name for name, given in zip(NETWORK, network, strict=True) if given is True]
        found = pace(some, known, options)
        steps = sum(spec.steps for spec in some)
        seconds += steps / found.rate
        runs = count(len(some), kind_of(problem).noun)
        work = f"{short(steps)} learner-steps at {short(found.rate)} per second"
        named = " + ".join([problem, *norms])
        lines.append(f"  {named}: {runs}, {work} ({found.source})")
    if left:
        alone = "" if any(kind_of(p).local_only for p, *_ in alike) else " in one process"
        lines.append(f"time: about {clock(seconds)}{alone}")
    return lines


def _engine(spec: RunSpec, options: Options) -> str:
    """What will run it: runs of one problem may need different stacks."""
    kind = kind_of(spec.problem)
    group = kind.group(spec, options)
    return "" if group is None else kind.engine_name(spec, group[0], options.device)


def footprint(specs: Sequence[RunSpec], options: Options) -> Footprint:
    """How much memory learners take at a time, and how much disk."""
    spec, device = specs[0], options.device
    problem, setting = plan(spec)
    stream = problem.make(spec.seed, options.data_dir)
    group = kind_of(spec.problem).group(spec, options)
    some = spread(specs, 1 if group is None or group[0] == EAGER else at_a_time(device))
    settings = [plan(one)[1] for one in some]
    need = memory.need(problem, settings, stream, spec.steps, device)
    count = need.fitting(memory.free_bytes(device))
    inputs = min(count * need.inputs, need.most_inputs)
    stack = need.shared + sum(need.each[:count]) + inputs
    windows = spec.steps * setting.batch // setting.window
    metrics = 2 + (problem.loss == "cross_entropy") + (16 if setting.stride else 0)
    return Footprint(count, stack, ledger_bytes(spec, windows, metrics), max(need.each))


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
    """The size of a ledger's file once its log is written back."""
    with ledger._database.read() as db:
        [pages], [size] = (db.execute(f"PRAGMA page_{x}").fetchone() for x in ("count", "size"))
    return int(pages) * int(size)


def _recorded(
    specs: Collection[RunSpec], runs: Iterable[Run], engine: str, device: str
) -> Pace | None:
    """The pace of runs in the ledger: the mean over methods of what all their runs reached."""
    first = next(iter(specs))
    methods = {spec.method for spec in specs}
    paces: dict[str, list[float]] = {}
    for run in runs:
        spec, result = run.spec, run.result
        if result is None or run.state != "done" or result.wall <= 0 or spec.method not in methods:
            continue
        place = device if engine == EAGER else device_name(device)
        if (result.engine, result.device) != (engine, place) or spec.problem != first.problem:
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
