"""The ledger of a study: which runs there are, who works on them, and what they gave.

Processes share a ledger by leases. A claim holds a run until its lease expires; a heartbeat
extends it. When a process dies, its lease runs out and another takes the run over with a larger
token. Should the first come back, its token is stale and the ledger refuses its result: each
run has one result, from the last process that held it.

A run that ends its process (out of memory, say) would be begun for ever. So the ledger counts how
often in a row nothing was heard of a run after it was claimed: no result, no failure, no
checkpoint. From the second time on it is suspect and waits until all others are done; after the
fifth, and not within five minutes, the ledger gives up and the run has failed. A healthy run whose
process is killed again and again saves checkpoints in between, or is killed in quick succession.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from upgd.ledger import crash_points as crash
from upgd.ledger import export, queries
from upgd.ledger.canonical import proper_name
from upgd.ledger.checksums import checksum
from upgd.ledger.database import Database, damaged
from upgd.ledger.errors import LeaseLostError, LedgerError
from upgd.ledger.queries import FILTERS, Kept, read_run, select_runs, select_series
from upgd.ledger.records import STATES, Claim, Lease, Result, Run, to_blob, to_text
from upgd.ledger.schema import RESULT, RUN
from upgd.ledger.spec import RULES_VERSION, RunSpec

NAME = "ledger.sqlite"
SUSPECT, ATTEMPTS, PATIENCE = 2, 5, 300.0
FEW = 100
"""Up to so many keys, or as many as are claimed, are looked up; for more all runs are read."""
HIDDEN = """
    SELECT count(*) FROM runs NOT INDEXED WHERE state IN ('pending', 'running') AND (
        key NOT IN (SELECT key FROM runs INDEXED BY runs_by_state
                    WHERE state IN ('pending', 'running'))
        OR NOT EXISTS (SELECT 1 FROM runs AS same WHERE same.key = runs.key))
