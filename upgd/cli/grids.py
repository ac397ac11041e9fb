"""The sets of a sweep: the paper's grids or best sets, a grid file, changed by ``--set``.

A grid file is TOML. A table per method, or ``[all]`` for all of them, lists the values of its
hyperparameters::

    [all]
    lr = [0.1, 0.01]

    [upgd]
    sigma = [0.001, 0.01]
    weight_decay = 0.001

Other hyperparameters keep their defaults. A method's own table overrides ``[all]``.
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
from upgd.rules.vocabulary import HYPERPARAMETERS

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
        ValueError: It is not TOML, or names an unknown method or hyperparameter.
    """
    content = _read_toml(path)
    for name, table in content.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name!r} is in no table; begin with [all] or [upgd]")
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
        given = {k: _values(f"{path}: {k}", k, v) for k, v in (common | own).items()}
        found[method] = _single(have) | given
    unused = sorted(content.get(ALL, {}).keys() - used)
    if unused:
        raise ValueError(
            f"{path}: none of {', '.join(methods)} has a hyperparameter {', '.join(unused)}"
        )
    return found


def change_axes(found: Mapping[str, Grid], settings: Collection[str]) -> dict[str, Grid]:
    """Replace values by those of ``--set name=value,value``, in the grids that have the name."""
    given: dict[str, tuple[float, ...]] = {}
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
        given[name] = _values(f"--set {name}", name, numbers)
    changed = {m: grid | {k: v for k, v in given.items() if k in grid} for m, grid in found.items()}
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
        sizes: The number of sets, by name.
        seeds: Seeds per set.
        most: The most runs allowed.
        way_out: An alternative to fewer values, for the message.

    Raises:
        ValueError: There are more runs.
    """
    runs = seeds * sum(sizes.values())
    if runs > most:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"these are {runs} runs, {sizes[largest]} sets of {largest} alone, and at most {most} "
            f"are allowed; use fewer values, {way_out}"
        )


def size(grid: Grid) -> int:
    """The number of sets in a grid."""
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
    """Whether a table belongs to a method: by the given name, or by that of its row."""
    return name != ALL and name.lower() in (method.lower(), get_method(method)[0].name)


def _values(where: str, name: str, given: Any) -> tuple[float, ...]:
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
        _check_range(where, name, float(value))
    return tuple(dict.fromkeys(float(value) + 0.0 for value in listed))


def _check_range(where: str, name: str, value: float) -> None:
    row = HYPERPARAMETERS.get("betas" if name in ("beta1", "beta2") else name)
    if row is not None and not row.low <= value < row.high:
        admitted = row.range.removeprefix("two numbers ")
        raise ValueError(f"{where} must be {admitted}, got {value:g}")
