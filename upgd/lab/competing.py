"""The arena on a study: which entrants, what is left to run, what they cost, where results go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

import upgd
from upgd.arena import board, evidence, grids
from upgd.arena.evidence import Cost, Evidence, cells_of, gather, joined
from upgd.arena.protocol import (
    Cell,
    Entrant,
    Stream,
    choose_scale,
    choose_streams,
    forecast_specs,
    upcoming,
)
from upgd.lab.study import Study
from upgd.ledger import Ledger, Run, RunSpec
from upgd.ledger.ledger import NAME
from upgd.optim.registry import METHODS
from upgd.paper.provenance import known_data
from upgd.study.execution import Tally
from upgd.study.forecast import forecast_lines
from upgd.study.kinds import kind_of
from upgd.study.learners import EAGER, at_a_time, device_name
from upgd.study.options import Options, check_device
from upgd.study.prepare import prepare
from upgd.study.sweeps import OVER
from upgd.text import count

AT_MOST = 64
"""Learners of the stack in which a step is timed."""


def committed(scale: str) -> Path | None:
    """The folder of the results that come with a clone of the package, if there is one."""
    found = Path(upgd.__file__).parents[1] / "docs" / "results" / "arena" / scale
    return found if evidence.exists(found) else None


@dataclass
class Contest:
    """Entrants on the streams of a scale.

    Args:
        study: Where runs go.
        names: Of entrants; by default those that a user's file registered, methods or grids, or
            else all that have a grid.
        scale: Of :data:`~upgd.arena.protocol.SCALES`.
        streams: Of these problems instead of the scale's.
        others: Further studies, which are only read.
        against: A folder of results whose entrants are rivals.
        results: Where tables and pages go; by default ``results`` in the study's folder.
        baseline: The entrant that all are compared with; by default that of earlier results.

    Raises:
        ValueError: There is no such scale, problem or method, or results would be lost.
    """

    study: Study
    names: Sequence[str] = ()
    scale: str = "quick"
    streams: Sequence[str] = ()
    others: Sequence[Path] = ()
    against: Path | None = None
    results: Path | None = None
    baseline: str = ""
    found: Evidence | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        size = choose_scale(self.scale)
        self.chosen: dict[str, Stream] = choose_streams(size, self.streams)
        own = [name for name, row in METHODS.items() if row.source]
        names = self.names or [*grids.registered(), *own] or list(grids.GRIDS)
        self.entrants = {e.name: e for e in (Entrant.named(name, size.sets) for name in names)}
        for folder in self.others:
            if not (folder / NAME).exists():
                raise ValueError(f"there is no study in {folder}")
        self.folder = self.results or self.study.folder / "results"
        self.earlier = [] if self.against is None else [evidence.read(self.against)]
        if evidence.exists(self.folder):
            before = evidence.read(self.folder)
            self._check_kept(before)
            if self.against is None or self.against.resolve() != self.folder.resolve():
                self.earlier.append(before)
        self.rivals = [e for e in self.earlier if evidence.shared(self.chosen, e.streams)]
        self._check_baseline()
        if self.earlier and not self.rivals:
            self.study.note(f"{self.against} has none of these streams and protocols: no rivals")

    def _check_baseline(self) -> None:
        """Raise if there is no such entrant."""
        if self.baseline:
            self.baseline = str(grids.parse(self.baseline))
            known = {*self.entrants, *(name for e in self.rivals for name in e.entrants)}
            if self.baseline not in known:
                raise ValueError(f"the baseline {self.baseline} is no entrant; name it as well")

    def _check_kept(self, before: Evidence) -> None:
        """Raise if writing would drop streams of earlier results."""
        for name, stream in before.streams.items():
            mine = self.chosen.get(name)
            if mine is None or mine.facts() != stream.facts():
                raise ValueError(
                    f"{self.folder} has results on {name} that these would replace; name the same "
                    "streams and scale, or another folder with --results"
                )

    # ------------------------------------------------------------------------------ running
    def check(self) -> None:
        """Find mistakes, missing data and outputs that cannot be written before anything runs."""
        check_device(self.study.options.here)
        first = [stream.search(e, 0)[0] for e in self.entrants.values() for stream in self._each()]
        self.study.check(first)
        board.check(self.folder)
        if not self.rivals and len(self.entrants) == 1:
            self.study.note(
                f"there are no results of rivals at scale {self.scale}: name some methods, too, "
                "or a folder with --against"
            )

    def _each(self) -> Iterable[Stream]:
        return self.chosen.values()

    def runs(self) -> list[Run]:
        """All runs of the studies."""
        return [run for ledger in self._ledgers() for run in ledger.runs()]

    def series(self) -> dict[str, list[float]]:
        """Accuracies over time of the runs that are scored, by their keys."""
        lengths = {stream.steps for stream in self._each()}
        return {
            key: [float(value) for value in ledger.series(key, "accuracy")]
            for ledger in self._ledgers()
            for key in [
                r.key for r in ledger.runs() if r.state == "done" and r.spec.steps in lengths
            ]
        }

    def _ledgers(self) -> Iterator[Ledger]:
        for folder in (self.study.folder, *self.others):
            if (folder / NAME).exists():
                with Ledger.open(folder, create=False, read_only=True) as ledger:
                    yield ledger

    def known(self) -> dict[str, Cell]:
        """What earlier results have of the entrants, by keys of runs."""
        found: dict[str, Cell] = {}
        for results in self.earlier:
            found |= results.known(self.entrants)
        return found

    def upcoming(self) -> list[RunSpec]:
        """The next runs: the search's, then the score's."""
        runs = self.runs()
        over = [run.key for run in runs if run.state in OVER]
        known = {**self.known(), **cells_of(runs)}
        return upcoming(known, list(self.entrants.values()), self._each(), over)

    def outlook(self) -> list[str]:
        """How much there is to do and how long it takes, as lines."""
        known = self.runs()
        over = {*self.known(), *(run.key for run in known if run.state in OVER)}
        every = forecast_specs(self.entrants.values(), self._each())
        left = [spec for spec in every if spec.key not in over] if self.upcoming() else []
        sets = max(len(entrant.sets) for entrant in self.entrants.values())
        lines = [
            f"{count(len(self.entrants), 'method')}, {count(len(self.chosen), 'stream')}, up to "
            f"{count(sets, 'set')} each; at most {len(left)} of {count(len(every), 'run')} to do "
            f"in {self.study.folder}"
        ]
        return lines + forecast_lines(left, known, self.study.options)

    def run(self) -> None:
        """The search, then the score; the study's tally counts all runs."""
        tally = Tally()
        if not self.study.quiet:
            for line in self.outlook():
                self.study.note(line)
        while specs := self.upcoming():
            if not self.study.quiet:
                steps = " and ".join(map(str, sorted({spec.steps for spec in specs})))
                self.study.note(f"{count(len(specs), 'run')} of {steps} steps")
            self.study.run_specs(specs, wait=True)
            tally = tally + self.study.tally
            if self.study.tally.refused or self.study.tally.lost:
                break  # they would be tried again and again
        self.study.tally = tally

    # ------------------------------------------------------------------------------ results
    def gather(self, measure: bool = True) -> Evidence:
        """What the studies have of the entrants, among their rivals.

        Args:
            measure: Whether to time steps that no earlier results have.
        """
        data_dir = self.study.options.data_dir
        datasets = {kind_of(each.name).dataset(each.name): each for each in self._each()}
        data = {
            name: known_data(stream.name, data_dir, None)
            for name, stream in datasets.items()
            if name is not None
        }
        entrants = self.entrants.values()
        runs, series, known = self.runs(), self.series(), self.known()
        mine = gather(runs, self.scale, entrants, self.chosen, known, data, series)
        mine = mine.with_costs(self._costs(mine, measure))
        for rivals in self.rivals:
            mine = mine.with_curves(rivals)
            mine, left = joined(mine, rivals)
            if left:
                self.study.note(f"rivals have another protocol on {', '.join(left)}: left out")
        self.found = mine.against(self.baseline) if self.baseline else mine
        return self.found

    def _costs(self, mine: Evidence, measure: bool) -> dict[str, Cost]:
        known = {
            name: cost
            for rivals in self.rivals
            for name, cost in rivals.costs.items()
            if name in mine.entrants and rivals.entrants[name] == mine.entrants[name]
        }
        options = Options(
            self.study.options.here, self.study.options.engine, self.study.options.data_dir
        )
        found = {}
        for name, entrant in mine.entrants.items():
            number = mine.choices[name].one or 0
            if name in known and known[name].seconds is not None:
                found[name] = known[name]
            elif measure:
                found[name] = step_cost(entrant, number, next(iter(self._each())), options)
            else:
                found[name] = Cost(numbers_per_weight(entrant))
        return found

    def write(self) -> list[Path]:
        """Write tables, then pages and figures from them; returns their paths."""
        tables = evidence.write(self.found or self.gather(), self.folder)
        return [*tables, *board.write(evidence.read(self.folder), self.folder)]


