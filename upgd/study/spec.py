"""What a run is: everything that determines its result, and a key made of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeAlias

from upgd.study.errors import SpecError

RULES_VERSION = 2
"""The version of the update rules and of the randomness; raised whenever results change."""

Scalar: TypeAlias = str | int | float | bool | None
"""What JSON can hold without nesting."""

LIMIT = 2**63  # what SQLite's integers hold
MEASURING = frozenset({"stride", "held_out"})
"""Options that change what is measured and nothing else."""


@dataclass(frozen=True, eq=False)
class RunSpec:
    """One run: the same specification gives the same result on the same engine and device.

    Values are brought to one form: hyperparameters are floats sorted by name, -0.0 is 0.0, and an
    option that is a whole number is an int. Specifications are equal where their JSON is.

    Attributes:
        problem: Name of the stream, such as ``"input-permuted-mnist"``.
        method: Name of the method, such as ``"upgd"``.
        hyper: The method's hyperparameters.
        seed: From 0 to 2⁶³ - 1.
        steps: How many samples (or batches) the learner sees; at least 1.
        options: Anything else that changes the result, such as the batch size.
        rules: The rules and randomness that the run was specified for.

    Raises:
        SpecError: If a value has the wrong type or is out of its range.

    >>> spec = RunSpec("digits", "upgd", {"sigma": 0.001, "lr": 1}, seed=3, steps=500)
    >>> print(spec.label())
    digits upgd lr=1.0 sigma=0.001 seed=3 steps=500
    >>> spec == RunSpec("digits", "upgd", {"lr": 1.0, "sigma": 1e-3}, seed=3, steps=500)
    True
    >>> spec.key == RunSpec.from_json(spec.to_json()).key
    True
    """

    problem: str
    method: str
    hyper: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    steps: int = 1
    options: Mapping[str, Scalar] = field(default_factory=dict)
    rules: int = RULES_VERSION

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "problem": _name("problem", self.problem),
            "method": _name("method", self.method),
            "hyper": _mapping("hyper", self.hyper, _hyperparameter),
            "seed": _integer("seed", self.seed, 0),
            "steps": _integer("steps", self.steps, 1),
            "options": _mapping("options", self.options, _option),
            "rules": _integer("rules", self.rules, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @cached_property
    def _json(self) -> str:
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content.update(hyper=dict(self.hyper), options=dict(self.options))
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @cached_property
    def key(self) -> str:
        """32 hexadecimal digits: SHA-256 of the JSON, which holds the version of the rules.

        JSON writes a float as the shortest decimal that reads back as the same double. Each
        double has exactly one, on every platform, so the text is as exact as ``float.hex`` and
        people can read it.
        """
        return hashlib.sha256(self._json.encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """The canonical JSON: ASCII, sorted keys, no spaces.

        >>> RunSpec("digits", "sgd", {"lr": 0.1}).to_json()[:42]
        '{"hyper":{"lr":0.1},"method":"sgd","option'
        """
        return self._json

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read what :meth:`to_json` wrote, or a person.

        Raises:
            SpecError: If the text is not JSON, or not the JSON of a run.

        >>> RunSpec.from_json('{"problem": "digits", "methd": "sgd"}')
        Traceback (most recent call last):
        ...
        upgd.study.errors.SpecError: a run has no field 'methd'; its fields are problem, method, \
hyper, seed, steps, options, rules
        """
        try:
            content = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except SpecError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise SpecError(f"not the JSON of a run: {error}") from None
        if not isinstance(content, dict):
            raise SpecError(f"a run is a JSON object, not {_show(content)}")
        names = [f.name for f in fields(cls)]
        for name in content:
            if name not in names:
                have = ", ".join(names)
                raise SpecError(f"a run has no field {_show(name)}; its fields are {have}")
        for name in ("problem", "method"):
            if name not in content:
                raise SpecError(f"a run needs the field {name!r}")
        return cls(**content)

    def label(self) -> str:
        """The run in one line for people."""
        numbers = (*self.hyper.items(), ("seed", self.seed), ("steps", self.steps))
        pairs = (*numbers, *self.options.items())
        return " ".join([self.problem, self.method, *(f"{name}={value}" for name, value in pairs)])

    def __eq__(self, other: object) -> bool:
        return self._json == other._json if isinstance(other, RunSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._json)

    def __reduce__(self) -> tuple[Callable[[str], RunSpec], tuple[str]]:
        return RunSpec.from_json, (self._json,)  # read-only mappings do not travel by themselves


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise SpecError(f"the JSON of a run says {_show(twice)} twice")
    return content


def _no_constant(name: str) -> float:
    raise SpecError(f"the JSON of a run holds {name}; numbers must be finite")


def _name(what: str, value: object) -> str:
    good = isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()
    if not good or not isinstance(value, str) or value != value.strip():
        raise SpecError(
            f"{what} must be a name of 1 to 200 printable characters, not {_show(value)}"
        )
    return str(value)


def _integer(what: str, value: object, least: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise SpecError(f"{what} must be an integer, not {_show(value)}")
    if not least <= int(value) < LIMIT:
        raise SpecError(f"{what} must be from {least} to 2**63 - 1, not {_show(value)}")
    return int(value)


def _finite(what: str, value: Real) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise SpecError(f"{what} must be finite, not {_show(value)}")
    return number + 0.0  # -0.0 + 0.0 is 0.0


def _hyperparameter(what: str, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise SpecError(f"{what} must be a number, not {_show(value)}")
    return _finite(what, value)


def _option(what: str, value: object) -> Scalar:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SpecError(f"{what} is not valid text: {_show(value)}") from None
        return str(value)
    if isinstance(value, Integral):
        return _integer(what, value, -LIMIT)
    if isinstance(value, Real):
        number = _finite(what, value)
        return int(number) if number.is_integer() and abs(number) < LIMIT else number
    raise SpecError(f"{what} must be text, a number, true, false or null, not {_show(value)}")


def _mapping(what: str, value: object, check: Callable[[str, object], Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{what} must map names to values, not {_show(value)}")
    names: Iterable[str] = sorted(_name(f"a name in {what}", name) for name in value)
    return MappingProxyType({name: check(f"{what} {name!r}", value[name]) for name in names})
