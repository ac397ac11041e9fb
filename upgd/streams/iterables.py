"""A stream from any Python iterable of ``(x, y)``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from upgd.streams.stream import Loss, Sample
from upgd.text import error_line


class StreamError(RuntimeError):
    """An iterable of the user's raised something."""


class StreamEndedError(StreamError):
    """An iterable had fewer samples than were asked for."""


class IterableStream:
    """What :func:`from_iterable` makes: a stream that reads forward.

    It keeps only the samples of the last request. `needed` is the number of samples that a run
    takes, for the message if there are fewer.
    """

    def __init__(
        self,
        iterable: Iterable[tuple[ArrayLike, ArrayLike]],
        shape: tuple[int, ...],
        outputs: int,
        loss: Loss,
        name: str = "the iterable",
    ) -> None:
        if loss not in get_args(Loss):
            raise ValueError(f"loss must be one of {get_args(Loss)}, got {loss!r}")
        self.shape, self.outputs, self.loss, self.name = tuple(shape), outputs, loss, name
        self.task_length: int | None = None
        self.needed: int | None = None
        self._iterable = iterable
        self._iterator: Iterator[tuple[ArrayLike, ArrayLike]] | None = None
        self._next = 0
        self._kept: list[tuple[NDArray[np.float32], NDArray[Any]]] = []  # up to the next
        self._lock = threading.Lock()  # an engine reads ahead in another thread

    def at(self, step: int, batch: int = 1) -> Sample:
        return self.samples(step * batch, batch)

    def samples(self, start: int, count: int) -> Sample:
        """Samples ``start … start+count-1``; skips those before, one by one."""
        with self._lock:
            pairs = self._read(start, count)
        return Sample(np.stack([x for x, _ in pairs]), np.stack([y for _, y in pairs]))

    def _read(self, start: int, count: int) -> list[tuple[NDArray[np.float32], NDArray[Any]]]:
        first = self._next - len(self._kept)
        if self._iterator is None or start < first:
            self._kept = []
            self._rewind(start)
            first = 0
        self._kept = self._kept[start - first :]
        while self._next < start:
            self._draw()
        while self._next < start + count:
            self._kept.append(self._check(self._draw()))
        return self._kept[:count]

    def task(self, step: int) -> int:
        return 0

    def _rewind(self, first: int) -> None:
        iterator = iter(self._iterable)
        if self._iterator is not None and iterator is self._iterator:
            raise ValueError(
                f"sample {first} was asked for and {self.name} is at {self._next}; "
                "give a list or an object whose __iter__ starts anew"
            )
        self._iterator, self._next = iterator, 0

    def _draw(self) -> Any:
        assert self._iterator is not None
        try:
            pair = next(self._iterator)
        except StopIteration:
            if self.needed is None:
                message = f"sample {self._next} was asked for, {self.name} has {self._next}"
            else:
                message = f"{self.name} ended after {self._next} samples; {self.needed} are needed"
            raise StreamEndedError(message) from None
        except Exception as error:
            raise StreamError(f"{self.name}, sample {self._next}: {error_line(error)}") from error
        self._next += 1
        return pair

    def _check(self, pair: Any) -> tuple[NDArray[np.float32], NDArray[Any]]:
        place = f"sample {self._next - 1} of {self.name}"
        try:
            x, y = pair
        except (TypeError, ValueError):
            kind = type(pair).__name__
            raise ValueError(f"{place} is a {kind}, a pair (x, y) expected") from None
        inputs = _numbers(place, "x", x)
        if inputs.shape != self.shape:
            raise ValueError(f"{place}: x has shape {inputs.shape}, {self.shape} expected")
        if self.loss == "squared_error":
            target = _numbers(place, "y", y).reshape(-1)
            if target.shape != (self.outputs,):
                raise ValueError(f"{place}: y has {target.size} values, {self.outputs} expected")
            return inputs, target
        label = np.asarray(y)
        if label.shape != () or label.dtype.kind not in "iu" or not 0 <= label < self.outputs:
            raise ValueError(f"{place}: y is {y!r}, a class from 0 to {self.outputs - 1} expected")
        return inputs, label.astype(np.int64)


def _numbers(place: str, what: str, value: Any) -> NDArray[np.float32]:
    try:
        with np.errstate(over="ignore"):  # what does not fit is infinite
            return np.asarray(value, dtype=np.float32)
    except (ValueError, TypeError, OverflowError):
        kind = type(value).__name__
        raise ValueError(f"{place}: {what} is a {kind}, an array of numbers expected") from None


def from_iterable(
    iterable: Iterable[tuple[ArrayLike, ArrayLike]],
    shape: tuple[int, ...],
    outputs: int,
    loss: Loss = "cross_entropy",
) -> IterableStream:
    """A stream of your own data: any iterable of ``(x, y)``.

    It has no random access: resuming at step k draws and drops the k samples before, and going
    back starts the iterable anew (a generator cannot, a list can). The iterable must give the
    same samples each time for a run to be repeatable.

    Args:
        iterable: pairs of an input of `shape` and a class (int) or `outputs` target values.
        shape: of one input.
        outputs: classes, or values of a target.
        loss: ``"cross_entropy"`` or ``"squared_error"``.

    Example:
        >>> stream = from_iterable([([0.0, 1.0], 1), ([1.0, 0.0], 0)], shape=(2,), outputs=2)
        >>> stream.at(1).y
        array([0])
    """
    return IterableStream(iterable, shape, outputs, loss)
