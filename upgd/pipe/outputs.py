"""Files that a pipe appends to, and whose length is saved with the learner."""

from __future__ import annotations

import csv
import io
import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

from upgd.filesystem import open_through
from upgd.ledger import crash_points as crash


class Output:
    """A file of lines that a resumed run continues where the saved learner was.

    What a killed run wrote after its learner was saved is cut off, so that no line is there twice.
    Pipes and terminals are written to as they are.

    Args:
        path: Of the file; ``-`` for standard output.
        header: The first line, without its end; none if empty.
        saved: What :meth:`position` returned when the learner was saved.
        is_resumed: Whether there is a saved learner.
        replaces: Whether a new run may replace a file that begins with the header.

    Raises:
        ValueError: There is another file, or it is shorter than it was.
        OSError: It cannot be written.
    """

    def __init__(
        self,
        path: str,
        header: bytes,
        saved: Mapping[str, Any] | None,
        is_resumed: bool,
        replaces: bool,
    ) -> None:
        self.path = path
        self._header = header + b"\n" if header else b""
        self.is_regular = False
        self.is_unknown = False  # whether its length is not what the saved learner says
        if path == "-":
            sys.stdout.flush()
            self._file: BinaryIO = sys.stdout.buffer
            self.write(self._header)
            return
        through = open_through(path)
        if through is not None:
            self._file = through
            self.write(self._header)
            return
        self.is_regular = True
        self._open(saved, is_resumed, replaces)

    def _open(self, saved: Mapping[str, Any] | None, is_resumed: bool, replaces: bool) -> None:
        path, length = self.path, 0
        mine = saved if saved is not None and saved["path"] == os.path.abspath(path) else None
        self._file = open(path, "r+b" if os.path.exists(path) else "x+b")  # noqa: SIM115
        size = os.fstat(self._file.fileno()).st_size
        begins = self._file.read(len(self._header)) == self._header
        if size and mine is not None:
            if size < mine["bytes"] or not begins:
                raise ValueError(
                    f"{path} is not what the saved learner wrote (it had {mine['bytes']} bytes, "
                    f"and has {size}); put it back, or name another file"
                )
            length = mine["bytes"]
        elif size and is_resumed and begins:
            length = size
        elif size and not (replaces and begins):
            raise ValueError(f"{path} is there already; move it away, or name another file")
        self.is_unknown = mine is None or length != mine["bytes"]
        self._file.truncate(length)
        self._file.seek(length)
        if not length:
            self.write(self._header)

    def write(self, content: bytes) -> None:
        """Append, and hand over to the system."""
        if content:
            self._file.write(content)
            self._file.flush()

    def position(self) -> dict[str, Any] | None:
        """The length of a regular file, once it is on disk; None for what has none."""
        if not self.is_regular:
            return None
        crash.point("output: before sync")
        self._file.flush()
        os.fsync(self._file.fileno())
        crash.point("output: after sync")
        return {"path": os.path.abspath(self.path), "bytes": self._file.tell()}

    def close(self) -> None:
        """Close the file, unless it is standard output."""
        if self.path != "-":
            self._file.close()


def check_distinct(paths: Mapping[str, str]) -> None:
    """Raise ValueError if two of some files, by what they are for, are the same."""
    seen: dict[str, str] = {}
    for what, path in paths.items():
        place = os.path.realpath(path)
        if path == "-" or (os.path.exists(place) and not stat.S_ISREG(os.stat(place).st_mode)):
            continue
        if place in seen:
            raise ValueError(f"{path} is both {seen[place]} and {what}; name different files")
        seen[place] = what


def csv_lines(rows: Iterable[Sequence[Any]]) -> bytes:
    """Classes, numbers and what is missing (None) as lines of CSV."""
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\n").writerow
    for row in rows:
        write([_cell(value) for value in row])
    return text.getvalue().encode(errors="surrogateescape")  # names of files may be any bytes


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
