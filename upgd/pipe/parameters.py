"""Parameters of learners as text: ``horizon=500``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from upgd.optim.registry import get, scalars
from upgd.pipe.rows import did_you_mean
from upgd.stream.learner import StreamLearner
from upgd.stream.members import OPTIMIZER

_ELSEWHERE = {
    "network": "give --network",
    "snapshot": "give --state",
    "snapshot_every": "give --save-every",
    "batch_size": "a stream is learned sample by sample",
    "epochs": "a stream is learned once",
    "warm_start": "a learner with --state always goes on",
}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parse_parameters(settings: Iterable[str]) -> dict[str, Any]:
    """Parameters of a learner, or hyperparameters of its optimizer, from ``name=value``.

    Raises:
        ValueError: A name is unknown, is given twice, or its value cannot be read.

    >>> parse_parameters(["horizon=500", "drift=adwin", "lr=0.02"])
    {'horizon': 500.0, 'drift': 'adwin', 'hyper': {'lr': 0.02}}
    """
    known = {
        name: each.default
        for name, each in inspect.signature(StreamLearner.__init__).parameters.items()
        if name != "self"
    }
    given: dict[str, str] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name or not text:
            raise ValueError(f"--set takes name=value, such as horizon=500; got {setting!r}")
        if name in given:
            raise ValueError(f"--set gives {name} twice, {given[name]!r} and {text!r}")
        given[name] = text
    found: dict[str, Any] = {}
    hyper: dict[str, float] = {}
    optimizer = given.get("optimizer", OPTIMIZER)
    try:
        get(optimizer)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    for name, text in given.items():
        if name in _ELSEWHERE:
            raise ValueError(f"--set cannot give {name}: {_ELSEWHERE[name]}")
        if name in known:
            found[name] = _value(name, text, known[name])
        elif name in scalars(optimizer):
            hyper[name] = _number(name, text)
        else:
            names = [each for each in known if each not in _ELSEWHERE and each != "hyper"]
            names += scalars(optimizer)
            raise ValueError(
                f"there is no parameter {name!r}; {did_you_mean(name, names)}"
                f"there are {', '.join(names)}"
            )
    return {**found, "hyper": _betas(hyper, optimizer)} if hyper else found


def _betas(hyper: dict[str, float], optimizer: str) -> dict[str, Any]:
    """Hyperparameters with ``beta1`` and ``beta2`` as the ``betas`` that optimizers take."""
    names = [name for name in ("beta1", "beta2") if name in hyper]
    if not names:
        return dict(hyper)
    first, second = get(optimizer)[1]["betas"]
    rest: dict[str, Any] = {name: value for name, value in hyper.items() if name not in names}
    return {**rest, "betas": [hyper.get("beta1", first), hyper.get("beta2", second)]}


def _value(name: str, text: str, default: Any) -> Any:
    if name == "hyper":
        raise ValueError("--set cannot give hyper; give its parts, such as lr=0.01")
    if isinstance(default, bool):
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(f"{name} is true or false, got {text!r}")
        return text.lower() in _TRUE
    if isinstance(default, tuple):
        return tuple(text.split(","))
    if name == "horizon":
        return _number(name, text)
    if isinstance(default, int):
        number = _number(name, text)
        if not number.is_integer():
            raise ValueError(f"{name} is a whole number, got {text!r}")
        return int(number)
    return text


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is a number, got {text!r}") from None
