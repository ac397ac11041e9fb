"""What a study answers with: tables and pictures that a notebook shows and print() prints."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upgd.ledger import Run
from upgd.report import tables
from upgd.study.selection import Ranking
from upgd.text import pairs


class Cells:
    """Something that prints as a table, and shows as one in a notebook."""

    def cells(self) -> list[list[str]]:
        """The table as text, its header first."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.cells())

    def _repr_html_(self) -> str:
        return as_html(self.cells())

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Table(Cells):
    """A row per setting: means over seeds with standard errors and intervals.

    Attributes:
        rows: As mappings.
        counts: How many runs of the whole study are in each state.
        runs: The runs behind the rows.
    """

    rows: Sequence[Mapping[str, Any]]
    counts: Mapping[str, int]
    runs: Sequence[Run]

    def cells(self) -> list[list[str]]:
        """The table as text, its header first."""
        found = [["problem", "method", "steps", "seeds", "metric", "mean ± s.e.", "IQM [95%]"]]
        for row, name in zip(self.rows, tables.labels(self.rows), strict=True):
            seeds = f"{row['seeds']}"
            seeds += f" (+{row['diverged']} diverged)" if row["diverged"] else ""
            found.append([row["problem"], name, str(row["steps"]), seeds, *numbers(row)])
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)


@dataclass(frozen=True, repr=False)
class Rankings(Cells):
    """Each method's sets of hyperparameters in order, with the best first.

    Attributes:
        found: One per problem, method, length and options.
    """

    found: Sequence[Ranking]

    @property
    def winners(self) -> dict[str, dict[str, float]]:
        """By method, its best set; the first ranking's where a method has several."""
        best: dict[str, dict[str, float]] = {}
        for ranking in self.found:
            if ranking.winner is not None:
                best.setdefault(ranking.name, dict(ranking.winner.hyper))
        return best

    def cells(self) -> list[list[str]]:
        """The winners as text, the header first."""
        found = [["problem", "method", "best set", "sets", "metric", "mean [95%]"]]
        for ranking in self.found:
            family, winner = ranking.family, ranking.winner
            shown = ["-", "-"]
            if winner is not None:
                mean, low, high = winner.interval
                interval = "" if math.isnan(low) else f" [{low:.4f}, {high:.4f}]"
                shown = [pairs(dict(winner.hyper)), f"{mean:.4f}{interval}"]
            sets = str(len(ranking.complete))
            found.append([family.problem, ranking.name, shown[0], sets, ranking.metric, shown[1]])
        return found

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Ranking]:
        return iter(self.found)


@dataclass(frozen=True)
class Picture(os.PathLike[str]):
    """A figure's file, which a notebook shows."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def _repr_png_(self) -> bytes | None:
        return self.path.read_bytes() if self.path.suffix == ".png" else None

    def _repr_svg_(self) -> str | None:
        return self.path.read_text(encoding="utf-8") if self.path.suffix == ".svg" else None


def numbers(row: Mapping[str, Any]) -> list[str]:
    """The metric of a row, its mean and its interquartile mean, as text."""
    if "metric" not in row:
        return ["-", "-", "-"]
    error, digits = row["standard_error"], 1 if row["metric"] == "return" else 4
    return [
        row["metric"],
        f"{row['mean']:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}"),
        f"{row['iqm']:.{digits}f} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]",
    ]


def as_text(cells: Sequence[Sequence[str]]) -> str:
    """Rows of a table in columns, the header first."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def as_html(cells: Sequence[Sequence[str]]) -> str:
    """The same for a notebook."""
    head, *rows = [[html.escape(cell) for cell in row] for row in cells]
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
