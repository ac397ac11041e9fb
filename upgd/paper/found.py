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

from upgd.paper.sets import Set
from upgd.study.files import write_atomically

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
    low: float | None  # of the 95% interval over seeds; None with one seed
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
