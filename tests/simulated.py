"""A pool without workers, on a clock of its own: what a driver does, without waiting for it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from upgd.ledger.checkpoints import checkpoint_facts, pack_checkpoint
from upgd.ledger.records import Result, Series
from upgd.ledger.spec import RunSpec
from upgd.study.kinds import Room
from upgd.study.worker import BEAT, Advanced, Died, Ended, Event, Finished, Job, Kept, Ready

END = "end"


@dataclass(frozen=True)
class Fate:
    """How a job goes.

    Attributes:
        how: Whether it ends well, the worker dies or hangs, or memory runs out.
        at: After which part of the job.
    """

    how: Literal["well", "dies", "hangs", "memory", "fails"] = "well"
    at: float = 1.0


@dataclass
class Clock:
    """Seconds that pass when the pool says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SimulatedPool:
    """Workers that take time, die and hang, as told.

    Args:
        workers: How many.
        seconds: How long a job of this many steps and runs takes.
        fate: How the job goes.
        clock: The time, which :meth:`events` lets pass.
        room: What each worker has.
        pause: Seconds between checkpoints; they are made only of jobs that do not end well.
        beat: Seconds between reports of progress.
        starting: Seconds until a worker is ready.
        points: Numbers in each result.
    """

    shares_files: ClassVar[bool] = False
    workers: int
    seconds: Callable[[Job], float]
    fate: Callable[[int, Job], Fate] = lambda worker, job: Fate()
    clock: Clock = field(default_factory=Clock)
    room: Room = field(default_factory=lambda: Room(4, 1 << 40))
    pause: float = math.inf
    beat: float = BEAT
    starting: float = 10.0
    points: int = 10
    worked: float = 0.0
    """Seconds of work so far, of all workers; lost work included."""
    lost: float = 0.0
    """Of them, those behind the last checkpoint of a job that did not end well."""
    told: int = 0
    """Events so far."""
    jobs: list[Job] = field(default_factory=list)
    _queue: list[Any] = field(default_factory=list)
    _alive: dict[int, int] = field(default_factory=dict)
    _next: int = 0
    _count: int = 0

    def __post_init__(self) -> None:
        for _ in range(self.workers):
            self._hire()

    def roll_call(self) -> None:
        pass  # for one driver only

    def start(self, worker: int, job: Job) -> None:
        self.jobs.append(job)
        self._alive[worker] += 1
        first = _step(job)
        whole = self.seconds(job) * (1 - first / job.specs[0].steps)
        fate = self.fate(worker, job)
        until = whole * fate.at if fate.how != "well" else whole
        self.worked += until
        beats = int(until / self.beat)
        for i in range(1, beats + 1):
            self._at(
                i * self.beat, worker, Advanced(_reached(job, first, i * self.beat, whole), 1, {})
            )
        if fate.how == "well":
            self._at(until, worker, END, job)
            return
        saves = int(until / self.pause)
        self.lost += until - (saves * self.pause if saves else 0.0)
        for i in range(1, 1 + saves):
            step = _reached(job, first, i * self.pause, whole)
            for spec in job.specs:
                self._at(i * self.pause, worker, Kept(spec.key, _checkpoint(spec, step)))
        if fate.how == "dies":
            self._at(until, worker, Died("its worker was killed (SIGKILL)"))
        elif fate.how == "memory":
            self._at(until, worker, Ended("MemoryError: ", "memory"))
        elif fate.how == "fails":
            self._at(until, worker, Ended("ValueError: odd", "run"))

    def stop(self, worker: int) -> None:
        self._alive[worker] += 1  # nothing of the job is heard any more
        self._at(0.0, worker, Ended())

    def kill(self, worker: int) -> None:
        del self._alive[worker]
        self._hire()

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        found: list[tuple[int, Event]] = []
        end = self.clock.now + timeout
        while self._queue and self._queue[0][0] <= end:
            _, _, worker, era, event, job = heapq.heappop(self._queue)
            if self._alive.get(worker) != era:
                continue
            if event == END:
                found += [(worker, Finished(spec.key, self.result(spec))) for spec in job.specs]
                event = Ended()
            elif isinstance(event, Died):
                del self._alive[worker]
                self._hire()
            found.append((worker, event))
        self.clock.now = end
        self.told += len(found)
        return found

    def close(self) -> None:
        self._alive = {}

    def result(self, spec: RunSpec) -> Result:
        """What a run gives: a function of its specification."""
        values = np.full(self.points, spec.seed % 1000, np.float32)
        names = ("accuracy", "loss", "plasticity")
        return Result("simulated", series={name: Series(values, 1) for name in names})

    def _hire(self) -> None:
        worker, self._next = self._next, self._next + 1
        self._alive[worker] = 0
        self._at(self.starting, worker, Ready(self.room))

    def _at(self, delay: float, worker: int, event: Event | str, job: Job | None = None) -> None:
        self._count += 1
        at = self.clock.now + delay
        heapq.heappush(self._queue, (at, self._count, worker, self._alive[worker], event, job))


def _step(job: Job) -> int:
    content = job.saved.get(job.specs[0].key)
    return 0 if content is None else int(checkpoint_facts(content)["run"]["step"])


def _reached(job: Job, first: int, after: float, whole: float) -> int:
    steps = job.specs[0].steps
    return first + int((steps - first) * after / whole)


def _checkpoint(spec: RunSpec, step: int) -> bytes:
    facts = {"run": {"step": step}, "stack": {"run": spec.key, "engine": "simulated"}}
    return pack_checkpoint({"x": np.zeros(4)}, facts)
