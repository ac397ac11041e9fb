"""The ledger of a study: its runs, who works on them, and their results.

Processes share a ledger by leases. A claim holds a run until its lease expires or is renewed. When
a process dies, its lease expires and another process takes the run over with a larger token. If the
first process comes back, its token is stale and the ledger refuses its result: each run has one
result, from the last process that held it.

A run that kills its process (out of memory, say) must not be tried for ever. The ledger counts the
attempts in a row that left no result, no failure and no checkpoint. After the second the run is
suspect and is claimed after all others; after the fifth, if the first was at least five minutes
ago, it fails. A healthy run whose process is killed again and again saves checkpoints in between,
or is killed in quick succession.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from upgd.ledger import crash_points as crash
from upgd.ledger import export, queries
from upgd.ledger.canonical import proper_name
from upgd.ledger.checksums import checksum
from upgd.ledger.database import Database, damaged
from upgd.ledger.errors import LeaseLostError, LedgerError
from upgd.ledger.records import Claim, Result, to_blob, to_text
from upgd.ledger.schema import RESULT, RUN
from upgd.ledger.spec import RULES_VERSION, RunSpec

NAME = "ledger.sqlite"
SUSPECT, ATTEMPTS, PATIENCE = 2, 5, 300.0
FILTERS = ("problem", "method", "seed", "steps", "key")
FREE = """
    SELECT runs.* FROM runs LEFT JOIN leases ON leases.key = runs.key
    WHERE rules = ? AND (state = 'pending'
        OR (state = 'running' AND (expires IS NULL OR expires <= ?)))
"""
HIDDEN = """
    SELECT count(*) FROM runs NOT INDEXED WHERE state IN ('pending', 'running') AND (
        key NOT IN (SELECT key FROM runs INDEXED BY runs_by_state
                    WHERE state IN ('pending', 'running'))
        OR NOT EXISTS (SELECT 1 FROM runs AS same WHERE same.key = runs.key))
