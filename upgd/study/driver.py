"""The driver of a study: gives jobs to the workers of a pool, and alone writes what they tell.

It claims runs from the ledger, those that can share a stack together, and holds the claims as long
as it works on them. A worker that dies, says nothing for a while or makes no step is replaced, and
its runs go to another from their last checkpoints: at first together, then in halves, then one by
one, so that in the end one that kills its worker fails alone. Another driver, or this one started
again, takes over what a dead driver held, as any process does (:mod:`upgd.study.work`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import upgd
from upgd.study.attempts import Means, told_if_parted
from upgd.study.backlog import Backlog, Group, Room, begun_otherwise, is_of_another, stack_size
from upgd.study.errors import CheckpointError, LeaseLostError, StudyError
from upgd.study.files import checkpoint_facts, save_packed
from upgd.study.jobs import Died, Ended, Event, Finished, Job, Kept, Ready, Told
from upgd.study.ledger import SUSPECT, Ledger
from upgd.study.pools import Pool
from upgd.study.records import Claim, Result, owner_name
from upgd.study.sinks import Progress, Tally, checkpoint_path, settle
from upgd.study.spec import RULES_VERSION
from upgd.study.work import at_work, evict_departed

SILENCE = 60.0
"""Seconds without a word after which a worker is taken for dead."""
STALL = 1800.0
"""Seconds without a step after which it is taken for stuck."""
STARTING = 300.0
"""Seconds for the first worker to come up."""
PATIENCE = 30.0
"""Seconds for interrupted workers to save their runs."""
TURN = 1.0
"""Seconds between looks at the workers."""
LOOK = 30.0
"""Seconds between looks at the ledger for runs that others have given back."""


def drive(
    ledger: Ledger,
    pool: Pool,
    *,
    where: Mapping[str, Any] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    engine: str = "auto",
    on_progress: Callable[[Progress], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    checkpoint_seconds: float | None = None,
    retries: int = 3,
    silence: float = SILENCE,
    stall: float = STALL,
    lease_seconds: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
) -> Tally:
    """Run what is pending in a study on the workers of a pool until nothing is left.

    The first interrupt (Ctrl-C) lets the workers save their runs, gives them back and goes on to
    the caller; a second one does so at once. The pool stays open.

    Args:
        ledger: The study's.
        pool: The workers.
        where: Restricts which runs are taken; see :meth:`Ledger.claim`.
        data_dir: Where workers look for data first.
        device: Where they work.
        engine: ``"auto"``, ``"batched"`` or ``"eager"``.
        on_progress: Told how far runs are, with the rate of all workers together.
        on_note: Told what happens to workers; the tally's notes have the same.
        checkpoint_seconds: How often runs are saved.
        retries: How often a run is tried again without a checkpoint in between, after its worker
            died, hung or ran out of memory.
        silence: Seconds without a word after which a worker is taken for dead.
        stall: Seconds without a step after which it is taken for stuck.
        lease_seconds: How long runs stay ours without a sign of life of this process.
        clock: The time in seconds.

    Raises:
        StudyError: The study cannot be written, no worker can work, or runs have been begun with
            other versions.
    """
    driver = _Driver(
        ledger,
        pool,
        Means(None if data_dir is None else os.fspath(data_dir), device, checkpoint_seconds),
        Backlog(ledger, where, device, engine),
        on_progress,
        on_note,
        retries,
        silence,
        stall,
        lease_seconds,
        clock,
    )
    with at_work(ledger, driver.owner, where), _interrupts() as stopping:
        for note in begun_otherwise(ledger, where, device, engine, here=False):
            driver.say(note)
        driver.run(stopping)
    return driver.tally


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether there was an interrupt; a second one is raised."""
    mine = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not mine or before is not signal.default_int_handler:  # somebody else's business
        yield lambda: False
        return
    seen = False

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Batch:
    """Claimed runs that wait for a worker, together."""

    claims: list[Claim]
    engine: str


@dataclass
class _Hand:
    """A worker, as the driver knows it."""

    room: Room
    heard: float
    stepped: float = 0.0
    step: int = -1
    rate: float = 0.0
    most: int | None = None
    """Runs in its stacks, after more were too many for its memory."""
    batch: _Batch | None = None
    left: dict[str, Claim] = field(default_factory=dict)
    """Runs of its job that have no result yet."""
    kept: bool = False
    """Whether its job has saved checkpoints, so that it is not in vain."""


