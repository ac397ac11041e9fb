"""The ledger after kills and crashes, of other versions, and damaged: one result, none lost."""

from __future__ import annotations

import csv
import io
import os
import random
import signal
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ledgers import (
    PROCESSES,
    CrashError,
    check,
    crash_at,
    forking,
    outcome,
    raise_crash,
    result_of,
    specs,
)
from tests.waiting import PATIENCE
from upgd.ledger import (
    Ledger,
    LedgerError,
    load_checkpoint,
    remove_partial,
    save_checkpoint,
    schema,
)
from upgd.ledger import crash_points as crash

# ---- kills and crashes


def _finish_until_killed(
    folder: Path, number: int, acknowledged: Path, finished: int, seconds: float
) -> None:
    """Some time after so many runs are finished the system ends the process, as SIGKILL does."""
    log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if finished == 0:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    with Ledger.open(folder, now=lambda: 1000.0 * number) as ledger:  # older leases are over
        while claims := ledger.claim(f"w{number}", 500, limit=2):
            for claim in claims:
                ledger.finish(claim, result_of(claim.spec, windows=2000))
                os.write(log, f"{claim.spec.key}\n".encode())
                finished -= 1
                if finished == 0:
                    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.slow
@forking
def test_kill_at_any_time_loses_nothing(tmp_path: Path) -> None:
    study, log = tmp_path / "study", tmp_path / "acknowledged"
    log.touch()
    with Ledger.open(study) as ledger:
        ledger.add(specs(5000))
    rng = random.Random(0)
    for number in range(1, 25):
        times = [(rng.randint(0, 20), rng.uniform(0.001, 0.02)) for _ in range(2)]
        workers = [
            PROCESSES.Process(target=_finish_until_killed, args=(study, number, log, *when))
            for when in times
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE)
            assert worker.exitcode == -signal.SIGALRM
        check(study)
    acknowledged = log.read_text().split()
    assert len(acknowledged) == len(set(acknowledged)) > 100
    with Ledger.open(study, now=lambda: 1e9) as ledger:
        done = {run.key: run for run in ledger.runs(state="done")}
        assert set(acknowledged) <= set(done)
        for key, run in done.items():
            assert run.result is not None
            assert run.result.summary["accuracy"] == run.spec.seed
            expected = np.asarray(result_of(run.spec, 2000).series["loss"].values)
            np.testing.assert_array_equal(ledger.series(key, "loss"), expected)
        assert len(ledger.claim("last", 60, limit=9999)) == 5000 - len(done)


def work(folder: Path) -> None:
    """A study in which every kind of write happens; run again, it goes on where it was."""
    with Ledger.open(folder) as ledger:
        ledger.evict("me")
        ledger.add(specs(4))
        while claims := ledger.claim("me", 60):
            [claim] = claims
            ledger.renew("me", 60)
            ledger.hear([claim])
            save_checkpoint(folder / "run.npz", {"w": np.arange(3)}, {"key": claim.spec.key})
            if claim.spec.seed == 0:
                ledger.finish(claim, result_of(claim.spec))
            elif claim.spec.seed == 1 and claim.attempt == 1:
                ledger.fail(claim, "flaky", retry=True)
            elif claim.spec.seed == 2 and claim.attempt == 1:
                ledger.release([claim])
            elif claim.spec.seed == 3:
                ledger.fail(claim, "hopeless", retry=False)
            else:
                ledger.settle([(claim, replace(result_of(claim.spec), diverged_at=7))])
        ledger.export_csv(folder / "runs.csv")


def _work_and_exit(folder: Path, number: int) -> None:
    crash.point = crash_at(number, lambda: os._exit(7))
    work(folder)


