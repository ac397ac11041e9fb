"""Figures of the paper from runs: what they need, what is there already, tables and pictures."""

from __future__ import annotations

import difflib
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from upgd.extras import install
from upgd.lab.study import Study
from upgd.ledger import Ledger, Run, RunSpec
from upgd.ledger.files import check_generated, check_output_folder
from upgd.ledger.ledger import NAME
from upgd.ledger.versions import commit
from upgd.metrics import STRIDED
from upgd.paper import committed, provenance
from upgd.paper.committed import Table, are_tables
from upgd.paper.drawing import can_draw, diverged_arms, draw, missing
from upgd.paper.experiments import ENVIRONMENTS, EXPERIMENTS, SHORTEST, Experiment, agents_name
from upgd.paper.figures import FIGURES, Figure
from upgd.paper.measured import MEASURED
from upgd.paper.measuring import How, Measured
from upgd.paper.provenance import Provenance
from upgd.paper.results import (
    TABLE,
    Results,
    find,
    folder_name,
    gather,
    is_diagnosed,
    lacking,
    read,
    write,
)
from upgd.report.plotting import check_format
from upgd.study.forecast import forecast_lines
from upgd.study.kinds import kind_of
from upgd.study.options import check_device
from upgd.text import count

MARKED = {"png", "svg"}
"""Formats of figures that name the program near their beginning."""


