"""The ledger: one result per run, none lost, whatever is killed, full, old or broken."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import multiprocessing
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upgd.study import (
    STATES,
    CheckpointError,
    LeaseLostError,
    Ledger,
    LedgerError,
    Result,
    RunSpec,
    Series,
    StudyError,
    crash,
    disks,
    load_checkpoint,
    load_checkpoint_or_none,
    owner_name,
    remove_partial,
    save_checkpoint,
    schema,
    write_atomically,
)

# A forked child has torch imported already; elsewhere than on Linux forking is not safe.
PROCESSES = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions and limits")
forking = pytest.mark.skipif(sys.platform != "linux", reason="needs fork")


def spec(seed: int = 0, **fields: Any) -> RunSpec:
    return RunSpec(**{"problem": "digits", "method": "upgd", "seed": seed, "steps": 10, **fields})


def specs(count: int) -> list[RunSpec]:
    return [spec(seed, hyper={"lr": 0.01}) for seed in range(count)]


def result_of(s: RunSpec, windows: int = 3) -> Result:
    """What a pure function of the specification gives."""
    values = np.arange(windows, dtype=np.float32) + s.seed % 1000
    series = {"accuracy": Series(values, 5), "loss": Series(-values, 5)}
    return Result("eager", wall=1.5, summary={"accuracy": float(s.seed)}, series=series)


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def check(folder: Path) -> None:
    """What holds of every ledger at all times."""
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        states = dict(db.execute("SELECT key, state FROM runs"))
        results = [key for (key,) in db.execute("SELECT key FROM results")]
        leases = [key for (key,) in db.execute("SELECT key FROM leases")]
        series = dict(db.execute("SELECT key, count(*) FROM series GROUP BY key"))
    finally:
        db.close()
    assert sorted(results) == sorted(k for k, s in states.items() if s in ("done", "diverged"))
    assert sorted(leases) == sorted(k for k, s in states.items() if s == "running")
    assert series == dict.fromkeys(results, 2)


def outcome(folder: Path) -> list[Any]:
    """All that the runs gave, without how often they were begun."""
    with Ledger.open(folder, create=False) as ledger:
        return [
            (
                *(run.key, run.state, run.error, run.result and dict(run.result.summary)),
                *(run.result and run.result.diverged_at,),
                {name: ledger.series(run.key, name).tolist() for name in ledger.metrics(run.key)},
            )
            for run in ledger.runs()
        ]


# ---- what it does


def test_adding_is_idempotent(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "deep" / "study") as ledger:
        assert ledger.add(specs(3)) == (3, 0)
        assert ledger.add(specs(5) + specs(5)) == (2, 8)
        assert ledger.add([]) == (0, 0)
        assert [run.spec for run in ledger.runs()] == specs(5)
        assert ledger.counts() == {**dict.fromkeys(STATES, 0), "pending": 5}


def test_a_run_from_claim_to_result(tmp_path: Path) -> None:
    facts = Result(
        "eager",
        "cuda:0",
        "float64",
        versions={"torch": "2.6"},
        host={"cores": 2, "gpu": None},
        started=1.25,
        finished=3.5,
        wall=np.float32(2.25),
        summary={"accuracy": np.float64(0.1), "loss": math.nan, "tasks": 3},
        series={"accuracy": Series([0.1, math.nan, 1e300], 5), "empty": Series([])},
    )
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(1))
        [claim] = ledger.claim("me", 60)
        assert (claim.spec, claim.attempt) == (spec(hyper={"lr": 0.01}), 1)
        assert ledger.counts()["running"] == 1
        assert ledger.claim("you", 60) == []
        ledger.finish(claim, facts)
    with Ledger.open(tmp_path, create=False) as ledger:
        run = ledger.get(claim.spec.key)
        assert run.state == "done"
        assert run.result is not None
        for name in ("engine", "device", "dtype", "versions", "host", "started", "finished"):
            assert getattr(run.result, name) == getattr(facts, name)
        assert run.result.wall == 2.25
        assert run.result.summary["accuracy"] == 0.1
        assert math.isnan(run.result.summary["loss"])
        series = ledger.series(run.key, "accuracy")
        assert series.dtype == np.float32
        np.testing.assert_array_equal(series, np.float32([0.1, math.nan, math.inf]))
        assert ledger.metrics(run.key) == {"accuracy": 5, "empty": 1}
        assert ledger.series(run.key, "empty").shape == (0,)
        with pytest.raises(LedgerError, match="it has accuracy, empty"):
            ledger.series(run.key, "acuracy")
        with pytest.raises(LedgerError, match="no run 'abc'"):
            ledger.series("abc", "accuracy")


def test_ends_other_than_done(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(4))
        first, second, third, fourth = ledger.claim("me", 60, limit=9)
        ledger.fail(first, "out of memory \ud800", retry=False)
        ledger.fail(second, "flaky", retry=True)
        ledger.diverge(third, 7, result_of(third.spec))
        ledger.release(fourth)
        states = [(run.state, run.error) for run in ledger.runs()]
        assert states == [
            ("failed", "out of memory ?"),
            *(("pending", "flaky"), ("diverged", None), ("pending", None)),
        ]
        diverged = ledger.get(third.spec.key).result
        assert diverged is not None
        assert diverged.diverged_at == 7
        again = ledger.claim("me", 60, limit=9)
        assert [(c.spec.seed, c.attempt) for c in again] == [(1, 2), (3, 2)]
        ledger.finish(again[0], result_of(again[0].spec))
        assert ledger.get(again[0].spec.key).error is None
        assert ledger.retry_failed() == 1
        assert ledger.counts()["pending"] == 1
        for claim in (first, second, third, fourth, again[0]):
            for act in (
                lambda c: ledger.finish(c, result_of(c.spec)),
                lambda c: ledger.diverge(c, 1, result_of(c.spec)),
                lambda c: ledger.fail(c, "late", retry=True),
                ledger.release,
                ledger.heartbeat,
            ):
                with pytest.raises(LeaseLostError):
                    act(claim)
    check(tmp_path)


def test_filters(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        grid = [
            spec(seed, problem=p, method=m, hyper={"lr": lr})
            for p in ("a", "b")
            for m in ("sgd", "upgd")
            for lr in (1, 0.1)
            for seed in range(2)
        ]
        ledger.add(grid)
        found = [r.spec for r in ledger.runs(problem="a", method="sgd", hyper={"lr": 1})]
        assert found == [s for s in grid if (s.problem, s.method, s.hyper["lr"]) == ("a", "sgd", 1)]
        assert list(ledger.runs(hyper={"sigma": 1})) == []
        with pytest.raises(LedgerError, match="unknown state 'finished'"):
            next(ledger.runs(state="finished"))
        where = {"method": "upgd", "seed": [1, 5]}
        claimed = [c.spec for c in ledger.claim("me", 60, limit=99, where=where)]
        assert claimed == [s for s in grid if s.method == "upgd" and s.seed == 1]
        assert [r.spec for r in ledger.runs(state="running")] == claimed
        [claim] = ledger.claim("me", 60, where={"key": {grid[-2].key}})
        assert claim.spec == grid[-2]
        with pytest.raises(LedgerError, match="cannot choose runs by 'lr'"):
            ledger.claim("me", 60, where={"lr": 1})
        with pytest.raises(ValueError, match="lease_seconds"):
            ledger.claim("me", 0)


def test_runs_for_other_rules_are_kept_but_not_claimed(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([spec(rules=99), spec()])
        assert [claim.spec.rules for claim in ledger.claim("me", 60, limit=5)] == [spec().rules]
        assert [run.key for run in ledger.runs()] == [spec(rules=99).key, spec().key]


def test_csv_round_trip(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add([spec(0, hyper={"lr": 0.1}), spec(1, hyper={"sigma": 1 / 3})])
        ledger.add([spec(2, method='a,"b"', options={"batch": 32, "restart": True})])
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, result_of(claim.spec))
        assert ledger.export_csv(tmp_path / "runs.csv") == 3
        file = io.StringIO()
        ledger.export_csv(file)
        assert (tmp_path / "runs.csv").read_bytes() == file.getvalue().encode()
        rows = list(csv.DictReader(io.StringIO(file.getvalue())))
        for row, run in zip(rows, ledger.runs(), strict=True):
            assert RunSpec.from_json(row["spec"]) == run.spec
            assert (row["key"], row["state"], row["method"]) == (
                *(run.key, run.state, run.spec.method),
            )
            given = {name: row[f"hyper.{name}"] for name in ("lr", "sigma")}
            assert {n: float(v) for n, v in given.items() if v} == dict(run.spec.hyper)
        assert (rows[2]["option.batch"], rows[2]["option.restart"]) == ("32", "true")
        assert (rows[0]["summary.accuracy"], rows[1]["summary.accuracy"]) == ("0.0", "")
        assert ledger.series_csv(tmp_path / "series.csv", ["accuracy"]) == 3
        with open(tmp_path / "series.csv", newline="") as read:
            table = [(int(row["step"]), float(row["value"])) for row in csv.DictReader(read)]
        assert table == [(5, 0.0), (10, 1.0), (15, 2.0)]
        with pytest.raises(StudyError, match="cannot write"):
            ledger.export_csv(tmp_path / "nowhere" / "runs.csv")


def test_ten_thousand_runs(tmp_path: Path) -> None:
    many = specs(10_000)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.add(many) == (10_000, 0)
        assert ledger.add(many) == (0, 10_000)
        for claim in ledger.claim("me", 60, limit=20):
            ledger.finish(claim, result_of(claim.spec))
        assert [run.spec for run in ledger.runs()] == many
        assert sum(1 for _ in ledger.runs(state="pending")) == 9_980


# ---- leases


def test_expired_lease_is_taken_over_and_the_old_owner_rejected(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as one, Ledger.open(tmp_path, now=clock) as other:
        one.add(specs(2))
        [old] = one.claim("one", 10)
        clock.time += 9
        one.heartbeat(old)
        clock.time += 9
        assert [c.spec.seed for c in other.claim("other", 10, limit=9)] == [1]
        clock.time += 1
        [new] = other.claim("other", 10, limit=9, where={"seed": 0})
        assert (new.spec, new.attempt) == (old.spec, 2)
        assert new.token > old.token
        with pytest.raises(LeaseLostError, match="held by other"):
            one.heartbeat(old)
        with pytest.raises(LeaseLostError, match="held by other"):
            one.finish(old, result_of(old.spec))
        assert one.get(old.spec.key).result is None
        other.finish(new, result_of(new.spec))
        with pytest.raises(LeaseLostError, match="already done"):
            one.finish(old, result_of(old.spec))
        with pytest.raises(LeaseLostError, match="already done"):
            other.finish(new, result_of(new.spec))
    check(tmp_path)


def test_late_owner_may_finish_while_nobody_else_came(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger.open(tmp_path, now=clock) as ledger:
        ledger.add(specs(1))
        [claim] = ledger.claim("me", 10)
        clock.time += 100
        ledger.heartbeat(claim)
        assert ledger.leases()[0].expires == clock.time + 10
        clock.time += 100
        ledger.finish(claim, result_of(claim.spec))
        assert ledger.counts()["done"] == 1


def test_tokens_grow_also_after_all_leases_are_gone(tmp_path: Path) -> None:
    tokens = []
    for _ in range(3):
        with Ledger.open(tmp_path) as ledger:
            ledger.add(specs(2))
            claims = ledger.claim("me", 60, limit=2)
            tokens += [claim.token for claim in claims]
            assert ledger.evict("somebody") == 0
            assert ledger.evict("me") == 2
            assert ledger.leases() == []
    assert tokens == sorted(set(tokens))
    assert owner_name() != owner_name()


def _claim_all(folder: Path, owner: str, queue: Any) -> None:
    with Ledger.open(folder) as ledger:
        taken = []
        while claims := ledger.claim(owner, 600, limit=1 + len(taken) % 3):
            taken += [claim.spec.seed for claim in claims]
            for claim in claims:
                ledger.finish(claim, result_of(claim.spec))
        queue.put(taken)


def test_processes_never_share_a_run(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(200))
    queue = PROCESSES.Queue()
    workers = [
        PROCESSES.Process(target=_claim_all, args=(tmp_path, f"w{n}", queue)) for n in range(4)
    ]
    for worker in workers:
        worker.start()
    taken = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sorted(seed for seeds in taken for seed in seeds) == list(range(200))
    check(tmp_path)


def _open_and_add(folder: Path, number: int) -> None:
    with Ledger.open(folder) as ledger:
        ledger.add(specs(number + 1))


def test_processes_may_create_a_ledger_at_once(tmp_path: Path) -> None:
    workers = [PROCESSES.Process(target=_open_and_add, args=(tmp_path, n)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    check(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.counts()["pending"] == 6


def test_threads_may_share_a_ledger(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(60))
        seen: list[int] = []

        def work(owner: str) -> None:
            while claims := ledger.claim(owner, 60):
                ledger.heartbeat(claims[0])
                ledger.finish(claims[0], result_of(claims[0].spec))
                seen.append(claims[0].spec.seed)

        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == list(range(60))
    check(tmp_path)


@forking
def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:

        def child() -> None:
            for act in (ledger.counts, lambda: Ledger.open(tmp_path)):
                with pytest.raises(LedgerError, match="process"):
                    act()
            ledger.close()
            with pytest.raises(LedgerError, match="forked"):
                Ledger.open(tmp_path)

        process = PROCESSES.Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        ledger.add(specs(1))
    check(tmp_path)


# ---- kills and crashes


def _finish_until_killed(folder: Path, number: int, acknowledged: Path) -> None:
    log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Ledger.open(folder, now=lambda: 1000.0 * number) as ledger:  # older leases are over
        while claims := ledger.claim(f"w{number}", 500, limit=2):
            for claim in claims:
                ledger.finish(claim, result_of(claim.spec, windows=2000))
                os.write(log, f"{claim.spec.key}\n".encode())


def test_kill_at_any_time_loses_nothing(tmp_path: Path) -> None:
    study, log = tmp_path / "study", tmp_path / "acknowledged"
    log.touch()
    with Ledger.open(study) as ledger:
        ledger.add(specs(5000))
    rng = random.Random(0)
    killed = 0
    for number in range(1, 25):
        args = (study, number, log)
        workers = [PROCESSES.Process(target=_finish_until_killed, args=args) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            time.sleep(rng.uniform(0.0, 0.15))
            killed += worker.is_alive()
            worker.kill()
        for worker in workers:
            worker.join(60)
        check(study)
    assert killed >= 20
    acknowledged = log.read_text().split()
    assert len(acknowledged) == len(set(acknowledged)) > 0
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
            ledger.heartbeat(claim)
            save_checkpoint(folder / "run.npz", {"w": np.arange(3)}, {"key": claim.spec.key})
            if claim.spec.seed == 0:
                ledger.finish(claim, result_of(claim.spec))
            elif claim.spec.seed == 1 and claim.attempt == 1:
                ledger.fail(claim, "flaky", retry=True)
            elif claim.spec.seed == 2 and claim.attempt == 1:
                ledger.release(claim)
            elif claim.spec.seed == 3:
                ledger.fail(claim, "hopeless", retry=False)
            else:
                ledger.diverge(claim, 7, result_of(claim.spec))
        ledger.export_csv(folder / "runs.csv")


class CrashError(Exception):
    pass


def _crash_at(number: int, end: Callable[[], None]) -> Callable[[str], None]:
    left = iter(range(number, -1, -1))

    def point(name: str) -> None:
        if next(left, -1) == 0:
            end()

    return point


def _raise() -> None:
    raise CrashError


def _work_and_exit(folder: Path, number: int) -> None:
    crash.point = _crash_at(number, lambda: os._exit(7))
    work(folder)


@pytest.mark.parametrize("how", ["raise", pytest.param("exit", marks=forking)])
def test_crash_around_every_durable_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    names: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(crash, "point", names.append)
        work(tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    assert [row[1] for row in expected] == ["done", "diverged", "diverged", "failed"]
    kinds = {name.split(":")[0] for name in names}
    assert kinds >= {"migrate", "add", "claim", "heartbeat", "finish", "diverge", "fail", "release"}
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        if how == "exit":
            process = PROCESSES.Process(target=_work_and_exit, args=(folder, number))
            process.start()
            process.join(60)
            assert process.exitcode == 7, name
        else:
            with monkeypatch.context() as patch:
                patch.setattr(crash, "point", _crash_at(number, _raise))
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
            "VALUES (?, ?, 1, 'digits', 'upgd', ?, 10)",
            (s.key, s.to_json(), s.seed),
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
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, *[STEP] * steps])
    if steps:
        with pytest.raises(LedgerError, match="older version"):
            Ledger.open(tmp_path, read_only=True)
        for number in range(1, 5):  # a crash on the way leaves the old version, whole
            with monkeypatch.context() as patch:
                patch.setattr(crash, "point", _crash_at(number, _raise))
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
    assert db.execute("PRAGMA user_version").fetchone() == (1 + steps,)
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
    with Ledger.open(tmp_path / "empty") as fresh:
        assert fresh.add(specs(1)) == (1, 0)


# ---- disks


def test_network_disks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "network_filesystem", lambda path: "nfs4")
    with pytest.raises(LedgerError, match=r"nfs4.*--study.*exclusive=True"):
        Ledger.open(tmp_path)
    with Ledger.open(tmp_path, exclusive=True) as ledger:
        ledger.add(specs(1))
        [claim] = ledger.claim("me", 60)
        ledger.finish(claim, result_of(claim.spec))
        monkeypatch.setattr("upgd.study.database.BUSY_SECONDS", 0.1)
        with pytest.raises(LedgerError, match="in use by another process"):
            Ledger.open(tmp_path, exclusive=True)
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite"]
    monkeypatch.setattr(disks, "network_filesystem", lambda path: None)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.counts()["done"] == 1


def test_the_deepest_mount_counts() -> None:
    mounts = disks.parse_mounts(
        "/dev/sda / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\n"
        "/dev/sdb /home/ann/local\\040disk xfs rw 0 0\nann@b: /mnt/b fuse.sshfs rw 0 0\nodd\n"
    )
    where = {
        "/home/ann/study": "nfs4",
        "/home": "nfs4",
        "/homes/ann": "ext4",
        "/home/ann/local disk/study": "xfs",
        "/mnt/b/x": "fuse.sshfs",
        "/": "ext4",
    }
    assert {path: disks.filesystem_of(path, mounts) for path in where} == where
    assert {"nfs4", "cifs", "smbfs", "9p", "fuse.sshfs"} <= disks.NETWORK


@contextlib.contextmanager
def read_only_study(before: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """A study with a done run in a folder that cannot be written, as a user who is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Ledger.open(folder) as ledger:
            ledger.add(specs(2))
            [claim] = ledger.claim("me", 60)
            ledger.finish(claim, result_of(claim.spec))
        if before:
            before(folder)
        root = os.geteuid() == 0
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        if root:
            os.seteuid(65534)
        try:
            if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
                pytest.skip("temporary folders are private here")
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


