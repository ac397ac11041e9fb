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
    methods = _methods()
    both = {"problems": problems, "methods": methods}
    if what not in ("all", *both):
        _explain(what, problems, methods, as_json)
    elif as_json:
        print(json.dumps(both if what == "all" else both[what]))
    elif what == "all":
        _show_all()
    elif what == "problems":
        _show_problems(problems)
    else:
        _show_methods()


# ---------------------------------------------------------------------------------- facts
def _problem(name: str) -> Facts:
    from upgd.streams import PROBLEMS

    problem = PROBLEMS[name]
    own = problem.network
    network = own if isinstance(own, str) else "-".join(map(str, own))
    facts = {"data": problem.dataset or "-", "network": network, "task": problem.task_length}
    return facts | {"steps": problem.steps, "seeds": problem.runs}


def _methods() -> dict[str, Facts]:
    from upgd.optim.registry import METHODS

    found: dict[str, Facts] = {}
    for name, row in METHODS.items():
        aliases = {alias: dict(changed) for alias, changed in row.aliases.items()}
        found[name] = {"title": row.title, "hyper": row.defaults, "aliases": aliases}
    return found


def _families() -> dict[str, list[Row]]:
    """Methods by the module that defines them; users' own are a family."""
    from upgd.optim.registry import METHODS

    found: dict[str, list[Row]] = {}
    for row in METHODS.values():
        found.setdefault(OWN if row.source else row.optimizer.__module__, []).append(row)
    return found


# ------------------------------------------------------------------------------ everything
def _show_all() -> None:
    from upgd.streams.problems import families

    _heading("Problems")
    _columns((family, ", ".join(names)) for family, names in families().items())
    _heading("Methods")
    _columns(
        (family.rpartition(".")[2].replace("_", " "), _some_names(rows))
        for family, rows in _families().items()
    )
    say("")
    say("'upgd list problems' and 'upgd list methods' have all with their settings;")
    say("'upgd list NAME' explains one.")


def _some_names(rows: Iterable[Row]) -> str:
    names = [name for row in rows for name in (row.name, *row.aliases)]
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


def _show_methods() -> None:
    families = _families()
    names = (
        name for rows in families.values() for row in rows for name in (row.name, *row.aliases)
    )
    width = max(map(len, names))
    for family, rows in families.items():
        _heading(OWN if family == OWN else _purpose(family))
        _columns((line for row in rows for line in _settings(row)), width)


def _purpose(module: str) -> str:
    """The first line of a module's documentation."""
    return (sys.modules[module].__doc__ or module).partition("\n")[0].rstrip(".")


def _settings(row: Row) -> Iterator[tuple[str, str]]:
    yield row.name, f"{row.title}: {pairs(row.defaults)}"
    for alias, changed in row.aliases.items():
        yield alias, f"{row.name} with {pairs(changed)}" if changed else f"the same as {row.name}"


# ------------------------------------------------------------------------------------- one
def _explain(
    name: str, problems: Mapping[str, Facts], methods: Mapping[str, Facts], as_json: bool
) -> None:
    """Show the facts of one problem or method."""
    from upgd.optim.registry import get

    aliases = {alias for facts in methods.values() for alias in facts["aliases"]}
    if name in problems:
        facts = {"problem": name, **problems[name]}
    elif name.lower() in (*methods, *aliases):
        row, hyper = get(name)
        facts = _method(name.lower(), row, hyper)
    else:
        known = ["problems", "methods", *problems, *methods, *aliases]
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        raise ValueError(f"cannot list {name!r}{hint} 'upgd list' shows problems and methods")
    if as_json:
        print(json.dumps(facts))
        return
    values = {k: pairs(v) if isinstance(v, dict) else str(v or "-") for k, v in facts.items()}
    _columns(values.items())


def _method(name: str, row: Row, hyper: Mapping[str, Any]) -> Facts:
    module = row.optimizer.__module__
    others = [other for other in (row.name, *row.aliases) if other != name]
    arguments = ", ".join(f"{key}={value!r}" for key, value in row.options.items())
    return {
        "method": name,
        "is": row.title if row.source else _purpose(module),
        "class": f"{getattr(row.optimizer, '__name__', row.title)}({arguments})",
        "hyper": dict(hyper),
        "keeps": ", ".join(row.states),
        "needs": ", ".join(sorted(row.needs)),
        "related": ", ".join(others),
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
