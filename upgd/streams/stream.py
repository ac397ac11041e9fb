"""Streams: what a learner sees, one sample at a time.

A stream is a pure function of its seed and of the step. It has no position, so resuming at any
step takes no time, and two learners may read it side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from upgd.streams import keyed
from upgd.streams.datasets import Dataset
from upgd.streams.keyed import Purpose
from upgd.streams.schedules import Every, Schedule, Span

Loss = Literal["cross_entropy", "squared_error"]
Permute = Literal["inputs", "labels", "both"]
ToyKind = Literal["changing-inputs", "changing-sign"]
_Value = TypeVar("_Value")
_RECENT = 4  # permutations and orders kept: a batch may span a change, a drift mixes two tasks


class Sample(NamedTuple):
    """Inputs float32 [batch, *shape]; labels int64 [batch] or targets float32 [batch, outputs]."""

    x: NDArray[np.float32]
    y: NDArray[Any]


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive samples as three int64 arrays: index into the data, task, permuted label."""

    index: NDArray[np.int64]
    task: NDArray[np.int64]
    label: NDArray[np.int64]


class Stream(Protocol):
    """What an engine needs of a stream; ten lines make one of your own.

    Example:
        >>> class Sines:
        ...     '''Predict the next value of a sine wave from this one.'''
        ...
        ...     shape, outputs, loss, task_length = (1,), 1, "squared_error", None
        ...
        ...     def at(self, step: int, batch: int = 1) -> Sample:
        ...         t = np.arange(step * batch, (step + 1) * batch, dtype=np.float32)[:, None]
        ...         return Sample(np.sin(t), np.sin(t + 1))
        ...
        ...     def task(self, step: int) -> int:
        ...         return 0
        >>> Sines().at(0).x
        array([[0.]], dtype=float32)
    """

    shape: tuple[int, ...]
    outputs: int
    loss: Loss
    task_length: int | None

    def at(self, step: int, batch: int = 1) -> Sample:
        """Samples ``step·batch … (step+1)·batch - 1``."""
        ...

    def task(self, step: int) -> int:
        """The task of sample `step`; that of a batch's first sample is ``task(step * batch)``."""
        ...


