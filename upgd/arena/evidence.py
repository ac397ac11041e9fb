"""What the arena's runs gave, as four small files that are committed.

===============  ==============================================================================
``arena.json``   streams, entrants with their sets, which of them are scored, provenance
``search.csv``   an entrant, a stream and a set per row; mean accuracies, a column per seed
``score.csv``    the same of the sets that are scored
``curves.csv``   how their accuracy goes over the run: means over seeds of fifty equal parts
===============  ==============================================================================

A cell is a mean accuracy over a whole run, ``diverged``, or empty where there is no result. Pages
are made from these files alone.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from upgd.arena.protocol import (
    Cell,
    Choice,
    Entrant,
    Known,
    Stream,
    cell_of,
    choice_of,
    read_search,
)
from upgd.ledger import Run, write_atomically
from upgd.paper.provenance import Portion, by_age, portions

FACTS, SEARCH, SCORE, CURVES = "arena.json", "search.csv", "score.csv", "curves.csv"
COLUMNS = ["entrant", "stream", "set"]
FORMAT = 1
POINTS = 50
"""Parts of a curve at most."""
Cells = Mapping[tuple[str, str, int], Sequence[Cell]]
"""By entrant, stream and number of the set, in the order of seeds."""


@dataclass(frozen=True)
class Cost:
    """What an entrant takes.

    Attributes:
        floats: Numbers kept per weight, the weight among them, its gradient not.
        seconds: Of one step of one learner, in a stack of its own kind; None if not measured.
        how: Engine and device.
    """

    floats: float
    seconds: float | None = None
    how: str = ""


@dataclass(frozen=True)
class Evidence:
    """Everything that scores and pages are made of."""

    scale: str
    streams: Mapping[str, Stream]
    entrants: Mapping[str, Entrant]
    choices: Mapping[str, Choice]
    search: Cells
    score: Cells
    costs: Mapping[str, Cost] = field(default_factory=dict)
    parts: Sequence[Portion] = ()
    data: Mapping[str, Any] = field(default_factory=dict)  # by dataset: samples and checksums
    baseline: str = ""  # the entrant that others are compared with, if any
    curves: Mapping[tuple[str, str, int], Sequence[float]] = field(default_factory=dict)

    def with_costs(self, costs: Mapping[str, Cost]) -> Evidence:
        """The same with some costs in place of others."""
        return replace(self, costs={**self.costs, **costs})

    def with_curves(self, others: Evidence) -> Evidence:
        """The same with curves of others where it has none of the same runs."""
        found = {}
        for name, stream, number in self.score:
            rival = others.entrants.get(name)
            mine = self.entrants[name]
            if (
                rival is not None
                and rival.source == mine.source
                and mine.sets[number] in rival.sets
            ):
                there = (name, stream, rival.sets.index(mine.sets[number]))
                if there in others.curves:
                    found[name, stream, number] = others.curves[there]
        return replace(self, curves={**found, **self.curves})

    def against(self, baseline: str) -> Evidence:
        """The same, with others compared with this entrant; ValueError if there is none."""
        if baseline and baseline not in self.entrants:
            raise ValueError(f"there is no baseline {baseline!r} among {', '.join(self.entrants)}")
        return replace(self, baseline=baseline)

    def known(self, entrants: Mapping[str, Entrant]) -> dict[str, Cell]:
        """What runs gave, by their keys; of those entrants whose code is still the same."""
        codes = {name: entrant.source for name, entrant in entrants.items()}
        same = {name for name, e in self.entrants.items() if codes.get(name) == e.source}
        found: dict[str, Cell] = {}
        for stage, cells in (("search", self.search), ("score", self.score)):
            for (name, stream, number), some in cells.items():
                if name in same:
                    specs = getattr(self.streams[stream], stage)(self.entrants[name], number)
                    pairs = zip(specs, some, strict=True)
                    found |= {spec.key: cell for spec, cell in pairs if cell is not None}
        return found


def cells_of(runs: Iterable[Run]) -> dict[str, Cell]:
    """What the runs of a ledger gave, by their keys."""
    return {run.key: cell for run in runs if (cell := cell_of(run)) is not None}


def gather(
    runs: Iterable[Run],
    scale: str,
    entrants: Iterable[Entrant],
    streams: Mapping[str, Stream],
    earlier: Known | None = None,
    data: Mapping[str, Any] | None = None,
    series: Mapping[str, Sequence[float]] | None = None,
) -> Evidence:
    """What ledgers, or earlier results, have of entrants on streams.

    Args:
        runs: Of ledgers.
        scale: Its name.
        entrants: Whose runs are meant.
        streams: On which.
        earlier: What earlier results have, by keys of runs.
        data: Facts about datasets.
        series: Accuracies over time of runs, by their keys.
    """
    every, earlier = list(runs), earlier or {}
    known = {**earlier, **cells_of(every)}
    ran = {run.key: run for run in every if run.key not in earlier}  # whose parts are not known yet
    search: dict[tuple[str, str, int], Sequence[Cell]] = {}
    score: dict[tuple[str, str, int], Sequence[Cell]] = {}
    choices: dict[str, Choice] = {}
    used: dict[str, Run] = {}
    curves: dict[tuple[str, str, int], Sequence[float]] = {}
    entered = {entrant.name: entrant for entrant in entrants}
    for name, entrant in entered.items():
        found = read_search(known, entrant, streams.values())
        choices[name] = choice_of(known, entrant, streams.values())
        search |= {(name, *key): cells for key, cells in found.items()}
        for stream in streams.values():
            for number in choices[name].numbers(stream.name):
                specs = stream.score(entrant, number)
                score[name, stream.name, number] = [known.get(s.key) for s in specs]
                used |= {s.key: ran[s.key] for s in specs if s.key in ran}
                if series and all(s.key in series for s in specs):
                    curves[name, stream.name, number] = curve([series[s.key] for s in specs])
            for number in entrant.searched():
                specs = stream.search(entrant, number)
                used |= {s.key: ran[s.key] for s in specs if s.key in ran}
    parts = portions(run for run in used.values() if run.result is not None)
    return Evidence(
        scale,
        streams,
        entered,
        choices,
        search,
        score,
        parts=parts,
        data=data or {},
        curves={key: some for key, some in curves.items() if some},
    )


def curve(series: Sequence[Sequence[float]]) -> list[float]:
    """The mean of series, in :data:`POINTS` equal parts at most; empty if lengths differ.

    Example:
        >>> curve([[0.0, 1.0, 0.5], [1.0, 1.0, 0.0]])
        [0.5, 1.0, 0.25]
    """
    if len({len(some) for some in series}) != 1:
        return []
    mean = np.mean(np.array(series, dtype=np.float64), axis=0)
    return [float(part.mean()) for part in np.array_split(mean, min(POINTS, len(mean)))]


def shared(mine: Mapping[str, Stream], others: Mapping[str, Stream]) -> list[str]:
    """The names of the streams whose protocol is the same in both."""
    found = {name: stream for name, stream in mine.items() if name in others}
    return [name for name, stream in found.items() if others[name].facts() == stream.facts()]


def joined(mine: Evidence, others: Evidence) -> tuple[Evidence, list[str]]:
    """Both on the streams whose protocol is the same; and the names of the other streams.

    An entrant that is in both is taken from `mine`, which has what `others` know of it; so is the
    baseline.

    Raises:
        ValueError: There is no such stream.
    """
    alike = shared(mine.streams, others.streams)
    if not alike:
        raise ValueError("no stream has the same protocol in both: other steps, seeds or options")
    rivals = [name for name in others.entrants if name not in mine.entrants]
    names = [*rivals, *mine.entrants]
    origin = dict.fromkeys(rivals, others) | dict.fromkeys(mine.entrants, mine)

    def cells(of: str) -> dict[tuple[str, str, int], Sequence[Cell]]:
        return {
            key: found
            for name in names
            for key, found in getattr(origin[name], of).items()
            if key[0] == name and key[1] in alike
        }

    lines = {
        key: line
        for name in names
        for key, line in origin[name].curves.items()
        if key[0] == name and key[1] in alike
    }
    both = Evidence(
        mine.scale,
        {name: mine.streams[name] for name in alike},
        {name: origin[name].entrants[name] for name in names},
        {name: origin[name].choices[name] for name in names},
        cells("search"),
        cells("score"),
        {name: origin[name].costs[name] for name in names if name in origin[name].costs},
        by_age([*others.parts, *mine.parts]),
        {**others.data, **mine.data},
        mine.baseline or others.baseline,
        lines,
    )
    return both, [name for name in mine.streams if name not in alike]


# ----------------------------------------------------------------------------------- files
def write(evidence: Evidence, folder: Path) -> list[Path]:
    """Write the files; returns their paths."""
    facts = {
        "format": FORMAT,
        "scale": evidence.scale,
        "streams": [stream.facts() for stream in evidence.streams.values()],
        "entrants": [_entrant_facts(evidence, name) for name in evidence.entrants],
        "ran": [asdict(part) for part in evidence.parts],
        "data": evidence.data,
        **({"baseline": evidence.baseline} if evidence.baseline else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        FACTS: json.dumps(facts, indent=1, ensure_ascii=False) + "\n",
        SEARCH: _table(evidence.search),
        SCORE: _table(evidence.score),
    }
    if evidence.curves:
        contents[CURVES] = _table(evidence.curves, "part", 4)
    for name, content in contents.items():
        write_atomically(folder / name, content.encode())
    return [folder / name for name in contents]


def _entrant_facts(evidence: Evidence, name: str) -> dict[str, Any]:
    facts = asdict(evidence.entrants[name])
    chosen = {"tuned": dict(evidence.choices[name].tuned), "one": evidence.choices[name].one}
    cost = evidence.costs.get(name)
    return {**facts, "chosen": chosen, "cost": None if cost is None else asdict(cost)}


def _table(cells: Cells, column: str = "seed", digits: int = 6) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    most = max((len(some) for some in cells.values()), default=0)
    writer.writerow([*COLUMNS, *(f"{column} {i}" for i in range(1, most + 1))])
    for key, some in cells.items():
        writer.writerow([*key, *(_written(cell, digits) for cell in some)])
    return text.getvalue()


def _written(cell: Cell, digits: int) -> str:
    return f"{cell:.{digits}f}" if isinstance(cell, float) else cell or ""


def exists(folder: Path) -> bool:
    """Whether a folder has the files of an arena."""
    return (folder / FACTS).is_file()


def read(folder: Path) -> Evidence:
    """Read what :func:`write` wrote; ValueError if it is something else."""
    path = folder / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']}, not {FORMAT}")
        streams = [_stream(each) for each in facts["streams"]]
        entrants, choices, costs = {}, {}, {}
        for each in facts["entrants"]:
            chosen, cost = each.pop("chosen"), each.pop("cost")
            entrant = Entrant(**{**each, "sets": tuple(each["sets"])})
            entrants[entrant.name] = entrant
            choices[entrant.name] = Choice(chosen["tuned"], chosen["one"])
            if cost is not None:
                costs[entrant.name] = Cost(**cost)
        parts = [Portion(**part) for part in facts["ran"]]
        tables = [_read_table(folder / name) for name in (SEARCH, SCORE)]
        curves = _read_curves(folder / CURVES)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{folder} has no results of the arena: {error}") from None
    by_name = {stream.name: stream for stream in streams}
    whole = (facts["scale"], by_name, entrants, choices, *tables, costs, parts, facts["data"])
    return replace(Evidence(*whole), curves=curves).against(facts.get("baseline", ""))


def _stream(facts: Mapping[str, Any]) -> Stream:
    seeds = {name: tuple(facts[name]) for name in ("seeds", "search_seeds")}
    return Stream(**{**facts, **seeds})


def _read_table(path: Path) -> dict[tuple[str, str, int], list[Cell]]:
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    if header[:3] != COLUMNS:
        raise ValueError(f"{path.name} has columns {', '.join(header[:3])}")
    return {(row[0], row[1], int(row[2])): [_cell(text) for text in row[3:]] for row in rows}


def _read_curves(path: Path) -> dict[tuple[str, str, int], list[float]]:
    """The curves, each as long as it is; none where there is no such file."""
    found = _read_table(path) if path.is_file() else {}
    return {key: [x for x in some if isinstance(x, float)] for key, some in found.items()}


def _cell(text: str) -> Cell:
    if text == "diverged":
        return "diverged"
    return float(text) if text else None
