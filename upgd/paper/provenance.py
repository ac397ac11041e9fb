"""The provenance of committed numbers: ``provenance.json``, beside every table of results.

It records what ran, on which data, with which versions, where, for how long, and how to reproduce
it. It names no host and no path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from upgd.ledger import Run, RunSpec, write_atomically
from upgd.ledger.canonical import display_name
from upgd.metrics import DIAGNOSTICS
from upgd.paper.experiments import Arm, Experiment
from upgd.paper.figures import FIGURES
from upgd.paper.results import Found
from upgd.rl.runs import PREFIX
from upgd.streams import DataNotFoundError, check
from upgd.study.kinds import kind_of
from upgd.text import ranges

NAME = "provenance.json"
CPU = "cpu"
_SEEDS = ("seeds", "diverged")


@dataclass(frozen=True)
class Portion:
    """Runs with the same device, engine and versions."""

    device: str
    engine: str
    versions: Mapping[str, str]  # of libraries, and upgd's commit if it is known
    runs: int
    seconds: float  # time of the work; runs of one stack share it
    began: str  # the day on which the first run started
    ended: str  # the day on which the last run ended
    dtype: str = "float32"  # the type of the weights
    rules: int = 0  # the version of the update rules; 0 where that does not apply

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.device == CPU or self.device.startswith(f"{CPU} (")


@dataclass(frozen=True)
class Provenance:
    """The provenance of a table; `seeds` are the finished ones, by arm."""

    experiment: str
    command: str  # the command that reproduces it
    steps: int  # of each run; 0 if it has none
    seeds: Mapping[str, Sequence[int]]
    learner_steps: int  # steps of all runs
    seconds: float  # time of the work
    parts: Sequence[Portion]  # groups of runs, oldest first
    problem: str = ""  # the problem, if it is a registered one
    options: Mapping[str, Any] = field(default_factory=dict)  # options of all runs
    data: Mapping[str, Any] | None = None  # name, samples and checksum by split
    diverged: Mapping[str, Sequence[int]] = field(default_factory=dict)
    sets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by arm
    diagnostics: int = 1  # the definition of its diagnostics, see upgd.metrics.DIAGNOSTICS

    @property
    def runs(self) -> int:
        """The number of finished runs."""
        return sum(map(len, self.seeds.values()))

    @property
    def over(self) -> dict[str, list[int]]:
        """By arm, the seeds that are done or diverged."""
        return _union(self.seeds, self.diverged)

    def outdated(self, experiment: Experiment) -> list[str]:
        """Arms whose set differs from the experiment's current one."""
        now = {arm.name: {k: float(v) for k, v in arm.hyper.items()} for arm in experiment.arms}
        return [arm for arm, hyper in self.sets.items() if arm in now and now[arm] != hyper]

    def has_more(self, other: Provenance, but: Sequence[str]) -> bool:
        """Whether arms, except some, have seeds that another table lacks."""
        there = other.over
        mine = ((arm, seeds) for arm, seeds in self.over.items() if arm not in but)
        return any(set(seeds) - set(there.get(arm, ())) for arm, seeds in mine)

    def write(self, folder: Path) -> None:
        """Write it beside a table."""
        content = asdict(self)
        for name in _SEEDS:
            content[name] = {arm: ranges(seeds) for arm, seeds in content[name].items()}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        write_atomically(folder / NAME, f"{text}\n".encode())


def read(folder: Path) -> Provenance | None:
    """The provenance beside a table, or None; ValueError if it is not one of these files."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["parts"] = [Portion(**part) for part in content["parts"]]
        for name in _SEEDS:
            content[name] = {arm: from_ranges(text) for arm, text in content[name].items()}
        return Provenance(**content)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not say where a table comes from: {error}") from None


def describe(
    found: Sequence[Found], experiment: Experiment, data: Mapping[str, Any] | None
) -> Provenance:
    """The provenance of an experiment's runs, possibly from several days and machines."""
    parts = portions(each.run for each in found)
    steps = found[0].run.spec.steps
    return Provenance(
        experiment.name,
        command(experiment, steps, _seeds(found), parts),
        steps,
        _seeds(each for each in found if each.run.state == "done"),
        sum(_taken(each.run) for each in found),
        round(sum(part.seconds for part in parts), 1),
        parts,
        experiment.problem,
        common(each.run.spec.options for each in found),
        data,
        _seeds(each for each in found if each.run.state == "diverged"),
        {each.arm: dict(each.run.spec.hyper) for each in found},
        DIAGNOSTICS,  # others were left out
    )


