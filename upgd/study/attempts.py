"""An attempt at some runs: from their checkpoints to their results, wherever it takes place."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from upgd.engine import Divergence, EagerRun, Setting, memory
from upgd.engine.batched import BatchedRun, kind_of
from upgd.streams import DataError, Problem
from upgd.study.errors import SpecError, StudyError
from upgd.study.files import Checkpoint
from upgd.study.keeping import LONGEST_LOSS, Keeper
from upgd.study.prepare import plan, prepare
from upgd.study.records import Result
from upgd.study.sinks import Progress, Sink
from upgd.study.spec import RunSpec

EAGER = "eager"
BATCHED = "batched-"
"""How results call engines; after the latter comes the kind of stack."""


@dataclass(frozen=True)
class Means:
    """What attempts work with.

    Attributes:
        data_dir: Where data are looked for first.
        device: Where learners run.
        pause: Seconds from one checkpoint to the next; by default as few as cost 2% of the time.
    """

    data_dir: str | os.PathLike[str] | None = None
    device: str = "cpu"
    pause: float | None = None


class Attempt:
    """An attempt at some runs; they take each step together."""

    specs: Sequence[RunSpec]
    means: Means

    def begin(self) -> None:
        """Make the learners, or continue from checkpoints if there are any."""
        raise NotImplementedError

    def learn(self) -> None:
        """Advance to the end."""
        raise NotImplementedError

    def finish(self) -> None:
        """Hand over every run's result."""
        raise NotImplementedError

    def save(self) -> None:
        """Keep a checkpoint of every run, unless they stand in the middle of a step."""
        raise NotImplementedError

    def carry_out(self) -> None:
        """From the beginning to the end.

        Raises:
            StudyError: The device serves this process no more, which is not the runs' fault.
        """
        try:
            self.begin()
            self.learn()
            self.finish()
        except Exception as error:
            if not memory.is_lost(self.means.device):
                raise
            [why, *_] = str(error).splitlines() or [type(error).__name__]
            raise StudyError(
                f"{self.means.device} has failed ({why}); 'upgd resume' goes on from the last "
                "checkpoints"
            ) from error


def is_the_machines(error: Exception) -> bool:
    """Whether the next run would meet the same: a full disk, data that are not here."""
    if isinstance(error, SpecError):
        return False
    return isinstance(error, StudyError | DataError | OSError | ImportError)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt wait for the end of this; a second one does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else's business
        yield
        return
    waiting = False

    def note(number: int, frame: Any) -> None:
        nonlocal waiting
        if waiting:
            raise KeyboardInterrupt
        waiting = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            raise KeyboardInterrupt


class Alone(Attempt):
    """One run on the eager engine."""

    run: EagerRun | None = None

    def __init__(self, sink: Sink, spec: RunSpec, means: Means) -> None:
        self.sink, self.spec, self.means = sink, spec, means
        self.specs = [spec]
        self.keeper = Keeper(sink, EAGER, means.device, (5.0, LONGEST_LOSS / 2), means.pause)
        self._whole = True
        self._diverged_at: int | None = None

    def begin(self) -> None:
        self.run = self._make()
        found = self.keeper.load(self.spec)
        if found is not None:
            try:
                self.run.restore(found[0], found[1]["run"])
                self.keeper.start(found)
                return
            except Exception:  # whatever is wrong with it, the run can begin anew
                self.run = self._make()
        self.keeper.start()

    def _make(self) -> EagerRun:
        return prepare(self.spec, self.means.data_dir, self.means.device)

    def learn(self) -> None:
        """Advance to the end, or to where it diverges."""
        try:
            self._learn()
        except Divergence as end:
            self._diverged_at = end.step

    def _learn(self) -> None:
        """Advance in pieces of about half a second."""
        assert self.run is not None
        run, steps = self.run, self.spec.steps
        piece = 20
        while run.step < steps:
            before = time.monotonic()
            count = min(piece, steps - run.step)
            with uninterrupted():
                self._whole = False
                run.advance(count)
                self._whole = True
            took = max(time.monotonic() - before, 1e-6)
            piece = max(1, min(100_000, int(count * 0.5 / took)))
            if self.sink.listens():
                latest = {k: v[-1] for k, v in run.meter.closed.items() if v}
                self.sink.tell(Progress(self.spec, run.step, count / took, latest))
            if run.step < steps:
                self.keeper.tend(self.save)

    def save(self) -> None:
        if self.run is not None and self.run.step and self._whole:
            self.keeper.save(self.spec, *self.run.state())

    def finish(self) -> None:
        assert self.run is not None
        run = self.run
        values = {name: run.meter.series(name) for name in run.meter.closed}
        length = run.stream.task_length
        result = self.keeper.result(
            run.step, values, run.setting.window, length, run.offline, self._diverged_at
        )
        self.sink.finish([(self.spec, result)])


