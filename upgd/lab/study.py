"""A study in Python: run, sweep, compare, draw. The command line is a thin skin over this."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from upgd.lab import display, grids
from upgd.lab.definitions import method_name, resolve_network, resolve_problem
from upgd.lab.outlook import outlook
from upgd.lab.sweeping import MOST_RUNS, PlannedSweep, plan_sweep
from upgd.lab.views import Picture, Rankings, Table
from upgd.ledger import Ledger, Run, RunSpec, Scalar, StudyError, write_atomically
from upgd.ledger.files import check_generated, check_output
from upgd.ledger.ledger import NAME
from upgd.pages import MARK
from upgd.paper.claims import judge_study
from upgd.report import figures, plotting, sections, tables
from upgd.report.html import Report, render
from upgd.study.execution import Tally
from upgd.study.folder import adopt_checkpoints
from upgd.study.kinds import kind_of
from upgd.study.options import Options, check_device
from upgd.study.run import run_pending, run_specs
from upgd.study.selection import best_sets
from upgd.text import count, printable

Methods = str | Any | Sequence[Any]
Seeds = int | Iterable[int]


class Study:
    """A folder with runs and their results. What it has is not run again.

    Args:
        folder: Where it is; made by the first run.
        device: Where learners run: ``"cpu"``, ``"cuda"``.
        engine: ``"auto"`` (many runs at once where possible), ``"batched"`` or ``"eager"``.
        workers: Worker processes; by default this process, and processes for runs that have to
            go one at a time.
        on: Where workers are: ``"local"``, ``"ray"`` or ``"ray://host:port"``.
        data_dir: Where data are looked for first.
        checkpoint_seconds: How often runs are saved; by default so that it costs 2% at most.
        quiet: Show no progress and print no notes.

    Attributes:
        tally: How the runs of the last call ended.

    Example:
        >>> import tempfile
        >>> from upgd import lab
        >>> study = lab.Study(tempfile.mkdtemp(), quiet=True)
        >>> small = dict(seeds=2, steps=200, window=50, hidden="8")
        >>> table = study.run("label-permuted-digits", ["upgd-w", "sgd"], lr=0.05, **small)
        >>> [row["seeds"] for row in table.rows]
        [2, 2]
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        device: str = "cpu",
        engine: str = "auto",
        workers: int | None = None,
        on: str = "local",
        data_dir: str | os.PathLike[str] | None = None,
        checkpoint_seconds: float | None = None,
        quiet: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.options = Options(device, engine, data_dir, checkpoint_seconds, on, workers)
        self.quiet = quiet
        self.tally = Tally()
        self.note = display.note
        self.console = None if quiet else display.console()

    def __repr__(self) -> str:
        if not self.exists():
            return f"Study({str(self.folder)!r}): no runs yet"
        with self.read() as ledger:
            counts = ledger.counts()
        told = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
        return f"Study({str(self.folder)!r}): {told or 'no runs yet'}"

    # ----------------------------------------------------------------------------- running
    def run(
        self,
        problem: Any,
        methods: Methods,
        *,
        seeds: Seeds = 5,
        steps: int | None = None,
        best: bool = False,
        **settings: Any,
    ) -> Table:
        """Run methods on a problem; returns the table of these runs.

        Args:
            problem: A name, a problem made by :func:`upgd.lab.problem`, or the path of an
                ``.npz`` file.
            methods: One or several: names, optimizer classes, or methods made by
                :func:`upgd.lab.method`.
            seeds: How many, or which.
            steps: Samples per run; by default the problem's.
            best: Start from the sets that the paper prints as best.
            settings: Hyperparameters, for the methods that have them; and options of runs:
                ``batch``, ``window``, ``task_length``, ``hidden``, ``network``, ``layer_norm``,
                ``input_norm``, ``restart``, ``held_out``, ``stride``.
        """
        return self.run_specs(
            self.specs(problem, methods, seeds=seeds, steps=steps, best=best, **settings)
        )

    def specs(
        self,
        problem: Any,
        methods: Methods,
        *,
        seeds: Seeds = 5,
        steps: int | None = None,
        best: bool = False,
        **settings: Any,
    ) -> list[RunSpec]:
        """The runs that :meth:`run` would do; arguments are the same. They are checked."""
        row = resolve_problem(problem)
        options, hyper = split_settings(settings)
        sets = grids.settings(_names(methods), hyper, row.name if best else "")
        length = row.steps if steps is None else steps
        every = (
            RunSpec(row.name, name, values, seed, length, options)
            for name, values in sets.items()
            for seed in seed_numbers(seeds)
        )
        specs = list(dict.fromkeys(every))  # two names may mean the same run
        self.check(specs)
        return specs

    def check(self, specs: Sequence[RunSpec]) -> None:
        """Find mistakes before anything is run.

        Raises:
            SpecError: A run cannot be executed here.
        """
        check_device(self.options.here)
        for problem in dict.fromkeys(spec.problem for spec in specs):
            kind_of(problem).check_data(problem, self.options.data_dir)
        for spec in {(s.problem, s.method, tuple(s.hyper)): s for s in specs}.values():
            kind_of(spec.problem).check(spec, self.options)

    def run_specs(self, specs: Sequence[RunSpec], wait: bool = False) -> Table:
        """Add runs and do them; returns their table.

        Args:
            specs: The runs.
            wait: Whether to wait for those that other processes are doing.
        """
        keys = [spec.key for spec in specs]
        with Ledger.open(self.folder) as ledger:
            ledger.add(specs)
            self.tally = self._do(ledger, specs if wait else keys)
            self._finish(ledger, keys)
        return self.table(keys=keys)

    def resume(self, retry: bool = False, other_versions: bool = False) -> Table:
        """Finish what the study has begun.

        Args:
            retry: Also try failed runs again.
            other_versions: Also continue runs that were begun with other versions of Python, torch
                and the like. Their results name both, and may differ from uninterrupted ones by
                what rounding makes of them.
        """
        check_device(self.options.here)
        with Ledger.open(self.folder, create=False) as ledger:
            if other_versions:
                adopt_checkpoints(ledger)
            if retry:
                for part in ledger.parts():
                    kind = kind_of(part.problem)
                    if part.state == "failed" and kind.local_only and self.options.on != "local":
                        raise ValueError(kind.local_only)
                ledger.retry_failed()
            self.tally = self._do(ledger, None)
            self._finish(ledger, None)
        return self.table()

    def missing(self, specs: Iterable[RunSpec]) -> list[RunSpec]:
        """Those of these runs that the study has no result of."""
        known = {run.key for run in self.runs() if run.state in ("done", "diverged")}
        return [spec for spec in specs if spec.key not in known]

    # ------------------------------------------------------------------------------ sweeps
    def sweep(self, problem: Any, methods: Methods, grid: Any = None, **arguments: Any) -> Rankings:
        """Try many sets of hyperparameters; returns each method's best.

        Arguments are those of :meth:`plan_sweep`.
        """
        return self.run_sweep(self.plan_sweep(problem, methods, grid, **arguments))

    def plan_sweep(
        self,
        problem: Any,
        methods: Methods,
        grid: Any = None,
        *,
        seeds: Seeds = 5,
        steps: int | None = None,
        halving: int | None = None,
        search: int | None = None,
        max_runs: int = MOST_RUNS,
        **settings: Any,
    ) -> PlannedSweep:
        """Check a sweep without running it.

        Args:
            problem: As for :meth:`run`.
            methods: As for :meth:`run`.
            grid: ``"paper"`` (the paper's grids, also the default), ``"best"`` (only the sets
                that the paper prints as best), the path of a TOML file, or a mapping: values by
                hyperparameter, or tables of them by method.
            seeds: How many, or which; every set has all of them.
            steps: The length of a full run.
            halving: Run all sets briefly and one in so many longer, rung by rung.
            search: Let Optuna choose so many sets per method within the grid.
            max_runs: Refuse a sweep with more runs.
            settings: Other values of an axis (``lr=[0.1, 0.01]``), and options of runs.
        """
        row, names = resolve_problem(problem), _names(methods)
        options, given = split_settings(settings)
        if isinstance(grid, Mapping):
            axes = grids.table_grids(grid, names)
        elif grid == "best":
            axes = grids.best_grids(row.name, names)
        elif grid in (None, "paper"):
            axes = grids.default_grids(row.name, names)
        else:
            axes = grids.file_grids(Path(grid), names)
        planned = plan_sweep(
            row,
            grids.change_axes(axes, given),
            seeds=seed_numbers(seeds),
            steps=row.steps if steps is None else steps,
            run_options=options,
            options=self.options,
            halving=halving,
            search=search,
            max_runs=max_runs,
        )
        sweep = planned.sweep
        self.check([sweep.specs(sets={m: sets[:1]})[0] for m, sets in sweep.hypers().items()])
        return planned

    def run_sweep(self, planned: PlannedSweep) -> Rankings:
        """Run a sweep that was planned."""
        say = self._say
        with Ledger.open(self.folder) as ledger:
            self.tally = planned.execute(
                ledger, self.options, lambda specs: self._do(ledger, specs), say
            )
            self._finish(ledger, planned.keys(ledger))
            return Rankings(planned.rankings(ledger))

    def outlook(self, planned: PlannedSweep) -> dict[str, Any]:
        """How many runs a sweep has, how long they take, how much memory and disk."""
        here = Options(self.options.here, self.options.engine, self.options.data_dir)
        known = self.runs(problem=planned.sweep.problem)
        return outlook(self.folder, planned, here, known)

    def best(
        self,
        problem: str | None = None,
        methods: Collection[str] | None = None,
        seeds: Collection[int] | None = None,
        steps: int | None = None,
    ) -> Rankings:
        """Each method's sets in order: by area under the online accuracy curve, as in the paper.

        Only sets that have all their seeds are compared. On squared error the lowest loss wins.

        Raises:
            ValueError: There is no such run.
        """
        with self.read() as ledger:
            found = best_sets(ledger, problem, methods, seeds, steps)
            if not found:
                raise tables.no_such_run(ledger, problem, methods or ())
        return Rankings(found)

    # ----------------------------------------------------------------------------- reading
    def exists(self) -> bool:
        """Whether there is a study in the folder."""
        return (self.folder / NAME).exists()

    def read(self) -> Ledger:
        """The ledger, for reading; close it, or use it in a ``with`` block."""
        return Ledger.open(self.folder, create=False, read_only=True)

    def runs(self, problem: str | None = None, method: str | None = None) -> list[Run]:
        """The runs, of a problem or a method or all; none where there is no study yet."""
        if not self.exists():
            return []
        with self.read() as ledger:
            return tables.chosen(ledger, problem, method)

    def table(
        self,
        problem: str | None = None,
        method: str | None = None,
        keys: Collection[str] | None = None,
    ) -> Table:
        """Means over seeds with intervals, a row per setting."""
        with self.read() as ledger:
            runs = tables.chosen(ledger, problem, method)
            mine = None if keys is None else set(keys)
            runs = [run for run in runs if mine is None or run.key in mine]
            return Table(tables.rows(tables.group(runs)), ledger.counts(), runs)

    def frame(self, metric: str | None = None) -> Any:
        """All runs as a pandas frame, or as a dict of arrays where pandas is not installed.

        A row per run with its hyperparameters, options and final metrics; with `metric`, a row
        per run and window.
        """
        columns: dict[str, list[Any]] = {}
        with self.read() as ledger:
            rows = list(_series_rows(ledger, metric) if metric else _run_rows(ledger))
        names = list(dict.fromkeys(name for row in rows for name in row))
        for name in names:
            columns[name] = [row.get(name) for row in rows]
        try:
            import pandas
        except ImportError:
            return {name: _array(values) for name, values in columns.items()}
        return pandas.DataFrame(columns)

    # ---------------------------------------------------------------------------- pictures
    def plot(
        self,
        metric: str | None = None,
        *,
        problem: str | None = None,
        method: str | None = None,
        every: bool = False,
        path: str | os.PathLike[str] | None = None,
    ) -> Picture:
        """Draw a metric over time: means over seeds with 95% intervals, a line per setting.

        Args:
            metric: By default accuracy, return or loss.
            problem: Which, if there are several.
            method: Only this one.
            every: Draw every setting; otherwise of more than ten only each method's best.
            path: The figure; by default ``METRIC.png`` in the study's folder.

        Returns:
            The figure's file; a notebook shows it.
        """
        if path is not None:
            plotting.check_format(Path(path))
            check_output(path)
        with self.read() as ledger:
            drawing = figures.gather(ledger, metric or "", problem, method, every)
        target = Path(path) if path is not None else self.folder / f"{drawing.metric}.png"
        if path is None:
            check_generated(target)
        unit = kind_of(drawing.problem).unit.capitalize()
        figures.draw_curves(drawing.curves, drawing.metric, drawing.problem, target, unit)
        if drawing.among:
            self._say(f"each method's best of {drawing.among} settings by area")
        return Picture(target)

    def report(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        problem: str | None = None,
        method: str | None = None,
        metrics: Sequence[str] = (),
        title: str = "",
        about: Sequence[str] = (),
    ) -> Path:
        """Write the study as one page: figures to explore, tables, claims, provenance.

        Args:
            path: The page; by default ``report.html`` in the study's folder.
            problem: Only this one.
            method: Only this one.
            metrics: Only these.
            title: Above the page.
            about: Paragraphs that introduce it.

        Returns:
            Where the page is.
        """
        page = check_page(path, self.folder / "report.html")
        with self.read() as ledger:
            there = ledger.all_metrics()
            for name in metrics:
                if name not in there:
                    have = ", ".join(there) or "none"
                    raise ValueError(f"no metric {name!r} in {self.folder}; there are {have}")
            runs = tables.chosen(ledger, problem, method)
            if not runs:
                raise StudyError(f"{self.folder} has no run to report on")
            found = sections.read(ledger, runs, list(metrics))
            claims, others = judge_study(ledger, problem or "")
        title = title or f"Study {printable(self.folder.resolve().name)}"
        page.parent.mkdir(parents=True, exist_ok=True)
        content = Report(title, found, claims, others, about=tuple(about))
        write_atomically(page, render(content).encode())
        return page

    # ---------------------------------------------------------------------------- the work
    def _do(self, ledger: Ledger, what: Sequence[RunSpec] | Sequence[str] | None) -> Tally:
        """Run specifications and wait for all, or what is pending among keys, or everything."""
        specs = [each for each in what or () if isinstance(each, RunSpec)]
        keys: Any = [spec.key for spec in specs] if specs else what
        total = ledger.unfinished() if keys is None else len(keys)
        hooks: dict[str, Any] = {} if self.quiet else {"on_note": self.note}
        options = self.options
        shown: Any = nullcontext() if self.quiet else display.progress(total, self.console)
        with shown as on_progress:
            if specs:
                return run_specs(ledger, specs, options, on_progress=on_progress, **hooks)
            where = None if keys is None else {"key": list(keys)}
            return run_pending(ledger, options, where=where, on_progress=on_progress, **hooks)

    def _finish(self, ledger: Ledger, keys: Collection[str] | None) -> None:
        """Say what went wrong, also with runs that nobody tried again."""
        tally, mine = self.tally, None if keys is None else set(keys)
        if tally.diverged:
            self.note(f"{count(tally.diverged, 'run')} diverged")
        for line in tally.errors:
            self.note(f"failed: {line}")
        for line in tally.refused:
            self.note(line)
        others = sum(mine is None or lease.key in mine for lease in ledger.leases())
        if others:
            told = "1 run is" if others == 1 else f"{others} runs are"
            where = "another process" if others == 1 else "other processes"
            self.note(f"{told} under way in {where}")
        failed = sum(mine is None or run.key in mine for run in ledger.runs(state="failed"))
        tally.failed_earlier = max(0, failed - tally.failed)
        if tally.failed_earlier:
            self.note(
                f"{count(tally.failed_earlier, 'run')} failed earlier; "
                f"'upgd resume {self.folder} --retry' tries again"
            )

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.note(text)