"""
Where = Mapping[str, str | int | Collection[str] | Collection[int]]


class Ledger(queries.Reader):
    """A study's ledger; open one with :meth:`open`.

    >>> import tempfile
    >>> from upgd.ledger import Ledger, Result, RunSpec, Series
    >>> specs = [RunSpec("digits", "upgd", {"lr": 0.01}, seed=s, steps=100) for s in range(3)]
    >>> with tempfile.TemporaryDirectory() as folder, Ledger.open(folder) as ledger:
    ...     print(ledger.add(specs), ledger.add(specs))
    ...     [claim] = ledger.claim("me", lease_seconds=60)
    ...     accuracy = Series([0.25, 0.75], window=50)
    ...     ledger.finish(claim, Result("eager", series={"accuracy": accuracy}))
    ...     print(ledger.counts()["done"], ledger.series(claim.spec.key, "accuracy"))
    (3, 0) (0, 3)
    1 [0.25 0.75]
    """

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        create: bool = True,
        *,
        exclusive: bool = False,
        read_only: bool = False,
        now: Callable[[], float] = time.time,
    ) -> Ledger:
        """Open the ledger of the study in `folder`.

        Args:
            folder: The study.
            create: Whether to make folder and ledger where there are none.
            exclusive: Keep other processes out, which is safe on network disks too.
            read_only: Write nothing; works in folders that cannot be written.
            now: The clock of leases, in seconds; the same for all processes of a study.

        Raises:
            LedgerError: It cannot be opened, is not a ledger, or is one of a newer upgd.
        """
        return cls(Database(Path(folder) / NAME, create, exclusive, read_only), now)

    @property
    def path(self) -> Path:
        """The ledger's file."""
        return self._database.path

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, specs: Iterable[RunSpec]) -> tuple[int, int]:
        """Add runs that are not there yet; return how many were added and how many known."""
        rows = [
            (s.key, s.to_json(), s.rules, s.problem, s.method, s.seed, s.steps, "pending", 0, None)
            for s in specs
        ]
        with self._database.write("add") as db:
            before = db.total_changes
            db.executemany(
                f"INSERT INTO runs ({', '.join(RUN)}, checksum) "
                f"VALUES ({', '.join('?' * len(RUN))}, ?) ON CONFLICT (key) DO NOTHING",
                ((*row, checksum("run", *row)) for row in rows),
            )
            added = db.total_changes - before
            crash.point("add: after runs")
            db.execute("UPDATE totals SET runs = runs + ?", (added,))
        return added, len(rows) - added

    # ------------------------------------------------------------------------------ claims
    def claim(
        self, owner: str, lease_seconds: float, limit: int = 1, where: Where | None = None
    ) -> list[Claim]:
        """Claim runs: first those whose lease expired, then pending ones, oldest first.

        Suspects come last; those with too many attempts without a sign fail. Runs that were
        specified for other rules than this upgd's are ignored.

        Args:
            owner: Who claims; see :func:`owner_name`.
            lease_seconds: How long the claim holds unless it is renewed.
            limit: How many runs to claim at most.
            where: Restricts problem, method (by name or alias), seed, steps or key to a value or
                to several.

        Returns:
            The claims; fewer than `limit` where fewer runs are left.
        """
        if not 0 < lease_seconds < float("inf"):
            raise ValueError(f"lease_seconds must be positive, not {lease_seconds}")
        now = self._now()
        claims = []
        with self._database.write("claim") as db:
            taken, hopeless = _candidates(db, now, limit, where or {})
            for row in hopeless:
                _give_up(db, row)
            for row in taken:
                key, attempt = row["key"], row["attempts"] + 1
                db.execute("DELETE FROM leases WHERE key = ?", (key,))
                token = db.execute(
                    "INSERT INTO leases (key, owner, expires) VALUES (?, ?, ?)",
                    (key, owner, now + lease_seconds),
                ).lastrowid
                crash.point("claim: after lease")
                _change(db, key, state="running", attempts=attempt)
                db.execute(
                    "UPDATE runs SET silent = silent + 1, "
                    "silent_since = coalesce(silent_since, ?) WHERE key = ?",
                    (now, key),
                )
                spec = RunSpec.from_json(row["spec"])
                claims.append(Claim(spec, int(token or 0), owner, attempt))
        return claims

    def renew(self, owner: str, lease_seconds: float) -> int:
        """Extend all claims of an owner; return how many it holds."""
        with self._database.write("renew") as db:
            query = "UPDATE leases SET expires = ? WHERE owner = ?"
            return db.execute(query, (self._now() + lease_seconds, owner)).rowcount

    def hear(self, claims: Iterable[Claim]) -> None:
        """Record that checkpoints of these runs were saved, so that the attempts made progress."""
        with self._database.write("hear") as db:
            db.executemany(
                "UPDATE runs SET silent = 0, silent_since = NULL WHERE key = ? AND silent > 0 "
                "AND EXISTS (SELECT 1 FROM leases WHERE token = ? AND leases.key = runs.key)",
                [(claim.spec.key, claim.token) for claim in claims],
            )

    def claimable(self, where: Where | None = None) -> Iterator[RunSpec]:
        """The runs that :meth:`claim` would take, in its order; others may take them meanwhile."""
        accepts = _acceptance(where or {})
        with self._database.read() as db:
            query = f"{FREE} ORDER BY silent >= {SUSPECT}, runs.id"
            rows = _select(db, query, RULES_VERSION, self._now()).fetchall()
        for row in rows:
            if accepts(row) and (not self._database.checksums or _is_sound(row)):
                yield RunSpec.from_json(row["spec"])

    def suspects(self) -> set[str]:
        """Runs with several attempts in a row without a sign: they may have killed the process."""
        with self._database.read() as db:
            rows = db.execute("SELECT key FROM runs WHERE silent >= ?", (SUSPECT,))
            return {key for (key,) in rows}

    def unfinished(self, where: Where | None = None) -> int:
        """How many runs are pending or running; `where` is as for :meth:`claim`.

        Raises:
            DamagedError: A damaged index hides some of them, so that no claim would find them.
        """
        accepts = _acceptance(where or {})
        with self._database.read() as db:
            [hidden] = db.execute(HIDDEN).fetchone()
            if hidden:
                raise damaged(self.path, f"an index hides {hidden} of the runs to do")
            query = f"SELECT {', '.join(FILTERS)}, spec FROM runs"
            rows = _select(db, f"{query} WHERE state IN ('pending', 'running')")
            return sum(accepts(row) for row in rows)

    # ---------------------------------------------------------------------------- outcomes
    def finish(self, claim: Claim, result: Result) -> None:
        """Commit the result of a run that finished or diverged; LeaseLostError if it was lost."""
        with self._database.write("finish") as db:
            _check_held(db, claim)
            _keep_result(db, "finish", claim, result)

    def settle(self, results: Iterable[tuple[Claim, Result]]) -> list[Claim]:
        """Commit results in one transaction; return the lost claims, whose results are dropped."""
        lost = []
        with self._database.write("settle") as db:
            for claim, result in results:
                if _is_held(db, claim):
                    _keep_result(db, "settle", claim, result)
                else:
                    lost.append(claim)
        return lost

    def fail(self, claim: Claim, error: str, retry: bool) -> None:
        """Record that a run failed, or is pending again; LeaseLostError if it was lost."""
        text = error.encode("utf-8", "replace").decode()[:10_000]
        with self._database.write("fail") as db:
            _check_held(db, claim)
            _leave(db, claim, state="pending" if retry else "failed", error=text)

    def release(self, claims: Iterable[Claim]) -> None:
        """Make claimed runs pending again, for example when interrupted; ignore lost claims."""
        with self._database.write("release") as db:
            for claim in claims:
                if _is_held(db, claim):
                    _leave(db, claim, state="pending")

    def evict(self, owner: str) -> int:
        """Make all runs of an owner that is known to be dead pending again; return how many."""
        with self._database.write("evict") as db:
            keys = db.execute("SELECT key FROM leases WHERE owner = ?", (owner,)).fetchall()
            for (key,) in keys:
                _change(db, key, state="pending")
            db.execute("DELETE FROM leases WHERE owner = ?", (owner,))
        return len(keys)

    def retry_failed(self) -> int:
        """Make failed runs pending again; return how many."""
        with self._database.write("retry") as db:
            keys = db.execute("SELECT key FROM runs WHERE state = 'failed'").fetchall()
            for (key,) in keys:
                _change(db, key, state="pending")
                _hear(db, key)
        return len(keys)

    # ------------------------------------------------------------------------------ tables
    def export_csv(self, target: export.Target) -> int:
        """Write a table with a row per run; see :func:`upgd.ledger.export.runs_csv`."""
        return export.runs_csv(self.runs(), target)

    def series_csv(self, target: export.Target, metrics: Collection[str] | None = None) -> int:
        """Write a table with a row per window; see :func:`upgd.ledger.export.series_csv`."""
        return export.series_csv(self, self.runs(), target, metrics)