@pytest.mark.parametrize(
    ("how", "which"),
    [
        pytest.param("exit", "each", marks=forking),
        pytest.param("exit", "all", marks=[forking, pytest.mark.slow]),
        pytest.param("raise", "all", marks=pytest.mark.slow),
    ],
)
def test_crash_around_every_durable_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, which: str
) -> None:
    """Before and after each kind of write, at its last time, or at all times."""
    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(crash, "point", names.append)
        work(tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    assert [row[1] for row in expected] == ["done", "diverged", "diverged", "failed"]
    kinds = {name.split(":")[0] for name in names}
    assert kinds >= {
        "migrate",
        "add",
        "claim",
        "renew",
        "hear",
        "finish",
        "settle",
        "fail",
        "release",
    }
    last = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        if which == "each" and number != last[name]:
            continue
        folder = tmp_path / str(number)
        if how == "exit":
            process = PROCESSES.Process(target=_work_and_exit, args=(folder, number))
            process.start()
            process.join(PATIENCE)
            assert process.exitcode == 7, name
        else:
            with monkeypatch.context() as patch:
                patch.setattr(crash, "point", crash_at(number, raise_crash))
                with pytest.raises(CrashError):
                    work(folder)
        if (folder / "ledger.sqlite").exists() and not name.startswith("migrate"):
            check(folder)
            if (folder / "run.npz").exists():
                load_checkpoint(folder / "run.npz")
        work(folder)
        check(folder)
        assert outcome(folder) == expected, name
        assert len(list(csv.DictReader(io.StringIO((folder / "runs.csv").read_text())))) == 4
        remove_partial(folder, older_than=-1)
        assert {f.name for f in folder.iterdir()} == {"ledger.sqlite", "run.npz", "runs.csv"}


# ---- versions and foreign files

# The tables of version 1, as released: never to be edited, so that old ledgers stay readable.
VERSION_1 = """
CREATE TABLE runs (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, spec TEXT NOT NULL,
  rules INTEGER NOT NULL, problem TEXT NOT NULL, method TEXT NOT NULL, seed INTEGER NOT NULL,
  steps INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'pending'
  CHECK (state IN ('pending', 'running', 'done', 'failed', 'diverged')),
  attempts INTEGER NOT NULL DEFAULT 0, error TEXT);
CREATE INDEX runs_by_state ON runs (state);
CREATE INDEX runs_by_name ON runs (problem, method);
CREATE TABLE results (key TEXT PRIMARY KEY REFERENCES runs (key), engine TEXT NOT NULL,
  device TEXT NOT NULL, dtype TEXT NOT NULL, versions TEXT NOT NULL, host TEXT NOT NULL,
  started REAL NOT NULL, finished REAL NOT NULL, wall REAL NOT NULL, summary TEXT NOT NULL,
  diverged_at INTEGER);
CREATE TABLE series (key TEXT NOT NULL REFERENCES results (key), metric TEXT NOT NULL,
  window INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (key, metric));
CREATE TABLE leases (token INTEGER PRIMARY KEY AUTOINCREMENT,
  key TEXT NOT NULL UNIQUE REFERENCES runs (key), owner TEXT NOT NULL, expires REAL NOT NULL);
PRAGMA application_id = 1431324484;
PRAGMA user_version = 1;
"""


def old_ledger(folder: Path) -> None:
    """A ledger of version 1 with a done run and a pending one."""
    db = sqlite3.connect(folder / "ledger.sqlite")
    db.executescript(VERSION_1)
    for s in specs(2):
        db.execute(
            "INSERT INTO runs (key, spec, rules, problem, method, seed, steps) "
            "VALUES (?, ?, ?, 'digits', 'upgd', ?, 10)",
            (s.key, s.to_json(), s.rules, s.seed),
        )
    key = specs(1)[0].key
    db.execute(
        "INSERT INTO results VALUES (?, 'eager', 'cpu', 'float32', '{}', '{}', 1, 2, 1, ?, NULL)",
        (key, '{"accuracy": 0.5}'),
    )
    for metric in ("accuracy", "loss"):
        db.execute("INSERT INTO series VALUES (?, ?, 5, ?)", (key, metric, b"\0\0\x80?\0\0\0@"))
    db.execute("UPDATE runs SET state = 'done' WHERE key = ?", (key,))
    db.commit()
    db.close()


STEP = (
    "ALTER TABLE runs ADD COLUMN note TEXT",
    "UPDATE runs SET note = problem || seed",
    "CREATE TABLE extra (name TEXT)",
)


@pytest.mark.parametrize("steps", [0, 1], ids=["as it is", "with a later step"])
def test_old_ledgers_are_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    old_ledger(tmp_path)
    now = len(schema.MIGRATIONS)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, *[STEP] * steps])
    with Ledger.open(tmp_path, read_only=True) as ledger:
        assert [run.state for run in ledger.runs()] == ["done", "pending"]
    if steps:
        monkeypatch.setattr(schema, "READABLE", now + 1)
        with pytest.raises(LedgerError, match="older version"):
            Ledger.open(tmp_path, read_only=True)
        for number in range(1, 5):  # a crash on the way leaves the old version, whole
            with monkeypatch.context() as patch:
                patch.setattr(crash, "point", crash_at(number, raise_crash))
                with pytest.raises(CrashError):
                    Ledger.open(tmp_path)
            db = sqlite3.connect(tmp_path / "ledger.sqlite")
            assert db.execute("PRAGMA user_version").fetchone() == (1,)
            assert len(db.execute("PRAGMA table_info(runs)").fetchall()) == 11
            db.close()
    with Ledger.open(tmp_path) as ledger:
        done, pending = ledger.runs()
        assert (done.state, pending.state) == ("done", "pending")
        assert done.result is not None
        assert done.result.summary == {"accuracy": 0.5}
        assert ledger.series(done.key, "loss").tolist() == [1.0, 2.0]
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, result_of(claim.spec))
    check(tmp_path)
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert db.execute("PRAGMA user_version").fetchone() == (now + steps,)
    if steps:
        assert db.execute("SELECT note FROM runs").fetchall() == [("digits0",), ("digits1",)]
    db.close()