def check_page(path: str | os.PathLike[str] | None, default: Path) -> Path:
    """Where a page goes; raises for a path that cannot be written, before any work is done."""
    page = default if path is None else Path(path)
    if page.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"a report's name must end in .html, got {page}; 'upgd plot' draws others")
    check_output(page, make_folders=path is not None)
    if path is None:
        check_generated(page, MARK)
    return page


RUN_OPTIONS = (
    *("batch", "restart", "held_out", "stride", "window", "task_length", "hidden", "network"),
    *("layer_norm", "input_norm"),
)


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """Options of runs, those that say something, and hyperparameters.

    Example:
        >>> split_settings({"lr": 0.1, "batch": 8, "window": None})
        ({'batch': 8}, {'lr': 0.1})
    """
    options = {name: settings[name] for name in RUN_OPTIONS if settings.get(name)}
    if isinstance(options.get("hidden"), Sequence) and not isinstance(options["hidden"], str):
        options["hidden"] = "-".join(map(str, options["hidden"])) or "none"
    if "network" in options:
        options["network"] = resolve_network(options["network"])
    return options, {name: v for name, v in settings.items() if name not in RUN_OPTIONS}


def seed_numbers(seeds: Seeds) -> list[int]:
    """Seeds from how many, or which.

    Example:
        >>> seed_numbers(3), seed_numbers([7, 5, 7])
        ([0, 1, 2], [7, 5])
    """
    found = list(dict.fromkeys(range(seeds) if isinstance(seeds, int) else seeds))
    if not found:
        raise ValueError(f"give at least one seed, got {seeds!r}")
    return found


