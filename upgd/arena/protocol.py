"""The rules of the arena: streams, scales, seeds; which runs come next, which sets are scored.

Every entrant tries the same number of sets, with the same seeds and length, on every stream. Then
two sets are scored at full length, with other seeds, which are the same for all entrants:

- *tuned*: on each stream the set with the largest mean accuracy there;
- *one*: for all streams the set whose worst accuracy, relative to the entrant's best set on that
  stream, is largest. It depends on no rival, so that a new one changes nobody's choice.

A run that diverges counts as chance, in the search and in the score. What comes next is a function
of what is known, from ledgers and from earlier results, so an arena that was interrupted continues.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from upgd.arena import grids
from upgd.ledger import Run, RunSpec
from upgd.ledger.spec import Scalar
from upgd.optim.registry import get as get_method
from upgd.streams import get as get_problem

SEARCH_SEEDS = range(5000, 6000)
SCORE_SEEDS = range(6000, 7000)
"""Neither are the seeds of the paper's figures (0 …) and searches (1000 …)."""

Cell = float | Literal["diverged"] | None
"""The mean accuracy of a run over all its windows; None if there is no result."""


@dataclass(frozen=True)
class Entrant:
    """A method with its sets, of which all are tried on every stream."""

    name: str
    method: str  # a name of the registry, or an alias
    sets: tuple[Mapping[str, float], ...]
    options: Mapping[str, Scalar] = field(default_factory=dict)  # of its runs
    source: str = ""  # of the code of a user's method

    @classmethod
    def named(cls, name: str, sets: int = grids.SETS) -> Entrant:
        """The entrant of a name such as ``"sgdw+layer_norm"``, with so many sets at most."""
        wanted = grids.parse(name)
        row = get_method(wanted.method)[0]
        tried = tuple(grids.sets(name, sets))
        return cls(str(wanted), wanted.method, tried, wanted.options, row.source)

    def searched(self) -> range:
        """The numbers of the sets that the search tries; none where there is no choice."""
        return range(len(self.sets) if len(self.sets) > 1 else 0)


@dataclass(frozen=True)
class Stream:
    """A problem, and how long and with which seeds it is run."""

    name: str  # of the problem
    steps: int  # of a scored run
    search_steps: int
    seeds: tuple[int, ...]  # of scored runs
    search_seeds: tuple[int, ...]
    classes: int
    options: Mapping[str, Scalar] = field(default_factory=dict)  # of all runs

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return 1 / self.classes

    def search(self, entrant: Entrant, number: int) -> list[RunSpec]:
        """The runs that try one of an entrant's sets."""
        return self._specs(entrant, number, self.search_seeds, self.search_steps)

    def score(self, entrant: Entrant, number: int) -> list[RunSpec]:
        """The runs that score one of an entrant's sets."""
        return self._specs(entrant, number, self.seeds, self.steps)

    def _specs(
        self, entrant: Entrant, number: int, seeds: Sequence[int], steps: int
    ) -> list[RunSpec]:
        hyper, options = entrant.sets[number], {**self.options, **entrant.options}
        return [RunSpec(self.name, entrant.method, hyper, seed, steps, options) for seed in seeds]

    def facts(self) -> dict[str, Any]:
        """What must be the same for results to be compared."""
        return {**asdict(self), "seeds": list(self.seeds), "search_seeds": list(self.search_seeds)}


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    name: str
    about: str
    streams: tuple[str, ...]  # names of problems
    steps: int  # of a scored run, in whole windows
    seeds: int
    sets: int  # tried per entrant
    search_seeds: int
    share: float  # of the steps, for the search
    task_length: int = 0  # the problem's if 0
    hidden: str = ""  # the problem's if empty

    def stream(self, name: str) -> Stream:
        """A stream of this scale; ValueError if there is no such problem."""
        problem = get_problem(name)
        options: dict[str, Scalar] = {"hidden": self.hidden} if self.hidden else {}
        window = problem.window
        if self.task_length:
            options["task_length" if problem.task_length else "window"] = self.task_length
            window = self.task_length
        return Stream(
            problem.name,
            _windows(self.steps, window),
            _windows(self.steps * self.share, window),
            tuple(SCORE_SEEDS[: self.seeds]),
            tuple(SEARCH_SEEDS[: self.search_seeds]),
            problem.interface[1],
            options,
        )


