"""The messages between the runner and its workers, and how a worker does a job.

A *job* is one execution of some runs (:mod:`upgd.study.execution`). The worker reports by *events*;
only the runner writes to the study.
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
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from numpy.typing import NDArray

import upgd
from upgd.engine import memory
from upgd.ledger.checkpoints import Checkpoint, load_checkpoint, pack_checkpoint, save_checkpoint
from upgd.ledger.errors import CheckpointError, SpecError
from upgd.ledger.records import Result
from upgd.ledger.spec import RULES_VERSION, RunSpec
from upgd.study.execution import Execution, Progress, is_environment_error
from upgd.study.kinds import Room, kind_of
from upgd.study.options import Options, check_device

BEAT = 2.0  # seconds after which a worker without events reports that it is alive
REPORT = 1.0  # seconds from one report of progress to the next


@dataclass(frozen=True)
class Job:
    """Runs to execute together."""

    specs: tuple[RunSpec, ...]  # the runs, all of one kind
    engine: str  # what executes them
    options: Options  # how
    # By key, their checkpoints: bytes, or files that the worker can read.
    saved: Mapping[str, bytes | Path]
    # Where to write checkpoints directly; by default they are sent as events.
    folder: Path | None = None


@dataclass(frozen=True)
class Ready:
    """A worker has started, and has this room."""

    room: Room
    version: tuple[str, int] = (upgd.__version__, RULES_VERSION)


@dataclass(frozen=True)
class Alive:
    """A worker is alive and has nothing else to report."""


@dataclass(frozen=True)
class Advanced:
    """How far the runs of a job are."""

    step: int
    rate: float
    latest: Mapping[str, float]
    specs: tuple[RunSpec, ...] = ()  # those that the report is about, where it is not about all
    share: float | None = None


@dataclass(frozen=True)
class Noted:
    """A note for the user."""

    text: str


@dataclass(frozen=True)
class Kept:
    """A run's checkpoint was taken; without content it is in the study's folder already."""

    key: str
    content: bytes | None


@dataclass(frozen=True)
class Finished:
    """A run's result."""

    key: str
    result: Result


@dataclass(frozen=True)
class Ended:
    """A job is over; runs without a result are not done."""

    trouble: str = ""  # why, if something went wrong
    cause: Literal["run", "memory", "machine", "interrupt"] = "run"
    room: Room | None = None  # what the worker has now, where that may have changed


@dataclass(frozen=True)
class Died:
    """A worker is dead; what it had not sent is lost."""

    reason: str


Event: TypeAlias = Ready | Alive | Advanced | Noted | Kept | Finished | Ended | Died


class EventReporter:
    """Sends what an execution reports as events; see :class:`upgd.study.execution.Reporter`.

    There are at least `pause` seconds between reports of progress; with None there are none.
    """

    def __init__(
        self,
        job: Job,
        send: Callable[[Event], None],
        stopping: Callable[[], bool],
        pause: float | None = REPORT,
    ) -> None:
        self._job, self._send, self._stopping, self._pause = job, send, stopping, pause
        self._reported = self._heard = time.monotonic()

    def load(self, spec: RunSpec) -> Checkpoint | None:
        content = self._job.saved.get(spec.key)
        try:
            return None if content is None else load_checkpoint(content)
        except CheckpointError:
            return None

    def save(self, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], facts: Any) -> None:
        if self._job.folder is None:
            self._send(Kept(spec.key, pack_checkpoint(arrays, facts)))
        else:
            save_checkpoint(self._job.folder / f"{spec.key}.npz", arrays, facts)
            self._send(Kept(spec.key, None))

    def alive(self) -> None:
        self._stop_if_asked()
        if time.monotonic() - self._heard >= REPORT:
            self._heard = time.monotonic()
            self._send(Alive())

    def wants_progress(self) -> bool:
        self._stop_if_asked()
        return self._pause is not None and time.monotonic() - self._reported >= self._pause

    def progress(self, progress: Progress) -> None:
        self._reported = time.monotonic()
        latest = {name: float(value) for name, value in progress.latest.items()}
        specs = (progress.spec, *progress.others)
        some = specs if len(specs) < len(self._job.specs) else ()
        self._send(Advanced(progress.step, float(progress.rate), latest, some, progress.share))

    def note(self, text: str) -> None:
        self._send(Noted(text))

    def finish(self, results: Sequence[tuple[RunSpec, Result]]) -> None:
        for spec, result in results:
            self._send(Finished(spec.key, result))

    def _stop_if_asked(self) -> None:
        if self._stopping():
            raise KeyboardInterrupt


class Worker:
    """Does one job at a time in a thread, and keeps events until they are fetched.

    Its stacks use `threads` threads; `share` workers share the memory of `device`.
    """

    def __init__(self, threads: int, device: str = "cpu", share: int = 1) -> None:
        gc.collect()
        gc.freeze()  # scanning what is imported takes longer than a small job
        os.environ["UPGD_THREADS"] = str(threads)
        torch.set_num_threads(threads)
        self._threads = threads
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stopping = threading.Event()
        try:
            free = memory.free_bytes(device) // share
        except Exception:  # no such device; the first job reports it
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
        """Events, or none after `timeout` seconds."""
        found: list[Event] = []
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=timeout))
            while True:
                found.append(self._events.get_nowait())
        return found

    def _do(self, job: Job) -> None:
        torch.set_num_threads(self._threads)  # the number belongs to the thread
        send = self._events.put
        send(do_job(job, EventReporter(job, send, self._stopping.is_set)))


def do_job(job: Job, reporter: EventReporter) -> Ended:
    """Do a job and return the last of its events."""
    execution: Execution | None = None
    try:
        try:
            check_device(job.options.device)
            if job.options.extensions is not None:
                job.options.extensions.load()
        except (SpecError, ImportError, ValueError) as error:
            return Ended(str(error), "machine")
        kind = kind_of(job.specs[0].problem)
        execution = kind.execution(job.specs, job.engine, job.options, reporter)
        execution.execute()
        return Ended()
    except KeyboardInterrupt:
        if execution is not None:
            execution.save()
        return Ended(cause="interrupt")
    except Exception as error:
        if is_environment_error(error):
            return Ended(str(error) or type(error).__name__, "machine")
        cause: Literal["run", "memory"] = "memory" if memory.is_out_of_memory(error) else "run"
        return Ended(_reason(error), cause)
    except SystemExit as error:  # a user's code that calls sys.exit() must not end the worker
        return Ended(f"its code called sys.exit({error.code!r})")
    finally:
        execution = None
        memory.make_room()


def _reason(error: Exception) -> str:
    """Why a run failed; errors that are not ours need their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SpecError) else f"{type(error).__name__}: {text}".rstrip(": ")
