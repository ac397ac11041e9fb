"""Do the work of a study: claim a run, learn, keep checkpoints, commit the result."""

from __future__ import annotations

import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import upgd
from upgd import metrics
from upgd.engine import Divergence, EagerRun, Setting
from upgd.networks import build
from upgd.optim.registry import get as get_method
from upgd.streams import DataError, Problem
from upgd.streams import get as get_problem
from upgd.study import crash
from upgd.study.alive import departed, present
from upgd.study.errors import LeaseLostError, LedgerError, SpecError, StudyError
from upgd.study.files import load_checkpoint_or_none, remove_partial, save_checkpoint
from upgd.study.ledger import Ledger
from upgd.study.records import Claim, Result, Series, owner_name
from upgd.study.spec import RunSpec, Scalar

CHECKPOINT_SHARE = 0.02
LONGEST_LOSS = 60.0
"""After a kill, at most so many seconds of work are done again."""
FIRST_CHECKPOINT = 1.0
"""Seconds until the first one of an attempt, which tells the ledger that it is not in vain."""


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


def prepare(
    spec: RunSpec, data_dir: str | os.PathLike[str] | None = None, device: str = "cpu"
) -> EagerRun:
    """The run that `spec` describes, at its first step.

    Raises:
        SpecError: The specification does not fit the problem or the method.

    Example:
        >>> from upgd.study import RunSpec
        >>> from upgd.study.work import prepare
        >>> spec = RunSpec("label-permuted-digits", "upgd", {"lr": 0.01}, seed=0, steps=10)
        >>> prepare(spec).advance(10)
    """
    problem, setting = plan(spec)
    stream = problem.make(spec.seed, data_dir)
    try:
        return EagerRun(
            stream,
            lambda seed, task: build(problem.network, seed, problem.activation, task),
            setting,
            device,
        )
    except (ValueError, RuntimeError) as error:  # PyTorch has the latter for what is too large
        raise SpecError(f"{spec.label()}: {str(error).splitlines()[0]}") from error


def plan(spec: RunSpec) -> tuple[Problem, Setting]:
    """The problem and the setting that a specification describes.

    Raises:
        SpecError: The specification does not fit the problem or the method.
    """
    options = dict(spec.options)
    try:
        problem = _problem(spec, options)
        get_method(spec.method)
        setting = Setting(
            spec.method,
            _arguments(spec),
            spec.seed,
            window=_whole(options, "window", problem.window),
            batch=_whole(options, "batch", 1),
            restart=bool(_whole(options, "restart", 0)),
            held_out=_whole(options, "held_out", 0),
            stride=_whole(options, "stride", 0),
        )
    except (ValueError, KeyError) as error:  # no such problem or method
        raise SpecError(str(error.args[0])) from error
    if options:
        raise SpecError(f"unknown option {', '.join(sorted(options))} in {spec.label()}")
    return problem, setting


def _whole(options: dict[str, Scalar], name: str, default: int) -> int:
    value = options.pop(name, default)
    if not isinstance(value, int):
        raise SpecError(f"{name} must be a whole number, got {value!r}")
    return value


def _problem(spec: RunSpec, options: dict[str, Scalar]) -> Problem:
    """The problem, with the tasks and the network that `options` ask for and which it takes out."""
    problem = get_problem(spec.problem)
    length, hidden = options.pop("task_length", None), options.pop("hidden", None)
    if length is not None:
        if problem.task_length is None:
            raise SpecError(f"{spec.problem} has no tasks; leave task_length out")
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise SpecError(f"task_length must be a whole number from 1 on, got {length!r}")
        window = problem.window // problem.task_length * length  # a point stays as many tasks
        problem = replace(problem, task_length=length, window=window)
    if hidden is not None:
        if isinstance(problem.network, str):
            raise SpecError(f"{spec.problem} has a convolutional network; leave hidden out")
        if not isinstance(hidden, str) or not re.fullmatch(
            r"[1-9][0-9]{0,5}(-[1-9][0-9]{0,5})*", hidden
        ):
            raise SpecError(
                f"hidden is the units of each hidden layer, such as 64-32; got {hidden!r}"
            )
        units = (problem.network[0], *map(int, hidden.split("-")), problem.network[-1])
        problem = replace(problem, network=units)
    return problem


def _arguments(spec: RunSpec) -> dict[str, Any]:
    """The optimizer's arguments: ``beta1`` and ``beta2`` are its ``betas``."""
    hyper: dict[str, Any] = dict(spec.hyper)
    if "beta1" in hyper or "beta2" in hyper:
        _, defaults = get_method(spec.method)
        first, second = defaults.get("betas", (None, None))
        hyper["betas"] = (hyper.pop("beta1", first), hyper.pop("beta2", second))
    return hyper


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


def check_device(device: str) -> None:
    """Raise unless learners can run on `device`.

    Raises:
        SpecError: There is no such device here.

    Example:
        >>> check_device("cpu")
        >>> check_device("gpu")
        Traceback (most recent call last):
        upgd.study.errors.SpecError: cannot run on device 'gpu'; 'cpu' always works, 'cuda' where \
PyTorch finds a GPU
    """
    try:
        kind = torch.device(device).type
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ValueError, TypeError):
        kind = ""
    if kind in ("", "meta"):
        raise SpecError(
            f"cannot run on device {device!r}; 'cpu' always works, 'cuda' where PyTorch finds a GPU"
        )


