"""Problems of your own: from arrays, datasets, loaders, a file, or a generator."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from upgd.streams.datasets import Dataset
from upgd.streams.iterables import IterableStream
from upgd.streams.problems import Problem, source_of
from upgd.streams.readers import DataError, read_arrays
from upgd.streams.schedules import Boundaries, Drift, Every, Schedule, Span
from upgd.streams.stream import Changing, Loss, Permute, Sample, Stream, TaskStream
from upgd.text import error_line

TASKS, POINTS, STEPS = 20, 50, 10_000
HIDDEN = (300, 150)
_Activation = Literal["relu", "leaky_relu", "tanh", "linear"]
_Shape = tuple[int, ...]


def make_problem(
    name: str,
    data: Any,
    *,
    loss: Loss | None = None,
    outputs: int | None = None,
    shape: Sequence[int] | None = None,
    permute: Permute | None = None,
    task_length: int | None = None,
    drift: Drift | int | None = None,
    schedule: Schedule | None = None,
    boundaries: Sequence[int] | None = None,
    shuffle: bool | None = None,
    test: Any = None,
    hidden: Sequence[int] = HIDDEN,
    network: str | None = None,
    activation: _Activation = "relu",
    steps: int | None = None,
    window: int | None = None,
) -> Problem:
    """A problem on data of your own.

    Args:
        name: Of the problem.
        data: One of

            - a pair of arrays or tensors ``(x, y)`` with a row per sample,
            - a path to an ``.npz`` file with arrays ``x`` and ``y``,
            - a ``torch.utils.data.Dataset`` of pairs ``(x, y)``, which is read into memory once,
            - a ``DataLoader`` that does not shuffle; its batches are taken apart,
            - a function ``f(seed)`` or ``f()`` that returns a fresh iterator of pairs ``(x, y)``,
              which is read during the run. It must give the same samples each time.

            Inputs stay as they are, except images ``uint8 [n, height, width, …]``, which are
            scaled to [-1, 1].
        loss: ``"cross_entropy"``, the default if y holds whole numbers, or ``"squared_error"``.
        outputs: Classes, or values of a target; by default as many as y has. A generator's
            classes must be given.
        shape: Of one input; by default that of x.
        permute: What a task permutes: ``"inputs"``, ``"labels"``, ``"both"`` or nothing.
        task_length: Samples per task.
        drift: Tasks that mix over their last so many samples; or a :class:`Drift`.
        schedule: Any other schedule, such as :class:`Recurring`.
        boundaries: The samples at which a new task begins.
        shuffle: Whether samples of arrays come in a random order, another one in each task, or in
            their own order, repeated. The default is True, but False for a loader.
        test: A pair of arrays like `data`, for held-out accuracy.
        hidden: Units of the hidden layers.
        network: The name of a registered network, instead of hidden layers.
        activation: Of the hidden layers.
        steps: Samples of a run; by default one pass over the data or 20 tasks, 10 000 of a
            generator.
        window: Samples per point of a figure; by default a task, or a fiftieth of a run.

    Raises:
        ValueError: The data are not of this kind, or arguments exclude each other.

    Example:
        >>> import numpy as np
        >>> x, y = np.random.default_rng(0).normal(size=(90, 4)), np.arange(90) % 3
        >>> problem = make_problem("mine", (x, y), permute="labels", task_length=30)
        >>> problem.network, problem.loss, problem.make(seed=0).at(31).x.shape
        ((4, 300, 150, 3), 'cross_entropy', (1, 4))
    """
    with _named(name):
        if loss is not None and loss not in get_args(Loss):
            raise ValueError(f"loss must be one of {', '.join(get_args(Loss))}, got {loss!r}")
        when = _schedule(task_length, drift, schedule, boundaries)
        given = None if shape is None else tuple(shape)
        read = _as_read(data)
        if isinstance(read, _Read):
            if test is not None:
                raise ValueError("a generator has no test data; leave test out")
            if shuffle:
                raise ValueError("samples of a generator come in its order; leave shuffle out")
            found = _generator(read, given, outputs, loss, when)
        else:
            x, y, ordered = read
            mixed = not ordered if shuffle is None else bool(shuffle)
            found = _arrays(x, y, given, outputs, loss, when, mixed, test)
        if permute in ("labels", "both") and found.loss == "squared_error":
            raise ValueError("targets have no labels to permute; permute inputs or nothing")
        many = steps or (TASKS * when.length if when.length else found.size or STEPS)
        problem = Problem(
            name,
            None,
            _network(found.shape, hidden, found.outputs, network),
            when.length,
            window or when.length or max(1, many // POINTS),
            activation,
            many,
            loss=found.loss,
            permute=permute,
            shape=found.shape,
            outputs=found.outputs,
            stream=found.make,
        )
        problem.make(0)  # raises now if something does not fit
    return replace(problem, source=source_of(problem))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the problem's name before messages about its data and arguments."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# ----------------------------------------------------------------------------- streams
class _Source(NamedTuple):
    """What makes streams of some data, and the facts that a problem needs."""

    make: Callable[[Problem, int], Stream]
    shape: _Shape
    outputs: int
    loss: Loss
    size: int


def _of_length(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with the problem's task length, which a run may have changed."""
    if problem.task_length == schedule.length:
        return schedule
    if not is_dataclass(schedule):
        raise ValueError(f"{problem.name}: its schedule has a length of its own")
    return replace(schedule, length=problem.task_length)