@dataclass
class Reproduction:
    """Some figures of the paper, from the runs of a study.

    Args:
        study: Where runs and figures go.
        figures: Names; ``"all"`` for all.
        others: Further studies or folders of tables, which are only read: what they have is not
            run again.
        results: Where tables go; by default ``results`` in the study's folder.
        scale: Share of the paper's steps.
        seeds: How many; 0 for the paper's.
        problems: Only these, comma-separated.
        environments: Of agents, only these.
        formats: Of figures.
        to_run: Whether anything will be run.

    Attributes:
        written: Figures that were written.

    Raises:
        ValueError: There is no such figure, problem or folder.
        StudyError: Something cannot be written.
    """

    study: Study
    figures: Sequence[str]
    others: Sequence[Path] = ()
    results: Path | None = None
    scale: float = 1.0
    seeds: int = 0
    problems: str = ""
    environments: str = ""
    formats: str = "png,svg"
    to_run: bool = True
    written: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ValueError(f"--scale must be above 0 and at most 1, got {self.scale:g}")
        first = self.study.folder
        if are_tables(first):
            raise ValueError(f"{first} has tables, and is no study for runs: name one before it")
        for folder in self.others:
            if not are_tables(folder) and not (folder / NAME).exists():
                raise ValueError(f"there is neither a study nor a folder of tables in {folder}")
        drawn, self.measured = self._chosen()
        self.studies = [first, *(each for each in self.others if not are_tables(each))]
        self.tables = self.results or first / "results"
        self.suffixes = _suffixes(self.formats)
        self.names = _experiments(drawn, self.problems, self.environments)
        self.asked = How(self.scale, self.seeds, self.study.options.device)
        self.drawn = [
            _narrowed(figure, self.names)
            for figure in drawn
            if set(figure.experiments) & set(self.names)
        ]
        self._check_outputs()
        self.there = self._tables()
        self.needed = _experiments(drawn, self.problems, self.environments, to_run=True)
        for name in self.needed:
            experiment = EXPERIMENTS[name]
            if not experiment.arms and experiment.awaited:
                self._warn(
                    f"{name}: its sets are still to be searched: "
                    f"'upgd search {experiment.problem}' finds some"
                )
            if self.to_run:
                self._note_length(experiment)

    def _warn(self, text: str) -> None:
        self.study.note(text)

    # ------------------------------------------------------------------------------ running
    def outlook(self) -> list[str]:
        """What would be run and measured, and how long that takes, as lines."""
        found = []
        if self._all_specs():
            found = self._outlook(*self._left())
        for each in self.measured:
            known = self._known_measure(each)
            found.append(known or f"{each.NAME}: {each.plan(self.asked)}")
        return found

    def run(self) -> None:
        """Run what no study or table has, and measure."""
        check_device(self.study.options.here)
        left, known = self._left()
        if self._all_specs() and not self.study.quiet:
            for line in self._outlook(left, known):
                self.study.note(line)
        if left:
            self.study.run_specs(left)
        for each in self.measured:
            self._measure(each)

    def _all_specs(self, there: Mapping[str, Table] | None = None) -> list[RunSpec]:
        return _specs(self.needed, self.scale, self.seeds, there, self._diagnosed())

    def _diagnosed(self) -> set[str]:
        """Experiments whose diagnostics are drawn."""
        panels = (panel for figure in self.drawn for panel in figure.panels)
        return {panel.experiment for panel in panels if panel.metric in STRIDED}

    def _left(self) -> tuple[list[RunSpec], list[Run]]:
        """The runs to do, and those that studies have."""
        specs = self._all_specs(self.there)
        for problem in dict.fromkeys(spec.problem for spec in specs):
            if not kind_of(problem).local_only:  # a wrong file is found before anything starts
                kind_of(problem).check_data(problem, self.study.options.data_dir)
        with ExitStack() as stack:
            known = [run for ledger in self._ledgers(stack) for run in ledger.runs()]
        left = lacking(specs, known)
        for problem in dict.fromkeys(spec.problem for spec in left):
            kind_of(problem).check_data(problem, self.study.options.data_dir)
        return left, known

    def _outlook(self, left: Sequence[RunSpec], known: Sequence[Run]) -> list[str]:
        runs = count(len(self._all_specs()), "run")
        lines = [f"{len(left)} of {runs} to do in {self.study.folder}"]
        return lines + forecast_lines(left, known, self.study.options)

    def _known_measure(self, each: Measured) -> str:
        """What to say of a figure that was measured in the same way before."""
        folder = self.tables / each.folder(self.asked)
        before = provenance.read(folder)
        if before is None or before.command != self.asked.command(each.NAME):
            return ""
        return f"{each.NAME}: measured on {before.parts[-1].ended}; remove {folder} to repeat it"

    def _measure(self, each: Measured) -> None:
        say = (lambda text: None) if self.study.quiet else self.study.note
        if known := self._known_measure(each):
            say(known)
            return
        say(f"{each.NAME}: {each.plan(self.asked)}")
        folder = self.tables / each.folder(self.asked)
        folder.mkdir(parents=True, exist_ok=True)
        commit()  # that of the code which runs, not of what lies there at the end
        each.measure(self.asked, folder, say)

    # ------------------------------------------------------------------------------- results
    def draw(self) -> None:
        """Write tables with their provenance, and the figures."""
        found = self._keep()
        self.study.folder.mkdir(parents=True, exist_ok=True)
        for figure in self.drawn:
            self._draw(figure, found)
        for each in self.measured:
            table = self.tables / each.folder(self.asked)
            if (table / each.TABLE).exists():
                self.written += each.draw(table, self.study.folder, self.suffixes)
            else:
                self._warn(f"{each.NAME} has not been measured")

    def _keep(self) -> dict[str, Results]:
        """What there is of experiments, written as tables with where they come from."""
        kept: dict[str, Results] = {}
        with ExitStack() as stack:
            ledgers = self._ledgers(stack)
            for name in self.names:
                folder = self.tables / folder_name(name)
                before = provenance.read(folder)
                found = self._found(EXPERIMENTS[name], ledgers, before)
                if found is None:
                    if (folder / TABLE).exists():  # as another study left it
                        kept[name] = read(folder / TABLE, name)
                    continue
                results, told = found
                old = [] if before is None else before.outdated(EXPERIMENTS[name])
                if before is not None and not old and before.learner_steps > told.learner_steps:
                    self._warn(
                        f"kept {folder}: it has {count(before.runs, 'run')}, more than the study"
                    )
                    results = read(folder / TABLE, name)
                elif before is not None and old and before.has_more(told, old):
                    sets = (
                        f"other sets ({', '.join(old)}), and more runs of the others than the study"
                    )
                    self._warn(f"kept {folder}, which is not drawn: it has {sets}")
                else:
                    folder.mkdir(parents=True, exist_ok=True)
                    write(results, folder / TABLE)
                    told.write(folder)
                kept[name] = results
        return kept

    def _found(
        self, experiment: Experiment, ledgers: Sequence[Ledger], before: Provenance | None
    ) -> Table | None:
        """What studies have of an experiment, with the table that counts as runs."""
        table, data_dir = self.there.get(experiment.name), self.study.options.data_dir
        found = find(ledgers, experiment, None if table is None else table.told.steps)
        if table is not None:
            specs = ((each, each.run.spec) for each in found)
            found = [e for e, spec in specs if not table.has(e.arm, spec, is_diagnosed(spec))]
        new = gather(found, experiment.name)
        if new is None:
            return table
        known = before if table is None else table.told
        data = provenance.known_data(experiment.problem, data_dir, known)
        more = Table(new, provenance.describe(found, experiment, data))
        if table is None:
            return more
        if table.told.steps != more.told.steps:
            steps = f"{more.told.steps} steps, those of the table {table.told.steps}"
            self._warn(f"{experiment.name}: runs have {steps}: they are not put together")
            return more
        return table.joined(more, experiment)

    def _draw(self, figure: Figure, results: Mapping[str, Results]) -> None:
        paths = [self.study.folder / f"{figure.name}.{suffix}" for suffix in self.suffixes]
        if can_draw(figure, results):
            draw(figure, results, *paths)
            self.written += paths
        for each in diverged_arms(figure, results):
            self._warn(f"{figure.name}: diverged in {each}")
        lacking = missing(figure, results)
        if lacking:
            self._warn(f"{figure.name} lacks {', '.join(lacking)}")

    def _ledgers(self, stack: ExitStack) -> list[Ledger]:
        """Those of the studies, for reading; the first one may have none yet."""
        first, *others = self.studies
        there = [first, *others] if (first / NAME).exists() else others
        opened = (Ledger.open(folder, create=False, read_only=True) for folder in there)
        return [stack.enter_context(ledger) for ledger in opened]

    # ------------------------------------------------------------------------------ choosing
    def _chosen(self) -> tuple[list[Figure], list[Measured]]:
        """The figures of these names: of experiments, and those that are measured in one go."""
        known = [*FIGURES, *MEASURED]
        wanted = list(self.figures)
        if "all" in wanted:
            wanted = self._possible(known) if self.to_run else known
        for name in wanted:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(f"unknown figure {name!r}; {hint}'upgd reproduce list' shows all")
        return (
            [FIGURES[name] for name in wanted if name in FIGURES],
            [MEASURED[name] for name in wanted if name in MEASURED],
        )

    def _possible(self, names: Sequence[str]) -> list[str]:
        """Figures that can be made with what is installed; says which cannot."""
        if find_spec("gymnasium") is not None:
            return list(names)
        agents = [name for name in names if name in FIGURES and _has_agents(FIGURES[name])]
        self._warn(f"leaving out {', '.join(agents)}, which need gymnasium: {install('rl')}")
        return [name for name in names if name not in agents]

    def _check_outputs(self) -> None:
        """Find out before anything runs whether figures and tables can be written."""
        study, tables = self.study.folder, self.tables
        for folder in (study, tables):
            check_output_folder(folder)
        for figure in self.drawn:
            for suffix in set(self.suffixes) & MARKED:
                check_generated(study / f"{figure.name}.{suffix}")
        for name in self.names:
            folder = tables / folder_name(name)
            if provenance.read(folder) is None and (folder / TABLE).exists():
                read(folder / TABLE, name)  # or it is somebody else's

    def _note_length(self, experiment: Experiment) -> None:
        """Say that runs are longer than asked for, if they are."""
        asked, steps = round(experiment.steps * self.scale), experiment.length(self.scale)
        if steps == experiment.shortest and asked < steps:
            why = f"a run has at least {SHORTEST} windows of {experiment.window}"
            self._warn(f"{experiment.name}: {steps} steps instead of {asked}, since {why}")

    def _tables(self) -> dict[str, Table]:
        """Tables of experiments that count as runs, one of each."""
        data_dir = self.study.options.data_dir
        found: dict[str, Table] = {}
        for folder in filter(are_tables, self.others):
            for name in self.names:
                table = committed.read(folder, name)
                if table is None:
                    continue
                unlike = table.unlike(EXPERIMENTS[name], data_dir)
                if unlike:
                    self._warn(f"{name}: the table in {folder} does not count, it has {unlike}")
                elif name in found:
                    self._warn(
                        f"{name}: the table in {folder} does not count, another folder has one"
                    )
                else:
                    found[name] = table
        return found


