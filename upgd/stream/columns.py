"""From dicts, data frames and arrays to rows of numbers with named columns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.stream.values import LARGEST, Name, as_name, as_number, short

Rows = NDArray[np.float64]
Widths = NDArray[np.intp]
Features = dict[Name, float | str]
_OTHER = "<other>"


class StreamWarning(UserWarning):
    """Something in a stream that a learner works around."""


class Columns:
    """The columns of a learner's inputs, which appear as features do.

    A number has the column of its feature's name. A string has a column for the feature and the
    string, ``"colour=red"``, which is 1 where the feature has that value and 0 where it has
    another. What is missing (absent, None, NaN) is NaN; a feature has no column before it has a
    value. Columns that appear together are in the order of their names, whatever order a dict or a
    data frame has.

    Args:
        most: Columns; features beyond them are left out, with a warning.
        most_categories: Different strings of one feature; the rest share a column.
        absent: The number of a feature that a dict does not have: NaN, or 0 for sparse dicts.
        largest: Magnitudes above are refused.
    """

    def __init__(
        self,
        most: int = 10_000,
        most_categories: int = 100,
        absent: float = math.nan,
        largest: float = LARGEST,
    ) -> None:
        self.most, self.most_categories, self.absent = most, most_categories, absent
        self.largest = largest
        self.names: list[Name] = []
        self._place: dict[Name, int] = {}  # of numbers
        self._categories: dict[Name, dict[str, int]] = {}
        self._others: dict[Name, int] = {}  # of strings beyond `most_categories`
        self._full = False
        self._is_numbered = True  # whether names are 0, 1, 2, ...
        self._usual: tuple[tuple[Any, ...], NDArray[np.intp]] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def fix(self, count: int) -> None:
        """Name columns by their numbers, 0 to `count` - 1, as an array has them.

        Raises:
            ValueError: There are too many.
        """
        if count > self.most:
            raise ValueError(f"X has {count} features; raise max_features, which is {self.most}")
        for name in range(len(self.names), count):
            self._place[name] = self._add(name)

    def by_number(self, rows: Rows) -> Rows:
        """Rows of an array, whose columns are named by their numbers, in the order of columns.

        Raises:
            ValueError: The columns have other names.
        """
        if self._is_numbered:
            return rows
        if sorted(self.names, key=_order) != list(range(len(self.names))):
            some = ", ".join(map(short, self.names[:3]))
            raise ValueError(
                f"X has no names of features, but what was learned has: {some}, ...; give a data "
                "frame or dicts"
            )
        return np.ascontiguousarray(rows[:, np.array(self.names, np.intp)])

    def cut(self, count: int) -> None:
        """Forget the columns after the first `count`."""
        if len(self.names) == count:
            return
        del self.names[count:]
        self._full = False
        self._place = {name: at for name, at in self._place.items() if at < count}
        self._others = {name: at for name, at in self._others.items() if at < count}
        kept = {
            name: {value: at for value, at in values.items() if at < count}
            for name, values in self._categories.items()
        }
        self._categories = {name: values for name, values in kept.items() if values}
        self._is_numbered = self.names == list(range(count))
        self._usual = None

    def features(self) -> list[Name]:
        """The feature of each column: that of ``"colour=red"`` is ``"colour"``."""
        found = list(self.names)
        for name, values in self._categories.items():
            for place in values.values():
                found[place] = name
        for name, place in self._others.items():
            found[place] = name
        return found

    def place(self, name: Name) -> int | None:
        """The column of a feature's numbers; None if it has none."""
        return self._place.get(name)

    def is_new(self, name: Name, value: float | str) -> bool:
        """Whether a value would get a column, were it learned."""
        if self._full:
            return False
        if isinstance(value, str):
            return value not in self._categories.get(name, ()) and name not in self._others
        return not math.isnan(value) and name not in self._place

    # ------------------------------------------------------------------------- dicts
    def row(self, x: Mapping[Any, Any], grow: bool) -> Rows:
        """A dict as a row; with `grow`, features never seen before get a column.

        Raises:
            TypeError: It is no dict, or a name or a value cannot be used.
            ValueError: A value is infinite or too large.
        """
        usual = self._usual_row(x)
        if usual is not None:
            return usual
        known = self._checked(x)
        if grow:
            self._note(known)
        row = self.filled(known)
        numeric = all(not isinstance(value, str) for value in known.values())
        if numeric and all(name in self._place for name in x):
            places = np.array([self._place[name] for name in x], np.intp)
            self._usual = tuple(x), places
        return row

    def _usual_row(self, x: Mapping[Any, Any]) -> Rows | None:
        """The same in a few operations, where names are those of the last dict and values numbers.

        Strings become arrays of strings and what is unusual arrays of objects: not taken here.
        """
        if self._usual is None or type(x) is not dict or tuple(x) != self._usual[0]:
            return None
        try:
            values = np.array(list(x.values()))
        except Exception:  # of different lengths, too large, or with a conversion that raises
            return None
        if values.dtype.kind not in "fiub" or values.ndim != 1:
            return None
        values = values.astype(np.float64, copy=False)
        if (np.abs(values) > self.largest).any():
            return None
        row = np.full(len(self.names), self.absent)
        row[self._usual[1]] = values
        return row

    def _checked(self, x: Mapping[Any, Any]) -> Features:
        """A dict's features as numbers, strings or NaN; raises TypeError or ValueError."""
        if not isinstance(x, Mapping):
            raise TypeError(f"a dict of features expected, got one of type {type(x).__name__}")
        found = {as_name(name): self._value(name, value) for name, value in x.items()}
        if len(found) < len(x):
            raise ValueError("two features of a sample have the same name")
        return found

    def _value(self, name: Any, value: Any) -> float | str:
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, str):
            return str.__str__(value)
        try:
            found = as_number(value)
        except TypeError as error:
            raise TypeError(
                f"feature {short(name)} {error}; features are numbers, strings or missing"
            ) from None
        except ValueError as error:
            raise ValueError(
                f"feature {short(name)} {error}; use None or NaN for what is missing"
            ) from None
        if abs(found) > self.largest:
            raise ValueError(self.too_large(name, found))
        return found

    def too_large(self, name: Any, value: float) -> str:
        """Why a magnitude above `largest` is refused."""
        return (
            f"feature {short(name)} is {value:.3g}; magnitudes up to {self.largest:g} can be "
            "learned. Use None or NaN for what is missing"
        )

    def filled(self, known: Mapping[Any, float | str]) -> Rows:
        """Numbers and strings that were checked, as a row; what has no column is left out."""
        row = np.full(len(self.names), self.absent)
        for name, value in known.items():
            if isinstance(value, str):
                self._mark(row, name, value)
            elif (place := self._place.get(name)) is not None:
                row[place] = value
        return row

    def _note(self, known: Features) -> None:
        """Add columns for what was never seen before."""
        for name in sorted(known, key=_order):
            value = known[name]
            if isinstance(value, str):
                self._note_string(name, value)
            elif name not in self._place and not math.isnan(value) and self._has_room(name):
                self._place[name] = self._add(name)

    def _note_string(self, name: Name, value: str) -> None:
        values = self._categories.get(name, {})
        if value in values or name in self._others or not self._has_room(name):
            return
        if len(values) < self.most_categories:
            self._categories.setdefault(name, {})[value] = self._add(f"{name}={value}")
            return
        self._others[name] = self._add(f"{name}={_OTHER}")
        warnings.warn(
            f"feature {short(name)} has more than {self.most_categories} different strings; "
            "the others share one column. Leave it out if it is an identifier or a date",
            StreamWarning,
            stacklevel=2,
        )

    def _has_room(self, name: Name) -> bool:
        if len(self.names) < self.most:
            return True
        if not self._full:
            self._full = True
            warnings.warn(
                f"there are {self.most} columns: features like {short(name)} are left out; "
                "raise max_features to keep them",
                StreamWarning,
                stacklevel=2,
            )
        return False

    def _add(self, name: Name) -> int:
        """A new column's place. Several may have one name, such as "a=b", a number and a string."""
        self._is_numbered = self._is_numbered and name == len(self.names)
        self.names.append(name)
        return len(self.names) - 1

    def _mark(self, row: Rows, name: Name, value: str) -> None:
        values = self._categories.get(name, {})
        other = self._others.get(name)
        row[list(values.values())] = 0
        if other is not None:
            row[other] = 0
        place = values.get(value, other)
        if place is not None:
            row[place] = 1

    # ------------------------------------------------------------------------ tables
    def table(self, table: Any, grow: bool) -> tuple[Rows, Widths]:
        """A data frame of pandas or polars, or dicts, as rows; raises as :meth:`row`.

        Returns:
            Rows, and how many columns there were after each: what :meth:`row` would have added
            up to there.
        """
        if hasattr(table, "columns"):
            names = [as_name(name) for name in table.columns]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"there are two columns {short(twice)}")
            numeric = self._numeric(table, names, grow)
            if numeric is not None:
                return numeric
        checked = [self._checked(each) for each in _records(table)]  # all before one is noted
        widths = np.full(len(checked), len(self.names), np.intp)
        if grow:
            for t, each in enumerate(checked):
                self._note(each)
                widths[t] = len(self.names)
        rows = np.empty((len(checked), len(self.names)))
        for t, each in enumerate(checked):
            rows[t] = self.filled(each)
        return rows, widths

    def _numeric(self, frame: Any, names: list[Name], grow: bool) -> tuple[Rows, Widths] | None:
        """A data frame of numbers only; None if it has other columns."""
        found: dict[Name, Rows] = {}
        for name, column in zip(names, frame.columns, strict=True):
            values = np.asarray(frame[column])
            if values.dtype.kind not in "fiub":
                return None
            found[name] = values.astype(np.float64)
            worst = np.nanmax(np.abs(found[name]), initial=0)
            if worst > self.largest:
                raise ValueError(self.too_large(name, worst))
        widths = np.full(len(frame), len(self.names), np.intp)
        if grow:
            first = {
                name: int(known.argmax())
                for name, values in found.items()
                if name not in self._place and (known := ~np.isnan(values)).any()
            }
            # As rows one by one would bring them.
            for name in sorted(first, key=lambda name: (first[name], _order(name))):
                if self._has_room(name):
                    self._place[name] = self._add(name)
                    widths[first[name] :] += 1
        rows = np.full((len(frame), len(self.names)), self.absent)
        for name, values in found.items():
            if name in self._place:
                rows[:, self._place[name]] = values
        return rows, widths

    # ------------------------------------------------------------------------- state
    def state(self) -> dict[str, Any]:
        """What JSON can keep."""
        return {
            "names": list(self.names),
            "numbers": list(self._place.values()),
            "categories": [[name, list(v.items())] for name, v in self._categories.items()],
            "others": [list(pair) for pair in self._others.items()],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""
        self.names = list(saved["names"])
        self._place = {self.names[at]: at for at in saved["numbers"]}
        self._categories = {name: dict(values) for name, values in saved["categories"]}
        self._others = dict(saved["others"])
        self._is_numbered = self.names == list(range(len(self.names)))
        self._usual = None


def _order(name: Name) -> tuple[bool, Name]:
    return isinstance(name, str), name


def is_table(X: Any) -> bool:
    """Whether features have names: a data frame, or dicts."""
    if hasattr(X, "columns") and hasattr(X, "__getitem__"):
        return True
    return isinstance(X, list | tuple) and bool(X) and isinstance(X[0], Mapping)


def _records(table: Any) -> Iterable[Mapping[Any, Any]]:
    if hasattr(table, "to_dicts"):  # polars
        found: Iterable[Mapping[Any, Any]] = table.to_dicts()
        return found
    if hasattr(table, "to_dict"):  # pandas
        records: Iterable[Mapping[Any, Any]] = table.to_dict("records")
        return records
    rows: Iterable[Mapping[Any, Any]] = table
    return rows
