"""Ordinary training of a user's module on the user's data: a batch, a loss, a step."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from upgd.networks import Network, mlp
from upgd.streams.custom import as_arrays
from upgd.streams.readers import read_arrays
from upgd.text import error_line
from upgd.threads import one_thread

STEPS, BATCH, HELD_OUT = 1000, 32, 0.2
POINTS = 50  # of a curve
AT_A_TIME = 256  # samples in an evaluation, or a batch if that is larger
SMALL = 10_000_000  # weights times samples of a step below which several threads cost time

Loss = Callable[[Tensor, Tensor], Tensor]


class Samples(NamedTuple):
    """Inputs and targets, a row of each per sample."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Task:
    """What all runs share.

    Attributes:
        make: Makes the model; PyTorch's generator determines its weights.
        train: Samples to learn from.
        test: Samples that are held out, if any.
        loss: Of outputs and targets, a mean over samples.
        steps: Updates of a run.
        batch: Samples per update.
        stream: Whether samples come in their order.
        device: Where models and samples are.
        classes: Whether there is an accuracy.
    """

    make: Callable[[], nn.Module]
    train: Samples
    test: Samples | None
    loss: Loss
    steps: int
    batch: int
    stream: bool
    device: str
    classes: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured; the first one decides."""
        kinds = ("accuracy", "loss") if self.classes else ("loss",)
        online, held_out = ([f"{when} {kind}" for kind in kinds] for when in ("online", "held-out"))
        if self.test is None:
            return tuple(online)
        return (*online, *held_out) if self.stream else (*held_out, "online loss")

    def batches(self, seed: int) -> Tensor:
        """The samples of each update [steps, batch]."""
        size, many = len(self.train.x), self.steps * self.batch
        if self.stream:
            order = torch.arange(many) % size
        else:
            draw = torch.Generator().manual_seed(seed)
            passes = [torch.randperm(size, generator=draw) for _ in range(-(-many // size))]
            order = torch.cat(passes)[:many]
        return order.view(self.steps, self.batch).to(self.device)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed PyTorch's generators, and restore them afterwards."""
        device = torch.device(self.device)
        others = {} if device.type == "cpu" else {"device_type": device.type}
        with torch.random.fork_rng([device] if others else [], **others):
            torch.manual_seed(seed)
            yield

    def threads(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """One thread for a small model on CPU: on a busy machine, threads wait for each other."""
        work = self.batch * sum(p.numel() for p in model.parameters())
        small = self.device == "cpu" and work < SMALL
        return one_thread() if small else contextlib.nullcontext()


class Outcome(NamedTuple):
    """What one run gave."""

    scores: Mapping[str, float]  # by metric; empty if it diverged
    curve: NDArray[np.float64]  # training loss, means over POINTS parts of the run
    seconds: float  # per step
    diverged: int | None  # the step by which the loss was no longer finite


# ---------------------------------------------------------------------------- making a task
def make_task(
    model: Any,
    data: Any,
    held_out: Any = None,
    loss: str | Loss | None = None,
    steps: int | None = None,
    batch: int | None = None,
    stream: bool = False,
    device: str = "cpu",
) -> Task:
    """A task from what users give; see :func:`upgd.lab.compare`.

    Raises:
        ValueError: Something does not fit together; the message says what.
    """
    is_mlp = isinstance(model, list | tuple)
    train, test = _split(data, held_out, loss, is_mlp, stream)
    size = len(train.x)
    batch = min(1 if stream else BATCH, size) if batch is None else whole("batch", batch)
    if batch > size:
        raise ValueError(f"a batch of {batch} is more than the {size} samples to learn from")
    steps = (size // batch if stream else STEPS) if steps is None else whole("steps", steps)
    y = torch.cat([train.y, test.y]) if test is not None else train.y
    outputs = y[0].numel() if y.is_floating_point() else int(y.max()) + 1
    if isinstance(model, nn.Module):
        make: Callable[[], nn.Module] = functools.partial(copy.deepcopy, model)
    elif is_mlp:
        make = functools.partial(mlp, [train.x[0].numel(), *model, outputs])
    elif callable(model):
        own = Network("model", model, "")
        make = functools.partial(own.make, tuple(train.x.shape[1:]), outputs)
    else:
        kind = type(model).__name__
        raise ValueError(f"the model is a {kind}; an nn.Module or a function of one expected")
    used = loss if callable(loss) else LOSSES[_loss_name(loss, train.y.is_floating_point())]
    train, test = _moved(train, device), test and _moved(test, device)
    task = Task(make, train, test, used, steps, batch, stream, device)
    return replace(task, classes=_has_accuracy(task, y))


def _moved(some: Samples, device: str) -> Samples:
    return Samples(some.x.to(device), some.y.to(device))


def whole(name: str, value: Any) -> int:
    """The value if it is a positive whole number; else raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    return value


def _split(
    data: Any, held_out: Any, loss: Any, as_float: bool, stream: bool
) -> tuple[Samples, Samples | None]:
    """Samples to learn from, and those that are held out."""
    train = _samples("data", data, loss, as_float)
    if held_out is None and isinstance(data, str | os.PathLike):
        found, _ = read_arrays(Path(data), ("x_test", "y_test"))
        if len(found) == 1:
            raise ValueError(f"{data} has {next(iter(found))} alone; x_test and y_test expected")
        held_out = (found["x_test"], found["y_test"]) if found else None
    if held_out is None:
        held_out = 0.0 if stream else HELD_OUT
    if isinstance(held_out, bool) or not isinstance(held_out, int | float):
        test = _samples("held-out data", held_out, loss, as_float)
        shapes = [(tuple(some.x.shape[1:]), tuple(some.y.shape[1:])) for some in (test, train)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"a held-out sample has shapes {shapes[0]}, the data's {shapes[1]}")
        return train, test
    if held_out == 0:
        return train, None
    if stream:
        raise ValueError("a stream is judged online; leave held_out away, or give other data")
    count = round(held_out * len(train.x)) if 0 < held_out < 1 else 0
    if not 0 < count < len(train.x):
        raise ValueError(f"held_out={held_out:g} of {len(train.x)} samples; a share is expected")
    order = torch.randperm(len(train.x), generator=torch.Generator().manual_seed(0))
    rest, kept = order[count:], order[:count]
    return Samples(train.x[rest], train.y[rest]), Samples(train.x[kept], train.y[kept])


def _samples(what: str, data: Any, loss: Any, as_float: bool) -> Samples:
    """Floats as float32, whole numbers as int64: tokens and classes."""
    try:
        x, y = as_arrays(data)
        if not callable(loss):
            name = _loss_name(loss, y.dtype.kind == "f")
            y = _labels(y) if name == "cross_entropy" else y.astype(np.float32)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    if as_float or x.dtype.kind == "f":
        x = x.astype(np.float32).reshape(len(x), *(x.shape[1:] or (1,)))
    x, y = (a if a.dtype.kind == "f" else a.astype(np.int64) for a in (x, y))
    return Samples(torch.tensor(x), torch.tensor(y))


def _labels(y: NDArray[Any]) -> NDArray[np.int64]:
    rows = y.reshape(len(y), -1)
    wrong = ((rows != np.floor(rows)) | (rows < 0)).any(1)
    if wrong.any():
        row = int(wrong.argmax())
        value = rows[row, 0] if rows.shape[1] == 1 else rows[row].tolist()
        raise ValueError(f"y is {value} in row {row}; classes from 0 on expected")
    return (y.reshape(-1) if rows.shape[1] == 1 else y).astype(np.int64)


# ---------------------------------------------------------------------------------- losses
def _loss_name(given: Any, floats: bool) -> str:
    if given is not None and given not in LOSSES:
        raise ValueError(f"loss is {' or '.join(LOSSES)} or a function; got {given!r}")
    return given or ("squared_error" if floats else "cross_entropy")


def _logits(output: Tensor, y: Tensor) -> Tensor | None:
    """Outputs with the classes in their second dimension; None if they are not of that form."""
    if output.shape[:-1] == y.shape:
        return output.movedim(-1, 1)
    return output if output.shape[:1] + output.shape[2:] == y.shape else None


def _cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    logits = _logits(output, y)
    if logits is None:
        expected = (*y.shape, "classes")
        raise ValueError(f"its outputs have shape {tuple(output.shape)}; {expected} expected")
    return functional.cross_entropy(logits, y)


def _squared_error(output: Tensor, y: Tensor) -> Tensor:
    if output.numel() != y.numel():  # broadcasting would hide a mistake
        raise ValueError(f"its outputs have shape {tuple(output.shape)}")
    return functional.mse_loss(output, y.view_as(output))


LOSSES: Mapping[str, Loss] = {"cross_entropy": _cross_entropy, "squared_error": _squared_error}


def _has_accuracy(task: Task, labels: Tensor) -> bool:
    """Whether outputs are of classes; raises ValueError if model, data and loss do not fit."""
    x, y = (values[: task.batch] for values in task.train)
    with task.seeded(0):
        model = task.make().to(task.device)
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("the model has no parameters to train")
        try:
            output = model(x)
            if not isinstance(output, Tensor):
                raise ValueError(f"it returns a {type(output).__name__}, not a tensor")
            logits = None if y.is_floating_point() else _logits(output, y)
            if task.loss is _cross_entropy and logits is not None:
                known, most = logits.shape[1], int(labels.max())
                if known <= most:
                    raise ValueError(f"it has {known} outputs, and classes go up to {most}")
            found = task.loss(output, y)
            if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
                raise ValueError("the loss is not one number that depends on the parameters")
            torch.autograd.backward(found)
        except Exception as error:  # whatever a user's code may raise
            why = str(error) if isinstance(error, ValueError) else error_line(error)
            shapes = f"inputs {tuple(x.shape)} and targets {tuple(y.shape)}"
            raise ValueError(f"the model does not fit {shapes}: {why}") from error
    return logits is not None


# -------------------------------------------------------------------------------- training
def train(
    task: Task,
    optimizer: Callable[[nn.Module], Optimizer],
    seed: int,
    tell: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Train a model from the start.

    Args:
        task: What to learn.
        optimizer: Makes the optimizer of a model.
        seed: Determines initial weights, batches and whatever else is random.
        tell: Called with the step, now and then.
    """
    with task.seeded(seed):
        model = task.make().to(task.device).train()
        made = optimizer(model)
        torch.manual_seed(seed)  # dropout must not depend on what the optimizer has drawn
        with task.threads(model):
            sums, seconds, diverged = _learn(task, model, made, task.batches(seed), tell)
            scores = {} if diverged else _scores(task, model, sums)
    if any(not math.isfinite(value) for value in scores.values()):
        scores, diverged = {}, task.steps
    losses = sums[:, 0].double().cpu().numpy()
    ends = _ends(task.steps)
    parts = zip([0, *ends], ends, strict=False)
    curve = np.array([losses[a:b].mean() if b > a else np.nan for a, b in parts])
    return Outcome(scores, curve, seconds, diverged)


def _ends(steps: int) -> list[int]:
    """The steps at which the points of a curve end; of a short run several at the same step."""
    return [steps * part // POINTS for part in range(1, POINTS + 1)]


def _learn(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    batches: Tensor,
    tell: Callable[[int], None],
) -> tuple[Tensor, float, int | None]:
    """Loss and accuracy of each step, seconds per step, the step by which it diverged."""
    sums = torch.zeros(task.steps, 2, device=task.device)
    first, start, diverged = 0, time.perf_counter(), None
    for end in sorted(set(_ends(task.steps)) - {0}):
        try:
            for step in range(first, end):
                sums[step] = _step(task, model, optimizer, batches[step])
            finite = math.isfinite(float(sums[first:end, 0].sum()))  # waits for the device
        except FloatingPointError:  # our optimizers raise it before they change anything
            finite = False
        tell(end)
        first = end
        if not finite:
            diverged = end
            break
    return sums, (time.perf_counter() - start) / first, diverged


def _step(task: Task, model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    """Learn from a batch; its loss and accuracy before that."""
    y = task.train.y[batch]
    output = model(task.train.x[batch])
    loss = task.loss(output, y)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return torch.stack([loss.detach().reshape(()).float(), _accuracy(task, output, y)])


@torch.no_grad()
def _accuracy(task: Task, output: Tensor, y: Tensor) -> Tensor:
    logits = _logits(output, y) if task.classes else None
    if logits is None:
        return torch.zeros((), device=task.device)
    return (logits.argmax(1) == y).float().mean()


@torch.no_grad()
def _scores(task: Task, model: nn.Module, sums: Tensor) -> dict[str, float]:
    """Each metric's value at the end of a run."""
    online_loss, online_accuracy = sums.double().mean(0).tolist()
    found = {"online loss": online_loss, "online accuracy": online_accuracy}
    if task.test is not None:
        model.eval()
        size, total = max(task.batch, AT_A_TIME), torch.zeros(2, dtype=torch.float64)
        for x, y in zip(*(values.split(size) for values in task.test), strict=True):
            output = model(x)
            both = [float(task.loss(output, y)), float(_accuracy(task, output, y))]
            total += len(y) * torch.tensor(both, dtype=torch.float64)
        loss, accuracy = (total / len(task.test.y)).tolist()
        found |= {"held-out loss": loss, "held-out accuracy": accuracy}
    return {metric: found[metric] for metric in task.metrics}
