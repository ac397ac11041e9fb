"""Repair a damaged study: ``upgd check --repair``.

What matches its checksums is copied into new tables, which then replace the old ones in one
transaction. A run whose result is damaged is pending again; one whose specification is damaged is
lost.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from upgd.ledger import crash_points as crash
from upgd.ledger import schema
from upgd.ledger.checking import Findings, spec_cells
from upgd.ledger.checksums import checksum
from upgd.ledger.database import ERRORS, connect, copy_checkpoints, explain, upgrade
from upgd.ledger.errors import DamagedError, SpecError
from upgd.ledger.files import write_atomically
from upgd.ledger.ledger import NAME
from upgd.ledger.queries import OVER, Cells, StoredRow, series_faults
from upgd.ledger.spec import RunSpec

SECONDS = 5.0  # to wait for processes that work on the study
FAR = 1_000_000  # rows that are looked for, one by one, behind a damaged page


@dataclass
class Repair:
    """What a repair changed."""

    copy: Path | None = None  # the ledger as it was
    again: int = 0  # runs that wait to be computed again
    # Runs whose specification is lost; None if their number is lost too.
    lost: int | None = 0


def repair_study(folder: Path, findings: Findings) -> Repair:
    """Repair a study that no process works on; damaged checkpoints are renamed.

    Raises:
        LedgerError: Another process works on it, or nothing of it can be read.
    """
    path = folder / NAME
    try:
        with closing(connect(str(path), seconds=SECONDS)) as old, closing(connect("")) as new:
            old.execute("PRAGMA locking_mode=EXCLUSIVE")  # until it is closed
            old.execute("PRAGMA journal_mode=DELETE")
            old.execute("BEGIN EXCLUSIVE")
            old.execute("COMMIT")
            version = int(old.execute("PRAGMA user_version").fetchone()[0])
            upgrade(new, 0)
            repair = _salvage(old, new)
            left: list[Path] = []
            if version < schema.SPECIFIED:
                schema.respecify(new, version)
                left = copy_checkpoints(new, folder / "checkpoints")
            repair.copy = _copy_aside(path)
            crash.point("repair: before commit")
            new.backup(old)
            crash.point("repair: after commit")
    except ERRORS as error:
        raise _hopeless(path, explain(error, path)) from error
    for file in left:
        if file not in findings.checkpoints:
            file.unlink(missing_ok=True)
    for file in findings.checkpoints:
        file.rename(file.with_name(f"{file.name}.damaged"))
    return repair


def _hopeless(path: Path, error: Exception) -> Exception:
    if not isinstance(error, DamagedError):
        return error
    return DamagedError(
        f"{path} is damaged beyond repair: {error.what}; restore it from a copy, or move it away "
        "and repeat the commands that made the study"
    )


def _copy_aside(path: Path) -> Path:
    number = 1
    while (copy := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1

    def fill(file: BinaryIO) -> None:
        with open(path, "rb") as source:
            shutil.copyfileobj(source, file)

    write_atomically(copy, fill)
    return copy


def _salvage(old: sqlite3.Connection, new: sqlite3.Connection) -> Repair:
    """Copy what matches its checksums."""
    repair = Repair()
    have = {name for _, name, *_ in old.execute("PRAGMA table_info(runs)")}
    checksums = "checksum" in have
    more = ("checksum",) if checksums else ()
    results = {
        cells[1]: cells[1:]
        for cells in _readable(old, "results", (*schema.RESULT[: None if checksums else -1], *more))
    }
    series: dict[str, list[int]] = {}
    for number, key in _readable(old, "series", ("key",)):
        series.setdefault(key, []).append(number)
    added: list[Cells] = []
    with suppress(sqlite3.Error):
        added = old.execute("SELECT runs FROM totals").fetchall()
    known: set[str] = set()
    new.execute("BEGIN")
    for cells in _readable(old, "runs", (*schema.RUN, *more)):
        row = _rightful(
            StoredRow(cells[0], cells[1 : 1 + len(schema.RUN)], cells[-1] if more else None)
        )
        if row is None or row.key in known:
            continue
        known.add(row.key)
        found = results.get(row.key)
        if found is not None:
            row = row._replace(result=found[:-1] if more else (*found, None))
            row = row._replace(result_checksum=found[-1] if more else None)
        mine = [
            one
            for number in series.get(row.key, [])
            for one in _one(old, "series", schema.SERIES, number)
        ]
        _take_over(new, row, [one[1:] for one in mine], repair)
    with suppress(sqlite3.Error):  # an older version has none
        former = old.execute("SELECT key, run FROM former").fetchall()
        new.executemany(
            "INSERT INTO former VALUES (?, ?)", [pair for pair in former if pair[1] in known]
        )
    new.execute("UPDATE totals SET runs = ?", (len(known),))
    new.execute("COMMIT")
    repair.lost = None
    if len(added) == 1 and isinstance(added[0][0], int) and 0 <= added[0][0] - len(known) <= FAR:
        repair.lost = added[0][0] - len(known)
    elif not more:
        repair.lost = 0  # an older version does not count them
    return repair


def _rightful(row: StoredRow) -> StoredRow | None:
    """A run as its specification has it; None if that is lost."""
    key, text, *_ = row.run
    try:
        spec = RunSpec.from_json(text)
    except SpecError:
        return None
    if spec.to_json() != text:
        return None
    mended = row._replace(run=(spec.key, text, *spec_cells(spec), *row.run[7:]))
    # Where the two differ, the checksum tells whether the key alone was damaged.
    return mended if key == spec.key or mended.fault() is None else None


def _take_over(
    new: sqlite3.Connection, row: StoredRow, series: list[Cells], repair: Repair
) -> None:
    state = row.state
    sound = row.fault() is None
    if state in OVER or not sound:
        state = "pending"
        if row.result and _is_whole(row, series):
            state = "done" if row.result[10] is None else "diverged"
        repair.again += state == "pending"
    elif state == "running":  # nobody works on it: the ledger is ours alone
        state = "pending"
    run = (*row.run[:7], state, *(row.run[8:] if sound else (0, None)))
    _insert(new, "runs", (*schema.RUN, "checksum"), (*run, checksum("run", *run)))
    if state in OVER:
        contents = json.dumps({one[1]: checksum("series", *one) for one in series}, sort_keys=True)
        result = (*row.result[:-1], contents)
        cells = (*result, checksum("result", *result))
        _insert(new, "results", (*schema.RESULT, "checksum"), cells)
        for one in series:
            _insert(new, "series", schema.SERIES, one)


def _is_whole(row: StoredRow, series: list[Cells]) -> bool:
    """Whether a result and all its series are as they were written."""
    known = row.result_checksum
    if known is not None and checksum("result", *row.result) != known:
        return False
    return next(series_faults(row, series), None) is None


def _insert(db: sqlite3.Connection, table: str, names: tuple[str, ...], cells: Cells) -> None:
    places = ", ".join("?" * len(names))
    db.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({places})", cells)


# ----------------------------------------------------------------------------------- reading
def _readable(db: sqlite3.Connection, table: str, names: tuple[str, ...]) -> Iterator[Cells]:
    """The number and cells of every row that can be read; a damaged page hides only its own."""
    query = f"SELECT rowid, {', '.join(names)} FROM {table} NOT INDEXED"
    last = 0
    try:
        for cells in db.execute(f"{query} ORDER BY rowid"):
            last = cells[0]
            yield cells
        return
    except sqlite3.OperationalError:
        raise  # there is no such table or column
    except sqlite3.Error:
        end = last + 1
        with suppress(sqlite3.Error):
            end = db.execute(f"SELECT max(rowid) FROM {table} NOT INDEXED").fetchone()[0] or end
    for number in range(last + 1, min(end, last + FAR) + 1):
        yield from _one(db, table, names, number)


def _one(db: sqlite3.Connection, table: str, names: tuple[str, ...], number: int) -> list[Cells]:
    query = f"SELECT rowid, {', '.join(names)} FROM {table} NOT INDEXED WHERE rowid = ?"
    with suppress(sqlite3.Error):
        return db.execute(query, (number,)).fetchall()
    return []
