"""What a study answers with: tables and pictures that a notebook shows and print() prints."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from upgd.ledger import Run
from upgd.metrics import INTERVAL
from upgd.report import tables
from upgd.study.selection import Conditions, Ranking
from upgd.text import pairs


class Part(NamedTuple):
    """A table as text, its header first, and what stands above it."""

    title: str
    cells: list[list[str]]


class Cells:
    """Something that prints as one or several tables, and shows as such in a notebook."""

    def parts(self) -> list[Part]:
        """The tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        shown = ((part.title, as_text(part.cells)) for part in self.parts())
        return "\n\n".join("\n".join(filter(None, one)) for one in shown)

    def _repr_html_(self) -> str:
        return "".join(as_html(part.cells, part.title) for part in self.parts())

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Table(Cells):
    """A row per setting: means over seeds with intervals; a table per problem, length and options.

    Attributes:
        rows: As mappings.
        counts: How many runs of the whole study are in each state.
        runs: The runs behind the rows.
    """

    rows: Sequence[Mapping[str, Any]]
    counts: Mapping[str, int]
    runs: Sequence[Run]

    def parts(self) -> list[Part]:
        """A table for each of the conditions."""
        found = []
        for title, rows in self.by_conditions().items():
            cells = [["method", "seeds", "metric", mean_header(rows)]]
            for row, name in zip(rows, tables.labels(rows), strict=True):
                seeds = f"{row['seeds']}"
                seeds += f" (+{row['diverged']} diverged)" if row["diverged"] else ""
                cells.append([name, seeds, *numbers(row)])
            found.append(Part(title, cells))
        return found

    def by_conditions(self) -> dict[str, list[Mapping[str, Any]]]:
        """Rows that can be compared, by what they have in common."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.rows:
            there = Conditions.of(row["problem"], row["steps"], row["options"])
            found.setdefault(str(there), []).append(row)
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)


@dataclass(frozen=True, repr=False)
class Rankings(Cells):
    """Each method's sets of hyperparameters in order, with the best first.

    Methods that ran equally long and with the same options stand in one table.

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

    def parts(self) -> list[Part]:
        """The winners as text, a table for each of the conditions."""
        found = []
        for title, mine in self.by_conditions().items():
            cells = [["method", "best set", "sets", "metric", f"mean [{INTERVAL}]"]]
            for ranking in mine:
                winner = ranking.winner
                shown = ["-", "-"]
                if winner is not None:
                    shown = [pairs(dict(winner.hyper)), with_interval(*winner.interval)]
                sets = str(len(ranking.complete))
                cells.append([ranking.name, shown[0], sets, ranking.metric, shown[1]])
            found.append(Part(title, cells))
        return found

    def by_conditions(self) -> dict[str, list[Ranking]]:
        """Rankings that can be compared, by what they have in common."""
        found: dict[str, list[Ranking]] = {}
        for ranking in self.found:
            found.setdefault(str(ranking.conditions), []).append(ranking)
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


def mean_header(rows: Iterable[Mapping[str, Any]]) -> str:
    """The header of a column of means, which says what their intervals are, if there are any."""
    return f"mean [{INTERVAL}]" if any(row.get("low") is not None for row in rows) else "mean"


def numbers(row: Mapping[str, Any]) -> list[str]:
    """The metric of a row and its mean with the interval, as text."""
    if "metric" not in row:
        return ["-", "-"]
    digits = 1 if row["metric"] == "return" else 4
    return [row["metric"], with_interval(row["mean"], row["low"], row["high"], digits)]


def with_interval(mean: float, low: float | None, high: float | None, digits: int = 4) -> str:
    """A mean with its interval; without it where there is none.

    Example:
        >>> with_interval(0.5, 0.25, 0.75, 2), with_interval(0.5, None, None, 2)
        ('0.50 [0.25, 0.75]', '0.50')
    """
    text = f"{mean:.{digits}f}"
    if low is None or high is None or math.isnan(low):
        return text
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def as_text(cells: Sequence[Sequence[str]]) -> str:
    """Rows of a table in columns, the header first."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def as_html(cells: Sequence[Sequence[str]], title: str = "") -> str:
    """The same for a notebook."""
    head, *rows = [[html.escape(cell) for cell in row] for row in cells]
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<caption>{html.escape(title)}</caption>" if title else ""
    return f"<table>{above}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
