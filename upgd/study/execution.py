"""What executions of all kinds share: from checkpoints to results.

An :class:`Execution` advances some runs together and passes their checkpoints and results to a
:class:`Reporter`; its :class:`Recorder` decides when a checkpoint is due and makes results.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.engine import memory
from upgd.ledger.checkpoints import Checkpoint
from upgd.ledger.errors import SpecError, StudyError
from upgd.ledger.records import Result, Series
from upgd.ledger.spec import RunSpec, Scalar
from upgd.ledger.versions import all_versions, commit, versions
from upgd.streams import DataError
from upgd.study.options import Options

CHECKPOINT_SHARE = 0.02
LONGEST_LOSS = 60.0  # after a kill, at most so many seconds of work are done again
FIRST_CHECKPOINT = 1.0  # seconds; it shows the ledger that an attempt makes progress


@dataclass(frozen=True)
class Progress:
    """How far runs are."""

    spec: RunSpec  # one of them
    step: int  # where it stands
    rate: float  # steps per second of all of them together
    latest: Mapping[str, float]  # its last metrics
    others: tuple[RunSpec, ...] = ()  # runs that advance together with this one
    # The rate's share of what the device's memory allows, where that is known.
    share: float | None = None


@dataclass
class Tally:
    """How many runs ended in which way, with errors and notes for the user."""

    done: int = 0
    diverged: int = 0
    failed: int = 0
    failed_earlier: int = 0  # runs that had failed before and were not tried again
    lost: int = 0
    errors: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Runs that stay pending, since they cannot be done here; a line per reason."""
    notes: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Reporter(Protocol):
    """Where an execution gets checkpoints from, and where it reports to."""

    def load(self, spec: RunSpec) -> Checkpoint | None:
        """A run's checkpoint, if there is one that can be read."""

    def save(self, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], facts: Any) -> None:
        """Keep a run's checkpoint."""

    def alive(self) -> None:
        """Report that the runs advance; raises KeyboardInterrupt if the work shall stop."""

    def wants_progress(self) -> bool:
        """Whether it is time to report how far the runs are; raises as :meth:`alive`."""

    def progress(self, progress: Progress) -> None:
        """Report how far they are."""

    def note(self, text: str) -> None:
        """Report a note for the user."""

    def finish(self, results: Sequence[tuple[RunSpec, Result]]) -> None:
        """Keep the results of runs; their checkpoints can be removed."""


class Execution:
    """An attempt at some runs, which take each step together."""

    specs: Sequence[RunSpec]
    options: Options

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
        """Keep a checkpoint of every run, unless they are in the middle of a step."""
        raise NotImplementedError

    def execute(self) -> None:
        """From the beginning to the end; StudyError if the device has failed, not the runs."""
        try:
            self.begin()
            self.learn()
            self.finish()
        except Exception as error:
            if not memory.is_lost(self.options.device):
                raise
            [why, *_] = str(error).splitlines() or [type(error).__name__]
            raise StudyError(
                f"{self.options.device} has failed ({why}); 'upgd resume' continues from the last "
                "checkpoints"
            ) from error


def is_environment_error(error: Exception) -> bool:
    """Whether every other run would fail likewise: a full disk, missing data or packages."""
    if isinstance(error, SpecError):
        return False
    return isinstance(error, StudyError | DataError | OSError | ImportError)


class Recorder:
    """Saves the checkpoints of runs that advance together when they are due; makes results.

    Results name `engine` and `device`, and depend on `packages`. From one checkpoint to the next
    there are `pause` seconds; by default between the two `pauses`, so that they take 2% of time.
    """

    def __init__(
        self,
        reporter: Reporter,
        engine: str,
        device: str,
        pauses: tuple[float, float],
        pause: float | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        self.reporter, self.engine, self.device, self.packages = reporter, engine, device, packages
        self._pauses, self._pause = pauses, pause
        self._started, self._worked = time.time(), 0.0
        self._earlier: dict[str, str] = {}  # versions with which the runs were begun, if others
        self._cost, self._saved_once = 0.0, False
        commit()  # is cached: that of the code which runs, even if files change meanwhile
        self.start()

    # ------------------------------------------------------------------------- checkpoints
    def load(self, spec: RunSpec) -> Checkpoint | None:
        """A run's checkpoint by the same engine and device, if there is one."""
        found = self.reporter.load(spec)
        return found if found is not None and found[1].get("stack") == self._stack(spec) else None

    def save(self, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], run: Any) -> None:
        """Keep a run's checkpoint: arrays, and what fits into JSON."""
        facts = {"run": run, "stack": self._stack(spec)}
        facts |= {"wall": self._wall(), "started": self._started, "earlier": self._earlier}
        self.reporter.save(spec, arrays, facts)

    def _stack(self, spec: RunSpec) -> dict[str, str]:
        """What must be the same for a continued run to be the uninterrupted one."""
        same = {"run": spec.key, "engine": self.engine, "device": self.device}
        return same | versions(self.packages)

    # -------------------------------------------------------------------------------- time
    def start(self, *taken_up: Checkpoint) -> None:
        """Work begins now, or continues from these checkpoints."""
        if taken_up:
            self._worked = max(float(facts["wall"]) for _, facts in taken_up)
            self._started = min(float(facts["started"]) for _, facts in taken_up)
            for _, facts in taken_up:
                self._earlier |= facts.get("earlier", {})
        self._since = self._saved = time.monotonic()

    def tend(self, save: Callable[[], None]) -> None:
        """Call `save` when a checkpoint is due, and :meth:`Reporter.alive`."""
        now = time.monotonic()
        if now - self._saved >= self._until_next():
            save()
            self._saved, self._saved_once = time.monotonic(), True
            self._cost = self._saved - now
        self.reporter.alive()

    def _until_next(self) -> float:
        if self._pause is not None:
            return self._pause
        if not self._saved_once:
            return FIRST_CHECKPOINT
        least, most = self._pauses
        return min(most, max(least, self._cost / CHECKPOINT_SHARE))

    def _wall(self) -> float:
        """Seconds of work, without interruptions."""
        return self._worked + time.monotonic() - self._since

    # ------------------------------------------------------------------------------ results
    def result(
        self,
        steps: int,
        values: Mapping[str, NDArray[np.float64]],
        window: int,
        task_length: int | None,
        offline: Sequence[float] = (),
        diverged_at: int | None = None,
        **host: Scalar,
    ) -> Result:
        """The result of a run from means over windows by metric.

        `window` and `task_length` are in samples; `offline` has held-out accuracies, one per task.
        """
        used = all_versions(self.device, self.packages)
        for name, earlier in self._earlier.items():
            used[name] = f"{earlier} then {used[name]}"
        series = {name: Series(value, window) for name, value in values.items()}
        if offline:
            series["offline_accuracy"] = Series(offline, task_length or window)
        return Result(
            engine=self.engine,
            device=self.device,
            versions=used,
            host={"machine": platform.machine(), "system": platform.system(), **host},
            started=self._started,
            finished=time.time(),
            wall=self._wall(),
            summary=summarise(steps, values, window, task_length),
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
