"""When the task of a stream changes, and into which one."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol


class Span(NamedTuple):
    """Samples `start` to `stop` of a stream, between two changes.

    Each span has an order of samples of its own. Over its last `drift` samples the probability that
    a sample is of the task `following` and not of `task` grows linearly from 0 to 1, both excluded.
    """

    number: int
    start: int
    stop: int | None
    task: int
    following: int
    drift: int = 0


class Schedule(Protocol):
    """Says which span a sample is in. Ten lines make one of your own.

    Example:
        >>> class Doubling:
        ...     '''A stream that changes ever more rarely: at samples 1, 2, 4, 8, …'''
        ...
        ...     length = None
        ...
        ...     def span(self, step: int) -> Span:
        ...         k = (step + 1).bit_length() - 1
        ...         return Span(k, 2**k - 1, 2 ** (k + 1) - 1, task=k, following=k + 1)
        >>> Doubling().span(5)
        Span(number=2, start=3, stop=7, task=2, following=3, drift=0)
    """

    @property
    def length(self) -> int | None:
        """Samples from one change to the next; None if there is no such number."""
        ...

    def span(self, step: int) -> Span:
        """The span of sample `step`. Must be quick, and a function of `step` alone."""
        ...


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True)
class Every:
    """A new task every `length` samples; with None, one task for ever.

    Example:
        >>> Every(5000).span(12345).task
        2
    """

    length: int | None

    def __post_init__(self) -> None:
        if self.length is not None:
            _positive("length", self.length)

    def span(self, step: int) -> Span:
        if self.length is None:
            return Span(0, 0, None, 0, 0)
        number = step // self.length
        return Span(number, number * self.length, (number + 1) * self.length, number, number + 1)


@dataclass(frozen=True)
class Recurring:
    """Tasks ``0 … tasks-1`` in turn, again and again, `length` samples each time.

    The permutation of a task returns; the order of samples is fresh at each visit.

    Example:
        >>> schedule = Recurring(length=100, tasks=3)
        >>> [schedule.span(step).task for step in range(0, 700, 100)]
        [0, 1, 2, 0, 1, 2, 0]
    """

    length: int
    tasks: int

    def __post_init__(self) -> None:
        _positive("length", self.length)
        _positive("tasks", self.tasks)

    def span(self, step: int) -> Span:
        number, start, stop, *_ = Every(self.length).span(step)
        return Span(number, start, stop, number % self.tasks, (number + 1) % self.tasks)


@dataclass(frozen=True)
class Drift:
    """A new task every `length` samples that mixes in over the last `over` samples before.

    Sample ``i = 1 … over`` of those is of the next task with probability ``i / (over + 1)``.

    Example:
        >>> Drift(length=100, over=20).span(0).drift
        20
    """

    length: int
    over: int

    def __post_init__(self) -> None:
        _positive("length", self.length)
        if not 0 <= self.over <= self.length:
            raise ValueError(f"over must be from 0 to length = {self.length}, got {self.over}")

    def span(self, step: int) -> Span:
        return Every(self.length).span(step)._replace(drift=self.over)


@dataclass(frozen=True)
class Boundaries:
    """A new task at each of the samples `at`; the last one stays.

    Example:
        >>> [Boundaries((500, 1200)).span(step).task for step in (0, 499, 500, 1199, 1200, 9999)]
        [0, 0, 1, 1, 2, 2]
    """

    at: tuple[int, ...]
    length = None

    def __post_init__(self) -> None:
        if not self.at or self.at[0] < 1 or any(a >= b for a, b in pairwise(self.at)):
            raise ValueError(f"boundaries are sample numbers from 1 on, increasing; got {self.at}")

    def span(self, step: int) -> Span:
        number = bisect_right(self.at, step)
        start = self.at[number - 1] if number else 0
        stop = self.at[number] if number < len(self.at) else None
        return Span(number, start, stop, number, number + 1)
