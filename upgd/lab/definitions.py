"""Methods, optimizers, networks and streams of your own.

Each gets a name, by which studies and the command line know it. Its code is part of a run's
identity: runs of a rule that was changed since are other runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upgd import networks
from upgd.optim import registry
from upgd.optim.custom import rule_row
from upgd.optim.custom_layered import layered_row
from upgd.optim.foreign import torch_row
from upgd.rules.vocabulary import Phase, Place, Recycle, Reduce
from upgd.streams import PROBLEMS, Problem, get, make_problem
from upgd.streams import register as register_problem


def method(
    name: str,
    rule: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]],
    *,
    states: Mapping[str, Any] | Sequence[str] = (),
    decays: Mapping[str, str] | None = None,
    reduce: Reduce | None = None,
    writes: Sequence[str] | None = None,
    title: str | None = None,
    power: int = 2,
    period: str | None = None,
    **defaults: float,
) -> Any:
    """A method from its update rule, a plain function of scalars; it runs on every engine.

    The rule's arguments say what it reads: ``w`` and ``g`` (the weight and its gradient),
    ``noise`` (a standard normal number), ``bound`` (``1 / sqrt(fan_in)`` of its layer), ``due``
    (1 at steps that are multiples of `period`, else 0), its states and its hyperparameters by name.
    It returns
    the new weight, and after it all states if any of them changes. It uses ``+ - * /`` and the
    functions of :mod:`upgd.lab`: ``sigmoid``, ``sqrt``, ``absolute``, ``maximum``, ...

    Args:
        name: What studies and the command line call it.
        rule: The function; or two of them, where the second reads ``eta``, which `reduce` takes
            from what the first returns.
        states: What is kept per weight: by name ``"weight"`` (starts as a copy of the weight) or
            ``"zero"``; or names alone, for those that start at zero.
        decays: Traces that are bias-corrected, with the hyperparameter that is their decay; the
            rule then may read ``c_<trace>``, the correction ``1 - decay**t``.
        reduce: ``"max"`` or ``"row_norm"``; see :class:`upgd.rules.vocabulary.Phase`.
        writes: What the rule returns, where that is neither the weight alone nor all.
        title: For figures.
        power: How many weights and gradients are multiplied with each other at most.
        period: The name of the hyperparameter at whose multiples ``due`` is 1.
        defaults: Hyperparameters with their defaults, with any names.

    Raises:
        ValueError: The rule cannot be executed; the message says why.

    Example:
        >>> from upgd import lab
        >>> def l2_start(w, g, start, lr, kappa):
        ...     return w - lr * (g + kappa * (w - start))
        >>> lab.method("l2-start", l2_start, states={"start": "weight"}, lr=0.01, kappa=0.01).name
        'l2-start'
    """
    row = rule_row(
        name,
        rule,
        states=states,
        decays=decays,
        reduce=reduce,
        writes=writes,
        title=title,
        power=power,
        period=period,
        **defaults,
    )
    registry.register(row)
    return row


def layered_method(
    name: str,
    phases: Sequence[Phase],
    *,
    states: Mapping[str, str] | Sequence[str] = (),
    kept: Mapping[Place, Sequence[str]] | None = None,
    starts: Mapping[str, float] | None = None,
    recycle: Recycle | None = None,
    decays: Mapping[str, str] | None = None,
    power: int = 2,
    title: str | None = None,
    **defaults: float,
) -> Any:
    """A method whose rules also see layers, their inputs, units and the whole network.

    Each phase is a plain function with the place that it runs over. :mod:`upgd.rules.vocabulary`
    says what is read where, :func:`upgd.optim.custom_layered.layered_row` what the arguments are.

    Example:
        >>> from upgd import lab
        >>> def power(x):
        ...     return x**2
        >>> def nlms(w, g, power, lr):
        ...     return w - lr * g / (1 + power)
        >>> phases = [lab.Phase(power, over="inputs", sums=("power",)), lab.Phase(nlms, ("w",))]
        >>> lab.layered_method("nlms", phases, lr=0.5).name
        'nlms'
    """
    row = layered_row(
        name,
        phases,
        states=states,
        kept=kept,
        starts=starts,
        recycle=recycle,
        decays=decays,
        power=power,
        title=title,
        **defaults,
    )
    registry.register(row)
    return row


def optimizer(
    name: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    title: str | None = None,
    **defaults: Any,
) -> Any:
    """A method from any optimizer of PyTorch's kind; it runs on the eager engine.

    Args:
        name: What studies and the command line call it.
        optimizer: A subclass of ``torch.optim.Optimizer``, or a function of the parameters and of
            hyperparameters that makes one.
        title: For figures.
        defaults: Hyperparameters with their defaults; of a class, also those of its signature
            that are numbers.

    Raises:
        ValueError: It cannot be used; the message says why.
    """
    row = torch_row(name, optimizer, title=title, **defaults)
    registry.register(row)
    return row


def network(name: str, factory: Callable[..., nn.Module]) -> Any:
    """A network from a function or class that makes an ``nn.Module``.

    Args:
        name: What ``network=`` calls it.
        factory: Called without arguments, or with the inputs and the number of outputs.
    """
    return networks.register(name, factory)


def problem(name: str, data: Any, **settings: Any) -> Problem:
    """A problem from a stream of your own; see :func:`upgd.streams.make_problem`."""
    found = make_problem(name, data, **settings)
    register_problem(found)
    return found


# ---------------------------------------------------------------- what arguments stand for
def method_name(given: Any) -> str:
    """The name of a method: given, or that of a row or of an optimizer class."""
    if isinstance(given, str):
        return given.lower()
    if isinstance(getattr(given, "name", None), str):
        return str(given.name)
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return str(optimizer(_free_name(given), given).name)
    raise TypeError(
        f"a method is a name, an optimizer class or what lab.method() returns; got {given!r}"
    )


def _free_name(cls: type[torch.optim.Optimizer]) -> str:
    """A class's name in lower case, such as ``my-optimizer``; other than the package's own."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()
    try:
        built_in = not registry.get(name)[0].source
    except KeyError:
        return name
    return f"{cls.__module__.partition('.')[0]}-{name}" if built_in else name


def resolve_problem(given: Any) -> Problem:
    """A problem from its name, from itself, or from an ``.npz`` file with ``x`` and ``y``."""
    if isinstance(given, Problem):
        if PROBLEMS.get(given.name) is not given:
            register_problem(given)
        return given
    if isinstance(given, os.PathLike) or str(given).endswith(".npz"):
        path = Path(given)
        return problem(path.stem, path)
    if not isinstance(given, str):
        raise TypeError(
            f"a problem is a name, an .npz file or what lab.problem() returns; got {given!r}"
        )
    return get(given)


def resolve_network(given: Any) -> str:
    """The name of a network: given, or that of a function or class that makes one."""
    if isinstance(given, str):
        return given
    if isinstance(getattr(given, "name", None), str):
        return str(given.name)
    return str(network(getattr(given, "__name__", "network").strip("<>"), given).name)