def test_newer_ledgers_are_refused_and_left_alone(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        db = sqlite3.connect(ledger.path)
        db.execute("PRAGMA user_version = 99")
        db.close()
        with pytest.raises(LedgerError, match="newer upgd"):  # also when upgraded while open
            ledger.add(specs(1))
    before = ledger.path.read_bytes()
    for options in ({}, {"read_only": True}, {"create": False}):
        with pytest.raises(LedgerError, match="newer upgd"):
            Ledger.open(tmp_path, **options)
    assert ledger.path.read_bytes() == before


def _other_database(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE recipes (name TEXT)")
    db.close()


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.write_text("not a database at all"),
    "one byte": lambda path: path.write_bytes(b"S"),
    "zeros": lambda path: path.write_bytes(bytes(8192)),
    "another database": _other_database,
    "a folder": lambda path: path.mkdir(),
    "a header and noise": lambda path: path.write_bytes(
        b"SQLite format 3\0" + random.Random(0).randbytes(9000)
    ),
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_a_ledger_is_refused(tmp_path: Path, name: str, read_only: bool) -> None:
    path = tmp_path / "ledger.sqlite"
    FOREIGN[name](path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(LedgerError, match=r"ledger\.sqlite .*; |; choose") as caught:
        Ledger.open(tmp_path, read_only=read_only)
    assert "\n" not in str(caught.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


@pytest.mark.parametrize("size", [1, 40, 100, 3000, 4096, 12288])
def test_truncated_ledgers_are_refused(tmp_path: Path, size: int) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(300))
    os.truncate(ledger.path, size)
    with pytest.raises(LedgerError), Ledger.open(tmp_path) as damaged:
        list(damaged.runs())


def test_missing_studies_and_impossible_places(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"there is no study in .*upgd run"):
        Ledger.open(tmp_path / "none", create=False)
    with pytest.raises(LedgerError, match="there is no study"):
        Ledger.open(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="--study"):
        Ledger.open(tmp_path / "file")
    ledger = Ledger.open(tmp_path / "study")
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.counts()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "ledger.sqlite").touch()  # a process died before its first write
    with pytest.raises(LedgerError, match="there is no study"):
        Ledger.open(tmp_path / "empty", read_only=True)
    with Ledger.open(tmp_path / "empty") as fresh:
        assert fresh.add(specs(1)) == (1, 0)