def _names(methods: Methods) -> list[str]:
    listed = methods if isinstance(methods, list | tuple) else [methods]
    found = list(dict.fromkeys(method_name(each) for each in listed))
    if not found:
        raise ValueError("give at least one method")
    return found


def _run_rows(ledger: Ledger) -> Iterable[dict[str, Any]]:
    for run in ledger.runs():
        spec = run.spec
        row: dict[str, Any] = {"key": run.key, "problem": spec.problem, "method": spec.name}
        row |= {"seed": spec.seed, "steps": spec.steps, "state": run.state}
        row |= {**spec.hyper, **spec.options}
        yield row | (dict(run.result.summary) if run.result is not None else {})


def _series_rows(ledger: Ledger, metric: str) -> Iterable[dict[str, Any]]:
    specs = {run.key: run.spec for run in ledger.runs()}
    for series in ledger.each_series([metric]):
        spec = specs[series.key]
        for number, value in enumerate(series.values.tolist(), 1):
            row: dict[str, Any] = {"key": series.key, "problem": spec.problem}
            row |= {"method": spec.name}
            row |= {"seed": spec.seed, "samples": number * series.window, metric: value}
            yield row


def _array(values: list[Any]) -> Any:
    numbers = all(
        (isinstance(v, int | float) and not isinstance(v, bool)) or v is None for v in values
    )
    if numbers:
        return np.array([np.nan if v is None else v for v in values])
    return np.array(values, dtype=object)
