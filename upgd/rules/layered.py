"""What phases of layered methods may read, and whether a method keeps to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from upgd.rules.symbols import Symbol
from upgd.rules.vocabulary import Method, Phase, Place, as_numbers

OF_LAYERS = ("head", "first", "bound")
"""Constants of a layer."""
_BESIDES: dict[Place, tuple[str, ...]] = {
    "inputs": ("x",),
    "units": ("d",),
    "features": ("x", "w_in", "w_out"),
    "layers": (),
    "network": (),
    "weights": ("w", "g", "noise", "x", "d"),
    "biases": ("w", "g", "noise", "x", "d"),
}
_CONTAINED: dict[Place, tuple[Place, ...]] = {
    "inputs": ("layers", "network"),
    "units": ("layers", "network"),
    "features": ("layers", "network"),
    "layers": ("network",),
    "network": (),
    "weights": ("inputs", "units", "layers", "network"),
    "biases": ("units", "layers", "network"),
}

_WORDS = frozenset({"t", *OF_LAYERS, *(name for names in _BESIDES.values() for name in names)})


def readable(method: Method, place: Place) -> list[str]:
    """The names that a phase over `place` may read."""
    found = [*_BESIDES[place], *method.states_of(place)]
    for outer in _CONTAINED[place]:
        found += method.states_of(outer)
    if place in ("weights", "biases"):
        found += [f"c_{state}" for state in method.decays]
    if place != "network":
        found += OF_LAYERS
    return [*found, "t", *as_numbers(dict.fromkeys(method.hyper, (0, 0)))]


def check(method: Method) -> None:
    """Raise ValueError with the reason unless every executor can run this layered method."""
    names = [n for place in _BESIDES if place != "biases" for n in method.states_of(place)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is the name of two states")
        if name in _WORDS or name in as_numbers(dict.fromkeys(method.hyper, (0, 0))):
            raise ValueError(f"{name!r} is the name of a state, and stands for something else")
    sums = [name for phase in method.phases for name in phase.sums]
    for name in sums:
        if sums.count(name) > 1:
            raise ValueError(f"two phases sum up {name!r}; give each sum a name of its own")
    for state, decay in method.decays.items():
        if state not in method.states:
            raise ValueError(f"decays: {state!r} is no state of weights")
        if decay not in as_numbers(dict.fromkeys(method.hyper, (0, 0))):
            raise ValueError(f"decays: {decay!r} is no hyperparameter")
    if method.power < 2:
        raise ValueError(f"power is 2 at least, got {method.power}")
    if not any("w" in phase.writes for phase in method.phases):
        raise ValueError("no phase writes w")
    for phase in method.phases:
        _check_phase(method, phase)
    _check_recycle(method)


def _check_phase(method: Method, phase: Phase) -> None:
    known, called = readable(method, phase.over), _called(phase.fn)
    for name in phase.reads:
        if name not in known:
            raise ValueError(
                f"{called} runs over {phase.over} and reads {name!r}; it may read "
                f"{', '.join(known)}"
            )
    writable = [*method.states_of(phase.over), *(["w"] * (phase.over in ("weights", "biases")))]
    for name in phase.writes:
        if name not in writable:
            raise ValueError(f"{called} writes {name!r}; over {phase.over} there are {writable}")
    if phase.reduce is not None:
        raise ValueError(f"{called} has reduce={phase.reduce!r}; layered methods have sums instead")
    inputs = [name for name in phase.reads if name in method.states_of("inputs")]
    if inputs and phase.over == "weights" and all(p.over != "biases" for p in method.phases):
        raise ValueError(
            f"{called} reads {inputs[0]!r} of inputs, which biases do not have; give them a phase "
            "of their own, over biases"
        )
    if phase.sums and phase.over in ("features", "network"):
        raise ValueError(f"{called} sums up over {phase.over}, which nothing contains")
    numbers = as_numbers(dict.fromkeys(method.hyper, (0, 0)))
    results = phase.fn(*[Symbol("input", n, is_list=n not in numbers) for n in phase.reads])
    count = len(results) if isinstance(results, tuple) else 1
    if count != len(phase.writes) + len(phase.sums):
        named = ", ".join((*phase.writes, *phase.sums))
        raise ValueError(f"{called} returns {count} values; written or summed are {named}")


def _check_recycle(method: Method) -> None:
    rule = method.recycle
    if rule is None:
        return
    if (rule.share is None) == (rule.threshold is None):
        raise ValueError("Recycle: give either share or threshold")
    for name in (rule.score, rule.average):
        if name is not None and name not in method.states_of("features"):
            raise ValueError(f"Recycle: {name!r} is no state of features")
    for name in (rule.share, rule.threshold, rule.mature, rule.every):
        if name is not None and name not in method.hyper:
            raise ValueError(f"Recycle: {name!r} is no hyperparameter")
    if any("noise" in phase.reads for phase in method.phases):
        raise ValueError("Recycle: fresh weights take the noise, so no phase may read it")


def _called(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", fn))
