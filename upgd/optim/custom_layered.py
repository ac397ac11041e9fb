"""A layered method from plain functions: what a user writes becomes a row of the registry."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from upgd.kernels.layered import phase_function
from upgd.optim.custom import check_sizes, optimizer_class
from upgd.optim.layered import LACKS, LayerOptimizer
from upgd.optim.registry import Row
from upgd.rules.layered import check
from upgd.rules.vocabulary import Method, Phase, Place, Recycle


def layered_row(
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
    **defaults: Any,
) -> Row:
    """The layered method called `name`; :mod:`upgd.rules.vocabulary` says what phases are.

    Args:
        name: On the command line and in results: lower-case letters, digits and ``-``.
        phases: Run in order each step.
        states: Kept per weight: names that start at zero; or a mapping with ``"weight"`` for those
            that start as a copy of the weight.
        kept: States at other places, by place.
        starts: Values at which these begin, if not zero.
        recycle: Which hidden units are re-initialised, if any.
        decays: For a state per weight, the hyperparameter by which it decays; phases over weights
            and biases then read its bias correction as ``c_<state>``.
        power: How many weights, inputs and derivatives are multiplied with each other at most.
        title: In tables and figures; by default `name`.
        defaults: Its hyperparameters; ``lr`` must be among them.

    Raises:
        ValueError: In one line, what is wrong.

    Example:
        >>> from upgd.rules.vocabulary import Phase
        >>> def size(x):
        ...     return x**2
        >>> def normalised(w, g, power, lr):
        ...     return w - lr * g / (1 + power)
        >>> phases = [Phase(size, over="inputs", sums=("power",)), Phase(normalised, writes=("w",))]
        >>> layered_row("normalised-lms", phases, lr=0.5).optimizer.__name__
        'NormalisedLms'
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", name):
        raise ValueError(f"a method's name is lower-case letters, digits and '-'; got {name!r}")
    if "lr" not in defaults:
        raise ValueError(f"{name}: no hyperparameter is called lr, which schedulers look for")
    begin = states if isinstance(states, Mapping) else dict.fromkeys(states, "zero")
    copies = [state for state, start in begin.items() if start == "weight"]
    method = Method(
        hyper=tuple(defaults),
        phases=tuple(phases),
        states=tuple(states),
        decays=dict(decays or {}),
        starts_as_weight=frozenset(copies),
        kept={place: tuple(names) for place, names in (kept or {}).items()},
        starts=dict(starts or {}),
        recycle=recycle,
        power=power,
    )
    try:
        check(method)
        check_sizes(method)
        for hyperparameter in method.hyperparameters.values():
            hyperparameter.check(name, defaults[hyperparameter.name])
    except (TypeError, ValueError) as wrong:
        raise ValueError(f"{name}: {wrong}") from None
    if not method.layered:
        raise ValueError(f"{name}: no phase sees layers; use lab.method")
    cls = optimizer_class(name, method, defaults, LayerOptimizer)
    return Row(name, title or name, cls, method, unsupported=LACKS, source=_digest(method))


def _digest(method: Method) -> str:
    """16 hex digits of what a method computes: not of comments, layout or default values."""
    phases = method.phases
    facts = {
        "phases": [phase_function(method, number, "torch") for number in range(len(phases))],
        "places": [(phase.over, phase.writes, phase.sums) for phase in phases],
        "states": sorted(method.states),
        "starts": [sorted(method.starts_as_weight), sorted(method.starts.items())],
        "kept": sorted((place, sorted(names)) for place, names in method.kept.items()),
        "recycle": method.recycle and asdict(method.recycle),
        "hyper": sorted(method.hyper),
        "decays": sorted(method.decays.items()),
        "power": method.power,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
