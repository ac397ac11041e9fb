"""A row of the registry for any PyTorch optimizer: a class, or a function that makes one."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from upgd.optim.registry import Row
from upgd.optim.roles import ordered_groups
from upgd.rules.vocabulary import HYPERPARAMETERS, Hyperparameter, Method, split_roles
from upgd.sources import digest


@dataclass(frozen=True)
class TorchRow(Row):
    """One method that is a PyTorch optimizer; it has no rule, so that no stack can run it.

    Attributes:
        factory: Makes the optimizer from parameters and hyperparameters.
        values: The default value of each hyperparameter.
    """

    factory: Callable[..., Optimizer] = torch.optim.SGD
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def hyper(self) -> dict[str, Hyperparameter]:
        """Its hyperparameters; words of our vocabulary with their ranges, others with none."""
        return {
            name: HYPERPARAMETERS.get(name) or Hyperparameter(name, name, "", low=-math.inf)
            for name in self.values
        }

    @property
    def defaults(self) -> dict[str, Any]:
        """The default value of each hyperparameter."""
        return dict(self.values)

    @functools.cached_property
    def eager_only(self) -> str:
        """A stack executes rules, and this method has none."""
        return f"{self.name} is an optimizer of its own, not a rule"

    def make(self, model: nn.Module, **arguments: Any) -> Any:
        """An optimizer for the parameters of `model` that are trained.

        The run's `seed` and `noise` are not handed on: the engine seeds PyTorch's generator.
        """
        plain, own = split_roles({k: v for k, v in arguments.items() if k not in ("seed", "noise")})
        for hyper in (plain, *own.values()):
            for name, value in hyper.items():
                if isinstance(self.values.get(name), int) and float(value).is_integer():
                    hyper[name] = int(value)
        if own:
            groups = ordered_groups(model, own, trained=True)
            return self.factory(groups, **{**self.options, **plain})
        trained = [p for p in model.parameters() if p.requires_grad]
        return self.factory(trained, **{**self.options, **plain})


def torch_row(
    name: str,
    optimizer: type[Optimizer] | Callable[..., Optimizer],
    *,
    title: str | None = None,
    **defaults: Any,
) -> TorchRow:
    """A row for `optimizer`, to be registered.

    Args:
        name: Of the method.
        optimizer: A subclass of ``torch.optim.Optimizer``, or a function
            ``f(params, **hyper)`` that returns one.
        title: In tables and figures; the name by default.
        defaults: Values of its arguments. Numbers are hyperparameters, which a run may set;
            anything else is handed over as it is. Of a class, further arguments whose default is
            a number are hyperparameters, too. A pair `betas` is ``beta1`` and ``beta2`` in a run.

    Raises:
        TypeError: `optimizer` makes no optimizer.
        ValueError: It cannot be made with these values, or wants a closure.

    Example:
        >>> import torch
        >>> torch_row("heavy-ball", torch.optim.SGD, lr=0.01, momentum=0.9).defaults
        {'lr': 0.01, 'momentum': 0.9, 'dampening': 0, 'weight_decay': 0}
    """
    if not callable(optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"{name}: an optimizer's class or a function expected, got a {kind}")
    if isinstance(optimizer, type) and not issubclass(optimizer, Optimizer):
        raise TypeError(f"{name}: {optimizer.__name__} is no subclass of torch.optim.Optimizer")
    known = _signature_defaults(optimizer) if isinstance(optimizer, type) else {}
    given = {**{k: v for k, v in known.items() if _is_hyper(k, v)}, **defaults}
    hyper = {k: tuple(v) if k == "betas" else v for k, v in given.items() if _is_hyper(k, v)}
    options = {k: v for k, v in given.items() if k not in hyper}
    row = TorchRow(
        name.lower(),
        title or name,
        optimizer,  # type: ignore[arg-type]
        Method(hyper=tuple(hyper), phases=()),
        options,
        source=digest(optimizer, options, hyper),
        factory=optimizer,
        values=hyper,
    )
    _try(row)
    return row


def _signature_defaults(cls: type[Optimizer]) -> dict[str, Any]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _is_hyper(name: str, value: Any) -> bool:
    """Whether a run may set this argument: a number, or the pair `betas`."""
    if name == "betas":
        return isinstance(value, tuple | list) and len(value) == 2
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _try(row: TorchRow) -> None:
    """Make the optimizer once, for a small layer, so that what is wrong is known at once."""
    with torch.random.fork_rng(devices=[]):
        try:
            opt = row.make(nn.Linear(2, 2), **row.defaults)
        except Exception as error:
            with_matrices_alone = nn.Linear(2, 2, bias=False)
            try:  # some optimizers are for matrices, and a user's network may have nothing else
                opt = row.make(with_matrices_alone, **row.defaults)
            except Exception:
                line = (str(error).splitlines() or [""])[0]
                raise ValueError(
                    f"{row.name}: cannot be made with {_listed(row)}: "
                    f"{type(error).__name__}: {line}"
                ) from error
    check_made(row.name, opt)


def check_made(name: str, opt: Any) -> None:
    """Raise unless `opt` is an optimizer whose ``step()`` needs no closure."""
    if not isinstance(opt, Optimizer):
        raise TypeError(f"{name}: made a {type(opt).__name__}, not a torch.optim.Optimizer")
    closure = next(iter(inspect.signature(opt.step).parameters.values()), None)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if closure is not None and closure.default is closure.empty and closure.kind in positional:
        raise ValueError(
            f"{name}: step() of {type(opt).__name__} wants a closure that evaluates the loss "
            "again; an online learner sees a sample once"
        )


def _listed(row: TorchRow) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in {**row.options, **row.defaults}.items()) or "nothing"
