"""The hyperparameters that runs and sweeps try: the paper's, those of a table or file, given ones.

A grid file is TOML; in Python the same is a mapping. A table per method, or ``[all]`` for all of
them, lists the values of its hyperparameters::

    [all]
    lr = [0.1, 0.01]

    [upgd]
    sigma = [0.001, 0.01]
    weight_decay = 0.001

What it does not name keeps its default. A method's own table comes before ``[all]``. A table is for
the method of its name alone: ``[upgd]`` says nothing of ``upgd-w``, which has other defaults.

Layers of one role may have values of their own (:data:`upgd.rules.vocabulary.ROLES`)::

    [sgd]
    lr = [0.1, 0.01]
    head.weight_decay = [0.01, 0.1]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from upgd.ledger.canonical import proper_name
from upgd.optim.registry import get as get_method
from upgd.optim.registry import scalars
from upgd.paper import grids
from upgd.paper.sets import best
from upgd.rules.vocabulary import Hyperparameter, split_roles

Grid = dict[str, tuple[float, ...]]
ALL = "all"
ELSEWHERE = "label-permuted-emnist"
"""Whose axes a problem takes that is not the paper's."""


def default_grids(problem: str, methods: Collection[str]) -> dict[str, Grid]:
    """The paper's grid of each method; on other problems, that of its label-permuted ones.

    Hyperparameters that the paper has no values for keep their defaults.
    """
    found = {}
    for method in methods:
        known = grids.grid(problem if problem in grids.AXES else ELSEWHERE, method)
        found[method] = _single(scalars(method)) | known
    return found


def best_grids(problem: str, methods: Collection[str]) -> dict[str, Grid]:
    """Each method's printed best set, as a grid of one point."""
    return {m: _single({**scalars(m), **best(problem, get_method(m)[0].name)}) for m in methods}


def settings(
    methods: Sequence[str], given: Mapping[str, float], best_on: str = ""
) -> dict[str, dict[str, float]]:
    """The hyperparameters of each method: of those given the ones that it has, else defaults.

    Args:
        methods: Names.
        given: Values by name; each must belong to one of the methods.
        best_on: A problem on which to take the paper's best sets instead of defaults.
    """
    found = {m: best_grids(best_on, [m])[m] if best_on else _single(scalars(m)) for m in methods}
    changed = change_axes(found, {name: [value] for name, value in given.items()})
    return {m: {name: values[0] for name, values in axes.items()} for m, axes in changed.items()}


def file_grids(path: Path, methods: Collection[str]) -> dict[str, Grid]:
    """The grids of a TOML file.

    Raises:
        ValueError: It is not TOML, or names what does not exist.
    """
    return table_grids(_read_toml(path), methods, f"{path}: ")


def table_grids(
    tables: Mapping[str, Any], methods: Collection[str], where: str = ""
) -> dict[str, Grid]:
    """The grids that tables describe, see above; hyperparameters without a table are for all.

    Args:
        tables: By method, or ``"all"``, the values of each hyperparameter.
        methods: Names.
        where: What errors begin with.

    Raises:
        ValueError: They name what does not exist.

    Example:
        >>> table_grids({"lr": [0.1, 0.01]}, ["sgd"])
        {'sgd': {'lr': (0.1, 0.01), 'weight_decay': (0.0,)}}
    """
    if tables and not any(isinstance(table, Mapping) for table in tables.values()) and not where:
        tables = {ALL: tables}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"{where}{name!r} is in no table; begin with [all] or [upgd]")
        if name != ALL:
            _check_method(where, name)
    _check_aliases(where, tables, methods)
    found = {}
    used: set[str] = set()
    for method in methods:
        named = (table for name, table in tables.items() if _same(name, method))
        own = {k: v for table in named for k, v in _flat(table).items()}
        have = scalars(method)
        unknown = sorted(k for k in own if not _has(have, k))
        if unknown:
            raise ValueError(
                f"{where}{method} has no hyperparameter {', '.join(unknown)}; "
                f"it has {', '.join(have)}"
            )
        common = {k: v for k, v in _flat(tables.get(ALL, {})).items() if _has(have, k)}
        used |= common.keys()
        given = {
            k: _values(f"{where}{k}", _hyperparameter(method, k), v)
            for k, v in (common | own).items()
        }
        found[method] = _single(have) | given
    unused = sorted(_flat(tables.get(ALL, {})).keys() - used)
    if unused:
        raise ValueError(
            f"{where}none of {', '.join(methods)} has a hyperparameter {', '.join(unused)}"
        )
    return found


def change_axes(found: Mapping[str, Grid], given: Mapping[str, Any]) -> dict[str, Grid]:
    """Replace axes by the values given, in the grids that have them.

    Raises:
        ValueError: None of the grids has one of the axes.
    """
    changed = {
        method: grid
        | {k: _values(k, _hyperparameter(method, k), v) for k, v in given.items() if _has(grid, k)}
        for method, grid in found.items()
    }
    unused = sorted(name for name in given if not any(_has(grid, name) for grid in found.values()))
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


def _has(known: Collection[str], key: str) -> bool:
    """Whether `key` is one of the `known` hyperparameters, or a role's; raises for other roles."""
    plain, own = split_roles({key: None})
    return any(name in known for name in (*plain, *(n for each in own.values() for n in each)))


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with ``head.lr`` in place of a table ``head``, which TOML makes of it."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            split_roles({f"{key}.": None})
            found |= {f"{key}.{name}": one for name, one in value.items()}
        else:
            found[key] = value
    return found


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


def _check_method(where: str, name: str) -> None:
    try:
        get_method(name)
    except KeyError as error:
        raise ValueError(f"{where}{error.args[0]}") from None


def _check_aliases(where: str, tables: Mapping[str, Any], methods: Collection[str]) -> None:
    """Refuse a table of no method asked for that is of another name of one without a table."""
    names = [name for name in tables if name != ALL]
    for name in (n for n in names if not any(_same(n, method) for method in methods)):
        row = get_method(name)[0].name
        for method in methods:
            if get_method(method)[0].name == row and not any(_same(n, method) for n in names):
                raise ValueError(
                    f"{where}[{name}] is not for {method}, which has other defaults; "
                    f"call the table [{method}], or ask for {name}"
                )


def _same(name: str, method: str) -> bool:
    """Whether a table is a method's; a name that changes no default means the same method."""
    return name != ALL and proper_name(name) == proper_name(method)


def _hyperparameter(method: str, name: str) -> Hyperparameter:
    """The range of one of a method's numbers: ``beta1`` and ``beta2`` have that of ``betas``."""
    known = get_method(method)[0].hyper
    name = name.rpartition(".")[2]
    return known["betas" if name in ("beta1", "beta2") and "betas" in known else name]


def _values(where: str, known: Hyperparameter, given: Any) -> tuple[float, ...]:
    """Values of a hyperparameter, each once."""
    listed = list(given) if isinstance(given, list | tuple | range) else [given]
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
