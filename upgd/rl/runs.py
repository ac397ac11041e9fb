"""Runs of PPO as specifications: ``ppo/Hopper-v5`` is a problem like any other.

A specification's options are PPO's settings that differ from the defaults, and the window over
which metrics are means. Nothing here needs gymnasium.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from upgd.engine.dense import Learner
from upgd.ledger.canonical import Usual
from upgd.ledger.errors import SpecError
from upgd.ledger.spec import RunSpec, Scalar
from upgd.rl.environments import RLError
from upgd.rl.ppo import DEFAULTS, Settings, learner
from upgd.study.prepare import arguments

PREFIX = "ppo/"  # before the environment's name, in a problem's
ITERATIONS = 10  # of a window, unless an option says otherwise: 20 480 steps with PPO's defaults


@dataclass(frozen=True)
class AgentPlan:
    """A specification's environment, PPO's settings, and window and steps in whole iterations."""

    environment: str
    settings: Settings
    window: int
    steps: int

    @property
    def iterations(self) -> int:
        """Of the whole run."""
        return self.steps // self.settings.steps


def plan(spec: RunSpec) -> AgentPlan:
    """What a specification describes; raises :class:`SpecError` if it does not fit."""
    if not spec.problem.startswith(PREFIX):
        raise SpecError(f"{spec.problem} is no environment of reinforcement learning")
    options = dict(spec.options)
    window = options.pop("window", None)
    known = {field.name: field for field in fields(Settings)}
    for name in options:
        if name not in known:
            raise SpecError(f"unknown option {name} in {spec.label()}")
    try:
        settings = Settings(**{name: _value(name, value) for name, value in options.items()})
    except (RLError, ValueError) as error:
        raise SpecError(str(error)) from error
    if window is None:
        window = ITERATIONS * settings.steps
    if not isinstance(window, int) or window < 1 or window % settings.steps:
        rule = f"a window is so many whole iterations of {settings.steps} steps"
        raise SpecError(f"{rule}, got {window!r}")
    steps = spec.steps // settings.steps * settings.steps
    if not steps:
        raise SpecError(f"{spec.steps} steps are not one iteration of {settings.steps}")
    if steps < window:
        raise SpecError(
            f"{spec.steps} steps are less than one window of {window}, so nothing would be "
            "measured; give more --steps or a smaller --window"
        )
    return AgentPlan(spec.problem.removeprefix(PREFIX), settings, window, steps)


def agent(spec: RunSpec) -> Learner:
    """The optimizer and seed of a specification's agent; raises :class:`SpecError`."""
    try:
        return learner(spec.method, spec.seed, **arguments(spec))
    except (RLError, KeyError) as error:
        raise SpecError(str(error.args[0])) from error


def usual(options: Mapping[str, Scalar]) -> Usual:
    """The values of options and hyperparameters that a specification leaves out."""
    settings = {field.name: _plain(field.default) for field in fields(Settings)}
    steps = options.get("steps", settings["steps"])
    window = {"window": ITERATIONS * steps} if isinstance(steps, int) else {}
    return Usual({**settings, **window}, DEFAULTS)


def parse_settings(given: Iterable[str]) -> dict[str, Scalar]:
    """PPO's settings as people type them: ``gamma=0.995``, ``hidden=256-256``.

    Raises:
        RLError: There is no such setting, or its value is of another kind.
    """
    usual = {field.name: field.default for field in fields(Settings)}
    found: dict[str, Scalar] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in usual:
            rule = f"a setting of PPO is name=value with one of {', '.join(usual)}"
            raise RLError(f"{rule}; got {text!r}")
        found[name] = _parse(name, value, usual[name])
    return found


def _parse(name: str, text: str, usual: Any) -> Scalar:
    try:
        if isinstance(usual, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(usual, int):
            return int(text)
        if isinstance(usual, float):
            return float(text)
        return "-".join(str(int(part)) for part in text.split("-"))
    except (ValueError, KeyError):
        kind = {bool: "true or false", int: "a whole number", float: "a number"}
        wanted = kind.get(type(usual), "units such as 64-64")
        raise RLError(f"{name} is {wanted}, got {text!r}") from None


def _plain(value: Any) -> Scalar:
    return "-".join(map(str, value)) if isinstance(value, tuple) else value


def _value(name: str, value: Scalar) -> Any:
    """An option as :class:`Settings` has it."""
    if name != "hidden":
        usual = next(field.default for field in fields(Settings) if field.name == name)
        if isinstance(usual, float) and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not type(usual):
            raise SpecError(f"{name} is such as {usual!r}, got {value!r}")
        return value
    try:
        units = tuple(int(part) for part in str(value).split("-"))
    except ValueError:
        units = ()
    if not units or min(units) < 1:
        raise SpecError(f"hidden is the units of each hidden layer, such as 64-64; got {value!r}")
    return units
