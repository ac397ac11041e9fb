"""The runner of a study: claims runs, gives them to workers as jobs, and writes what they report.

One loop serves all workers (this process, processes of this machine, actors of a Ray cluster) and
all kinds of runs. The runner claims runs that can be executed together and holds the claims while
it works on them. A worker that dies, is silent or makes no step is replaced, and another one
continues its runs from their checkpoints: at first together, then in halves, then one by one, so
that a run that kills its worker fails alone. Another runner takes over the runs of a dead one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import upgd
from upgd.ledger.checkpoints import (
    checkpoint_facts,
    checkpoint_path,
    checkpoints,
    forget,
    save_packed,
)
from upgd.ledger.errors import CheckpointError, LeaseLostError, StudyError
from upgd.ledger.ledger import SUSPECT, Ledger, Where
from upgd.ledger.records import Claim, Result, owner_name
from upgd.ledger.spec import RULES_VERSION
from upgd.study.execution import Progress, Tally
from upgd.study.folder import at_work, evict_departed
from upgd.study.kinds import Kind, Room, RunGroup
from upgd.study.learners import together
from upgd.study.options import Options
from upgd.study.pending import Pending, continues, restarts
from upgd.study.pools import Pool, ThisProcess
from upgd.study.worker import Advanced, Alive, Died, Ended, Event, Finished, Job, Kept, Noted, Ready

SILENCE = 60.0  # seconds without a sign of life after which a worker counts as dead
STALL = 1800.0  # seconds without a step after which it counts as stuck
STARTING = 300.0  # seconds for the first worker to start
PATIENCE = 30.0  # seconds for interrupted workers to save their runs
TURN = 1.0  # seconds between looks at the workers
LOOK = 30.0  # seconds between looks at the ledger for runs that others have given back
OnProgress = Callable[[Progress], None]
OnNote = Callable[[str], None]


def settle(ledger: Ledger, results: Sequence[tuple[Claim, Result]], tally: Tally) -> None:
    """Commit results in one transaction, count them, and remove their checkpoints."""
    lost = {claim.spec.key for claim in ledger.settle(results)}
    for claim, result in results:
        key = claim.spec.key
        if key in lost:  # another process has it; its result will be the same
            tally.lost += 1
            continue
        tally.done += result.diverged_at is None
        tally.diverged += result.diverged_at is not None
        forget(ledger.path.parent, key)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether there was an interrupt; a second one is raised at once.

    SIGTERM, by which schedulers end a job, counts as one. Outside the main thread no signal is
    handled, and SIGINT is not where the caller handles it.
    """
    seen = False

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, note)
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Batch:
    """Claimed runs that wait for a worker, together."""

    claims: list[Claim]
    engine: str


@dataclass
class _Hand:
    """A worker, as the runner knows it."""

    room: Room
    heard: float
    stepped: float = 0.0
    step: int = -1
    rate: float = 0.0
    most: int | None = None  # runs in its stacks, after more were too many for its memory
    batch: _Batch | None = None
    left: dict[str, Claim] = field(default_factory=dict)  # runs of its job that have no result yet
    kept: bool = False  # whether its job has saved checkpoints, so that the attempt made progress