@posix
def test_read_only_folder(tmp_path: Path) -> None:
    with read_only_study() as folder:
        with pytest.raises(LedgerError, match="cannot be opened or written") as caught:
            Ledger.open(folder)
        assert "\n" not in str(caught.value)
        with pytest.raises(LedgerError, match="cannot use"):
            Ledger.open(folder / "new")
        with Ledger.open(folder, read_only=True) as ledger:
            assert [run.state for run in ledger.runs()] == ["done", "pending"]
            with pytest.raises(LedgerError, match="cannot be opened or written"):
                ledger.add(specs(3))
            assert ledger.counts()["done"] == 1
        with pytest.raises(StudyError, match="cannot write"):
            write_atomically(folder / "x", b"")


def _add_and_die(folder: Path) -> None:
    ledger = Ledger.open(folder)
    ledger.add(specs(5))
    os._exit(0)


@forking
@pytest.mark.parametrize("index", [True, False])
def test_read_only_folder_of_a_killed_process(index: bool) -> None:
    def kill(folder: Path) -> None:
        process = PROCESSES.Process(target=_add_and_die, args=(folder,))
        process.start()
        process.join(60)
        if not index:
            (folder / "ledger.sqlite-shm").unlink()

    with read_only_study(kill) as folder:
        if index:
            with Ledger.open(folder, read_only=True) as ledger:
                assert ledger.counts()["pending"] == 4
        else:
            with pytest.raises(LedgerError, match="copy the folder"):
                Ledger.open(folder, read_only=True)