def portions(runs: Iterable[Run]) -> list[Portion]:
    """Runs with a result, by what they have in common."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(_way(run), []).append(run)
    return by_age(_part(some) for some in alike.values())


def joined(table: Provenance, more: Provenance, experiment: Experiment) -> Provenance:
    """The provenance of a table with additional runs, some of which may replace its own.

    The work of a replaced run stays in the table's parts unless all its runs are replaced, since
    that of single runs is not recorded.
    """
    replaced = _in_both(table.seeds, more.over)
    if _in_both(table.over, more.over) == sum(map(len, table.over.values())):
        table = replace(table, learner_steps=0, seconds=0.0, parts=(), options=more.options)
    parts = by_age((*table.parts, *more.parts))
    return replace(
        more,
        command=command(experiment, more.steps, _union(table.over, more.over), parts),
        seeds=_union(_but(table.seeds, more.over), more.seeds),
        learner_steps=max(0, table.learner_steps - replaced * table.steps) + more.learner_steps,
        seconds=round(table.seconds + more.seconds, 1),
        parts=parts,
        options=common((table.options, more.options)),
        diverged=_union(_but(table.diverged, more.over), more.diverged),
        sets={**table.sets, **more.sets},
    )


def command(
    experiment: Experiment, steps: int, seeds: Mapping[str, Sequence[int]], parts: Sequence[Portion]
) -> str:
    """The command that reproduces these results: the first figure that needs them, at their scale.

    Agents that are not all of a figure's arms, seeds or steps have a command of their own.
    """
    scale = _scale(steps, experiment)
    first = list(range(max(map(len, seeds.values()))))
    whole = all(seeds.get(arm.name) == first for arm in experiment.arms)
    if experiment.agents and (scale is None or not whole):
        return "\n".join(_of_agents(experiment, steps, seeds, parts))
    figures = [figure for figure in FIGURES.values() if experiment.name in figure.run]
    words = ["upgd reproduce", figures[0].name if figures else "all"]
    if figures and len(figures[0].run) > 1 and not experiment.agents:
        words.append(f"--problems {experiment.problem}")
    if experiment.agents:
        words.append(f"--environments {experiment.problem.removeprefix(PREFIX).rpartition('-')[0]}")
    if scale is None or float(scale) != 1:
        words.append(f"--scale {scale or format(steps / experiment.steps, 'g')}")
    count = len(set().union(*seeds.values()))
    if count != experiment.seeds:
        words.append(f"--seeds {count}")
    return " ".join([*words, *_where(parts)])


def _scale(steps: int, experiment: Experiment) -> str | None:
    """The shortest number for ``--scale`` that gives these steps; None if there is none."""
    share = steps / experiment.steps
    texts = (f"{share:.{digits}g}" for digits in range(1, 18))
    fits = (text for text in texts if float(text) <= 1 and experiment.length(float(text)) == steps)
    return next(fits, None)


def _of_agents(
    experiment: Experiment, steps: int, seeds: Mapping[str, Sequence[int]], parts: Sequence[Portion]
) -> list[str]:
    """Commands for some agents: one for all arms that have the same seeds."""
    alike: dict[str, list[str]] = {}
    arms = {arm.name: arm for arm in experiment.arms}
    for name, some in seeds.items():
        alike.setdefault(_listed(some), []).append(_optimizer(arms[name]))
    first = f"upgd rl {experiment.problem.removeprefix(PREFIX)} --optimizers"
    constant = [] if experiment.options.get("anneal", True) else ["--constant-lr"]
    rest = " ".join([f"--steps {steps}", *constant, *_where(parts)])
    return [f"{first} {','.join(own)} --seeds {some} {rest}" for some, own in alike.items()]


def _listed(seeds: Sequence[int]) -> str:
    """Seeds as a command-line argument."""
    whole = len(seeds) == seeds[-1] - seeds[0] + 1
    return f"{seeds[0]}-{seeds[-1]}" if whole else ",".join(map(str, seeds))


def _optimizer(arm: Arm) -> str:
    """A method with its non-default hyperparameters, as an argument of ``upgd rl``."""
    called = display_name(arm.method, arm.hyper)
    usual = RunSpec(PREFIX, called).hyper
    own = [f":{name}={value!r}" for name, value in arm.hyper.items() if value != usual[name]]
    return called + "".join(own)


def _where(parts: Sequence[Portion]) -> list[str]:
    """Options for the device and engine of these runs."""
    device = [] if all(part.on_cpu for part in parts) else ["--device cuda"]
    eager = all(part.engine == "eager" for part in parts)
    return [*device, *(["--engine eager"] if eager else [])]


def known_data(
    problem: str, data_dir: str | os.PathLike[str] | None, before: Provenance | None
) -> dict[str, Any] | None:
    """What a problem learns from, as the check of the data knows it; None if it needs no data.

    If the data are missing now, the facts known before, or only the name.
    """
    name = kind_of(problem).dataset(problem)
    if name is None:
        return None
    try:
        facts = check(name, data_dir)
    except DataNotFoundError:
        return dict(before.data) if before is not None and before.data else {"name": name}
    samples = {each.split: each.samples for each in facts}
    sums = {each.split: each.checksum for each in facts}
    return {"name": name, "samples": samples, "sha256": sums}


def from_ranges(text: str) -> list[int]:
    """The integers that :func:`~upgd.text.ranges` wrote."""
    pairs = (part.partition("-") for part in text.split(",") if part)
    return [n for first, _, last in pairs for n in range(int(first), int(last or first) + 1)]


def day(seconds: float) -> str:
    """The date of a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d")


