"""Reading runs back from the tables; every row is compared with its checksum.

Tables are read in the order of their rows and not by an index, since a damaged index hides rows;
the number of runs is recorded.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.ledger import schema
from upgd.ledger.canonical import display_name, proper_name
from upgd.ledger.checksums import checksum
from upgd.ledger.database import Database, damaged
from upgd.ledger.errors import LedgerError
from upgd.ledger.records import STATES, Lease, Result, Run, from_blob, from_summary
from upgd.ledger.spec import RunSpec

PAGE = 1000
OVER = ("done", "diverged")  # the states in which a run has a result
Cells = tuple[Any, ...]


class StoredRow(NamedTuple):
    """A run as the tables have it."""

    number: int  # runs are numbered in the order in which they were added
    run: Cells  # the cells of :data:`schema.RUN`
    checksum: str | None  # theirs; None in a ledger of an older version
    # The cells of :data:`schema.RESULT`, the key of the run first; empty if there is none, or if it
    # was not asked for.
    result: Cells = ()
    result_checksum: str | None = None  # theirs

    @property
    def key(self) -> str:
        """The run's key."""
        return str(self.run[0])

    @property
    def state(self) -> str:
        """The run's state."""
        return str(self.run[7])

    def fault(self) -> str | None:
        """What is wrong with the run, or None."""
        if self.checksum is not None and checksum("run", *self.run) != self.checksum:
            return f"run {self.key} does not match its checksum"
        return None

    def result_fault(self) -> str | None:
        """What is wrong with the run's result, or None."""
        if (self.state in OVER) != bool(self.result):
            has = "a" if self.result else "no"
            return f"run {self.key} is {self.state} and has {has} result"
        known = self.result_checksum
        if self.result and known is not None and checksum("result", *self.result) != known:
            return f"the result of run {self.key} does not match its checksum"
        return None

    def contents(self) -> Mapping[str, str] | None:
        """The checksums of its series by metric; None in a ledger of an older version."""
        if self.result and self.result_checksum is None:
            return None
        found: dict[str, str] = json.loads(self.result[-1]) if self.result else {}
        return found


class StoredSeries(NamedTuple):
    """A run's metric over time: one number per window of so many steps."""

    key: str
    metric: str
    window: int
    values: NDArray[np.float32]


class StateCount(NamedTuple):
    """Runs of one problem and method in one state: how many, and their steps in all.

    Here and below, methods have the names that people use (:attr:`RunSpec.name`).
    """

    problem: str
    method: str
    state: str
    runs: int
    steps: int


class UnderWay(NamedTuple):
    """A run that was claimed and is not over; `held` unless its lease expired."""

    key: str
    problem: str
    method: str
    steps: int
    held: bool


# ------------------------------------------------------------------------------------ rows
def columns(database: Database, results: bool) -> str:
    """A query for rows as :func:`as_row` takes them; its end says which."""
    both = database.checksums
    names = ["runs.id", *(f"runs.{name}" for name in schema.RUN)]
    names.append("runs.checksum" if both else "NULL")
    if not results:
        return f"SELECT {', '.join(names)} FROM runs NOT INDEXED"
    names += [f"results.{name}" for name in schema.RESULT[1:-1]]
    names += ["results.contents", "results.checksum"] if both else ["NULL", "NULL"]
    join = "LEFT JOIN results ON results.key = runs.key"
    return f"SELECT {', '.join(names)} FROM runs NOT INDEXED {join}"


def as_row(cells: Cells) -> StoredRow:
    """A row of :func:`columns`."""
    end = 1 + len(schema.RUN)
    run, rest = cells[1:end], cells[end + 1 :]
    if not rest or rest[0] is None:
        return StoredRow(cells[0], run, cells[end])
    return StoredRow(cells[0], run, cells[end], (run[0], *rest[:-1]), rest[-1])


def each_row(
    database: Database,
    results: bool = False,
    series: bool = False,
    metrics: Collection[str] | None = None,
) -> Iterator[tuple[StoredRow, list[Cells]]]:
    """All runs with their series, page by page, so that readers do not block writers.

    Results, and series of these metrics (by default all), are read where asked for. Raises
    DamagedError if there are fewer runs than were added, or more.
    """
    size = PAGE // 5 if series else PAGE
    query = f"{columns(database, results)} WHERE runs.id > ? ORDER BY runs.id LIMIT {size}"
    names = sorted(metrics or ())
    among = "" if metrics is None else f"AND metric IN ({', '.join('?' * len(names))})"
    series_query = f"""
        SELECT series.{", series.".join(schema.SERIES)}
        FROM runs NOT INDEXED JOIN series ON series.key = runs.key
        WHERE runs.id BETWEEN ? AND ? {among} ORDER BY runs.id, metric
    """
    last, seen, known = 0, 0, None
    while True:
        found: dict[str, list[Cells]] = {}
        with database.snapshot() as db:
            rows = [as_row(cells) for cells in db.execute(query, (last,))]
            if series and rows:
                places = (rows[0].number, rows[-1].number, *names)
                for cells in db.execute(series_query, places):
                    found.setdefault(cells[0], []).append(cells)
            if len(rows) < size and database.checksums:
                known = db.execute("SELECT runs FROM totals").fetchall()
        seen += len(rows)
        numbers = [last, *(row.number for row in rows)]
        if not all(before < after for before, after in pairwise(numbers)):
            raise damaged(database.path, "its runs are not in order")
        for row in rows:
            yield row, found.get(row.key, [])
        if len(rows) < size:
            break
        last = rows[-1].number
    if known is not None and known != [(seen,)]:
        added = ", ".join(str(number) for (number,) in known)
        raise damaged(database.path, f"it has {seen} runs and {added or 'none'} were added")


