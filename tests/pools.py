"""What the tests of drivers share: small runs, what they gave, and workers that misbehave."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from upgd.engine.batched import BatchedRun
from upgd.study import RunSpec
from upgd.study.jobs import Event, Job
from upgd.study.pools import LocalPool, Pool

PROBLEM = "label-permuted-digits"
OPTIONS = {"window": 50, "hidden": "9-7", "task_length": 50}


def small(count: int, steps: int = 100, **options: Any) -> list[RunSpec]:
    """Runs that share a stack; every other one is of another method."""
    return [
        RunSpec(PROBLEM, ("sgd", "upgd")[i % 2], {"lr": 0.01}, i, steps, {**OPTIONS, **options})
        for i in range(count)
    ]


class Watched:
    """A pool that tells what goes through it, and can do something at each event."""

    def __init__(self, pool: Pool, at_event: Any = None) -> None:
        self.pool, self.at_event = pool, at_event
        self.workers = pool.workers
        self.jobs: list[tuple[int, Job]] = []
        self.seen: list[tuple[int, Event]] = []

    def roll_call(self) -> None:
        self.pool.roll_call()

    def start(self, worker: int, job: Job) -> None:
        self.jobs.append((worker, job))
        self.pool.start(worker, job)

    def stop(self, worker: int) -> None:
        self.pool.stop(worker)

    def kill(self, worker: int) -> None:
        self.pool.kill(worker)

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        found = self.pool.events(timeout)
        for worker, event in found:
            self.seen.append((worker, event))
            if self.at_event is not None:
                self.at_event(worker, event)
        return found

    def close(self) -> None:
        self.pool.close()


def kill_process(pool: LocalPool, worker: int, how: int = signal.SIGKILL) -> None:
    """Send a worker's process a signal."""
    os.kill(pool._hands[worker].process.pid, how)


def processes_of(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError, ValueError):
            if os.getsid(int(folder.name)) == session and "Z" not in (folder / "stat").read_text():
                found.append(int(folder.name))
    return found


# --------------------------------------------- what workers are told to do wrong, by seed
def misbehave() -> None:
    """Let stacks with certain seeds kill their process, hang, or run out of memory."""
    advance = BatchedRun.advance

    def odd(self: BatchedRun, steps: int) -> None:
        for setting in self.settings:
            if setting.seed == 1001 and self.step >= 50:
                os.kill(os.getpid(), signal.SIGKILL)
            if setting.seed == 1002 and self.step >= 50:
                time.sleep(3600)
            if setting.seed == 1003:
                raise MemoryError
            if setting.seed == 1004:
                raise ZeroDivisionError("odd")
        advance(self, steps)

    BatchedRun.advance = odd  # type: ignore[method-assign]


def slow_chunks() -> None:
    """Let stacks take their time for a chunk."""
    advance = BatchedRun.advance

    def late(self: BatchedRun, steps: int) -> None:
        time.sleep(0.3)
        advance(self, steps)

    BatchedRun.advance = late  # type: ignore[method-assign]


if __name__ == "__main__":  # the command, with workers that take their time
    from tests import pools
    from upgd.cli import main, working

    working.make_pool = lambda on, count, device: LocalPool(count, device, pools.slow_chunks)
    main()
