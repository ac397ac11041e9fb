"""Reading runs back from the tables; every row that is read is held against its checksum.

Tables are read in the order of their rows and not by an index, since a damaged index hides rows;
how many there must be is known.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from upgd.ledger import schema
from upgd.ledger.canonical import display_name, proper_name
from upgd.ledger.checksums import checksum
from upgd.ledger.database import Database, damaged
from upgd.ledger.records import Result, Run, from_blob, from_summary
from upgd.ledger.spec import RunSpec

FILTERS = ("problem", "method", "seed", "steps", "key")
PAGE = 1000
OVER = ("done", "diverged")  # the states in which a run has a result
T = TypeVar("T")
Cells = tuple[Any, ...]


class Row(NamedTuple):
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
        """What is wrong with the run, if something is."""
        if self.checksum is not None and checksum("run", *self.run) != self.checksum:
            return f"run {self.key} does not match its checksum"
        return None

    def result_fault(self) -> str | None:
        """What is wrong with the run's result, if something is."""
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


class Kept(NamedTuple):
    """A run's metric over time: one number per window of so many steps."""

    key: str
    metric: str
    window: int
    values: NDArray[np.float32]


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


def as_row(cells: Cells) -> Row:
    """A row of :func:`columns`."""
    end = 1 + len(schema.RUN)
    run, rest = cells[1:end], cells[end + 1 :]
    if not rest or rest[0] is None:
        return Row(cells[0], run, cells[end])
    return Row(cells[0], run, cells[end], (run[0], *rest[:-1]), rest[-1])


def pages(
    database: Database,
    results: bool = True,
    more: Callable[[sqlite3.Connection, int, int], T] | None = None,
    size: int = PAGE,
) -> Iterator[tuple[list[Row], T | None]]:
    """All runs, page by page, so that no reader holds up writers.

    Args:
        database: Where they are.
        results: Whether to read their results too.
        more: Called with the first and the last number of a page, at the same moment.
        size: Of a page.

    Raises:
        DamagedError: There are fewer runs than were added, or more.
    """
    query = f"{columns(database, results)} WHERE runs.id > ? ORDER BY runs.id LIMIT {size}"
    last, seen, known = 0, 0, None
    while True:
        with database.snapshot() as db:
            rows = [as_row(cells) for cells in db.execute(query, (last,))]
            extra = more(db, rows[0].number, rows[-1].number) if more and rows else None
            if len(rows) < size and database.checksums:
                known = db.execute("SELECT runs FROM totals").fetchall()
        seen += len(rows)
        numbers = [last, *(row.number for row in rows)]
        in_order = all(before < after for before, after in pairwise(numbers))
        if not in_order:
            raise damaged(database.path, "its runs are not in order")
        yield rows, extra
        if len(rows) < size:
            break
        last = rows[-1].number
    if known is not None and known != [(seen,)]:
        added = ", ".join(str(number) for (number,) in known)
        raise damaged(database.path, f"it has {seen} runs and {added or 'none'} were added")


def sound_rows(database: Database, results: bool = False) -> Iterator[Row]:
    """All runs, page by page.

    Raises:
        DamagedError: One of them does not match its checksum.
    """
    for rows, _ in pages(database, results):
        for row in rows:
            if fault := row.fault():
                raise damaged(database.path, fault)
            yield row


# ------------------------------------------------------------------------------------ runs
def select_runs(
    database: Database, method: str | None = None, **equal: str | None
) -> Iterator[Run]:
    """Runs of a method, by its name or an alias, whose columns have these values.

    Raises:
        DamagedError: One of them, or its result, does not match its checksum.
    """
    wanted = [(schema.RUN.index(name), value) for name, value in equal.items() if value is not None]
    called = None if method is None else proper_name(method)
    for row in sound_rows(database, results=True):
        if all(row.run[place] == value for place, value in wanted) and (
            called is None or called in names(row.run[4], row.run[1])
        ):
            yield as_run(database, row)


def names(method: str, spec: str) -> tuple[str, str]:
    """The names by which a run can be chosen: that of its row, and what people call it."""
    try:
        return method, display_name(method, json.loads(spec)["hyper"])
    except (ValueError, LookupError, TypeError):  # damaged, which others tell
        return method, method


def read_run(database: Database, key: str) -> Run | None:
    """The run with this key, if there is one."""
    row = read_row(database, key)
    return None if row is None else as_run(database, row)


def read_row(database: Database, key: str) -> Row | None:
    """The run with this key, now or before, if there is one, held against its checksum."""
    query = f"{columns(database, results=True)} WHERE runs.key = ?".replace(" NOT INDEXED", "")
    with database.read() as db:
        cells = db.execute(query, (key,)).fetchone()
        if cells is None:
            known = db.execute("SELECT run FROM former WHERE key = ?", (key,)).fetchone()
            cells = None if known is None else db.execute(query, known).fetchone()
    row = None if cells is None else as_row(cells)
    if row is not None and (fault := row.fault()):
        raise damaged(database.path, fault)
    return row


def as_run(database: Database, row: Row) -> Run:
    """What a row tells; its result is held against its checksum."""
    if fault := row.result_fault():
        raise damaged(database.path, fault)
    key, spec, *_, state, attempts, error = row.run
    try:
        result = _result(*row.result[1:-1]) if row.result else None
        return Run(RunSpec.from_json(spec), key, state, attempts, error, result)
    except (ValueError, TypeError, AttributeError) as wrong:  # an older version has no checksums
        raise damaged(database.path, f"run {key!r} cannot be read ({wrong})") from wrong


