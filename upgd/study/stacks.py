"""Do the work of a study many runs at a time; see :mod:`upgd.engine.batched`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from upgd.engine import memory
from upgd.study.attempts import Means, Stack, stack_checkpoint, stack_keeper, told_if_parted
from upgd.study.backlog import Backlog, Room, begun_otherwise, stack_size
from upgd.study.errors import StudyError
from upgd.study.ledger import Ledger
from upgd.study.prepare import check_device
from upgd.study.records import Claim, owner_name
from upgd.study.sinks import Progress, StudySink, Tally
from upgd.study.work import at_work, carry_out, evict_departed


def work_stacks(
    ledger: Ledger,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    where: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    lease_seconds: float = 60.0,
    checkpoint_seconds: float | None = None,
    most: int | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Tally:
    """Run what is pending and can run in a stack until nothing of that is left.

    What cannot (batches, some methods on convolutional networks) is left to
    :func:`upgd.study.work.work`. Arguments are as there, and:

    Args:
        ledger: The study's.
        data_dir: Where data are looked for first.
        device: Where the stacks run.
        where: Restricts which runs are taken.
        on_progress: Told after every chunk.
        lease_seconds: How long runs stay ours without a sign of life.
        checkpoint_seconds: How often a stack is saved.
        most: Runs in a stack at most; by default as many as pay and fit into memory.
        on_note: Told when runs do not fit into one stack, before they begin or when memory runs
            out, and when they cannot go on as they began; the tally's notes have the same.
    """
    check_device(device)
    owner = owner_name()
    means = Means(data_dir, device, checkpoint_seconds)
    shift = _Shift(ledger, means, on_progress, on_note)
    backlog = Backlog(ledger, where, device, "batched", once=True)
    said: set[Any] = set()
    with at_work(ledger, owner, where):
        for note in begun_otherwise(ledger, where, device, "batched"):
            shift.say(note)
        while True:
            evict_departed(ledger)
            if not backlog:
                backlog.read()
            group = backlog.group()
            if group is None:
                return shift.tally
            memory.make_room()
            room = Room.here(device)
            size, why = (most, "") if most else stack_size(group, data_dir, device, room)
            size = min(size, shift.most or size)
            if len(group.specs) > size and group.key not in said:
                said.add(group.key)
                shift.say(f"{len(group.specs)} runs: {size} at a time{why}")
            keys = [spec.key for spec in group.take(size)]
            claims = ledger.claim(owner, lease_seconds, limit=len(keys), where={"key": keys})
            _in_stacks(shift, claims)


@dataclass
class _Shift:
    """What stays the same from stack to stack."""

    ledger: Ledger
    means: Means
    on_progress: Callable[[Progress], None] | None
    on_note: Callable[[str], None] | None
    tally: Tally = field(default_factory=Tally)
    most: int | None = None
    """Runs in a stack, after more were too many."""

    def sink(self, claims: list[Claim]) -> StudySink:
        """Where these runs leave what they have."""
        return StudySink(self.ledger, claims, self.tally, self.on_progress)

    def say(self, note: str) -> None:
        """Tell the user, and the tally."""
        self.tally.notes.append(note)
        if self.on_note is not None:
            self.on_note(note)


def _in_stacks(shift: _Shift, claims: list[Claim]) -> None:
    """Run claims, those at the same step together."""
    waiting = list(_by_step(shift, claims)) if claims else []
    try:
        while waiting:
            again = _in_one_stack(shift, waiting.pop(0))
            if again:
                memory.make_room()
            waiting = [*(part for half in again for part in _by_step(shift, half)), *waiting]
    except BaseException:
        for claim in [claim for part in waiting for claim in part]:
            with suppress(StudyError):  # the first error is the one to tell
                shift.ledger.release(claim)
        raise


def _in_one_stack(shift: _Shift, claims: list[Claim]) -> list[list[Claim]]:
    """Run claims together; gives back the halves that are to be tried again, each by itself.

    One that is wrong must not take the others along, and half as many take half the memory.
    """
    sink = shift.sink(claims)
    error = carry_out(sink, Stack(sink, [claim.spec for claim in claims], shift.means))
    if error is None:
        return []
    full = memory.is_out_of_memory(error)
    if len(claims) == 1:
        sink.fail(OUT_OF_MEMORY if full else f"{type(error).__name__}: {error}")
        return []
    half = -(-len(claims) // 2)
    if full:
        shift.most = min(half, shift.most or half)
        shift.say(f"out of memory: {len(claims)} runs go on, {half} at a time")
    return [claims[:half], claims[half:]]


OUT_OF_MEMORY = "out of memory, alone on the device"


def _by_step(shift: _Shift, claims: list[Claim]) -> Iterator[list[Claim]]:
    """Claims grouped by the step at which their checkpoints stand, and the stack they are of."""
    groups: dict[Any, tuple[Any, list[Claim]]] = {}
    keeper = stack_keeper(shift.sink(claims), claims[0].spec, shift.means)
    for claim in claims:
        found = stack_checkpoint(keeper, claim.spec)
        run = None if found is None else found[1]["run"]
        key = None if run is None else (run["step"], run.get("together"))
        groups.setdefault(key, (run, []))[1].append(claim)
    for run, some in groups.values():
        if note := told_if_parted([claim.spec for claim in some], run):
            shift.say(note)
        yield some