def _suffixes(formats: str) -> list[str]:
    """Formats of figures, each one that can be drawn."""
    found = [part.strip().lstrip(".").lower() for part in formats.split(",") if part.strip()]
    if not found:
        raise ValueError(f"--format takes formats such as png,svg; got {formats!r}")
    for suffix in found:
        check_format(Path(f"figure.{suffix}"))
    return list(dict.fromkeys(found))


def _has_agents(figure: Figure) -> bool:
    return any(EXPERIMENTS[name].agents for name in figure.experiments)


def _experiments(
    figures: Sequence[Figure], problems: str = "", environments: str = "", to_run: bool = False
) -> tuple[str, ...]:
    """What figures need, of the problems and, for agents, the environments that are asked for."""
    needs = (figure.run if to_run else figure.experiments for figure in figures)
    names = dict.fromkeys(name for some in needs for name in some)
    ours = dict.fromkeys(EXPERIMENTS[n].problem for n in names if not EXPERIMENTS[n].agents)
    wanted = _wanted(problems, "problem", tuple(ours))
    agents = _wanted(environments, "environment", ENVIRONMENTS)
    chosen = {agents_name(each, annealed) for each in agents for annealed in (False, True)}

    def is_asked_for(name: str) -> bool:
        if EXPERIMENTS[name].agents:
            return name in chosen if agents else not wanted
        return not wanted or EXPERIMENTS[name].problem in wanted

    return tuple(filter(is_asked_for, names))


