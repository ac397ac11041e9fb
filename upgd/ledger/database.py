"""The SQLite file of a ledger.

Durability: a commit appends to the write-ahead log. ``synchronous=NORMAL`` would survive
``kill -9``; only ``FULL``, which syncs the log at each commit, also survives a power cut. Commits
are few, so the ledger uses FULL.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from upgd.ledger import crash_points as crash
from upgd.ledger import network_disks as disks
from upgd.ledger import schema
from upgd.ledger.checkpoints import load_checkpoint, save_checkpoint
from upgd.ledger.errors import CheckpointError, DamagedError, LedgerError

MAGIC = b"SQLite format 3\0"
BUSY_SECONDS = 30.0
ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises; the latter where its message quotes a damaged table."""
DAMAGE = ("malformed", "not a database", "no such table", "no such column", "too big", "decode")
"""Words by which SQLite says that a file is not what it was."""

# SQLite's locks and shared memory do not survive a fork: a child must neither open a file again
# that its parent had open at the fork, nor close it.
_opened: WeakSet[Database] = WeakSet()
_inherited: list[tuple[str, sqlite3.Connection]] = []


class Database:
    """One connection to a ledger's file; threads may share it, processes may not.

    Args:
        path: The file.
        create: Whether to make it where there is none.
        exclusive: Keep other processes out, without a write-ahead log: safe on network disks.
        read_only: Write nothing. A ledger of an older version is copied to memory and upgraded.
        as_it_is: Read only, without upgrading anything.

    Raises:
        LedgerError: The file cannot be opened, is not a ledger, or is one of a newer version.
    """

    def __init__(
        self,
        path: Path,
        create: bool = True,
        exclusive: bool = False,
        read_only: bool = False,
        as_it_is: bool = False,
    ) -> None:
        read_only = read_only or as_it_is
        self.path = path
        self.checksums = True  # an older version has none while read only
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._check_place(create and not read_only, exclusive or read_only)
        try:
            connection = self._connect(read_only)
            self._connection = connection
            _opened.add(self)
            self._check_identity()
            if self._version() == 0 and (read_only or not create):
                raise _missing(path.parent)  # a process was killed before it made the tables
            if read_only:
                self.checksums = self._version() >= schema.CHECKSUMS
                if self._version() < schema.READABLE:
                    raise LedgerError(
                        f"{path} is of an older version of upgd and cannot be upgraded while read "
                        "only; open it once for writing ('upgd resume')"
                    )
                if self._version() < schema.SPECIFIED and not as_it_is:
                    connection = self._connection = _upgraded_copy(connection)
                connection.execute("PRAGMA query_only=ON")
                return
            self._configure(exclusive)
            self._migrate()
        except ERRORS as error:
            self.close()
            raise explain(error, path) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; a ledger that is closed by its last process is one plain file."""
        _opened.discard(self)
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._process != os.getpid():
            # Kept, or the garbage collector would close it.
            _inherited.append((os.path.realpath(self.path), connection))
            return
        with self._lock, suppress(sqlite3.Error):
            connection.close()

    def __del__(self) -> None:
        if hasattr(self, "_connection"):
            self.close()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The connection, for reading; SQLite's errors become LedgerErrors."""
        with self._lock:
            try:
                yield self._usable()
            except ERRORS as error:
                raise explain(error, self.path) from error

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """The connection, for several reads of one state."""
        with self.read() as connection:
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.execute("COMMIT")

    @contextmanager
    def write(self, name: str) -> Iterator[sqlite3.Connection]:
        """The connection, for one transaction, which is on disk afterwards or has no effect.

        It begins as a writer (BEGIN IMMEDIATE), so what it reads is still true when it commits.
        """
        with self._lock:
            connection = self._usable()
            crash.point(f"{name}: before begin")
            try:
                connection.execute("BEGIN IMMEDIATE")
                if self._version() > len(schema.MIGRATIONS):
                    raise _newer(self.path, self._version())
                yield connection
                crash.point(f"{name}: before commit")
                connection.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):  # the first error is the one to raise
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                if isinstance(error, ERRORS):
                    raise explain(error, self.path) from error
                raise
            crash.point(f"{name}: after commit")

    def _usable(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            raise LedgerError(f"{self.path} was opened by another process; open it in this one")
        if self._connection is None:
            raise LedgerError(f"{self.path} is closed; open it again")
        return self._connection

    def _version(self) -> int:
        return int(self._usable().execute("PRAGMA user_version").fetchone()[0])

    def _check_place(self, create: bool, any_disk: bool) -> None:
        path, folder = self.path, self.path.parent
        others = [other for other in list(_opened) if other._process != os.getpid()]
        inherited = [os.path.realpath(other.path) for other in others]
        if os.path.realpath(path) in [*inherited, *(real for real, _ in _inherited)]:
            raise LedgerError(
                f"{path} was open when this process was forked, which SQLite does not survive; "
                "close it before forking, or start processes with 'spawn'"
            )
        try:
            if create:
                folder.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or (path.exists() and not path.is_file()):
                raise LedgerError(f"{path} is not a file; choose another folder with --study")
            start = b""
            if path.exists():
                with open(path, "rb") as file:
                    start = file.read(len(MAGIC))
            elif not create:
                raise _missing(folder)
        except OSError as error:
            reason = error.strerror or str(error)
            raise LedgerError(
                f"cannot use {folder} for a study: {reason}; choose another folder with --study"
            ) from error
        if start and start != MAGIC:
            raise _foreign(path)
        kind = None if any_disk else disks.network_filesystem(folder)
        if kind:
            raise LedgerError(
                f"{folder} is on a network disk ({kind}), where processes cannot share a ledger "
                "safely; choose a local folder with --study, or open it for one process alone "
                "(exclusive=True)"
            )

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        if not read_only:
            return connect(str(self.path))
        address = self.path.resolve().as_uri()
        connection = connect(f"{address}?mode=ro", uri=True)
        try:
            connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError:
            # The log's index cannot be made in a read-only folder. Without a log there is no
            # need for it: the file alone is the whole ledger.
            connection.close()
            log = self.path.with_name(self.path.name + "-wal")
            if log.exists() and log.stat().st_size:
                raise LedgerError(
                    f"{self.path} has the log of a process that was killed, which cannot be read "
                    "in a read-only folder; copy the folder to where you may write"
                ) from None
            connection = connect(f"{address}?immutable=1", uri=True)
        return connection

    def _check_identity(self) -> None:
        """Raise unless the file is new or a ledger of this version or an older one."""
        connection = self._usable()
        connection.execute("BEGIN")  # one snapshot: another process may be making the tables
        version = self._version()
        identity = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        connection.execute("COMMIT")
        if not tables and not version and identity in (0, schema.APPLICATION_ID):
            return
        if identity != schema.APPLICATION_ID:
            raise _foreign(self.path)
        if version > len(schema.MIGRATIONS):
            raise _newer(self.path, version)
        if version < (schema.CHECKSUMS if "totals" in tables else 1):
            raise damaged(self.path, f"it says that it is of version {version}")

    def _configure(self, exclusive: bool) -> None:
        connection = self._usable()
        # fullfsync: on macOS, a sync goes through the drive's cache.
        for setting in ("foreign_keys=ON", "synchronous=FULL", "fullfsync=ON"):
            connection.execute(f"PRAGMA {setting}")
        if exclusive:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        mode = "DELETE" if exclusive else "WAL"
        deadline = time.monotonic() + BUSY_SECONDS
        while True:  # SQLite does not wait for others here, as it does elsewhere
            try:
                connection.execute(f"PRAGMA journal_mode={mode}")
                break
            except sqlite3.OperationalError as error:
                busy = "locked" in str(error)
                if exclusive or not busy or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        if exclusive:
            connection.execute("BEGIN EXCLUSIVE")  # takes the lock now, and keeps it
            connection.execute("COMMIT")

    def _migrate(self) -> None:
        """Upgrade the tables; raises at once if the ledger cannot be written."""
        with self.write("migrate") as db:
            version = self._version()  # again: another process may have been faster
            upgrade(db, version)
            folder = self.path.parent / "checkpoints"
            left = copy_checkpoints(db, folder) if 0 < version < schema.SPECIFIED else []
        for file in left:
            file.unlink(missing_ok=True)
            crash.point("migrate: after removal")


def connect(target: str, uri: bool = False, seconds: float | None = None) -> sqlite3.Connection:
    """A connection to a file; waits up to `seconds` while another process writes."""
    connection = sqlite3.connect(
        target,
        timeout=BUSY_SECONDS if seconds is None else seconds,
        isolation_level=None,  # transactions begin and end where we say
        check_same_thread=False,  # a lock keeps threads apart
        uri=uri,
    )
    connection.text_factory = _text
    return connection


def upgrade(db: sqlite3.Connection, version: int) -> None:
    """Upgrade the tables of a ledger from this version; version 0 has none."""
    if version == 0:
        db.execute(f"PRAGMA application_id={schema.APPLICATION_ID}")
    for number, statements in enumerate(schema.MIGRATIONS[version:], version + 1):
        for statement in statements:
            if callable(statement):
                statement(db)
            else:
                db.execute(statement)
            crash.point("migrate: after statement")
        db.execute(f"PRAGMA user_version={number}")


def _upgraded_copy(connection: sqlite3.Connection) -> sqlite3.Connection:
    """An upgraded copy in memory; the original connection is closed."""
    copy = connect(":memory:")
    try:
        connection.backup(copy)
        copy.execute("BEGIN")
        upgrade(copy, int(copy.execute("PRAGMA user_version").fetchone()[0]))
        copy.execute("COMMIT")
    except BaseException:
        copy.close()
        raise
    connection.close()
    return copy


def copy_checkpoints(db: sqlite3.Connection, folder: Path) -> list[Path]:
    """Copy the checkpoints of runs that have other keys now; return those that can be removed.

    The originals stay until the keys are on disk, so that a kill before that changes nothing.
    """
    query = "SELECT former.key, run, state FROM former JOIN runs ON runs.key = run"
    left: list[Path] = []
    for old, new, state in db.execute(f"{query} ORDER BY former.rowid").fetchall():
        source, target = folder / f"{old}.npz", folder / f"{new}.npz"
        if not source.is_file():
            continue
        left.append(source)
        if state in ("done", "diverged") or target.is_file():
            continue
        try:
            arrays, facts = load_checkpoint(source)
            facts["stack"]["run"] = new
        except (CheckpointError, LookupError, TypeError):
            continue  # the run restarts
        save_checkpoint(target, arrays, facts)
    return left


def _text(content: bytes) -> str:
    """Text of a cell; bytes that are not UTF-8 are kept, and the checksum does not match."""
    return content.decode("utf-8", "surrogateescape")


def damaged(path: Path, what: str) -> DamagedError:
    """An error for a ledger that does not hold what was written to it."""
    what = " ".join(what.split())
    return DamagedError(
        f"{path} is damaged: {what}; 'upgd check {path.parent}' lists the damage, and with "
        "--repair mends what can be mended",
        what,
    )


def _missing(folder: Path) -> LedgerError:
    return LedgerError(f"there is no study in {folder}; 'upgd run --study {folder}' makes one")


def _foreign(path: Path) -> LedgerError:
    return LedgerError(
        f"{path} is not a ledger of upgd; choose another folder with --study, or move it away"
    )


def _newer(path: Path, version: int) -> LedgerError:
    return LedgerError(
        f"{path} was written by a newer upgd (ledger version {version}, this one knows "
        f"{len(schema.MIGRATIONS)}); upgrade with 'pip install -U upgd'"
    )


def explain(error: Exception, path: Path) -> LedgerError:
    """One line for an error of SQLite: what, which file, and the way out."""
    text = " ".join(str(error).split())
    lower = text.lower()
    if "full" in lower or "disk i/o" in lower:
        what = "cannot be written: the disk is full or failing"
        way_out = "free space and run again, finished runs are safe"
    elif "readonly" in lower or "unable to open" in lower:
        what = "cannot be opened or written"
        way_out = "choose a folder you may write to with --study, or open it to read only"
    elif "locked" in lower or "busy" in lower:
        what, way_out = "is in use by another process", "wait for it or end it"
    elif any(word in lower for word in DAMAGE):
        return damaged(path, text)
    else:
        what, way_out = "failed", "run again; if it stays, report it with this line"
    return LedgerError(f"{path} {what} ({text}); {way_out}")
