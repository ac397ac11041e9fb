"""Problems of your own: from arrays, datasets, loaders, a file, or a generator.

:func:`make_problem` takes the data and says how they change; :func:`upgd.streams.problems.register`
puts the problem beside the package's.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from upgd.streams.datasets import Dataset
from upgd.streams.iterables import IterableStream
from upgd.streams.problems import Problem, source_of
from upgd.streams.schedules import Boundaries, Drift, Every, Schedule, Span
from upgd.streams.stream import Changing, Loss, Permute, Sample, Stream, TaskStream

TASKS, POINTS, STEPS = 20, 50, 10_000
HIDDEN = (300, 150)
_Activation = Literal["relu", "leaky_relu", "tanh", "linear"]


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
            - a ``DataLoader``, whose batches are taken apart; it must not shuffle, since its
              order would be another one for each pass,
            - a function ``f(seed)`` or ``f()`` that returns a fresh iterator of pairs ``(x, y)``,
              which is read as the learner goes on. It must give the same samples each time.

            Inputs are numbers as they are, but images ``uint8 [n, height, width, …]``, which are
            scaled to [-1, 1].
        loss: ``"cross_entropy"`` or ``"squared_error"``; by default it follows from y: whole
            numbers are classes, others are targets.
        outputs: Classes, or values of a target; by default as many as y has. A generator's
            classes must be given.
        shape: Of one input; by default that of x.
        permute: What a task permutes: ``"inputs"``, ``"labels"`` or nothing.
        task_length: Samples per task.
        drift: Tasks that mix over their last so many samples; or a :class:`Drift`.
        schedule: Any other schedule, such as :class:`Recurring`.
        boundaries: The samples at which a new task begins.
        shuffle: Whether samples of arrays come in a random order, another one in each task; or
            as they are, from the first again after the last. By default they are shuffled, but
            those of a loader.
        test: A pair of arrays like `data`, for held-out accuracy.
        hidden: Units of the hidden layers, and
        activation: theirs; or
        network: the name of a registered network.
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
    if loss is not None and loss not in get_args(Loss):
        raise ValueError(f"{name}: loss must be one of {', '.join(get_args(Loss))}, got {loss!r}")
    when = _schedule(name, task_length, drift, schedule, boundaries)
    given = tuple(shape) if shape is not None else None
    read = _as_read(name, data)
    source: _Arrays | _Reader
    if isinstance(read, _Read):
        if test is not None:
            raise ValueError(f"{name}: a generator has no test data; leave test out")
        if shuffle:
            raise ValueError(f"{name}: samples of a generator come as they are; leave shuffle out")
        source = _probe(name, read, given, outputs, loss, when)
    else:
        x, y, ordered = read
        wanted = not ordered if shuffle is None else bool(shuffle)
        source = _arrays(name, x, y, given, outputs, loss, when, wanted, test)
    if permute == "labels" and source.loss == "squared_error":
        raise ValueError(f"{name}: targets have no labels to permute; permute inputs or nothing")
    many = steps or (TASKS * when.length if when.length else source.size or STEPS)
    problem = Problem(
        name,
        None,
        _network(name, source.shape, hidden, source.outputs, network),
        when.length,
        window or when.length or max(1, many // POINTS),
        activation,
        many,
        loss=source.loss,
        permute=permute,
        shape=source.shape,
        outputs=source.outputs,
        stream=source,
    )
    problem.make(0)  # what does not fit is known at once
    return replace(problem, source=source_of(problem))


# ----------------------------------------------------------------------------- sources
@dataclass(frozen=True, eq=False)
class _Arrays:
    """Makes streams from data in memory."""

    data: Dataset
    targets: NDArray[np.float32] | None
    schedule: Schedule
    shuffle: bool
    test: Dataset | None

    @property
    def loss(self) -> Loss:
        return "cross_entropy" if self.targets is None else "squared_error"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def outputs(self) -> int:
        return self.data.classes if self.targets is None else int(self.targets.shape[1])

    @property
    def size(self) -> int:
        return len(self.data)

    def __call__(self, problem: Problem, seed: int) -> Stream:
        return ArrayStream(problem, self, seed)


@dataclass(frozen=True, eq=False)
class _Reader:
    """Makes streams that read a generator."""

    read: _Read
    shape: tuple[int, ...]
    outputs: int
    loss: Loss
    schedule: Schedule
    size = 0

    def __call__(self, problem: Problem, seed: int) -> Stream:
        return GeneratorStream(problem, self, seed)


def _of_length(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with the problem's task length, which a run may have changed."""
    if problem.task_length == schedule.length:
        return schedule
    if not is_dataclass(schedule):
        raise ValueError(f"{problem.name}: its schedule has a length of its own")
    return replace(schedule, length=problem.task_length)


