"""What is kept of runs under way, and what becomes of it: checkpoints, leases, results."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import upgd
from upgd import metrics
from upgd.study import crash
from upgd.study.errors import LedgerError, StudyError
from upgd.study.files import load_checkpoint_or_none, remove_partial, save_checkpoint
from upgd.study.ledger import Ledger
from upgd.study.records import Claim, Result, Series
from upgd.study.spec import Scalar

CHECKPOINT_SHARE = 0.02
LONGEST_LOSS = 60.0
"""After a kill, at most so many seconds of work are done again."""
FIRST_CHECKPOINT = 1.0
"""Seconds until the first one of an attempt, which tells the ledger that it is not in vain."""
Saved = tuple[dict[str, NDArray[Any]], dict[str, Any]]


class Keeper:
    """Keeps runs that advance together.

    Args:
        ledger: The study's.
        claims: The runs.
        engine: What runs them, as results have it.
        device: Where, as results have it.
        pauses: The least and the most seconds from one checkpoint to the next; between them, so
            that they cost 2% of the time.
        pause: Those seconds, if they are given.
    """

    def __init__(
        self,
        ledger: Ledger,
        claims: Sequence[Claim],
        engine: str,
        device: str,
        pauses: tuple[float, float],
        pause: float | None = None,
    ) -> None:
        self.ledger, self.claims = ledger, claims
        self.engine, self.device = engine, device
        self._pauses, self._pause = pauses, pause
        self._started, self._worked = time.time(), 0.0
        self._cost, self._kept = 0.0, False
        self.start()

    # ------------------------------------------------------------------------- checkpoints
    def load(self, claim: Claim) -> Saved | None:
        """A run's checkpoint by the same engine and device, if there is one."""
        found = load_checkpoint_or_none(self._path(claim))
        return found if found is not None and found[1].get("stack") == self._stack(claim) else None

    def save(self, claim: Claim, arrays: Mapping[str, NDArray[Any]], run: Any) -> None:
        """Write a run's checkpoint: arrays, and what fits into JSON."""
        facts = {"run": run, "stack": self._stack(claim)}
        facts |= {"wall": self._wall(), "started": self._started}
        save_checkpoint(self._path(claim), arrays, facts)

    def forget(self, claim: Claim) -> None:
        """Remove a run's checkpoint: it is over."""
        crash.point("forget: before removal")
        self._path(claim).unlink(missing_ok=True)
        crash.point("forget: after removal")

    def _path(self, claim: Claim) -> Path:
        return checkpoints(self.ledger) / f"{claim.spec.key}.npz"

    def _stack(self, claim: Claim) -> dict[str, str]:
        """What must be the same for a continued run to be the uninterrupted one."""
        same = {"run": claim.spec.key, "engine": self.engine, "device": self.device}
        return same | versions()

    # -------------------------------------------------------------------------------- time
    def start(self, *taken_up: Saved) -> None:
        """Work begins now, or goes on from what these checkpoints tell."""
        if taken_up:
            self._worked = max(float(facts["wall"]) for _, facts in taken_up)
            self._started = min(float(facts["started"]) for _, facts in taken_up)
        self._since = self._saved = self._beaten = time.monotonic()

    def tend(self, save: Callable[[], None]) -> None:
        """Save and renew the leases when it is time.

        Raises:
            LeaseLostError: If one of the runs is not the claimant's any more.
        """
        now = time.monotonic()
        saving = now - self._saved >= self._until_next()
        if saving:
            save()
        if saving or now - self._beaten >= self.claims[0].lease_seconds / 4:
            self.ledger.heartbeat_all(self.claims, progress=saving)
            self._beaten = time.monotonic()
        if saving:
            self._cost = time.monotonic() - now
            self._saved, self._kept = time.monotonic(), True

    def _until_next(self) -> float:
        if self._pause is not None:
            return self._pause
        if not self._kept:
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
        """What a run gave.

        Args:
            steps: How many it took.
            values: Means over windows by metric.
            window: Samples per window.
            task_length: Samples per task, if there are tasks.
            offline: Held-out accuracies, one per task.
            diverged_at: The step at which its loss was not finite, if it came to that.
            host: Further facts about where it ran.
        """
        series = {name: Series(value, window) for name, value in values.items()}
        if offline:
            series["offline_accuracy"] = Series(offline, task_length or window)
        return Result(
            engine=self.engine,
            device=self.device,
            versions=versions(),
            host={"machine": platform.machine(), "system": platform.system(), **host},
            started=self._started,
            finished=time.time(),
            wall=self._wall(),
            summary=summarise(steps, values, window, task_length),
            series=series,
            diverged_at=diverged_at,
        )


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