# ---------------------------------------------------------------------------------- series
def select_series(
    database: Database, metrics: Collection[str] | None, keys: Collection[str] | None
) -> Iterator[Kept]:
    """Series in the order of their runs and of their names, page by page.

    Raises:
        DamagedError: One of them is not there or does not match its checksum.
    """
    chosen = None if keys is None else frozenset(keys)
    names = [] if metrics is None else sorted(metrics)
    among = f"AND metric IN ({', '.join('?' * len(names))})" if metrics is not None else ""
    query = f"""
        SELECT {", ".join(f"series.{name}" for name in schema.SERIES)}
        FROM runs NOT INDEXED JOIN series ON series.key = runs.key
        WHERE runs.id BETWEEN ? AND ? {among} ORDER BY runs.id, metric
    """

    def read(db: sqlite3.Connection, first: int, last: int) -> list[Cells]:
        return db.execute(query, (first, last, *names)).fetchall()

    for rows, series in pages(database, more=read, size=PAGE // 5):
        by_key: dict[str, list[Cells]] = {}
        for cells in series or []:
            by_key.setdefault(cells[0], []).append(cells)
        for row in rows:
            if fault := row.fault() or row.result_fault():
                raise damaged(database.path, fault)
            if chosen is None or row.key in chosen:
                yield from sound_series(database, row, by_key.get(row.key, []), metrics)


def read_series(database: Database, row: Row, metric: str | None = None) -> list[Kept]:
    """The series of a run, or that of one metric, in the order of their names."""
    if fault := row.result_fault():
        raise damaged(database.path, fault)
    among, names = ("", []) if metric is None else ("AND metric = ?", [metric])
    query = f"SELECT {', '.join(schema.SERIES)} FROM series WHERE key = ? {among} ORDER BY metric"
    with database.read() as db:
        series = db.execute(query, (row.key, *names)).fetchall()
    return list(sound_series(database, row, series, names or None))


def sound_series(
    database: Database, row: Row, series: list[Cells], metrics: Collection[str] | None
) -> Iterator[Kept]:
    """The series of a run, held against what its result says of them."""
    for fault in series_faults(row, series, metrics):
        raise damaged(database.path, fault)
    for key, metric, window, data in series:
        yield Kept(key, metric, window, from_blob(data))


def series_faults(
    row: Row, series: list[Cells], metrics: Collection[str] | None = None
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


def all_metrics(database: Database) -> list[str]:
    """The metrics that any run has series of."""
    if not database.checksums:
        with database.read() as db:
            rows = db.execute("SELECT DISTINCT metric FROM series ORDER BY metric")
            return [name for (name,) in rows]
    found: set[str] = set()
    for row in sound_rows(database, results=True):
        if fault := row.result_fault():
            raise damaged(database.path, fault)
        found.update(row.contents() or ())
    return sorted(found)


# ------------------------------------------------------------------------------------ parts
class Part(NamedTuple):
    """Runs of one problem and method in one state: how many, and their steps in all.

    Here and below, methods are called as people call them (:attr:`RunSpec.name`).
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


def count_states(database: Database) -> dict[str, int]:
    """How many runs are in each state that there is."""
    found: dict[str, int] = {}
    for row in sound_rows(database):
        found[row.state] = found.get(row.state, 0) + 1
    return found


def count_parts(database: Database) -> list[Part]:
    """All runs, counted, in the order in which methods were added."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in sound_rows(database):
        _, spec, _, problem, method, _, steps, state, _, _ = row.run
        method = names(method, spec)[1]
        runs, total = found.get((problem, method, state), (0, 0))
        found[problem, method, state] = runs + 1, total + steps
    return [Part(*name, *counted) for name, counted in found.items()]


def select_under_way(database: Database, now: float) -> list[UnderWay]:
    """The runs that are under way, those that nobody holds any more too."""
    query = """
        SELECT runs.key, problem, method, spec, steps, coalesce(expires > ?, 0)
        FROM runs LEFT JOIN leases ON leases.key = runs.key WHERE state = 'running'
    """
    with database.read() as db:
        rows = db.execute(query, (now,)).fetchall()
    return [
        UnderWay(key, problem, names(method, spec)[1], steps, bool(held))
        for key, problem, method, spec, steps, held in rows
    ]


def recent_paces(database: Database) -> dict[tuple[str, str], float]:
    """By problem and method, steps per second of a run among the last ones that finished."""
    query = f"""
        SELECT problem, method, spec, steps / wall FROM results JOIN runs ON runs.key = results.key
        WHERE wall > 0 AND diverged_at IS NULL ORDER BY finished DESC LIMIT {PAGE}
    """
    found: dict[tuple[str, str], list[float]] = {}
    with database.read() as db:
        for problem, method, spec, pace in db.execute(query):
            found.setdefault((problem, names(method, spec)[1]), []).append(pace)
    return {name: float(np.median(paces[: PAGE // 20])) for name, paces in found.items()}


def last_failures(database: Database, most: int) -> list[tuple[RunSpec, str]]:
    """Runs that failed, with what was wrong; those that were added last come first."""
    failed = [row for row in sound_rows(database) if row.state == "failed"]
    return [(RunSpec.from_json(row.run[1]), row.run[9] or "") for row in failed[: -most - 1 : -1]]


def _result(
    engine: str | None,
    device: str,
    dtype: str,
    versions: str,
    host: str,
    started: float,
    finished: float,
    wall: float,
    summary: str,
    diverged_at: int | None,
) -> Result | None:
    if engine is None:  # the run has none yet
        return None
    return Result(
        engine,
        device,
        dtype,
        versions=json.loads(versions),
        host=json.loads(host),
        started=started,
        finished=finished,
        wall=wall,
        summary=from_summary(summary),
        diverged_at=diverged_at,
    )