class ArrayStream(TaskStream):
    """Samples of arrays, shuffled or in their order, with labels or targets."""

    def __init__(
        self,
        problem: Problem,
        seed: int,
        *,
        data: Dataset,
        targets: NDArray[np.float32] | None,
        schedule: Schedule,
        shuffle: bool,
        test: Dataset | None,
    ) -> None:
        super().__init__(
            data,
            seed,
            permute=problem.permute,
            schedule=_of_length(schedule, problem),
            test=test,
            flatten=not isinstance(problem.network, str),
        )
        assert problem.outputs is not None
        self.loss, self.outputs = problem.loss, problem.outputs
        self._targets, self._shuffle = targets, shuffle

    def samples(self, start: int, count: int) -> Sample:
        if self._targets is None:
            return super().samples(start, count)
        block = self.block(start, count)
        x = self._permuted_inputs(self.dataset.scaled(block.index), block.task)
        return Sample(x, self._targets[block.index])

    def _indices(self, span: Span, start: int, stop: int) -> NDArray[np.int64]:
        if self._shuffle:
            return super()._indices(span, start, stop)
        return np.arange(start, stop) % len(self.dataset)


@dataclass(frozen=True, eq=False)
class _Read:
    """An iterable that calls a user's function for a fresh iterator of pairs."""

    function: Callable[..., Any]
    seed: int = 0

    def __iter__(self) -> Iterator[Any]:
        try:
            parameters = inspect.signature(self.function).parameters.values()
            takes = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)
        except (TypeError, ValueError):
            takes = False
        return iter(self.function(self.seed) if takes else self.function())


class GeneratorStream(Changing):
    """Samples of a generator, in its order; resumes by skipping those before."""

    def __init__(
        self, problem: Problem, seed: int, *, read: _Read, shape: _Shape, schedule: Schedule
    ) -> None:
        assert problem.outputs is not None
        flatten, when = not isinstance(problem.network, str), _of_length(schedule, problem)
        super().__init__(seed, shape, problem.outputs, problem.permute, when, flatten)
        self.loss = problem.loss
        name = f"the generator of {problem.name}"
        fresh = replace(read, seed=seed)
        self._read = IterableStream(fresh, shape, problem.outputs, problem.loss, name)

    @property
    def needed(self) -> int | None:
        """How many samples the run takes."""
        return self._read.needed

    @needed.setter
    def needed(self, count: int) -> None:
        self._read.needed = count

    def samples(self, start: int, count: int) -> Sample:
        x, y = self._read.samples(start, count)
        for what, values in (("x", x), ("y", y)):
            if (row := _not_finite(values)) is not None:
                raise ValueError(f"sample {start + row} of {self._read.name}: {what} is not finite")
        tasks = self._all_tasks(start, count)
        labels = self._permuted_labels(y, tasks) if self.loss == "cross_entropy" else y
        return Sample(self._permuted_inputs(x, tasks), labels)