class ArrayStream(TaskStream):
    """Samples of arrays, shuffled or in their order, with labels or targets."""

    def __init__(self, problem: Problem, source: _Arrays, seed: int) -> None:
        super().__init__(
            source.data,
            seed,
            permute=problem.permute,
            schedule=_of_length(source.schedule, problem),
            test=source.test,
            flatten=not isinstance(problem.network, str),
        )
        self.loss, self.outputs = source.loss, source.outputs
        self._targets, self._shuffle = source.targets, source.shuffle

    def samples(self, start: int, count: int) -> Sample:
        """Samples ``start … start+count-1``."""
        if self._targets is None:
            return super().samples(start, count)
        block = self.block(start, count)
        x = self._permuted_inputs(self.dataset.scaled(block.index), block.task)
        return Sample(x, self._targets[block.index])

    def _indices(self, span: Span, start: int, stop: int) -> NDArray[np.int64]:
        if self._shuffle:
            return super()._indices(span, start, stop)
        return np.arange(start, stop) % len(self.dataset)


class GeneratorStream(Changing):
    """Samples of a generator, in its order; resumes by skipping those before."""

    def __init__(self, problem: Problem, source: _Reader, seed: int) -> None:
        super().__init__(
            seed,
            source.shape,
            source.outputs,
            problem.permute,
            _of_length(source.schedule, problem),
            flatten=not isinstance(problem.network, str),
        )
        self.loss = source.loss
        name = f"the generator of {problem.name}"
        fresh = _Fresh(source.read, seed)
        self._read = IterableStream(fresh, source.shape, source.outputs, source.loss, name)

    @property
    def needed(self) -> int | None:
        """How many samples the run takes."""
        return self._read.needed

    @needed.setter
    def needed(self, count: int) -> None:
        self._read.needed = count

    def samples(self, start: int, count: int) -> Sample:
        """Samples ``start … start+count-1``."""
        x, y = self._read.samples(start, count)
        for what, values in (("x", x), ("y", y)):
            wrong = np.flatnonzero(~np.isfinite(values.reshape(count, -1)).all(1))
            if len(wrong):
                place = f"sample {start + wrong[0]} of {self._read.name}"
                raise ValueError(f"{place}: {what} is not finite")
        tasks = self._all_tasks(start, count)
        return Sample(
            self._permuted_inputs(x, tasks),
            self._permuted_labels(y, tasks) if self.loss == "cross_entropy" else y,
        )


@dataclass(frozen=True, eq=False)
class _Read:
    """Starts a user's iterator of pairs."""

    function: Callable[..., Any]

    def __call__(self, seed: int) -> Iterator[Any]:
        return iter(self.function(seed) if _takes_seed(self.function) else self.function())


@dataclass(frozen=True, eq=False)
class _Fresh:
    """An iterable that starts anew each time."""

    read: _Read
    seed: int

    def __iter__(self) -> Iterator[Any]:
        return self.read(self.seed)


def _takes_seed(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters)


# ------------------------------------------------------------------------------ reading
def _as_read(name: str, data: Any) -> _Read | tuple[Any, Any, bool]:
    """Data as arrays, and whether their order is to be kept; or as something to be read."""
    import torch
    from torch.utils import data as loading

    if isinstance(data, str | os.PathLike):
        return (*_npz(name, Path(data)), False)
    if isinstance(data, loading.DataLoader):
        if isinstance(data.dataset, loading.IterableDataset):
            return _Read(functools.partial(_taken_apart, data))
        batches = data.batch_sampler
        inner = getattr(batches, "sampler", batches) if batches is not None else data.sampler
        if not isinstance(inner, loading.SequentialSampler):
            raise ValueError(
                f"{name}: this loader's {type(inner).__name__} draws an order of its own; give "
                "DataLoader(..., shuffle=False), the problem's shuffle=True does the rest"
            )
        return (*_collected(name, _taken_apart(data)), True)
    if isinstance(data, loading.IterableDataset):
        return _Read(functools.partial(iter, data))
    if isinstance(data, loading.Dataset):
        if not hasattr(data, "__len__"):
            raise ValueError(f"{name}: a dataset needs a length; give a function otherwise")
        return (*_collected(name, (data[i] for i in range(len(data)))), False)
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1], False
    if callable(data) and not isinstance(data, torch.nn.Module):
        return _Read(data)
    raise ValueError(
        f"{name}: data are a {type(data).__name__}; arrays (x, y), a Dataset, a DataLoader, a path "
        "to an .npz file, or a function that returns an iterator expected"
    )


