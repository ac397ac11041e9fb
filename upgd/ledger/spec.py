"""The specification of a run: everything that determines its result, and its key."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeAlias

from upgd.ledger.canonical import canonical, display_name, proper_name
from upgd.ledger.errors import SpecError
from upgd.rules.vocabulary import ROLES

RULES_VERSION = 3
"""The version of the update rules and of the randomness; raised whenever results change.

Since version 3, a weight without utility takes the whole step. Runs of version 2 are the same runs
with converted hyperparameters (:func:`upgd.ledger.old_specs.whole_step_json`).
"""

Scalar: TypeAlias = str | int | float | bool | None  # what JSON can hold without nesting

LIMIT = 2**63  # what SQLite's integers hold
SOURCES = ("method", "problem", "network")  # what may be code that is not part of upgd
MEASURING = frozenset({"stride", "diagnostics", "held_out"})
"""Options that change only what is measured; see :data:`upgd.metrics.DIAGNOSTICS`."""


@dataclass(frozen=True, eq=False)
class RunSpec:
    """One run: the same specification has the same result on the same engine and device.

    Values have one form: hyperparameters are floats sorted by name, -0.0 is 0.0, and an option that
    is a whole number is an int. A method of the registry has its own name and all of its
    hyperparameters, and options that change nothing are left out (:mod:`upgd.ledger.canonical`).
    Specifications are equal where their JSON is.

    Raises:
        SpecError: A value has the wrong type or is out of its range.

    >>> spec = RunSpec("digits", "SGD", {"lr": 1}, seed=3, steps=500)
    >>> print(spec.label())
    digits sgd lr=1.0 weight_decay=0.0 seed=3 steps=500
    >>> spec == RunSpec("digits", "sgdw", {"weight_decay": 0, "lr": 1.0}, seed=3, steps=500)
    True
    >>> spec.key == RunSpec.from_json(spec.to_json()).key
    True
    """

    problem: str  # name of the stream, such as ``"input-permuted-mnist"``
    method: str  # name of the method, such as ``"upgd"``, or an alias
    # The method's hyperparameters, or some of them, and those of one role's layers, such as
    # ``head.weight_decay``; ``betas`` may be given as a pair.
    hyper: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0  # from 0 to 2⁶³ - 1
    steps: int = 1  # how many samples (or batches) the learner sees; at least 1
    # Anything else that changes the result, such as the batch size.
    options: Mapping[str, Scalar] = field(default_factory=dict)
    rules: int = RULES_VERSION  # the rules and randomness that the run was specified for
    # Digests of a method, problem or network that is not part of upgd, where registered; given
    # ones are kept for names that are not.
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        checked = _checked(given | {"hyper": _without_pair(given["hyper"])})
        form = canonical(*(checked[name] for name in ("problem", "method", "hyper", "options")))
        sources = {**checked["sources"], **form.sources}
        self._fill(
            checked
            | {
                "method": form.method,
                "hyper": _sorted(form.hyper),
                "options": _sorted(form.options),
                "sources": _sorted({what: digest for what, digest in sources.items() if digest}),
            }
        )

    def _fill(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def _json(self) -> str:
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content.update({name: dict(content[name]) for name in ("hyper", "options", "sources")})
        if not self.sources:
            del content["sources"]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @cached_property
    def name(self) -> str:
        """The alias that the hyperparameters match, such as "sgd"; else the method."""
        return display_name(self.method, self.hyper)

    def is_called(self, name: str) -> bool:
        """Whether a name is that of the method, or an alias that the hyperparameters match."""
        return proper_name(name) in (self.method, self.name)

    @cached_property
    def key(self) -> str:
        """32 hexadecimal digits: SHA-256 of the JSON, which is the same on every platform.

        JSON writes a float as the shortest decimal that reads back as the same double.
        """
        return hashlib.sha256(self._json.encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """The canonical JSON: ASCII, sorted keys, no spaces."""
        return self._json

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read what :meth:`to_json` wrote, without filling in defaults.

        Raises:
            SpecError: The text is not JSON, or not the JSON of a run.

        >>> RunSpec.from_json('{"problem": "digits", "methd": "sgd"}')
        Traceback (most recent call last):
        ...
        upgd.ledger.errors.SpecError: a run has no field 'methd'; its fields are problem, method, \
hyper, seed, steps, options, rules, sources
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
        spec = object.__new__(cls)
        spec._fill(_checked({**_DEFAULTS, **content}))
        return spec

    def label(self) -> str:
        """The run in one line for people."""
        numbers = (*self.hyper.items(), ("seed", self.seed), ("steps", self.steps))
        pairs = (*numbers, *self.options.items())
        return " ".join([self.problem, self.name, *(f"{name}={value}" for name, value in pairs)])

    def __eq__(self, other: object) -> bool:
        return self._json == other._json if isinstance(other, RunSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._json)

    def __reduce__(self) -> tuple[Callable[[str], RunSpec], tuple[str]]:
        return RunSpec.from_json, (self._json,)  # read-only mappings do not travel by themselves


_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"hyper": {}, "seed": 0, "steps": 1, "options": {}, "rules": RULES_VERSION, "sources": {}}
)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run's fields in one form each."""
    return {
        "problem": _name("problem", given["problem"]),
        "method": _name("method", given["method"]),
        "hyper": _mapping("hyper", given["hyper"], _hyperparameter),
        "seed": _integer("seed", given["seed"], 0),
        "steps": _integer("steps", given["steps"], 1),
        "options": _mapping("options", given["options"], _option),
        "rules": _integer("rules", given["rules"], 1),
        "sources": _mapping("sources", given["sources"], _source),
    }


def _without_pair(hyper: object) -> object:
    """Hyperparameters with ``beta1`` and ``beta2`` in place of a pair ``betas``, of roles too."""
    for whose in ("", *(f"{role}." for role in ROLES)):
        pair, first, second = (f"{whose}{name}" for name in ("betas", "beta1", "beta2"))
        if not isinstance(hyper, Mapping) or pair not in hyper:
            continue
        betas = hyper[pair]
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise SpecError(f"hyper {pair!r} must be two numbers, not {_show(betas)}")
        if first in hyper or second in hyper:
            raise SpecError(f"hyper has {pair} besides {first} or {second}; give one of them")
        rest = {name: value for name, value in hyper.items() if name != pair}
        hyper = {**rest, first: betas[0], second: betas[1]}
    return hyper


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


def _source(what: str, value: object) -> str:
    known = [f"sources {name!r}" for name in SOURCES]
    if what not in known:
        raise SpecError(f"a run has sources of its {', '.join(SOURCES)}; not {what}")
    return _name(what, value)


def _sorted(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(sorted(values.items())))


def _mapping(what: str, value: object, check: Callable[[str, object], Any]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{what} must map names to values, not {_show(value)}")
    names: Iterable[str] = sorted(_name(f"a name in {what}", name) for name in value)
    return MappingProxyType({name: check(f"{what} {name!r}", value[name]) for name in names})