def _keep_result(db: sqlite3.Connection, name: str, claim: Claim, result: Result) -> None:
    key = claim.spec.key
    series = [
        (key, str(metric), int(one.window), to_blob(one.values))
        for metric, one in result.series.items()
    ]
    times = (result.started, result.finished, result.wall)
    row = (
        *(key, str(result.engine), str(result.device), str(result.dtype)),
        *(to_text(result.versions), to_text(result.host)),
        *(float(time) + 0.0 for time in times),  # SQLite keeps -0.0 as 0.0
        *(to_text(result.summary), result.diverged_at),
        to_text({cells[1]: checksum("series", *cells) for cells in series}),
    )
    db.execute(
        f"INSERT INTO results ({', '.join(RESULT)}, checksum) "
        f"VALUES ({', '.join('?' * len(row))}, ?)",
        (*row, checksum("result", *row)),
    )
    crash.point(f"{name}: after result")
    db.executemany("INSERT INTO series VALUES (?, ?, ?, ?)", series)
    crash.point(f"{name}: after series")
    _leave(db, claim, state="done" if result.diverged_at is None else "diverged", error=None)


def _acceptance(where: Where) -> Callable[[sqlite3.Row], bool]:
    allowed: dict[str, frozenset[Any]] = {}
    for name, value in where.items():
        if name not in FILTERS:
            raise LedgerError(f"cannot choose runs by {name!r}; choose by {', '.join(FILTERS)}")
        allowed[name] = frozenset([value] if isinstance(value, str | int) else value)
    named = "method" in allowed
    methods = frozenset(map(proper_name, allowed.pop("method", ())))
    return lambda row: (
        all(row[name] in values for name, values in allowed.items())
        and not (named and methods.isdisjoint(queries.names(row["method"], row["spec"])))
    )


