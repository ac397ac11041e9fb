"""Parsing of arguments: numbers, seeds and hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

MOST_SEEDS = MOST_VALUES = 100_000


def whole(name: str, text: str) -> int:
    """A positive integer, such as 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (1 <= value < math.inf and value.is_integer()):
        raise ValueError(f"{name} must be a whole number from 1 on, such as 1e6; got {text!r}")
    return int(value)


def length(steps: str) -> int | None:
    """The value of ``--steps``; None if it is not given."""
    return whole("steps", steps) if steps else None


def seed_list(text: str) -> list[int]:
    """Seeds from their number (20), a list (3,5) or a range (0-4)."""
    seeds: Sequence[int] = ()
    with suppress(ValueError, OverflowError):
        if "," in text:
            seeds = [int(part) for part in text.split(",") if part]
        elif "-" in text:
            first, last = (int(part) for part in text.split("-"))
            seeds = range(first, last + 1)
        else:
            seeds = range(int(text))
        if len(seeds) > MOST_SEEDS:
            raise OverflowError
        if seeds and min(seeds) >= 0:
            return list(dict.fromkeys(seeds))
    raise ValueError(
        f"seeds are a number (20), a list (3,5) or a range (0-4), from 0 on and at most "
        f"{MOST_SEEDS}; got {text!r}"
    )


def all_methods(methods: list[str]) -> list[str]:
    """Method names, possibly separated by commas; ``paper`` means the ten of the main figures."""
    from upgd.paper.sets import METHODS as PAPER_METHODS

    given = [name.strip() for word in methods for name in word.split(",")]
    return [name for m in given for name in (PAPER_METHODS if m.lower() == "paper" else (m,))]


def check_once(option: str, settings: Iterable[str]) -> None:
    """Refuse two values of an option, such as ``lr=0.1``, with the same name."""
    seen: dict[str, str] = {}
    for setting in settings:
        name = setting.partition("=")[0]
        if name in seen:
            both = f"{seen[name]!r} and {setting!r}"
            raise ValueError(f"{option} gives {name} twice, {both}; give it once")
        seen[name] = setting


def numbers(settings: Iterable[str]) -> dict[str, float]:
    """Hyperparameters as ``--set`` gives them: ``lr=0.01``."""
    found = _parse(settings, "name=number, such as lr=0.01", 1)
    return {name: values[0] for name, values in found.items()}


def axes(settings: Iterable[str]) -> dict[str, list[float]]:
    """Values of hyperparameters as ``--set`` gives them: ``sigma=0.01,0.1``."""
    return _parse(settings, "name=number,number, such as sigma=0.01,0.1")


def _parse(settings: Iterable[str], form: str, most: int = MOST_VALUES) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    settings = list(settings)
    check_once("--set", settings)
    for setting in settings:
        name, _, text = setting.partition("=")
        values: list[float] = []
        with suppress(ValueError):
            values = [float(part) for part in text.split(",")]
        if not 1 <= len(values) <= most:
            raise ValueError(f"--set takes {form}; got {setting!r}")
        found[name] = values
    return found
