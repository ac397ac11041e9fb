"""Reading runs back from the tables."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from upgd.study.database import Database
from upgd.study.records import Result, Run, from_summary
from upgd.study.spec import RunSpec

FILTERS = ("problem", "method", "seed", "steps", "key")
PAGE = 1000

COLUMNS = """
    SELECT runs.id, runs.key, spec, state, attempts, error, engine, device, dtype, versions, host,
        started, finished, wall, summary, diverged_at
    FROM runs LEFT JOIN results ON results.key = runs.key
"""


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
            yield _run(row)
        if len(rows) < PAGE:
            return
        last = rows[-1][0]


def read_run(db: sqlite3.Connection, key: str) -> Run | None:
    """The run with this key, if there is one."""
    row = db.execute(f"{COLUMNS} WHERE runs.key = ?", (key,)).fetchone()
    return None if row is None else _run(row)


def _run(row: tuple[Any, ...]) -> Run:
    _, key, spec, state, attempts, error, *rest = row
    return Run(RunSpec.from_json(spec), key, state, attempts, error, _result(*rest))


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