class Changing:
    """What streams share whose inputs or labels are permuted anew at each change of task.

    Arguments are those of :class:`TaskStream`.
    """

    def __init__(
        self,
        seed: int,
        shape: tuple[int, ...],
        outputs: int,
        permute: Permute | None,
        schedule: Schedule,
        flatten: bool,
    ) -> None:
        if permute is not None and permute not in get_args(Permute):
            known = ", ".join(map(repr, get_args(Permute)))
            raise ValueError(f"permute must be {known} or None, got {permute!r}")
        self.seed, self.permute, self.schedule, self.outputs = seed, permute, schedule, outputs
        self.task_length = schedule.length
        self._features = int(np.prod(shape))
        self.shape = (self._features,) if flatten else shape
        self._recent: dict[str, dict[Any, Any]] = {}

    @property
    def permutes_inputs(self) -> bool:
        """Whether a task permutes inputs."""
        return self.permute in ("inputs", "both")

    @property
    def permutes_labels(self) -> bool:
        """Whether a task permutes labels."""
        return self.permute in ("labels", "both")

    def at(self, step: int, batch: int = 1) -> Sample:
        return self.samples(step * batch, batch)

    def samples(self, start: int, count: int) -> Sample:
        """Samples ``start … start+count-1``."""
        raise NotImplementedError

    def task(self, step: int) -> int:
        """The task of sample `step`: where tasks drift, the one that this sample is of."""
        span = self.schedule.span(step)
        return int(self._tasks(span, step, step + 1)[0]) if span.drift else span.task

    def input_permutation(self, task: int) -> NDArray[np.int64]:
        """`p` of a task: value ``i`` of a permuted input is value ``p[i]`` of the original."""
        if not self.permutes_inputs:
            return np.arange(self._features)
        return self._permutation(self._features, Purpose.INPUT_PERMUTATION, task)

    def label_permutation(self, task: int) -> NDArray[np.int64]:
        """`p` of a task: class ``c`` is called ``p[c]``."""
        if not self.permutes_labels:
            return np.arange(self.outputs)
        return self._permutation(self.outputs, Purpose.LABEL_PERMUTATION, task)

    def _permutation(self, size: int, purpose: Purpose, task: int) -> NDArray[np.int64]:
        make = partial(keyed.permutation, size, self.seed, purpose, task)
        return self._recall(purpose.name, task, make)

    def _tasks(self, span: Span, start: int, stop: int) -> NDArray[np.int64]:
        tasks = np.full(stop - start, span.task, dtype=np.int64)
        if span.drift and span.stop is not None:
            begins = max(start, span.stop - span.drift)
            if begins < stop:
                i = np.arange(begins, stop) - (span.stop - span.drift) + 1
                u = keyed.uniform(stop - begins, self.seed, Purpose.DRIFT, start=begins)
                tasks[begins - start :][u * (span.drift + 1) < i] = span.following
        return tasks

    def _permuted_labels(
        self, labels: NDArray[np.int64], task: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Labels under the permutation of each one's task; changes them in place."""
        if self.permutes_labels:
            for one, here in _groups(task):
                labels[here] = self.label_permutation(one)[labels[here]]
        return labels

    def _permuted_inputs(
        self, inputs: NDArray[np.float32], task: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Inputs in the stream's shape, under the permutation of each one's task."""
        x = inputs.reshape(len(inputs), self._features)
        if self.permutes_inputs:
            for one, here in _groups(task):
                x[here] = x[here][:, self.input_permutation(one)]
        return x.reshape(len(x), *self.shape)

    def _spans(self, start: int, count: int) -> Iterator[tuple[Span, int, int]]:
        """The spans of some consecutive samples, each with the samples' start and stop."""
        stop = start + count
        while start < stop:
            span = self.schedule.span(start)
            end = stop if span.stop is None else min(stop, span.stop)
            yield span, start, end
            start = end

    def _all_tasks(self, start: int, count: int) -> NDArray[np.int64]:
        """The task of each of some consecutive samples."""
        return np.concatenate([self._tasks(*each) for each in self._spans(start, count)])

    def _recall(self, kind: str, key: Any, make: Callable[[], _Value]) -> _Value:
        store = self._recent.setdefault(kind, {})
        if key not in store:
            if len(store) >= _RECENT:
                del store[next(iter(store))]
            store[key] = make()
        found: _Value = store[key]
        return found


class TaskStream(Changing):
    """Samples of a dataset whose inputs or labels are permuted anew at each change of task.

    Task 0 is permuted too. Each span between changes shuffles the data afresh; no sample repeats
    within it until the data end, then another shuffle follows. Without permutation and task
    length the stream is stationary, shuffled at each pass.

    Args:
        dataset: what to draw from.
        seed: decides everything random.
        task_length: samples per task; None for a single task.
        permute: ``"inputs"`` (all values of an input, over its whole shape), ``"labels"``,
            ``"both"`` (each by a permutation of its own), None.
        schedule: changes other than a new task every `task_length` samples.
        test: data for :meth:`held_out`, or a function that loads them when they are asked for.
        flatten: give inputs as vectors, for networks of linear layers.

    Example:
        >>> from upgd.streams import TaskStream, load
        >>> stream = TaskStream(load("digits"), seed=0, task_length=500, permute="labels")
        >>> x, y = stream.at(1234)
        >>> x.shape, y.shape, stream.task(1234)
        ((1, 8, 8), (1,), 2)
    """

    loss: Loss = "cross_entropy"

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        task_length: int | None = None,
        permute: Permute | None = None,
        *,
        schedule: Schedule | None = None,
        test: Dataset | Callable[[], Dataset] | None = None,
        flatten: bool = False,
    ) -> None:
        if schedule is not None and task_length not in (None, schedule.length):
            wrong = f"task_length {task_length} is not the schedule's {schedule.length}"
            raise ValueError(f"{wrong}; leave it out")
        when = Every(task_length) if schedule is None else schedule
        super().__init__(seed, dataset.shape, dataset.classes, permute, when, flatten)
        self.dataset = dataset
        self._test = test

    def samples(self, start: int, count: int) -> Sample:
        block = self.block(start, count)
        x = self._permuted_inputs(self.dataset.scaled(block.index), block.task)
        return Sample(x, block.label)

    def block(self, start: int, count: int) -> Block:
        """Samples ``start … start+count-1`` as indices, for engines that gather on a device."""
        if start < 0 or count < 1:
            raise ValueError(f"a block needs start >= 0 and count >= 1, got {start} and {count}")
        task = self._all_tasks(start, count)
        index = np.concatenate([self._indices(*each) for each in self._spans(start, count)])
        return Block(index, task, self._permuted_labels(self.dataset.labels[index], task))

    def order(self, span: int, again: int = 0) -> NDArray[np.int64]:
        """The order of samples in span number `span` (without recurrence: in that task).

        `again` counts how often the data have ended within the span.
        """
        return keyed.permutation(len(self.dataset), self.seed, Purpose.ORDER, span, again)

    def held_out(self, task: int, count: int) -> Sample:
        """`count` samples of the test split under a task's permutation, other ones for each task.

        Where tasks recur, `task` counts the visits: each has samples of its own.
        """
        test = self._test() if callable(self._test) else self._test
        if test is None:
            raise ValueError("this stream has no test data; give TaskStream(..., test=...)")
        self._test = test
        if not 1 <= count <= len(test):
            raise ValueError(f"count must be from 1 to {len(test)} test samples, got {count}")
        index = keyed.permutation(len(test), self.seed, Purpose.HELD_OUT, task, first=count)
        length = self.task_length
        tasks = np.full(count, task if length is None else self.schedule.span(task * length).task)
        return Sample(
            self._permuted_inputs(test.scaled(index), tasks),
            self._permuted_labels(test.labels[index], tasks),
        )

    def _indices(self, span: Span, start: int, stop: int) -> NDArray[np.int64]:
        n = len(self.dataset)
        pieces, position, end = [], start - span.start, stop - span.start
        while position < end:
            again, offset = divmod(position, n)
            piece = self._order(span, again)[offset : offset + end - position]
            pieces.append(piece)
            position += len(piece)
        return pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces)

    def _order(self, span: Span, again: int) -> NDArray[np.int64]:
        """As much of the span's order as it can use."""
        n = len(self.dataset)
        used = n if span.stop is None else min(n, span.stop - span.start)
        return self._recall(
            "order",
            (span.number, again),
            lambda: keyed.permutation(n, self.seed, Purpose.ORDER, span.number, again, first=used),
        )


