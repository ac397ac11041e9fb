"""The tables of a ledger, as the list of steps that made them what they are.

A ledger's ``user_version`` says how many of the steps it has seen. A step that has been
released is never edited: a change to the tables is a new step at the end.
"""

from __future__ import annotations

APPLICATION_ID = 0x55504744  # "UPGD" in ASCII: tells our files from other SQLite databases

MIGRATIONS: list[tuple[str, ...]] = [
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
]

READABLE = 1
"""The oldest version whose results can be read as they are, without bringing it up to date."""
