"""Do the work of a study: claim a run, learn, keep checkpoints, commit the result."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

from upgd.engine import Divergence, EagerRun
from upgd.streams import DataError
from upgd.study.alive import departed, present
from upgd.study.errors import LeaseLostError, SpecError, StudyError
from upgd.study.keeping import LONGEST_LOSS, Keeper, tidy
from upgd.study.ledger import Ledger
from upgd.study.prepare import check_device, prepare
from upgd.study.records import Claim, Result, owner_name
from upgd.study.spec import RunSpec


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    spec: RunSpec
    step: int
    rate: float
    latest: Mapping[str, float]
    others: tuple[RunSpec, ...] = ()
    """Runs in lock step with this one; then the rate is that of all together."""
    share: float | None = None
    """Of the rate that the device's memory allows, where it is known."""


@dataclass
class Tally:
    """What a worker did."""

    done: int = 0
    diverged: int = 0
    failed: int = 0
    lost: int = 0
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def work(
    ledger: Ledger,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    where: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    lease_seconds: float = 60.0,
    checkpoint_seconds: float | None = None,
) -> Tally:
    """Run what is pending until nothing is left; several processes may share a study.

    Runs of processes that died are taken over. A run that goes wrong has failed and the next one
    begins; what is wrong with the machine (its disk, its data, its device) ends the work. An
    interrupt (Ctrl-C) saves a checkpoint, gives the run back and goes on to the caller.

    Args:
        ledger: The study's.
        data_dir: Where data are looked for first.
        device: Where the learners run.
        where: Restricts which runs are taken; see :meth:`Ledger.claim`.
        on_progress: Told about every half second.
        lease_seconds: How long a run stays ours without a sign of life.
        checkpoint_seconds: How often a run is saved; by default so that it costs 2% of the
            time at most, and at least every half minute.

    Raises:
        SpecError: There is no such device here.
    """
    check_device(device)
    owner, tally = owner_name(), Tally()
    tidy(ledger)
    with at_work(ledger, owner):
        while claims := _claim(ledger, owner, lease_seconds, where):
            for claim in claims:
                worker = _Worker(ledger, claim, device, on_progress, checkpoint_seconds)
                _one(ledger, claim, tally, data_dir, device, worker)
    return tally


@contextmanager
def at_work(ledger: Ledger, owner: str) -> Iterator[None]:
    """Be seen as alive; give back what is still held if this ends before its time."""
    with present(ledger.path.parent / "workers", owner):
        try:
            yield
        except BaseException:
            with suppress(StudyError):  # the first error is the one to tell
                ledger.evict(owner)
            raise


def _claim(
    ledger: Ledger, owner: str, lease_seconds: float, where: Mapping[str, Any] | None
) -> list[Claim]:
    evict_departed(ledger)
    return ledger.claim(owner, lease_seconds, where=where)


def evict_departed(ledger: Ledger) -> None:
    """Free the runs of processes that died."""
    for dead in departed(ledger.path.parent / "workers"):
        ledger.evict(dead)


def _one(
    ledger: Ledger,
    claim: Claim,
    tally: Tally,
    data_dir: str | os.PathLike[str] | None,
    device: str,
    worker: _Worker,
) -> None:
    try:
        worker.begin(lambda: prepare(claim.spec, data_dir, device))
        worker.learn()
        ledger.finish(claim, worker.result())
        tally.done += 1
    except Divergence as end:
        ledger.diverge(claim, end.step, worker.result(end.step))
        tally.diverged += 1
    except LeaseLostError:
        tally.lost += 1  # another process has it; its result will be the same
        return
    except KeyboardInterrupt:
        worker.save()
        with suppress(LeaseLostError):  # just finished
            ledger.release(claim)
        raise
    except Exception as error:
        if is_the_machines(error):
            with suppress(StudyError):  # the first error is the one to tell
                ledger.release(claim)
            raise
        ledger.fail(claim, f"{type(error).__name__}: {error}", retry=False)
        tally.failed += 1
        tally.errors.append(f"{claim.spec.label()}: {error}")
        return
    worker.forget()


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


class _Worker:
    """One claimed run, from its checkpoint to its result."""

    run: EagerRun | None = None

    def __init__(
        self,
        ledger: Ledger,
        claim: Claim,
        device: str,
        on_progress: Callable[[Progress], None] | None,
        pause: float | None,
    ) -> None:
        self.claim, self.on_progress = claim, on_progress
        self.keeper = Keeper(ledger, [claim], "eager", device, (5.0, LONGEST_LOSS / 2), pause)
        self._whole = True

    def begin(self, make: Callable[[], EagerRun]) -> None:
        """Take up a checkpoint of this run by the same engine and device, if there is one."""
        self.run = make()
        found = self.keeper.load(self.claim)
        if found is not None:
            try:
                self.run.restore(found[0], found[1]["run"])
                self.keeper.start(found)
                return
            except Exception:  # whatever is wrong with it, the run can begin anew
                self.run = make()
        self.keeper.start()

    def learn(self) -> None:
        """Advance to the end in pieces of about half a second."""
        assert self.run is not None
        run, steps = self.run, self.claim.spec.steps
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
            if self.on_progress is not None:
                latest = {k: v[-1] for k, v in run.meter.closed.items() if v}
                self.on_progress(Progress(self.claim.spec, run.step, count / took, latest))
            if run.step < steps:
                self.keeper.tend(self.save)

    def save(self) -> None:
        """Write a checkpoint, unless the run stands in the middle of a step."""
        if self.run is not None and self.run.step and self._whole:
            self.keeper.save(self.claim, *self.run.state())

    def forget(self) -> None:
        """Remove the checkpoint: the run is over."""
        self.keeper.forget(self.claim)

    def result(self, diverged_at: int | None = None) -> Result:
        """What the run gave."""
        assert self.run is not None
        run = self.run
        values = {name: run.meter.series(name) for name in run.meter.closed}
        length = run.stream.task_length
        return self.keeper.result(
            run.step, values, run.setting.window, length, run.offline, diverged_at
        )
