"""The tables of a ledger, as the list of steps that made them what they are.

A ledger's ``user_version`` says how many of the steps it has seen. A step that has been
released is never edited: a change to the tables is a new step at the end.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable

from upgd.study.checksums import checksum

APPLICATION_ID = 0x55504744  # "UPGD" in ASCII: tells our files from other SQLite databases

RUN = ("key", "spec", "rules", "problem", "method", "seed", "steps", "state", "attempts", "error")
"""The cells of a run that its checksum covers, in order."""
RESULT = (
    *("key", "engine", "device", "dtype", "versions", "host", "started", "finished", "wall"),
    *("summary", "diverged_at", "contents"),
)
"""Those of a result; ``contents`` has the checksums of its series by metric, as JSON."""
SERIES = ("key", "metric", "window", "data")
"""Those of a series."""


def _add_checksums(db: sqlite3.Connection) -> None:
    """Compute checksums of what is there; a specification that has lost its key gets none."""
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
    return (
        isinstance(spec, str)
        and key == hashlib.sha256(spec.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    )


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
    # How many times in a row the run was begun and nothing was heard of it again; since when.
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
]

CHECKSUMS = 4
"""The version from which on there are checksums; older ones have them once they are upgraded."""

READABLE = 1
"""The oldest version whose results can be read as they are, without bringing it up to date."""
