"""The sets that a sweep tries: the paper's grids or best sets, a file's, and what ``--set`` says.

A grid file is TOML. A table per method, or ``[all]`` for all of them, lists the values of its
hyperparameters::

    [all]
    lr = [0.1, 0.01]

    [upgd]
    sigma = [0.001, 0.01]
    weight_decay = 0.001

What the file does not name keeps its default. A method's own table comes before ``[all]``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from upgd.cli.arguments import check_once
from upgd.optim.registry import get as get_method
from upgd.optim.registry import scalars
from upgd.paper import grids
from upgd.paper.sets import best
from upgd.rules.vocabulary import Hyperparameter

Grid = dict[str, tuple[float, ...]]
ALL = "all"


def paper_grids(problem: str, methods: Collection[str]) -> dict[str, Grid]:
    """The paper's grid of each method."""
    return {method: grids.grid(problem, method) for method in methods}


def best_grids(problem: str, methods: Collection[str]) -> dict[str, Grid]:
    """Each method's printed best set, as a grid of one point."""
    return {m: _single({**scalars(m), **best(problem, get_method(m)[0].name)}) for m in methods}


def file_grids(path: Path, methods: Collection[str]) -> dict[str, Grid]:
    """The grids of a TOML file.

    Raises:
        ValueError: It is not TOML, or names what does not exist.
    """
    content = _read_toml(path)
    for name, table in content.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name!r} stands in no table; begin with [all] or [upgd]")
        if name != ALL:
            _check_method(path, name)
    found = {}
    used: set[str] = set()
    for method in methods:
        own = {
            k: v for name, table in content.items() if _same(name, method) for k, v in table.items()
        }
        have = scalars(method)
        unknown = sorted(own.keys() - have.keys())
        if unknown:
            raise ValueError(
                f"{path}: {method} has no hyperparameter {', '.join(unknown)}; "
                f"it has {', '.join(have)}"
            )
        common = {k: v for k, v in content.get(ALL, {}).items() if k in have}
        used |= common.keys()
        given = {
            k: _values(f"{path}: {k}", _hyperparameter(method, k), v)
            for k, v in (common | own).items()
        }
        found[method] = _single(have) | given
    unused = sorted(content.get(ALL, {}).keys() - used)
    if unused:
        raise ValueError(
            f"{path}: none of {', '.join(methods)} has a hyperparameter {', '.join(unused)}"
        )
    return found


def change_axes(found: Mapping[str, Grid], settings: Collection[str]) -> dict[str, Grid]:
    """Replace axes by what ``--set name=value,value`` says, in the grids that have them."""
    given: dict[str, list[float]] = {}
    check_once("--set", settings)
    for setting in settings:
        name, equals, text = setting.partition("=")
        parts = [part.strip() for part in text.split(",")]
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if not equals or not numbers:
            raise ValueError(
                f"--set takes name=number,number, such as sigma=0.01,0.1; got {setting!r}"
            )
        given[name] = numbers
    changed = {
        method: grid
        | {
            k: _values(f"--set {k}", _hyperparameter(method, k), v)
            for k, v in given.items()
            if k in grid
        }
        for method, grid in found.items()
    }
    unused = sorted(name for name in given if not any(name in grid for grid in found.values()))
    if unused:
        raise ValueError(
            f"none of {', '.join(found)} has a hyperparameter {', '.join(unused)}; "
            "'upgd list methods' shows what they have"
        )
    return changed


def check_size(sizes: Mapping[str, int], seeds: int, most: int, way_out: str) -> None:
    """Refuse grids with too many runs, before any of their sets is made.

    Args:
        sizes: By name, how many sets there are.
        seeds: Of each set.
        most: So many runs are too few to refuse.
        way_out: What else to do than to take fewer values.

    Raises:
        ValueError: There are more runs.
    """
    runs = seeds * sum(sizes.values())
    if runs > most:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"these are {runs} runs, {sizes[largest]} sets of {largest} alone, and at most {most} "
            f"are made; take fewer values, {way_out}"
        )


def size(grid: Grid) -> int:
    """How many sets a grid has."""
    return math.prod(map(len, grid.values()))


def _single(values: Mapping[str, float]) -> Grid:
    return {name: (float(value),) for name, value in values.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {str(error).splitlines()[0]}") from None


def _check_method(path: Path, name: str) -> None:
    try:
        get_method(name)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]}") from None


def _same(name: str, method: str) -> bool:
    """Whether a table is a method's: by the name that was given, or by that of its row."""
    return name != ALL and name.lower() in (method.lower(), get_method(method)[0].name)


def _hyperparameter(method: str, name: str) -> Hyperparameter:
    """The range of one of a method's numbers: ``beta1`` and ``beta2`` have that of ``betas``."""
    known = get_method(method)[0].hyper
    return known["betas" if name in ("beta1", "beta2") and "betas" in known else name]


def _values(where: str, known: Hyperparameter, given: Any) -> tuple[float, ...]:
    """Values of a hyperparameter, each once."""
    listed = given if isinstance(given, list) else [given]
    if not listed:
        raise ValueError(f"{where} has no value; give one or more")
    for value in listed:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"{where} takes finite numbers, got {value!r}")
        if not known.admits(float(value)):
            admitted = known.range.removeprefix("two numbers ")
            raise ValueError(f"{where} must be {admitted}, got {value:g}")
    return tuple(dict.fromkeys(float(value) + 0.0 for value in listed))