# ------------------------------------------------------------------------------ reading
def _as_read(data: Any) -> _Read | tuple[Any, Any, bool]:
    """Data as arrays and whether they keep their order, or as a generator."""
    import torch
    from torch.utils import data as loading

    if isinstance(data, str | os.PathLike):
        return (*_npz(Path(data)), False)
    if isinstance(data, loading.DataLoader):
        if isinstance(data.dataset, loading.IterableDataset):
            return _Read(functools.partial(_taken_apart, data))
        batches = data.batch_sampler
        inner = getattr(batches, "sampler", batches) if batches is not None else data.sampler
        if not isinstance(inner, loading.SequentialSampler):
            raise ValueError(
                f"this loader's {type(inner).__name__} draws an order of its own; give "
                "DataLoader(..., shuffle=False), the problem's shuffle=True does the rest"
            )
        return (*_collected(_taken_apart(data)), True)
    if isinstance(data, loading.IterableDataset):
        return _Read(functools.partial(iter, data))
    if isinstance(data, loading.Dataset):
        if not hasattr(data, "__len__"):
            raise ValueError("a dataset needs a length; give a function otherwise")
        return (*_collected(data[i] for i in range(len(data))), False)
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1], False
    if callable(data) and not isinstance(data, torch.nn.Module):
        return _Read(data)
    raise ValueError(
        f"data are a {type(data).__name__}; arrays (x, y), a Dataset, a DataLoader, a path to an "
        ".npz file, or a function that returns an iterator expected"
    )


