"""Figures that need no study: measured by one command, into a table of their own.

:data:`upgd.paper.measured.MEASURED` lists them. The table has a ``provenance.json`` like those of
experiments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from upgd.ledger.versions import all_versions
from upgd.paper.provenance import Portion, Provenance, day

Say = Callable[[str], None]


@dataclass(frozen=True)
class How:
    """The options of a command."""

    scale: float = 1.0  # fraction of the full length
    seeds: int = 0  # the number of repetitions; 0 for the default
    device: str = "cpu"

    def command(self, name: str) -> str:
        """The command that measures a figure with these options."""
        words = ["upgd reproduce", name]
        words += [f"--scale {self.scale:g}"] if self.scale != 1 else []
        words += [f"--seeds {self.seeds}"] if self.seeds else []
        words += [f"--device {self.device}"] if self.device != "cpu" else []
        return " ".join(words)


class Measured(Protocol):
    """A module that measures, draws and describes a figure."""

    NAME: str  # what commands call the figure
    CAPTION: str  # what it shows
    TABLE: str  # the name of its table

    def folder(self, how: How) -> str:
        """The folder of its table, below the results."""

    def plan(self, how: How) -> str:
        """The amount of work and its expected time."""

    def measure(self, how: How, folder: Path, say: Say) -> None:
        """Write the table and its provenance."""

    def title(self, folder: Path) -> str:
        """A one-line description of a table."""

    def pictures(self, folder: Path) -> Mapping[str, str]:
        """The names of its pictures, with captions."""

    def draw(self, folder: Path, target: Path, suffixes: Sequence[str]) -> list[Path]:
        """Draw a table into the folder `target`: each picture in each format."""

    def page(self, folder: Path) -> list[str]:
        """A description as lines of Markdown, without pictures."""


def note(
    how: How, name: str, device: str, engine: str, dtype: str, steps: int,
    seeds: Mapping[str, Sequence[int]], learner_steps: int, began: float,
) -> Provenance:  # fmt: skip
    """The provenance of a table that was started at `began` (seconds since 1970)."""
    now = time.time()
    seconds = round(now - began, 1)
    runs = sum(map(len, seeds.values()))
    versions = all_versions(how.device)
    part = Portion(device, engine, versions, runs, seconds, day(began), day(now), dtype)
    return Provenance(name, how.command(name), steps, seeds, learner_steps, seconds, [part])
