"""Hyperparameter sets that were searched here.

``found.json`` is written by ``upgd search --save`` from a study's ledger; do not edit it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from upgd.ledger.files import write_atomically
from upgd.paper.sets import Set

FILE = Path(__file__).with_name("found.json")


@dataclass(frozen=True)
class Tried:
    """A set and its result in a search."""

    hyper: Set
    steps: int  # length of its longest runs
    mean: float | None  # mean over these runs and seeds; None if a seed diverged
    diverged: int = 0


@dataclass(frozen=True)
class Found:
    """The best set of an arm on a problem, and how it was chosen."""

    method: str
    hyper: Set
    metric: str
    mean: float  # mean of the set over whole runs and seeds
    low: float | None  # of the 95% interval over seeds; None with fewer than three
    high: float | None
    seeds: tuple[int, ...]
    steps: int  # length of the deciding runs
    sets: int  # the number of sets tried
    diverged: int  # the number of sets with a diverged seed, which are excluded
    runner_up: Tried | None = None  # the second best at the same length, if there is one
    printed: Tried | None = None  # the result of the paper's set, if it prints one
    options: Mapping[str, Any] = field(default_factory=dict)  # such as ``hidden``
    rules: int = 0  # the version of the update rules
    devices: tuple[str, ...] = ()  # where the runs ran
    stages: tuple[int, ...] = ()  # sets in each stage with diverged ones; empty in older files


Sets = Mapping[str, Mapping[str, Found]]
"""By problem and arm."""


def read(path: str | os.PathLike[str] = FILE) -> dict[str, dict[str, Found]]:
    """The content of a file, empty if it does not exist; ValueError if it is not one of these."""
    file = Path(path)
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if not text:
        return {}
    try:
        content = json.loads(text)
        return {
            problem: {arm: _found(facts) for arm, facts in arms.items()}
            for problem, arms in content.items()
        }
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{file} has no sets that were found: {error}") from None


def _found(facts: Mapping[str, Any]) -> Found:
    tuples = {name: tuple(facts.get(name, ())) for name in ("seeds", "devices", "stages")}
    tried = {
        name: None if facts[name] is None else Tried(**facts[name])
        for name in ("runner_up", "printed")
    }
    return Found(**{**facts, **tuples, **tried})


def write(found: Sets, path: str | os.PathLike[str]) -> None:
    """Write sets into a file, sorted; keeps those of other problems and arms."""
    known = read(path)
    for problem, arms in found.items():
        known.setdefault(problem, {}).update(arms)
    content = {p: {a: asdict(x) for a, x in sorted(known[p].items())} for p in sorted(known)}
    write_atomically(path, f"{_object(content)}\n".encode())


def _object(value: Any, depth: int = 0) -> str:
    """JSON with a line per attribute of a set."""
    if depth > 2 or not value:
        return json.dumps(value, ensure_ascii=False)
    space, pairs = " " * depth, value.items()
    body = ",\n".join(f"{space} {json.dumps(k)}: {_object(v, depth + 1)}" for k, v in pairs)
    return f"{{\n{body}\n{space}}}"