"""
Where = Mapping[str, str | int | Collection[str] | Collection[int]]


class Ledger:
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

    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

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
            exclusive: For one process alone, which is safe on network disks too.
            read_only: Write nothing; works in folders that cannot be written.
            now: The clock of leases, in seconds; the same for all processes of a study.

        Raises:
            LedgerError: If it cannot be opened, is no ledger, or is one of a newer upgd.
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

    def claim(
        self, owner: str, lease_seconds: float, limit: int = 1, where: Where | None = None
    ) -> list[Claim]:
        """Take runs to work on: first those whose lease expired, then pending ones, oldest first.

        Suspects come last, and those of which nothing was heard too often have failed. Runs that
        were specified for other rules than this upgd's are left alone.

        Args:
            owner: Who asks; see :func:`owner_name`.
            lease_seconds: How long the claim holds without a heartbeat.
            limit: How many runs to take at most.
            where: Restricts problem, method (by name or alias), seed, steps or key to a value or
                to several.

        Returns:
            The claims; fewer than `limit`, or none, where there is no more to do.
        """
        if not 0 < lease_seconds < float("inf"):
            raise ValueError(f"lease_seconds must be positive, not {lease_seconds}")
        accepts = _acceptance(where or {})
        now = self._now()
        claims = []
        with self._database.write("claim") as db:
            taken, hopeless = _candidates(db, now, limit, accepts, _few_keys(where or {}, limit))
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
                claims.append(Claim(spec, int(token or 0), owner, lease_seconds, attempt))
        return claims

    def heartbeat(self, claim: Claim, progress: bool = False) -> float:
        """Extend a claim; return until when it holds.

        Args:
            claim: What is worked on.
            progress: Whether a checkpoint was saved, from which the next attempt will go on:
                then this one was not in vain.

        Raises:
            LeaseLostError: If the run is not the claimant's any more: stop working on it.
        """
        expires = self._now() + claim.lease_seconds
        with self._database.write("heartbeat") as db:
            _check_held(db, claim)
            db.execute("UPDATE leases SET expires = ? WHERE token = ?", (expires, claim.token))
            if progress:
                _hear(db, claim.spec.key)
        return expires

    def heartbeat_all(self, claims: Iterable[Claim], progress: bool = False) -> None:
        """Extend several claims in one transaction; see :meth:`heartbeat`.

        Raises:
            LeaseLostError: If one of the runs is not the claimant's any more; none is extended.
        """
        now = self._now()
        with self._database.write("heartbeat") as db:
            for claim in claims:
                _check_held(db, claim)
                expires = now + claim.lease_seconds
                db.execute("UPDATE leases SET expires = ? WHERE token = ?", (expires, claim.token))
                if progress:
                    _hear(db, claim.spec.key)

    def renew(self, owner: str, lease_seconds: float) -> int:
        """Extend all claims of an owner in one go; return how many it holds."""
        with self._database.write("renew") as db:
            query = "UPDATE leases SET expires = ? WHERE owner = ?"
            return db.execute(query, (self._now() + lease_seconds, owner)).rowcount

    def hear(self, claims: Iterable[Claim]) -> None:
        """Note that checkpoints of these runs were saved: the attempts are not in vain."""
        with self._database.write("hear") as db:
            db.executemany(
                "UPDATE runs SET silent = 0, silent_since = NULL WHERE key = ? AND silent > 0 "
                "AND EXISTS (SELECT 1 FROM leases WHERE token = ? AND leases.key = runs.key)",
                [(claim.spec.key, claim.token) for claim in claims],
            )

    def claimable(self, where: Where | None = None) -> Iterator[RunSpec]:
        """The runs that :meth:`claim` would take, in its order; others may take them meanwhile.

        Args:
            where: As for :meth:`claim`.
        """
        accepts = _acceptance(where or {})
        with self._database.read() as db:
            cursor = db.cursor()
            cursor.row_factory = sqlite3.Row
            rows = cursor.execute(
                "SELECT runs.* FROM runs LEFT JOIN leases ON leases.key = runs.key "
                "WHERE rules = ? AND (state = 'pending' OR (state = 'running' AND "
                "(expires IS NULL OR expires <= ?))) ORDER BY silent >= ?, runs.id",
                (RULES_VERSION, self._now(), SUSPECT),
            ).fetchall()
        for row in rows:
            if accepts(row) and (not self._database.checksums or _is_sound(row)):
                yield RunSpec.from_json(row["spec"])

    def suspects(self) -> set[str]:
        """The runs of which nothing was heard several times: they may have ended their process."""
        with self._database.read() as db:
            rows = db.execute("SELECT key FROM runs WHERE silent >= ?", (SUSPECT,))
            return {key for (key,) in rows}

    def finish(self, claim: Claim, result: Result) -> None:
        """Commit the result of a run, once and for all; it is on disk when this returns.

        Raises:
            LeaseLostError: If the run is not the claimant's any more; nothing is changed.
        """
        self._settle("finish", claim, "done", replace(result, diverged_at=None))

    def diverge(self, claim: Claim, step: int, result: Result) -> None:
        """Commit what there is of a run whose loss was not finite at `step`; it is over.

        Raises:
            LeaseLostError: If the run is not the claimant's any more; nothing is changed.
        """
        self._settle("diverge", claim, "diverged", replace(result, diverged_at=int(step)))

    def settle(self, results: Iterable[tuple[Claim, Result]]) -> list[Claim]:
        """Commit results of runs that finished or diverged, in one transaction.

        Returns:
            The claims that were lost; their results are dropped.
        """
        lost = []
        with self._database.write("settle") as db:
            for claim, result in results:
                if _is_held(db, claim):
                    state = "done" if result.diverged_at is None else "diverged"
                    _keep_result(db, "settle", claim, state, result)
                else:
                    lost.append(claim)
        return lost

    def fail(self, claim: Claim, error: str, retry: bool) -> None:
        """Record that a run went wrong; with `retry` it waits for the next claim.

        Raises:
            LeaseLostError: If the run is not the claimant's any more; nothing is changed.
        """
        text = error.encode("utf-8", "replace").decode()[:10_000]
        with self._database.write("fail") as db:
            _check_held(db, claim)
            _leave(db, claim, state="pending" if retry else "failed", error=text)

    def release(self, claim: Claim) -> None:
        """Give a run back, for example when interrupted; it waits for the next claim.

        Raises:
            LeaseLostError: If the run is not the claimant's any more; nothing is changed.
        """
        with self._database.write("release") as db:
            _check_held(db, claim)
            _leave(db, claim, state="pending")

    def release_all(self, claims: Iterable[Claim]) -> None:
        """Give runs back in one transaction; those that are not the claimant's are left alone."""
        with self._database.write("release") as db:
            for claim in claims:
                if _is_held(db, claim):
                    _leave(db, claim, state="pending")

    def evict(self, owner: str) -> int:
        """Give back all runs of an owner that is known to be dead; return how many."""
        with self._database.write("evict") as db:
            keys = db.execute("SELECT key FROM leases WHERE owner = ?", (owner,)).fetchall()
            for (key,) in keys:
                _change(db, key, state="pending")
            db.execute("DELETE FROM leases WHERE owner = ?", (owner,))
        return len(keys)

    def retry_failed(self) -> int:
        """Let failed runs wait for a claim again; return how many."""
        with self._database.write("retry") as db:
            keys = db.execute("SELECT key FROM runs WHERE state = 'failed'").fetchall()
            for (key,) in keys:
                _change(db, key, state="pending")
                _hear(db, key)
        return len(keys)

    def leases(self) -> list[Lease]:
        """Who holds which run, oldest claim first."""
        with self._database.read() as db:
            rows = db.execute("SELECT key, owner, token, expires FROM leases ORDER BY token")
            return [Lease(*row) for row in rows]

    def counts(self) -> dict[str, int]:
        """How many runs are in each state."""
        found = queries.count_states(self._database)
        return {state: found.get(state, 0) for state in STATES}

    def unfinished(self, where: Where | None = None) -> int:
        """How many runs are pending or running.

        Args:
            where: As for :meth:`claim`.

        Raises:
            DamagedError: A damaged index hides some of them, so that no claim would find them.
        """
        accepts = _acceptance(where or {})
        columns = ", ".join((*FILTERS, "spec"))
        with self._database.read() as db:
            cursor = db.cursor()
            cursor.row_factory = sqlite3.Row
            [hidden] = db.execute(HIDDEN).fetchone()
            if hidden:
                raise damaged(self.path, f"an index hides {hidden} of the runs to do")
            query = f"SELECT {columns} FROM runs WHERE state IN ('pending', 'running')"
            return sum(accepts(row) for row in cursor.execute(query))

    def problems(self) -> set[str]:
        """The problems that runs are of."""
        with self._database.read() as db:
            return {problem for (problem,) in db.execute("SELECT DISTINCT problem FROM runs")}

    def parts(self) -> list[queries.Part]:
        """How many runs of each problem and method are in each state, and their steps."""
        return queries.count_parts(self._database)

    def under_way(self) -> list[queries.UnderWay]:
        """The runs that were claimed and are not over."""
        return queries.select_under_way(self._database, self._now())

    def paces(self) -> dict[tuple[str, str], float]:
        """By problem and method, steps per second of a run among the last that finished."""
        return queries.recent_paces(self._database)

    def failures(self, most: int) -> list[tuple[RunSpec, str]]:
        """Runs that failed and why, at most so many; those that were added last come first."""
        return queries.last_failures(self._database, most)

    def runs(
        self,
        problem: str | None = None,
        method: str | None = None,
        state: str | None = None,
        hyper: Mapping[str, float] | None = None,
    ) -> Iterator[Run]:
        """Go through the runs in the order in which they were added.

        Others may write meanwhile: each run is as it was when its page was read.

        Args:
            problem: Only this problem's.
            method: Only this method's: all of a row of the registry, or those that bear an alias.
            state: Only those in this state.
            hyper: Only those with these values of hyperparameters, among others.
        """
        if state is not None and state not in STATES:
            raise LedgerError(f"unknown state {state!r}; the states are {', '.join(STATES)}")
        wanted = {name: float(value) for name, value in (hyper or {}).items()}
        for run in select_runs(self._database, problem=problem, method=method, state=state):
            if all(run.spec.hyper.get(name) == value for name, value in wanted.items()):
                yield run

    def get(self, key: str) -> Run:
        """The run with this key, or with the one that it had in an older version's ledger.

        Raises:
            LedgerError: If there is none.
        """
        run = read_run(self._database, key)
        if run is None:
            raise LedgerError(f"{self.path} has no run {key!r}; 'upgd show' lists them")
        return run

    def metrics(self, key: str) -> dict[str, int]:
        """The metrics that a run has series of, with the steps of a window."""
        row = queries.read_row(self._database, key)
        kept = [] if row is None else queries.read_series(self._database, row)
        return {one.metric: one.window for one in kept}

    def series(self, key: str, metric: str) -> NDArray[np.float32]:
        """A metric over time: one number per window, in order.

        Raises:
            LedgerError: If there is no such run, or it has no such series.
        """
        row = queries.read_row(self._database, key)
        found = [] if row is None else queries.read_series(self._database, row, metric)
        if not found:
            state = self.get(key).state
            have = ", ".join(self.metrics(key)) or "none"
            raise LedgerError(f"run {key} ({state}) has no series {metric!r}; it has {have}")
        return found[0].values

    def each_series(
        self, metrics: Collection[str] | None = None, keys: Collection[str] | None = None
    ) -> Iterator[Kept]:
        """Go through the series of many runs at once, in the order of the runs.

        Args:
            metrics: Only these.
            keys: Only those of these runs.

        Returns:
            Tuples of key, metric, window and values.
        """
        return select_series(self._database, metrics, keys)

    def all_metrics(self) -> list[str]:
        """The metrics that any run has series of."""
        return queries.all_metrics(self._database)

    def export_csv(self, target: str | os.PathLike[str] | TextIO) -> int:
        """Write a table with a row per run; see :func:`upgd.ledger.export.runs_csv`."""
        return export.runs_csv(self.runs(), target)

    def series_csv(
        self, target: str | os.PathLike[str] | TextIO, metrics: Collection[str] | None = None
    ) -> int:
        """Write a table with a row per window; see :func:`upgd.ledger.export.series_csv`."""
        return export.series_csv(self, target, metrics)

    def _settle(self, name: str, claim: Claim, state: str, result: Result) -> None:
        with self._database.write(name) as db:
            _check_held(db, claim)
            _keep_result(db, name, claim, state, result)


