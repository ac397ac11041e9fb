"""UPGD and AdaUPGD against a user's own optimizer, on the user's own module and data.

Every optimizer starts from the same weights, sees the same batches and is tried at a few step
sizes. Nothing is stored: for streams that change, many settings and runs that resume there is
:class:`upgd.lab.Study`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from upgd.lab import display
from upgd.lab.comparison import Comparison, Pair, Run
from upgd.lab.training import Loss, Task, make_task, train, whole
from upgd.optim import registry
from upgd.optim.foreign import check_made
from upgd.study.extensions import load_module, where
from upgd.study.options import check_device
from upgd.text import clock, error_line, short

OURS = ("upgd", "ada-upgd")
TITLES = tuple(registry.get(name)[0].title for name in OURS)
BASELINES: Mapping[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
"""What is compared with by default: PyTorch's classes, at the step size of the named methods."""

NAMES = ("model", "data", "held_out", "loss", "optimizer")  # what a file may define
RATIO = 3.0  # between one step size and the next
MOST_GROWTH = 3  # step sizes by which a grid grows at each end while the best one is there

Factory = Callable[[Any], Optimizer]


def compare(
    model: nn.Module | Callable[..., nn.Module] | Sequence[int],
    data: Any,
    *,
    optimizer: Factory | Mapping[str, Factory] | None = None,
    held_out: Any = None,
    loss: str | Loss | None = None,
    steps: int | None = None,
    batch: int | None = None,
    stream: bool = False,
    seeds: int | Sequence[int] = 3,
    factors: Sequence[float] | None = None,
    device: str = "cpu",
    settings: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Comparison:
    """Train a model by your optimizer, by UPGD and by AdaUPGD, and say which does better.

    With equal seeds all optimizers have the same initial weights and the same batches. UPGD shares
    the step sizes of your SGD, AdaUPGD those of your Adam; an optimizer counts as the one or the
    other by whether its step grows with the gradient. From an `optimizer` of yours they also take
    the parameter groups and all hyperparameters that both have, such as ``weight_decay`` and
    ``momentum``; apart from that they have their defaults.

    Args:
        model: A function or class that makes an ``nn.Module``, from nothing or from the inputs and
            the number of outputs; a module, of which every run gets a copy; or the units of the
            hidden layers of an MLP, such as ``(64, 32)``.
        data: Arrays or tensors ``(x, y)``, a ``Dataset`` of pairs, a ``DataLoader``, or the path of
            an ``.npz`` file with ``x`` and ``y`` (and ``x_test``, ``y_test``, which are then held
            out). It is read into memory once.
        optimizer: A function of the parameters that makes your optimizer, or its class; or several
            of them by name. By default PyTorch's SGD and Adam.
        held_out: The share of the data that is held out (default 0.2, none of a stream), or other
            data of the same kind.
        loss: ``"cross_entropy"``, the default where y holds whole numbers, ``"squared_error"``, or
            a function of outputs and targets.
        steps: Updates of a run; by default 1000, or one pass over a stream.
        batch: Samples per update; by default 32, or 1 of a stream.
        stream: Keep the order of the data, and judge by what is predicted before each update.
        seeds: How many, or which.
        factors: Step sizes as multiples of the optimizer's own. By default 1/3, 1 and 3, and
            further ones while the best is the smallest or the largest.
        device: Where to train.
        settings: Hyperparameters of UPGD and AdaUPGD other than the step size, such as
            ``{"sigma": 0.01}``; each takes those that it has.
        quiet: Show no progress.

    Raises:
        ValueError: Something does not fit together; the message says what.

    Example:
        >>> import numpy as np
        >>> from upgd import lab
        >>> x = np.random.default_rng(0).normal(size=(200, 4))
        >>> found = lab.compare((8,), (x, x[:, 0] > 0), steps=20, seeds=2, factors=[1], quiet=True)
        >>> list(found.best)
        ['SGD', 'UPGD', 'Adam', 'AdaUPGD']
    """
    check_device(device)
    chosen = list(range(whole("seeds", seeds))) if isinstance(seeds, int) else list(seeds)
    if not chosen or any(not isinstance(seed, int) or seed < 0 for seed in chosen):
        raise ValueError(f"seeds are whole numbers from 0 on, one at least; got {seeds!r}")
    grid = [1 / RATIO, 1.0, RATIO] if factors is None else sorted({float(f) for f in factors})
    if not grid or not all(0 < factor < math.inf for factor in grid):
        raise ValueError(f"factors are positive numbers, one at least; got {factors!r}")
    task = make_task(model, data, held_out, loss, steps, batch, stream, device)
    families = _families(task, optimizer, settings or {})
    shown: Any = contextlib.nullcontext() if quiet else display.live(display.console())
    with shown as show:
        work = _Work(task, chosen, len(grid) * sum(map(len, families)), show)
        runs = [run for arms in families for run in work.family(arms, grid, factors is None)]
    return Comparison(runs, _pairs(families), task.metrics, task.steps)


def from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments of :func:`compare` from a Python file that defines some of them by their names.

    It may define ``model``, ``data``, ``held_out``, ``loss`` and ``optimizer``. The data may be
    functions without arguments that return them.

    Raises:
        ValueError: The file cannot be run, or defines no data.
    """
    path = Path(path)
    module = load_module(path)
    found = {name: getattr(module, name) for name in NAMES if hasattr(module, name)}
    if "data" not in found:
        raise ValueError(f"{path} defines no data; it may define {', '.join(NAMES)}")
    for name in ("data", "held_out"):
        if callable(found.get(name)):
            try:
                found[name] = found[name]()
            except Exception as error:  # whatever a user's code may raise
                raise ValueError(where(path.resolve(), error)) from error
    return found


# ------------------------------------------------------------------------------ optimizers
class Arm(NamedTuple):
    """An optimizer that can be made for a model at any multiple of its own step size."""

    name: str
    lr: float
    make: Callable[[float, nn.Module], Optimizer]
    ours: bool = False


def _families(task: Task, given: Any, settings: Mapping[str, Any]) -> list[list[Arm]]:
    """Arms that share their step sizes: one of the user's, then ours of its kind, if any."""
    rows = [registry.get(name)[0] for name in OURS]
    known = {name for row in rows for name in row.defaults} - {"lr"}
    if unknown := settings.keys() - known:
        names = ", ".join(sorted(known))
        raise ValueError(f"no hyperparameter {min(unknown)!r} to set; there are {names}")
    families = []
    for name, factory in _factories(given).items():
        found = _probe(task, name or "optimizer", factory)
        mine, lr = name or found.title, found.lr
        mine = f"your {mine}" if mine in TITLES else mine
        arms = [Arm(mine, lr, functools.partial(_theirs, factory))]
        for row in [row for row in rows if ("betas" in row.defaults) == found.adaptive]:
            rows.remove(row)
            if row.name == "upgd" and found.momentum:
                row = registry.METHODS["upgd-momentum"]
            shared = row.method.hyper if given is not None else ("lr",)
            arms.append(_our_arm(row, lr, factory, shared, settings))
        families.append(arms)
    for row in rows:
        lr = row.defaults["lr"]
        families.append([_our_arm(row, lr, row.optimizer, ("lr",), settings)])
    for arm in (arm for arms in families for arm in arms if arm.ours):
        with task.seeded(0):  # raises now if its settings are wrong
            arm.make(1.0, task.make())
    return families


def _factories(given: Any) -> dict[str, Factory]:
    """The user's optimizers by name; a single one has the name of its class, not known yet."""
    if given is None:
        made: dict[str, Factory] = {}
        for method, cls in BASELINES.items():
            made[cls.__name__] = functools.partial(cls, lr=registry.get(method)[1]["lr"])
        return made
    found = dict(given) if isinstance(given, Mapping) else {"": given}
    if not found:
        raise ValueError("there is no optimizer to compare with; leave it out for SGD and Adam")
    for name, factory in found.items():
        if not callable(factory):
            kind = type(factory).__name__
            raise ValueError(f"an optimizer is a function of the parameters; got a {kind} {name}")
    return found


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _theirs(factory: Factory, factor: float, model: nn.Module) -> Optimizer:
    made = factory(_trained(model))
    for group in made.param_groups:
        group["lr"] = group["lr"] * factor
    return made


def _our_arm(
    row: registry.Row,
    lr: float,
    factory: Factory,
    shared: Sequence[str],
    settings: Mapping[str, Any],
) -> Arm:
    """One of our methods with the groups of another optimizer, and its values of `shared`."""
    own = {name: value for name, value in settings.items() if name in row.defaults}
    kept = [name for name in ("params", *shared) if name not in own]

    def make(factor: float, model: nn.Module) -> Optimizer:
        groups = _theirs(factory, factor, model).param_groups
        given = [{name: group[name] for name in kept if name in group} for group in groups]
        return row.optimizer(given, **{**row.options, **own})

    return Arm(row.title, lr, make, ours=True)


class _Probed(NamedTuple):
    """What is found out about a user's optimizer."""

    title: str  # of its class
    lr: float
    adaptive: bool  # whether its step ignores the gradient's scale
    momentum: bool


def _probe(task: Task, name: str, factory: Factory) -> _Probed:
    """Make an optimizer and let it do a step, with small gradients and with large ones."""
    lengths = []
    for scale in (1.0, 1000.0):
        with task.seeded(0):
            model = task.make().to(task.device)
            try:
                made = factory(_trained(model))
                check_made(name, made)
                updated = {id(p) for group in made.param_groups for p in group["params"]}
                if not updated <= {id(p) for p in _trained(model)}:
                    raise ValueError("it updates other parameters than it was given")
                lr = float(made.param_groups[0].get("lr", math.nan))
                before = [p.detach().clone() for p in _trained(model)]
                for p in _trained(model):
                    p.grad = torch.full_like(p, scale)
                made.step()
            except Exception as error:  # whatever a user's code may raise
                raise ValueError(f"{name} cannot be used: {error_line(error)}") from error
        if not 0 < lr < math.inf:
            raise ValueError(f"{name} has the step size lr={lr:g}; a positive one is needed")
        moved = zip(_trained(model), before, strict=True)
        lengths.append(sum(float((p.detach() - old).abs().sum()) for p, old in moved))
    momentum = any(group.get("momentum", 0) != 0 for group in made.param_groups)
    return _Probed(type(made).__name__, lr, lengths[1] < 30 * lengths[0], momentum)


def _pairs(families: Sequence[Sequence[Arm]]) -> list[Pair]:
    """Ours with what each is compared with: the one whose step sizes it shares, or all."""
    theirs = [arms[0] for arms in families if not arms[0].ours]
    found = []
    for arms in families:
        for arm in (arm for arm in arms if arm.ours):
            if arms[0].ours:
                found += [Pair(arm.name, other.name, None) for other in theirs]
            else:
                found.append(Pair(arm.name, arms[0].name, arm.lr))
    return found


# ---------------------------------------------------------------------------------- the runs
@dataclass
class _Work:
    """Runs arms at step sizes, and shows how far that is."""

    task: Task
    seeds: Sequence[int]
    settings: int  # arms times step sizes, as far as they are known
    show: Callable[[display.Now], None] | None

    def __post_init__(self) -> None:
        self.done, self.start = 0, time.monotonic()

    def family(self, arms: Sequence[Arm], grid: Sequence[float], grow: bool) -> list[Run]:
        """All runs of arms that share step sizes; the grid grows at the ends that are best."""
        runs = [run for arm in arms for factor in grid for run in self._runs(arm, factor)]
        factors, grown = list(grid), {-1: 0, 1: 0}
        while grow:
            best = Comparison(runs, (), self.task.metrics, self.task.steps).best
            at = [best[arm.name] / arm.lr for arm in arms if arm.name in best]
            low, high = factors[0], factors[-1]
            ends = [
                side
                for side, end in ((-1, low), (1, high))
                if grown[side] < MOST_GROWTH and any(math.isclose(f, end) for f in at)
            ]
            if not ends:
                break
            for side in ends:
                factor = low / RATIO if side < 0 else high * RATIO
                factors = [factor, *factors] if side < 0 else [*factors, factor]
                grown[side] += 1
                self.settings += len(arms)
                runs += [run for arm in arms for run in self._runs(arm, factor)]
        order = {arm.name: number for number, arm in enumerate(arms)}
        return sorted(runs, key=lambda run: (order[run.optimizer], run.lr, run.seed))

    def _runs(self, arm: Arm, factor: float) -> list[Run]:
        found = []
        for seed in self.seeds:
            lr = arm.lr * factor
            what = f"{arm.name} lr={lr:.3g} seed {seed}"
            try:
                make = functools.partial(arm.make, factor)
                outcome = train(self.task, make, seed, functools.partial(self._tell, what))
            except Exception as error:  # whatever a user's code may raise
                raise ValueError(f"{what}: {error_line(error)}") from error
            self.done += 1
            found.append(Run(arm.name, lr, seed, outcome))
        return found

    def _tell(self, what: str, step: int) -> None:
        if self.show is None:
            return
        total, steps = self.settings * len(self.seeds), self.task.steps
        done = self.done + step / steps
        rate = done * steps / max(time.monotonic() - self.start, 1e-9)
        pace = f"{short(rate)} steps/s, {clock((total - done) * steps / rate)} left"
        self.show(display.Now(what, done, total, pace))
