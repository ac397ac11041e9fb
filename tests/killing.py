"""A process that starts others, which are killed: ``python -m tests.killing``.

It has everything imported and no thread, lock or database open, so a copy of it (a fork) is a
fresh process that is at work within milliseconds. Requests are lines of JSON; so are answers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import sklearn.datasets  # noqa: F401 - so that children need not import it
import torch._dynamo  # noqa: F401 - nor this, at their first step

from tests.running import work
from tests.waiting import PATIENCE
from upgd.cli import main
from upgd.engine import EagerRun
from upgd.engine.batched import BatchedRun
from upgd.ledger import Ledger, RunSpec, ledger
from upgd.ledger import crash_points as crash
from upgd.study import learners

ROOT = Path(__file__).parents[1]
TOY = "toy-changing-inputs"
WINDOW = {"window": 20, "hidden": "32-16"}

# One run of each end: done, diverged, failed.
SMALL = [
    RunSpec(TOY, "adam", {"lr": 0.01}, 0, 40, WINDOW),
    RunSpec(TOY, "sgd", {"lr": 1e6}, 0, 400, WINDOW),
    RunSpec(TOY, "sgd", {"lr": 0.01}, 0, 40, {"unknown": 1}),
]
POISON = RunSpec(TOY, "sgd", {"lr": 0.002}, 0, 40, WINDOW)
HEALTHY = RunSpec(TOY, "sgd", {"lr": 0.003}, 0, 40, WINDOW)


def whole_study(folder: Path, specs: list[RunSpec]) -> None:
    """A study from its first write to its last, every kind of write among them."""
    with Ledger.open(folder) as opened:
        opened.add(specs)
        work(opened, checkpoint_seconds=0.0)
        opened.export_csv(folder / "runs.csv")


def results(folder: Path) -> dict[str, Any]:
    """What every run of a study gave, to the last bit; nothing about when and where."""
    found = {}
    with Ledger.open(folder, create=False, read_only=True) as opened:
        for run in opened.runs():
            series = {m: opened.series(run.key, m).tobytes() for m in opened.metrics(run.key)}
            end = None
            if run.result is not None:
                summary = {k: np.float64(v).tobytes() for k, v in run.result.summary.items()}
                end = (summary, run.result.diverged_at, series)
            found[run.key] = (run.spec, run.state, run.error, end)
    return found


# ------------------------------------------------------------------------ in the children
def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _cli(arguments: list[str]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["upgd", *arguments]
    main()


def _kill(arguments: list[str], steps: int, seconds: float) -> None:
    """A command; some time after so many steps, or chunks of stacks, the system ends it."""
    left = steps

    def counted(do: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                end_after(seconds)
            return do(*arguments)

        return wrapped

    EagerRun._losses = counted(EagerRun._losses)
    BatchedRun.advance = counted(BatchedRun.advance)  # type: ignore[method-assign]
    if steps == 0:
        end_after(seconds)
    _cli(arguments)


def end_after(seconds: float) -> None:
    """Let SIGALRM end this process: nobody handles it, so it is as good as SIGKILL."""
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))


def _crash(folder: str, number: int, log: str) -> None:
    """The small study; the process is killed at the crash point with this number."""
    names: list[str] = []

    def point(name: str) -> None:
        if len(names) == number:
            _die()
        names.append(name)

    crash.point = point
    whole_study(Path(folder), SMALL)
    Path(log).write_text(json.dumps(names))


def _poison(folder: str) -> None:
    """A study with a run that always ends its process."""
    prepare = learners.prepare

    def poisoned(spec: RunSpec, *rest: Any) -> Any:
        if spec == POISON:
            _die()
        return prepare(spec, *rest)

    learners.prepare = poisoned
    ledger.PATIENCE = 0.0
    whole_study(Path(folder), [POISON, HEALTHY])


def _signal(arguments: list[str], step: int, number: int) -> None:
    """A command; the process gets a signal in the middle of this step of a run."""
    losses, sent = EagerRun._losses, []

    def signalled(run: EagerRun, *rest: Any) -> Any:
        if run.step == step and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return losses(run, *rest)

    EagerRun._losses = signalled
    _cli(arguments)


CHILDREN = {"cli": _cli, "crash": _crash, "kill": _kill, "poison": _poison, "signal": _signal}


# ------------------------------------------------------------------------- in the server
def serve() -> None:
    """Answer requests: fork, wait, tell the exit code or minus the signal that ended it."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 99
            try:
                CHILDREN[name](*arguments)
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


# --------------------------------------------------------------------------- in the tests
class Server:
    """The other end: starts the server and asks it."""

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.killing"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)

    def run(self, name: str, *arguments: Any) -> int:
        """Run one of CHILDREN in a process of its own; returns how it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


if __name__ == "__main__":
    serve()
