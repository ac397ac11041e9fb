"""The runs that are left to do in a study, in groups that can be executed together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from upgd.ledger.checkpoints import checkpoint_facts, kept_checkpoints
from upgd.ledger.errors import CheckpointError, SpecError
from upgd.ledger.ledger import Ledger, Where
from upgd.ledger.spec import RunSpec
from upgd.study.kinds import Kind, RunGroup
from upgd.study.learners import BATCHED, EAGER, device_name
from upgd.study.options import Options
from upgd.study.prepare import why_changed
from upgd.text import count


class Pending:
    """The runs of a kind that are left to do, as of the last time the ledger was read.

    Reading takes time in proportion to the runs, taking does not: the ledger is read again only
    when all listed runs were taken. Others may take runs too, so a claim decides.
    """

    def __init__(self, ledger: Ledger, where: Where | None, kind: Kind, options: Options) -> None:
        self._ledger, self._where, self._kind, self._options = ledger, where, kind, options
        self._groups: deque[RunGroup] = deque()
        self._changed: dict[Any, str] = {}

    def __bool__(self) -> bool:
        return self.group() is not None

    def read(self) -> None:
        """Read from the ledger what is left to do."""
        groups: dict[Any, RunGroup] = {}
        suspects = self._ledger.suspects()
        kept = kept_checkpoints(self._ledger.path.parent)
        for spec in self._ledger.claimable(self._where):
            if once(self._changed, spec, why_changed):
                continue
            found = self._kind.group(spec, self._options)
            if found is None:
                continue
            engine, key = found
            before = self._stack_of(kept[spec.key], engine) if spec.key in kept else None
            if spec.key in suspects:  # alone, so that it does not kill others
                key = (spec.key, key)
            key = (key, before)
            group = groups.setdefault(key, RunGroup(key, engine, deque(), begun=before is not None))
            group.specs.append(spec)
            group.total += 1
        self._groups = deque(groups.values())

    def group(self) -> RunGroup | None:
        """The group of the oldest run that was not taken yet."""
        while self._groups and not self._groups[0].specs:
            self._groups.popleft()
        return self._groups[0] if self._groups else None

    def groups(self) -> list[RunGroup]:
        """All groups."""
        return list(self._groups)

    def _stack_of(self, path: Path, engine: str) -> str | None:
        """The stack that a checkpoint is of, if its run can continue in it."""
        with suppress(LookupError, TypeError, ValueError, AttributeError, CheckpointError):
            facts = checkpoint_facts(path)
            if continues(facts, engine, self._options.device):
                return self._kind.stack(facts)
        return None


def once(known: dict[Any, str], spec: RunSpec, ask: Callable[[RunSpec], str]) -> str:
    """The answer to a question about a run that has the same one for all sets and seeds."""
    alike = spec.problem, spec.method, tuple(spec.options.items()), tuple(spec.sources.items())
    if alike not in known:
        known[alike] = ask(spec)
    return known[alike]


def survey(
    ledger: Ledger, where: Where | None, kind: Kind, options: Options
) -> tuple[list[str], list[str]]:
    """What the user should know before the work begins.

    Returns:
        Which runs stay pending, since they cannot be done here as they were added, and which go
        one at a time; each with the reason, a line per reason.
    """
    refused: dict[str, list[RunSpec]] = {}
    alone: dict[str, list[RunSpec]] = {}
    changed: dict[Any, str] = {}
    single: dict[Any, str] = {}
    for spec in ledger.claimable(where):
        if reason := once(changed, spec, why_changed):
            refused.setdefault(reason, []).append(spec)
        elif options.engine != EAGER and (
            reason := once(single, spec, lambda each: kind.why_alone(each, options))
        ):
            alone.setdefault(reason, []).append(spec)
    left = [f"{_named(specs)} left pending: {reason}" for reason, specs in refused.items()]
    if options.engine == BATCHED:
        left += [
            f"{_named(specs)} left pending by the batched engine, since {reason}; 'auto' can"
            for reason, specs in alone.items()
        ]
        return left, []
    several = {reason: specs for reason, specs in alone.items() if len(specs) > 1}
    return left, [
        f"{_named(specs)} one at a time, since {reason}" for reason, specs in several.items()
    ]


def _named(specs: list[RunSpec]) -> str:
    names = ", ".join(dict.fromkeys(spec.name for spec in specs))
    return f"{count(len(specs), 'run')} of {names}"


def continues(facts: Mapping[str, Any], engine: str, device: str) -> bool:
    """Whether a checkpoint is by the same engine, of any stack, on the same type of device."""
    stack = facts["stack"]
    same_device = (stack["device"] == "cpu") == (torch.device(device).type == "cpu")
    return same_device and str(stack["engine"]).partition("-")[0] == engine


def restarts(
    ledger: Ledger, where: Where | None, kind: Kind, options: Options, here: bool = True
) -> list[str]:
    """Notes on runs that restart, since their checkpoints are by another engine or device.

    `here` says whether this process executes them; other machines' devices are not known.
    """
    kept = kept_checkpoints(ledger.path.parent)
    found = Counter[tuple[str, str]]()
    for spec in ledger.claimable(where) if kept else ():
        with suppress(LookupError, TypeError, ValueError, CheckpointError, SpecError):  # unreadable
            facts = checkpoint_facts(kept[spec.key])
            group = kind.group(spec, options)
            if group is None:
                continue
            before, (engine, _), device = facts["stack"], group, options.device
            now = kind.engine_name(spec, engine, device)
            place = device_name(device) if here and now != "eager" else device
            other = here and (before["engine"], before["device"]) != (now, place)
            if other or not continues(facts, engine, device):
                found[f"{before['engine']} on {before['device']}", f"{now} on {place}"] += 1
    return [
        f"{'1 run restarts' if n == 1 else f'{n} runs restart'} with {now}: the checkpoint"
        f"{'' if n == 1 else 's'} kept {'is' if n == 1 else 'are'} of {before}"
        for (before, now), n in found.items()
    ]