class Runner:
    """Runs what is pending of one kind on the workers of a pool.

    Args:
        ledger: The study's.
        pool: The workers.
        kind: Of the runs.
        options: How they are executed.
        where: Restricts which runs are taken; see :meth:`Ledger.claim`.
        on_progress: Called with how far runs are, and the rate of all workers together.
        on_note: Called with notes for the user.
        retries: How often a run is tried again without a checkpoint in between, after its worker
            died, hung or ran out of memory.
        silence: Seconds without a message after which a worker counts as dead.
        stall: Seconds without a step after which it counts as stuck.
        lease_seconds: How long claims hold without a renewal by this process.
        clock: The time in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        pool: Pool,
        kind: Kind,
        options: Options,
        where: Where | None = None,
        on_progress: OnProgress | None = None,
        on_note: OnNote | None = None,
        *,
        retries: int = 3,
        silence: float = SILENCE,
        stall: float = STALL,
        lease_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger, self.pool, self.kind, self.options = ledger, pool, kind, options
        self.where, self.on_progress, self.on_note = where, on_progress, on_note
        self.retries, self.silence, self.stall = retries, silence, stall
        self.lease_seconds, self.clock = lease_seconds, clock
        self.pending = Pending(ledger, where, kind, options)
        self.owner, self.tally = owner_name(), Tally()
        self.hands: dict[int, _Hand] = {}
        self.idle: deque[int] = deque()
        self.busy = 0
        self.again: deque[_Batch] = deque()
        self.held: dict[str, Claim] = {}
        self.deaths = Counter[str]()  # attempts in a row that made no progress, by run
        self.results: list[tuple[Claim, Result]] = []
        self.kept: dict[str, Claim] = {}
        self.rate, self.stillborn, self.unfit = 0.0, 0, 0
        self.stopping = False
        self.said: set[Any] = set()

    # ----------------------------------------------------------------------------- the loop
    def run(self) -> None:
        """Work until nothing is left, or until an interrupt."""
        with at_work(self.ledger, self.owner, self.where), _interrupts() as interrupted:
            if isinstance(self.pool, ThisProcess):
                self.pool.on_event, self.pool.stopping = self._take_at_once, interrupted
            here = isinstance(self.pool, ThisProcess)
            for note in restarts(self.ledger, self.where, self.kind, self.options, here):
                self.say(note)
            self._loop(interrupted)

    def _loop(self, interrupted: Callable[[], bool]) -> None:
        now = self.clock()
        self.looked = self.read = self.renewed = self.since = now
        evict_departed(self.ledger)
        self.pending.read()
        self.pool.roll_call()
        while self.busy or self.again or self.pending or self._look_again():
            self._assign()
            self._turn()
            if interrupted():
                self._stop()
                raise KeyboardInterrupt

    def _turn(self) -> None:
        """Handle the workers' events, write results, and replace workers that hang."""
        before = self.clock()
        for worker, event in self.pool.events(TURN):
            self._take(worker, event)
        self._commit()
        now = self.clock()
        if now - before > max(self.silence, 4 * TURN) / 2:  # this process was busy or suspended
            for hand in self.hands.values():
                hand.heard = hand.stepped = now
        if now - self.looked >= TURN:
            self.looked = now
            self._watch(now)

    def _take_at_once(self, event: Event) -> None:
        """Handle an event of this process in the middle of a job."""
        self._take(0, event)
        if isinstance(event, Alive | Advanced):
            self._commit()
            self._renew(self.clock())

    def _look_again(self) -> bool:
        """Read the ledger again; whether there is something to do."""
        evict_departed(self.ledger)
        self.pending.read()
        self.read = self.clock()
        return bool(self.pending)

    def _stop(self) -> None:
        """Let all workers save and end their jobs, and release all runs."""
        self.stopping = True
        for worker, hand in self.hands.items():
            if hand.batch is not None:
                self.pool.stop(worker)
        deadline = self.clock() + PATIENCE
        while self.busy and self.clock() < deadline:
            self._turn()
        self.ledger.release(self.held.values())

    # --------------------------------------------------------------------------------- jobs
    def _assign(self) -> None:
        """Give jobs to idle workers."""
        while self.idle:
            if not self.again and not self.pending:
                early = self.clock() - self.read < LOOK
                if not self.busy or early or not self._look_again():
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
        if (group := self.pending.group()) is None:
            return None
        specs = group.take(self._size(group, hand))
        keys = [spec.key for spec in specs]
        claims = self.ledger.claim(self.owner, self.lease_seconds, len(keys), {"key": keys})
        self.held |= {claim.spec.key: claim for claim in claims}
        return _Batch(claims, group.engine) if claims else None

    def _size(self, group: RunGroup, hand: _Hand) -> int:
        """As many runs as are worth it and fit, but so that every worker gets some."""
        size, why = self.kind.size(group, self.options, hand.room)
        size = min(size, hand.most or size)
        if why and len(group.specs) > size and group.key not in self.said:
            self.said.add(group.key)
            each = " on each worker" if self.pool.workers > 1 else ""
            self.say(f"{len(group.specs)} runs: {size} at a time{each}{why}")
        share = size if group.begun else -(-group.total // self.pool.workers)
        return max(1, min(size, share))

    def _start(self, worker: int, hand: _Hand, batch: _Batch) -> None:
        """Give a worker those runs of a batch that can be executed together."""
        saved = {claim.spec.key: self._saved(claim) for claim in batch.claims}
        facts = {key: self._facts(content, batch.engine) for key, content in saved.items()}
        parts: dict[Any, list[Claim]] = {}
        for claim in batch.claims:
            stand = _stand(facts[claim.spec.key]) if self.kind.lock_step else None
            parts.setdefault(stand, []).append(claim)
        first, *others = [_Batch(claims, batch.engine) for claims in parts.values()]
        self.again.extendleft(others)
        hand.batch, hand.left = first, {claim.spec.key: claim for claim in first.claims}
        hand.heard = hand.stepped = self.clock()
        hand.step, hand.kept = -1, False
        self.busy += 1
        specs = tuple(claim.spec for claim in first.claims)
        before = facts[specs[0].key].get("run")
        if isinstance(before, dict) and before.get("together") not in (None, together(specs)):
            runs = "1 run continues" if len(specs) == 1 else f"{len(specs)} runs continue"
            self.say(f"{runs} in another stack than before, where sums may be rounded differently")
        known = {key: content for key in hand.left if (content := saved[key]) is not None}
        here = isinstance(self.pool, ThisProcess)
        folder = checkpoints(self.ledger.path.parent) if here else None
        self.pool.start(worker, Job(specs, first.engine, self.options, known, folder))

    def _facts(self, content: bytes | Path | None, engine: str) -> Mapping[str, Any]:
        """The facts of a checkpoint; empty if this engine cannot continue from it."""
        with suppress(CheckpointError, LookupError, TypeError):
            facts = {} if content is None else checkpoint_facts(content)
            if facts and continues(facts, engine, self.options.device):
                return facts
        return {}

    def _saved(self, claim: Claim) -> bytes | Path | None:
        path = checkpoint_path(self.ledger.path.parent, claim.spec.key)
        if self.pool.shares_files:
            return path if path.exists() else None
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------------------- events
    def _take(self, worker: int, event: Event) -> None:
        if isinstance(event, Ready):
            return self._welcome(worker, event)
        if isinstance(event, Died):
            return self._bury(worker, event.reason)
        hand = self.hands.get(worker)
        if hand is None:
            return None
        hand.heard = self.clock()
        if isinstance(event, Advanced):
            self._advanced(hand, event)
        elif isinstance(event, Noted):
            self.say(event.text)
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

    def _advanced(self, hand: _Hand, event: Advanced) -> None:
        if event.step > hand.step:
            hand.step, hand.stepped = event.step, self.clock()
        self._pace(hand, event.rate)
        if self.on_progress is not None and hand.batch is not None:
            first, *rest = event.specs or [claim.spec for claim in hand.batch.claims]
            others, share = tuple(rest), event.share
            self.on_progress(Progress(first, event.step, self.rate, event.latest, others, share))

    def _pace(self, hand: _Hand, rate: float) -> None:
        self.rate += rate - hand.rate
        hand.rate = rate

    def _keep(self, hand: _Hand, event: Kept) -> None:
        claim = hand.left.get(event.key)
        if claim is not None and event.key in self.held:
            if event.content is not None:
                save_packed(checkpoint_path(self.ledger.path.parent, event.key), event.content)
            self.kept[event.key] = claim
            self.deaths.pop(event.key, None)
            hand.kept = True

    def _commit(self) -> None:
        """Write results and signs of progress to the ledger, each in one transaction."""
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

    # ----------------------------------------------------------------------------- failures
    def _free(self, hand: _Hand) -> _Batch:
        """Mark a worker idle; return the runs that its job has not finished."""
        batch = hand.batch
        assert batch is not None
        left = [claim for key, claim in hand.left.items() if key in self.held]
        hand.batch, hand.left = None, {}
        self._pace(hand, 0.0)
        self.busy -= 1
        return _Batch(left, batch.engine)

    def _end(self, worker: int, hand: _Hand, event: Ended) -> None:
        """Handle the end of a job."""
        left = self._free(hand)
        hand.room = event.room or hand.room
        if event.cause == "machine" and event.trouble:
            self.again.appendleft(left)
            self._dismiss(worker, event.trouble)
            return
        self.idle.append(worker)
        if self.stopping or event.cause == "interrupt" or not left.claims:
            return
        if event.cause == "memory":
            self._out_of_memory(hand, left)
        elif len(left.claims) > 1:  # one that is wrong must not take the others along
            self._again(left, 2)
        else:
            self._fail(left.claims[0], event.trouble)

    def _dismiss(self, worker: int, reason: str) -> None:
        """Stop using a worker whose data are missing or whose disk is full."""
        del self.hands[worker]
        self.unfit += 1
        if self.unfit >= self.pool.workers:
            raise StudyError(reason)
        self.since = self.clock()
        self.say(f"a worker is not used: {reason}")

    def _out_of_memory(self, hand: _Hand, left: _Batch) -> None:
        count = len(left.claims)
        if count > 1:
            half = -(-count // 2)
            hand.most = min(half, hand.most or half)
            self.say(f"out of memory: {count} runs continue, {half} at a time")
            self._again(left, 2)
        elif not hand.kept and self._count(left.claims[0]) > self.retries:
            self._fail(left.claims[0], f"out of memory, alone, {self.retries + 1} times")
        else:
            self._again(left, 1)

    def _bury(self, worker: int, reason: str) -> None:
        """Mark a worker dead; its runs are tried again, fewer at a time if it happens again."""
        hand = self.hands.pop(worker, None)
        if hand is None:
            self.stillborn += 1
            if self.stillborn > self.retries + self.pool.workers:
                raise StudyError(f"workers end before they start: {reason}")
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
        runs = "run continues from its checkpoint"
        if many > 1:
            runs = f"{many} runs continue from their checkpoints"
        self.say(f"{reason}; its {runs}")
        self._again(left, many if tried >= self.retries else 2 if tried >= SUSPECT else 1)

    def _count(self, claim: Claim) -> int:
        """Count an attempt that made no progress; return how many there were in a row."""
        self.deaths[claim.spec.key] += 1
        return self.deaths[claim.spec.key]

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
            if hand.batch is None or isinstance(self.pool, ThisProcess):
                continue  # an idle worker that is frozen is found by its next job
            if now - hand.heard > self.silence:
                self._replace(worker, f"its worker sent nothing for {self.silence:g} s")
            elif now - hand.stepped > self.stall:
                self._replace(worker, f"its worker made no step for {self.stall:g} s")
        if not self.hands and not self.stopping and now - self.since > STARTING:
            raise StudyError(f"no worker started in {STARTING:g} s")
        self._renew(now)

    def _renew(self, now: float) -> None:
        """Keep the claims, and forget those that others have taken over."""
        if not self.held or now - self.renewed < self.lease_seconds / 4:
            return
        self.renewed = now
        if self.ledger.renew(self.owner, self.lease_seconds) < len(self.held):
            mine = {lease.key for lease in self.ledger.leases() if lease.owner == self.owner}
            self.tally.lost += len(self.held.keys() - mine)
            self.held = {key: claim for key, claim in self.held.items() if key in mine}

    def _replace(self, worker: int, reason: str) -> None:
        self.pool.kill(worker)
        self._bury(worker, reason)

    def say(self, note: str) -> None:
        """Pass a note to the user and the tally."""
        self.tally.notes.append(note)
        if self.on_note is not None:
            self.on_note(note)


def _stand(facts: Mapping[str, Any]) -> Any:
    """The engine and step of a checkpoint, which are the same for all runs of a job."""
    try:
        stack = {name: value for name, value in facts["stack"].items() if name != "run"}
        stack |= {"together": str(facts["run"].get("together"))}
        return facts["run"]["step"], tuple(sorted(stack.items()))
    except (KeyError, TypeError, AttributeError):
        return None