def as_arrays(data: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """All samples of arrays, a dataset, a loader or an ``.npz`` file, a row of each per sample.

    A loader's own order does not count: its dataset is read once, from the first sample on. Images
    ``uint8 [n, height, width, …]`` are scaled to [-1, 1], other whole numbers stay as they are.

    Raises:
        ValueError: The data are of another kind, not numbers, or not finite.

    Example:
        >>> x, y = as_arrays(([[1.0], [2.0]], [0, 1]))
        >>> x.shape, y.dtype.kind
        ((2, 1), 'i')
    """
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        size = data.batch_size if data.batch_sampler is None else data.batch_size or 1
        data = DataLoader(data.dataset, batch_size=size, collate_fn=data.collate_fn)
    read = _as_read(data)
    if isinstance(read, _Read):
        raise ValueError("a generator has no length; collect its samples into arrays (x, y)")
    x, y = _array("x", read[0]), _array("y", read[1])
    _check_rows(x, y)
    if x.dtype == np.uint8 and x.ndim > 2:
        x = Dataset("own", x, np.zeros(len(x), np.int64), 1).scaled(slice(None))
    x = _finite("x", x) if x.dtype.kind == "f" else x
    return x, _finite("y", y) if y.dtype.kind == "f" else y


def _check_rows(x: NDArray[Any], y: NDArray[Any]) -> None:
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        shapes = f"{x.shape} and {y.shape}"
        raise ValueError(f"x and y have shapes {shapes}; a row of each per sample expected")
    if len(x) == 0:
        raise ValueError("there are no samples")


def _npz(path: Path) -> tuple[Any, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        found, names = read_arrays(path, ("x", "y"))
    except DataError as error:
        raise ValueError(f"{path} {error.wrong}") from error
    if len(found) < 2:
        raise ValueError(f"{path} has {', '.join(names) or 'nothing'}; x and y expected")
    return found["x"], found["y"]


def _taken_apart(loader: Any) -> Iterator[Any]:
    """The samples of a loader, one after the other."""
    for batch in loader:
        if loader.batch_size is None and loader.batch_sampler is None:
            yield batch
        else:
            yield from zip(*batch, strict=True)


def _collected(pairs: Iterable[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """All samples as two arrays."""
    xs: list[NDArray[Any]] = []
    ys: list[NDArray[Any]] = []
    for number, pair in enumerate(pairs):
        try:
            x, y = pair
        except (TypeError, ValueError):
            kind = type(pair).__name__
            raise ValueError(f"sample {number} is a {kind}, not a pair (x, y)") from None
        xs.append(_array(f"x of sample {number}", x))
        ys.append(_array(f"y of sample {number}", y))
        now, first = ((xs[i].shape, ys[i].shape) for i in (-1, 0))
        if now != first:
            raise ValueError(f"sample {number} has shapes {now}, the first one {first}")
    if not xs:
        raise ValueError("there are no samples")
    return np.stack(xs), np.stack(ys)


def _array(what: str, value: Any) -> NDArray[Any]:
    """Numbers as an array."""
    try:
        found = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (ValueError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"{what} is not an array of numbers: {line}") from None
    if found.dtype.kind not in "biuf":
        kinds = {"U": "strings", "S": "strings", "O": "objects", "c": "complex numbers"}
        kind = kinds.get(found.dtype.kind, str(found.dtype))
        raise ValueError(f"{what} holds {kind}, numbers expected")
    return found


def _not_finite(values: NDArray[Any]) -> int | None:
    """The first row that is not finite, if there is one."""
    wrong = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))
    return int(wrong[0]) if len(wrong) else None


def _finite(what: str, values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # too large numbers become infinite
        found = values.astype(np.float32)
    if (row := _not_finite(found)) is not None:
        raise ValueError(f"{what} is not finite in row {row}")
    return found


# ------------------------------------------------------------------------------ sources
def _arrays(
    x: Any,
    y: Any,
    shape: _Shape | None,
    outputs: int | None,
    loss: Loss | None,
    schedule: Schedule,
    shuffle: bool,
    test: Any,
) -> _Source:
    data, targets = _dataset(x, y, shape, outputs, loss)
    held_out = None
    if test is not None:
        if targets is not None:
            raise ValueError("held-out accuracy is of classes; leave test out")
        if not isinstance(test, tuple | list) or len(test) != 2:
            raise ValueError("test is a pair of arrays (x, y)")
        with _named("test"):
            held_out, others = _dataset(test[0], test[1], shape, data.classes, loss)
            if held_out.shape != data.shape or others is not None:
                raise ValueError("the data are of another kind than those to learn from")
    make: Any = functools.partial(
        ArrayStream, data=data, targets=targets, schedule=schedule, shuffle=shuffle, test=held_out
    )
    if targets is None:
        return _Source(make, data.shape, data.classes, "cross_entropy", len(data))
    return _Source(make, data.shape, int(targets.shape[1]), "squared_error", len(data))


def _dataset(
    x: Any, y: Any, shape: _Shape | None, outputs: int | None, loss: Loss | None
) -> tuple[Dataset, NDArray[np.float32] | None]:
    """Inputs and labels, or inputs without labels and targets."""
    inputs, values = _array("x", x), _array("y", y)
    _check_rows(inputs, values)
    wanted = shape or tuple(inputs.shape[1:]) or (1,)
    if math.prod(wanted) != math.prod(inputs.shape[1:]) or math.prod(wanted) == 0:
        raise ValueError(f"an input has shape {inputs.shape[1:]}, which is not {wanted}")
    if inputs.dtype != np.uint8 or inputs.ndim <= 2:  # not images
        inputs = _finite("x", inputs)
    inputs = inputs.reshape(len(inputs), *wanted)
    if (loss or _loss_of(values)) == "squared_error":
        targets = _finite("y", values.reshape(len(values), -1))
        if outputs not in (None, targets.shape[1]):
            raise ValueError(f"y has {targets.shape[1]} values, outputs={outputs}")
        return Dataset("own", inputs, np.zeros(len(inputs), np.int64), 1), targets
    labels = _labels(values, outputs)
    return Dataset("own", inputs, labels, outputs or int(labels.max()) + 1), None


def _loss_of(y: NDArray[Any]) -> Loss:
    """Whole numbers are classes, others are targets."""
    if y.dtype.kind == "f":
        return "squared_error"
    if (count := math.prod(y.shape[1:])) != 1:
        raise ValueError(
            f"y holds {count} whole numbers per sample; give one class, or loss='squared_error'"
        )
    return "cross_entropy"


def _labels(y: NDArray[Any], outputs: int | None) -> NDArray[np.int64]:
    if math.prod(y.shape[1:]) != 1:
        raise ValueError(f"y has shape {y.shape}; one class per sample expected")
    flat = y.reshape(-1)
    labels = np.where(np.isfinite(flat), flat, -1).astype(np.int64)
    wrong = (labels != flat) | (labels < 0) | (False if outputs is None else labels >= outputs)
    if wrong.any():
        most = "" if outputs is None else f" to {outputs - 1}"
        row = int(wrong.argmax())
        raise ValueError(f"y is {flat[row]} in row {row}; a class from 0{most} expected")
    return labels


def _generator(
    read: _Read,
    shape: _Shape | None,
    outputs: int | None,
    loss: Loss | None,
    schedule: Schedule,
) -> _Source:
    """Reads the first sample."""
    try:
        first = next(iter(read))
    except StopIteration:
        raise ValueError("there are no samples") from None
    except Exception as error:
        raise ValueError(f"its generator raised {error_line(error)}") from error
    x, y = _collected([first])
    which = loss or _loss_of(y)
    found = shape or tuple(x.shape[1:])
    if found != tuple(x.shape[1:]) or math.prod(found) == 0:
        raise ValueError(f"an input has shape {x.shape[1:]}, which is not {shape}")
    if which == "squared_error" and outputs is None:
        outputs = math.prod(y.shape[1:])
    if outputs is None:
        raise ValueError("a generator does not tell its classes; give outputs=")
    make: Any = functools.partial(GeneratorStream, read=read, shape=found, schedule=schedule)
    return _Source(make, found, outputs, which, 0)


# -------------------------------------------------------------------------- arguments
def _schedule(
    task_length: int | None,
    drift: Drift | int | None,
    schedule: Schedule | None,
    boundaries: Sequence[int] | None,
) -> Schedule:
    """The one schedule that the arguments describe."""
    if isinstance(drift, Drift):
        drift, schedule = None, drift if schedule is None else schedule
        if schedule is not None and not isinstance(schedule, Drift):
            raise ValueError("drift and schedule exclude each other")
    given = {"task_length": task_length, "schedule": schedule, "boundaries": boundaries}
    named = [key for key, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other; leave one out")
    if drift is not None:
        if task_length is None:
            raise ValueError(f"drift={drift} needs a task_length")
        return Drift(task_length, drift)
    if boundaries is not None:
        return Boundaries(tuple(int(each) for each in boundaries))
    return Every(task_length) if schedule is None else schedule


def _network(
    shape: _Shape, hidden: Sequence[int], outputs: int, network: str | None
) -> tuple[int, ...] | str:
    if network is None:
        return (math.prod(shape), *hidden, outputs)
    if tuple(hidden) != HIDDEN:
        raise ValueError("hidden and network exclude each other; leave one out")
    if network == "cnn" and (shape, outputs) != ((3, 32, 32), 10):
        raise ValueError(
            "the network cnn takes inputs (3, 32, 32) and has 10 outputs; these are "
            f"{shape} and {outputs}"
        )
    return network
