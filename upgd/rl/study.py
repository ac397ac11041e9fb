"""PPO agents as runs of a study: an attempt at a group of them, and the work of a whole study."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from upgd.engine.dense import Learner
from upgd.engine.dense_cpu import cores
from upgd.rl.agents import AgentGroup
from upgd.rl.collapse import collapse
from upgd.rl.environments import environment_id, known_environments
from upgd.rl.runs import Plan, agent, is_rl, plan
from upgd.rl.workers import Record, State, StatesError, WorkerDiedError, what_is_wrong
from upgd.study.attempts import Attempt, Means, uninterrupted
from upgd.study.errors import SpecError, StudyError
from upgd.study.files import Checkpoint
from upgd.study.keeping import LONGEST_LOSS, Keeper
from upgd.study.ledger import Ledger
from upgd.study.prepare import check_device
from upgd.study.records import Result, owner_name
from upgd.study.sinks import Progress, Sink, StudySink, Tally
from upgd.study.spec import RunSpec
from upgd.study.versions import OF_AGENTS
from upgd.study.work import at_work, carry_out, evict_departed

RECENT = 10
"""Episodes of an agent whose mean return progress tells."""
LEASE = 300.0
"""Seconds that runs stay ours without a sign of life: an iteration of many agents takes long."""
AT_ONCE = 16
"""Agents that are enough to see how fast many are, if cores are few."""
Array = NDArray[np.float64]


def work_agents(
    ledger: Ledger,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    where: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    lease_seconds: float = LEASE,
    checkpoint_seconds: float | None = None,
    workers: int | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Tally:
    """Run what is pending of reinforcement learning, all agents of an environment at once.

    Arguments are those of :func:`upgd.study.work.work`, and:

    Args:
        ledger: The study's.
        data_dir: Not used.
        device: Where agents learn.
        where: Restricts which runs are taken.
        on_progress: Told after every iteration.
        lease_seconds: How long runs stay ours without a sign of life.
        checkpoint_seconds: How often agents are saved.
        workers: Processes that agents are spread over; see :class:`upgd.rl.AgentGroup`.
        on_note: Told when a checkpoint is of no use; the tally's notes have the same.
    """
    check_device(device)
    owner, tally = owner_name(), Tally()
    means = Means(data_dir, device, checkpoint_seconds)
    tried: set[str] = set()
    with at_work(ledger, owner, where):
        while True:
            evict_departed(ledger)
            specs = _together(ledger.claimable(where), tried)
            if not specs:
                return tally
            keys = [spec.key for spec in specs]
            tried.update(keys)
            claims = ledger.claim(owner, lease_seconds, limit=len(keys), where={"key": keys})
            if not claims:
                continue
            sink = StudySink(ledger, claims, tally, on_progress)
            error = _try(sink, [claim.spec for claim in claims], means, workers, on_note)
            if error is not None:
                sink.fail(f"{type(error).__name__}: {error}", str(error))


def _together(specs: Iterable[RunSpec], tried: set[str]) -> list[RunSpec]:
    """The oldest run, and those that can be in a group with it."""
    found: list[RunSpec] = []
    for spec in specs:
        if not is_rl(spec.problem) or spec.key in tried:
            continue
        if not found or _shared(spec) == _shared(found[0]):
            found.append(spec)
    return found


def _shared(spec: RunSpec) -> Any:
    return spec.problem, spec.steps, spec.options


def _try(
    sink: StudySink,
    specs: Sequence[RunSpec],
    means: Means,
    workers: int | None,
    on_note: Callable[[str], None] | None,
) -> Exception | None:
    try:
        attempt = Agents(sink, specs, means, workers, on_note)
    except SpecError as error:
        return error
    wrong = carry_out(sink, attempt)
    sink.tally.notes += attempt.notes
    return wrong


# ------------------------------------------------------------------------------- curves
class Curves:
    """Means over windows of what an agent's iterations tell.

    ``return`` and ``episode_length`` are means over the episodes that ended in a window, not a
    number where none did; everything else is a mean over iterations.

    Args:
        iterations: Of a window.
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
        prefix = "series/"
        self.closed = {
            name.removeprefix(prefix): values.tolist()
            for name, values in arrays.items()
            if name.startswith(prefix)
        }
        pairs = arrays["open"].tolist()
        self._open = {n: (t, int(c)) for n, (t, c) in zip(meta["open"], pairs, strict=True)}
        self._seen = int(meta["seen"])


