"""One form for every run: the method's own name, all hyperparameters, no option without effect.

The same run has the same key, however much of it is written out. What is not in the registries
stays as it is: a ledger with other people's methods can be read everywhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from upgd.metrics import DIAGNOSTICS
from upgd.networks import NETWORKS
from upgd.optim.registry import METHODS, scalars
from upgd.rules.vocabulary import ROLES, setting
from upgd.streams.problems import PROBLEMS, Problem
from upgd.text import pairs

Scalar = str | int | float | bool | None
NO_LAYERS = "none"  # what the option ``hidden`` is called for a network from inputs to outputs
KINDS = {"ppo/": "upgd.rl.study"}
"""By the prefix of a problem's name, the module whose ``KIND`` its runs are
(:mod:`upgd.study.kinds`), imported when such a run is met; all others are learners."""


class Usual(NamedTuple):
    """The defaults of a problem's runs."""

    options: Mapping[str, Scalar]  # those that can be left out, with the values that they then have
    hyper: Mapping[str, float] = {}  # defaults of hyperparameters, before those of the method
    # Of code that is not part of upgd, by what it is; empty texts for upgd's own.
    sources: Mapping[str, str] = {}


class Form(NamedTuple):
    """The canonical values of a run's fields."""

    method: str
    hyper: dict[str, float]
    options: dict[str, Scalar]
    sources: dict[str, str]


def canonical(
    problem: str, method: str, hyper: Mapping[str, float], options: Mapping[str, Scalar]
) -> Form:
    """A run in canonical form; sources are known where the method and the problem are.

    Example:
        >>> form = canonical("label-permuted-digits", "SGD", {"lr": 0.1}, {"batch": 1, "window": 5})
        >>> form.method, form.hyper, form.options
        ('sgdw', {'lr': 0.1, 'weight_decay': 0.0}, {'window': 5})
    """
    usual = usual_of(problem, options)
    sources = {} if usual is None else dict(usual.sources)
    known = {} if usual is None else usual.options
    left = {n: value for n, value in options.items() if n not in known or known[n] != value}
    filled = dict(hyper)
    name = proper_name(method)
    row = METHODS.get(row_name(name))
    if row is not None:
        defaults = scalars(name)
        own = {} if usual is None else {k: v for k, v in usual.hyper.items() if k in defaults}
        filled = _without_copies({**defaults, **own, **hyper})
        sources["method"] = row.source
    if "stride" in left and "stride" in known:
        left.setdefault("diagnostics", DIAGNOSTICS)
    elif "stride" in known:  # it has none
        left.pop("diagnostics", None)
    return Form(method if row is None else row.name, filled, left, sources)


def _without_copies(hyper: Mapping[str, float]) -> dict[str, float]:
    """Hyperparameters without those of a role that say what those of all layers say.

    Example:
        >>> _without_copies({"lr": 0.1, "head.lr": 0.1, "hidden.lr": 0.2})
        {'lr': 0.1, 'hidden.lr': 0.2}
    """
    said = {name: hyper.get(name.partition(".")[2]) for name in hyper}
    return {name: value for name, value in hyper.items() if value != said[name]}


def usual_of(problem: str, options: Mapping[str, Scalar]) -> Usual | None:
    """The defaults of a problem's runs with these options; None for an unknown problem."""
    for prefix, module in KINDS.items():
        if problem.startswith(prefix):
            found: Usual = importlib.import_module(module).KIND.usual(problem, options)
            return found
    row = PROBLEMS.get(problem)
    return None if row is None else _usual_of_stream(row, options)


def _usual_of_stream(problem: Problem, options: Mapping[str, Scalar]) -> Usual:
    usual: dict[str, Scalar] = {"batch": 1, "restart": False, "held_out": 0, "stride": 0}
    usual |= {"layer_norm": problem.layer_norm, "input_norm": problem.input_norm}
    usual["window"] = problem.window
    length = options.get("task_length", problem.task_length)
    if problem.task_length is not None:
        usual["task_length"] = problem.task_length
        if isinstance(length, int):
            usual["window"] = problem.window // problem.task_length * length
    network: Any = problem.network
    if isinstance(network, str):
        usual["network"] = network
    elif isinstance(network, tuple):
        usual["hidden"] = "-".join(map(str, network[1:-1])) or NO_LAYERS
    named = NETWORKS.get(str(options.get("network", network)))
    return Usual(
        usual, sources={"problem": problem.source, "network": named.source if named else ""}
    )


# ------------------------------------------------------------------------------------- names
def proper_name(name: str) -> str:
    """A method's own name; an alias that changes defaults is a name of its own.

    Example:
        >>> proper_name("AdaUPGD"), proper_name("SGD"), proper_name("Theirs")
        ('ada-upgd', 'sgd', 'Theirs')
    """
    wanted = name.lower()
    if wanted in METHODS:
        return wanted
    for row in METHODS.values():
        if wanted in row.aliases:
            return wanted if row.aliases[wanted] else row.name
    return name


def row_name(name: str) -> str:
    """The name of the registry's row that a proper name stands for: "sgdw" for "sgd"."""
    if name in METHODS:
        return name
    return next((row.name for row in METHODS.values() if name in row.aliases), name)


def is_called(name: str, shown: str) -> bool:
    """Whether a run that is shown under a name is one of those that another name stands for.

    The name of a row stands for all its runs, an alias that changes defaults for those it means.

    Example:
        >>> is_called("sgdw", "sgd"), is_called("SGD", "sgd"), is_called("sgd", "sgdw")
        (True, True, False)
    """
    return proper_name(name) in (shown, row_name(shown))


def meaning(name: str) -> str:
    """What an alias that changes defaults stands for; empty for other names.

    Example:
        >>> meaning("UPGD-W"), meaning("upgd")
        ('upgd with weight_decay=0.001', '')
    """
    alias = proper_name(name)
    changed = next((r.aliases[alias] for r in METHODS.values() if alias in r.aliases), None)
    return f"{row_name(alias)} with {pairs(changed)}" if changed else ""


def display_name(method: str, hyper: Mapping[str, float]) -> str:
    """What people call a method with these hyperparameters: the alias that means them, if any.

    An alias that sets a hyperparameter to 0 means all sets in which it is 0; one that sets it to
    something larger, all in which it is larger; in all layers, or in those that it names. One whose
    betas are equal means all sets with equal ones.

    Example:
        >>> display_name("sgdw", {"weight_decay": 0.0}), display_name("upgd", {"weight_decay": 0.1})
        ('sgd', 'upgd-w')
        >>> display_name("sgdw", {"weight_decay": 0.1}), display_name("theirs", {})
        ('sgdw', 'theirs')
        >>> display_name("sgdw", {"weight_decay": 0.0, "head.weight_decay": 0.1})
        'sgd-head-decay'
    """
    row = METHODS.get(method)
    for alias, changed in row.aliases.items() if row is not None else ():
        if changed and all(_means(hyper, name, changed) for name in changed):
            return alias
    return method


def _means(hyper: Mapping[str, float], name: str, changed: Mapping[str, Any]) -> bool:
    """Whether a hyperparameter is 0 where an alias makes it 0, and larger where that is larger."""
    if name == "betas":
        first, second = changed[name]
        here = hyper.get("beta1"), hyper.get("beta2")
        return None not in here and (here[0] == here[1]) == (first == second)
    if "." in name:
        return bool((setting(hyper, name) > 0) == (changed[name] > 0))
    others = (f"{role}.{name}" for role in ROLES if f"{role}.{name}" not in changed)
    return name in hyper and all(
        (setting(hyper, key) > 0) == (changed[name] > 0) for key in (name, *others)
    )
