"""The tables of a ledger, as a list of migrations.

A ledger's ``user_version`` is the number of migrations that it has seen. A released migration is
never edited: a change to the tables is a new one at the end.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable
from typing import Any

from upgd.ledger.checksums import checksum
from upgd.ledger.old_specs import canonical_json, whole_step_json

APPLICATION_ID = 0x55504744  # "UPGD" in ASCII: tells our files from other SQLite databases

# The cells that checksums cover, in order; ``contents`` has the checksums of series by metric.
RUN = ("key", "spec", "rules", "problem", "method", "seed", "steps", "state", "attempts", "error")
RESULT = (
    *("key", "engine", "device", "dtype", "versions", "host", "started", "finished", "wall"),
    *("summary", "diverged_at", "contents"),
)
SERIES = ("key", "metric", "window", "data")
Cells = tuple[Any, ...]


def _add_checksums(db: sqlite3.Connection) -> None:
    """Compute all checksums; a run whose key does not match its specification has none."""
    runs = db.execute(f"SELECT {', '.join(RUN)} FROM runs").fetchall()
    sums = [(checksum("run", *row) if is_key_of(row[0], row[1]) else "", row[0]) for row in runs]
    db.executemany("UPDATE runs SET checksum = ? WHERE key = ?", sums)
    db.execute("INSERT INTO totals VALUES (?)", (len(runs),))
    for row in db.execute(f"SELECT {', '.join(RESULT[:-1])} FROM results").fetchall():
        query = f"SELECT {', '.join(SERIES)} FROM series WHERE key = ?"
        series = {one[1]: checksum("series", *one) for one in db.execute(query, row[:1])}
        contents = json.dumps(series, sort_keys=True)
        db.execute(
            "UPDATE results SET contents = ?, checksum = ? WHERE key = ?",
            (contents, checksum("result", *row, contents), row[0]),
        )


def is_key_of(key: object, spec: object) -> bool:
    """Whether a key is that of a specification's JSON."""
    return isinstance(spec, str) and key == key_of(spec)


