"""How figures are measured that need no study: in one go, into a table of their own.

:data:`upgd.paper.measured.MEASURED` lists them. Beside the table lies a ``provenance.json``, as
beside an experiment's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from upgd.paper.provenance import Part, Provenance, day
from upgd.study.versions import all_versions

Say = Callable[[str], None]


@dataclass(frozen=True)
class How:
    """What a command asks for.

    Attributes:
        scale: Share of the full length.
        seeds: How many repetitions; 0 for the default.
        device: Where it is measured.
    """

    scale: float = 1.0
    seeds: int = 0
    device: str = "cpu"

    def command(self, name: str) -> str:
        """What measures a figure in this way.

        Example:
            >>> How(0.1, 5, "cuda").command("time")
            'upgd reproduce time --scale 0.1 --seeds 5 --device cuda'
        """
        words = ["upgd reproduce", name]
        words += [f"--scale {self.scale:g}"] if self.scale != 1 else []
        words += [f"--seeds {self.seeds}"] if self.seeds else []
        words += [f"--device {self.device}"] if self.device != "cpu" else []
        return " ".join(words)


class Measured(Protocol):
    """A module that measures a figure, draws it and tells of it.

    Attributes:
        NAME: What commands call the figure.
        CAPTION: What it shows.
        TABLE: The name of its table.
    """

    NAME: str
    CAPTION: str
    TABLE: str

    def folder(self, how: How) -> str:
        """Where its table is kept, below the other results."""

    def plan(self, how: How) -> str:
        """How much there is to measure and how long it takes."""

    def measure(self, how: How, folder: Path, say: Say) -> None:
        """Write the table, and where it comes from."""

    def title(self, folder: Path) -> str:
        """What a table shows, in a line."""

    def pictures(self, folder: Path) -> Mapping[str, str]:
        """The names of its pictures, with captions."""

    def draw(self, folder: Path, target: Path, suffixes: Sequence[str]) -> list[Path]:
        """Draw a table into the folder `target`: each picture in each format."""

    def page(self, folder: Path) -> list[str]:
        """What there is to tell, as lines of Markdown, without pictures."""


def note(
    how: How,
    name: str,
    device: str,
    engine: str,
    dtype: str,
    steps: int,
    seeds: Mapping[str, Sequence[int]],
    learner_steps: int,
    began: float,
) -> Provenance:
    """Where a table comes from that was begun at `began` (seconds since 1970) and is done now."""
    now = time.time()
    seconds = round(now - began, 1)
    runs = sum(map(len, seeds.values()))
    versions = all_versions(how.device)
    part = Part(device, engine, versions, runs, seconds, day(began), day(now), dtype)
    return Provenance(name, how.command(name), steps, seeds, learner_steps, seconds, [part])