@dataclass
class _Driver:
    ledger: Ledger
    pool: Pool
    means: Means
    backlog: Backlog
    on_progress: Callable[[Progress], None] | None
    on_note: Callable[[str], None] | None
    retries: int
    silence: float
    stall: float
    lease_seconds: float
    clock: Callable[[], float]
    owner: str = field(default_factory=owner_name)
    tally: Tally = field(default_factory=Tally)
    hands: dict[int, _Hand] = field(default_factory=dict)
    idle: deque[int] = field(default_factory=deque)
    busy: int = 0
    again: deque[_Batch] = field(default_factory=deque)
    held: dict[str, Claim] = field(default_factory=dict)
    deaths: dict[str, int] = field(default_factory=dict)
    """How often in a row a run was tried in vain."""
    results: list[tuple[Claim, Result]] = field(default_factory=list)
    kept: dict[str, Claim] = field(default_factory=dict)
    rate: float = 0.0
    stillborn: int = 0
    unfit: int = 0
    stopping: bool = False
    said: set[Any] = field(default_factory=set)

    # ----------------------------------------------------------------------------- the loop
    def run(self, interrupted: Callable[[], bool]) -> None:
        """Work until nothing is left, or until an interrupt."""
        now = self.clock()
        self.looked = self.read = self.renewed = self.since = now
        evict_departed(self.ledger)
        self.backlog.read()
        self.pool.roll_call()
        while self.busy or self.again or self.backlog or self._look_again():
            self._assign()
            self._turn()
            if interrupted():
                self._stop()
                raise KeyboardInterrupt

    def _turn(self) -> None:
        """Take in what workers tell, write it down, and see to those that tell nothing."""
        before = self.clock()
        for worker, event in self.pool.events(TURN):
            self._take(worker, event)
        self._commit()
        now = self.clock()
        if now - before > max(self.silence, 4 * TURN) / 2:  # it was us: nobody could be heard
            for hand in self.hands.values():
                hand.heard = hand.stepped = now
        if now - self.looked >= TURN:
            self.looked = now
            self._watch(now)

    def _look_again(self) -> bool:
        """Whether there is more to do in the ledger than there was."""
        evict_departed(self.ledger)
        self.backlog.read()
        self.read = self.clock()
        return bool(self.backlog)

    def _stop(self) -> None:
        """Let all workers save and end their jobs, and give everything back."""
        self.stopping = True
        for worker, hand in self.hands.items():
            if hand.batch is not None:
                self.pool.stop(worker)
        deadline = self.clock() + PATIENCE
        while self.busy and self.clock() < deadline:
            self._turn()
        self.ledger.release_all(self.held.values())

    # ------------------------------------------------------------------------------- giving
    def _assign(self) -> None:
        """Give jobs to idle workers."""
        while self.idle:
            if not self.again and not self.backlog:
                if not self.busy or self.clock() - self.read < LOOK:
                    return
                if not self._look_again():  # others may have given runs back
                    return
            worker = self.idle[0]
            hand = self.hands[worker]
            batch = self.again.popleft() if self.again else self._claim(hand)
            if batch is not None and hand.most and len(batch.claims) > hand.most:
                self._again(batch, -(-len(batch.claims) // hand.most))
            elif batch is not None:
                self.idle.popleft()
                self._start(worker, hand, batch)

    def _claim(self, hand: _Hand) -> _Batch | None:
        """Claim runs that can share a stack; none if others were faster."""
        group = self.backlog.group()
        if group is None:
            return None
        specs = group.take(self._size(group, hand))
        keys = [spec.key for spec in specs]
        claims = self.ledger.claim(self.owner, self.lease_seconds, len(keys), {"key": keys})
        self.held |= {claim.spec.key: claim for claim in claims}
        return _Batch(claims, group.engine) if claims else None

    def _size(self, group: Group, hand: _Hand) -> int:
        """As many as pay and fit, but so that every worker gets some."""
        size, why = stack_size(group, self.means.data_dir, self.means.device, hand.room)
        size = min(size, hand.most or size)
        if why and len(group.specs) > size and group.key not in self.said:
            self.said.add(group.key)
            self.say(f"{len(group.specs)} runs: {size} at a time on each worker{why}")
        share = size if group.begun else -(-group.total // self.pool.workers)
        return max(1, min(size, share))

    def _start(self, worker: int, hand: _Hand, batch: _Batch) -> None:
        """Give a worker those runs of a batch whose checkpoints stand at one step."""
        saved = {claim.spec.key: self._saved(claim) for claim in batch.claims}
        facts = {key: self._facts(content, batch.engine) for key, content in saved.items()}
        parts: dict[Any, list[Claim]] = {}
        for claim in batch.claims:
            parts.setdefault(_stand(facts[claim.spec.key]), []).append(claim)
        first, *others = [_Batch(claims, batch.engine) for claims in parts.values()]
        self.again.extendleft(others)
        hand.batch, hand.left = first, {claim.spec.key: claim for claim in first.claims}
        hand.heard = hand.stepped = self.clock()
        hand.step, hand.kept = -1, False
        self.busy += 1
        contents = {key: saved[key] for key in hand.left}
        specs = tuple(claim.spec for claim in first.claims)
        if note := told_if_parted(specs, facts[specs[0].key].get("run")):
            self.say(note)
        found = {key: content for key, content in contents.items() if content is not None}
        self.pool.start(worker, Job(specs, first.engine, self.means, found))

    def _facts(self, content: bytes | None, engine: str) -> Mapping[str, Any]:
        """What a checkpoint tells; nothing if there is none that this engine could go on with."""
        with suppress(CheckpointError, LookupError, TypeError):
            facts = {} if content is None else checkpoint_facts(content)
            if facts and not is_of_another(facts["stack"], engine, self.means.device):
                return facts
        return {}

    def _saved(self, claim: Claim) -> bytes | None:
        try:
            return checkpoint_path(self.ledger, claim.spec.key).read_bytes()
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------------------- taking
    def _take(self, worker: int, event: Event) -> None:
        if isinstance(event, Ready):
            self._welcome(worker, event)
            return
        hand = self.hands.get(worker)
        if isinstance(event, Died):
            self._bury(worker, event.reason)
            return
        if hand is None:
            return
        hand.heard = self.clock()
        if isinstance(event, Told):
            self._told(hand, event)
        elif isinstance(event, Kept):
            self._keep(hand, event)
        elif isinstance(event, Finished):
            claim = hand.left.pop(event.key)
            if event.key in self.held:
                self.results.append((claim, event.result))
        elif isinstance(event, Ended):
            self._end(worker, hand, event)

    def _welcome(self, worker: int, event: Ready) -> None:
        ours = upgd.__version__, RULES_VERSION
        if event.version != ours:
            theirs = " with rules ".join(map(str, event.version))
            raise StudyError(
                f"a worker has upgd {theirs}, this process {' with rules '.join(map(str, ours))}; "
                "install the same everywhere"
            )
        self.stillborn = 0
        self.hands[worker] = _Hand(event.room, self.clock())
        self.idle.append(worker)

    def _told(self, hand: _Hand, event: Told) -> None:
        if event.step > hand.step:
            hand.step, hand.stepped = event.step, self.clock()
        self._pace(hand, event.rate)
        if self.on_progress is not None and hand.batch is not None:
            first, *others = [claim.spec for claim in hand.batch.claims]
            share = event.share
            self.on_progress(
                Progress(first, event.step, self.rate, event.latest, tuple(others), share)
            )

    def _pace(self, hand: _Hand, rate: float) -> None:
        self.rate += rate - hand.rate
        hand.rate = rate

    def _keep(self, hand: _Hand, event: Kept) -> None:
        claim = hand.left.get(event.key)
        if claim is not None and event.key in self.held:
            save_packed(checkpoint_path(self.ledger, event.key), event.content)
            self.kept[event.key] = claim
            self.deaths.pop(event.key, None)
            hand.kept = True

    def _commit(self) -> None:
        """Write results and signs of progress to the ledger, all in one transaction each."""
        if self.results:
            results, self.results = self.results, []
            settle(self.ledger, results, self.tally)
            for claim, _ in results:
                self._forget(claim)
        if self.kept:
            kept, self.kept = self.kept, {}
            self.ledger.hear(kept.values())

    def _forget(self, claim: Claim) -> None:
        self.held.pop(claim.spec.key, None)
        self.deaths.pop(claim.spec.key, None)

    # ------------------------------------------------------------------------------ trouble
    def _free(self, hand: _Hand) -> _Batch:
        """What a worker leaves undone; it has no job any more."""
        batch = hand.batch
        assert batch is not None
        left = [claim for key, claim in hand.left.items() if key in self.held]
        hand.batch, hand.left = None, {}
        self._pace(hand, 0.0)
        self.busy -= 1
        return _Batch(left, batch.engine)

    def _end(self, worker: int, hand: _Hand, event: Ended) -> None:
        """A job is over."""
        left = self._free(hand)
        if event.cause == "machine" and event.trouble:
            self.again.appendleft(left)
            self._dismiss(worker, event.trouble)
            return
        self.idle.append(worker)
        if self.stopping or not left.claims:
            return
        if event.cause == "memory":
            self._out_of_memory(hand, left)
        elif len(left.claims) > 1:  # one that is wrong must not take the others along
            self._again(left, 2)
        else:
            self._fail(left.claims[0], event.trouble)

    def _dismiss(self, worker: int, reason: str) -> None:
        """A worker cannot work: its data are missing, its disk is full."""
        del self.hands[worker]
        self.unfit += 1
        if self.unfit >= self.pool.workers:
            raise StudyError(reason)
        self.since = self.clock()
        self.say(f"a worker is left out: {reason}")

    def _out_of_memory(self, hand: _Hand, left: _Batch) -> None:
        count = len(left.claims)
        if count > 1:
            half = -(-count // 2)
            hand.most = min(half, hand.most or half)
            self.say(f"out of memory: {count} runs go on, {half} at a time")
            self._again(left, 2)
        elif not hand.kept and self._count(left.claims[0]) > self.retries:
            self._fail(left.claims[0], f"out of memory, alone, {self.retries + 1} times")
        else:
            self._again(left, 1)

    def _bury(self, worker: int, reason: str) -> None:
        """A worker is dead; its runs are tried again, fewer at a time as it happens again."""
        hand = self.hands.pop(worker, None)
        if hand is None:
            self.stillborn += 1
            if self.stillborn > self.retries + self.pool.workers:
                raise StudyError(f"workers end before they begin: {reason}")
            return
        if not self.hands:
            self.since = self.clock()
        with suppress(ValueError):
            self.idle.remove(worker)
        if hand.batch is None:
            return
        left = self._free(hand)
        if self.stopping or not left.claims:
            return
        tried = 0 if hand.kept else max(self._count(claim) for claim in left.claims)
        many = len(left.claims)
        if many == 1 and tried > self.retries:
            self._fail(left.claims[0], f"{reason}, {tried} times without progress")
            return
        self.say(f"{reason}; its {many} runs go on from their checkpoints")
        self._again(left, many if tried >= self.retries else 2 if tried >= SUSPECT else 1)

    def _count(self, claim: Claim) -> int:
        """Count an attempt that was in vain; returns how many there were in a row."""
        key = claim.spec.key
        self.deaths[key] = self.deaths.get(key, 0) + 1
        return self.deaths[key]

    def _again(self, batch: _Batch, parts: int) -> None:
        """Try runs again, in so many parts."""
        size = -(-len(batch.claims) // parts)
        for start in range(0, len(batch.claims), size):
            self.again.append(replace(batch, claims=batch.claims[start : start + size]))

    def _fail(self, claim: Claim, reason: str) -> None:
        with suppress(LeaseLostError):
            self.ledger.fail(claim, reason, retry=False)
        self._forget(claim)
        self.tally.failed += 1
        self.tally.errors.append(f"{claim.spec.label()}: {reason}")

    def _watch(self, now: float) -> None:
        """Replace workers that hang, and keep the claims."""
        for worker, hand in list(self.hands.items()):
            if hand.batch is None:  # should it be frozen, its next job shows it
                continue
            if now - hand.heard > self.silence:
                self._replace(worker, f"nothing was heard of its worker for {self.silence:g} s")
            elif now - hand.stepped > self.stall:
                self._replace(worker, f"its worker made no step for {self.stall:g} s")
        if not self.hands and not self.stopping and now - self.since > STARTING:
            raise StudyError(f"no worker came up in {STARTING:g} s")
        if self.held and now - self.renewed >= self.lease_seconds / 4:
            self.renewed = now
            if self.ledger.renew(self.owner, self.lease_seconds) < len(self.held):
                mine = {lease.key for lease in self.ledger.leases() if lease.owner == self.owner}
                lost = self.held.keys() - mine
                self.tally.lost += len(lost)
                self.held = {key: claim for key, claim in self.held.items() if key in mine}

    def _replace(self, worker: int, reason: str) -> None:
        self.pool.kill(worker)
        self._bury(worker, reason)

    def say(self, note: str) -> None:
        self.tally.notes.append(note)
        if self.on_note is not None:
            self.on_note(note)


def _stand(facts: Mapping[str, Any]) -> Any:
    """By whom a checkpoint is and where it stands; runs of one job have this in common."""
    try:
        stack = {name: value for name, value in facts["stack"].items() if name != "run"}
        stack |= {"together": str(facts["run"].get("together"))}
        return facts["run"]["step"], tuple(sorted(stack.items()))
    except (KeyError, TypeError, AttributeError):
        return None
