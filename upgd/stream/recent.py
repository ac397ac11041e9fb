"""The newest samples as the networks saw them, for what looks at a learner between its steps."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = tuple[NDArray[np.float32], NDArray[Any]]


class Recent:
    """The newest samples: scaled rows and encoded targets. They are not saved with a learner.

    Args:
        capacity: How many at least, where there were as many.

    Example:
        >>> recent = Recent(2)
        >>> for t in range(3):
        ...     recent.add(np.full((1, 4), t, np.float32), np.array([t]))
        >>> recent.newest(5, columns=4)[1].tolist()
        [1, 2]
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pieces: deque[Samples] = deque()
        self._count = 0

    def add(self, rows: NDArray[np.float32], targets: NDArray[Any]) -> None:
        """Keep rows [T, columns] and their targets, and drop those that are too old."""
        if len(rows) > self.capacity:  # the rest need not stay in memory
            rows, targets = rows[-self.capacity :].copy(), targets[-self.capacity :].copy()
        self._pieces.append((rows, targets))
        self._count += len(rows)
        while self._count - len(self._pieces[0][0]) >= self.capacity:
            self._count -= len(self._pieces.popleft()[0])

    def newest(self, count: int, columns: int) -> Samples:
        """At most `count` of the newest; columns that came after a row are zero, as if missing."""
        pieces: list[Samples] = []
        for rows, targets in reversed(self._pieces):
            if count <= 0:
                break
            found = np.zeros((min(count, len(rows)), columns), np.float32)
            found[:, : rows.shape[1]] = rows[-count:]
            pieces.insert(0, (found, targets[-count:]))
            count -= len(rows)
        if not pieces:
            return np.zeros((0, columns), np.float32), np.zeros(0)
        all_rows, all_targets = zip(*pieces, strict=True)
        return np.concatenate(all_rows), np.concatenate(all_targets)
