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
    """A set and its result in a search.

    Attributes:
        hyper: The set.
        steps: Length of its longest runs.
        mean: Mean over these runs and seeds; None if a seed diverged.
        diverged: The number of diverged seeds.
    """

    hyper: Set
    steps: int
    mean: float | None
    diverged: int = 0


@dataclass(frozen=True)
class Found:
    """The best set of an arm on a problem, and how it was chosen.

    Attributes:
        method: A name of the registry.
        hyper: The set.
        options: Options of the arm, such as ``hidden``.
        metric: The metric compared.
        mean: Mean of the set over whole runs and seeds.
        low, high: Its 95% interval over seeds; None with one seed.
        seeds: The seeds.
        steps: Length of the deciding runs.
        sets: The number of sets tried.
        diverged: The number of sets with a diverged seed, which are excluded.
        runner_up: The second best at the same length, if there is one.
        printed: The result of the paper's set, if it prints one.
        rules: The version of the update rules.
        devices: Where the runs ran.
        stages: The number of sets in each stage, diverged ones included; empty in older files.
    """

    method: str
    hyper: Set
    metric: str
    mean: float
    low: float | None
    high: float | None
    seeds: tuple[int, ...]
    steps: int
    sets: int
    diverged: int
    runner_up: Tried | None = None
    printed: Tried | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: int = 0
    devices: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()


Sets = Mapping[str, Mapping[str, Found]]
"""By problem and arm."""


def read(path: str | os.PathLike[str] = FILE) -> dict[str, dict[str, Found]]:
    """The content of a file; empty if it does not exist.

    Raises:
        ValueError: It is not one of these files.
    """
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
    """Write sets into a file; keeps those of other problems and arms.

    Problems and arms are sorted, so that equal sets give equal files.
    """
    known = read(path)
    for problem, arms in found.items():
        known.setdefault(problem, {}).update(arms)
    tables = [
        _object([(arm, _lines(one)) for arm, one in sorted(arms.items())], 1)
        for _, arms in sorted(known.items())
    ]
    text = _object(list(zip(sorted(known), tables, strict=True)), 0)
    write_atomically(Path(path), f"{text}\n".encode())


def _lines(found: Found) -> str:
    """A line per attribute."""
    return _object([(k, json.dumps(v, ensure_ascii=False)) for k, v in asdict(found).items()], 2)


def _object(pairs: list[tuple[str, str]], depth: int) -> str:
    """JSON of names and values that are JSON already."""
    if not pairs:
        return "{}"
    space = " " * depth
    body = ",\n".join(f"{space} {json.dumps(name)}: {value}" for name, value in pairs)
    return f"{{\n{body}\n{space}}}"
