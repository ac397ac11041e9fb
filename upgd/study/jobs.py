"""What a driver and its workers say to each other, and how a worker does a job.

A *job* is one attempt at some runs. The worker does it with the same code as a process that works
alone (:mod:`upgd.study.attempts`); it sends *events* instead of writing to the study.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from numpy.typing import NDArray

import upgd
from upgd.engine import memory
from upgd.study.attempts import Alone, Attempt, Means, Stack, is_the_machines
from upgd.study.backlog import Room
from upgd.study.errors import CheckpointError, SpecError
from upgd.study.files import Checkpoint, pack_checkpoint, unpack_checkpoint
from upgd.study.prepare import check_device
from upgd.study.records import Result
from upgd.study.sinks import Progress, Sink
from upgd.study.spec import RULES_VERSION, RunSpec

BEAT = 2.0
"""Seconds after which a worker that has nothing to tell says that it is alive."""
TELL = 1.0
"""Seconds from one report of progress to the next."""


@dataclass(frozen=True)
class Job:
    """An attempt at some runs.

    Attributes:
        specs: The runs.
        engine: ``"batched"``, or ``"eager"`` for one alone.
        means: What to work with.
        saved: Their checkpoints as bytes, by key.
    """

    specs: tuple[RunSpec, ...]
    engine: str
    means: Means
    saved: Mapping[str, bytes]


@dataclass(frozen=True)
class Ready:
    """A worker has begun, and has this room."""

    room: Room
    version: tuple[str, int] = (upgd.__version__, RULES_VERSION)


@dataclass(frozen=True)
class Alive:
    """A worker has nothing to tell."""


@dataclass(frozen=True)
class Told:
    """How far the runs of a job are."""

    step: int
    rate: float
    latest: Mapping[str, float]
    share: float | None = None


@dataclass(frozen=True)
class Kept:
    """A run's checkpoint."""

    key: str
    content: bytes


@dataclass(frozen=True)
class Finished:
    """A run's result."""

    key: str
    result: Result


@dataclass(frozen=True)
class Ended:
    """A job is over; runs without a result are not done.

    Attributes:
        trouble: Why, if something went wrong.
        cause: Whether the runs are to blame, the memory, or the worker's machine.
    """

    trouble: str = ""
    cause: Literal["run", "memory", "machine"] = "run"


@dataclass(frozen=True)
class Died:
    """A worker is no more; what it had not sent is lost."""

    reason: str


Event: TypeAlias = Ready | Alive | Told | Kept | Finished | Ended | Died


class Wire:
    """Sends what an attempt has; see :class:`upgd.study.sinks.Sink`."""

    beat_seconds = TELL

    def __init__(
        self, job: Job, send: Callable[[Event], None], stopping: Callable[[], bool]
    ) -> None:
        self._job, self._send, self._stopping = job, send, stopping
        self._told = time.monotonic()

    def load(self, spec: RunSpec) -> Checkpoint | None:
        content = self._job.saved.get(spec.key)
        try:
            return None if content is None else unpack_checkpoint(content)
        except CheckpointError:
            return None

    def save(self, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], facts: Any) -> None:
        self._send(Kept(spec.key, pack_checkpoint(arrays, facts)))

    def alive(self, kept: bool) -> None:
        if self._stopping():
            raise KeyboardInterrupt

    def listens(self) -> bool:
        if self._stopping():
            raise KeyboardInterrupt
        return time.monotonic() - self._told >= TELL

    def tell(self, progress: Progress) -> None:
        self._told = time.monotonic()
        latest = {name: float(value) for name, value in progress.latest.items()}
        self._send(Told(progress.step, float(progress.rate), latest, progress.share))

    def finish(self, results: Sequence[tuple[RunSpec, Result]]) -> None:
        for spec, result in results:
            self._send(Finished(spec.key, result))


class Servant:
    """A worker's inside: does one job at a time in a thread, and keeps events until fetched.

    Args:
        threads: How many its stacks use.
        device: Where it will work; its memory is part of the room it tells.
        share: How many workers share that memory.
    """

    def __init__(self, threads: int, device: str = "cpu", share: int = 1) -> None:
        gc.collect()
        gc.freeze()  # what is imported stays; looking through it takes longer than a small job
        os.environ["UPGD_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        self._threads = threads
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping = threading.Event()
        try:
            free = memory.free_bytes(device) // share
        except Exception:  # no such device; the first job tells
            free = 0
        self._events.put(Ready(Room(threads, free)))

    def start(self, job: Job) -> None:
        """Begin a job."""
        self._stopping.clear()
        threading.Thread(target=self._do, args=(job,), daemon=True).start()

    def stop(self) -> None:
        """Let the job save its runs and end."""
        self._stopping.set()

    def events(self, timeout: float = BEAT) -> list[Event]:
        """What there is to tell, or none after `timeout` seconds; that is a sign of life too."""
        found: list[Event] = []
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=timeout))
            while True:
                found.append(self._events.get_nowait())
        return found

    def _do(self, job: Job) -> None:
        torch.set_num_threads(self._threads)  # threads have numbers of their own
        self._events.put(do_job(job, self._events.put, self._stopping.is_set))


def do_job(job: Job, send: Callable[[Event], None], stopping: Callable[[], bool]) -> Ended:
    """Do a job and send its events; the last is returned."""
    wire = Wire(job, send, stopping)
    attempt: Attempt | None = None
    try:
        try:
            check_device(job.means.device)
        except SpecError as error:
            return Ended(str(error), "machine")
        attempt = _attempt(job, wire)
        attempt.carry_out()
        return Ended()
    except KeyboardInterrupt:
        if attempt is not None:
            attempt.save()
        return Ended()
    except Exception as error:
        if is_the_machines(error):
            return Ended(str(error) or type(error).__name__, "machine")
        cause: Literal["run", "memory"] = "memory" if memory.is_out_of_memory(error) else "run"
        return Ended(f"{type(error).__name__}: {error}", cause)
    finally:
        attempt = None
        memory.make_room()


def _attempt(job: Job, sink: Sink) -> Attempt:
    if job.engine == "eager":
        return Alone(sink, job.specs[0], job.means)
    return Stack(sink, job.specs, job.means)
