"""Pools of workers: the protocol; this process, and processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, Protocol

from upgd.engine.dense_cpu import cores
from upgd.processes import dies_with_parent, ignore_interrupts, interrupts_blocked
from upgd.study.kinds import Room
from upgd.study.options import Options
from upgd.study.worker import Alive, Died, Ended, Event, EventReporter, Job, Ready, Worker, do_job

STOP, OVER = "stop", "over"
REAPING = 60.0  # seconds to wait for the exit code of a process whose pipe is closed


class Pool(Protocol):
    """Workers that do jobs. One that dies is replaced, and its number is not used again."""

    shares_files: bool  # whether workers can read the study's folder

    @property
    def workers(self) -> int:
        """How many there are, once all have started."""

    def roll_call(self) -> None:
        """Let every idle worker report again that it is ready; replace the others."""

    def start(self, worker: int, job: Job) -> None:
        """Give an idle worker a job."""

    def stop(self, worker: int) -> None:
        """Let a worker save its runs and end its job."""

    def kill(self, worker: int) -> None:
        """Kill a worker; it reports nothing more."""

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        """What workers reported, or nothing after `timeout` seconds.

        A worker's first event is :class:`~upgd.study.worker.Ready`; the last, should it end,
        :class:`~upgd.study.worker.Died`.
        """

    def close(self) -> None:
        """End all workers."""


class Roll:
    """Which workers of a pool have started, and which of them have a job."""

    def __init__(self) -> None:
        self._ready: dict[int, Ready] = {}
        self._busy: set[int] = set()

    def note(self, worker: int, event: Event) -> None:
        """Update by a worker's event."""
        if isinstance(event, Ready):
            self._ready[worker] = event
        elif isinstance(event, Ended):
            self._busy.discard(worker)
        elif isinstance(event, Died):
            self.strike(worker)

    def start(self, worker: int) -> None:
        """Mark a worker busy."""
        self._busy.add(worker)

    def strike(self, worker: int) -> None:
        """Mark a worker dead."""
        self._ready.pop(worker, None)
        self._busy.discard(worker)

    def busy(self) -> list[int]:
        """Workers with a job."""
        return sorted(self._busy)

    def ready(self) -> list[tuple[int, Ready]]:
        """Workers without a job, and what they reported when they started."""
        return [(w, event) for w, event in self._ready.items() if w not in self._busy]


def make_pool(options: Options, count: int) -> Pool:
    """The pool of `count` workers that ``options.on`` names."""
    if options.on == "local":
        return LocalPool(count, options.device)
    from upgd.study.ray_pool import RayPool

    return RayPool(None if options.on == "ray" else options.on, count, options.device)


class ThisProcess:
    """A pool of one worker: this process does each job inside :meth:`events`.

    `on_event` is called with each event as it occurs; only the first and the last are returned.
    `stopping` says whether the job shall save its runs and end. Without `reports` there are no
    reports of progress: reading metrics waits for the device.
    """

    workers = 1
    shares_files = True

    def __init__(self, device: str = "cpu", reports: bool = True) -> None:
        self._device, self._pause = device, 0.0 if reports else None
        self._job: Job | None = None
        self._waiting: list[tuple[int, Event]] = []
        self.on_event: Callable[[Event], None] = lambda event: None
        self.stopping: Callable[[], bool] = lambda: False

    def roll_call(self) -> None:
        self._waiting = [(0, Ready(Room.here(self._device)))]

    def start(self, worker: int, job: Job) -> None:
        self._job = job

    def stop(self, worker: int) -> None:
        """Do nothing: the job polls `stopping`."""

    def kill(self, worker: int) -> None:
        raise RuntimeError("this process cannot be replaced")

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        found, self._waiting = self._waiting, []
        if self._job is None:
            return found
        job, self._job = self._job, None
        ended = do_job(job, EventReporter(job, self.on_event, self.stopping, self._pause))
        if ended.cause == "interrupt" and not self.stopping():
            raise KeyboardInterrupt
        return [*found, (0, replace(ended, room=Room.here(self._device)))]

    def close(self) -> None:
        """Do nothing."""


