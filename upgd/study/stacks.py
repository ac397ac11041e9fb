"""Do the work of a study many runs at a time; see :mod:`upgd.engine.batched`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from upgd.engine import Setting, memory
from upgd.engine.batched import BatchedRun, kind_of
from upgd.streams import Problem
from upgd.study.errors import LeaseLostError, SpecError, StudyError
from upgd.study.keeping import LONGEST_LOSS, Keeper, Saved, tidy
from upgd.study.ledger import Ledger
from upgd.study.prepare import check_device, plan
from upgd.study.records import Claim, Result, owner_name
from upgd.study.spec import RunSpec
from upgd.study.work import Progress, Tally, at_work, evict_departed, is_the_machines, uninterrupted

PER_CORE = 8
"""Runs of a stack on the CPU, for each core: enough that fast ones make up for slow ones."""
MOST_ON_CUDA = 400
"""Runs of a stack on a GPU: beyond, more runs take more time and nothing is gained."""


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
            out; the tally's notes have the same.
    """
    check_device(device)
    owner = owner_name()
    job = _Job(ledger, data_dir, device, on_progress, checkpoint_seconds, on_note)
    tidy(ledger)
    tried: set[str] = set()
    said: set[Any] = set()
    with at_work(ledger, owner):
        while True:
            evict_departed(ledger)
            group = _next_group(ledger, where, device, tried)
            if not group:
                return job.tally
            size, why = (most, "") if most else _stack_size(group, data_dir, device)
            size = min(size, job.most or size)
            key = _stack_key(group[0], device)
            if len(group) > size and key not in said:
                said.add(key)
                job.say(f"{len(group)} runs: {size} at a time{why}")
            keys = [spec.key for spec in group[:size]]
            claims = ledger.claim(owner, lease_seconds, limit=len(keys), where={"key": keys})
            tried.update(keys)
            _in_stacks(job, claims)


@dataclass
class _Job:
    """What stays the same from stack to stack."""

    ledger: Ledger
    data_dir: str | os.PathLike[str] | None
    device: str
    on_progress: Callable[[Progress], None] | None
    pause: float | None
    on_note: Callable[[str], None] | None
    tally: Tally = field(default_factory=Tally)
    most: int | None = None
    """Runs in a stack, after more were too many."""

    def say(self, note: str) -> None:
        """Tell the user, and the tally."""
        self.tally.notes.append(note)
        if self.on_note is not None:
            self.on_note(note)


def _next_group(
    ledger: Ledger, where: Mapping[str, Any] | None, device: str, tried: set[str]
) -> list[RunSpec]:
    """The pending runs that can share a stack with the oldest that can have one at all.

    A suspect gets one of its own, so that it does not take others along.
    """
    chosen: Any = None
    group: list[RunSpec] = []
    suspects = ledger.suspects()
    for spec in ledger.claimable(where):
        if spec.key in tried:
            continue
        try:
            key = _stack_key(spec, device)
        except SpecError:
            continue  # the eager engine tells what is wrong with it
        if key is None or chosen not in (None, key):
            continue
        if spec.key in suspects:  # they come last
            return group or [spec]
        chosen = key
        group.append(spec)
    return group


def _stack_key(spec: RunSpec, device: str) -> Any:
    """What runs of one stack have in common; None if this one cannot be in any."""
    problem, setting = plan(spec)
    try:
        kind = kind_of(problem, setting, device)
    except (ValueError, KeyError, TypeError):
        return None
    return None if kind is None else (spec.problem, spec.steps, tuple(spec.options.items()), kind)


def _stack_size(
    group: Sequence[RunSpec], data_dir: str | os.PathLike[str] | None, device: str
) -> tuple[int, str]:
    """How many runs of a group to take at a time, and why not more where memory is the reason."""
    most = MOST_ON_CUDA
    if torch.device(device).type != "cuda":
        most = PER_CORE * torch.get_num_threads()
    memory.make_room()
    free = memory.free_bytes(device)
    try:
        problem, settings = plan(group[0])[0], [plan(spec)[1] for spec in group]
        stream = problem.make(group[0].seed, data_dir)
        need = memory.need(problem, settings, stream, group[0].steps, device)
    except Exception as error:
        if is_the_machines(error):
            raise
        return 1, ""  # it will fail, and say why
    fitting = need.fitting(free)
    if fitting >= most:
        return most, ""
    each, data, room = map(_in_bytes, (max(need.each), need.shared + need.most_inputs, free))
    return fitting, f" (each takes up to {each}, the data {data}; {room} are free)"