def _keep_result(
    db: sqlite3.Connection, name: str, claim: Claim, state: str, result: Result
) -> None:
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
    _leave(db, claim, state=state, error=None)


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


def _few_keys(where: Where, limit: int) -> list[str] | None:
    """The keys that are asked for, if they are so few that it pays to look each of them up."""
    keys = where.get("key")
    if isinstance(keys, str):
        return [keys]
    few = isinstance(keys, Collection) and len(keys) <= max(limit, FEW)
    return [key for key in keys if isinstance(key, str)] if few else None  # type: ignore[union-attr]


def _candidates(
    db: sqlite3.Connection,
    now: float,
    limit: int,
    accepts: Callable[[sqlite3.Row], bool],
    keys: list[str] | None = None,
) -> tuple[list[sqlite3.Row], list[sqlite3.Row]]:
    """The runs to take, at most `limit`, and those met on the way that are not worth it."""
    if keys is not None:
        rows = sorted(_look_up(db, now, keys), key=_order)
        rows = [row for row in rows if accepts(row) and _is_sound(row)]
        lost = [row for row in rows if _is_hopeless(row, now)]
        return [row for row in rows if not _is_hopeless(row, now)][:limit], lost
    expired = """
        SELECT runs.* FROM runs LEFT JOIN leases ON leases.key = runs.key
        WHERE state = 'running' AND (expires IS NULL OR expires <= ?) AND rules = ?
    """
    pending = "SELECT * FROM runs WHERE state = 'pending' AND rules = ?"
    found: list[sqlite3.Row] = []
    hopeless: list[sqlite3.Row] = []
    for sign in ("<", ">="):
        for query, values in ((expired, (now, RULES_VERSION)), (pending, (RULES_VERSION,))):
            cursor = db.cursor()
            cursor.row_factory = sqlite3.Row
            for row in cursor.execute(f"{query} AND silent {sign} {SUSPECT} ORDER BY id", values):
                if len(found) >= limit:
                    break
                if accepts(row) and _is_sound(row):
                    (hopeless if _is_hopeless(row, now) else found).append(row)
            cursor.close()
    return found, hopeless


