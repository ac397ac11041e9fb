"""Kinds of runs: learners on streams, and agents of reinforcement learning.

A :class:`Kind` says how runs of its problems are checked, grouped and executed; the runner, the
ledger and the reports treat all kinds alike. A problem's name tells its kind: ``ppo/Hopper-v5`` is
an agent's.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any

import torch

from upgd.engine import memory
from upgd.ledger.canonical import KINDS, Usual
from upgd.ledger.spec import RunSpec, Scalar
from upgd.study.execution import Execution, Reporter
from upgd.study.options import Options

LEARNERS = "upgd.study.learners"


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
    """Pending runs that can be executed together."""

    key: Any  # what they have in common
    engine: str  # what executes them, for :meth:`Kind.execution`
    specs: deque[RunSpec]  # the runs, oldest first
    total: int = 0  # how many there were before some were taken
    begun: bool = False  # whether they are those of one stack under way, of which the size matters

    def first(self, count: int) -> list[RunSpec]:
        """The oldest ones."""
        return list(islice(self.specs, count))

    def take(self, count: int) -> list[RunSpec]:
        """Remove the oldest ones from the group."""
        return [self.specs.popleft() for _ in range(min(count, len(self.specs)))]


@dataclass(frozen=True)
class Pace:
    """Steps per second of runs together, and where that is known from."""

    rate: float
    source: str


class Kind:
    """What there is to know about a kind of runs."""

    noun = "run"  # what one of its runs is called
    unit = "samples"  # what a step is called
    local_only = ""  # why its runs cannot be spread over workers, if they cannot
    lock_step = True  # whether runs that are executed together must stand at one step
    packages: tuple[str, ...] = ()  # what its results depend on besides numpy and torch
    diverged_counts = False  # whether what a diverged run gave before is a result that figures show

    def check(self, spec: RunSpec, options: Options) -> None:
        """Find mistakes before anything is run.

        Raises:
            SpecError: The run cannot be executed, or would measure nothing.
        """
        raise NotImplementedError

    def dataset(self, problem: str) -> str | None:
        """The name of a problem's data, if it has some."""
        return None

    def check_data(self, problem: str, data_dir: str | os.PathLike[str] | None) -> None:
        """Find missing data, or a missing simulator, before anything is run."""
        raise NotImplementedError

    def group(self, spec: RunSpec, options: Options) -> tuple[str, Any] | None:
        """The engine that executes a run, and what runs have in common that can be together.

        None if `options` leave the run to another engine.
        """
        raise NotImplementedError

    def stack(self, facts: Mapping[str, Any]) -> str | None:
        """From a checkpoint's facts: which stack the run must stay in, if the stack matters."""
        return None

    def size(self, group: Group, options: Options, room: Room) -> tuple[int, str]:
        """How many runs of a group go together, and why not more where memory is the reason."""
        raise NotImplementedError

    def engine_name(self, spec: RunSpec, engine: str, device: str) -> str:
        """What results call the engine."""
        raise NotImplementedError

    def execution(
        self, specs: Sequence[RunSpec], engine: str, options: Options, reporter: Reporter
    ) -> Execution:
        """Executes runs of one group."""
        raise NotImplementedError

    def measure_pace(self, specs: Sequence[RunSpec], options: Options) -> Pace:
        """Begin some runs and time them."""
        raise NotImplementedError

    def usual(self, problem: str, options: Mapping[str, Scalar]) -> Usual:
        """What its runs do unless they are told otherwise."""
        raise NotImplementedError


def kind_of(problem: str) -> Kind:
    """The kind of a problem's runs."""
    return _load(next((m for prefix, m in KINDS.items() if problem.startswith(prefix)), LEARNERS))


@cache
def _load(module: str) -> Kind:
    found: Kind = import_module(module).KIND
    return found