def _npz(name: str, path: Path) -> tuple[Any, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in ("x", "y") if key in file.files}
            names = ", ".join(file.files) or "nothing"
    except FileNotFoundError:
        raise ValueError(f"{name}: there is no file {path}") from None
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        line = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{name}: {path} is not an .npz file of numbers: {line}") from error
    if len(found) < 2:
        raise ValueError(f"{name}: {path} has {names}; x and y expected")
    return found["x"], found["y"]


def _taken_apart(loader: Any) -> Iterator[Any]:
    """The samples of a loader, one after the other."""
    for batch in loader:
        if loader.batch_size is None and loader.batch_sampler is None:
            yield batch
        else:
            yield from zip(*batch, strict=True)


def _collected(name: str, pairs: Iterable[Any]) -> tuple[Any, Any]:
    """All samples as two arrays."""
    xs, ys = [], []
    for number, pair in enumerate(pairs):
        try:
            x, y = pair
        except (TypeError, ValueError):
            kind = type(pair).__name__
            raise ValueError(f"{name}: sample {number} is a {kind}, not a pair (x, y)") from None
        xs.append(_array(name, f"x of sample {number}", x))
        ys.append(_array(name, f"y of sample {number}", y))
        if xs[-1].shape != xs[0].shape or ys[-1].shape != ys[0].shape:
            raise ValueError(
                f"{name}: sample {number} has shapes {xs[-1].shape} and {ys[-1].shape}, the first "
                f"one {xs[0].shape} and {ys[0].shape}"
            )
    if not xs:
        raise ValueError(f"{name}: there are no samples")
    return np.stack(xs), np.stack(ys)


def _array(name: str, what: str, value: Any) -> NDArray[Any]:
    """Numbers as an array."""
    try:
        found = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (ValueError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"{name}: {what} is not an array of numbers: {line}") from None
    if found.dtype.kind not in "biuf":
        kinds = {"U": "strings", "S": "strings", "O": "objects", "c": "complex numbers"}
        kind = kinds.get(found.dtype.kind, str(found.dtype))
        raise ValueError(f"{name}: {what} holds {kind}, numbers expected")
    return found


def _finite(name: str, what: str, values: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what does not fit is infinite
        found = values.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(1))
    if len(wrong):
        raise ValueError(f"{name}: {what} is not finite in row {wrong[0]}")
    return found


# --------------------------------------------------------------------------- arrays
def _arrays(
    name: str,
    x: Any,
    y: Any,
    shape: tuple[int, ...] | None,
    outputs: int | None,
    loss: Loss | None,
    schedule: Schedule,
    shuffle: bool,
    test: Any,
) -> _Arrays:
    inputs, values = _array(name, "x", x), _array(name, "y", y)
    if inputs.ndim == 0 or values.ndim == 0 or len(inputs) != len(values):
        shapes = f"{inputs.shape} and {values.shape}"
        raise ValueError(f"{name}: x and y have shapes {shapes}; a row of each per sample expected")
    if len(inputs) == 0:
        raise ValueError(f"{name}: there are no samples")
    inputs = _shaped(name, inputs, shape)
    if (loss or _loss_of(name, values)) == "squared_error":
        if test is not None:
            raise ValueError(f"{name}: held-out accuracy is of classes; leave test out")
        targets = _finite(name, "y", values.reshape(len(values), -1))
        if outputs not in (None, targets.shape[1]):
            raise ValueError(f"{name}: y has {targets.shape[1]} values, outputs={outputs}")
        none = np.zeros(len(inputs), np.int64)
        return _Arrays(Dataset(name, inputs, none, 1), targets, schedule, shuffle, None)
    labels = _labels(name, values, outputs)
    classes = outputs or int(labels.max()) + 1
    held_out = None
    if test is not None:
        if not isinstance(test, tuple | list) or len(test) != 2:
            raise ValueError(f"{name}: test is a pair of arrays (x, y)")
        xs, ys = test
        other = _arrays(f"{name}, test", xs, ys, shape, classes, loss, schedule, shuffle, None)
        held_out = other.data
        if held_out.shape != tuple(inputs.shape[1:]) or other.targets is not None:
            raise ValueError(f"{name}: test data are of another kind than the others")
    return _Arrays(Dataset(name, inputs, labels, classes), None, schedule, shuffle, held_out)