def names(method: str, spec: str) -> tuple[str, str]:
    """The names by which a run can be chosen: that of its row, and what people call it."""
    try:
        return method, display_name(method, json.loads(spec)["hyper"])
    except (ValueError, LookupError, TypeError):  # damaged, which reading the run reports
        return method, method


def as_run(database: Database, row: StoredRow) -> Run:
    """The run of a row; raises DamagedError if its result does not match its checksum."""
    _refuse(database, row.result_fault())
    key, spec, *_, state, attempts, error = row.run
    try:
        result = _result(row.result[1:-1]) if row.result else None
        return Run(RunSpec.from_json(spec), key, state, attempts, error, result)
    except (ValueError, TypeError, AttributeError) as wrong:  # an older version has no checksums
        raise damaged(database.path, f"run {key!r} cannot be read ({wrong})") from wrong


def _result(cells: Cells) -> Result:
    engine, device, dtype, versions, host, started, finished, wall, summary, diverged_at = cells
    facts, times = (json.loads(versions), json.loads(host)), (started, finished, wall)
    return Result(engine, device, dtype, *facts, *times, from_summary(summary), {}, diverged_at)


def series_faults(
    row: StoredRow, series: list[Cells], metrics: Collection[str] | None = None
) -> Iterator[str]:
    """What is wrong with the series of a run, of which these metrics were read."""
    contents = row.contents()
    if contents is None:
        return
    expected = {m: c for m, c in contents.items() if metrics is None or m in metrics}
    for cells in series:
        metric = str(cells[1])
        if expected.pop(metric, None) != checksum("series", *cells):
            yield f"the series {metric!r} of run {row.key} does not match its checksum"
    for metric in expected:
        yield f"the series {metric!r} of run {row.key} is not there"


def _sound_series(
    database: Database, row: StoredRow, series: list[Cells], metrics: Collection[str] | None
) -> Iterator[StoredSeries]:
    _refuse(database, next(series_faults(row, series, metrics), None))
    for key, metric, window, data in series:
        yield StoredSeries(key, metric, window, from_blob(data))


def _refuse(database: Database, fault: str | None) -> None:
    if fault is not None:
        raise damaged(database.path, fault)


