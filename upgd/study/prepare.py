"""From a specification to a run at its first step."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import Any

from upgd import networks
from upgd.engine import EagerRun, Setting
from upgd.ledger.canonical import NO_LAYERS as NO_LAYERS
from upgd.ledger.canonical import canonical
from upgd.ledger.errors import SpecError
from upgd.ledger.spec import SOURCES, RunSpec, Scalar
from upgd.metrics import DIAGNOSTICS
from upgd.optim.registry import get as get_method
from upgd.optim.roles import role
from upgd.rules.vocabulary import ROLES, split_roles
from upgd.streams import DataError, Problem
from upgd.streams import get as get_problem
from upgd.streams.problems import PROBLEMS


def prepare(
    spec: RunSpec, data_dir: str | os.PathLike[str] | None = None, device: str = "cpu"
) -> EagerRun:
    """The run that `spec` describes, at its first step.

    Raises:
        SpecError: The specification does not fit the problem or the method.

    Example:
        >>> from upgd.ledger import RunSpec
        >>> from upgd.study.prepare import prepare
        >>> spec = RunSpec("label-permuted-digits", "upgd", {"lr": 0.01}, seed=0, steps=10)
        >>> prepare(spec).advance(10)
    """
    problem, setting = plan(spec)
    try:
        stream = problem.make(spec.seed, data_dir)
        if hasattr(stream, "needed"):  # it may have fewer samples
            stream.needed = spec.steps * setting.batch
        return EagerRun(stream, partial(networks.build_for, problem), setting, device)
    except DataError:
        raise
    except (ValueError, RuntimeError) as error:  # PyTorch has the latter for what is too large
        raise SpecError(f"{spec.label()}: {str(error).splitlines()[0]}") from error


def plan(spec: RunSpec) -> tuple[Problem, Setting]:
    """The problem and the setting that a specification describes.

    Raises:
        SpecError: The specification does not fit the problem or the method.
    """
    options = dict(spec.options)
    if reason := why_changed(spec):
        raise SpecError(f"{spec.label()}: {reason}")
    try:
        problem = _problem(spec, options)
        row, _ = get_method(spec.method)
        setting = Setting(
            spec.method,
            arguments(spec),
            spec.seed,
            window=_whole(options, "window", problem.window),
            batch=_whole(options, "batch", 1),
            restart=bool(_whole(options, "restart", 0)),
            held_out=_whole(options, "held_out", 0),
            stride=_whole(options, "stride", 0),
        )
        if options.pop("diagnostics", DIAGNOSTICS) != DIAGNOSTICS:
            raise ValueError(f"diagnostics are of version {DIAGNOSTICS} here; leave that out")
        networks.check(problem, setting.batch)
    except (ValueError, KeyError) as error:  # no such problem or method
        raise SpecError(str(error.args[0])) from error
    if options:
        raise SpecError(f"unknown option {', '.join(sorted(options))} in {spec.label()}")
    if "gates" in row.needs and len(problem.network) == 2 and type(problem.network) is tuple:
        raise SpecError(f"{spec.method} needs hidden layers; {spec.label()} has none")
    if type(problem.network) is tuple:
        count = len(problem.network) - 1
        missing = split_roles(spec.hyper)[1].keys() - {role(i, count) for i in range(count)}
        if missing:
            which = " and no ".join(f"{each} layer" for each in sorted(missing))
            raise SpecError(f"{spec.label()}: its network has no {which}")
    return problem, setting


def why_changed(spec: RunSpec) -> str:
    """Why the code that is registered here is not the run's; empty if it is.

    A run is done with the code that it was added with, or not at all.
    """
    here = canonical(spec.problem, spec.method, {}, spec.options).sources
    for what in SOURCES:
        then, now = spec.sources.get(what, ""), here.get(what, "")
        if then == now:
            continue
        named = {"method": spec.method, "problem": spec.problem, "network": _network_name(spec)}
        if not now:
            return (
                f"{what} {named[what]} (source {then[:8]}) is not known here; name the file or "
                "package that defines it with --use"
            )
        return (
            f"{what} {named[what]} has changed since the run was added (source "
            f"{then[:8] or 'unknown'}, now {now[:8]}); run it again as a new run, or load the old "
            "code with --use"
        )
    return ""


def _network_name(spec: RunSpec) -> str:
    problem = PROBLEMS.get(spec.problem)
    return str(spec.options.get("network") or (problem.network if problem else "of the problem"))


def _whole(options: dict[str, Scalar], name: str, default: int) -> int:
    value = options.pop(name, default)
    if not isinstance(value, int):
        raise SpecError(f"{name} must be a whole number, got {value!r}")
    return value


def _flag(options: dict[str, Scalar], name: str, default: bool) -> bool:
    value = options.pop(name, default)
    if not isinstance(value, bool):
        raise SpecError(f"{name} is true or false, got {value!r}")
    return value


def _problem(spec: RunSpec, options: dict[str, Scalar]) -> Problem:
    """The problem, with the tasks and the network that `options` ask for and which it takes out."""
    problem = get_problem(spec.problem)
    length, hidden = options.pop("task_length", None), options.pop("hidden", None)
    network = options.pop("network", None)
    problem = replace(
        problem,
        layer_norm=_flag(options, "layer_norm", problem.layer_norm),
        input_norm=_flag(options, "input_norm", problem.input_norm),
    )
    if length is not None:
        if problem.task_length is None:
            raise SpecError(f"{spec.problem} has no tasks; leave task_length out")
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise SpecError(f"task_length must be a whole number from 1 on, got {length!r}")
        window = problem.window // problem.task_length * length  # a point stays as many tasks
        problem = replace(problem, task_length=length, window=window)
    if hidden is not None and network is not None:
        raise SpecError(f"hidden={hidden} and network={network} exclude each other; leave one out")
    if network is not None:
        return problem.with_network(networks.get(str(network)).name)
    if hidden is not None:
        if isinstance(problem.network, str):
            kind = "a convolutional" if problem.network == "cnn" else "its own"
            raise SpecError(f"{spec.problem} has {kind} network; leave hidden out")
        sizes = (problem.network[0], *units(hidden), problem.network[-1])
        problem = replace(problem, network=sizes)
    return problem


def units(hidden: Scalar) -> list[int]:
    """The units of each hidden layer."""
    if hidden == NO_LAYERS:
        return []
    if not isinstance(hidden, str) or not re.fullmatch(
        r"[1-9][0-9]{0,5}(-[1-9][0-9]{0,5})*", hidden
    ):
        raise SpecError(
            f"hidden is the units of each hidden layer, such as 64-32, or {NO_LAYERS}; "
            f"got {hidden!r}"
        )
    return [int(part) for part in hidden.split("-")]


def arguments(spec: RunSpec) -> dict[str, Any]:
    """The optimizer's arguments: ``beta1`` and ``beta2`` are its ``betas``."""
    hyper: dict[str, Any] = dict(spec.hyper)
    _, defaults = get_method(spec.method)
    betas = defaults.get("betas", (None, None))
    for whose in ("", *(f"{each}." for each in ROLES)):
        first, second = f"{whose}beta1", f"{whose}beta2"
        if first in hyper or second in hyper:
            found = (hyper.pop(first, betas[0]), hyper.pop(second, betas[1]))
            hyper[f"{whose}betas"] = found
        betas = hyper.get("betas", betas)  # those of a role that has none
    return hyper
