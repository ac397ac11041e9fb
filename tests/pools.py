"""What the tests of drivers share: small runs, what they gave, and workers that misbehave."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from upgd.engine.batched import BatchedRun
from upgd.ledger import RunSpec
from upgd.study.options import Options
from upgd.study.pools import LocalPool, Pool
from upgd.study.worker import Died, Ended, Event, Job, Worker

ROOT = Path(__file__).parents[1]

PROBLEM = "label-permuted-digits"
OPTIONS = {"window": 50, "hidden": "9-7", "task_length": 50}


def small(count: int, steps: int = 100, **options: Any) -> list[RunSpec]:
    """Runs that share a stack; every other one is of another method."""
    return [
        RunSpec(PROBLEM, ("sgd", "upgd")[i % 2], {"lr": 0.01}, i, steps, {**OPTIONS, **options})
        for i in range(count)
    ]


class Watched:
    """A pool that tells what goes through it, and can do something at each event.

    Args:
        pool: What does the work.
        at_event: Called with a worker and its event.
        at_turn: Called with all events of a turn, also if there are none.
    """

    def __init__(self, pool: Pool, at_event: Any = None, at_turn: Any = None) -> None:
        self.pool, self.at_event, self.at_turn = pool, at_event, at_turn
        self.workers, self.shares_files = pool.workers, pool.shares_files
        self.jobs: list[tuple[int, Job]] = []
        self.busy: set[int] = set()

    def roll_call(self) -> None:
        self.pool.roll_call()

    def start(self, worker: int, job: Job) -> None:
        self.jobs.append((worker, job))
        self.busy.add(worker)
        self.pool.start(worker, job)

    def stop(self, worker: int) -> None:
        self.pool.stop(worker)

    def kill(self, worker: int) -> None:
        self.busy.discard(worker)
        self.pool.kill(worker)

    def events(self, timeout: float) -> list[tuple[int, Event]]:
        found = self.pool.events(timeout)
        for worker, event in found:
            if isinstance(event, Ended | Died):
                self.busy.discard(worker)
            if self.at_event is not None:
                self.at_event(worker, event)
        if self.at_turn is not None:
            self.at_turn(found)
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


# ------------------------------------------ workers that wait until a test lets them go on
class Holds:
    """Where workers wait in mid-run, for as long as a test wants.

    So what a test does to a worker that has runs comes before it has finished them, and the first
    checkpoints are sent, at any speed.

    Args:
        folder: Workers that wait have a file here.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.at_start = partial(hold, str(folder))

    def waiting(self) -> list[int]:
        """The processes that wait."""
        return sorted(int(file.name) for file in self.folder.glob("[0-9]*[0-9]"))

    def stopped(self) -> list[int]:
        """Those that have been told to save their runs."""
        return sorted(int(file.stem) for file in self.folder.glob(f"*{STOPPED}"))

    def release(self, *pids: int) -> None:
        """Let processes go on to the end of their jobs."""
        for pid in pids:
            (self.folder / str(pid)).unlink(missing_ok=True)


STOPPED = ".stopped"


def hold(folder: str) -> None:
    """Let each job wait before its second chunk, when the first one's checkpoints are sent."""
    advance, stop = BatchedRun.advance, Worker.stop

    def late(self: BatchedRun, steps: int) -> None:
        self.__dict__["chunks"] = chunks = self.__dict__.get("chunks", 0) + 1
        if chunks == 2:
            wait_in(folder)
        advance(self, steps)

    def told(self: Worker) -> None:
        Path(folder, f"{os.getpid()}{STOPPED}").touch()
        stop(self)

    BatchedRun.advance = late  # type: ignore[method-assign]
    Worker.stop = told  # type: ignore[method-assign]


def wait_in(folder: str) -> None:
    """Wait until the file that says so is removed."""
    file = Path(folder, str(os.getpid()))
    file.touch()
    while file.exists():
        time.sleep(0.01)


def held_pool(folder: str, options: Options, count: int) -> Pool:
    """As :func:`upgd.study.pools.make_pool`, with workers that wait."""
    at_start = partial(hold, folder)
    if options.on == "local":
        return LocalPool(count, options.device, at_start)
    from upgd.study.ray_pool import RayPool

    return RayPool(None, count, options.device, at_start)


def held_command(holds: Holds, *arguments: object) -> dict[str, Any]:
    """What starts the command with workers that wait, in a session of its own."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))  # for Ray's workers
    return {
        "args": [sys.executable, "-m", "tests.pools", str(holds.folder), *map(str, arguments)],
        "cwd": ROOT,
        "env": {**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        "start_new_session": True,
    }


# --------------------------------------------- what workers are told to do wrong, by seed
def misbehave(folder: str) -> None:
    """Let stacks with certain seeds kill their process, hang, or run out of memory.

    Those that hang have a file in the folder; see :class:`Holds`.
    """
    advance = BatchedRun.advance

    def odd(self: BatchedRun, steps: int) -> None:
        for setting in self.settings:
            if setting.seed == 1001 and self.step >= 50:
                os.kill(os.getpid(), signal.SIGKILL)
            if setting.seed == 1002 and self.step >= 50:
                wait_in(folder)
            if setting.seed == 1003:
                raise MemoryError
            if setting.seed == 1004:
                raise ZeroDivisionError("odd")
        advance(self, steps)

    BatchedRun.advance = odd  # type: ignore[method-assign]


if __name__ == "__main__":  # the command, with workers that wait
    from tests import pools
    from upgd.cli import main
    from upgd.study import run, runner

    run.make_pool = partial(pools.held_pool, sys.argv.pop(1))
    runner.PATIENCE = float("inf")
    main()
