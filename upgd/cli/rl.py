"""``upgd rl``: agents that learn by PPO, with any optimizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from upgd.cli.app import app, err, mistakes_are_one_line, out, printable
from upgd.cli.arguments import check_once, seed_list, whole
from upgd.cli.numbers import clock, count, short
from upgd.cli.show import show_study
from upgd.cli.working import CHECKPOINT, DEVICE, QUIET, Work, do_work, end
from upgd.optim.registry import scalars
from upgd.rl.environments import RLError, Spaces, make
from upgd.rl.runs import PREFIX, agent, parse_settings, plan
from upgd.rl.study import newest_environments, pace
from upgd.study import Ledger, RunSpec
from upgd.study.canonical import proper_name
from upgd.study.ledger import NAME
from upgd.study.prepare import check_device

STUDY = Path("studies/ppo")
Arm = tuple[str, dict[str, float]]


@app.command()
@mistakes_are_one_line
def rl(
    environments: Annotated[
        list[str] | None,
        typer.Argument(help="Such as Hopper or HalfCheetah-v4; '--list' shows them."),
    ] = None,
    optimizers: Annotated[
        str,
        typer.Option(help="Methods; one may have settings: adam,ada-upgd:lr=6e-4:sigma=0.01."),
    ] = "adam,ada-upgd",
    seeds: Annotated[str, typer.Option(help="How many, or which: 20, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, typer.Option(help="Steps of each agent in its environment.")] = "1e6",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A hyperparameter: lr=1e-3, or of one method ada-upgd:lr=6e-4. Repeatable.",
        ),
    ] = None,
    anneal: Annotated[
        bool,
        typer.Option(
            "--anneal/--constant-lr",
            help="Whether the step size falls to zero over the run, as CleanRL has it.",
        ),
    ] = True,
    ppo: Annotated[
        list[str] | None,
        typer.Option("--ppo", help="A setting of PPO: gamma=0.995, hidden=256-256. Repeatable."),
    ] = None,
    window: Annotated[
        str, typer.Option(help="Steps per point, whole iterations; default ten.")
    ] = "",
    study: Annotated[Path, typer.Option(help="A folder.")] = STUDY,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes for the agents; 0: this one; default one per core."),
    ] = None,
    device: DEVICE = "cpu",
    list_: Annotated[
        bool, typer.Option("--list", help="Show the environments that can be used here.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would be run, and stop.")] = False,
    quiet: QUIET = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table for scripts.")] = False,
    checkpoint_seconds: CHECKPOINT = None,
) -> None:
    """Train agents by PPO: all seeds of all optimizers at once, one environment after the other.

    What the study has already is not run again; 'upgd resume' goes on after an interruption.
    """
    if list_:
        _list(as_json)
        return
    if not environments:
        raise ValueError("name an environment, such as Hopper; 'upgd rl --list' shows them")
    check_once("--ppo", ppo or [])
    options: dict[str, Any] = parse_settings(ppo or [])
    options |= {} if anneal else {"anneal": False}
    options |= {"window": whole("window", window)} if window else {}
    arms = _arms(optimizers, settings or [])
    length = whole("steps", steps)
    check_device(device)
    names = dict.fromkeys(make(name)[1].name for name in environments)
    every = (
        RunSpec(f"{PREFIX}{name}", method, hyper, seed, length, options)
        for name in names
        for method, hyper in arms
        for seed in seed_list(seeds)
    )
    specs = list(dict.fromkeys(every))  # two names may mean the same run
    for spec in {(s.problem, s.method, tuple(s.hyper.items())): s for s in specs}.values():
        plan(spec)
        agent(spec)
    if dry_run:
        _outlook(study, specs, device, workers)
        return
    how = Work(None, device, "auto", quiet, checkpoint_seconds, agents=workers)
    try:
        with Ledger.open(study) as ledger:
            ledger.add(specs)
            keys = [spec.key for spec in specs]
            tally = do_work(ledger, keys, how)
            if not quiet:
                show_study(ledger, study, as_json, set(keys))
    except KeyboardInterrupt:
        text = f"interrupted; 'upgd resume {printable(study)}' goes on from here"
        err.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    end(tally)


# ---------------------------------------------------------------------------- optimizers
def _arms(optimizers: str, settings: Sequence[str]) -> list[Arm]:
    """The methods and their hyperparameters."""
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
        for setting in own:
            key, value = _pair(setting, text)
            if key not in known:
                have = ", ".join(known)
                raise ValueError(f"{method} has no hyperparameter {key!r}; it has {have}")
            hyper[key] = value
        if (name, hyper) not in found:
            found.append((name, hyper))
    if not found:
        raise ValueError("name an optimizer, such as --optimizers adam,ada-upgd")
    for setting in settings:
        if setting not in used:
            names = ", ".join(dict.fromkeys(name for name, _ in found))
            raise ValueError(f"--set {setting} fits none of {names}; 'upgd list methods' tells")
    return found


def _of_one_name(setting: str) -> str:
    whose, colon, rest = setting.rpartition(":")
    return f"{proper_name(whose)}:{rest}" if colon else rest


def _pair(text: str, whole_text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name, float(value)
    except ValueError:
        pass
    raise ValueError(f"a hyperparameter is name=number, such as lr=6e-4; got {whole_text!r}")


# -------------------------------------------------------------------------- environments
def _list(as_json: bool) -> None:
    found: list[Spaces] = []
    for name in newest_environments():
        with suppress(RLError):
            found.append(make(name)[1])
    if as_json:
        facts = [
            {"name": s.name, "observations": s.observations, "actions": s.actions, "limit": s.limit}
            for s in found
        ]
        print(json.dumps(facts))
        return
    table = Table(title="Environments", caption="steps: after which an episode is cut off")
    table.add_column("environment", no_wrap=True)
    for column in ("observations", "actions", "steps"):
        table.add_column(column, justify="right")
    for s in found:
        table.add_row(s.name, str(s.observations), str(s.actions), str(s.limit or "-"))
    out.print(table)


def _outlook(study: Path, specs: Sequence[RunSpec], device: str, workers: int | None) -> None:
    """Say what would be run, and how long it takes at the pace of a few iterations."""
    over: set[str] = set()
    if (study / NAME).exists():
        with Ledger.open(study, create=False, read_only=True) as ledger:
            over = {run.key for run in ledger.runs() if run.state in ("done", "diverged")}
    left: dict[str, list[RunSpec]] = {}
    for spec in specs:
        if spec.key not in over:
            left.setdefault(spec.problem, []).append(spec)
    total = sum(map(len, left.values()))
    _tell(f"{total} of {count(len(specs), 'run')} to do in {study}: {specs[0].steps} steps each")
    seconds = 0.0
    for problem, some in left.items():
        rate = pace(some, device, workers)
        needed = sum(spec.steps for spec in some)
        seconds += needed / rate
        told = f"{short(needed)} steps at {short(rate)} per second (measured now)"
        _tell(f"  {problem}: {count(len(some), 'agent')}, {told}")
    if left:
        _tell(f"time: about {clock(seconds)}")


def _tell(text: str) -> None:
    out.print(printable(text), highlight=False, markup=False, emoji=False, soft_wrap=True)