# ---------------------------------------------------------------------------------- reading
class Reader:
    """What a ledger says of its runs; every method raises DamagedError where it is damaged."""

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database, self._now = database, now

    def runs(
        self,
        problem: str | None = None,
        method: str | None = None,
        state: str | None = None,
        hyper: Mapping[str, float] | None = None,
    ) -> Iterator[Run]:
        """Go through the runs in the order in which they were added.

        Others may write meanwhile: each run is as it was when its page was read. `method` is a name
        in the registry, for all its runs, or an alias, for those that it fits; `hyper` has values
        of some hyperparameters.
        """
        if state is not None and state not in STATES:
            raise LedgerError(f"unknown state {state!r}; the states are {', '.join(STATES)}")
        called = None if method is None else proper_name(method)
        wanted = {name: float(value) for name, value in (hyper or {}).items()}
        for row in self._rows(results=True):
            if (
                problem in (None, row.run[3])
                and state in (None, row.state)
                and (called is None or called in names(row.run[4], row.run[1]))
            ):
                run = as_run(self._database, row)
                if all(run.spec.hyper.get(name) == value for name, value in wanted.items()):
                    yield run

    def get(self, key: str) -> Run:
        """The run that has this key, or had it in an older version; LedgerError if none has."""
        row = self._row(key)
        if row is None:
            path = self._database.path
            raise LedgerError(f"{path} has no run {key!r}; 'upgd show' lists them")
        return as_run(self._database, row)

    def metrics(self, key: str) -> dict[str, int]:
        """The metrics that a run has series of, with the steps of a window."""
        return {one.metric: one.window for one in self._series(key)}

    def series(self, key: str, metric: str) -> NDArray[np.float32]:
        """A metric over time, one number per window; LedgerError if there is no such series."""
        found = self._series(key, metric)
        if not found:
            state = self.get(key).state
            have = ", ".join(self.metrics(key)) or "none"
            raise LedgerError(f"run {key} ({state}) has no series {metric!r}; it has {have}")
        return found[0].values

    def each_series(
        self, metrics: Collection[str] | None = None, keys: Collection[str] | None = None
    ) -> Iterator[StoredSeries]:
        """Go through these metrics of these runs, by default all, in the order of the runs."""
        chosen = None if keys is None else frozenset(keys)
        database = self._database
        for row, series in each_row(database, results=True, series=True, metrics=metrics):
            _refuse(database, row.fault() or row.result_fault())
            if chosen is None or row.key in chosen:
                yield from _sound_series(database, row, series, metrics)

    def all_metrics(self) -> list[str]:
        """The metrics that any run has series of."""
        if not self._database.checksums:
            with self._database.read() as db:
                rows = db.execute("SELECT DISTINCT metric FROM series ORDER BY metric")
                return [name for (name,) in rows]
        found: set[str] = set()
        for row in self._rows(results=True):
            _refuse(self._database, row.result_fault())
            found.update(row.contents() or ())
        return sorted(found)

    def counts(self) -> dict[str, int]:
        """How many runs are in each state."""
        found = Counter(row.state for row in self._rows())
        return {state: found[state] for state in STATES}

    def parts(self) -> list[StateCount]:
        """How many runs of each problem and method are in each state, and their steps."""
        found: dict[tuple[str, str, str], tuple[int, int]] = {}
        for row in self._rows():
            _, spec, _, problem, method, _, steps, state, _, _ = row.run
            name = (problem, names(method, spec)[1], state)
            runs, total = found.get(name, (0, 0))
            found[name] = runs + 1, total + steps
        return [StateCount(*name, *counted) for name, counted in found.items()]

    def under_way(self) -> list[UnderWay]:
        """The runs that were claimed and are not over, including those that nobody holds."""
        query = """
            SELECT runs.key, problem, method, spec, steps, coalesce(expires > ?, 0)
            FROM runs LEFT JOIN leases ON leases.key = runs.key WHERE state = 'running'
        """
        with self._database.read() as db:
            return [
                UnderWay(key, problem, names(method, spec)[1], steps, bool(held))
                for key, problem, method, spec, steps, held in db.execute(query, (self._now(),))
            ]

    def paces(self) -> dict[tuple[str, str], float]:
        """By problem and method, steps per second of a run among the last that finished."""
        query = f"""
            SELECT problem, method, spec, steps / wall FROM results
            JOIN runs ON runs.key = results.key
            WHERE wall > 0 AND diverged_at IS NULL ORDER BY finished DESC LIMIT {PAGE}
        """
        found: dict[tuple[str, str], list[float]] = {}
        with self._database.read() as db:
            for problem, method, spec, pace in db.execute(query):
                found.setdefault((problem, names(method, spec)[1]), []).append(pace)
        return {name: float(np.median(paces[: PAGE // 20])) for name, paces in found.items()}

    def failures(self, most: int) -> list[tuple[RunSpec, str]]:
        """At most so many failed runs, with the reason; those that were added last come first."""
        failed = [row.run for row in self._rows() if row.state == "failed"][: -most - 1 : -1]
        return [(RunSpec.from_json(run[1]), run[9] or "") for run in failed]

    def problems(self) -> set[str]:
        """The problems of all runs."""
        with self._database.read() as db:
            return {problem for (problem,) in db.execute("SELECT DISTINCT problem FROM runs")}

    def leases(self) -> list[Lease]:
        """Who holds which run, oldest claim first."""
        with self._database.read() as db:
            rows = db.execute("SELECT key, owner, token, expires FROM leases ORDER BY token")
            return [Lease(*row) for row in rows]

    def _rows(self, results: bool = False) -> Iterator[StoredRow]:
        for row, _ in each_row(self._database, results):
            _refuse(self._database, row.fault())
            yield row

    def _row(self, key: str) -> StoredRow | None:
        """The run that has this key, or had it before."""
        query = columns(self._database, results=True).replace(" NOT INDEXED", "")
        query += " WHERE runs.key = ?"
        with self._database.read() as db:
            cells = db.execute(query, (key,)).fetchone()
            if cells is None:
                known = db.execute("SELECT run FROM former WHERE key = ?", (key,)).fetchone()
                cells = None if known is None else db.execute(query, known).fetchone()
        if cells is None:
            return None
        row = as_row(cells)
        _refuse(self._database, row.fault())
        return row

    def _series(self, key: str, metric: str | None = None) -> list[StoredSeries]:
        """The series of a run, or that of one metric, in the order of their names."""
        row = self._row(key)
        if row is None:
            return []
        _refuse(self._database, row.result_fault())
        names = [] if metric is None else [metric]
        query = f"""
            SELECT {", ".join(schema.SERIES)} FROM series
            WHERE key = ? {"AND metric = ?" if names else ""} ORDER BY metric
        """
        with self._database.read() as db:
            series = db.execute(query, (row.key, *names)).fetchall()
        return list(_sound_series(self._database, row, series, names or None))
