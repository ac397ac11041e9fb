"""``upgd rl``: agents that learn by PPO, with any optimizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from upgd.cli import options as o
from upgd.cli.app import command, out, say, warn
from upgd.cli.arguments import check_once, seed_list, whole
from upgd.cli.options import end, open_study
from upgd.cli.show import show_table
from upgd.text import count

if TYPE_CHECKING:
    from upgd.lab.study import Study
    from upgd.ledger import RunSpec
    from upgd.rl.environments import Spaces

Arm = tuple[str, dict[str, float]]


@command(
    examples=(
        "upgd rl --list",
        "upgd rl Hopper --optimizers adam,ada-upgd --seeds 5 --steps 1e6",
        "upgd rl Ant --set ada-upgd:lr=3e-4 --ppo gamma=0.995 --dry-run",
    )
)
def rl(
    environments: Annotated[
        list[str] | None, Argument(help="Such as Hopper or Ant-v4; see '--list'.")
    ] = None,
    optimizers: Annotated[
        str, Option(help="Methods; one may have settings: adam,ada-upgd:lr=1e-3:sigma=0.01.")
    ] = "adam,ada-upgd",
    seeds: o.SEEDS = "5",
    steps: Annotated[str, Option(help="Steps of each agent in its environment.")] = "1e6",
    settings: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="lr=1e-3, or a method's own: ada-upgd:lr=3e-4. Repeatable.",
        ),
    ] = None,
    anneal: Annotated[
        bool,
        Option("--anneal/--constant-lr", help="Whether the step size falls to zero, as CleanRL's."),
    ] = True,
    ppo: Annotated[
        list[str] | None,
        Option("--ppo", metavar="NAME=VALUE", help="A PPO setting: gamma=0.995. Repeatable."),
    ] = None,
    window: Annotated[str, Option(help="Steps per point, whole iterations; default ten.")] = "",
    study: Annotated[Path, Option(help="A folder.")] = Path("studies/ppo"),
    workers: Annotated[
        int | None,
        o.EXECUTION(
            min=0,
            metavar="NUMBER",
            help="Processes for the agents; 0: this one; default one per core.",
        ),
    ] = None,
    device: o.DEVICE = "cpu",
    list_: Annotated[bool, Option("--list", help="Show the environments there are.")] = False,
    dry_run: o.DRY_RUN = False,
    quiet: o.QUIET = False,
    as_json: o.JSON = False,
    checkpoint_seconds: o.CHECKPOINT = None,
) -> None:
    """Train agents by PPO: all seeds of all optimizers at once.

    One environment comes after the other. What the study has already is not run again; 'upgd
    resume' goes on after an interruption.
    """
    if list_:
        _list(as_json)
        return
    if not environments:
        raise ValueError("name an environment, such as Hopper; 'upgd rl --list' shows them")
    from upgd.ledger import RunSpec
    from upgd.rl.environments import make
    from upgd.rl.runs import PREFIX, parse_settings

    check_once("--ppo", ppo or [])
    options: dict[str, Any] = parse_settings(ppo or [])
    options |= {} if anneal else {"anneal": False}
    options |= {"window": whole("window", window)} if window else {}
    arms, length = _arms(optimizers, settings or []), whole("steps", steps)
    names = dict.fromkeys(make(name)[1].name for name in environments)
    every = (
        RunSpec(f"{PREFIX}{name}", method, hyper, seed, length, options)
        for name, (method, hyper), seed in product(names, arms, seed_list(seeds))
    )
    specs = list(dict.fromkeys(every))  # two names may mean the same run
    mine = open_study(study, quiet, device, workers=workers, checkpoint_seconds=checkpoint_seconds)
    mine.check(specs)
    if dry_run:
        _outlook(mine, specs)
        return
    try:
        table = mine.run_specs(specs)
    except KeyboardInterrupt:
        warn(f"interrupted; 'upgd resume {study}' continues from here")
        raise Exit(130) from None
    if not quiet:
        show_table(table, study, as_json)
    end(mine)


# ---------------------------------------------------------------------------- optimizers
def _arms(optimizers: str, settings: Sequence[str]) -> list[Arm]:
    """The methods and their hyperparameters."""
    from upgd.ledger.canonical import proper_name
    from upgd.optim.registry import scalars

    found: list[Arm] = []
    used: set[str] = set()
    check_once("--set", map(_of_one_name, settings))
    for text in filter(None, (part.strip() for part in optimizers.split(","))):
        method, *own = text.split(":")
        name = proper_name(method)
        known = scalars(name)
        hyper: dict[str, float] = {}
        for setting in sorted(settings, key=lambda each: ":" in each):  # a method's own last
            whose, _, rest = setting.rpartition(":")
            if whose and proper_name(whose) != name:
                continue
            key, value = _pair(rest, setting)
            if key in known:
                hyper[key] = value
                used.add(setting)
        check_once(f"--optimizers {method}", own)
        for key, value in (_pair(setting, text) for setting in own):
            if key not in known:
                have = ", ".join(known)
                raise ValueError(f"{method} has no hyperparameter {key!r}; it has {have}")
            hyper[key] = value
        if (name, hyper) not in found:
            found.append((name, hyper))
    if not found:
        raise ValueError("name an optimizer, such as --optimizers adam,ada-upgd")
    for setting in (each for each in settings if each not in used):
        names = ", ".join(dict.fromkeys(name for name, _ in found))
        raise ValueError(f"--set {setting} fits none of {names}; 'upgd list methods' tells")
    return found


def _of_one_name(setting: str) -> str:
    from upgd.ledger.canonical import proper_name

    whose, colon, rest = setting.rpartition(":")
    return f"{proper_name(whose)}:{rest}" if colon else rest


def _pair(text: str, whole_text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    with suppress(ValueError):
        return name, float(value)
    raise ValueError(f"a hyperparameter is name=number, such as lr=1e-3; got {whole_text!r}")


# -------------------------------------------------------------------------- environments
def _list(as_json: bool) -> None:
    from rich.table import Column, Table

    from upgd.rl.environments import RLError, make, newest_environments

    found: list[Spaces] = []
    for name in newest_environments():
        with suppress(RLError):
            found.append(make(name)[1])
    if as_json:
        facts = ("name", "observations", "actions", "limit")
        print(json.dumps([{fact: getattr(s, fact) for fact in facts} for s in found]))
        return
    names = ("observations", "actions", "steps")
    columns = (Column(name, justify="right") for name in names)
    table = Table(Column("environment", no_wrap=True), *columns, title="Environments")
    table.caption = "steps: after which an episode is cut off"
    for s in found:
        table.add_row(s.name, str(s.observations), str(s.actions), str(s.limit or "-"))
    out.print(table)


def _outlook(study: Study, specs: Sequence[RunSpec]) -> None:
    """Say what would be run, and how long it takes at the pace of a few iterations."""
    from upgd.study.forecast import forecast_lines

    left, runs = study.missing(specs), count(len(specs), "run")
    say(f"{len(left)} of {runs} to do in {study.folder}: {specs[0].steps} steps each")
    for line in forecast_lines(left, [], study.options):
        say(line)
