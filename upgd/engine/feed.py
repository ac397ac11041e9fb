"""Samples for a stack of learners, a chunk of steps at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.streams.schedules import Every, Recurring
from upgd.streams.stream import Sample, TaskStream


@dataclass(frozen=True, eq=False)
class Chunk:
    """Samples of `steps` steps of R learners, and of one more: the next chunk's first.

    Attributes:
        table: float32 [N, features], inputs: a whole dataset, the same array in every chunk, or
            what the streams made for this one.
        index: int32 [R, T + 1], rows of the table.
        labels: int32 [R, T + 1], for classification.
        targets: float32 [R, T + 1, outputs], for regression.
        permutations: int32 [2, R, features], of inputs.
        slots: int32 [T + 1], which of the two a step has.
    """

    steps: int
    table: NDArray[np.float32]
    index: NDArray[np.int32]
    labels: NDArray[np.int32] | None = None
    targets: NDArray[np.float32] | None = None
    permutations: NDArray[np.int32] | None = None
    slots: NDArray[np.int32] | None = None


class HeldOut(NamedTuple):
    """Test samples of S streams, x [S, count, ...] and y [S, count], and each run's stream, [R]."""

    x: NDArray[np.float32]
    y: NDArray[Any]
    of: NDArray[np.int64]


def has_table(stream: Any) -> bool:
    """Whether a stream's inputs are rows of a dataset, which learners look up themselves."""
    return (
        isinstance(stream, TaskStream)
        and stream.loss == "cross_entropy"
        # Samples of all seeds change their permutation at once, and not in the middle of a chunk.
        and (not stream.permutes_inputs or isinstance(stream.schedule, Every | Recurring))
    )


class Feed:
    """Chunks from the streams of R learners on one problem.

    Streams of one seed are the same, so their samples are made once. No stream is asked for more
    than `total` samples.
    """

    def __init__(self, streams: Sequence[Any], total: int | None = None) -> None:
        self._total = total
        own = {getattr(stream, "seed", id(stream)): stream for stream in streams}
        place = {seed: i for i, seed in enumerate(own)}
        self._own = list(own.values())
        self._of = np.array([place[getattr(stream, "seed", id(stream))] for stream in streams])
        first = self._own[0]
        self._table: NDArray[np.float32] | None = None
        if has_table(first):
            everything = first.dataset.scaled(slice(None))
            self._table = everything.reshape(len(first.dataset), -1)

    @property
    def made(self) -> int:
        """How many streams make inputs for each chunk; none where they are a dataset's."""
        return 0 if self._table is not None else len(self._own)

    def chunk(self, start: int, steps: int) -> Chunk:
        """Samples ``start … start + steps``."""
        if self._table is None:
            samples = [self._samples(s, start, steps + 1) for s in self._own]
            table = np.concatenate([s.x.reshape(steps + 1, -1) for s in samples])
            index = (self._of[:, None] * (steps + 1) + np.arange(steps + 1)).astype(np.int32)
            y = self._each([s.y for s in samples])
            if self._own[0].loss == "cross_entropy":
                return Chunk(steps, table, index, labels=y.astype(np.int32))
            return Chunk(steps, table, index, targets=y.reshape(*index.shape, -1))
        blocks = [s.block(start, steps + 1) for s in self._own]
        index = self._each([b.index for b in blocks]).astype(np.int32)
        labels = self._each([b.label for b in blocks]).astype(np.int32)
        if not self._own[0].permutes_inputs:
            return Chunk(steps, self._table, index, labels=labels)
        tasks = blocks[0].task
        first = int(tasks[0])
        if not np.isin(tasks, (first, tasks[-1])).all():
            raise ValueError("a chunk of permuted inputs may reach into the next task, no further")
        slots = (tasks != first).astype(np.int32)
        both = [first, int(tasks[-1])]
        permutations = np.stack(
            [self._each([s.input_permutation(task) for s in self._own]) for task in both]
        ).astype(np.int32)
        return Chunk(
            steps, self._table, index, labels=labels, permutations=permutations, slots=slots
        )

    def _samples(self, stream: Any, start: int, count: int) -> Sample:
        """Of one stream; where the run ends with the last but one, that one comes twice."""
        here = count if self._total is None else min(count, self._total - start)
        if hasattr(stream, "samples"):
            found = stream.samples(start, here)
        else:  # the least that a stream has
            each = [stream.at(step) for step in range(start, start + here)]
            found = Sample(*(np.concatenate(parts) for parts in zip(*each, strict=True)))
        if here == count:
            return Sample(*found)
        return Sample(*(np.concatenate([part, part[-1:]]) for part in found))

    def held_out(self, task: int, count: int) -> HeldOut:
        """Samples of the test split, for measuring."""
        samples = [s.held_out(task, count) for s in self._own]
        return HeldOut(np.stack([s.x for s in samples]), np.stack([s.y for s in samples]), self._of)

    def _each(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Every learner's, from those of different streams."""
        return np.asarray(np.stack(arrays)[self._of])
