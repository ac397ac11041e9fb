"""``upgd list``: problems and methods by family, and the facts of one."""

from __future__ import annotations

import difflib
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from upgd.cli import options as o
from upgd.cli.app import command, out, say
from upgd.cli.options import load
from upgd.kept import keep
from upgd.text import pairs

if TYPE_CHECKING:
    from upgd.optim.registry import Row

OWN = "your own"
SHOWN = 8  # names of a family, where all families are listed
Facts = dict[str, Any]


@command(
    "list",
    examples=(
        "upgd list",
        "upgd list methods                           # all, with hyperparameters",
        "upgd list problems                          # all, with networks and lengths",
        "upgd list upgd-w",
    ),
)
def list_(
    what: Annotated[
        str, Argument(help="problems, methods, or the name of one of them; default: all, briefly.")
    ] = "all",
    use: o.USE = None,
    as_json: o.FACTS = False,
) -> None:
    """List problems and methods, or explain one."""
    from upgd.streams import PROBLEMS

    load(use)
    problems = {name: _problem(name) for name in PROBLEMS}
    methods = _methods(use)
    both = {"problems": problems, "methods": methods}
    if what not in ("all", *both):
        _explain(what, problems, methods, as_json)
    elif as_json:
        print(json.dumps(both if what == "all" else both[what]))
    elif what == "all":
        _show_all(methods)
    elif what == "problems":
        _show_problems(problems)
    else:
        _show_methods(methods)


# ---------------------------------------------------------------------------------- facts
def _problem(name: str) -> Facts:
    from upgd.streams import PROBLEMS

    problem = PROBLEMS[name]
    own = problem.network
    network = own if isinstance(own, str) else "-".join(map(str, own))
    facts = {"data": problem.dataset or "-", "network": network, "task": problem.task_length}
    return facts | {"steps": problem.steps, "seeds": problem.runs}


def _methods(use: object) -> dict[str, Facts]:
    """Facts of all methods; kept, since the registry needs torch, which takes seconds to import.

    Not where users add methods of their own.
    """
    loaded = bool(use) or "upgd.optim.registry" in sys.modules
    return _registered() if loaded else keep("methods", (), _registered, _unpacked)


def _registered() -> dict[str, Facts]:
    from upgd.optim.registry import METHODS

    return {name: _method(row) for name, row in METHODS.items()}


def _method(row: Row) -> Facts:
    module = row.optimizer.__module__
    arguments = ", ".join(f"{key}={value!r}" for key, value in row.options.items())
    return {
        "title": row.title,
        "hyper": row.defaults,
        "aliases": {alias: dict(changed) for alias, changed in row.aliases.items()},
        "family": OWN if row.source else module.rpartition(".")[2].replace("_", " "),
        "is": row.title if row.source else _purpose(module),
        "class": f"{getattr(row.optimizer, '__name__', row.title)}({arguments})",
        "keeps": ", ".join(row.states),
        "needs": ", ".join(sorted(row.needs)),
    }


def _purpose(module: str) -> str:
    """The first line of a module's documentation."""
    return (sys.modules[module].__doc__ or module).partition("\n")[0].rstrip(".")


def _unpacked(methods: dict[str, Facts]) -> dict[str, Facts]:
    """Facts as they were before JSON made lists of tuples."""
    for facts in methods.values():
        for values in (facts["hyper"], *facts["aliases"].values()):
            values.update({k: tuple(v) for k, v in values.items() if isinstance(v, list)})
    return methods


def _families(methods: Mapping[str, Facts]) -> dict[str, dict[str, Facts]]:
    """Methods by the module that defines them; users' own are a family."""
    found: dict[str, dict[str, Facts]] = {}
    for name, facts in methods.items():
        found.setdefault(facts["family"], {})[name] = facts
    return found


# ------------------------------------------------------------------------------ everything
def _show_all(methods: Mapping[str, Facts]) -> None:
    from upgd.streams.problems import families

    _heading("Problems")
    _columns((family, ", ".join(names)) for family, names in families().items())
    _heading("Methods")
    _columns((family, _some_names(some)) for family, some in _families(methods).items())
    say("")
    say("'upgd list problems' and 'upgd list methods' have all with their settings;")
    say("'upgd list NAME' explains one.")


def _some_names(methods: Mapping[str, Facts]) -> str:
    names = [name for own, facts in methods.items() for name in (own, *facts["aliases"])]
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


def _show_problems(problems: Mapping[str, Facts]) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, facts in problems.items():
        task = f"tasks of {facts['task']}, " if facts["task"] else ""
        data = "no data" if facts["data"] == "-" else f"data {facts['data']}"
        group = f"{data}, network {facts['network']}, {facts['seeds']} seeds"
        groups.setdefault(group, []).append((name, f"{task}{facts['steps']} steps"))
    width = max(map(len, problems))
    for group, rows in groups.items():
        _heading(group)
        _columns(rows, width)


def _show_methods(methods: Mapping[str, Facts]) -> None:
    width = max(len(name) for own, facts in methods.items() for name in (own, *facts["aliases"]))
    for family, some in _families(methods).items():
        _heading(OWN if family == OWN else next(iter(some.values()))["is"])
        _columns((line for name, facts in some.items() for line in _settings(name, facts)), width)


def _settings(name: str, facts: Facts) -> Iterator[tuple[str, str]]:
    yield name, f"{facts['title']}: {pairs(facts['hyper'])}"
    for alias, changed in facts["aliases"].items():
        yield alias, f"{name} with {pairs(changed)}" if changed else f"the same as {name}"


# ------------------------------------------------------------------------------------- one
def _explain(
    name: str, problems: Mapping[str, Facts], methods: Mapping[str, Facts], as_json: bool
) -> None:
    """Show the facts of one problem or method."""
    owners = {own: own for own in methods}
    owners |= {alias: own for own, facts in methods.items() for alias in facts["aliases"]}
    if name in problems:
        facts = {"problem": name, **problems[name]}
    elif name.lower() in owners:
        own = owners[name.lower()]
        facts = _called(name.lower(), own, methods[own])
    else:
        close = difflib.get_close_matches(name, ["problems", "methods", *problems, *owners], 1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"cannot list {name!r}{hint} 'upgd list' shows problems and methods")
    if as_json:
        print(json.dumps(facts))
        return
    values = {k: pairs(v) if isinstance(v, dict) else str(v or "-") for k, v in facts.items()}
    _columns(values.items())


def _called(name: str, own: str, facts: Facts) -> Facts:
    """The facts of a method under its name or an alias."""
    return {
        "method": name,
        **{key: facts[key] for key in ("is", "class")},
        "hyper": {**facts["hyper"], **facts["aliases"].get(name, {})},
        **{key: facts[key] for key in ("keeps", "needs")},
        "related": ", ".join(other for other in (own, *facts["aliases"]) if other != name),
    }


# ------------------------------------------------------------------------------------ text
def _heading(text: str) -> None:
    say(text, style="bold")


def _columns(rows: Iterable[tuple[str, str]], width: int = 0) -> None:
    """Print names and texts in two columns; texts continue below themselves."""
    rows = list(rows)
    width = width or max(len(name) for name, _ in rows)
    for name, text in rows:
        lines = textwrap.wrap(text, max(20, out.width - width - 4), break_on_hyphens=False)
        for first, line in zip((name, *[""] * len(lines)), lines, strict=False):
            say(f"  {first:{width}}  {line}")