def _look_up(db: sqlite3.Connection, now: float, keys: list[str]) -> list[sqlite3.Row]:
    """Those of these runs that can be taken."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    query = """
        SELECT runs.* FROM runs LEFT JOIN leases ON leases.key = runs.key
        WHERE runs.key = ? AND rules = ? AND (state = 'pending'
            OR (state = 'running' AND (expires IS NULL OR expires <= ?)))
    """
    values = ((key, RULES_VERSION, now) for key in dict.fromkeys(keys))
    found = [cursor.execute(query, value).fetchone() for value in values]
    cursor.close()
    return [row for row in found if row is not None]


def _order(row: sqlite3.Row) -> tuple[bool, bool, int]:
    """In which order runs are taken: suspects last, then expired ones first, then the oldest."""
    return row["silent"] >= SUSPECT, row["state"] == "pending", row["id"]


def _is_hopeless(row: sqlite3.Row, now: float) -> bool:
    return row["silent"] >= ATTEMPTS and now - (row["silent_since"] or 0.0) >= PATIENCE


def _give_up(db: sqlite3.Connection, row: sqlite3.Row) -> None:
    error = (
        f"gave up after {row['silent']} attempts that ended without a word, as when memory runs "
        "out; 'upgd resume --retry' tries again"
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
    """Change cells of a run, and its checksum with them.

    What was damaged before keeps a checksum that is wrong: it does not become right by a change.
    """
    query = f"SELECT {', '.join(RUN)}, checksum FROM runs WHERE key = ?"
    row = db.execute(query, (key,)).fetchone()
    if row is None:
        return  # a damaged lease is of no run
    *old, known = row
    if checksum("run", *old) == known:
        known = checksum("run", *(dict(zip(RUN, old, strict=True)) | cells).values())
    names = ", ".join(f"{name} = ?" for name in cells)
    db.execute(
        f"UPDATE runs SET {names}, checksum = ? WHERE key = ?", (*cells.values(), known, key)
    )


def _is_sound(row: sqlite3.Row) -> bool:
    """Whether a run is as it was written; others are left alone, and named to those who read."""
    return checksum("run", *(row[name] for name in RUN)) == str(row["checksum"])


def _leave(db: sqlite3.Connection, claim: Claim, **cells: str | int | None) -> None:
    _hear(db, claim.spec.key)
    _change(db, claim.spec.key, **cells)
    db.execute("DELETE FROM leases WHERE token = ?", (claim.token,))
