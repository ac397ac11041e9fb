"""Rows of a stream as matrices, for learners that know their features."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from upgd.pipe.rows import Row
from upgd.stream.columns import Columns, Rows

_MOST_KEPT = 1000


class Batches:
    """Puts rows into the columns of a learner, many at a time.

    The same numbers as :meth:`Columns.row` with each row, which must bring nothing new.

    Args:
        columns: Of the learner.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._width = -1
        self._places: dict[tuple[str, ...], tuple[NDArray[np.intp], NDArray[np.intp]]] = {}

    def is_new(self, row: Row) -> bool:
        """Whether a row has a feature, or a string of one, that has no column yet."""
        if row.is_numeric and len(self._where(row.names)[0]) == len(row.names):
            return False
        return any(map(self._columns.is_new, row.names, row.values))

    def matrix(self, rows: Sequence[Row]) -> Rows:
        """Rows as numbers, [T, columns]."""
        found = np.full((len(rows), len(self._columns)), self._columns.absent)
        begin = 0
        for (names, is_numeric), group in groupby(rows, lambda row: (row.names, row.is_numeric)):
            some = [row.values for row in group]
            end = begin + len(some)
            if is_numeric:
                sources, places = self._where(names)
                found[begin:end, places] = np.array(some, np.float64)[:, sources]
            else:
                for t, values in enumerate(some, begin):
                    found[t] = self._columns.filled(dict(zip(names, values, strict=True)))
            begin = end
        return found

    def _where(self, names: tuple[str, ...]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Which features have a column, and which."""
        if self._width != len(self._columns) or len(self._places) > _MOST_KEPT:
            self._width = len(self._columns)
            self._places.clear()
        found = self._places.get(names)
        if found is None:
            places = enumerate(map(self._columns.place, names))
            both = np.array([pair for pair in places if pair[1] is not None], np.intp)
            both = both.reshape(-1, 2)
            found = self._places[names] = both[:, 0], both[:, 1]
        return found