def _windows(steps: float, window: int) -> int:
    """Steps in whole windows, one at least."""
    return max(1, round(steps / window)) * window


_STREAMS = (
    *("input-permuted-mnist", "label-permuted-emnist", "both-permuted-mnist"),
    *("label-permuted-mini-imagenet", "gradual-input-permuted-mnist"),
    *("recurring-label-permuted-emnist", "stationary-mnist"),
)
LOCKED = (
    *("both-permuted-emnist", "input-permuted-mini-imagenet"),
    *("label-permuted-flat-cifar10", "recurring-input-permuted-mnist"),
)
"""Streams on which the package's own methods were not tried before their constants were fixed."""
SCALES: Mapping[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            *("smoke", "small networks on embedded digits: seconds, and no data needed"),
            (
                *("input-permuted-digits", "both-permuted-digits"),
                *("gradual-input-permuted-digits", "recurring-label-permuted-digits"),
            ),
            steps=2_000,
            seeds=3,
            sets=4,
            search_seeds=1,
            share=1 / 4,
            task_length=200,
            hidden="32",
        ),
        Scale("quick", "ten minutes on one GPU for one method", _STREAMS, 100_000, 3, 4, 1, 1 / 4),
        Scale(
            "full",
            "what the leaderboard is made of",
            (*_STREAMS, *LOCKED),
            steps=500_000,
            seeds=5,
            sets=12,
            search_seeds=1,
            share=1 / 10,
        ),
        Scale(
            "long",
            "whether methods last; the search is that of the full scale",
            ("input-permuted-mnist", "label-permuted-emnist"),
            steps=5_000_000,
            seeds=3,
            sets=12,
            search_seeds=1,
            share=1 / 100,
        ),
    )
}


def choose_streams(scale: Scale, names: Sequence[str] = ()) -> dict[str, Stream]:
    """The streams of a scale, or these; any problem with classes will do.

    Raises:
        ValueError: There is no such problem, or it has no classes.
    """
    found = {}
    for name in names or scale.streams:
        if get_problem(name).loss != "cross_entropy":
            raise ValueError(f"{name} has no classes, and the arena compares accuracies")
        found[name] = scale.stream(name)
    return found