# ------------------------------------------------------------------------------------ costs
def step_cost(entrant: Entrant, number: int, stream: Stream, options: Options) -> Cost:
    """The time of one step of one learner, with others of its kind where stacks run it."""
    kind, hyper = kind_of(stream.name), entrant.sets[number]
    settings = {**stream.options, **entrant.options}
    many = min(AT_MOST, at_a_time(options.device))
    specs = [
        RunSpec(stream.name, entrant.method, hyper, seed, stream.steps, settings)
        for seed in range(many)
    ]
    group = kind.group(specs[0], options)
    engine = EAGER if group is None else group[0]
    pace = kind.measure_pace(specs, options)
    together = 1 if engine == EAGER else many
    where = f"{kind.engine_name(specs[0], engine, options.device)}, {device_name(options.device)}"
    how = f"{where}, {count(together, 'learner')} at a time on {stream.name}"
    return Cost(numbers_per_weight(entrant), 1 / pace.rate, how)


def numbers_per_weight(entrant: Entrant) -> float:
    """Numbers that are kept per weight: itself, and what the optimizer keeps of it.

    Counted on a small network after two steps; scalars are left out.
    """
    options = {"hidden": "64-32", **entrant.options}
    spec = RunSpec("label-permuted-digits", entrant.method, entrant.sets[0], 0, 2, options)
    run = prepare(spec)
    run.advance(2)
    weights = sum(p.numel() for p in run.model.parameters())
    return 1 + sum(_sizes(run.optimizer.state_dict()["state"])) / weights


def _sizes(kept: Any) -> Iterable[int]:
    """The sizes of tensors in nested containers."""
    if isinstance(kept, Tensor):
        yield kept.numel() if kept.numel() > 1 else 0
    elif isinstance(kept, Mapping):
        for value in kept.values():
            yield from _sizes(value)
    elif isinstance(kept, list | tuple):
        for value in kept:
            yield from _sizes(value)


def page(folder: Path, baseline: str = "") -> list[Path]:
    """Make the page and the figures of results again; returns the paths.

    Args:
        folder: Of the results.
        baseline: An entrant that others are compared with from now on.
    """
    found = evidence.read(folder)
    board.check(folder)
    written = []
    if baseline:
        found = found.against(baseline.lower())
        written = evidence.write(found, folder)
    return [*written, *board.write(found, folder)]