def _claim(
    ledger: Ledger, owner: str, lease_seconds: float, where: Mapping[str, Any] | None
) -> list[Claim]:
    evict_departed(ledger)
    return ledger.claim(owner, lease_seconds, where=where)


def evict_departed(ledger: Ledger) -> None:
    """Free the runs of processes that died."""
    for dead in departed(ledger.path.parent / "workers"):
        ledger.evict(dead)


def tidy(ledger: Ledger) -> None:
    """Remove what killed processes left: checkpoints of runs that are over, half-written files."""
    folder = checkpoints(ledger)
    remove_partial(folder)
    for file in folder.glob("*.npz"):
        with suppress(LedgerError):  # a file that is not ours
            if ledger.get(file.stem).result is not None:
                file.unlink(missing_ok=True)


def checkpoints(ledger: Ledger) -> Path:
    """The folder where a study's checkpoints lie."""
    folder = ledger.path.parent / "checkpoints"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StudyError(f"cannot keep checkpoints in {folder}: {reason}; move it away") from error
    return folder


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
        self.ledger, self.claim, self.device = ledger, claim, device
        self.on_progress = on_progress
        self.pause = pause
        self.checkpoint: Path = checkpoints(ledger) / f"{claim.spec.key}.npz"
        self.started = time.time()
        self.wall = 0.0
        self._since = time.monotonic()
        self._saved = self._beaten = self._since
        self._cost = 0.1
        self._whole, self._kept = True, False

    def begin(self, make: Callable[[], EagerRun]) -> None:
        """Take up a checkpoint of this run by the same engine and device, if there is one."""
        self.run = make()
        found = load_checkpoint_or_none(self.checkpoint)
        if found is not None and found[1].get("stack") == self._stack():
            arrays, meta = found
            try:
                self.run.restore(arrays, meta["run"])
                self.wall, self.started = float(meta["wall"]), float(meta["started"])
            except Exception:  # whatever is wrong with it, the run can begin anew
                self.run, self.wall, self.started = make(), 0.0, time.time()
        self._since = self._saved = self._beaten = time.monotonic()

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
                self._keep(time.monotonic())

    def _keep(self, now: float) -> None:
        """Save and renew the lease when it is time."""
        pause = self.pause
        if pause is None:
            pause = min(LONGEST_LOSS / 2, max(5.0, self._cost / CHECKPOINT_SHARE))
            pause = pause if self._kept else FIRST_CHECKPOINT
        saving = now - self._saved >= pause
        if saving:
            self.save()
        if saving or now - self._beaten >= self.claim.lease_seconds / 4:
            self.ledger.heartbeat(self.claim, progress=saving)
            self._beaten = time.monotonic()
        if saving:
            self._cost = time.monotonic() - now
            self._saved, self._kept = time.monotonic(), True

    def save(self) -> None:
        """Write a checkpoint, unless the run stands in the middle of a step."""
        if self.run is None or self.run.step == 0 or not self._whole:
            return
        arrays, meta = self.run.state()
        facts = {"run": meta, "stack": self._stack(), "wall": self._wall(), "started": self.started}
        save_checkpoint(self.checkpoint, arrays, facts)

    def forget(self) -> None:
        """Remove the checkpoint: the run is over."""
        crash.point("forget: before removal")
        self.checkpoint.unlink(missing_ok=True)
        crash.point("forget: after removal")

    def _wall(self) -> float:
        return self.wall + time.monotonic() - self._since

    def _stack(self) -> dict[str, str]:
        """What must be the same for a continued run to be the uninterrupted one."""
        key = self.claim.spec.key
        return {"run": key, "engine": "eager", "device": self.device, **versions()}

    def result(self, diverged_at: int | None = None) -> Result:
        """What the run gave."""
        assert self.run is not None
        meter, window = self.run.meter, self.run.setting.window
        values = {name: meter.series(name) for name in meter.closed}
        series = {name: Series(value, window) for name, value in values.items()}
        length = self.run.stream.task_length
        if self.run.offline:
            series["offline_accuracy"] = Series(self.run.offline, length or window)
        return Result(
            engine="eager",
            device=self.device,
            versions=versions(),
            host={"machine": platform.machine(), "system": platform.system()},
            started=self.started,
            finished=time.time(),
            wall=self._wall(),
            summary=summarise(self.run.step, values, window, length),
            series=series,
            diverged_at=diverged_at,
        )


def summarise(
    steps: int, series: Mapping[str, NDArray[np.float64]], window: int, task_length: int | None
) -> dict[str, float]:
    """Final metrics: means over the run, and forgetting and loss of plasticity if it has tasks."""
    found: dict[str, float] = {"steps": steps}
    for name, values in series.items():
        finite = values[np.isfinite(values)]
        if len(finite):
            found[name] = float(finite.mean())
    if task_length == window:
        if len(series.get("accuracy", ())) >= 4:
            found["forgetting"] = metrics.forgetting(series["accuracy"])
        if len(series.get("plasticity", ())) >= 8:
            found["loss_of_plasticity"] = metrics.loss_of_plasticity(series["plasticity"], window)
    return found


def versions() -> dict[str, str]:
    """What a result may depend on."""
    return {
        "upgd": upgd.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
