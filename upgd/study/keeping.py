"""What is kept of runs under way, and when: checkpoints, signs of life, results."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd import metrics
from upgd.study.errors import CheckpointError, StudyError
from upgd.study.files import Checkpoint, checkpoint_facts
from upgd.study.ledger import Ledger, Where
from upgd.study.records import Result, Series
from upgd.study.sinks import Sink, checkpoints, kept_checkpoints
from upgd.study.spec import RunSpec, Scalar
from upgd.study.versions import OF_AGENTS, all_versions, commit, versions

CHECKPOINT_SHARE = 0.02
LONGEST_LOSS = 60.0
"""After a kill, at most so many seconds of work are done again."""
FIRST_CHECKPOINT = 1.0
"""Seconds until the first one of an attempt, which tells the ledger that it is not in vain."""


def check_versions(ledger: Ledger, where: Where | None = None) -> None:
    """Make sure that runs go on with what they began with.

    Attempts begin anew where a checkpoint is of other versions, and then overwrite it: somebody
    who upgraded in the middle of a study would lose what was done without a word.

    Args:
        ledger: The study's.
        where: Which runs, as for :meth:`Ledger.claim`.

    Raises:
        StudyError: If runs have checkpoints of other versions.
    """
    made, here = Counter[tuple[tuple[str, str], ...]](), versions(OF_AGENTS)
    kept = kept_checkpoints(ledger)
    for spec in ledger.claimable(where) if kept else ():
        with suppress(LookupError, TypeError, ValueError, CheckpointError):  # none, or no use
            stack = dict(checkpoint_facts(kept[spec.key])["stack"])
            made[tuple((n, v) for n, v in stack.items() if v != here.get(n, v))] += 1
    del made[()]
    for others, count in made.most_common(1):
        then = ", ".join(f"{name} {version}" for name, version in others)
        now = ", ".join(f"{name} {here[name]}" for name, _ in others)
        raise StudyError(
            f"{count} run{'s have' if count > 1 else ' has'} been begun with {then}, and here is "
            f"{now}: go on with those versions, or remove {checkpoints(ledger)} to begin anew"
        )


class Keeper:
    """Keeps runs that advance together.

    Args:
        sink: Where their checkpoints are.
        engine: What runs them, as results have it.
        device: Where, as results have it.
        pauses: The least and the most seconds from one checkpoint to the next; between them, so
            that they cost 2% of the time.
        pause: Those seconds, if they are given.
        packages: What the runs depend on besides numpy and torch.
    """

    def __init__(
        self,
        sink: Sink,
        engine: str,
        device: str,
        pauses: tuple[float, float],
        pause: float | None = None,
        packages: Sequence[str] = (),
    ) -> None:
        self.sink, self.engine, self.device, self.packages = sink, engine, device, packages
        self._pauses, self._pause = pauses, pause
        self._started, self._worked = time.time(), 0.0
        self._cost, self._kept = 0.0, False
        commit()  # that of the code which runs, not of what lies there at the end
        self.start()

    # ------------------------------------------------------------------------- checkpoints
    def load(self, spec: RunSpec) -> Checkpoint | None:
        """A run's checkpoint by the same engine and device, if there is one."""
        found = self.sink.load(spec)
        return found if found is not None and found[1].get("stack") == self._stack(spec) else None

    def save(self, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], run: Any) -> None:
        """Keep a run's checkpoint: arrays, and what fits into JSON."""
        facts = {"run": run, "stack": self._stack(spec)}
        facts |= {"wall": self._wall(), "started": self._started}
        self.sink.save(spec, arrays, facts)

    def _stack(self, spec: RunSpec) -> dict[str, str]:
        """What must be the same for a continued run to be the uninterrupted one."""
        same = {"run": spec.key, "engine": self.engine, "device": self.device}
        return same | versions(self.packages)

    # -------------------------------------------------------------------------------- time
    def start(self, *taken_up: Checkpoint) -> None:
        """Work begins now, or goes on from what these checkpoints tell."""
        if taken_up:
            self._worked = max(float(facts["wall"]) for _, facts in taken_up)
            self._started = min(float(facts["started"]) for _, facts in taken_up)
        self._since = self._saved = self._beaten = time.monotonic()

    def tend(self, save: Callable[[], None]) -> None:
        """Save, and say that the runs are alive, when it is time.

        Raises:
            LeaseLostError: If one of the runs is not the claimant's any more.
        """
        now = time.monotonic()
        saving = now - self._saved >= self._until_next()
        if saving:
            save()
        if saving or now - self._beaten >= self.sink.beat_seconds:
            self.sink.alive(kept=saving)
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
            versions=all_versions(self.device, self.packages),
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
