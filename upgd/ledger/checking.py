"""Finds damage in a study: ``upgd check``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from upgd.ledger import schema
from upgd.ledger.checkpoints import load_checkpoint
from upgd.ledger.database import Database
from upgd.ledger.errors import CheckpointError, DamagedError, SpecError
from upgd.ledger.ledger import NAME
from upgd.ledger.queries import Cells, StoredRow, as_run, each_row, series_faults
from upgd.ledger.schema import is_key_of
from upgd.ledger.spec import RunSpec

MOST = 20  # lines of what SQLite finds in one file
HELD = "SELECT leases.key, state FROM leases LEFT JOIN runs ON runs.key = leases.key"


@dataclass
class Findings:
    """What was checked, and what is damaged."""

    ledger: list[str] = field(default_factory=list)  # what is damaged in the ledger, a line each
    checkpoints: dict[Path, str] = field(default_factory=dict)  # by file, what is wrong with it
    runs: int = 0  # how many could be read
    series: int = 0  # how many could be read
    kept: int = 0  # checkpoints there are
    has_checksums: bool = True  # not before a ledger of an older version is upgraded

    @property
    def lines(self) -> list[str]:
        """All that is damaged."""
        return [*self.ledger, *self.checkpoints.values()]


def check_study(folder: Path) -> Findings:
    """Compare all of a study with its checksums, without writing.

    Raises LedgerError if the ledger cannot be opened for another reason than damage.
    """
    found = Findings()
    try:
        database = Database(folder / NAME, create=False, as_it_is=True)
    except DamagedError as error:
        found.ledger.append(error.what)
        return found
    keys: set[str] = set()
    try:
        found.has_checksums = database.checksums
        for look in (_structure, _runs):
            try:
                for line in look(database, found, keys):
                    if line not in found.ledger:
                        found.ledger.append(line)
            except DamagedError as error:
                found.ledger.append(error.what)
    finally:
        database.close()
    _checkpoints(folder, keys, found)
    return found


def _structure(database: Database, found: Findings, keys: set[str]) -> Iterator[str]:
    """What SQLite itself finds, and rows without the rows that they belong to."""
    with database.read() as db:
        for (text,) in db.execute(f"PRAGMA integrity_check({MOST})"):
            if text != "ok":
                yield "the file's structure: " + " ".join(str(text).split())
        for table, number, parent, _ in db.execute("PRAGMA foreign_key_check"):
            yield f"row {number} of table {table} belongs to nothing in {parent}"
        for key, state in db.execute(HELD):
            if state != "running":
                yield f"run {key} is held by a process and {state or 'not there'}"


def _runs(database: Database, found: Findings, keys: set[str]) -> Iterator[str]:
    """What does not match its checksum, or cannot be read."""
    for row, series in each_row(database, results=True, series=True):
        found.runs += 1
        found.series += len(series)
        if row.key in keys:
            yield f"run {row.key} is there twice"
        keys.add(row.key)
        yield from _run_faults(database, row, series)
    with database.read() as db:  # a checkpoint with a former key may have been left behind
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if "former" in tables:
            keys.update(key for (key,) in db.execute("SELECT key FROM former"))


def _run_faults(database: Database, row: StoredRow, series: list[Cells]) -> Iterator[str]:
    """All that is wrong with a run, its result and its series."""
    if fault := row.fault() or _spec_fault(row):
        yield fault
    if fault := row.result_fault():
        yield fault
        return
    try:
        as_run(database, row)
    except DamagedError as error:
        yield error.what
        return
    yield from series_faults(row, series)


def _spec_fault(row: StoredRow) -> str | None:
    """What is wrong with a run's specification, or None."""
    key, text = row.run[:2]
    if not is_key_of(key, text):
        return f"run {key} has the specification of another run"
    try:
        spec = RunSpec.from_json(text)
    except SpecError as error:
        return f"run {key} has no specification ({error})"
    same = spec_cells(spec) == row.run[2:7]
    return None if same else f"run {key} differs from its specification"


def spec_cells(spec: RunSpec) -> Cells:
    """The cells of a run that its specification determines, after the first two."""
    return tuple(getattr(spec, name) for name in schema.RUN[2:7])


def _checkpoints(folder: Path, keys: set[str], found: Findings) -> None:
    for path in sorted((folder / "checkpoints").glob("*.npz")):
        found.kept += 1
        try:
            _, facts = load_checkpoint(path)
        except CheckpointError:
            found.checkpoints[path] = f"checkpoint {path.name} cannot be read; its run restarts"
            continue
        stack = facts.get("stack")
        of = stack.get("run") if isinstance(stack, dict) else None
        if of != path.stem:
            found.checkpoints[path] = f"checkpoint {path.name} is of another run ({of})"
        elif of not in keys:
            found.checkpoints[path] = f"checkpoint {path.name} belongs to no run of this study"