def _way(run: Run) -> str:
    assert run.result is not None
    result = run.result
    facts = (result.device, result.host.get("machine"), result.engine, result.dtype)
    return json.dumps([*facts, dict(result.versions), run.spec.rules], sort_keys=True)


def _part(runs: Sequence[Run]) -> Portion:
    results = [run.result for run in runs if run.result is not None]
    first = results[0]
    machine = first.host.get("machine")
    return Portion(
        f"{first.device} ({machine})" if first.device == CPU and machine else first.device,
        first.engine,
        dict(first.versions),
        len(runs),
        round(sum(r.wall / int(r.host.get("runs_in_stack") or 1) for r in results), 1),
        day(min(result.started for result in results)),
        day(max(result.finished for result in results)),
        first.dtype,
        runs[0].spec.rules,
    )


def _taken(run: Run) -> int:
    """The steps of a run; one that diverged took fewer."""
    assert run.result is not None
    return run.spec.steps if run.result.diverged_at is None else run.result.diverged_at


def _seeds(found: Iterable[Found]) -> dict[str, list[int]]:
    seeds: dict[str, list[int]] = {}
    for each in found:
        seeds.setdefault(each.arm, []).append(each.run.spec.seed)
    return {arm: sorted(some) for arm, some in seeds.items()}


def _union(*some: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """By arm, all seeds."""
    arms = dict.fromkeys(arm for each in some for arm in each)
    return {arm: sorted({n for each in some for n in each.get(arm, ())}) for arm in arms}


def _but(
    some: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    """By arm, the seeds that another lacks, of arms that have any."""
    left = {arm: [n for n in seeds if n not in other.get(arm, ())] for arm, seeds in some.items()}
    return {arm: seeds for arm, seeds in left.items() if seeds}


def _in_both(some: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> int:
    """How many seeds of arms are in both."""
    return sum(len(set(seeds) & set(other.get(arm, ()))) for arm, seeds in some.items())


def by_age(parts: Iterable[Portion]) -> list[Portion]:
    """Merge equal parts, oldest first."""
    merged: dict[str, Portion] = {}
    for part in parts:
        way = json.dumps(
            asdict(replace(part, runs=0, seconds=0.0, began="", ended="")), sort_keys=True
        )
        known = merged.get(way, replace(part, runs=0, seconds=0.0))
        merged[way] = replace(
            part,
            runs=known.runs + part.runs,
            seconds=round(known.seconds + part.seconds, 1),
            began=min(known.began, part.began),
            ended=max(known.ended, part.ended),
        )
    return sorted(merged.values(), key=lambda part: part.began)


def common(options: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The items that all have in common."""
    first, *rest = options
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in rest)}
