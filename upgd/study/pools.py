"""Pools of workers: what a driver asks of them, and the one of this machine's processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, Protocol

from upgd.engine.dense_cpu import cores
from upgd.processes import dies_with_parent, ignore_interrupts, interrupts_blocked
from upgd.study.jobs import Alive, Died, Ended, Event, Job, Ready, Servant

STOP, OVER = "stop", "over"
REAPING = 60.0
"""Seconds to learn how a process ended whose pipe is closed: it is dead, or about to be."""


class Pool(Protocol):
    """Workers that do jobs. One that dies is replaced, and its number is not used again."""

    @property
    def workers(self) -> int:
        """How many there are, once all have begun."""

    def roll_call(self) -> None:
        """Let every worker that is idle say anew that it is ready; others are replaced."""

    def start(self, worker: int, job: Job) -> None:
        """Give a worker that is idle a job."""

    def stop(self, worker: int) -> None:
        """Let a worker save its runs and end its job."""

    def kill(self, worker: int) -> None:
        """End a worker, whatever it does; nothing is heard of it any more."""

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        """What workers told, or nothing after `timeout` seconds.

        A worker's first event is :class:`~upgd.study.jobs.Ready`; the last, should it end,
        :class:`~upgd.study.jobs.Died`.
        """

    def close(self) -> None:
        """End all workers."""


class Roll:
    """Which workers of a pool have begun, and which of them have a job."""

    def __init__(self) -> None:
        self._ready: dict[int, Ready] = {}
        self._busy: set[int] = set()

    def note(self, worker: int, event: Event) -> None:
        """Take in what a worker told."""
        if isinstance(event, Ready):
            self._ready[worker] = event
        elif isinstance(event, Ended):
            self._busy.discard(worker)
        elif isinstance(event, Died):
            self.strike(worker)

    def start(self, worker: int) -> None:
        """It has a job."""
        self._busy.add(worker)

    def strike(self, worker: int) -> None:
        """It is no more."""
        self._ready.pop(worker, None)
        self._busy.discard(worker)

    def busy(self) -> list[int]:
        """Those with a job."""
        return sorted(self._busy)

    def ready(self) -> list[tuple[int, Ready]]:
        """Those without, and what they said when they began."""
        return [(w, event) for w, event in self._ready.items() if w not in self._busy]


def check_pool(on: str) -> None:
    """Raise unless ``--on`` names a pool that can be made here.

    Raises:
        ValueError: There is no such pool.
        ImportError: Ray is not installed.
    """
    host = on.removeprefix("ray://")
    if on not in ("local", "ray") and (host == on or not host):
        raise ValueError(f"--on is local, ray or ray://host:port; got {on!r}")
    if on != "local":
        import upgd.study.ray_pool  # noqa: F401


def make_pool(on: str, count: int, device: str = "cpu") -> Pool:
    """The pool that ``--on`` names.

    Args:
        on: ``"local"``, ``"ray"`` for a cluster of this machine alone, which is started and ended
            with the pool, or the address of a Ray cluster, ``ray://host:port``.
        count: How many workers.
        device: Where they work.

    Raises:
        ValueError: There is no such pool.
        ImportError: Ray is not installed.
    """
    check_pool(on)
    if on == "local":
        return LocalPool(count, device)
    from upgd.study.ray_pool import RayPool

    return RayPool(None if on == "ray" else on, count, device)


class _Hand:
    """A worker's process, with a thread that listens to it and one that talks to it.

    A worker that is frozen keeps neither the driver's thread nor the other workers.
    """

    def __init__(self, process: Any, pipe: Connection, tell: Callable[[Event], None]) -> None:
        self.process, self._pipe, self._tell = process, pipe, tell
        self.outbox: queue.SimpleQueue[Job | str] = queue.SimpleQueue()
        threading.Thread(target=self._talk, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()

    def _talk(self) -> None:
        with suppress(OSError):  # it has died, which will be noticed
            while (message := self.outbox.get()) != OVER:
                self._pipe.send(message)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                for event in self._pipe.recv():
                    self._tell(event)
        self.process.join(REAPING)
        self.outbox.put(OVER)
        self._tell(Died(_told(self.process.exitcode)))


class LocalPool:
    """Processes of this machine, each with its share of the cores.

    They hear nothing of Ctrl-C and SIGTERM: the driver does, and tells them to save. When the
    driver dies they end.

    Args:
        count: How many.
        device: Where they work.
        at_start: Called in each before it begins.
    """

    def __init__(
        self, count: int, device: str = "cpu", at_start: Callable[[], None] | None = None
    ) -> None:
        self.workers, self._device, self._at_start = count, device, at_start
        self._threads = max(1, cores() // count)
        self._context = _context()
        self._queue: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._hands: dict[int, _Hand] = {}
        # Before multiprocessing ends its processes by SIGTERM, which these do not hear.
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
        with (
            interrupts_blocked(),
            dies_with_parent(),
        ):  # until it is registered, nobody would stop it
            process.start()
            theirs.close()
            hand = _Hand(process, ours, lambda event: self._queue.put((worker, event)))
            self._hands[worker] = hand


def _end_all(hands: dict[int, _Hand]) -> None:
    for worker in list(hands):
        hands[worker].end()
        del hands[worker]


def _context() -> Any:
    """How processes are started; never by a fork of this one, which SQLite does not survive.

    On Linux they are forks of a process that has imported everything and done nothing.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["upgd.study.jobs", "upgd.kernels.cpu_dense", "sklearn.datasets"]
    )
    return context


def _told(code: int | None) -> str:
    """How a process ended, in words.

    >>> _told(-9), _told(1)
    ('its worker was killed (SIGKILL)', 'its worker ended with exit code 1')
    """
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"its worker was killed ({signal.Signals(-code).name})"
    return f"its worker ended with exit code {code}"


def _serve(
    driver: Connection,
    threads: int,
    device: str,
    share: int,
    at_start: Callable[[], None] | None,
) -> None:
    """What a worker's process does."""
    ignore_interrupts()
    if at_start is not None:
        at_start()
    servant = Servant(threads, device, share)
    threading.Thread(target=_obey, args=(driver, servant), daemon=True).start()
    with suppress(OSError):  # nobody listens any more
        while True:
            driver.send(servant.events() or [Alive()])


def _obey(driver: Connection, servant: Servant) -> None:
    """Take jobs until the driver is gone, and then end at once."""
    try:
        while True:
            message = driver.recv()
            if message == STOP:
                servant.stop()
            else:
                servant.start(message)
    except (EOFError, OSError):
        os._exit(0)
