"""Where runs under way leave what they have: in the study's folder, or on the way to it.

An attempt (:mod:`upgd.study.attempts`) does not know who keeps its checkpoints and results. In the
process that holds the claims a :class:`StudySink` writes them; in a worker a
:class:`upgd.study.jobs.Wire` sends them to the driver, which writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from upgd.study import crash
from upgd.study.errors import LeaseLostError, LedgerError, StudyError
from upgd.study.files import Checkpoint, load_checkpoint_or_none, remove_partial, save_checkpoint
from upgd.study.ledger import Ledger
from upgd.study.records import Claim, Result
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
    failed_earlier: int = 0
    """Runs that had failed before, which were not tried again."""
    lost: int = 0
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Sink(Protocol):
    """What an attempt tells, and whom it asks for checkpoints."""

    @property
    def beat_seconds(self) -> float:
        """How often it wants to hear that the runs are alive."""

    def load(self, spec: RunSpec) -> Checkpoint | None:
        """A run's checkpoint, if there is one that can be read."""

    def save(self, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], facts: Any) -> None:
        """Keep a run's checkpoint."""

    def alive(self, kept: bool) -> None:
        """All runs are worked on; `kept` says that checkpoints were saved.

        Raises:
            LeaseLostError: If one of them is not ours any more.
            KeyboardInterrupt: If the work shall stop.
        """

    def listens(self) -> bool:
        """Whether it wants to know how far the runs are."""

    def tell(self, progress: Progress) -> None:
        """Say how far they are."""

    def finish(self, results: Sequence[tuple[RunSpec, Result]]) -> None:
        """Keep the results of runs; their checkpoints are of no use any more."""


class StudySink:
    """Keeps claimed runs in their study.

    Args:
        ledger: The study's.
        claims: The runs.
        tally: Where to count what became of them.
        on_progress: Told how far they are.
    """

    def __init__(
        self,
        ledger: Ledger,
        claims: Sequence[Claim],
        tally: Tally,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.ledger, self.tally, self.on_progress = ledger, tally, on_progress
        self.claims = {claim.spec.key: claim for claim in claims}
        self.beat_seconds = min(claim.lease_seconds for claim in claims) / 4

    def load(self, spec: RunSpec) -> Checkpoint | None:
        return load_checkpoint_or_none(checkpoint_path(self.ledger, spec.key))

    def save(self, spec: RunSpec, arrays: Mapping[str, NDArray[Any]], facts: Any) -> None:
        save_checkpoint(checkpoint_path(self.ledger, spec.key), arrays, facts)

    def alive(self, kept: bool) -> None:
        self.ledger.heartbeat_all(self.claims.values(), progress=kept)

    def listens(self) -> bool:
        return self.on_progress is not None

    def tell(self, progress: Progress) -> None:
        if self.on_progress is not None:
            self.on_progress(progress)

    def finish(self, results: Sequence[tuple[RunSpec, Result]]) -> None:
        pairs = [(self.claims[spec.key], result) for spec, result in results]
        settle(self.ledger, pairs, self.tally)

    def fail(self, reason: str, told: str = "") -> None:
        """Record that these runs went wrong; the tally has `told` if that is shorter."""
        for claim in self.claims.values():
            with suppress(LeaseLostError):
                self.ledger.fail(claim, reason, retry=False)
            self.tally.failed += 1
            self.tally.errors.append(f"{claim.spec.label()}: {told or reason}")

    def release(self) -> None:
        """Give all runs back that are still ours."""
        for claim in self.claims.values():
            with suppress(StudyError):  # the first error is the one to tell
                self.ledger.release(claim)


def settle(ledger: Ledger, results: Sequence[tuple[Claim, Result]], tally: Tally) -> None:
    """Commit results in one transaction and count them; their checkpoints are removed after."""
    lost = {claim.spec.key for claim in ledger.settle(results)}
    for claim, result in results:
        key = claim.spec.key
        if key in lost:  # another process has it; its result will be the same
            tally.lost += 1
            continue
        if result.diverged_at is None:
            tally.done += 1
        else:
            tally.diverged += 1
        forget(ledger, key)


# -------------------------------------------------------------------------- checkpoints
def checkpoints(ledger: Ledger) -> Path:
    """The folder where a study's checkpoints lie."""
    folder = ledger.path.parent / "checkpoints"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StudyError(f"cannot keep checkpoints in {folder}: {reason}; move it away") from error
    return folder


def kept_checkpoints(ledger: Ledger) -> dict[str, Path]:
    """All that there are, by the keys of their runs."""
    return {path.stem: path for path in checkpoints(ledger).glob("*.npz")}


def checkpoint_path(ledger: Ledger, key: str) -> Path:
    """Where a run's checkpoint lies, if it has one."""
    return checkpoints(ledger) / f"{key}.npz"


def forget(ledger: Ledger, key: str) -> None:
    """Remove a run's checkpoint: it is over."""
    crash.point("forget: before removal")
    checkpoint_path(ledger, key).unlink(missing_ok=True)
    crash.point("forget: after removal")


def tidy(ledger: Ledger) -> None:
    """Remove what killed processes left: checkpoints of runs that are over, half-written files."""
    folder = checkpoints(ledger)
    remove_partial(folder)
    for file in folder.glob("*.npz"):
        with suppress(LedgerError):  # a file that is not ours
            if ledger.get(file.stem).result is not None:
                file.unlink(missing_ok=True)