def _wanted(text: str, what: str, known: Sequence[str]) -> list[str]:
    wanted = [part.strip().lower() for part in text.split(",") if part.strip()]
    for each in wanted:
        if each not in map(str.lower, known):
            raise ValueError(f"no {what} {each!r}; there are {', '.join(known)}")
    return wanted


def _narrowed(figure: Figure, names: Sequence[str]) -> Figure:
    """A figure with the panels that are asked for."""
    if set(figure.experiments) <= set(names):
        return figure
    kept = (p for p in figure.panels if p.kind == "heat" or p.experiment in names)
    return replace(figure, panels=tuple(kept))


def _specs(
    names: Sequence[str],
    scale: float,
    seeds: int,
    there: Mapping[str, Table] | None = None,
    diagnosed: Container[str] = (),
) -> list[RunSpec]:
    """The runs of some experiments that are not in their tables, each once.

    Of those in `diagnosed`, a table must have the diagnostics.
    """
    found: dict[str, RunSpec] = {}
    for name in names:
        table, twins = (there or {}).get(name), EXPERIMENTS[name].twins()
        for arm, runs in EXPERIMENTS[name].specs(scale, seeds or None).items():
            called = twins.get(arm, arm)  # of twins a table has the first
            asked = name in diagnosed
            new = (spec for spec in runs if table is None or not table.has(called, spec, asked))
            found |= {spec.key: spec for spec in new}
    return list(found.values())
