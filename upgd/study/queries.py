"""Reading runs back from the tables."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from upgd.study.database import Database
from upgd.study.errors import LedgerError
from upgd.study.records import Result, Run, from_blob, from_summary
from upgd.study.spec import RunSpec

FILTERS = ("problem", "method", "seed", "steps", "key")
PAGE = 1000

COLUMNS = """
    SELECT runs.id, runs.key, spec, state, attempts, error, engine, device, dtype, versions, host,
        started, finished, wall, summary, diverged_at
    FROM runs LEFT JOIN results ON results.key = runs.key
"""


class Kept(NamedTuple):
    """A run's metric over time: one number per window of so many steps."""

    key: str
    metric: str
    window: int
    values: NDArray[np.float32]


def select_runs(database: Database, **equal: str | None) -> Iterator[Run]:
    """Runs whose columns have these values, page by page, so that no reader holds up writers."""
    conditions = {f"runs.{name} = ?": value for name, value in equal.items() if value is not None}
    where = " AND ".join([*conditions, "runs.id > ?"])
    query = f"{COLUMNS} WHERE {where} ORDER BY runs.id LIMIT {PAGE}"
    last = 0
    while True:
        with database.read() as db:
            rows = db.execute(query, (*conditions.values(), last)).fetchall()
        for row in rows:
            yield _run(database, row)
        if len(rows) < PAGE:
            return
        last = rows[-1][0]


def select_series(
    database: Database, metrics: Collection[str] | None, keys: Collection[str] | None
) -> Iterator[Kept]:
    """Series in the order of their runs and of their names, page by page."""
    chosen = None if keys is None else frozenset(keys)
    names = [] if metrics is None else sorted(metrics)
    among = f"AND metric IN ({', '.join('?' * len(names))})" if metrics is not None else ""
    query = f"""
        SELECT series.key, metric, window, data FROM runs JOIN series ON series.key = runs.key
        WHERE runs.id BETWEEN ? AND ? {among} ORDER BY runs.id, metric
    """
    with database.read() as db:
        first, last = db.execute("SELECT min(id), max(id) FROM runs").fetchone()
    for start in range(first or 1, (last or 0) + 1, PAGE // 5):
        with database.read() as db:
            rows = db.execute(query, (start, start + PAGE // 5 - 1, *names)).fetchall()
        for key, metric, window, data in rows:
            if chosen is None or key in chosen:
                yield Kept(key, metric, window, from_blob(data))


class Part(NamedTuple):
    """Runs of one problem and method in one state: how many, and their steps in all."""

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


def count_parts(database: Database) -> list[Part]:
    """All runs, counted, in the order in which methods were added."""
    query = """
        SELECT problem, method, state, count(*), sum(steps) FROM runs
        GROUP BY problem, method, state ORDER BY min(id)
    """
    with database.read() as db:
        return [Part(*row) for row in db.execute(query)]


def select_under_way(database: Database, now: float) -> list[UnderWay]:
    """The runs that are under way, those that nobody holds any more too."""
    query = """
        SELECT runs.key, problem, method, steps, coalesce(expires > ?, 0)
        FROM runs LEFT JOIN leases ON leases.key = runs.key WHERE state = 'running'
    """
    with database.read() as db:
        rows = db.execute(query, (now,)).fetchall()
    return [
        UnderWay(key, problem, method, steps, bool(held))
        for key, problem, method, steps, held in rows
    ]


def recent_paces(database: Database) -> dict[tuple[str, str], float]:
    """By problem and method, steps per second of a run among the last ones that finished."""
    query = f"""
        SELECT problem, method, steps / wall FROM results JOIN runs ON runs.key = results.key
        WHERE wall > 0 AND diverged_at IS NULL ORDER BY finished DESC LIMIT {PAGE}
    """
    found: dict[tuple[str, str], list[float]] = {}
    with database.read() as db:
        for problem, method, pace in db.execute(query):
            found.setdefault((problem, method), []).append(pace)
    return {name: float(np.median(paces[: PAGE // 20])) for name, paces in found.items()}


def last_failures(database: Database, most: int) -> list[tuple[RunSpec, str]]:
    """Runs that failed, with what was wrong; those that were added last come first."""
    query = "SELECT spec, error FROM runs WHERE state = 'failed' ORDER BY id DESC LIMIT ?"
    with database.read() as db:
        rows = db.execute(query, (most,)).fetchall()
    return [(RunSpec.from_json(spec), error or "") for spec, error in rows]


def read_run(database: Database, key: str) -> Run | None:
    """The run with this key, if there is one."""
    with database.read() as db:
        row = db.execute(f"{COLUMNS} WHERE runs.key = ?", (key,)).fetchone()
    return None if row is None else _run(database, row)


def _run(database: Database, row: tuple[Any, ...]) -> Run:
    _, key, spec, state, attempts, error, *rest = row
    try:
        return Run(RunSpec.from_json(spec), key, state, attempts, error, _result(*rest))
    except (ValueError, TypeError, AttributeError) as wrong:
        raise LedgerError(
            f"{database.path} is damaged at run {key!r} ({wrong}); restore it from a copy"
        ) from wrong


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