def choose_scale(name: str) -> Scale:
    """A scale by name; ValueError with a hint if there is none."""
    if name not in SCALES:
        close = difflib.get_close_matches(name, SCALES, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no scale {name!r}; {hint}there are {', '.join(SCALES)}")
    return SCALES[name]


# ------------------------------------------------------------------------------- selection
Search = Mapping[tuple[str, int], Sequence[Cell]]
"""What an entrant's search gave: cells in the order of seeds, by stream and number of the set."""


@dataclass(frozen=True)
class Choice:
    """The sets of an entrant that are scored: numbers, by stream and for all streams together."""

    tuned: Mapping[str, int]
    one: int | None  # None where no set has a result on every stream

    def numbers(self, stream: str) -> list[int]:
        """The sets to score on a stream, each once."""
        both = (self.tuned.get(stream), self.one)
        return list(dict.fromkeys(number for number in both if number is not None))


def value(cell: Cell, chance: float) -> float:
    """A cell as accuracy; NaN if there is no result."""
    if cell is None:
        return math.nan
    return chance if cell == "diverged" else float(cell)


def choose(search: Search, streams: Iterable[Stream]) -> Choice:
    """The sets that a search recommends; of equal ones the first.

    A set without all its results is not chosen.

    Example:
        >>> streams = [Stream(name, 10, 1, (0,), (0,), 10) for name in "ab"]
        >>> search = {("a", 0): [0.9], ("a", 1): [0.8], ("b", 0): [0.2], ("b", 1): [0.8]}
        >>> choose(search, streams)
        Choice(tuned={'a': 0, 'b': 1}, one=1)
    """
    tuned: dict[str, int] = {}
    relative: dict[int, list[float]] = {}
    streams = list(streams)
    for stream in streams:
        means = {
            number: float(np.mean([value(cell, stream.chance) for cell in cells]))
            for (name, number), cells in sorted(search.items())
            if name == stream.name and len(cells)
        }
        whole = {number: mean for number, mean in means.items() if math.isfinite(mean)}
        if not whole:
            continue
        tuned[stream.name] = max(whole, key=lambda number: whole[number])
        best = whole[tuned[stream.name]]
        for number, mean in whole.items():
            relative.setdefault(number, []).append(mean / best if best else 1.0)
    worst = {n: min(some) for n, some in relative.items() if len(some) == len(streams)}
    return Choice(tuned, max(worst, key=lambda number: worst[number]) if worst else None)


# ---------------------------------------------------------------------------------- runs
Known = Mapping[str, Cell]
"""What is known of runs, by their keys."""


def cell_of(run: Run) -> Cell:
    """What a run gave."""
    if run.result is None:
        return None
    if run.state == "diverged":
        return "diverged"
    found = run.result.summary.get("accuracy", math.nan)
    return found if run.state == "done" and math.isfinite(found) else None


def read_search(
    known: Known, entrant: Entrant, streams: Iterable[Stream]
) -> dict[tuple[str, int], list[Cell]]:
    """What an entrant's search gave."""
    return {
        (stream.name, number): [known.get(s.key) for s in stream.search(entrant, number)]
        for stream in streams
        for number in entrant.searched()
    }


def choice_of(known: Known, entrant: Entrant, streams: Iterable[Stream]) -> Choice:
    """The sets of an entrant that are scored: what its search recommends, or its only one."""
    streams = list(streams)
    if len(entrant.sets) == 1:
        return Choice({stream.name: 0 for stream in streams}, 0)
    return choose(read_search(known, entrant, streams), streams)


def search_specs(entrants: Iterable[Entrant], streams: Iterable[Stream]) -> list[RunSpec]:
    """The runs of all searches, each once."""
    streams = list(streams)
    every = (
        spec
        for entrant in entrants
        for stream in streams
        for number in entrant.searched()
        for spec in stream.search(entrant, number)
    )
    return list(dict.fromkeys(every))


def score_specs(entrant: Entrant, streams: Iterable[Stream], choice: Choice) -> Iterator[RunSpec]:
    """The runs that score an entrant's chosen sets."""
    for stream in streams:
        for number in choice.numbers(stream.name):
            yield from stream.score(entrant, number)


def upcoming(
    known: Known,
    entrants: Sequence[Entrant],
    streams: Iterable[Stream],
    over: Collection[str] = (),
) -> list[RunSpec]:
    """The next runs: the search's, then the score's; empty at the end.

    Args:
        known: What earlier runs gave.
        entrants: Whose runs.
        streams: On which.
        over: Keys of further runs that are not done again, such as failed ones.
    """
    done, streams = {*known, *over}, list(streams)
    left = [spec for spec in search_specs(entrants, streams) if spec.key not in done]
    if left:
        return left
    chosen = ((e, choice_of(known, e, streams)) for e in entrants)
    every = (spec for e, choice in chosen for spec in score_specs(e, streams, choice))
    return [spec for spec in dict.fromkeys(every) if spec.key not in done]


def forecast_specs(entrants: Iterable[Entrant], streams: Iterable[Stream]) -> list[RunSpec]:
    """As many runs as there will be at most, to estimate the time; which sets is not known yet."""
    entrants, streams = list(entrants), list(streams)
    found = search_specs(entrants, streams)
    for entrant in entrants:
        for stream in streams:
            for number in range(min(2, len(entrant.sets))):
                found += stream.score(entrant, number)
    return list(dict.fromkeys(found))
