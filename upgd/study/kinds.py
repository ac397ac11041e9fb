"""Kinds of runs: learners on streams, and agents of reinforcement learning.

A :class:`Kind` says how runs of its problems are checked, grouped and executed. A problem's name
determines its kind: ``ppo/Hopper-v5`` is an agent's.
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
class RunGroup:
    """Pending runs that can be executed together."""

    key: Any  # what they have in common
    engine: str  # what executes them, for :meth:`Kind.execution`
    specs: deque[RunSpec]  # the runs, oldest first
    total: int = 0  # how many there were before some were taken
    begun: bool = False  # whether they are a stack that has started, of which the size matters

    def first(self, count: int) -> list[RunSpec]:
        """The oldest ones."""
        return list(islice(self.specs, count))

    def take(self, count: int) -> list[RunSpec]:
        """Remove the oldest ones from the group."""
        return [self.specs.popleft() for _ in range(min(count, len(self.specs)))]


@dataclass(frozen=True)
class Pace:
    """Steps per second of all runs together, and how that is known."""

    rate: float
    source: str


class Kind:
    """A kind of runs."""

    noun, unit = "run", "samples"  # what a run and a step are called
    local_only = ""  # why its runs cannot be spread over workers, if they cannot
    lock_step = True  # whether runs that are executed together must stand at one step
    packages: tuple[str, ...] = ()  # what its results depend on besides numpy and torch
    diverged_counts = False  # whether figures show a diverged run up to its divergence

    def check(self, spec: RunSpec, options: Options) -> None:
        """Raise SpecError if a run cannot be executed, or would measure nothing."""
        raise NotImplementedError

    def dataset(self, problem: str) -> str | None:
        """The name of a problem's data, if it has some."""
        return None

    def check_data(self, problem: str, data_dir: str | os.PathLike[str] | None) -> None:
        """Raise if data or a simulator are missing."""
        raise NotImplementedError

    def group(self, spec: RunSpec, options: Options) -> tuple[str, Any] | None:
        """The engine of a run, and a key that runs share which can be executed together.

        None if the engine that `options` name cannot execute it.
        """
        raise NotImplementedError

    def why_alone(self, spec: RunSpec, options: Options) -> str:
        """Why a run cannot be executed together with others; empty if it can, or is wrong."""
        return ""

    def stack(self, facts: Mapping[str, Any]) -> str | None:
        """From a checkpoint's facts: the stack that the run must stay in, if it matters."""
        return None

    def size(self, group: RunGroup, options: Options, room: Room) -> tuple[int, str]:
        """How many runs of a group to execute together, and why not more if memory is limited."""
        raise NotImplementedError

    def engine_name(self, spec: RunSpec, engine: str, device: str) -> str:
        """The engine's name in results."""
        raise NotImplementedError

    def execution(
        self, specs: Sequence[RunSpec], engine: str, options: Options, reporter: Reporter
    ) -> Execution:
        """The execution of runs of one group."""
        raise NotImplementedError

    def measure_pace(self, specs: Sequence[RunSpec], options: Options) -> Pace:
        """Start some runs and time them."""
        raise NotImplementedError

    def usual(self, problem: str, options: Mapping[str, Scalar]) -> Usual:
        """The defaults of a problem's runs with these options."""
        raise NotImplementedError


def kind_of(problem: str) -> Kind:
    """The kind of a problem's runs."""
    return _load(next((m for prefix, m in KINDS.items() if problem.startswith(prefix)), LEARNERS))


@cache
def _load(module: str) -> Kind:
    found: Kind = import_module(module).KIND
    return found