def _select(db: sqlite3.Connection, query: str, *values: Any) -> sqlite3.Cursor:
    """Rows whose cells are found by name."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(query, values)


def _candidates(
    db: sqlite3.Connection, now: float, limit: int, where: Where
) -> tuple[list[sqlite3.Row], list[sqlite3.Row]]:
    """The runs to claim, at most `limit`, and those found before them that are hopeless."""
    accepts = _acceptance(where)
    found: list[sqlite3.Row] = []
    hopeless: list[sqlite3.Row] = []
    for row in _free(db, now, where.get("key")):
        if len(found) >= limit:
            break
        if accepts(row) and _is_sound(row):
            tried = row["silent"] >= ATTEMPTS and now - (row["silent_since"] or 0.0) >= PATIENCE
            (hopeless if tried else found).append(row)
    return found, hopeless


def _free(db: sqlite3.Connection, now: float, keys: Any) -> Iterator[sqlite3.Row]:
    """Runs that nobody holds: suspects last; expired ones before pending ones; the oldest first."""
    if keys is not None:
        asked = dict.fromkeys([keys] if isinstance(keys, str | int) else keys)
        query = f"{FREE} AND runs.key = ?"
        rows = [row for key in asked for row in _select(db, query, RULES_VERSION, now, key)]
        rows.sort(key=lambda row: (row["silent"] >= SUSPECT, row["state"] == "pending", row["id"]))
        yield from rows
        return
    # One query per state: each reads the index in order and stops where the caller does.
    expired = f"{FREE} AND state = 'running'"
    pending = "SELECT * FROM runs WHERE rules = ? AND state = 'pending'"
    for sign in ("<", ">="):
        end = f"AND silent {sign} {SUSPECT} ORDER BY runs.id"
        yield from _select(db, f"{expired} {end}", RULES_VERSION, now)
        yield from _select(db, f"{pending} {end}", RULES_VERSION)


def _give_up(db: sqlite3.Connection, row: sqlite3.Row) -> None:
    error = (
        f"gave up after {row['silent']} attempts without a result or checkpoint, as when memory "
        "runs out; 'upgd resume --retry' tries again"
    )
    db.execute("DELETE FROM leases WHERE key = ?", (row["key"],))
    _change(db, row["key"], state="failed", error=error)
    crash.point("claim: after giving up")


def _hear(db: sqlite3.Connection, key: str) -> None:
    db.execute("UPDATE runs SET silent = 0, silent_since = NULL WHERE key = ?", (key,))


def _is_held(db: sqlite3.Connection, claim: Claim) -> bool:
    query = "SELECT 1 FROM leases WHERE token = ? AND key = ?"
    return db.execute(query, (claim.token, claim.spec.key)).fetchone() is not None


def _check_held(db: sqlite3.Connection, claim: Claim) -> None:
    if _is_held(db, claim):
        return
    key = claim.spec.key
    query = "SELECT state, owner FROM runs LEFT JOIN leases USING (key) WHERE runs.key = ?"
    row = db.execute(query, (key,)).fetchone()
    if row is None:
        raise LeaseLostError(f"run {key} is not in this ledger")
    state, owner = row
    now = f"held by {owner}" if owner else f"already {state}" if state != "pending" else "given up"
    raise LeaseLostError(f"run {key} is {now}; {claim.owner} has lost it and must drop its work")


def _change(db: sqlite3.Connection, key: str, **cells: str | int | None) -> None:
    """Change cells of a run, and its checksum with them; that of a damaged run stays wrong."""
    query = f"SELECT {', '.join(RUN)}, checksum FROM runs WHERE key = ?"
    row = db.execute(query, (key,)).fetchone()
    if row is None:
        return  # a damaged lease
    *old, known = row
    if checksum("run", *old) == known:
        known = checksum("run", *(dict(zip(RUN, old, strict=True)) | cells).values())
    names = ", ".join(f"{name} = ?" for name in cells)
    db.execute(
        f"UPDATE runs SET {names}, checksum = ? WHERE key = ?", (*cells.values(), known, key)
    )


def _is_sound(row: sqlite3.Row) -> bool:
    """Whether a run matches its checksum; others are not claimed, and reading reports them."""
    return checksum("run", *(row[name] for name in RUN)) == str(row["checksum"])


def _leave(db: sqlite3.Connection, claim: Claim, **cells: str | int | None) -> None:
    _hear(db, claim.spec.key)
    _change(db, claim.spec.key, **cells)
    db.execute("DELETE FROM leases WHERE token = ?", (claim.token,))