# ------------------------------------------------------------------------------ attempts
@dataclass
class Member:
    """An agent of an attempt, and what has been kept of it.

    Attributes:
        spec: Its run.
        learner: Its optimizer and seed.
        curves: What it told so far.
        iteration: How many are done.
        state: Of the agent then, where it is not at work.
        failed_at: The step at which it stopped for good, if it has.
    """

    spec: RunSpec
    learner: Learner
    curves: Curves
    iteration: int = 0
    state: State | None = None
    failed_at: int | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class Agents(Attempt):
    """An attempt at runs of one environment: all agents in one group.

    Those that stand behind the others, because their checkpoints are older or because they are
    new, go first until all stand at one iteration.

    Args:
        sink: Where checkpoints and results go.
        specs: The runs; of one environment, length and settings.
        means: Where agents learn, and how often they are saved.
        workers: Processes that agents are spread over.
        on_note: Told when a checkpoint is of no use.

    Attributes:
        notes: What was told.

    Raises:
        SpecError: A run is not as it must be.
    """

    def __init__(
        self,
        sink: Sink,
        specs: Sequence[RunSpec],
        means: Means,
        workers: int | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.sink, self.specs, self.means, self.workers = sink, specs, means, workers
        self.on_note, self.notes = on_note, list[str]()
        self.plan: Plan = plan(specs[0])
        kind = torch.device(means.device).type
        device = torch.cuda.get_device_name(means.device) if kind == "cuda" else means.device
        pauses = (10.0, LONGEST_LOSS)
        self.keeper = Keeper(sink, f"ppo-{kind}", device, pauses, means.pause, OF_AGENTS)
        self.members = [self._fresh(spec) for spec in specs]
        self._group: AgentGroup | None = None
        self._active: list[Member] = []
        self._whole = True

    def _fresh(self, spec: RunSpec) -> Member:
        settings = self.plan.settings
        return Member(spec, agent(spec), Curves(self.plan.window // settings.steps))

    def begin(self) -> None:
        taken_up: list[Checkpoint] = []
        for number, spec in enumerate(self.specs):
            found = self.keeper.load(spec)
            if found is None:
                continue
            wrong = what_is_wrong(self._take_up, self.members[number], found)
            if wrong is None:
                taken_up.append(found)
            else:
                self._begin_anew(self.members[number], wrong)
        self.keeper.start(*taken_up)

    def _begin_anew(self, member: Member, reason: str) -> None:
        """Drop what was kept of an agent, which is of no use."""
        self.members[self.members.index(member)] = self._fresh(member.spec)
        note = f"{member.spec.label()} begins anew: its checkpoint does not fit: {reason}"
        self.notes.append(note)
        if self.on_note is not None:
            self.on_note(note)

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

    def carry_out(self) -> None:
        try:
            super().carry_out()
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
        with uninterrupted():  # compilers and young processes lose an interrupt
            group = self._open(members)
        if group is None:
            return
        size = self.plan.settings.steps
        while group.iteration < stop:
            before = time.monotonic()
            with uninterrupted():
                self._whole = False
                records = group.iterate()
                for member, record in zip(members, records, strict=True):
                    self._note(member, record)
                self._whole = True
            if all(member.failed_at is not None for member in members):
                group.iteration = stop
            rate = len(members) * size / max(time.monotonic() - before, 1e-6)
            if self.sink.listens():
                self.sink.tell(self._progress(rate))
            if group.iteration < self.plan.iterations:
                self.keeper.tend(self.save)
        if stop < self.plan.iterations:
            for member, state in zip(members, group.states(), strict=True):
                member.state = state
        for member in members:
            member.iteration = stop
        self._close()

    def _open(self, members: list[Member]) -> AgentGroup | None:
        """The group in which these agents go on; None if some begin anew instead."""
        where, dtype = self.plan, "float32"
        learners = [member.learner for member in members]
        self._group = AgentGroup(
            *(where.environment, learners, where.settings),
            steps=where.steps,
            workers=self.workers,
            device=self.means.device,
            dtype=dtype,
        )
        self._active = members
        states = [member.state for member in members if member.state is not None]
        try:
            if states:
                self._group.restore(states)
        except StatesError as error:  # the others stand where they stood
            self._close()
            for number, reason in error.reasons.items():
                self._begin_anew(members[number], reason)
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
                latest.setdefault(f"return {member.spec.method}", []).append(mean)
        means = {name: float(np.mean(values)) for name, values in latest.items()}
        return Progress(specs[0], self._group.step, rate, means, specs[1:])

    def _close(self) -> None:
        group, self._group, self._active = self._group, None, []
        if group is not None:
            group.close()

    # ------------------------------------------------------------------------------ keeping
    def save(self) -> None:
        group = self._group
        if group is None or not group.iteration or not self._whole:
            return
        for member, (arrays, meta) in zip(self._active, group.states(), strict=True):
            curves, facts = member.curves.state()
            both = {f"agent/{name}": array for name, array in arrays.items()}
            both |= {f"curves/{name}": array for name, array in curves.items()}
            run = {"step": group.step, "agent": meta, "curves": facts}
            self.keeper.save(member.spec, both, {**run, "failed_at": member.failed_at})

    def finish(self) -> None:
        self.sink.finish([(member.spec, self._result(member)) for member in self.members])

    def _result(self, member: Member) -> Result:
        series, failed_at = member.curves.series(), member.failed_at
        result = self.keeper.result(
            self.plan.steps if failed_at is None else failed_at,
            *(series, self.plan.window, None),
            diverged_at=failed_at,
            runs_in_stack=len(self.members),
        )
        summary = {**result.summary, **collapse(series.get("return", ()))}
        return replace(result, summary=summary)


# ------------------------------------------------------------------------------- outlook
def pace(specs: Sequence[RunSpec], device: str = "cpu", workers: int | None = None) -> float:
    """Steps per second of all agents of these runs together, from an iteration of some."""
    where = plan(specs[0])
    learners = [agent(spec) for spec in specs[: max(2 * cores(), AT_ONCE)]]
    with AgentGroup(
        *(where.environment, learners, where.settings), steps=where.steps, workers=workers,
        device=device,
    ) as group:  # fmt: skip
        group.iterate()  # compiles
        before = group.seconds["clock"]
        group.iterate()
        took = group.seconds["clock"] - before
    return len(learners) * where.settings.steps / max(took, 1e-9)


def newest_environments() -> list[str]:
    """The newest version of every environment that gymnasium knows; not all can be made.

    Raises:
        MissingExtraError: gymnasium is not installed.
    """
    stems = dict.fromkeys(name.rpartition("-v")[0] or name for name in known_environments())
    return sorted({environment_id(stem) for stem in stems})
