"""What is left to do in a study, in groups that can be executed together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from upgd.ledger.checkpoints import checkpoint_facts, kept_checkpoints
from upgd.ledger.errors import CheckpointError, SpecError
from upgd.ledger.ledger import Ledger
from upgd.study.kinds import Group, Kind
from upgd.study.learners import device_name
from upgd.study.options import Options


class Pending:
    """The runs to do, as the ledger had them when it was last read.

    Reading takes time in proportion to the runs, taking does not: the ledger is read again only
    when everything that it listed was taken. Others may take runs too, so a claim decides.

    Args:
        ledger: The study's.
        where: Restricts which runs are taken; see :meth:`Ledger.claim`.
        kind: Of the runs; others are left out.
        options: How they will be executed.
    """

    def __init__(
        self, ledger: Ledger, where: Mapping[str, Any] | None, kind: Kind, options: Options
    ) -> None:
        self._ledger, self._where, self._kind, self._options = ledger, where, kind, options
        self._groups: deque[Group] = deque()

    def __bool__(self) -> bool:
        return self.group() is not None

    def read(self) -> None:
        """Read from the ledger what is left to do."""
        groups: dict[Any, Group] = {}
        suspects = self._ledger.suspects()
        kept = kept_checkpoints(self._ledger.path.parent)
        for spec in self._ledger.claimable(self._where):
            found = self._kind.group(spec, self._options)
            if found is None:
                continue
            engine, key = found
            before = None
            if spec.key in kept:
                before = self._stack_of(kept[spec.key], engine)
            if spec.key in suspects:  # so that it does not take others along
                key = (spec.key, key)
            key = (key, before)
            group = groups.setdefault(key, Group(key, engine, deque(), begun=before is not None))
            group.specs.append(spec)
            group.total += 1
        self._groups = deque(groups.values())

    def group(self) -> Group | None:
        """The group of the oldest run that was not taken yet."""
        while self._groups and not self._groups[0].specs:
            self._groups.popleft()
        return self._groups[0] if self._groups else None

    def groups(self) -> list[Group]:
        """All groups."""
        return list(self._groups)

    def _stack_of(self, path: Path, engine: str) -> str | None:
        """Which runs a run was together with, if it can continue with them."""
        with suppress(LookupError, TypeError, ValueError, AttributeError, CheckpointError):
            facts = checkpoint_facts(path)
            if continues(facts, engine, self._options.device):
                return self._kind.stack(facts)
        return None


def continues(facts: Mapping[str, Any], engine: str, device: str) -> bool:
    """Whether a checkpoint is by the same engine on the same type of device.

    Which stack a worker elsewhere would use is not known here, so that names are not compared.
    """
    stack = facts["stack"]
    same_device = (stack["device"] == "cpu") == (torch.device(device).type == "cpu")
    return same_device and str(stack["engine"]).partition("-")[0] == engine


def restarts(
    ledger: Ledger, where: Mapping[str, Any] | None, kind: Kind, options: Options, here: bool = True
) -> list[str]:
    """Says which runs restart, since their checkpoints are by another engine or device.

    Args:
        ledger: The study's.
        where: Restricts which runs are taken.
        kind: Of the runs.
        options: How they will be executed.
        here: Whether this process will; the devices of other machines are not known.
    """
    kept = kept_checkpoints(ledger.path.parent)
    found = Counter[tuple[str, str]]()
    for spec in ledger.claimable(where) if kept else ():
        with suppress(LookupError, TypeError, ValueError, CheckpointError, SpecError):  # no use
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
