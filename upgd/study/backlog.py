"""What is left to do in a study, in groups that can share a stack, and how many go at a time."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from upgd.engine import memory
from upgd.engine.batched import kind_of
from upgd.study.attempts import BATCHED, EAGER, device_name, is_the_machines
from upgd.study.errors import CheckpointError, SpecError
from upgd.study.files import checkpoint_facts
from upgd.study.ledger import Ledger
from upgd.study.prepare import plan
from upgd.study.sinks import kept_checkpoints
from upgd.study.spec import RunSpec

PER_CORE = 8
"""Runs of a stack on the CPU, for each core: enough that fast ones make up for slow ones."""
MOST_ON_CUDA = 400
"""Runs of a stack on a GPU: beyond, more runs take more time and nothing is gained."""
ENGINES = ("auto", "batched", "eager")


@dataclass(frozen=True)
class Room:
    """What a worker has: threads, and bytes of memory on its device."""

    threads: int
    free: int

    @classmethod
    def here(cls, device: str) -> Room:
        """What this process has."""
        return cls(torch.get_num_threads(), memory.free_bytes(device))


@dataclass
class Group:
    """Runs that are left to do and can share a stack.

    Attributes:
        key: What they have in common.
        engine: ``"batched"``, or ``"eager"`` where they cannot be in a stack.
        specs: The runs, oldest first.
        total: How many there were before some were taken.
        begun: Whether they are those of one stack that goes on, of which the size matters.
    """

    key: Any
    engine: str
    specs: deque[RunSpec]
    total: int = 0
    begun: bool = False

    def first(self, count: int) -> list[RunSpec]:
        """The oldest ones."""
        return list(islice(self.specs, count))

    def take(self, count: int) -> list[RunSpec]:
        """The oldest ones; they are not in the group any more."""
        return [self.specs.popleft() for _ in range(min(count, len(self.specs)))]


class Backlog:
    """What is left to do, as the ledger had it when it was last read.

    Reading takes as long as there are runs, taking does not: the ledger is read again only when
    all that it listed was taken. Others may take runs too, so a claim decides.

    Args:
        ledger: The study's.
        where: Restricts which runs are taken; see :meth:`Ledger.claim`.
        device: Where they will run.
        engine: ``"auto"``, ``"batched"`` (what cannot be in a stack is left out) or ``"eager"``.
        once: Whether a run that was taken is not taken a second time.
    """

    def __init__(
        self,
        ledger: Ledger,
        where: Mapping[str, Any] | None,
        device: str,
        engine: str = "auto",
        once: bool = False,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine is one of {', '.join(ENGINES)}; got {engine!r}")
        self._ledger, self._where, self._device = ledger, where, device
        self._engine, self._once = engine, once
        self._groups: deque[Group] = deque()
        self._tried: set[str] = set()

    def __bool__(self) -> bool:
        return self.group() is not None

    def read(self) -> None:
        """Read from the ledger what is left to do."""
        groups: dict[Any, Group] = {}
        suspects = self._ledger.suspects()
        kept = kept_checkpoints(self._ledger)
        for spec in self._ledger.claimable(self._where):
            if spec.key in self._tried:
                continue
            key = None
            if self._engine != "eager":
                with suppress(SpecError):  # the eager engine tells what is wrong with it
                    key = stack_key(spec, self._device)
            if key is None and self._engine == "batched":
                continue
            engine = "eager" if key is None else "batched"
            before = None
            if key is not None and key[-1] == "general" and spec.key in kept:
                before = _stack_of(kept[spec.key], self._device)
            if key is None or spec.key in suspects:  # so that it does not take others along
                key = (spec.key, key)
            key = (key, before)
            group = groups.setdefault(key, Group(key, engine, deque(), begun=before is not None))
            group.specs.append(spec)
            group.total += 1
            if self._once:
                self._tried.add(spec.key)
        self._groups = deque(groups.values())

    def group(self) -> Group | None:
        """The group of the oldest run that was not taken yet."""
        while self._groups and not self._groups[0].specs:
            self._groups.popleft()
        return self._groups[0] if self._groups else None


def begun_otherwise(
    ledger: Ledger,
    where: Mapping[str, Any] | None,
    device: str,
    engine: str,
    here: bool = True,
) -> list[str]:
    """Says which runs begin anew, since their checkpoints are of another engine or device.

    Arguments are those of :class:`Backlog`, and:

    Args:
        ledger: The study's.
        where: Restricts which runs are taken.
        device: Where they will run.
        engine: Which may run them.
        here: Whether this process will; of other machines less is known.
    """
    kept = kept_checkpoints(ledger)
    found = Counter[tuple[str, str]]()
    for spec in ledger.claimable(where) if kept else ():
        with suppress(LookupError, TypeError, ValueError, CheckpointError, SpecError):  # no use
            before = checkpoint_facts(kept[spec.key])["stack"]
            now = _engine_of(spec, device, engine)
            if now is None or not str(before["engine"]).startswith((EAGER, BATCHED)):
                continue
            place = device if now == EAGER or not here else device_name(device)
            same = (before["engine"], before["device"]) == (now, place)
            if is_of_another(before, now, device) or (here and not same):
                found[f"{before['engine']} on {before['device']}", f"{now} on {place}"] += 1
    return [
        f"{'1 run begins' if n == 1 else f'{n} runs begin'} anew with {now}: what was kept of "
        f"{'it' if n == 1 else 'them'} is of {before}"
        for (before, now), n in found.items()
    ]


def is_of_another(stack: Mapping[str, Any], engine: str, device: str) -> bool:
    """Whether a checkpoint is of another engine or kind of device, as can be told anywhere.

    Args:
        stack: What the checkpoint tells of where it was made.
        engine: What will run it, ``"eager"`` or another.
        device: Where.
    """
    batched = str(stack["engine"]).startswith(BATCHED)
    on_cpu = torch.device(device).type == "cpu"
    return batched == (engine == EAGER) or (stack["device"] == "cpu") != on_cpu


def _stack_of(path: Path, device: str) -> str | None:
    """Which runs a run was together with, if it can go on with them."""
    with suppress(LookupError, TypeError, ValueError, AttributeError, CheckpointError):
        facts = checkpoint_facts(path)
        if not is_of_another(facts["stack"], BATCHED, device):
            found: str | None = facts["run"].get("together")
            return found
    return None


def _engine_of(spec: RunSpec, device: str, engine: str) -> str | None:
    """What will run this, as results call it; None if it is left to another engine."""
    key = None if engine == "eager" else stack_key(spec, device)
    if key is None:
        return None if engine == "batched" else EAGER
    return f"{BATCHED}{key[-1]}"


def stack_key(spec: RunSpec, device: str) -> Any:
    """What runs of one stack have in common; None if this one cannot be in any."""
    problem, setting = plan(spec)
    try:
        kind = kind_of(problem, setting, device)
    except (ValueError, KeyError, TypeError):
        return None
    common = tuple(item for item in spec.options.items() if item[0] != "restart")
    return None if kind is None else (spec.problem, spec.steps, common, kind)


def stack_size(
    group: Group, data_dir: str | os.PathLike[str] | None, device: str, room: Room
) -> tuple[int, str]:
    """How many runs of a group to take at a time, and why not more where memory is the reason."""
    if group.engine == "eager":
        return 1, ""
    most = MOST_ON_CUDA
    if torch.device(device).type != "cuda":
        most = PER_CORE * room.threads
    specs = group.first(most)
    try:
        need = _need(specs, data_dir, device)
    except Exception as error:
        if is_the_machines(error):
            raise
        return 1, ""  # it will fail, and say why
    fitting = need.fitting(room.free)
    if fitting >= len(specs):
        return most, ""
    each, data = _in_bytes(max(need.each)), _in_bytes(need.shared + need.most_inputs)
    return fitting, f" (each takes up to {each}, the data {data}; {_in_bytes(room.free)} are free)"


def _need(
    specs: Sequence[RunSpec], data_dir: str | os.PathLike[str] | None, device: str
) -> memory.Need:
    problem, settings = plan(specs[0])[0], [plan(spec)[1] for spec in specs]
    stream = problem.make(specs[0].seed, data_dir)
    return memory.need(problem, settings, stream, specs[0].steps, device)


def _in_bytes(count: float) -> str:
    """A number of bytes, short.

    >>> _in_bytes(12_345_678), _in_bytes(1_600_000_000)
    ('12.3 MB', '1.6 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e3:.1f} kB"
