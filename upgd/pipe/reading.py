"""The rows of a source: finds out how they are written, and reads them."""

from __future__ import annotations

import os
from dataclasses import replace

from upgd.pipe.formats import CsvRows, JsonRows, csv_record
from upgd.pipe.lines import Line, Lines, Source
from upgd.pipe.rows import Layout, Row, check_names

_DELIMITERS = (",", ";", "\t", "|")
_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".json": "jsonl", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_GZIP, _UTF16, _BOM = b"\x1f\x8b", (b"\xff\xfe", b"\xfe\xff"), b"\xef\xbb\xbf"


class Reader:
    """The rows of a source.

    Args:
        source: Where lines come from.
        layout: How records are written; what is empty is guessed from the source's name and
            its first line.

    Attributes:
        notes: What was guessed or left out, for the user.
        header: The first line of CSV, as it came.
    """

    def __init__(self, source: Source, layout: Layout) -> None:
        self.source, self.layout = source, layout
        self.lines = Lines(source)
        self.notes: list[str] = []
        self.header = b""
        self._format: CsvRows | JsonRows | None = None
        self._position: tuple[int, int] | None = None

    def jump(self, offset: int, line: int) -> None:
        """Go on at a position of a file, once its header is read."""
        self._position = offset, line

    @property
    def has_ended(self) -> bool:
        """Whether no row is left."""
        return self.lines.has_ended and not self.lines.ready

    @property
    def has_begun(self) -> bool:
        """Whether there was a first line."""
        return self._format is not None

    def take(self, most: int, wait: float) -> list[Row]:
        """Up to `most` rows that are there; waits for the first, `wait` seconds at most.

        Raises:
            ValueError: The header cannot be used.
            OSError: The source cannot be read.
        """
        rows: list[Row] = []
        while len(rows) < most:
            if isinstance(self._format, CsvRows):
                rows += self._format.usual(most - len(rows))
                if len(rows) == most:
                    break
            row = self._next()
            if row is not None:
                rows.append(row)
            elif self.has_ended or not self.lines.fill(0 if rows else wait):
                break
        return rows

    def _next(self) -> Row | None:
        """The next row; None if more must be read first."""
        ready = self.lines.ready
        while ready and not ready[0].raw.strip() and not ready[0].fault:
            ready.popleft()
        if not ready:
            return None
        if self._format is None:
            self._begin(ready[0])
            if self._format is None:
                return None
            if self._position is not None:
                self.lines.jump(*self._position)
            return self._next()
        return self._format.next()

    def _begin(self, first: Line) -> None:
        """Choose the format by the first line, and read the header."""
        where, raw = self.source.name, first.raw
        if first.number == 1 and raw.startswith(_BOM):
            raw = raw[len(_BOM) :]
            self.lines.ready[0] = first = first._replace(raw=raw)
        if raw.startswith(_GZIP):
            raise ValueError(f"{where} is compressed; unpack it on the way: zcat FILE | upgd learn")
        if raw.startswith(_UTF16):
            raise ValueError(f"{where} is not UTF-8 but UTF-16; convert it with iconv")
        if b"\r" in raw:
            raise ValueError(f"{where}: lines end with carriage returns; convert them with tr")
        format = self.layout.format or _SUFFIXES.get(os.path.splitext(where)[1].lower(), "")
        if not format:
            format = "jsonl" if raw.lstrip().startswith(b"{") else "csv"
        if format == "jsonl":
            self._format = JsonRows(self.lines, self.layout)
            return
        if self.layout.columns:
            delimiter = self.layout.delimiter or _delimiter(self.source.name)
            layout = replace(self.layout, delimiter=delimiter)
            self._format = CsvRows(self.lines, layout, self.layout.columns)
            return
        self._read_header(first)

    def _read_header(self, first: Line) -> None:
        where, candidates = self.source.name, self._delimiters()
        chosen = None
        for delimiter in candidates:
            found = csv_record(self.lines, delimiter)
            if found is None:
                return  # a quoted name with a newline: more must be read
            lines, fields, fault = found
            if fields is None:
                raise ValueError(f"{where}: the header, line {first.number}, is bad: {fault}")
            names = [name.strip() for name in fields]
            if chosen is None or self.layout.target in names:
                chosen = delimiter, lines, names
            if self.layout.target in names:
                break
        assert chosen is not None
        delimiter, lines, names = chosen
        layout = replace(self.layout, delimiter=delimiter)
        try:
            check_names(names, layout)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if delimiter not in (",", self.layout.delimiter):
            self.notes.append(f"{where}: columns are separated by {delimiter!r}")
        unnamed = [str(i) for i, name in enumerate(names, 1) if not name]
        if unnamed:
            self.notes.append(f"{where}: column {', '.join(unnamed)} has no name and is ignored")
        for _ in lines:
            self.lines.ready.popleft()
        self.header = b"\n".join(line.raw for line in lines)
        self._format = CsvRows(self.lines, layout, names)

    def _delimiters(self) -> tuple[str, ...]:
        if self.layout.delimiter:
            return (self.layout.delimiter,)
        likely = _delimiter(self.source.name)
        return (likely, *(each for each in _DELIMITERS if each != likely))


def _delimiter(name: str) -> str:
    return "\t" if name.lower().endswith(".tsv") else ","