def test_reading_beside_a_writer(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as writer:
        writer.add(specs(2))
        with Ledger.open(tmp_path, read_only=True) as reader:
            assert reader.counts()["pending"] == 2
            writer.add(specs(5))
            assert reader.counts()["pending"] == 5
            with pytest.raises(LedgerError):
                reader.claim("me", 60)
            assert len(writer.claim("me", 60, limit=9)) == 5


@contextlib.contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """What a full disk looks like: writes fail from some point on."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@posix
@pytest.mark.parametrize("room", [0, 40_000, 300_000])
def test_full_disk(tmp_path: Path, room: int) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs(50))
        claims = ledger.claim("me", 60, limit=50)
        ledger.finish(claims[0], result_of(claims[0].spec))
        finished = 1

        def finish_all() -> None:
            nonlocal finished
            for claim in claims[1:]:
                ledger.finish(claim, result_of(claim.spec, windows=5000))
                finished += 1

        with no_file_larger_than(room):
            with pytest.raises(LedgerError, match="the disk is full or failing") as caught:
                finish_all()
            assert "\n" not in str(caught.value)
            assert ledger.counts()["done"] == finished
            assert len(list(ledger.runs(state="done"))) == finished
            with pytest.raises(StudyError, match="cannot write"):
                write_atomically(tmp_path / "file", bytes(room + 1))
        assert not (tmp_path / "file").exists()
        for claim in claims[finished:]:
            ledger.finish(claim, result_of(claim.spec))
        assert ledger.counts()["done"] == 50
    check(tmp_path)


@posix
def test_full_disk_at_the_start(tmp_path: Path) -> None:
    with no_file_larger_than(0), pytest.raises(LedgerError, match="full or failing"):
        Ledger.open(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.add(specs(3)) == (3, 0)
    with no_file_larger_than(0), Ledger.open(tmp_path, read_only=True) as ledger:
        assert ledger.counts()["pending"] == 3


# ---- files


def test_a_failing_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def half(file: Any) -> None:
        file.write(b"ne")
        raise CrashError

    with pytest.raises(CrashError):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


dtypes = st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool", "U3"])
shapes = st.lists(st.integers(0, 3), max_size=3)
array_names = st.text(st.sampled_from("abw./_0ü"), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(array_names, st.tuples(dtypes, shapes), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.none()),
    st.data(),
)
def test_checkpoints_round_trip_and_notice_damage(
    kinds: dict[str, Any], meta: dict[str, Any], data: st.DataObject
) -> None:
    arrays = {name: np.ones(shape).astype(dtype) for name, (dtype, shape) in kinds.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.npz"
        save_checkpoint(path, arrays, meta)
        loaded, facts = load_checkpoint(path)
        assert facts == meta
        assert list(loaded) == list(arrays)
        for name, array in arrays.items():
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded[name], array)
        whole = path.read_bytes()
        save_checkpoint(path, arrays, meta)
        assert path.read_bytes() == whole
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert load_checkpoint_or_none(path) is None
        with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
            load_checkpoint(path)


def test_foreign_files_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    assert load_checkpoint_or_none(path) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_checkpoint(path)
    np.savez(path, w=np.ones(3))
    assert load_checkpoint_or_none(path) is None
    np.savez(path, **{"__meta__": np.array([{}], dtype=object)})
    assert load_checkpoint_or_none(path) is None
    save_checkpoint(path, {"file": np.ones(3), "w": np.zeros(1000)}, {})
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    path.write_bytes(flipped)
    assert load_checkpoint_or_none(path) is None
    for arrays in ({"w": np.array([{}], dtype=object)}, {"__meta__": np.ones(1)}):
        with pytest.raises(ValueError, match="array"):
            save_checkpoint(path, arrays, {})
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(path, {}, {"x": object()})