def key_of(spec: str) -> str:
    """The key of a specification's JSON."""
    return hashlib.sha256(spec.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def canonicalise(db: sqlite3.Connection) -> None:
    """Give all runs their canonical specifications."""
    _respecify(db, canonical_json)


def convert_to_whole_steps(db: sqlite3.Connection) -> None:
    """Say runs of rules 2 in the terms of rules 3, where a weight without utility steps by α."""
    _respecify(db, whole_step_json)


RESPECIFIED = {5: canonicalise, 6: convert_to_whole_steps}
"""The migrations that change specifications and keys, by the version that they lead to."""


def respecify(db: sqlite3.Connection, version: int) -> None:
    """Bring runs that were specified in this version to today's specifications."""
    for number, step in RESPECIFIED.items():
        if version < number:
            step(db)


def _respecify(db: sqlite3.Connection, same_run: Callable[[str], str]) -> None:
    """Give all runs other specifications, and so other keys; those that become equal are merged.

    Of several, one with a result stays, a finished one first, else the one that got furthest. Rows
    that do not match their checksums are not changed: they stay damaged. Nor are those for which
    `same_run` raises ValueError.
    """
    db.execute("PRAGMA defer_foreign_keys=ON")
    query = f"SELECT {', '.join(RUN)}, checksum FROM runs ORDER BY id"
    alike: dict[str, list[tuple[Cells, str]]] = {}
    kept: set[str] = set()
    for *run, known in db.execute(query).fetchall():
        try:
            sound = checksum("run", *run) == known and is_key_of(run[0], run[1])
            spec = same_run(run[1]) if sound else ""
        except ValueError:
            sound = False
        if sound:
            alike.setdefault(key_of(spec), []).append((tuple(run), spec))
        else:
            kept.add(str(run[0]))
    for key, found in alike.items():
        if key not in kept and [run[0] for run, _ in found] != [key]:
            _merge(db, key, found[0][1], [run for run, _ in found])


def _merge(db: sqlite3.Connection, key: str, spec: str, runs: list[Cells]) -> None:
    """Make several rows of one run a single one, under its new key."""
    kept = min(runs, key=lambda run: _rank(db, run))
    for run in runs:
        if run is not kept:
            for table in ("leases", "series", "results", "runs"):
                db.execute(f"DELETE FROM {table} WHERE key = ?", run[:1])
            db.execute("UPDATE totals SET runs = runs - 1")
    cells = dict(zip(RUN, kept, strict=True))
    content = json.loads(spec)
    cells |= {"key": key, "spec": spec, "rules": content["rules"], "method": content["method"]}
    db.execute(
        "UPDATE runs SET key = ?, spec = ?, rules = ?, method = ?, checksum = ? WHERE key = ?",
        (key, spec, cells["rules"], cells["method"], checksum("run", *cells.values()), kept[0]),
    )
    _rename_result(db, kept[0], key)
    db.execute("UPDATE leases SET key = ? WHERE key = ?", (key, kept[0]))
    before = [(key, run[0]) for run in (kept, *runs) if run[0] != key]
    db.executemany("UPDATE former SET run = ? WHERE run = ?", before)
    db.executemany("INSERT OR IGNORE INTO former (run, key) VALUES (?, ?)", before)


def _rank(db: sqlite3.Connection, run: Cells) -> tuple[bool, int, int]:
    """Which of several rows of one run stays: the least."""
    key, state, attempts = run[0], run[7], run[8]
    query = f"SELECT {', '.join(RESULT)}, checksum FROM results WHERE key = ?"
    found = db.execute(query, (key,)).fetchone()
    whole = found is not None and checksum("result", *found[:-1]) == found[-1]
    order = ("done", "diverged", "running", "pending", "failed")
    return not whole, order.index(state), -attempts


def _rename_result(db: sqlite3.Connection, old: str, new: str) -> None:
    """Give a result and its series another key; checksums that were wrong stay wrong."""
    query = f"SELECT {', '.join(RESULT)}, checksum FROM results WHERE key = ?"
    found = db.execute(query, (old,)).fetchone()
    if found is None:
        return
    *result, known = found
    if checksum("result", *result) == known:
        contents: dict[str, str] = json.loads(result[-1])
        series = f"SELECT {', '.join(SERIES)} FROM series WHERE key = ?"
        for _, metric, *rest in db.execute(series, (old,)):
            if contents.get(metric) == checksum("series", old, metric, *rest):
                contents[metric] = checksum("series", new, metric, *rest)
        result = [new, *result[1:-1], json.dumps(contents, sort_keys=True)]
        known = checksum("result", *result)
    db.execute(
        "UPDATE results SET key = ?, contents = ?, checksum = ? WHERE key = ?",
        (new, result[-1], known, old),
    )
    db.execute("UPDATE series SET key = ? WHERE key = ?", (new, old))


Step = str | Callable[[sqlite3.Connection], None]

MIGRATIONS: list[tuple[Step, ...]] = [
    (
        """
        CREATE TABLE runs (
            id INTEGER PRIMARY KEY,
            key TEXT NOT NULL UNIQUE,
            spec TEXT NOT NULL,
            rules INTEGER NOT NULL,
            problem TEXT NOT NULL,
            method TEXT NOT NULL,
            seed INTEGER NOT NULL,
            steps INTEGER NOT NULL,
            state TEXT NOT NULL DEFAULT 'pending'
                CHECK (state IN ('pending', 'running', 'done', 'failed', 'diverged')),
            attempts INTEGER NOT NULL DEFAULT 0,
            error TEXT
        )
        """,
        "CREATE INDEX runs_by_state ON runs (state)",
        "CREATE INDEX runs_by_name ON runs (problem, method)",
        """
        CREATE TABLE results (
            key TEXT PRIMARY KEY REFERENCES runs (key),
            engine TEXT NOT NULL,
            device TEXT NOT NULL,
            dtype TEXT NOT NULL,
            versions TEXT NOT NULL,
            host TEXT NOT NULL,
            started REAL NOT NULL,
            finished REAL NOT NULL,
            wall REAL NOT NULL,
            summary TEXT NOT NULL,
            diverged_at INTEGER
        )
        """,
        """
        CREATE TABLE series (
            key TEXT NOT NULL REFERENCES results (key),
            metric TEXT NOT NULL,
            window INTEGER NOT NULL,
            data BLOB NOT NULL,
            UNIQUE (key, metric)
        )
        """,
        # AUTOINCREMENT never gives a number twice, also after rows are deleted: a later lease
        # has a larger token, which is what fencing needs.
        """
        CREATE TABLE leases (
            token INTEGER PRIMARY KEY AUTOINCREMENT,
            key TEXT NOT NULL UNIQUE REFERENCES runs (key),
            owner TEXT NOT NULL,
            expires REAL NOT NULL
        )
        """,
    ),
    # The number of attempts in a row without a sign, and when the first of them started.
    ("ALTER TABLE runs ADD COLUMN silent INTEGER NOT NULL DEFAULT 0",),
    ("ALTER TABLE runs ADD COLUMN silent_since REAL",),
    # Checksums, and how many runs there are: rows that are lost have none to be wrong.
    (
        "ALTER TABLE runs ADD COLUMN checksum TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE results ADD COLUMN contents TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE results ADD COLUMN checksum TEXT NOT NULL DEFAULT ''",
        "CREATE TABLE totals (runs INTEGER NOT NULL)",
        _add_checksums,
    ),
    # Canonical specifications, and under which keys runs were known before.
    (
        """
        CREATE TABLE former (
            key TEXT PRIMARY KEY,
            run TEXT NOT NULL REFERENCES runs (key)
        )
        """,
        canonicalise,
    ),
    (convert_to_whole_steps,),
]

CHECKSUMS = 4  # the first version with checksums
SPECIFIED = 6  # the first version with today's specifications; older ones are read from a copy
READABLE = 1  # the oldest version whose results can be read without an upgrade