class Stack(Attempt):
    """Runs in lock step on the batched engine; see :mod:`upgd.engine.batched`.

    Runs whose checkpoints do not all stand at one step begin anew.
    """

    def __init__(self, sink: Sink, specs: Sequence[RunSpec], means: Means) -> None:
        self.sink, self.specs, self.means = sink, specs, means
        self.run: BatchedRun | None = None
        self.keeper = stack_keeper(sink, specs[0], means)
        self._whole = True

    def begin(self) -> None:
        self.run = self._make()
        found = [stack_checkpoint(self.keeper, spec) for spec in self.specs]
        saved = [one for one in found if one is not None]
        if len(saved) == len(self.specs):
            try:
                self.run.restore([(arrays, facts["run"]) for arrays, facts in saved])
                self.keeper.start(*saved)
                return
            except Exception:  # whatever is wrong with them, the runs can begin anew
                self.run = self._make()
        self.keeper.start()

    def _make(self) -> BatchedRun:
        specs, means = self.specs, self.means
        plans: list[tuple[Problem, Setting]] = [plan(spec) for spec in specs]
        problem = plans[0][0]
        streams = [problem.make(spec.seed, means.data_dir) for spec in specs]
        settings = [setting for _, setting in plans]
        with uninterrupted():  # compilers lose an interrupt
            return BatchedRun(problem, settings, streams, specs[0].steps, means.device)

    def learn(self) -> None:
        """Advance to the end, chunk by chunk."""
        assert self.run is not None
        run, specs = self.run, tuple(self.specs)
        while run.step < run.steps:
            before, first = time.monotonic(), run.step
            with uninterrupted():
                self._whole = False
                run.advance(run.next_stop() - first)
                self._whole = True
            if self.sink.listens():
                # Reading them waits for the device: only now the time is known.
                latest = {name: float(v[-1]) for name, v in run.series(0).items() if len(v)}
                took = max(time.monotonic() - before, 1e-6)
                rate = (run.step - first) * len(specs) / took
                share = run.share_of_roofline(rate)
                self.sink.tell(Progress(specs[0], run.step, rate, latest, specs[1:], share))
            if run.step < run.steps:
                self.keeper.tend(self.save)

    def save(self) -> None:
        if self.run is not None and self.run.step and self._whole:
            whole = {} if self.run.kind == "dense" else {"together": together(self.specs)}
            for i, spec in enumerate(self.specs):
                arrays, facts = self.run.state(i)
                self.keeper.save(spec, arrays, facts | whole)

    def finish(self) -> None:
        assert self.run is not None
        ends = [self.run.diverged_at(i) for i in range(len(self.specs))]
        results = [self._result(i, end) for i, end in enumerate(ends)]
        self.sink.finish(list(zip(self.specs, results, strict=True)))

    def _result(self, number: int, diverged_at: int | None) -> Result:
        assert self.run is not None
        run = self.run
        return self.keeper.result(
            run.step if diverged_at is None else diverged_at,
            run.series(number),
            run.window,
            run.problem.task_length,
            run.offline[number],
            diverged_at,
            runs_in_stack=len(self.specs),
        )


def together(specs: Sequence[RunSpec]) -> str:
    """Tells stacks of other runs apart, by which PyTorch may order sums in another way."""
    return hashlib.sha256("\n".join(spec.key for spec in specs).encode()).hexdigest()[:16]


def told_if_parted(specs: Sequence[RunSpec], run: Any) -> str | None:
    """What to say of runs whose checkpoints are of a stack of other runs, where that matters.

    Args:
        specs: Runs that go on together.
        run: What a checkpoint of one of them tells, if there is one; that of the others is alike.
    """
    before = run.get("together") if isinstance(run, dict) else None
    if before is None or before == together(specs):
        return None
    runs = "1 run goes" if len(specs) == 1 else f"{len(specs)} runs go"
    return f"{runs} on in another stack than before, where sums may be rounded otherwise"


def stack_keeper(sink: Sink, spec: RunSpec, means: Means) -> Keeper:
    """Keeps the runs of a stack, of which this is one."""
    kind, device = kind_of(*plan(spec), means.device), device_name(means.device)
    return Keeper(sink, f"{BATCHED}{kind}", device, (10.0, LONGEST_LOSS), means.pause)


def device_name(device: str) -> str:
    """What results of stacks call a device: the model of a GPU, since bits depend on it."""
    on_gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if on_gpu else device


def stack_checkpoint(keeper: Keeper, spec: RunSpec) -> Checkpoint | None:
    """A run's checkpoint with which a stack can go on, if there is one."""
    found = keeper.load(spec)
    run = None if found is None else found[1].get("run")
    step = run.get("step") if isinstance(run, dict) else None
    return found if isinstance(step, int) and 0 < step <= spec.steps else None
