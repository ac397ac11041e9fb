"""Lines of CSV and of JSON as rows."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from upgd.pipe.lines import Line, Lines
from upgd.pipe.rows import BadLineError, Layout, Row, Value
from upgd.stream.values import LARGEST

MISSING = frozenset({"", "na", "nan", "null"})
LONGEST_QUOTED = 1 << 16
"""Bytes of a record that spans lines: a quote that is not closed swallows no more."""


# --------------------------------------------------------------------------------- CSV
def csv_record(lines: Lines, delimiter: str) -> tuple[list[Line], list[str] | None, str] | None:
    """The next record's lines, and its fields or why there are none.

    A record whose quotes are not closed, or not closed rightly, is its first line only: the
    following ones are read for themselves. None if more must be read first.
    """
    first = lines.ready[0]
    try:
        text = _decoded(first)
        if '"' not in text:
            return [first], text.split(delimiter), ""
        return _quoted(lines, delimiter, text)
    except BadLineError as error:
        return [first], None, str(error)


def _quoted(
    lines: Lines, delimiter: str, text: str
) -> tuple[list[Line], list[str] | None, str] | None:
    """The same for lines with quotes; raises BadLineError."""
    texts, size = [text], len(text)
    following = islice(lines.ready, 1, None)
    while True:
        fields = _fields(texts, delimiter)
        if fields is not None:
            return list(islice(lines.ready, len(texts))), fields, ""
        for line in following:  # up to the next line that can close the quote
            texts.append(_decoded(line))
            size += len(line.raw) + 1
            if size > LONGEST_QUOTED:
                raise BadLineError(f"a quote is not closed within {LONGEST_QUOTED} bytes")
            if '"' in texts[-1]:
                break
        else:
            if lines.has_ended:
                raise BadLineError("a quote is not closed")
            return None


def _fields(texts: list[str], delimiter: str) -> list[str] | None:
    """The fields of a record; None if it goes on in the next line."""
    is_open = False

    def feed() -> Iterator[str]:
        nonlocal is_open
        for text in texts:
            yield text + "\n"
        is_open = True

    try:
        return next(csv.reader(feed(), delimiter=delimiter, strict=True))
    except csv.Error as error:
        if is_open:
            return None
        raise BadLineError(str(error)) from None


def _decoded(line: Line) -> str:
    if line.fault:
        raise BadLineError(line.fault)
    if b"\0" in line.raw:
        raise BadLineError("it has a NUL byte")
    try:
        return line.raw.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(
            f"byte {error.start + 1} is {error.object[error.start]:#04x}, which is not UTF-8"
        ) from None


class CsvRows:
    """Rows of fields that a header names."""

    def __init__(self, lines: Lines, layout: Layout, header: Sequence[str]) -> None:
        self._lines, self._delimiter = lines, layout.delimiter
        self._header = list(header)
        self._target = self._header.index(layout.target)
        left_out = {layout.target, "", *layout.ignore}
        self._chosen = [i for i, name in enumerate(header) if name not in left_out]
        self._names = tuple(header[i] for i in self._chosen)

    def usual(self, most: int) -> list[Row]:
        """The rows that come next and are numbers only, quickly; what :meth:`next` would return."""
        ready, delimiter, width = self._lines.ready, self._delimiter, len(self._header)
        target, names, chosen = self._target, self._names, self._chosen
        rows: list[Row] = []
        while ready and len(rows) < most:
            number, raw, end, fault, is_terminated = ready[0]
            if fault or b'"' in raw or b"\0" in raw or b"_" in raw:
                break
            try:
                fields = raw.decode().split(delimiter)
                if len(fields) != width:
                    break
                numbers = [float(fields[i]) for i in chosen]
            except ValueError:  # no number, or not UTF-8
                break
            label = fields[target].strip()
            if not _is_usual(numbers) or label.lower() in MISSING:
                break
            ready.popleft()
            place = (number, number + 1, end, raw)
            rows.append(Row(*place, names, numbers, True, label, "", is_terminated))
        return rows

    def next(self) -> Row | None:
        """The next row; None if more must be read first."""
        found = csv_record(self._lines, self._delimiter)
        if found is None:
            return None
        lines, fields, fault = found
        if fields is not None and len(fields) != len(self._header):
            fault = f"{len(fields)} fields, but the header has {len(self._header)}"
            lines = lines[:1]  # a wrong quote may have joined lines
        elif fields is not None and self._is_header(fields):
            fault = "the header again"
        for _ in lines:
            self._lines.ready.popleft()
        last = lines[-1]
        raw = lines[0].raw if len(lines) == 1 else b"\n".join(line.raw for line in lines)
        place = (lines[0].number, last.number + 1, last.end, raw)
        if not fault:
            assert fields is not None
            try:
                return Row(
                    *place, self._names, *self._values(fields), is_terminated=last.is_terminated
                )
            except BadLineError as error:
                fault = str(error)
        return Row(*place, fault=fault, is_terminated=last.is_terminated)

    def _is_header(self, fields: list[str]) -> bool:
        if fields[self._target].strip() != self._header[self._target]:
            return False
        return [field.strip() for field in fields] == self._header

    def _values(self, fields: list[str]) -> tuple[list[Value], bool, str | None]:
        """Features, whether all are numbers, and the target; raises BadLineError."""
        texts = [fields[i] for i in self._chosen]
        target = fields[self._target].strip()
        known = None if target.lower() in MISSING else target
        values = [_csv_value(name, text) for name, text in zip(self._names, texts, strict=True)]
        return values, not any(isinstance(value, str) for value in values), known


def _is_usual(numbers: list[float]) -> bool:
    """Whether numbers are there and of a size that can be learned; NaN makes the sum NaN."""
    return min(numbers) >= -LARGEST and max(numbers) <= LARGEST and sum(numbers) < math.inf


def _csv_value(name: str, text: str) -> Value:
    text = text.strip()
    if text.lower() in MISSING:
        return math.nan
    number = _as_number(text)
    return text if number is None else _checked(name, number)


def _as_number(text: str) -> float | None:
    """The number that a text is, if it is one."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _checked(name: str, number: float) -> float:
    if abs(number) > LARGEST:
        what = "infinite" if math.isinf(number) else f"{number:g}, beyond {LARGEST:g}"
        raise BadLineError(f"{name!r} is {what}")
    return number