class _WorkerProcess:
    """A worker's process with two threads for its pipe, so that a frozen worker blocks nobody."""

    def __init__(self, process: Any, pipe: Connection, tell: Callable[[Event], None]) -> None:
        self.process, self._pipe, self._tell = process, pipe, tell
        self.outbox: queue.SimpleQueue[Job | str] = queue.SimpleQueue()
        threading.Thread(target=self._talk, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()

    def _talk(self) -> None:
        with suppress(OSError):  # it has died, which _listen reports
            while (message := self.outbox.get()) != OVER:
                self._pipe.send(message)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                for event in self._pipe.recv():
                    self._tell(event)
        self.process.join(REAPING)
        self.outbox.put(OVER)
        self._tell(Died(_how_it_ended(self.process.exitcode)))


class LocalPool:
    """`count` processes of this machine, each with its share of the cores.

    They ignore SIGINT and SIGTERM: the runner handles these and stops them. They end when the
    runner dies. `at_start` is called in each of them first.
    """

    shares_files = True

    def __init__(
        self, count: int, device: str = "cpu", at_start: Callable[[], None] | None = None
    ) -> None:
        self.workers, self._device, self._at_start = count, device, at_start
        self._threads = max(1, cores() // count)
        self._context = _context()
        self._queue: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._hands: dict[int, _WorkerProcess] = {}
        # Before multiprocessing ends its processes by SIGTERM, which these ignore.
        self._finish = Finalize(self, _end_all, (self._hands,), exitpriority=10)
        self._roll = Roll()
        self._next = 0
        for _ in range(count):
            self._hire()

    def pids(self) -> list[int]:
        """The processes."""
        return [hand.process.pid for hand in self._hands.values()]

    def roll_call(self) -> None:
        for worker in self._roll.busy():
            self.kill(worker)
        for worker, event in self._roll.ready():
            self._queue.put((worker, event))

    def start(self, worker: int, job: Job) -> None:
        self._roll.start(worker)
        self._hands[worker].outbox.put(job)

    def stop(self, worker: int) -> None:
        self._hands[worker].outbox.put(STOP)

    def kill(self, worker: int) -> None:
        self._roll.strike(worker)
        self._hands.pop(worker).end()
        self._hire()

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        found: list[tuple[int, Event]] = []
        with suppress(queue.Empty):
            found.append(self._queue.get(timeout=timeout))
            while True:
                found.append(self._queue.get_nowait())
        known = [(worker, event) for worker, event in found if worker in self._hands]
        for worker, event in known:
            self._roll.note(worker, event)
            if isinstance(event, Died):
                self._hands.pop(worker).end()
                self._hire()
        return known

    def close(self) -> None:
        _end_all(self._hands)
        self._finish.cancel()

    def _hire(self) -> None:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self._threads, self._device, self.workers, self._at_start)
        process = self._context.Process(target=_serve, args=arguments, daemon=True)
        worker, self._next = self._next, self._next + 1
        # Before it is registered, nobody would stop it.
        with interrupts_blocked(), dies_with_parent(), _main_hidden():
            process.start()
            theirs.close()
            hand = _WorkerProcess(process, ours, lambda event: self._queue.put((worker, event)))
            self._hands[worker] = hand


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Let processes that start here not import the main program again.

    Workers get what they need with each job, so that a script needs no
    ``if __name__ == "__main__"``.
    """
    main = vars(sys.modules["__main__"])
    names = ["__file__", "__spec__"]
    hidden = {name: main.pop(name) for name in names if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.pop("__spec__")
        main.update(hidden)


def _end_all(hands: dict[int, _WorkerProcess]) -> None:
    for worker in list(hands):
        hands[worker].end()
        del hands[worker]


def _context() -> Any:
    """How processes are started: never by a fork of this one, which SQLite does not survive."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["upgd.study.worker", "upgd.study.learners", "upgd.kernels.cpu_dense", "sklearn.datasets"]
    )
    return context


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"its worker was killed ({signal.Signals(-code).name})"
    return f"its worker ended with exit code {code}"


def _serve(
    runner: Connection, threads: int, device: str, share: int, at_start: Callable[[], None] | None
) -> None:
    """The main function of a worker's process."""
    ignore_interrupts()
    if at_start is not None:
        at_start()
    inside = Worker(threads, device, share)
    threading.Thread(target=_obey, args=(runner, inside), daemon=True).start()
    with suppress(OSError):  # the runner is dead
        while True:
            runner.send(inside.events() or [Alive()])


def _obey(runner: Connection, inside: Worker) -> None:
    """Take jobs until the runner is dead, and then exit."""
    try:
        while True:
            message = runner.recv()
            if message == STOP:
                inside.stop()
            else:
                inside.start(message)
    except (EOFError, OSError):
        os._exit(0)
