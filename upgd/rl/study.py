"""PPO agents as runs of a study: how a group of them is executed."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from upgd.engine.dense import Learner
from upgd.engine.dense_cpu import cores
from upgd.ledger.canonical import Usual
from upgd.ledger.checkpoints import Checkpoint
from upgd.ledger.errors import StudyError
from upgd.ledger.records import Result
from upgd.ledger.spec import RunSpec, Scalar
from upgd.ledger.versions import OF_AGENTS
from upgd.rl.agents import AgentGroup
from upgd.rl.collapse import collapse
from upgd.rl.environments import make
from upgd.rl.runs import PREFIX, AgentPlan, agent, plan, usual
from upgd.rl.workers import Record, State, StatesError, WorkerDiedError, what_is_wrong
from upgd.study.execution import LONGEST_LOSS, Execution, Progress, Recorder, Reporter
from upgd.study.kinds import Kind, Pace, Room, RunGroup
from upgd.study.learners import device_name
from upgd.study.options import Options

RECENT = 10  # episodes of an agent whose mean return progress tells
ENGINE = "ppo"
AT_ONCE = 16  # agents that are enough to see how fast many are, if cores are few
Array = NDArray[np.float64]


class Agents(Kind):
    """Agents that learn by PPO: all agents of an environment are executed at once."""

    noun = "agent"
    unit = "steps"
    local_only = "agents of reinforcement learning run on this machine; leave out --on"
    lock_step = False
    packages = OF_AGENTS
    diverged_counts = True

    def usual(self, problem: str, options: Mapping[str, Scalar]) -> Usual:
        return usual(options)

    def check(self, spec: RunSpec, options: Options) -> None:
        plan(spec)
        agent(spec)

    def check_data(self, problem: str, data_dir: str | os.PathLike[str] | None) -> None:
        make(problem.removeprefix(PREFIX))

    def group(self, spec: RunSpec, options: Options) -> tuple[str, Any] | None:
        return ENGINE, (spec.problem, spec.steps, tuple(spec.options.items()))

    def size(self, group: RunGroup, options: Options, room: Room) -> tuple[int, str]:
        return len(group.specs), ""

    def engine_name(self, spec: RunSpec, engine: str, device: str) -> str:
        return f"{ENGINE}-{torch.device(device).type}"

    def execution(
        self, specs: Sequence[RunSpec], engine: str, options: Options, reporter: Reporter
    ) -> Execution:
        return AgentsExecution(reporter, specs, options)

    def measure_pace(self, specs: Sequence[RunSpec], options: Options) -> Pace:
        where = plan(specs[0])
        learners = [agent(spec) for spec in specs[: max(2 * cores(), AT_ONCE)]]
        with _open(where, learners, options) as group:
            group.iterate()  # compiles
            before = group.seconds["clock"]
            group.iterate()
            took = group.seconds["clock"] - before
        rate = len(learners) * where.settings.steps / max(took, 1e-9)
        return Pace(rate, "all processes, measured now")


KIND = Agents()


def _open(where: AgentPlan, learners: list[Learner], options: Options) -> AgentGroup:
    place: Any = {"workers": options.workers, "device": options.device}
    return AgentGroup(where.environment, learners, where.settings, steps=where.steps, **place)


# ------------------------------------------------------------------------------- curves
class Curves:
    """Means over windows of `iterations` iterations.

    ``return`` and ``episode_length`` are means over the episodes that ended in a window, NaN where
    none did; all else are means over iterations.
    """

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.closed: dict[str, list[float]] = {"return": [], "episode_length": []}
        self._open: dict[str, tuple[float, int]] = {}
        self._seen = 0

    def add(self, record: Record) -> None:
        """Take in an iteration."""
        for episode in record.episodes:
            self._count("return", episode.reward)
            self._count("episode_length", episode.length)
        for name, value in record.values.items():
            self._count(name, value)
        self._seen += 1
        if self._seen == self.iterations:
            self._close()

    def _count(self, name: str, value: float) -> None:
        total, count = self._open.get(name, (0.0, 0))
        if not np.isnan(value):
            self._open[name] = total + float(value), count + 1

    def _close(self) -> None:
        before = len(self.closed["return"])
        for name in self._open:
            self.closed.setdefault(name, [float("nan")] * before)
        for name, values in self.closed.items():
            total, count = self._open.get(name, (0.0, 0))
            values.append(total / count if count else float("nan"))
        self._open, self._seen = {}, 0

    def series(self) -> dict[str, Array]:
        """By name, a value per window that is over."""
        return {name: np.array(values) for name, values in self.closed.items() if values}

    def state(self) -> State:
        """All of it: arrays, and what fits into JSON."""
        arrays = {f"series/{name}": np.array(values) for name, values in self.closed.items()}
        arrays["open"] = np.array(list(self._open.values()), np.float64).reshape(-1, 2)
        return arrays, {"open": list(self._open), "seen": self._seen}

    def restore(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        series = {name.partition("series/")[2]: values for name, values in arrays.items()}
        self.closed = {name: values.tolist() for name, values in series.items() if name}
        pairs = arrays["open"].tolist()
        self._open = {n: (t, int(c)) for n, (t, c) in zip(meta["open"], pairs, strict=True)}
        self._seen = int(meta["seen"])


# ------------------------------------------------------------------------------ attempts
@dataclass
class Member:
    """An agent of an attempt.

    `state` is the agent's where it is not in the group; `failed_at` the step at which it stopped
    for good, if it has.
    """

    spec: RunSpec
    learner: Learner
    curves: Curves
    iteration: int = 0
    state: State | None = None
    failed_at: int | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class AgentsExecution(Execution):
    """An attempt at runs of one environment: all agents in one group.

    Agents whose checkpoints are older, or that are new, go first until all are at one iteration.
    """

    def __init__(self, reporter: Reporter, specs: Sequence[RunSpec], options: Options) -> None:
        self.reporter, self.specs, self.options = reporter, specs, options
        self.plan: AgentPlan = plan(specs[0])
        engine = KIND.engine_name(specs[0], ENGINE, options.device)
        self.recorder = Recorder(
            *(reporter, engine, device_name(options.device), (10.0, LONGEST_LOSS)),
            pause=options.checkpoint_seconds,
            packages=OF_AGENTS,
        )
        self.members = [self._fresh(spec) for spec in specs]
        self._group: AgentGroup | None = None
        self._active: list[Member] = []
        self._between_iterations = True

    def _fresh(self, spec: RunSpec) -> Member:
        return Member(spec, agent(spec), Curves(self.plan.window // self.plan.settings.steps))

    def begin(self) -> None:
        taken_up: list[Checkpoint] = []
        for number, spec in enumerate(self.specs):
            found = self.recorder.load(spec)
            if found is None:
                continue
            wrong = what_is_wrong(self._take_up, self.members[number], found)
            if wrong is None:
                taken_up.append(found)
            else:
                self._restart(self.members[number], wrong)
        self.recorder.start(*taken_up)

    def _restart(self, member: Member, reason: str) -> None:
        """Drop what was kept of an agent."""
        self.members[self.members.index(member)] = self._fresh(member.spec)
        self.reporter.note(f"{member.spec.label()} restarts: its checkpoint does not fit: {reason}")

    def _take_up(self, member: Member, found: Checkpoint) -> None:
        arrays, run = found[0], found[1]["run"]
        parts: dict[str, dict[str, NDArray[Any]]] = {"agent": {}, "curves": {}}
        for name, array in arrays.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = array
        member.curves.restore(parts["curves"], run["curves"])
        member.failed_at = run["failed_at"]
        member.iteration = int(run["agent"]["iteration"])
        member.state = parts["agent"], run["agent"]

    def execute(self) -> None:
        try:
            super().execute()
        except KeyboardInterrupt:
            self.save()  # as long as the workers are there
            raise
        except WorkerDiedError as error:
            raise StudyError(
                "a process of the agents has died, perhaps for want of memory; 'upgd resume' goes "
                "on from the last checkpoint, --workers takes fewer processes"
            ) from error
        finally:
            self._close()

    # ---------------------------------------------------------------------------- learning
    def learn(self) -> None:
        """Advance to the end; those behind go first."""
        while True:
            stands = sorted({member.iteration for member in self.members})
            stands = [*(s for s in stands if s < self.plan.iterations), self.plan.iterations]
            if len(stands) == 1:
                return
            behind = [m for m in self.members if m.iteration == stands[0]]
            self._advance(behind, stands[1])

    def _advance(self, members: list[Member], stop: int) -> None:
        group = self._open(members)
        if group is None:
            return
        size = self.plan.settings.steps
        while group.iteration < stop:
            before = time.monotonic()
            self._between_iterations = False
            records = group.iterate()
            for member, record in zip(members, records, strict=True):
                self._note(member, record)
            self._between_iterations = True
            if all(member.failed_at is not None for member in members):
                group.iteration = stop
            rate = len(members) * size / max(time.monotonic() - before, 1e-6)
            # The end is always told: a short run may be over before anything is due.
            if self.reporter.wants_progress() or group.iteration >= stop:
                self.reporter.progress(self._progress(rate))
            if group.iteration < self.plan.iterations:
                self.recorder.tend(self.save)
        if stop < self.plan.iterations:
            for member, state in zip(members, group.states(), strict=True):
                member.state = state
        for member in members:
            member.iteration = stop
        self._close()

    def _open(self, members: list[Member]) -> AgentGroup | None:
        """The group in which these agents go on; None if some restart instead."""
        self._group = _open(self.plan, [member.learner for member in members], self.options)
        self._active = members
        states = [member.state for member in members if member.state is not None]
        try:
            if states:
                self._group.restore(states)
        except StatesError as error:  # the others stand where they stood
            self._close()
            for number, reason in error.reasons.items():
                self._restart(members[number], reason)
        return self._group

    def _note(self, member: Member, record: Record) -> None:
        if member.failed_at is not None:
            return
        member.curves.add(record)
        member.recent.extend(episode.reward for episode in record.episodes)
        if record.failure is not None:
            member.failed_at = record.step

    def _progress(self, rate: float) -> Progress:
        assert self._group is not None
        specs = tuple(member.spec for member in self._active)
        latest: dict[str, list[float]] = {}
        for member in self._active:
            if member.recent:
                mean = float(np.mean(member.recent))
                latest.setdefault(f"return {member.spec.name}", []).append(mean)
        means = {name: float(np.mean(values)) for name, values in latest.items()}
        return Progress(specs[0], self._group.step, rate, means, specs[1:])

    def _close(self) -> None:
        group, self._group, self._active = self._group, None, []
        if group is not None:
            group.close()

    # ------------------------------------------------------------------------------ keeping
    def save(self) -> None:
        group = self._group
        if group is None or not group.iteration or not self._between_iterations:
            return
        for member, (arrays, meta) in zip(self._active, group.states(), strict=True):
            curves, facts = member.curves.state()
            both = {f"agent/{name}": array for name, array in arrays.items()}
            both |= {f"curves/{name}": array for name, array in curves.items()}
            run = {"step": group.step, "agent": meta, "curves": facts}
            self.recorder.save(member.spec, both, {**run, "failed_at": member.failed_at})

    def finish(self) -> None:
        self.reporter.finish([(member.spec, self._result(member)) for member in self.members])

    def _result(self, member: Member) -> Result:
        series, failed_at = member.curves.series(), member.failed_at
        result = self.recorder.result(
            self.plan.steps if failed_at is None else failed_at,
            *(series, self.plan.window, None),
            diverged_at=failed_at,
            runs_in_stack=len(self.members),
        )
        summary = {**result.summary, **collapse(series.get("return", ()))}
        return replace(result, summary=summary)