def number_of(value: Any) -> float:
    """The target of a regression; raises BadLineError."""
    if isinstance(value, str):
        value = number if (number := _as_number(value)) is not None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise BadLineError(f"the target is {value!r}, which is no number")
    return _checked("the target", _float("the target", value))


# -------------------------------------------------------------------------------- JSON
class JsonRows:
    """Rows that are JSON objects, one per line."""

    def __init__(self, lines: Lines, layout: Layout) -> None:
        self._lines, self._layout = lines, layout
        self._left_out = frozenset({layout.target, *layout.ignore})
        self._decode = json.JSONDecoder(object_pairs_hook=_object).decode
        self._known: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def next(self) -> Row | None:
        """The next row. An object that can be read is complete, whether or not its line ends."""
        line = self._lines.ready.popleft()
        place = (line.number, line.number + 1, line.end, line.raw)
        try:
            return Row(*place, *self._values(_decoded(line)))
        except BadLineError as error:
            return Row(*place, fault=str(error), is_terminated=line.is_terminated)

    def _values(self, text: str) -> tuple[tuple[str, ...], list[Value], bool, Any]:
        """Names, features, whether all are numbers, and the target; raises BadLineError."""
        try:
            found = self._decode(text)
        except (ValueError, RecursionError) as error:
            if isinstance(error, BadLineError):
                raise
            raise BadLineError(f"it is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise BadLineError(f"it is no JSON object but a {type(found).__name__}")
        if "\\u" in text:
            _check_text(found)
        target = _json_target(found.get(self._layout.target))
        keys = tuple(found)
        if keys != self._known[0]:
            self._known = keys, tuple(key for key in keys if key not in self._left_out)
        names = self._known[1]
        values = [_json_value(name, found[name]) for name in names]
        return names, values, not any(isinstance(value, str) for value in values), target


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadLineError(f"it has {twice!r} twice")
    return found


def _check_text(found: dict[str, Any]) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadLineError("it has half of a surrogate pair, which is no text") from None


def _json_value(name: str, value: Any) -> Value:
    if type(value) is float:
        return value if -LARGEST <= value <= LARGEST else _checked(name, value)
    if isinstance(value, str):
        return value
    if value is None:
        return math.nan
    if isinstance(value, int):
        return _checked(name, _float(name, value))
    what = "an object" if isinstance(value, dict) else "a list"
    raise BadLineError(f"{name!r} is {what}; features are numbers, strings or null")


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise BadLineError(f"{name!r} is an integer beyond {LARGEST:g}") from None


def _json_target(value: Any) -> Any:
    """A class or a number; None if it is missing. Raises BadLineError."""
    if isinstance(value, dict | list):
        what = "an object" if isinstance(value, dict) else "a list"
        raise BadLineError(f"the target is {what}")
    if isinstance(value, float):
        if math.isinf(value):
            raise BadLineError("the target is infinite")
        return None if math.isnan(value) else value
    if isinstance(value, str):
        return value.strip() or None
    return value