def _shaped(name: str, x: NDArray[Any], shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Inputs with their own shape: images as they are, all else in single precision."""
    found = x if x.dtype == np.uint8 and x.ndim > 2 else _finite(name, "x", x)
    wanted = shape or tuple(x.shape[1:]) or (1,)
    if math.prod(wanted) != math.prod(x.shape[1:]) or math.prod(wanted) == 0:
        raise ValueError(f"{name}: an input has shape {x.shape[1:]}, which is not {wanted}")
    return found.reshape(len(x), *wanted)


def _loss_of(name: str, y: NDArray[Any]) -> Loss:
    """Whole numbers are classes, others are targets."""
    if y.dtype.kind == "f":
        return "squared_error"
    if math.prod(y.shape[1:]) != 1:
        raise ValueError(
            f"{name}: y holds {math.prod(y.shape[1:])} whole numbers per sample; give one class, "
            "or loss='squared_error'"
        )
    return "cross_entropy"


def _labels(name: str, y: NDArray[Any], outputs: int | None) -> NDArray[np.int64]:
    if math.prod(y.shape[1:]) != 1:
        raise ValueError(f"{name}: y has shape {y.shape}; one class per sample expected")
    flat = y.reshape(-1)
    labels = np.where(np.isfinite(flat), flat, -1).astype(np.int64)
    wrong = np.flatnonzero((labels != flat) | (labels < 0))
    if outputs is not None:
        wrong = np.union1d(wrong, np.flatnonzero(labels >= outputs))
    if len(wrong):
        most = "" if outputs is None else f" to {outputs - 1}"
        row = int(wrong[0])
        raise ValueError(f"{name}: y is {flat[row]} in row {row}; a class from 0{most} expected")
    return labels


# ------------------------------------------------------------------------- generators
def _probe(
    name: str,
    read: _Read,
    shape: tuple[int, ...] | None,
    outputs: int | None,
    loss: Loss | None,
    schedule: Schedule,
) -> _Reader:
    """What the first sample tells."""
    try:
        first = next(read(0))
    except StopIteration:
        raise ValueError(f"{name}: there are no samples") from None
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{name}: its generator raised {type(error).__name__}: {line}") from error
    x, y = _collected(name, [first])
    which = loss or _loss_of(name, y)
    found = shape or tuple(x.shape[1:])
    if found != tuple(x.shape[1:]) or math.prod(found) == 0:
        raise ValueError(f"{name}: an input has shape {x.shape[1:]}, which is not {shape}")
    if which == "squared_error":
        outputs = math.prod(y.shape[1:]) if outputs is None else outputs
    if outputs is None:
        raise ValueError(f"{name}: a generator does not tell its classes; give outputs=")
    return _Reader(read, found, outputs, which, schedule)


# -------------------------------------------------------------------------- arguments
def _schedule(
    name: str,
    task_length: int | None,
    drift: Drift | int | None,
    schedule: Schedule | None,
    boundaries: Sequence[int] | None,
) -> Schedule:
    """The one schedule that the arguments describe."""
    if isinstance(drift, Drift):
        drift, schedule = None, drift if schedule is None else schedule
        if schedule is not None and not isinstance(schedule, Drift):
            raise ValueError(f"{name}: drift and schedule exclude each other")
    given = {"task_length": task_length, "schedule": schedule, "boundaries": boundaries}
    named = [key for key, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{name}: {' and '.join(named)} exclude each other; leave one out")
    if drift is not None and task_length is None:
        raise ValueError(f"{name}: drift={drift} needs a task_length")
    try:
        if schedule is not None:
            return schedule
        if boundaries is not None:
            return Boundaries(tuple(int(each) for each in boundaries))
        if drift is not None and task_length is not None:
            return Drift(task_length, drift)
        return Every(task_length)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _network(
    name: str, shape: tuple[int, ...], hidden: Sequence[int], outputs: int, network: str | None
) -> tuple[int, ...] | str:
    if network is None:
        return (math.prod(shape), *hidden, outputs)
    if tuple(hidden) != HIDDEN:
        raise ValueError(f"{name}: hidden and network exclude each other; leave one out")
    if network == "cnn" and (shape, outputs) != ((3, 32, 32), 10):
        raise ValueError(
            f"{name}: the network cnn takes inputs (3, 32, 32) and has 10 outputs; these are "
            f"{shape} and {outputs}"
        )
    return network
