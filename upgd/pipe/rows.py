"""Records of a stream: what they consist of, and how they may be written."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

FORMATS = ("csv", "jsonl")
Value = float | str  # NaN for what is missing


class Row(NamedTuple):
    """One record of a stream."""

    line: int  # the number of its first line
    next_line: int
    end: int  # bytes of the source up to the next record
    raw: bytes
    names: tuple[str, ...] = ()
    values: Sequence[Value] = ()
    is_numeric: bool = True  # no value is a string
    target: Any = None  # None if it is missing
    fault: str = ""  # why it cannot be used
    is_terminated: bool = True  # False if it may go on: a last line without a newline

    @property
    def features(self) -> dict[str, Value]:
        """As learners take them one by one."""
        return dict(zip(self.names, self.values, strict=True))


@dataclass(frozen=True)
class Layout:
    """How records are written.

    Args:
        target: The column with the target.
        ignore: Columns that are not features.
        format: ``"csv"`` or ``"jsonl"``; guessed if empty.
        delimiter: Between fields; guessed from the header if empty.
        columns: Names, for CSV without a header.
    """

    target: str
    ignore: tuple[str, ...] = ()
    format: str = ""
    delimiter: str = ""
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format and self.format not in FORMATS:
            raise ValueError(f"format is {' or '.join(FORMATS)}, got {self.format!r}")
        if self.delimiter and (len(self.delimiter) > 1 or self.delimiter in '"\r\n'):
            raise ValueError(
                f"a delimiter is one character, such as ';' or tab, got {self.delimiter!r}"
            )
        if self.target in self.ignore:
            raise ValueError(f"{self.target!r} is the target and cannot be ignored")
        if self.columns:
            check_names(self.columns, self)


class BadLineError(ValueError):
    """A line that cannot be used."""


def check_names(names: Sequence[str], layout: Layout) -> None:
    """Raise ValueError unless a header has the columns that are asked for."""
    twice = [name for name, times in Counter(names).items() if name and times > 1]
    if twice:
        raise ValueError(f"the header has column {twice[0]!r} twice; give columns different names")
    for name, what in [(layout.target, "target"), *((each, "ignored") for each in layout.ignore)]:
        if name not in names:
            raise ValueError(
                f"there is no {what} column {name!r}; {did_you_mean(name, names)}"
                f"the header has {listed(names)}"
            )
    if not set(names) - {layout.target, "", *layout.ignore}:
        raise ValueError(f"there is no column to learn from beside the target {layout.target!r}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known, or nothing."""
    names = {each.lower(): each for each in known if each}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {names[close[0]]!r}? " if close else ""


def listed(names: Sequence[str]) -> str:
    """Names, or the first of many."""
    some = ", ".join(names[:20])
    return some if len(names) <= 20 else f"{some} and {len(names) - 20} more"