def _in_bytes(count: float) -> str:
    """A number of bytes, short.

    >>> _in_bytes(12_345_678), _in_bytes(1_600_000_000)
    ('12.3 MB', '1.6 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e3:.1f} kB"


def _in_stacks(job: _Job, claims: list[Claim]) -> None:
    """Run claims, those at the same step together."""
    waiting = list(_by_step(job, claims))
    try:
        while waiting:
            again = _in_one_stack(job, waiting.pop(0))
            if again:
                memory.make_room()
            waiting = [*again, *waiting]
    except BaseException:
        for claim in [claim for part in waiting for claim in part]:
            with suppress(StudyError):  # the first error is the one to tell
                job.ledger.release(claim)
        raise


def _in_one_stack(job: _Job, claims: list[Claim]) -> list[list[Claim]]:
    """Run claims together; gives back the halves that are to be tried again, each by itself.

    One that is wrong must not take the others along, and half as many take half the memory.
    """
    stack = _Stack(job, claims)
    try:
        stack.begin()
        stack.learn()
        stack.finish()
    except LeaseLostError:
        job.tally.lost += len(claims)
        stack.release()
    except KeyboardInterrupt:
        stack.save()
        stack.release()
        raise
    except Exception as error:
        if is_the_machines(error):
            stack.release()
            raise
        full = memory.is_out_of_memory(error)
        if len(claims) == 1:
            alone = "out of memory, alone on the device"
            stack.fail(alone if full else f"{type(error).__name__}: {error}")
            return []
        half = -(-len(claims) // 2)
        if full:
            job.most = min(half, job.most or half)
            job.say(f"out of memory: {len(claims)} runs go on, {half} at a time")
        return [claims[:half], claims[half:]]
    return []


def _by_step(job: _Job, claims: list[Claim]) -> Iterator[list[Claim]]:
    """Claims grouped by the step at which their checkpoints stand."""
    groups: dict[int, list[Claim]] = {}
    keeper = _keeper(job, claims)
    for claim in claims:
        found = _checkpoint(keeper, claim)
        groups.setdefault(0 if found is None else found[1]["run"]["step"], []).append(claim)
    yield from groups.values()


def _keeper(job: _Job, claims: list[Claim]) -> Keeper:
    kind, device = _stack_key(claims[0].spec, job.device)[-1], job.device
    if torch.device(device).type == "cuda":
        device = torch.cuda.get_device_name(device)
    return Keeper(job.ledger, claims, f"batched-{kind}", device, (10.0, LONGEST_LOSS), job.pause)


def _checkpoint(keeper: Keeper, claim: Claim) -> Saved | None:
    found = keeper.load(claim)
    run = None if found is None else found[1].get("run")
    step = run.get("step") if isinstance(run, dict) else None
    return found if isinstance(step, int) and 0 < step <= claim.spec.steps else None


class _Stack:
    """Claimed runs in one stack, from their checkpoints to their results."""

    def __init__(self, job: _Job, claims: list[Claim]) -> None:
        self.job, self.claims = job, claims
        self.run: BatchedRun | None = None
        self.keeper = _keeper(job, claims)
        self._whole = True

    def begin(self) -> None:
        """Build the stack, and continue from checkpoints if there are any."""
        self.run = self._make()
        found = [_checkpoint(self.keeper, claim) for claim in self.claims]
        saved = [one for one in found if one is not None]
        if len(saved) == len(self.claims):
            try:
                self.run.restore([(arrays, facts["run"]) for arrays, facts in saved])
                self.keeper.start(*saved)
                return
            except Exception:  # whatever is wrong with them, the runs can begin anew
                self.run = self._make()
        self.keeper.start()

    def _make(self) -> BatchedRun:
        specs = [claim.spec for claim in self.claims]
        plans: list[tuple[Problem, Setting]] = [plan(spec) for spec in specs]
        problem = plans[0][0]
        streams = [problem.make(spec.seed, self.job.data_dir) for spec in specs]
        settings = [setting for _, setting in plans]
        with uninterrupted():  # compilers lose an interrupt
            return BatchedRun(problem, settings, streams, specs[0].steps, self.job.device)

    def learn(self) -> None:
        """Advance to the end, chunk by chunk."""
        assert self.run is not None
        run = self.run
        specs = tuple(claim.spec for claim in self.claims)
        while run.step < run.steps:
            before, first = time.monotonic(), run.step
            with uninterrupted():
                self._whole = False
                run.advance(run.next_stop() - first)
                self._whole = True
            if self.job.on_progress is not None:
                # Reading them waits for the device: only now the time is known.
                latest = {name: float(v[-1]) for name, v in run.series(0).items() if len(v)}
                took = max(time.monotonic() - before, 1e-6)
                rate = (run.step - first) * len(specs) / took
                share = run.share_of_roofline(rate)
                self.job.on_progress(Progress(specs[0], run.step, rate, latest, specs[1:], share))
            if run.step < run.steps:
                self.keeper.tend(self.save)

    def save(self) -> None:
        """Write a checkpoint of every run, unless they stand in the middle of a step."""
        if self.run is not None and self.run.step and self._whole:
            for i, claim in enumerate(self.claims):
                self.keeper.save(claim, *self.run.state(i))

    def finish(self) -> None:
        """Commit every run's result."""
        assert self.run is not None
        tally = self.job.tally
        for i, claim in enumerate(self.claims):
            diverged_at = self.run.diverged_at(i)
            result = self._result(i, diverged_at)
            try:
                if diverged_at is None:
                    self.job.ledger.finish(claim, result)
                    tally.done += 1
                else:
                    self.job.ledger.diverge(claim, diverged_at, result)
                    tally.diverged += 1
            except LeaseLostError:
                tally.lost += 1
                continue
            self.keeper.forget(claim)

    def fail(self, reason: str) -> None:
        """Record that these runs went wrong."""
        for claim in self.claims:
            with suppress(LeaseLostError):
                self.job.ledger.fail(claim, reason, retry=False)
            self.job.tally.failed += 1
            self.job.tally.errors.append(f"{claim.spec.label()}: {reason}")

    def release(self) -> None:
        """Give all runs back that are still ours."""
        for claim in self.claims:
            with suppress(StudyError):
                self.job.ledger.release(claim)

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
            runs_in_stack=len(self.claims),
        )