def _groups(task: NDArray[np.int64]) -> Iterator[tuple[int, slice | NDArray[np.bool_]]]:
    """Each task that occurs, and where; at best it is one task, everywhere."""
    if (task == task[0]).all():
        yield int(task[0]), slice(None)
        return
    for one in np.unique(task):
        yield int(one), task == one


class ToyStream:
    """The paper's toy regression: the mean of two of 16 normal inputs, or its negative.

    With ``"changing-inputs"`` the pair is (0, 1) in task 0, then (2, 3), … (14, 15), (0, 1), …;
    with ``"changing-sign"`` it stays (0, 1) and odd tasks negate the target.

    Example:
        >>> stream = ToyStream("changing-inputs", seed=0)
        >>> x, y = stream.at(200)
        >>> bool(y[0, 0] == (x[0, 2] + x[0, 3]) / 2)
        True
    """

    shape: tuple[int, ...] = (16,)
    outputs = 1
    loss: Loss = "squared_error"

    def __init__(self, kind: ToyKind, seed: int, task_length: int = 200) -> None:
        if kind not in get_args(ToyKind):
            raise ValueError(f"kind must be one of {get_args(ToyKind)}, got {kind!r}")
        self.kind, self.seed = kind, seed
        self._length = Every(task_length).length or 0  # which checks it
        self.task_length: int | None = task_length

    def at(self, step: int, batch: int = 1) -> Sample:
        return self.samples(step * batch, batch)

    def samples(self, start: int, count: int) -> Sample:
        width = self.shape[0]
        z = keyed.normal(count * width, self.seed, Purpose.TOY_INPUTS, start=start * width)
        x = z.astype(np.float32).reshape(count, width)
        task = (start + np.arange(count)) // self._length
        moving = self.kind == "changing-inputs"
        left = 2 * task % width if moving else np.zeros_like(task)
        sign = np.float32(1) if moving else np.where(task % 2 == 0, 1, -1).astype(np.float32)
        rows = np.arange(count)
        y = sign * (x[rows, left] + x[rows, left + 1]) / np.float32(2)
        return Sample(x, y[:, None])

    def task(self, step: int) -> int:
        return step // self._length
