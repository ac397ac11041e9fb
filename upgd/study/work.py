"""Do the work of a study: claim a run, learn, keep checkpoints, commit the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from upgd.study.alive import departed, present
from upgd.study.attempts import Alone, Attempt, Means, is_the_machines
from upgd.study.backlog import begun_otherwise
from upgd.study.errors import LeaseLostError, StudyError
from upgd.study.keeping import check_versions
from upgd.study.ledger import Ledger
from upgd.study.prepare import check_device
from upgd.study.records import Claim, owner_name
from upgd.study.sinks import Progress as Progress
from upgd.study.sinks import StudySink, tidy
from upgd.study.sinks import Tally as Tally


def work(
    ledger: Ledger,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    where: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    lease_seconds: float = 60.0,
    checkpoint_seconds: float | None = None,
    on_note: Callable[[str], None] | None = None,
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
        on_note: Told when runs cannot go on as they began; the tally's notes have the same.

    Raises:
        SpecError: There is no such device here.
        StudyError: Runs have been begun with other versions, or the study cannot be written.
    """
    check_device(device)
    owner, tally = owner_name(), Tally()
    means = Means(data_dir, device, checkpoint_seconds)
    with at_work(ledger, owner, where):
        for note in begun_otherwise(ledger, where, device, "eager"):
            tally.notes.append(note)
            if on_note is not None:
                on_note(note)
        while claims := _claim(ledger, owner, lease_seconds, where):
            for claim in claims:
                sink = StudySink(ledger, [claim], tally, on_progress)
                error = carry_out(sink, Alone(sink, claim.spec, means))
                if error is not None:
                    sink.fail(f"{type(error).__name__}: {error}", str(error))
    return tally


@contextmanager
def at_work(ledger: Ledger, owner: str, where: Mapping[str, Any] | None) -> Iterator[None]:
    """Be seen as alive; give back what is still held if this ends before its time.

    Raises:
        StudyError: If runs have been begun with other versions.
    """
    tidy(ledger)
    evict_departed(ledger)
    check_versions(ledger, where)
    with present(ledger.path.parent / "workers", owner) as presence:
        try:
            yield
        except BaseException:
            try:
                ledger.evict(owner)
            except StudyError:  # such as a full disk; the first error is the one to tell
                presence.holds_runs = True
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


def carry_out(sink: StudySink, attempt: Attempt) -> Exception | None:
    """Carry an attempt out; returns what went wrong with the runs themselves, if anything did."""
    try:
        attempt.carry_out()
    except LeaseLostError:
        sink.tally.lost += len(attempt.specs)  # others have them; their results will be the same
        sink.release()
    except KeyboardInterrupt:
        attempt.save()
        sink.release()
        raise
    except Exception as error:
        if not is_the_machines(error):
            return error
        sink.release()
        raise
    return None
