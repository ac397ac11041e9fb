"""A buffer of past samples that are learned again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.stream.pickling import OwnsArrays
from upgd.streams import keyed


class Buffer(OwnsArrays):
    """The newest `capacity` samples; drawing is a function of the seed and of how often it was.

    Args:
        capacity: Samples.
        seed: Of the draws.
        outputs: Numbers per target; 0 for classes.
    """

    def __init__(self, capacity: int, seed: int, outputs: int = 0) -> None:
        self.capacity, self.seed = capacity, seed
        self.rows = np.zeros((0, 0))
        self.targets: NDArray[Any] = np.zeros((0, outputs)) if outputs else np.zeros(0, np.int64)
        self.added = self.drawn = 0

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: NDArray[np.float64], target: Any) -> None:
        """Keep a sample in place of the oldest."""
        if self.rows.shape[1] < len(row):  # new features: unknown of older rows
            more = np.full((len(self.rows), len(row) - self.rows.shape[1]), np.nan)
            self.rows = np.concatenate([self.rows, more], 1)
        if len(self.rows) < self.capacity:
            self.rows = np.concatenate([self.rows, row[None]])
            self.targets = np.concatenate([self.targets, np.asarray(target)[None]])
        else:
            place = self.added % self.capacity
            self.rows[place], self.targets[place] = row, target
        self.added += 1

    def draw(self, count: int) -> tuple[NDArray[np.float64], NDArray[Any]]:
        """Some samples, drawn with replacement."""
        u = keyed.uniform(count, self.seed, keyed.Purpose.REPLAY, self.drawn)
        self.drawn += 1
        chosen = (u * len(self)).astype(np.int64)
        return self.rows[chosen], self.targets[chosen]
