"""``upgd best``: the winning set of each method, and how much each hyperparameter matters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from upgd.cli import options as o
from upgd.cli.app import command, out, say, wrote
from upgd.cli.arguments import length, seed_list
from upgd.text import count, pairs, ranges

if TYPE_CHECKING:
    from upgd.study.selection import Candidate, Ranking


@command(
    examples=(
        "upgd best studies/label-permuted-digits",
        "upgd best studies/label-permuted-digits --method upgd --plot best.png",
    )
)
def best(
    study: o.STUDY,
    problem: o.PROBLEM = "",
    method: Annotated[list[str] | None, Option(help="Only this. Repeatable.")] = None,
    seeds: Annotated[str, Option(help="Seeds that a set must have; default the study's.")] = "",
    steps: Annotated[str, Option(help="Runs of this length; default the longest.")] = "",
    plot: Annotated[
        Path | None, o.OUTPUT(help="Draw accuracy against hyperparameters: .png, .svg or .pdf.")
    ] = None,
    as_json: o.FACTS = False,
) -> None:
    """Show each method's best set of hyperparameters.

    The best has the largest area under the online accuracy curve, as in the paper. Only sets that
    have all their seeds are compared. On squared error the lowest loss wins.
    """
    from upgd.lab.study import Study
    from upgd.ledger.files import check_output
    from upgd.report.plotting import check_format

    if plot is not None:
        check_format(plot)
        check_output(plot)
    wanted = seed_list(seeds) if seeds else None
    found = Study(study).best(problem or None, method or None, wanted, length(steps))
    show_best(found, study, as_json)
    if plot is not None:
        for path in _draw(found, plot):
            if not as_json:
                wrote(path)


def show_best(found: Iterable[Ranking], study: Path, as_json: bool) -> None:
    """Print the winners of rankings, and beside them the sets that the paper prints."""
    if as_json:
        print(json.dumps({"study": str(study), "best": [_facts(ranking) for ranking in found]}))
        return
    from upgd.lab.views import Rankings

    several = Rankings(list(found)).by_conditions()
    for title, mine in several.items():
        _show_table(title, mine)
    if len(several) > 1:
        say("runs of other lengths or options are not compared with each other: a table for each")


def _show_table(title: str, found: Sequence[Ranking]) -> None:
    from rich.table import Column, Table

    from upgd.metrics import INTERVAL
    from upgd.report.sensitivity import by_name

    metrics = " or ".join(dict.fromkeys(ranking.metric for ranking in found))
    table = Table(Column("method", no_wrap=True), "best set", "sets", title=title)
    table.title_style = "bold"
    table.add_column(f"{metrics} [{INTERVAL}]", no_wrap=True)
    for label, ranking in by_name(found).items():
        winner, counts = ranking.winner, str(len(ranking.complete))
        if ranking.incomplete:
            counts += f" of {len(ranking.complete) + len(ranking.incomplete)}"
        why = "every set diverged" if ranking.complete else "no set has all its seeds yet"
        told = pairs(dict(winner.hyper)) if winner else why
        table.add_row(label, told, counts, _value(winner))
        printed = printed_set(ranking)
        if printed is not None:
            here = ranking.find(printed)
            table.add_row("  the paper's", pairs(printed), "", _value(here, "not run"))
    out.print(table)
    for line in _notes(found):
        say(line)


def _notes(found: Sequence[Ranking]) -> Iterator[str]:
    """Notes on which sets were compared and which were not."""
    from upgd.metrics import FEWEST

    seeds = dict.fromkeys(ranking.seeds for ranking in found)
    for some in seeds:
        whose = (ranking.name for ranking in found if ranking.seeds == some)
        few = "" if len(some) >= FEWEST else f"; intervals need {FEWEST}"
        yield f"seeds {ranges(some)}" + (f" ({', '.join(whose)})" if len(seeds) > 1 else "") + few
    diverged = sum(bool(one.diverged) for ranking in found for one in ranking.complete)
    if diverged:
        yield f"{count(diverged, 'set')} diverged with a seed and cannot win"
    for ranking in (each for each in found if each.dropped):
        told, ways = count(ranking.dropped, "set"), " or ".join(map(str, ranking.lengths))
        yield f"{ranking.name}: {told} more in runs of other lengths; --steps {ways} shows those"
    lacking = sum(len(ranking.incomplete) for ranking in found)
    if lacking:
        yield f"{count(lacking, 'set')} without all seeds not compared; --seeds asks for fewer"


def printed_set(ranking: Ranking) -> Mapping[str, float] | None:
    """The set that the paper prints as best for a ranking's method and problem, or None."""
    from upgd.optim.registry import get as get_method
    from upgd.paper import searches
    from upgd.study.prepare import NO_LAYERS

    try:
        name = get_method(ranking.family.method)[0].name
    except KeyError:  # a method that is not registered here
        return None
    if dict(ranking.family.options).get("hidden") == NO_LAYERS:
        return None
    return searches.printed_set(ranking.family.problem, name)


def _value(one: Candidate | None, otherwise: str = "-") -> str:
    if one is None:
        return otherwise
    if one.missing:
        return f"lacks {len(one.missing)} seeds"
    if one.diverged:
        return f"{len(one.diverged)} seeds diverged"
    from upgd.lab.views import with_interval

    return with_interval(*one.interval)


def _facts(ranking: Ranking) -> dict[str, Any]:
    family, printed = ranking.family, printed_set(ranking)
    here: Any = printed and {"set": dict(printed), "here": _candidate(ranking.find(printed))}
    return {
        "problem": family.problem, "method": ranking.name, "steps": family.steps,
        "options": dict(family.options), "metric": ranking.metric, "seeds": list(ranking.seeds),
        "complete": len(ranking.complete), "incomplete": len(ranking.incomplete),
        "best": _candidate(ranking.winner), "paper": here,
    }  # fmt: skip


def _candidate(one: Candidate | None) -> dict[str, Any] | None:
    if one is None:
        return None
    numbers = {"mean": one.value, **dict(zip(("low", "high"), one.interval[1:], strict=True))}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    lost = {"diverged": list(one.diverged), "missing": list(one.missing)}
    return {"hyper": dict(one.hyper), **finite, **lost}


def _draw(found: Iterable[Ranking], path: Path) -> list[Path]:
    """Draw a figure for each of the conditions; with several, file names contain them."""
    from upgd.lab.views import Rankings
    from upgd.report.sensitivity import by_name, draw_sensitivity, varied

    several = Rankings(list(found)).by_conditions()
    drawn = {title: mine for title, mine in several.items() if varied(mine)} or several
    written = []
    for title, mine in drawn.items():
        name = re.sub(r"[^\w.]+", "-", f"{path.stem}-{title}")
        target = path if len(drawn) == 1 else path.with_stem(name)
        draw_sensitivity(by_name(mine), title, target)
        written.append(target)
    return written
